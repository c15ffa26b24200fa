"""mul_relu and its gradient against float64; exact on integer grids."""

from __future__ import annotations

import math

import pytest
import torch

from matrices import grid, matrix_args
from numerics import assert_equal, assert_same_bits
from samples import BF16, F16, dtypes
from tensors import randn

OP = "mul_relu"
OPS = (OP, OP + "_backward")
mul_relu = torch.ops.torchweld.mul_relu
mul_relu_backward = torch.ops.torchweld.mul_relu_backward


# On CUDA a tile has 2048 columns in 16 bits and 1024 in float32.
TILED_ROWS = [(5, 1024), (5, 2048), (5, 2056), (3, 4096), (2, 8200), (2, 16384), (300, 16400)]


@pytest.mark.parametrize("size", TILED_ROWS, ids=str)
def test_rows_of_several_tiles(device, size):
    """The last columns count, gaps between rows do not, and the sums have the same bits again."""
    x, y, dz = (t.to(device) for t in (grid(*size), grid(size[0]), grid(*size)))
    g = torch.where(x * y[:, None] > 0, dz, 0)
    for dtype in dtypes(device):
        wide = [torch.full((size[0], size[1] + 8), math.nan, dtype=dtype, device=device)]
        wide.append(wide[0].clone())
        for to, values in zip(wide, (dz, x), strict=True):
            to[:, :-8] = values
        args = [wide[0][:, :-8], wide[1][:, :-8], y.to(dtype)]
        dx, dy = mul_relu_backward(*args)
        assert_equal(dx, (g * y[:, None]).to(dtype))
        assert_equal(dy, (g * x).sum(1).to(dtype))
        args[0] = randn(device, dtype, *size)
        assert_same_bits(mul_relu_backward(*args)[1], mul_relu_backward(*args)[1])


def test_the_slope_is_that_of_the_product_before_it_is_rounded(device):
    """2^-30 is 0 in float16, and so is z; the gradient sees that the product is above 0."""
    x = torch.full((5, 9), 2.0**-15, dtype=F16, device=device)
    y = torch.full((5,), 2.0**-15, dtype=F16, device=device)
    assert (mul_relu(x, y) == 0).all()
    dx, dy = mul_relu_backward(torch.ones_like(x), x, y)
    assert_equal(dx, x)
    assert_equal(dy, torch.full_like(y, 9 * 2.0**-15))


def test_rows_do_not_depend_on_their_neighbours(device):
    for dtype in dtypes(device):
        x, y = matrix_args(OP, device, dtype, 6, 1025)
        dz = randn(device, dtype, 6, 1025)
        before = [mul_relu(x, y), *mul_relu_backward(dz, x, y)]
        x[2], y[4] = math.nan, math.inf
        after = [mul_relu(x, y), *mul_relu_backward(dz, x, y)]
        for got, ref in zip(after, before, strict=True):
            for row in (0, 1, 3, 5):
                assert_same_bits(got[row], ref[row])


def test_more_than_2_31_elements(device):
    if device == "cpu":
        pytest.skip("takes 13 GiB and long on a CPU")
    rows, cols = 3, 715827885  # offset 2^31 is in the last row, whose start is misaligned
    x = torch.ones(rows, cols, dtype=BF16, device=device)
    x[:, -1] = -1.0
    y = torch.tensor([1.0, 2.0, 4.0], dtype=BF16, device=device)
    z = mul_relu(x, y)
    assert_equal(z[:, -2:], torch.stack([y, torch.zeros_like(y)], 1))
    assert_equal(z[2, :-1].amin(), y[2])
    dx, dy = mul_relu_backward(z, x, y)
    assert_equal(dx[:, -2:], torch.stack([y * y, torch.zeros_like(y)], 1))
    # Sums of a power of two: within their roundings of cols - 1 times it.
    torch.testing.assert_close(dy.double(), y.double() * (cols - 1), rtol=2.0**-8, atol=0.0)
