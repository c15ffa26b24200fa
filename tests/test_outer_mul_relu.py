"""outer_mul_relu and its gradient against float64; exact on integer grids."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given

from matrices import EMPTY, SIZES, eager_gradients, grid, in_nan, special_places
from numerics import assert_equal, assert_same_bits
from reference import EAGER
from refusals import case_params, cases
from samples import BF16, F16, F32, F64, check_op, dtypes, forward_backward, need_kernel
from strategies import dtype_names, layouts, seeds, sizes, strided, values

OP = "outer_mul_relu"
OPS = (OP, OP + "_backward")
outer_mul_relu = torch.ops.torchweld.outer_mul_relu
outer_mul_relu_backward = torch.ops.torchweld.outer_mul_relu_backward


@pytest.fixture(autouse=True)
def _kernel(request):
    if "device" in request.fixturenames:
        need_kernel(OP, request.getfixturevalue("device"))


def randn(device: str, dtype: torch.dtype, *shape: int):
    return torch.randn(*shape, dtype=F64).to(dtype).to(device)


def call_args(device, dtype, rows, cols):
    return [randn(device, dtype, cols), randn(device, dtype, rows)]


@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(device, dtype, size):
    if dtype not in dtypes(device):
        pytest.skip(f"{dtype} is CPU only")
    check_op(OP, call_args(device, dtype, *size))


@pytest.mark.parametrize("size", [(65537, 2), (131101, 1), (2, 65537), (1, 131101)], ids=str)
def test_long_sides(device, size):
    for dtype in dtypes(device):
        check_op(OP, call_args(device, dtype, *size))


@pytest.mark.parametrize("size", EMPTY, ids=str)
def test_empty(device, size):
    """A sum over nothing is 0."""
    for dtype in dtypes(device):
        args = call_args(device, dtype, *size)
        out, grads = forward_backward(OP, args, {})
        assert out.shape == size
        for grad, arg in zip(grads, args, strict=True):
            assert_equal(grad, torch.zeros_like(arg))


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
        x, y = call_args(device, dtype, 37, 1029)
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


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("size", [(2, 3), (7, 65), (33, 515)], ids=str)
def test_inf_and_nan_spread_as_in_torch(device, special, size):
    rows, cols = size
    for dtype in dtypes(device):
        for which in range(3):
            args, dz = call_args(device, dtype, rows, cols), randn(device, dtype, rows, cols)
            if which < 2:
                args[which] = special_places(device, dtype, args[which].numel(), special)
            if which == 2:
                dz = special_places(device, dtype, rows * cols, special).view(size)
            out, grads = forward_backward(OP, args, {}, dz)
            expected = EAGER[OP](*args)
            assert_equal(out.isnan(), expected.isnan())
            assert_equal(out.isposinf(), expected.isposinf())
            assert_equal(out.isneginf(), expected.isneginf())
            for got, ref in zip(grads, eager_gradients(EAGER[OP], dz, args), strict=True):
                assert_equal(got.isnan(), ref.isnan())


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize("size", [(5, 9), (9, 64), (37, 515), (3, 1024)], ids=str)
def test_nan_around_the_inputs_is_not_read(device, size, offset):
    for dtype in dtypes(device):
        args, dz = call_args(device, dtype, *size), randn(device, dtype, *size)
        out, grads = forward_backward(OP, args, {}, dz)
        moved = [in_nan(t, offset + i) for i, t in enumerate(args)]
        got, got_grads = forward_backward(OP, moved, {}, in_nan(dz, offset))
        assert_same_bits(got, out)
        for grad, ref in zip(got_grads, grads, strict=True):
            # Other boundaries may add in another order.
            torch.testing.assert_close(grad, ref)


@given(
    rows=sizes(65),
    cols=sizes(129),
    layout=layouts(2),
    dtype=dtype_names,
    seed=seeds,
)
def test_any_layout(rows, cols, layout, dtype, seed):
    dtype = getattr(torch, dtype)
    x = values((cols,), "normal", seed).to(dtype)
    y = values((rows,), "normal", seed + 1).to(dtype)
    dz = values((rows, cols), "normal", seed + 2).to(dtype)
    steps = [((0,), (1 + seed % 3,), seed % 5), ((0,), (2,), 1)]
    args = [strided(x, steps[0]), strided(y, steps[1])]
    check_op(OP, args, dout=strided(dz, layout), eager=False)


@pytest.mark.parametrize("case", case_params(*OPS))
def test_bad_call(case, device):
    case.check(device)


def test_bad_call_while_recording(device):
    for case in cases(OP):
        case.check(device, recorded=True)


@pytest.mark.parametrize("op", OPS)
def test_number_of_bad_calls(op):
    assert len(cases(op)) >= 28
