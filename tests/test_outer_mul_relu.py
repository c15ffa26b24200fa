"""outer_mul_relu and its gradient against float64; exact on integer grids."""

from __future__ import annotations

import pytest
import torch

from matrices import SIZES, grid, matrix_args
from numerics import assert_equal
from samples import F16, dtypes, forward_backward

OP = "outer_mul_relu"
OPS = (OP, OP + "_backward")
outer_mul_relu = torch.ops.torchweld.outer_mul_relu
outer_mul_relu_backward = torch.ops.torchweld.outer_mul_relu_backward


@pytest.mark.parametrize("size", [*SIZES, (300, 4100)], ids=str)
def test_integer_grid_is_exact(device, size):
    """Zeros are many: the slope at a product of 0 is 0."""
    x, y, dz = grid(size[1]), grid(size[0]), grid(*size)
    product = x * y[:, None]
    g = torch.where(product > 0, dz, 0)
    for dtype in dtypes(device):
        args = [t.to(dtype).to(device) for t in (x, y)]
        out, grads = forward_backward(OP, args, {}, dz.to(args[0]))
        assert_equal(out, product.clamp(min=0).to(dtype).to(device))
        assert_equal(grads[0], (g * y[:, None]).sum(0).to(dtype).to(device))
        assert_equal(grads[1], (g * x).sum(1).to(dtype).to(device))


def test_the_product_is_rounded_once(device):
    for dtype in dtypes(device):
        x, y = matrix_args(OP, device, dtype, 37, 1029)
        assert_equal(outer_mul_relu(x, y), torch.relu(x * y[:, None]))


def test_the_slope_is_that_of_the_product_before_it_is_rounded(device):
    """2^-30 is 0 in float16, and so is z; the gradient sees that the product is above 0."""
    x = torch.full((9,), 2.0**-15, dtype=F16, device=device)
    y = torch.full((5,), 2.0**-15, dtype=F16, device=device)
    dz = torch.ones(5, 9, dtype=F16, device=device)
    assert (outer_mul_relu(x, y) == 0).all()
    dx, dy = outer_mul_relu_backward(dz, x, y)
    assert_equal(dx, torch.full_like(x, 5 * 2.0**-15))
    assert_equal(dy, torch.full_like(y, 9 * 2.0**-15))
