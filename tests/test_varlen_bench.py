"""`bench.py varlen`: the lengths that it packs, and its rows on the CPU with small sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import torchweld_bench
from torchweld.compat import flash_attn
from torchweld_bench import results, varlen


@pytest.mark.parametrize("tokens", [19, 4096, 16384])
def test_lengths_fill_the_tokens(tokens):
    lengths = varlen.log_normal_lengths(tokens)
    assert sum(lengths) == tokens
    assert all(20 <= length <= 4000 for length in lengths[:-1]) and lengths[-1] > 0
    assert lengths == varlen.log_normal_lengths(tokens)


def test_share_of_documents():
    assert varlen._live([256]) == 1
    assert varlen._live([128, 128]) == 4 / 6


def varlen_attn(q, k, v, ends_q, ends_k, longest_q, longest_k, *, window_size):
    return flash_attn.flash_attn_varlen_func(q, k, v, ends_q, ends_k, window_size=window_size)


def fa4(q, k, v, **options):
    return flash_attn.flash_attn_varlen_func(q, k, v, **options), None


def create_block_mask(seen, batch, heads, rows, keys, device):
    return seen(None, None, torch.arange(rows)[:, None], torch.arange(keys))


def flex_attention(q, k, v, block_mask):
    return F.scaled_dot_product_attention(q, k, v, block_mask)


PEERS = {
    "varlen_attn": varlen_attn,
    "flash_attn_varlen_func": fa4,
    "create_block_mask": create_block_mask,
    "flex_attention": flex_attention,
}


def few_lengths(tokens, seed=0):
    """More documents from one seed to the next."""
    return [8] * (seed + 1) + [tokens - 8 * (seed + 1)]


@pytest.fixture
def small(monkeypatch):
    """The CPU, small sizes, and stand-ins for the peers, which need a GPU."""
    sizes = {"_TOKENS": 96, "_HEADS": 2, "_DIM": 16, "_DOCUMENT": 32, "_ROUNDS": 2, "_BATCHES": 3}
    sizes |= {"_STEP_TOKENS": 64, "_DEVICE": "cpu", "_BACKEND": "eager"}
    for name, value in sizes.items():
        monkeypatch.setattr(varlen, name, value)
    llama = {**varlen._LLAMA, "vocab_size": 50, "hidden_size": 16, "intermediate_size": 16}
    llama |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    monkeypatch.setattr(varlen, "_LLAMA", llama)
    monkeypatch.setattr(varlen, "installed", lambda module, name: PEERS[name])
    monkeypatch.setattr(varlen, "log_normal_lengths", few_lengths)


def test_every_target_is_of_a_row(small):
    """All rows are measured, and their answers are right."""
    cases = set()
    for row in varlen.rows():
        assert isinstance(row, results.Row) and row.ratio is not None, row
        case = row.case.replace("(96, 2, 16)", "(16384, 16, 128)").replace("of 32", "of 512")
        cases.add(case.replace("of 1 layers", "of 4 layers").replace("(1, 64)", "(1, 8192)"))
    assert results.load_targets(torchweld_bench._TARGETS, "varlen").keys() <= cases


def test_without_peers(small, monkeypatch):
    monkeypatch.setattr(varlen, "installed", lambda module, name: None)
    found = list(varlen._rows_of("documents of 32", [32, 64], False))
    assert [row.against for row in found] == ["one sequence"] * 2


def test_a_step_that_recompiles_is_a_failure(small, monkeypatch):
    monkeypatch.setattr(torch._dynamo, "mark_dynamic", lambda *a: None)
    (failure,) = varlen._step_rows()
    assert isinstance(failure, results.Failure) and "ecompil" in failure.reason
