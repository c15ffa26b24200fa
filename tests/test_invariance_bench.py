"""`bench.py invariance`: its rows on the CPU with small sizes, and its peer's kernels."""

from __future__ import annotations

import importlib
import sys
from fnmatch import fnmatchcase

import pytest
import torch
import torch.nn.functional as F

import torchweld
import torchweld_bench
from torchweld.tuning.timer import interleaved
from torchweld_bench import attention_decode, cases, int4, invariance, results
from torchweld_bench.common import installed

transformers = pytest.importorskip("transformers")

LLAMA = {
    **invariance.LLAMA,
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
SIZES = {
    "_DEVICE": "cpu",
    "_ROUNDS": 2,
    "_MODEL_ROUNDS": 2,
    "_ROWS": (1, 16, 64, 128, 256),
    "_LINEAR": ((64, 48),),
    "_PREFILL": ((2, 4, 2, 24, 16),),
    "_DECODE": ((2, 4, 2, 24, 16),),
    "_INT4": (256, 24),
    "_EXPERTS": (24, 32, 16, 4, 2),
    "_STEP": (2, 16),
    "_BATCHES": (2,),
    "_PROMPT": 8,
    "_TOKENS": 12,
    "LLAMA": LLAMA,
}
NAME = "batch_invariant_ops"
PACKAGE = """
import torch

def matmul_persistent(a, b):
    calls.append("product")
    return a @ b

def enable_batch_invariant_mode():
    calls.append("on")

def disable_batch_invariant_mode():
    calls.append("off")

calls = []
"""


def on_cpu(calls, *, device, rounds, warmup=3):
    return interleaved(calls, device="cpu", rounds=rounds, warmup=warmup)


def each_route(x, gate_up, down, index, weight):
    """The experts of a layer; F.grouped_mm's offsets need a histogram that the CPU lacks."""
    gate, up = torch.einsum("tknh,th->tkn", gate_up[index], x).chunk(2, -1)
    return torch.einsum("tkhn,tkn,tk->th", down[index], F.silu(gate) * up, weight)


def has_run(name, call):
    call()
    return True


@pytest.fixture
def small(monkeypatch):
    """The CPU, small sizes, and calls in the place of CUDA graphs."""
    for name, value in SIZES.items():
        monkeypatch.setattr(invariance, name, value)
    for module, name in ((attention_decode, "_BYTES"), (int4, "_DECODE_BYTES")):
        monkeypatch.setattr(module, name, 8 << 10)  # a few caches or weights
    for module in (cases, invariance):
        monkeypatch.setattr(module, "interleaved", on_cpu)
    monkeypatch.setattr(cases, "in_turn", lambda calls, times: calls[0])
    monkeypatch.setattr(invariance, "captured", lambda calls: calls)
    monkeypatch.setattr(invariance, "runs", has_run)
    monkeypatch.setattr(invariance, "grouped_mm", each_route)


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A stand-in for batch_invariant_ops; returns its module."""
    on_path(monkeypatch, tmp_path, PACKAGE)
    return importlib.import_module(NAME)


@pytest.fixture
def no_package(monkeypatch, tmp_path):
    """A package that can't be imported, whatever is installed."""
    on_path(monkeypatch, tmp_path, "raise ImportError('not there')\n")


def on_path(monkeypatch, folder, text):
    (folder / f"{NAME}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    monkeypatch.setattr(invariance, "installed", installed.__wrapped__)


@pytest.fixture(autouse=True)
def not_left_behind():
    yield
    sys.modules.pop(NAME, None)


def test_every_target_is_of_a_row(small, package):
    """All answers are right, and every row but those over the package is over the default."""
    names = set()
    for row in invariance.rows():
        assert isinstance(row, results.Row) and row.ratio is not None, row
        over = row.case.endswith(f" over {NAME}")
        assert row.against == (NAME if over else "default choice")
        case = row.case.replace("step (2, 16)", "step (2, 4096)")
        names.add(case.replace("12 tokens", "64 tokens"))
    for target in results.load_targets(torchweld_bench._TARGETS, "invariance"):
        assert any(fnmatchcase(name, target) for name in names), target
    assert {"on", "off", "product"} == set(package.calls)
    assert package.calls.count("on") == package.calls.count("off")


def test_ours_alone_runs_in_the_mode(small):
    modes = []
    for each in invariance._both(lambda: modes.append(torchweld.is_batch_invariant())).values():
        each()
    assert modes == [True, False]
    model = invariance._llama(torch.float32).eval()
    modes = {}

    def note(name):
        modes[name] = torchweld.is_batch_invariant()

    for name, fused in invariance._fused(model).items():
        fused.lm_head.register_forward_hook(lambda *_, name=name: note(name))
        fused(torch.ones(1, 4, dtype=torch.int64))
    assert modes == {"ours": True, "default choice": False}


def test_without_the_package(small, no_package, capsys):
    rows = [*invariance._linear(3, 64, 48), *invariance._training_step(2, 16)]
    assert [list(row.peers_us) for row in rows] == [["default choice"]] * 2
    assert f"{NAME}.matmul_persistent is left out: ImportError" in capsys.readouterr().err


def test_a_failure_leaves_the_others_and_ends_the_mode(small, package, monkeypatch):
    def product(*_):
        raise ValueError("no kernel\nmore")

    monkeypatch.setattr(package, "matmul_persistent", product)
    monkeypatch.setattr(invariance, "_ROWS", (3,))
    monkeypatch.setattr(invariance, "_BATCHES", ())
    failure, *others = invariance.rows()
    assert failure == results.Failure("linear (3, 64, 48)", "ValueError: no kernel")
    assert len(others) > 3 and all(isinstance(row, results.Row) for row in others)
    with pytest.raises(ZeroDivisionError), invariance._public_mode():
        raise ZeroDivisionError
    assert package.calls[-1] == "off"
