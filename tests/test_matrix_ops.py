"""Properties of every op on a (rows, cols) matrix: outer_add, outer_mul_relu and mul_relu."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given

from matrices import (
    EMPTY,
    MATRIX_OPS,
    SIZES,
    eager_gradients,
    grid,
    in_nan,
    matrix_args,
    special_places,
)
from numerics import assert_equal, assert_same_bits, assert_same_nonfinite
from reference import EAGER
from samples import call, check_op, dtypes, forward_backward
from strategies import dtype_names, layouts, seeds, sizes, strided, values
from tensors import randn

pytestmark = pytest.mark.parametrize("op", MATRIX_OPS)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(op, device, dtype, size):
    check_op(op, matrix_args(op, device, dtype, *size))


@pytest.mark.parametrize("size", [*SIZES, (300, 4100)], ids=str)
def test_integer_grid_is_exact(op, device, size):
    """Zeros are many: relu's slope at a product of 0 is 0."""
    rows, cols = size
    x = grid(*size) if op == "mul_relu" else grid(cols)
    y, dz = grid(rows), grid(*size)
    if op == "outer_add":
        z, dx, dy = x + y[:, None], dz.sum(0), dz.sum(1)
    else:
        product = x * y[:, None]
        g = torch.where(product > 0, dz, 0)
        z, dx, dy = product.clamp(min=0), g * y[:, None], (g * x).sum(1)
        dx = dx if op == "mul_relu" else dx.sum(0)
    for dtype in dtypes(device):
        args = [t.to(dtype).to(device) for t in (x, y)]
        out, grads = forward_backward(op, args, {}, dz.to(args[0]))
        assert_equal((out, *grads), [expected.to(dtype).to(device) for expected in (z, dx, dy)])


def test_the_result_is_rounded_once(op, device):
    for dtype in dtypes(device):
        args = matrix_args(op, device, dtype, 37, 1029)
        assert_equal(call(op)(*args), EAGER[op](*args))


@pytest.mark.parametrize("size", [(65537, 2), (131101, 1), (2, 65537), (1, 131101)], ids=str)
def test_long_sides(op, device, size):
    for dtype in dtypes(device):
        check_op(op, matrix_args(op, device, dtype, *size))


@pytest.mark.parametrize("size", EMPTY, ids=str)
def test_empty(op, device, size):
    """A sum over nothing is 0."""
    for dtype in dtypes(device):
        args = matrix_args(op, device, dtype, *size)
        out, grads = forward_backward(op, args, {})
        assert out.shape == size
        assert_equal(grads, [torch.zeros_like(arg) for arg in args])


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("size", [(2, 3), (7, 65), (33, 515)], ids=str)
def test_inf_and_nan_spread_as_in_torch(op, device, special, size):
    for dtype in dtypes(device):
        for which in range(3):
            args, dz = matrix_args(op, device, dtype, *size), randn(device, dtype, *size)
            tensors = [*args, dz]
            shape = tensors[which].shape
            tensors[which] = special_places(device, dtype, shape.numel(), special).view(shape)
            *args, dz = tensors
            out, grads = forward_backward(op, args, {}, dz)
            expected = EAGER[op](*args)
            assert_same_nonfinite(out, expected)
            for got, ref in zip(grads, eager_gradients(EAGER[op], dz, args), strict=True):
                assert_equal(got.isnan(), ref.isnan())


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize("size", [(5, 9), (9, 64), (37, 515), (3, 1024)], ids=str)
def test_nan_around_the_inputs_is_not_read(op, device, size, offset):
    for dtype in dtypes(device):
        args, dz = matrix_args(op, device, dtype, *size), randn(device, dtype, *size)
        out, grads = forward_backward(op, args, {}, dz)
        moved = [in_nan(t, offset + i) for i, t in enumerate(args)]
        got, got_grads = forward_backward(op, moved, {}, in_nan(dz, offset))
        assert_same_bits(got, out)
        # Other boundaries may add in another order.
        torch.testing.assert_close(got_grads, grads)


@given(rows=sizes(65), cols=sizes(129), layout=layouts(2), dtype=dtype_names, seed=seeds)
def test_any_layout(op, rows, cols, layout, dtype, seed):
    dtype = getattr(torch, dtype)
    shapes = [tuple(t.shape) for t in matrix_args(op, "cpu", dtype, rows, cols)]
    x, y, dz = (
        values(shape, "normal", seed + i).to(dtype)
        for i, shape in enumerate([*shapes, (rows, cols)])
    )
    x_layout = layout if x.dim() == 2 else ((0,), (1 + seed % 3,), seed % 5)
    args = [strided(x, x_layout), strided(y, ((0,), (2,), 1))]
    check_op(op, args, dout=strided(dz, layout), eager=False)
