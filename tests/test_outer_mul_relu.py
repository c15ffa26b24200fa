"""outer_mul_relu and its gradient against float64; exact on integer grids."""

from __future__ import annotations

import torch

from numerics import assert_equal
from samples import F16

OP = "outer_mul_relu"
OPS = (OP, OP + "_backward")
outer_mul_relu = torch.ops.torchweld.outer_mul_relu
outer_mul_relu_backward = torch.ops.torchweld.outer_mul_relu_backward


def test_the_slope_is_that_of_the_product_before_it_is_rounded(device):
    """2^-30 is 0 in float16, and so is z; the gradient sees that the product is above 0."""
    x = torch.full((9,), 2.0**-15, dtype=F16, device=device)
    y = torch.full((5,), 2.0**-15, dtype=F16, device=device)
    dz = torch.ones(5, 9, dtype=F16, device=device)
    assert (outer_mul_relu(x, y) == 0).all()
    dx, dy = outer_mul_relu_backward(dz, x, y)
    assert_equal(dx, torch.full_like(x, 5 * 2.0**-15))
    assert_equal(dy, torch.full_like(y, 9 * 2.0**-15))
