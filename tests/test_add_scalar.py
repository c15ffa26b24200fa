"""add_scalar against float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numerics import acc_dtype, assert_equal, assert_same_bits
from samples import F32, check_op, dtypes
from strategies import dtype_names, kinds, layouts, seeds, sizes, strided, values
from tensors import randn

OP = "add_scalar"
add_scalar = torch.ops.torchweld.add_scalar

SIZES = (1, 2, 7, 31, 32, 33, 255, 256, 257, 1023, 1024, 1025, 4095, 4096, 4097, 8192, 65537)


@pytest.mark.parametrize("n", SIZES)
def test_sizes(device, dtype, n):
    for value in (0.0, 0.3, -1e3):
        check_op(OP, [randn(device, dtype, n), value])


@pytest.mark.parametrize("shape", [(), (3, 1), (2, 3, 5), (2, 1, 3, 1, 4), (8, 4096), (5, 1021)])
def test_rank(device, shape):
    for dtype in dtypes(device):
        check_op(OP, [randn(device, dtype, *shape), 1.7])


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0), (2, 0, 3)])
def test_empty(device, shape):
    for dtype in dtypes(device):
        x = torch.empty(shape, dtype=dtype, device=device, requires_grad=True)
        z = add_scalar(x, 2.0)
        assert_equal(z.detach(), torch.empty_like(x).detach())
        z.sum().backward()
        assert_equal(x.grad, torch.empty_like(x).detach())


@pytest.mark.parametrize("n", [5, 1025, 8192])
def test_integers_are_exact(device, n):
    """Integers up to 128 are exact in every dtype, and so are their sums."""
    x = torch.randint(-64, 65, (n,))
    for dtype in dtypes(device):
        for value in (-64, -1, 0, 3, 64):
            assert_equal(
                add_scalar(x.to(dtype).to(device), value), (x + value).to(dtype).to(device)
            )


def expected_sum(x: torch.Tensor, value: float) -> torch.Tensor:
    """The sum in fp32 (fp64 for fp64), rounded once. torch's CPU rounds the value to 16 bits."""
    return (x.to(acc_dtype(x.dtype)) + value).to(x.dtype)


def test_the_sum_is_rounded_once(device):
    for dtype in dtypes(device):
        x = randn(device, dtype, 4099, scale=30.0)
        for value in (0.1, 1 + 2.0**-9, 1e-6, 65519.0, 1e300, -1e300):
            assert_equal(add_scalar(x, value), expected_sum(x, value))
            assert_equal(add_scalar(x[5], value), expected_sum(x[5], value))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 0.0])
def test_inf_and_nan_spread_as_in_torch(device, value):
    for dtype in dtypes(device):
        x = randn(device, dtype, 1030)
        x[3], x[700], x[-1] = math.inf, -math.inf, math.nan
        assert_equal(add_scalar(x, value), x + value)


@pytest.mark.parametrize("offset", range(9))
def test_misaligned_storage(device, offset):
    """NaN around x must not be read into the result, nor anything around the result written."""
    for dtype in dtypes(device):
        for n in (1, 9, 1021, 4096, 8192):
            buffer = torch.full((n + 32,), math.nan, dtype=dtype, device=device)
            x = buffer[offset : offset + n].copy_(randn(device, dtype, n))
            assert_same_bits(add_scalar(x, 0.7), add_scalar(x.clone(), 0.7))
            assert int(buffer.isnan().sum()) == 32


def test_expanded(device):
    x = randn(device, F32, 1, 70).expand(9, 70)
    assert_same_bits(add_scalar(x, 0.3), add_scalar(x.contiguous(), 0.3))
    x = randn(device, F32, 9, 1).expand(9, 70)
    assert_same_bits(add_scalar(x, 0.3), add_scalar(x.contiguous(), 0.3))


def test_second_derivative(device):
    """The gradient of the sum is the gradient itself, of any order."""
    x = randn(device, F32, 5).requires_grad_()
    (first,) = torch.autograd.grad(add_scalar(x, 1.5).square().sum(), x, create_graph=True)
    assert_same_bits(first.detach(), 2 * add_scalar(x.detach(), 1.5))
    (second,) = torch.autograd.grad(first.sum(), x)
    assert_equal(second, torch.full_like(second, 2.0))


@given(
    shape=st.tuples(sizes(65), sizes(33), sizes(129)),
    layout=layouts(3),
    kind=kinds,
    dtype=dtype_names,
    seed=seeds,
)
def test_any_layout(shape, layout, kind, dtype, seed):
    x = values(shape, kind, seed).to(getattr(torch, dtype))
    assert_equal(add_scalar(strided(x, layout), -0.3), expected_sum(x, -0.3))
