"""`bench.py encoders`: its rows on the CPU with small sizes."""

from __future__ import annotations

import pytest

import torchweld
import torchweld_bench
from torchweld_bench import encoders, models, results
from torchweld_bench.common import installed

transformers = pytest.importorskip("transformers")

LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2}
SIZES = {"hidden_size": 32, "intermediate_size": 48, **LAYERS}
IMAGE = {"image_size": 32, "patch_size": 8}
SMALL = {
    "SiglipVisionModel": {**SIZES, **IMAGE},
    "ViTModel": {**SIZES, **IMAGE},
    "vit_large_patch16_224": {"img_size": 32, "embed_dim": 32, "num_heads": 2, "depth": 2},
    "BertForMaskedLM": {**SIZES, "vocab_size": 61},
    "T5ForConditionalGeneration": {
        **{"vocab_size": 61, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2},
        "num_heads": 2,
    },
    "WhisperForConditionalGeneration": {
        **{"vocab_size": 61, "num_mel_bins": 8, "d_model": 32, "max_source_positions": 12},
        **{"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48},
        **{"decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 48},
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    },
    "Qwen3_5TextModel": {
        **{**SIZES, "vocab_size": 61, "num_hidden_layers": 4, "num_key_value_heads": 1},
        **{"head_dim": 16, "linear_num_key_heads": 1, "linear_num_value_heads": 2},
        **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    },
    "Gemma4TextModel": {
        **{**SIZES, "vocab_size": 61, "num_hidden_layers": 6, "num_key_value_heads": 1},
        **{"head_dim": 16, "global_head_dim": 32},
    },
}


@pytest.fixture
def labels(monkeypatch):
    """The large labels by the small ones, of cases that run on the CPU."""
    monkeypatch.setattr(encoders, "_DEVICE", "cpu")
    monkeypatch.setattr(encoders, "_BACKEND", "eager")
    monkeypatch.setattr(encoders, "_ROUNDS", 2)
    large = encoders._CASES
    small = [
        case._replace(batch=2, seqlen=16, sizes={**case.sizes, **SMALL[case.model]})
        for case in large
    ]
    monkeypatch.setattr(encoders, "_CASES", small)
    return {new.label: old.label for new, old in zip(small, large, strict=True)}


def is_missing(case):
    """Whether the case's library has no such model."""
    timm = case.model.startswith("vit_")
    return installed(*(("timm", "create_model") if timm else ("transformers", case.model))) is None


def test_every_target_is_of_a_row(labels, monkeypatch):
    """All cases are measured, ours runs torchweld's ops, and the losses agree."""
    reports, fuse = [], torchweld.fuse
    monkeypatch.setattr(torchweld, "fuse", lambda *a, **b: reports.append(fuse(*a, **b)))
    left_out = {labels[case.label] for case in encoders._CASES if is_missing(case)}
    found = set()
    for row in encoders.rows():
        assert isinstance(row, results.Row) and row.ratio is not None, row
        label = row.case.partition(" over ")[0]
        found.add(row.case.replace(label, labels[label]))
    assert set(labels.values()) - found == left_out
    assert len(reports) == len(labels) - len(left_out) and all(report.ops for report in reports)
    wanted = results.load_targets(torchweld_bench._TARGETS, "encoders").keys()
    assert {each for each in wanted if each.partition(" over ")[0] not in left_out} <= found


def test_a_wrong_result_has_no_ratio(labels, monkeypatch):
    """The loss against a target shows an error that the bare result would hide."""

    def fuse(model, **options):
        model.post_layernorm.forward = lambda x: (
            1.2 * type(model.post_layernorm).forward(model.post_layernorm, x)
        )

    monkeypatch.setattr(torchweld, "fuse", fuse)
    over_stock, _ = encoders._rows_of(encoders._CASES[0])
    assert over_stock.ratio is None and 0.01 < over_stock.error < 1


def test_missing_models_and_failures_leave_the_others(labels, monkeypatch, capsys):
    first, second, *_ = encoders._CASES
    cases = [first._replace(model="NoSuchModel"), second._replace(sizes={"image_size": "none"})]
    monkeypatch.setattr(encoders, "_CASES", [*cases, second])
    failure, *rows = encoders.rows()
    assert isinstance(failure, results.Failure) and failure.case == second.label
    assert [row.against for row in rows] == [models.STOCK, models.COMPILED]
    assert "transformers.NoSuchModel is left out: " in capsys.readouterr().err
