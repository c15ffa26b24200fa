"""conv2d and its backward op against float64; exact on integer grids."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given

import reference as R
from numerics import assert_equal, assert_same_bits
from samples import BF16, F16, F32, F64, check_op, dtypes, forward_backward
from strategies import dtype_names, layouts, seeds, sizes, strided, values
from tensors import randn

conv2d = torch.ops.torchweld.conv2d
conv2d_backward = torch.ops.torchweld.conv2d_backward

OP = "conv2d"
OPS = (OP, OP + "_backward")
KERNELS = [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6), (7, 7), (3, 7), (9, 9), (8, 10)]
WIDE_KERNELS = [(1, 31), (31, 1), (31, 31), (25, 26), (12, 17), (33, 2), (2, 40), (34, 35)]
IMAGES = [(1, 1, 1), (3, 1, 9), (2, 33, 1), (5, 8, 8), (2, 31, 33), (1, 64, 64), (1, 13, 131)]


def integers(device: str, dtype: torch.dtype, *shape: int, most: int = 4):
    return torch.randint(-most, most + 1, shape).to(dtype).to(device)


def padded_conv2d(x, weight):
    """torch's own, of the padded x."""
    kh, kw = weight.shape
    return F.conv2d(F.pad(x, (0, kw - 1, 0, kh - 1))[:, None], weight[None, None])[:, 0]


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("shape", IMAGES, ids=str)
def test_sizes(device, shape, kernel):
    for dtype in dtypes(device):
        check_op("conv2d", [randn(device, dtype, *shape), randn(device, dtype, *kernel)])


@pytest.mark.parametrize("kernel", WIDE_KERNELS, ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 8), (1, 35, 70)], ids=str)
def test_wide_kernels(device, shape, kernel):
    for dtype in (F32, BF16) if device == "cpu" else dtypes(device):
        check_op("conv2d", [randn(device, dtype, *shape), randn(device, dtype, *kernel)])


def flipped_conv2d(dz, weight):
    """The gradient to x as a convolution, with zeros above and on the left."""
    return R.conv2d(dz.flip(1, 2), weight).flip(1, 2)


def check_exact(x, weight, dz):
    """The sums are integers below 2^24: no order of additions rounds."""
    up = [t.double() for t in (x, weight, dz)]
    z, grads = forward_backward("conv2d", [x, weight], {}, dz)
    assert_equal(z, R.conv2d(*up[:2]).to(x.dtype), "z")
    expected = R.gradients(R.conv2d, up[2], [True, True], *up[:2])
    assert_equal(grads, [grad.to(x.dtype) for grad in expected], "gradients")


@pytest.mark.parametrize("kernel", [*KERNELS, (31, 31), (2, 40)], ids=str)
@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 17, 23), (1, 40, 72), (2, 9, 136)], ids=str)
def test_integers_are_exact(device, shape, kernel):
    for dtype in (F32, BF16) if device == "cpu" else dtypes(device):
        x, dz = (integers(device, dtype, *shape) for _ in range(2))
        check_exact(x, integers(device, dtype, *kernel), dz)


# Sizes around the rows and columns of a thread, a cell, a strip and a small image.
EDGES = [*range(1, 10), 15, 16, 17, 31, 32, 33]


@pytest.mark.parametrize("height", EDGES)
def test_sizes_around_the_kernels_limits(device, height):
    widths = EDGES if device == "cuda" else EDGES[height % 4 :: 4]
    for dtype in (F32, BF16) if device == "cpu" else dtypes(device):
        for width in widths:
            for size in (3, 4, 5, 7, 9):
                x, dz = (integers(device, dtype, 3, height, width) for _ in range(2))
                check_exact(x, integers(device, dtype, size, size), dz)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 9, 16])
def test_one_weight_is_a_shift(device, size):
    """A single 1 in the kernel moves the image up and left, its gradient back."""
    for dtype in dtypes(device):
        x = randn(device, dtype, 2, 20, 24)
        for p, q in {(0, 0), (size - 1, 0), (0, size - 1), (size // 2, size - 1)}:
            weight = torch.zeros(size, size, dtype=dtype, device=device)
            weight[p, q] = 1
            expected = torch.zeros_like(x)
            expected[:, : 20 - p, : 24 - q] = x[:, p:, q:]
            assert_equal(conv2d(x, weight), expected)
            back = torch.zeros_like(x)
            back[:, p:, q:] = x[:, : 20 - p, : 24 - q]
            assert_equal(conv2d_backward(x, x, weight, output_mask=[True, False])[0], back)


@pytest.mark.parametrize("batch", [1, 2, 5, 21, 22, 31, 32, 33, 43, 67, 129])
def test_small_images_do_not_mix(device, batch):
    """Many small images share a block; each result equals that of the image alone."""
    sides = [(8, 8, 3), (8, 8, 5), (8, 8, 7), (7, 7, 4), (3, 3, 5), (1, 1, 3)]
    sides += [(16, 16, 3), (16, 16, 5), (16, 16, 7), (5, 16, 4), (16, 8, 7), (13, 11, 5)]
    for dtype in (F32, BF16):
        for height, width, size in sides:
            x = randn(device, dtype, batch, height, width)
            weight = randn(device, dtype, size, size)
            z = conv2d(x, weight)
            dx = conv2d_backward(x, x, weight, output_mask=[True, False])[0]
            for i in {0, batch // 2, batch - 1}:
                one = x[i : i + 1].clone()
                assert_equal(z[i : i + 1], conv2d(one, weight))
                alone = conv2d_backward(one, one, weight, output_mask=[True, False])[0]
                assert_equal(dx[i : i + 1], alone)


# Batches around the numbers of 8-column images in a load, a warp and a block.
BATCHES = [1, 3, 4, 5, 15, 16, 17, 63, 64, 65, 127, 128, 129, 130]


@pytest.mark.parametrize("height", range(1, 9))
def test_images_of_8_columns_are_exact(device, height):
    kernels = [(1, 1), (2, 3), (3, 3), (4, 4), (5, 5), (5, 2), (7, 7), (1, 7), (7, 6)]
    for dtype in (BF16,) if device == "cpu" else (F16, BF16):
        for i, batch in enumerate(BATCHES):
            every = 3 if device == "cuda" else 9
            for kernel in kernels[(height + i) % every :: every]:
                x, dz = (integers(device, dtype, batch, height, 8) for _ in range(2))
                check_exact(x, integers(device, dtype, *kernel), dz)


def between_nan(x, offset: int, gap: int):
    """Copies x to a buffer with NaN around its images, which begin anywhere."""
    batch, height, width = x.shape
    stride = height * width + gap
    storage = torch.full((batch * stride + 16,), math.nan, dtype=x.dtype, device=x.device)
    return storage.as_strided(x.shape, (stride, width, 1), offset).copy_(x)


@pytest.mark.parametrize(
    ("offset", "gap"), [(0, 0), (8, 0), (1, 0), (4, 0), (0, 8), (0, 1), (3, 5)]
)
def test_images_of_8_columns_begin_anywhere(device, offset, gap):
    for dtype in (BF16,) if device == "cpu" else (F16, BF16):
        for batch, height, size in ((70, 8, 5), (17, 5, 3), (1, 8, 7), (33, 1, 4)):
            x, dz = (integers(device, dtype, batch, height, 8) for _ in range(2))
            weight = integers(device, dtype, size, size)
            check_exact(between_nan(x, offset, gap), weight, between_nan(dz, offset, gap))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("size", [1, 3, 4, 5, 7, 9, 11])
def test_inf_and_nan_reach_only_the_windows_that_hold_them(device, size, value):
    for dtype in dtypes(device):
        weight = integers(device, dtype, size, size) + 0.5
        for i, j in ((0, 0), (9, 11), (23, 31), (15, 16)):
            x = integers(device, dtype, 2, 24, 32)
            x[1, i, j] = value
            expected = R.conv2d(x.cpu().double(), weight.cpu().double()).to(dtype)
            assert_equal(conv2d(x, weight).cpu(), expected)
            dz = integers(device, dtype, 2, 24, 32)
            dx, dweight = conv2d_backward(dz, x, weight, output_mask=[True, True])
            assert not dx.isnan().any()
            grads = R.gradients(
                R.conv2d, dz.cpu().double(), [True, True], x.cpu().double(), weight.cpu().double()
            )
            assert_equal(dweight.cpu(), grads[1].to(dtype))
            flipped = conv2d_backward(x, dz, weight, output_mask=[True, False])[0]
            grads = R.gradients(
                R.conv2d, x.cpu().double(), [True], dz.cpu().double(), weight.cpu().double()
            )
            assert_equal(flipped.cpu(), grads[0].to(dtype))


NOT_FINITE = [(3, 8, 8), (17, 16, 16), (2, 9, 13), (2, 7, 5), (130, 8, 8), (19, 5, 8), (5, 1, 8)]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("shape", NOT_FINITE, ids=str)
def test_inf_and_nan_in_small_images(device, shape, value):
    """In x and in the weight, where zeros beyond an edge meet them; forward and to x."""
    _, height, width = shape
    for dtype in dtypes(device):
        for size in (3, 4, 5, 7, 9):
            for holder in ("x", "weight"):
                x = integers(device, dtype, *shape) + 0.5
                weight = integers(device, dtype, size, size) + 0.5
                if holder == "x":
                    x[1, height // 2, width // 2] = value
                else:
                    weight[size - 1, size // 2] = value
                up = x.cpu().double(), weight.cpu().double()
                assert_equal(conv2d(x, weight).cpu(), R.conv2d(*up).to(dtype))
                dx = conv2d_backward(x, x, weight, output_mask=[True, False])[0]
                assert_equal(dx.cpu(), flipped_conv2d(*up).to(dtype))


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("size", [1, 3, 5, 8])
def test_a_weight_times_the_zeros_beyond_the_edge(device, size, value):
    """0 * inf is NaN there, as in F.conv2d of a padded x."""
    for dtype in dtypes(device):
        x = torch.rand(2, 9, 12, dtype=F64).add(0.5).to(dtype).to(device)
        weight = torch.ones(size, size, dtype=dtype, device=device)
        weight[size - 1, size // 2] = value
        expected = padded_conv2d(x.cpu().double(), weight.cpu().double()).to(dtype)
        z = conv2d(x, weight).cpu()
        assert_equal(z.isnan(), expected.isnan())
        assert_equal(z.isinf(), expected.isinf())
        assert (z.isnan().any() or size == 1) and not z.isfinite().any()


def test_overflow_is_inf(device):
    x = torch.full((1, 9, 16), 60000.0, dtype=F16, device=device)
    z = conv2d(x, torch.ones(3, 3, dtype=F16, device=device))
    expected = R.conv2d(x.cpu().double(), torch.ones(3, 3, dtype=F64)).to(F16)
    assert_equal(z.cpu(), expected)
    assert z.isinf().any() and z.isfinite().any()


SHAPES = [(0, 3, 3), (2, 0, 3), (2, 3, 0), (0, 0, 0)]
EMPTY_KERNELS = [(0, 2), (2, 0), (0, 0)]


@pytest.mark.parametrize(
    ("shape", "kernel"),
    [*((shape, (2, 3)) for shape in SHAPES), *(((2, 3, 4), size) for size in EMPTY_KERNELS)],
    ids=str,
)
def test_empty(device, shape, kernel):
    """A sum over nothing is 0."""
    for dtype in dtypes(device):
        x = randn(device, dtype, *shape)
        weight = torch.ones(kernel, dtype=dtype, device=device)
        z, (dx, dweight) = forward_backward("conv2d", [x, weight], {})
        assert_equal(z, torch.zeros_like(x))
        assert_equal(dx, torch.zeros_like(x))
        assert_equal(dweight, torch.zeros_like(weight))


@pytest.mark.parametrize("offset", range(9))
def test_any_start_of_a_row(device, offset):
    """Images start anywhere with respect to 16 bytes; NaN surrounds them."""
    for dtype in (F32, BF16):
        wide = (3, 16, 0), (5, 24, 8), (7, 21, 1), (4, 64, 5), (9, 40, 8), (3, 40, 8), (4, 24, 8)
        narrow = (7, 8, 0), (5, 8, 4), (4, 13, 3), (9, 8, 8), (5, 16, 16)
        for size, width, gap in wide + narrow:
            x, weight = integers(device, dtype, 2, 9, width), integers(device, dtype, size, size)
            strides = (9 * (width + gap) + 4, width + gap, 1)
            storage = torch.full((2 * strides[0] + 16,), math.nan, dtype=dtype, device=device)
            view = storage.as_strided(x.shape, strides, offset).copy_(x)
            check_exact(view, weight, view)


def test_expanded_images(device):
    x, weight = integers(device, F32, 1, 7, 8), integers(device, F32, 3, 3)
    same = x.expand(4, 7, 8)
    check_exact(same, weight, same)
    row = integers(device, BF16, 2, 1, 16).expand(2, 9, 16)
    check_exact(row, weight.to(BF16), row)
    for dtype in (F32, BF16):
        for shape, size in (((35, 8, 8), 7), ((9, 16, 16), 5), ((3, 40, 64), 7)):
            same = integers(device, dtype, 1, *shape[1:]).expand(shape)
            rows = integers(device, dtype, shape[0], 1, shape[2]).expand(shape)
            check_exact(same, integers(device, dtype, size, size), rows)


def test_only_what_is_asked_for(device):
    x, weight = randn(device, F32, 2, 5, 6), randn(device, F32, 3, 3)
    dx, dweight = conv2d_backward(x, x, weight, output_mask=[True, True])
    for mask in ([True, False], [False, True], [False, False]):
        grads = conv2d_backward(x, x, weight, output_mask=mask)
        for got, full, wanted in zip(grads, (dx, dweight), mask, strict=True):
            assert_same_bits(got, full if wanted else torch.empty(0, device=device))


def test_large_batches_and_images(device):
    cases = [((4, 200, 260), (3, 5))]
    if device == "cuda":
        # Strips are whole only if there are many.
        shapes = [(4097, 8, 8), (4097, 16, 16), (64, 64, 64), (3, 1000, 1030), (4, 1000, 520)]
        cases = [(shape, (3, 5)) for shape in shapes] + [((600, 64, 64), (7, 9))]
        cases += [((1100, 64, 256), (4, 7)), ((4200, 65, 61), (3, 5))]
    for shape, kernels in cases:
        for dtype in (F32, BF16):
            x = integers(device, dtype, *shape, most=1)
            for size in kernels:
                check_exact(x, integers(device, dtype, size, size), x)


@given(
    height=sizes(33),
    width=sizes(65),
    batch=sizes(5),
    kernel_height=sizes(13),
    kernel_width=sizes(13),
    layout=layouts(3),
    dtype=dtype_names,
    seed=seeds,
)
def test_any_layout(height, width, batch, kernel_height, kernel_width, layout, dtype, seed):
    kind = getattr(torch, dtype)
    x = values((batch, height, width), "integers", seed).to(kind)
    weight = values((kernel_height, kernel_width), "integers", seed + 1).to(kind)
    z = conv2d(x, weight)
    assert_equal(z, R.conv2d(x.double(), weight.double()).to(kind))
    assert_same_bits(conv2d(strided(x, layout), weight.t().contiguous().t()), z)
