"""The benchmark rows of 4-bit models, with tiny sizes on the CPU."""

from __future__ import annotations

import pytest
import torch

from torchweld_bench import _TARGETS, int4, quantise
from torchweld_bench.results import load_targets, target_of


def test_rows_of_a_model():
    """Times are not judged: the limits are those of a GPU, the bytes are the same everywhere."""
    pytest.importorskip("accelerate")
    targets = load_targets(_TARGETS, "quantise")
    shape = quantise.Shape("tiny", 128, 128, 128, 1, 16)
    rows = {row.case: row for row in quantise.model_rows(shape, "cpu")}
    assert list(rows) == [
        "quantise rtn tiny on cpu",
        "quantised tiny on cpu, bytes a weight",
        "quantise mse tiny on cpu",
        "quantise hqq tiny on cpu",
        "load quantised tiny on cpu",
    ]
    assert all(row.ratio is not None and target_of(row, targets) == 1.0 for row in rows.values())
    bytes_a_weight = rows["quantised tiny on cpu, bytes a weight"]
    # One group a row: a scale of 2 bytes and a word with its zero.
    assert bytes_a_weight.ours_us == round(0.5 + 6 / 128, 2) and not bytes_a_weight.falls_short


def test_rows_of_the_gradient():
    rows = list(int4.gradient_rows(3, 128, 24, torch.float32, "cpu"))
    assert [row.against for row in rows] == ["cublas", "the forward"]
    assert rows[0].case == "int4 dx (3, 128, 24) float32"
    assert rows[0].error <= 3 * rows[0].eager_error + 1e-6
    assert all(row.ratio is not None for row in rows)
