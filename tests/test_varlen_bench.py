"""The lengths of documents that `bench.py varlen` packs."""

from __future__ import annotations

import pytest

from torchweld_bench.varlen import log_normal_lengths


@pytest.mark.parametrize("tokens", [19, 4096, 16384])
def test_lengths_fill_the_tokens(tokens):
    lengths = log_normal_lengths(tokens)
    assert sum(lengths) == tokens
    assert all(20 <= length <= 4000 for length in lengths[:-1]) and lengths[-1] > 0
    assert lengths == log_normal_lengths(tokens)
