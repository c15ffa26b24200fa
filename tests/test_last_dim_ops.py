"""Properties of the ops along the last dim of a tensor of any rank: row_sum and softmax."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from numerics import assert_equal, assert_same_bits
from samples import call, check_op, dtypes
from strategies import dtype_names, kinds, layouts, seeds, sizes, strided, values
from tensors import randn

EAGER = {"row_sum": lambda x: torch.sum(x, -1), "softmax": lambda x: torch.softmax(x, -1)}

pytestmark = pytest.mark.parametrize("op", EAGER)


@pytest.mark.parametrize("shape", [(1,), (17,), (2, 3, 5), (2, 1, 3, 1, 4), (3, 1), (1, 1, 1)])
def test_rank(op, device, shape):
    for dtype in dtypes(device):
        check_op(op, [randn(device, dtype, *shape)])


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0), (2, 0, 3), (0, 0), (2, 3, 0), (0, 65, 33)])
def test_empty(op, device, shape):
    """A sum of no columns is 0; no rows give nothing."""
    for dtype in dtypes(device):
        x = torch.empty(shape, dtype=dtype, device=device, requires_grad=True)
        y = call(op)(x)
        assert_equal(y.detach(), EAGER[op](x.detach()))
        y.sum().backward()
        assert_equal(x.grad, torch.empty_like(x))


@given(
    shape=sizes(129).flatmap(lambda n: layouts(3).map(lambda layout: (n, layout))),
    rows=sizes(33),
    outer=sizes(5),
    kind=kinds,
    dtype=dtype_names,
    seed=seeds,
)
def test_any_layout(op, shape, rows, outer, kind, dtype, seed):
    n, layout = shape
    x = values((outer, rows, n), kind, seed).to(getattr(torch, dtype))
    check_op(op, [x], backward=False)
    check_op(op, [strided(x, layout)], backward=False)
    if op == "softmax":
        assert_same_bits(call(op)(strided(x, layout)), call(op)(x))
