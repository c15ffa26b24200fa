"""The CPU's results do not depend on the number of threads, where sums are rounded to 16 bits.

Each call has a sum of some 40,000 terms that is one result: the work that torch shares among
threads by cutting the sum itself.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from numerics import assert_equal
from samples import BF16, F16, Maker, as_tuple, call, forward_backward

LONG = 40_001  # beyond torch's grain of 32,768
SEEDS = 4
THREADS = (1, 2, 8)


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# op, a name, and the arguments from a Maker
CALLS = [
    ("row_sum", "vector", lambda m: [m.randn(LONG)]),
    ("row_sum", "row", lambda m: [m.randn(1, LONG)]),
    ("row_sum", "stepped", lambda m: [m.randn(LONG, 3)[:, 1]]),
    ("outer_add", "column", lambda m: [m.randn(1), m.randn(LONG)]),
    ("outer_add", "row", lambda m: [m.randn(LONG), m.randn(1)]),
    ("outer_mul_relu", "column", lambda m: [m.randn(1), m.randn(LONG)]),
    ("outer_mul_relu", "row", lambda m: [m.randn(LONG), m.randn(1)]),
    ("mul_relu", "row", lambda m: [m.randn(1, LONG), m.randn(1)]),
    ("linear", "rows", lambda m: [m.randn(LONG, 3), m.randn(1, 3), m.randn(1)]),
    ("linear", "columns", lambda m: [m.randn(1, LONG), m.randn(1, LONG, std=0.01), m.randn(1)]),
    (
        "layer_norm_linear",
        "rows",
        lambda m: [m.randn(LONG, 2), m.randn(1, 2), m.randn(1), m.randn(2), m.randn(2)],
    ),
    ("layer_norm_linear", "columns", lambda m: [m.randn(1, LONG), m.randn(1, LONG, std=0.01)]),
    (
        "rms_norm_linear",
        "rows",
        lambda m: [m.randn(LONG, 1), m.randn(1, 1), m.randn(1), m.randn(1)],
    ),
    ("rms_norm_linear", "columns", lambda m: [m.randn(1, LONG), m.randn(1, LONG, std=0.01)]),
    ("gated_linear", "rows", lambda m: [m.randn(LONG, 3), m.randn(2, 3), m.randn(2)]),
    ("softmax", "row", lambda m: [m.randn(1, LONG)]),
    ("causal_softmax", "row", lambda m: [m.randn(1, LONG)]),
    ("softmax_matmul", "row", lambda m: [m.randn(1, 1, 1, LONG), m.randn(1, 1, LONG, 1)]),
    (
        "attention",
        "row",
        lambda m: [m.randn(1, 1, 1, 2), m.randn(1, 1, LONG, 2), m.randn(1, 1, LONG, 1)],
    ),
    ("bmm", "dot", lambda m: [m.randn(1, 1, LONG), m.randn(1, LONG, 1, std=0.01)]),
    ("conv2d", "weight", lambda m: [m.randn(1, 257, 256), m.randn(1, 1)]),
    ("scalar_attention", "vector", lambda m: [m.randn(300), m.randn(300), m.randn(300)]),
]
PARAMS = [pytest.param(op, build, id=f"{op}-{name}") for op, name, build in CALLS]


def results(op: str, args: list[Tensor], threads: int) -> list[Tensor]:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    out = as_tuple(call(op)(*args))[0]
    dout = torch.randn(out.shape).to(out.dtype)
    return [out, *(g for g in forward_backward(op, args, {}, dout)[1] if g is not None)]


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(("op", "build"), PARAMS)
def test_many_threads_round_as_one_does(op, build, dtype):
    """Threads may add in another order in fp32: that turns a result in a hundred by one rounding.
    Where their parts are rounded to 16 bits, it is one in three, by more.
    """
    different, count = [0] * len(THREADS), 0
    for seed in range(SEEDS):
        args = build(Maker("cpu", dtype, seed))
        one = results(op, args, 1)
        for i, threads in enumerate(THREADS[1:]):
            for got, ref in zip(results(op, args, threads), one, strict=True):
                step = 2 * torch.finfo(dtype).eps
                torch.testing.assert_close(got, ref, rtol=step, atol=step * 1e-3)
                if ref.numel() < 8:
                    different[i] += int((got != ref).sum())
                else:
                    assert (got != ref).float().mean() < 0.02
        count += sum(ref.numel() for ref in one if ref.numel() < 8)
    assert max(different) <= max(1, count // 50), f"{different} of {count} results differ"


def integers(*shape: int) -> Tensor:
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_sums_of_integers_are_rounded_once(threads, dtype):
    torch.set_num_threads(threads)
    ops = torch.ops.torchweld
    for row in integers(40, LONG).to(dtype):
        expected = row.double().sum().to(dtype)
        assert_equal(ops.row_sum(row), expected, "row_sum")
        assert_equal(ops.row_sum(row[None]), expected[None], "row_sum")
        assert_equal(ops.outer_add_backward(row[None])[1], expected[None], "outer_add dy")
        assert_equal(ops.outer_add_backward(row[:, None])[0], expected[None], "outer_add dx")
    bias = torch.zeros(1, dtype=dtype, requires_grad=True)
    for dy in integers(10, LONG, 1).to(dtype):
        x, weight = torch.zeros(LONG, 2, dtype=dtype), torch.zeros(1, 2, dtype=dtype)
        (dbias,) = torch.autograd.grad(ops.linear(x, weight, bias), bias, dy)
        assert_equal(dbias, dy.double().sum(0).to(dtype), "linear dbias")


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("shape", [(200, LONG), (3, 5, 9000), (7, LONG), (1, LONG + 1)], ids=str)
def test_rows_of_any_shape(threads, shape):
    torch.set_num_threads(threads)
    x = integers(*shape).to(BF16)
    for t in (x, x.transpose(0, -1).contiguous().transpose(0, -1), x[..., ::2]):
        assert_equal(torch.ops.torchweld.row_sum(t), t.double().sum(-1).to(BF16))
