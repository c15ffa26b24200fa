"""row_sum and its gradient against float64; exact on integer grids."""

from __future__ import annotations

import math

import pytest
import torch

from numerics import assert_equal, assert_same_bits
from samples import BF16, F16, F32, check_op, dtypes
from tensors import randn

OP = "row_sum"
row_sum = torch.ops.torchweld.row_sum

SHORT = (1, 2, 3, 4, 7, 8, 31, 32, 33, 63, 64, 65, 127, 128, 129, 251, 509, 512)
LONG = (1021, 1023, 1024, 1025, 4095, 4096, 4097, 8191, 8193, 65537)


def integers(device: str, dtype: torch.dtype, *shape: int):
    return torch.randint(-8, 9, shape).to(dtype).to(device)


@pytest.mark.parametrize("n", SHORT + LONG)
def test_row_length(device, dtype, n):
    for rows in (1, 9) if n < 1000 else (3,):
        check_op("row_sum", [randn(device, dtype, rows, n)])


@pytest.mark.parametrize("rows", [31, 32, 33, 255, 256, 257, 65535, 65537])
def test_row_count(device, rows):
    for dtype in dtypes(device):
        for n in (1, 3, 4):
            check_op("row_sum", [randn(device, dtype, rows, n)])


# Few long rows are split; some of these have a last split of a few elements.
SPLIT = [(1, 4096), (1, 4097), (1, 65_537), (2, 262_147), (3, 100_003), (7, 16_385), (130, 8_193)]


@pytest.mark.parametrize("shape", SPLIT, ids=str)
def test_few_long_rows(device, shape):
    for dtype in dtypes(device):
        check_op("row_sum", [randn(device, dtype, *shape)])
        x = integers(device, dtype, *shape)
        assert_equal(row_sum(x), x.double().sum(-1).to(dtype))


def test_very_long_rows(device):
    shapes = (
        [(1, 1 << 20)] if device == "cpu" else [(1, (1 << 25) + 3), (8, 1 << 22), (300, 70_001)]
    )
    for shape in shapes:
        for dtype in (F32, BF16):
            x = (torch.randint(-8, 9, shape, device=device)).to(dtype)
            assert_equal(row_sum(x), x.double().sum(-1).to(dtype))


@pytest.mark.parametrize("n", [1, 5, 32, 33, 509, 1024, 1025, 40_001])
def test_integers_are_exact(device, n):
    """Every partial sum is an integer below 2^24: no order of additions rounds."""
    for dtype in dtypes(device):
        x = integers(device, dtype, 5, n)
        assert_equal(row_sum(x), x.double().sum(-1).to(dtype))


@pytest.mark.parametrize("n", [2, 34, 510, 1024, 8194, 100_002])
def test_alternating_signs_cancel(device, n):
    """The sum is 0, so the whole error bound comes from sum(|x|)."""
    for dtype in dtypes(device):
        half = randn(device, dtype, 3, n // 2)
        check_op("row_sum", [torch.stack([half, -half], -1).flatten(-2)])


@pytest.mark.parametrize("n", [1, 7, 33, 130, 4097, 30_001])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_inf_and_nan_stay_in_their_row(device, value, n):
    for dtype in dtypes(device):
        for j in {0, n // 2, n - 1}:
            x = integers(device, dtype, 4, n)
            x[1, j] = value
            expected = x.double().sum(-1).to(dtype)
            assert_equal(row_sum(x), expected)
            x[1, (j + 1) % n] = math.inf
            assert_equal(row_sum(x), x.double().sum(-1).to(dtype))


def test_a_sum_beyond_the_dtype_is_inf(device):
    x = torch.full((2, 3), 60000.0, dtype=F16, device=device)
    x[1] = -x[1]
    expected = torch.tensor([math.inf, -math.inf], dtype=F16, device=device)
    assert_equal(row_sum(x), expected)
    x[:, 1] *= -1  # a partial sum may exceed the dtype
    assert_equal(row_sum(x), x.double().sum(-1).to(F16))


@pytest.mark.parametrize("offset", range(1, 9))
@pytest.mark.parametrize("n", [5, 8, 64, 300, 3000, 20_000])
def test_any_start_of_a_row(device, n, offset):
    """Rows start anywhere with respect to 16 bytes; NaN surrounds them."""
    for dtype in (F32, BF16):
        x = integers(device, dtype, 3, n)
        for gap in (0, 3):
            storage = torch.full((3 * (n + gap) + 16,), math.nan, dtype=dtype, device=device)
            view = storage.as_strided((3, n), (n + gap, 1), offset)
            assert_equal(row_sum(view.copy_(x)), x.double().sum(-1).to(dtype))


def test_expanded_rows(device):
    x = integers(device, F32, 1, 1, 70).expand(4, 3, 70)
    assert_equal(row_sum(x), row_sum(x.contiguous()))
    column = integers(device, F32, 5, 1).expand(5, 70)
    assert_equal(row_sum(column), row_sum(column.contiguous()))


def test_calls_after_each_other(device):
    """A call resets the counters of finished splits for the next call."""
    for shape in [(2, 70_001), (5, 50_000), (1, 300_000), (2, 70_001)] * 2:
        x = integers(device, F32, *shape)
        assert_equal(row_sum(x), x.double().sum(-1).to(F32))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_two_streams_at_once():
    x = torch.randint(-8, 9, (2, 3_000_001), device="cuda").float()
    expected = x.double().sum(-1).float()
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(row_sum(x))
    torch.cuda.synchronize()
    for y in results:
        assert_equal(y, expected)


@pytest.mark.parametrize("shape", [(1,), (7,), (9, 33), (3, 5, 8), (0, 4), (3, 0)], ids=str)
def test_gradient_is_the_expansion(device, shape):
    for dtype in dtypes(device):
        x = randn(device, dtype, *shape).requires_grad_()
        dy = randn(device, dtype, *shape[:-1])
        (dx,) = torch.autograd.grad(row_sum(x), x, dy)
        assert_same_bits(dx.contiguous(), dy[..., None].expand(shape).contiguous())


def test_differentiable_again(device):
    x = randn(device, F32, 3, 5).requires_grad_()
    (dx,) = torch.autograd.grad(row_sum(x).square().sum(), x, create_graph=True)
    (again,) = torch.autograd.grad(dx.sum(), x)
    assert_equal(again, torch.full_like(x, 10.0))  # d/dx of sum_j 2 * row_sum(x), 5 columns
