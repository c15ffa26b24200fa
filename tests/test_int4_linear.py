"""4-bit weights: packing, repacking and both linear ops against float64; exact on integer grids."""

from __future__ import annotations

import copy
import io
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference as R
import torchweld._library as library
from cuda_graphs import cuda_graph
from numerics import assert_equal, assert_same_bits, assert_same_nonfinite
from samples import BF16, F16, F32, F64, check_op, dtypes, forward_backward
from strategies import dtype_names, layouts, seeds, strided, values
from tensors import randn
from test_quantize import LLAMA
from torchweld.nn import Int4Linear
from torchweld.ops.int4_weight import portable_from_repacked
from torchweld.tuning.observe import observe

ops = torch.ops.torchweld

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or library.build_facts().get("cuda") is None,
    reason="the kernels run on a GPU",
)

OP = "int4_linear"
OPS = (OP, OP + "_backward", "int4_repack", OP + "_repacked", OP + "_repacked_backward")


def weight_of(codes, zeros, scale, dtype, device):
    """qweight, scale, zero of codes (N, K), zeros and scale (N, groups)."""
    words = [ops.int4_pack(t.to(torch.uint8)).to(device) for t in (codes, zeros)]
    return [words[0], scale.to(dtype).to(device), words[1]]


def random_weight(n, k, group, dtype, device):
    """Any codes and zeros, words with the top bit set among them."""
    groups = k // group
    codes, zeros = torch.randint(0, 16, (n, k)), torch.randint(0, 16, (n, groups))
    scale = (torch.rand(n, groups) + 0.5) * 0.3 * max(k, 1) ** -0.5
    return weight_of(codes, zeros, scale, dtype, device)


def check_both(x, weight, bias=None):
    """int4_linear, and the same through int4_repack, result and gradient."""
    check_op(OP, [x, *weight, bias])
    packed = ops.int4_repack(*weight)
    kwargs = {"out_features": weight[0].shape[0]}
    check_op(OP + "_repacked", [x, *packed, bias], kwargs)
    check_op(OP + "_repacked", [x, *packed], kwargs, eager=False)


@pytest.mark.parametrize("rows", [*range(1, 10), 15, 16, 17, 27, 48, 49])
@pytest.mark.parametrize("group", [64, 128, 384])
def test_few_rows(device, rows, group):
    """Numbers of rows around the limit up to which the CPU decodes in registers."""
    for dtype in dtypes(device):
        weight = random_weight(35, 384, group, dtype, device)
        check_both(randn(device, dtype, rows, 384), weight, randn(device, dtype, 35))


# Packing


@pytest.mark.parametrize("cols", [0, 1, 7, 8, 9, 31, 32, 33, 1021])
def test_packing_and_back(device, cols):
    codes = torch.randint(0, 16, (3, 2, cols), dtype=torch.uint8)
    packed = ops.int4_pack(codes.to(device))
    assert_equal(packed.cpu(), R.int4_words(codes).to(torch.int32))
    assert_equal(ops.int4_unpack(packed, cols).cpu(), codes)


def test_lowest_nibble_comes_first(device):
    codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 0, 0, 0, 0, 0, 15]], dtype=torch.uint8)
    expected = torch.tensor([[0x87654321 - 2**32], [0xF0000000 - 2**32]], dtype=torch.int32)
    assert_equal(ops.int4_pack(codes.to(device)).cpu(), expected)


def test_every_word_is_legal(device):
    words = torch.tensor([[-1, -(2**31), 2**31 - 1, 0, 1]], dtype=torch.int32)
    codes = ops.int4_unpack(words.to(device), 40)
    assert_equal(codes.cpu(), R.int4_codes(words, 40).to(torch.uint8))
    assert_equal(ops.int4_pack(codes).cpu(), words)


def test_of_a_code_the_low_bits_count(device):
    codes = torch.arange(256, dtype=torch.uint8)[None]
    assert_equal(ops.int4_pack(codes.to(device)), ops.int4_pack((codes & 15).to(device)))


SIZES = [(1, 8, 8), (16, 64, 64), (17, 72, 24), (33, 136, 8), (0, 64, 8), (100, 1088, 64)]


def test_repack_keeps_the_attributes_of_tensors():
    """transformers marks the tensors that it has loaded."""
    layer = Int4Linear.from_linear(torch.nn.Linear(64, 16), 32)
    want = layer.portable()
    made = ops.int4_repack(layer.qweight, layer.scale, layer.zero)
    for tensor in made:
        tensor.mark = True
    layer.qweight, layer.scale, layer.zero = made
    layer.repack()
    for got, ref in zip((layer.qweight, layer.scale, layer.zero), want, strict=True):
        assert got.mark
        assert_equal(got, ref)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_repacked_layout(device, size):
    """Against the definition in reference.py, and back."""
    n, k, group = size
    for dtype in dtypes(device):
        weight = random_weight(n, k, group, dtype, device)
        packed = ops.int4_repack(*weight)
        for got, ref in zip(packed, R.int4_repack(*weight), strict=True):
            assert_equal(got.cpu(), ref.to(got.dtype))
        back = R.int4_portable(*packed, n, k)
        assert_equal(back[0].to(torch.int32), weight[0].cpu())
        assert_equal(back[1], weight[1].cpu())
        codes = [R.int4_codes(z, k // group) for z in (back[2], weight[2])]
        assert_equal(*codes)
        for got, ref in zip(portable_from_repacked(*packed, n, k), weight, strict=True):
            assert got.is_contiguous() and got.device == ref.device
            assert_equal(got, ref)


# Exact results


@pytest.mark.parametrize("m", [1, 9, 40, 70])
def test_all_pairs_of_code_and_zero(device, m):
    """One-hot rows of x pick every weight: all 16 x 16 differences, times a power of two."""
    codes = torch.arange(16).repeat(16, 8)  # (16, 128), row r has zero r
    zeros = torch.arange(16)[:, None]
    expected = (codes - zeros) * 0.25
    eye = torch.eye(128)
    for dtype in dtypes(device):
        weight = weight_of(codes, zeros, torch.full((16, 1), 0.25), dtype, device)
        packed = ops.int4_repack(*weight)
        for first in range(0, 128, m):
            x = eye[first : first + m].to(dtype).to(device)
            ref = expected.T[first : first + m].to(dtype).to(device)
            assert_equal(ops.int4_linear(x, *weight), ref)
            assert_equal(ops.int4_linear_repacked(x, *packed, out_features=16), ref)


GRID = [  # M, N, K, group
    (1, 1, 8, 8), (1, 17, 136, 8), (2, 31, 160, 16), (3, 33, 96, 32), (7, 64, 192, 64),
    (8, 65, 256, 128), (9, 127, 512, 256), (16, 129, 640, 640), (17, 96, 1088, 64),
    (31, 48, 120, 24), (33, 130, 1024, 128), (64, 128, 320, 64), (65, 257, 384, 128),
    (129, 200, 256, 64), (131, 33, 104, 104), (256, 264, 192, 64), (257, 40, 512, 256),
]  # fmt: skip


@pytest.mark.parametrize("size", GRID, ids=str)
def test_integer_grid_is_exact(device, size):
    """Scales 1 and 2, integers in x: every sum is exact in any order, the result rounded once."""
    m, n, k, group = size
    groups = k // group
    codes, zeros = torch.randint(0, 16, (n, k)), torch.randint(0, 16, (n, groups))
    scale = torch.randint(1, 3, (n, groups))
    x, bias, dy = torch.randint(-8, 9, (m, k)), torch.randint(-8, 9, (n,)), None
    dy = torch.randint(-8, 9, (m, n))
    weight = (codes - zeros.repeat_interleave(group, 1)) * scale.repeat_interleave(group, 1)
    y, dx = x @ weight.T, dy @ weight
    for dtype in dtypes(device):
        args = weight_of(codes, zeros, scale, dtype, device)
        packed = ops.int4_repack(*args)
        x_, bias_, dy_ = (t.to(dtype).to(device) for t in (x, bias, dy))
        expected = [t.to(dtype).to(device) for t in (y + bias, y, dx)]
        out, (grad, *_) = forward_backward(OP, [x_, *args, bias_], {}, dy_)
        assert_equal(out, expected[0])
        assert_equal(grad, expected[2])
        assert_equal(ops.int4_linear(x_, *args), expected[1])
        kwargs = {"out_features": n}
        out, (grad, *_) = forward_backward(OP + "_repacked", [x_, *packed, bias_], kwargs, dy_)
        assert_equal(out, expected[0])
        assert_equal(grad, expected[2])


@pytest.mark.parametrize("m", [1, 5, 8, 16, 32, 64, 128, 257])
def test_long_k_is_exact(device, m):
    """K is split; the partial sums cover whole groups."""
    test_integer_grid_is_exact(device, (m, 19, 4096, 128))


# The kernel for few tokens, and the others in its place

FEW_TOKENS = [  # M, N, K, group
    (1, 16, 128, 128), (2, 15, 64, 64), (3, 33, 2048, 128), (8, 130, 1024, 1024),
    (5, 4099, 640, 128), (7, 48, 320, 64), (4, 40000, 192, 192), (1, 17, 14336, 128),
    (7, 40000, 1152, 128), (8, 2500, 8320, 128), (9, 2200, 256, 256), (12, 4099, 1152, 384),
    (16, 129, 4096, 64), (16, 8500, 512, 128), (8, 9000, 1024, 128), (3, 36000, 256, 64),
    (13, 300, 14336, 128),
]  # fmt: skip


def check_every_tile(size, dtype):
    """Exact on integers, else the same bits in every run. Returns the tiles.

    x has rows with a gap between them.
    """
    _C = pytest.importorskip("torchweld._C")
    m, n, k, group = size
    codes, zeros = torch.randint(0, 16, (n, k)), torch.randint(0, 16, (n, k // group))
    scale, bias = torch.randint(1, 3, (n, k // group)), torch.randint(-8, 9, (n,))
    args = ops.int4_repack(*weight_of(codes, zeros, scale, dtype, "cuda"))
    dense = R.int4_weight(*weight_of(codes, zeros, scale, F64, "cpu"))
    x = torch.randint(-8, 9, (m, k + 24)).to(dtype).cuda()[:, 8 : 8 + k]
    expected = (x.cpu().double() @ dense.T + bias).to(dtype).cuda()
    other = torch.randn(m, k + 8, device="cuda").to(dtype)[:, :k]
    shift = bias.to(dtype).cuda()
    call = lambda x: ops.int4_linear_repacked(x, *args, shift, out_features=n)  # noqa: E731
    _, (record,) = observe(lambda: call(x))
    problem = record["problem"]
    legal = [found for found in _C.candidates("int4", problem) if not found["refusal"]]
    for found in legal:
        ops._force_choice("int4", problem, found["choice"])
        try:
            assert_equal(call(x), expected)
            first = call(other)
            for _ in range(3):
                assert_same_bits(call(other), first)
        finally:
            ops._force_choice("int4", problem, "")
    # A tile with K split is the same tile, except for decode, whose splits are part of the tile.
    return {c["choice"] if c["engine"] == "decode" else c["choice"].split(" /")[0] for c in legal}


def check_special_values(where, value, sizes, at_scale, at_x):
    """A scale or an element of x, counted from the first or the last, is inf, NaN or tiny."""
    for dtype in (F16, BF16):
        for m, n, k, group in sizes:
            x, weight = randn("cuda", dtype, m, k), random_weight(n, k, group, dtype, "cuda")
            if where == "scale":
                weight[1][at_scale] = value
            else:
                x[at_x] = value
            dense = R.int4_weight(*(t.cpu() for t in weight))
            got = ops.int4_linear(x, *weight).cpu()
            expected = x.cpu() @ dense.T
            assert_same_nonfinite(got, expected)


@needs_gpu
@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("size", FEW_TOKENS, ids=str)
def test_every_tile_for_few_tokens(size, dtype):
    assert len(check_every_tile(size, dtype)) > 7


@needs_gpu
@pytest.mark.parametrize("value", [0.0, 2.0**-140, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", ["scale", "x"])
def test_special_values_of_few_tokens(where, value):
    """In the last of several tiles of rows, with one group a step and several, in a part of K."""
    sizes = [(2, 40, 512, 64), (8, 10000, 256, 128), (11, 10000, 256, 256)]
    sizes += [(8, 2500, 8320, 128), (8, 500, 14336, 128)]
    check_special_values(where, value, sizes, (-3, -1), (1, 70))


@needs_gpu
@pytest.mark.parametrize("m", [1, 8, 16, 40, 100])
def test_a_kernel_that_begins_early_waits_for_what_it_reads(m):
    """x is the result of the kernel before, the weight is written by the one before that."""
    k = 2048
    weights = [ops.int4_repack(*random_weight(k, k, 128, BF16, "cuda")) for _ in range(2)]
    shared = [t.clone() for t in weights[0]]
    x = randn("cuda", BF16, m, k)

    def chain(between=lambda: None):
        y = x
        for i in range(8):
            for to, new in zip(shared, weights[i % 2], strict=True):
                to.copy_(new)
            between()
            y = ops.int4_linear_repacked(y, *shared, out_features=k)
            between()
            y = ops.int4_linear_repacked(y, *shared, out_features=k)
            between()
        return y

    expected = chain(torch.cuda.synchronize)
    assert not torch.isnan(expected).any()
    assert_same_bits(chain(), expected)
    graph, y = cuda_graph(chain)
    for _ in range(20):
        graph.replay()
    assert_same_bits(y, expected)


# The tiles for many tokens, and every other one in their place

MANY_TOKENS = [  # M, N, K, group
    (17, 130, 512, 128), (32, 128, 4096, 4096), (33, 257, 1152, 64), (64, 1000, 1024, 128),
    (64, 1030, 1664, 128), (65, 129, 320, 64), (100, 40, 832, 64), (128, 4099, 640, 128),
    (129, 520, 192, 64), (256, 136, 2048, 2048), (257, 260, 64, 64), (2100, 264, 384, 128),
    (1024, 4099, 128, 128),
]  # fmt: skip


@needs_gpu
@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("size", MANY_TOKENS, ids=str)
def test_every_tile_for_many_tokens(size, dtype):
    hopper = torch.cuda.get_device_capability() == (9, 0)
    assert len(check_every_tile(size, dtype)) >= (13 if hopper else 7)


@needs_gpu
@pytest.mark.parametrize("value", [0.0, 2.0**-140, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", ["scale", "x"])
def test_special_values_of_many_tokens(where, value):
    """In the last row and the last group, with K in one part and in several."""
    sizes = [(20, 40, 1024, 128), (64, 4100, 256, 64), (100, 40, 832, 64), (300, 260, 1024, 1024)]
    check_special_values(where, value, sizes, (-1, -1), (-1, -1))


# Rounded results


@pytest.mark.parametrize(
    "size",
    [(1, 31, 1024, 128), (7, 33, 248, 8), (33, 65, 192, 64), (3, 5, 1016, 1016), (0, 3, 16, 8)],
    ids=str,
)
def test_sizes(device, dtype, size):
    m, n, k, group = size
    check_both(
        randn(device, dtype, m, k),
        random_weight(n, k, group, dtype, device),
        randn(device, dtype, n),
    )


@pytest.mark.parametrize("m", [1023, 1024, 1025])
def test_many_rows(device, m):
    check_both(randn(device, BF16, m, 64), random_weight(3, 64, 32, BF16, device))


@pytest.mark.parametrize("lead", [(), (1,), (3, 1), (2, 1, 4)], ids=str)
def test_leading_dims(device, lead):
    for dtype in dtypes(device):
        weight = random_weight(9, 40, 8, dtype, device)
        x = randn(device, dtype, *lead, 40)
        out = ops.int4_linear(x, *weight)
        assert out.shape == (*lead, 9) and out.is_contiguous()
        check_both(x, weight, randn(device, dtype, 9))


@pytest.mark.parametrize("size", [(0, 3, 16), (3, 0, 16), (3, 4, 0), (0, 0, 0)], ids=str)
def test_empty(device, size):
    """Without K the result is the bias, without N the gradient is 0."""
    m, n, k = size
    for dtype in dtypes(device):
        weight = random_weight(n, k, 8, dtype, device)
        x, bias = randn(device, dtype, m, k), randn(device, dtype, n)
        args = [x, *ops.int4_repack(*weight)]
        for op, call_args, kwargs in (
            (OP, [x, *weight], {}),
            (OP + "_repacked", args, {"out_features": n}),
        ):
            out, (dx, *_) = forward_backward(op, [*call_args, bias], kwargs)
            assert_equal(out, bias.expand(m, n).contiguous())
            assert_equal(dx, torch.zeros_like(x))
            plain = getattr(ops, op)(*call_args, **kwargs)
            assert_equal(plain, torch.zeros_like(out))


def test_the_puzzle(device):
    """The notebook's: scale (32, 8), offset (32,), weight (32, 8), activation (64, 32)."""
    scale = torch.rand(32, 8)
    offset, weight = torch.randint(-10, 10, (32,)), torch.randint(-10, 10, (32, 8))
    activation = torch.randn(64, 32)
    # The notebook unpacks words into nibbles, and spreads scale and offset over groups of 8.
    shifts = torch.arange(8) * 4
    offsets = ((offset[:, None] >> shifts) & 15).repeat_interleave(8, 1)
    codes = ((weight[..., None] >> shifts) & 15).flatten(1)
    spec = (scale.repeat_interleave(8, 1) * (codes - offsets)) @ activation
    words = [t.to(torch.int32).to(device) for t in (weight, offset[:, None])]
    z = ops.int4_linear(activation.to(device).t(), words[0], scale.to(device), words[1]).t()
    assert z.shape == spec.shape == (32, 32)
    torch.testing.assert_close(z.cpu(), spec, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("value", [0.0, 2.0**-140, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("m", [2, 40, 140])
def test_scales_are_data(device, m, value):
    """Zero, subnormal, inf and NaN scales give the results of the dequantised weight."""
    for dtype in dtypes(device):
        for group in (8, 64):
            x = randn(device, dtype, m, 128)
            weight = random_weight(5, 128, group, dtype, device)
            weight[1][3, 1] = value
            dense = R.int4_weight(*(t.cpu() for t in weight))
            expected = x.cpu() @ dense.T
            packed = ops.int4_repack(*weight)
            for got in (
                ops.int4_linear(x, *weight),
                ops.int4_linear_repacked(x, *packed, out_features=5),
            ):
                assert_same_nonfinite(got.cpu(), expected)
            if math.isfinite(value):
                check_both(x, weight)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_inf_and_nan_in_x_spread_as_in_torch(device, value):
    for dtype in dtypes(device):
        for m, group in ((2, 8), (2, 64), (140, 64)):
            x = randn(device, dtype, m, 128)
            x[1, 70] = value
            weight = random_weight(33, 128, group, dtype, device)
            dense = R.int4_weight(*(t.cpu() for t in weight))
            expected = x.cpu() @ dense.T
            got = ops.int4_linear(x, *weight).cpu()
            assert_same_nonfinite(got, expected)


@given(
    size=st.sampled_from([(1, 1, 8, 8), (5, 33, 72, 24), (2, 20, 128, 64), (33, 7, 64, 32)]),
    matrix=layouts(2),
    vector=layouts(1),
    dtype=dtype_names,
    seed=seeds,
)
def test_any_layout(size, matrix, vector, dtype, seed):
    m, n, k, group = size
    dtype = getattr(torch, dtype)
    torch.manual_seed(seed)
    qweight, scale, zero = random_weight(n, k, group, dtype, "cpu")
    x, shift = values((m, k), "normal", seed).to(dtype), values((n,), "normal", seed).to(dtype)
    weight = [qweight.t().contiguous().t(), strided(scale, matrix), zero.t().contiguous().t()]
    dout = strided(values((m, n), "normal", seed + 1).to(dtype), matrix)
    args = [strided(x, matrix), *weight, strided(shift, vector)]
    check_op(OP, args, dout=dout, eager=False)


def test_weight_parameters_get_no_gradient():
    args = [torch.randn(2, 16), *random_weight(3, 16, 8, F32, "cpu"), torch.randn(3)]
    for i in (2, 4):
        leaves = list(args)
        leaves[i] = args[i].clone().requires_grad_()
        with pytest.raises(RuntimeError, match="a quantised weight is frozen"):
            ops.int4_linear(*leaves)
        with torch.no_grad():
            ops.int4_linear(*leaves)


# The module


def linear_of(n, k, device="cpu", dtype=F32, bias=True):
    linear = torch.nn.Linear(k, n, bias)
    torch.nn.init.normal_(linear.weight, mean=0.1, std=0.5)
    return linear.to(device, dtype)


@pytest.mark.parametrize("group", [8, 32, 128, None])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_module_from_linear(device, dtype, group):
    linear = linear_of(33, 256, device, dtype)
    module = Int4Linear.from_linear(linear, group)
    size = group or 256
    x = randn(device, dtype, 3, 256)
    # Rounded to the nearest level: half of a group's scale, and the rounding of w itself.
    step = module.portable()[1].double().repeat_interleave(size, 1)
    error = (module.dequantise().double() - linear.weight.double()).abs()
    rounding = torch.finfo(dtype).eps * module.dequantise().double().abs()
    assert (error <= step * 0.5 * (1 + 1e-5) + rounding).all()
    assert 0.01 < module.quantisation_error < 0.15
    assert 0 < module.largest_error <= module.scale.max().item() * 0.5 * (1 + 1e-5)
    weight = module.portable()
    check_op(OP, [x, *weight, module.bias])
    expected = ops.int4_linear(x, *weight, module.bias)
    torch.testing.assert_close(module(x), expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(module.to_torch()(x), expected, rtol=0.02, atol=0.05)


ENDS = [(0.0, 1.0), (-1.0, 0.0), (-1.0, 1.0), (-0.916, 1.0), (-1.0, 0.916), (-1e-3, 1.0)]


@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_levels_stay_in_the_dtypes_range(device, dtype, ends):
    """A scale that is rounded up puts the outermost level beyond it: inf for a finite weight."""
    largest = torch.finfo(dtype).max
    values = torch.linspace(*ends, 64, dtype=F64)
    linear = linear_of(3, 64, device, dtype, bias=False)
    with torch.no_grad():
        linear.weight.copy_((values * largest).expand(3, -1))
    module = Int4Linear.from_linear(linear, 64)
    assert module.dequantise().isfinite().all()
    got = module.dequantise().double().cpu() / largest
    step = module.portable()[1].double().cpu() / largest
    assert ((got - values).abs() <= 0.75 * step + torch.finfo(dtype).eps).all()
    x = torch.eye(64, dtype=dtype, device=device) / 16
    assert_equal(module(x), module.dequantise().t() / 16)
    assert 0 < module.quantisation_error < 0.1


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_the_error_is_relative_at_any_size(size):
    torch.manual_seed(0)
    linear = linear_of(16, 64)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(16, 64))
        plain = Int4Linear.from_linear(linear, 16).quantisation_error
        linear.weight.mul_(size)
    assert Int4Linear.from_linear(linear, 16).quantisation_error == pytest.approx(plain, rel=1e-3)


def test_finer_groups_lose_less():
    linear = linear_of(16, 512)
    errors = [Int4Linear.from_linear(linear, g).quantisation_error for g in (16, 64, None)]
    assert errors == sorted(errors)


def test_module_is_exact_where_levels_are():
    """A weight on 16 levels comes back bit for bit; a row of zeros too."""
    linear = linear_of(4, 32, bias=False)
    with torch.no_grad():
        codes = torch.randint(0, 16, (4, 32))
        codes[:, 0], codes[:, 1] = 0, 15
        linear.weight.copy_((codes - 7) * 0.5)
        linear.weight[3] = 0
    module = Int4Linear.from_linear(linear, 32)
    assert_equal(module.dequantise(), linear.weight.detach())
    assert module.quantisation_error == 0 and module.bias is None


@pytest.mark.parametrize("group", [0, 4, 12, 96, 256, -8])
def test_module_refuses_a_group(group):
    with pytest.raises(ValueError, match="group_size must be a multiple of 8 that divides"):
        Int4Linear.from_linear(linear_of(4, 128), group)


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def hooked(linear):
    linear.register_forward_hook(lambda module, args, out: 2 * out)
    return linear


def with_forward(linear):
    linear.forward = lambda x, forward=linear.forward: 2 * forward(x)
    return linear


def mixed(linear):
    linear.bias = torch.nn.Parameter(linear.bias.detach().to(BF16))
    return linear


OTHER_LINEARS = {
    "subclass": (lambda: Doubled(64, 8), f"{__name__}.Doubled, a subclass of nn.Linear"),
    "hook": (lambda: hooked(linear_of(8, 64)), "nn.Linear with a forward hook"),
    "forward": (lambda: with_forward(linear_of(8, 64)), "a forward of its own on the instance"),
    "parametrisation": (
        lambda: torch.nn.utils.parametrizations.weight_norm(linear_of(8, 64)),
        "nn.Linear with a parametrisation of weight (_WeightNorm)",
    ),
    "old weight_norm": (
        lambda: torch.nn.utils.weight_norm(linear_of(8, 64)),
        "nn.Linear with a forward pre-hook (WeightNorm)",
    ),
    "meta": (lambda: linear_of(8, 64, "meta"), "must have values, but got one on the meta device"),
    "dtype": (
        lambda: linear_of(8, 64, dtype=torch.complex64),
        "linear.weight must be one of torch.float32, ",
    ),
    "mixed dtypes": (
        lambda: mixed(linear_of(8, 64)),
        "linear.bias must have the dtype of linear.weight, torch.float32, but got torch.bfloat16",
    ),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("name", OTHER_LINEARS)
def test_module_refuses_another_linear_layer(name):
    make, text = OTHER_LINEARS[name]
    with pytest.raises(ValueError, match=re.escape(text)) as error:
        Int4Linear.from_linear(make(), 16)
    assert "\n" not in str(error.value) and ", but got " in str(error.value)


@pytest.mark.parametrize("how", ["subclass", "hook"])
def test_module_that_computes_more_has_no_torch_form(how):
    module = Int4Linear.from_linear(linear_of(8, 64), 16)
    if how == "hook":
        hooked(module)
    else:
        module.__class__ = type("More", (Int4Linear,), {})
    with pytest.raises(ValueError, match="Int4Linear.to_torch: module must be Int4Linear, but got"):
        module.to_torch()


def test_the_torch_form_is_frozen_too():
    stock = Int4Linear.from_linear(linear_of(8, 64), 16).to_torch()
    assert not any(p.requires_grad for p in stock.parameters()) and not stock.training


def test_module_saves_and_loads(device):
    """The file holds only the portable tensors; the loaded module gives the same bits."""
    module = Int4Linear.from_linear(linear_of(17, 64, device), 16)
    assert list(module.state_dict()) == ["qweight", "scale", "zero", "bias", "weight"]
    assert module.state_dict()["weight"].numel() == 0
    # The weight is there once, in the layout of its device.
    assert module.qweight.dim() == (3 if device == "cuda" else 2)
    assert len(list(module.buffers())) == 4
    x = randn(device, F32, 5, 64)
    expected = module(x)
    fresh = Int4Linear(64, 17, group_size=16, device=device)
    fresh.load_state_dict(module.state_dict())
    assert_same_bits(fresh(x), expected)
    assert_same_bits(copy.deepcopy(module)(x), expected)
    moved = Int4Linear.from_linear(linear_of(17, 64), 16)
    moved.load_state_dict(module.state_dict())
    assert_same_bits(moved.to(device)(x), expected)
    half = copy.deepcopy(module).to(BF16)
    assert half.qweight.dtype == torch.int32 and half(x.to(BF16)).dtype == BF16


def test_module_loads_a_file_without_the_mark():
    """Older versions wrote files without the mark."""
    module = Int4Linear.from_linear(linear_of(17, 64), 16)
    state = {name: t for name, t in module.state_dict().items() if name != "weight"}
    fresh = Int4Linear(64, 17, group_size=16)
    assert not any(fresh.load_state_dict(state))
    x = torch.randn(5, 64)
    assert_same_bits(fresh(x), module(x))


@pytest.mark.parametrize("assign", [False, True])
def test_module_loads_into_one_without_memory(assign):
    module = Int4Linear.from_linear(linear_of(17, 64), 16)
    fresh = Int4Linear(64, 17, group_size=16, device="meta")
    assert list(fresh.state_dict()) == ["qweight", "scale", "zero", "bias"]
    if not assign:
        fresh = fresh.to_empty(device="cpu")
    assert not any(fresh.load_state_dict(module.state_dict(), assign=assign))
    x = torch.randn(5, 64)
    assert_same_bits(fresh(x), module(x))


@pytest.mark.parametrize("strict", [False, True])
def test_a_float_layer_refuses_the_codes(strict):
    """Otherwise the weight would silently keep its initial values."""
    state = torch.nn.Sequential(Int4Linear.from_linear(linear_of(17, 64), 16)).state_dict()
    with pytest.raises(RuntimeError, match="size mismatch for 0.weight"):
        torch.nn.Sequential(linear_of(17, 64)).load_state_dict(state, strict=strict)


WRONG_STATES = {
    "a float layer's": (
        lambda state: {"weight": torch.randn(17, 64), "bias": state["bias"]},
        "0.weight must be empty, but got (17, 64); load it into nn.Linear and use Int4Linear.from_",
    ),
    "cast": (
        lambda state: {name: t.half() for name, t in state.items()},
        "0.qweight must be int32, but got torch.float16; cast the module with .to(dtype)",
    ),
    "cast zeros": (
        lambda state: {**state, "zero": state["zero"].double()},
        "0.zero must be int32, but got torch.float64",
    ),
    "64 bits": (
        lambda state: {**state, "qweight": state["qweight"].long()},
        "0.qweight must be int32, but got torch.int64",
    ),
    "codes for scales": (
        lambda state: {**state, "scale": state["scale"].int()},
        "0.scale must be floating point, but got torch.int32",
    ),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", WRONG_STATES)
def test_module_refuses_another_state(name, strict):
    change, text = WRONG_STATES[name]
    module = Int4Linear.from_linear(linear_of(17, 64), 16)
    before = {n: t.clone() for n, t in module.state_dict().items()}
    state = {f"0.{n}": t for n, t in change(module.state_dict()).items()}
    with pytest.raises(RuntimeError, match=re.escape(f"Int4Linear.load_state_dict: {text}")):
        torch.nn.Sequential(module).load_state_dict(state, strict=strict)
    for n, t in module.state_dict().items():
        assert_same_bits(t, before[n])


def test_from_pretrained_of_a_float_model_refuses_the_codes(tmp_path):
    """Otherwise transformers would initialise the weights, and only report it in a table."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**LLAMA)

    def quantised(model):
        for name, layer in list(model.named_modules()):
            if type(layer) is torch.nn.Linear:
                model.set_submodule(name, Int4Linear.from_linear(layer, 32))
        return model.eval()

    class Quantised(transformers.LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            for name, layer in list(self.named_modules()):
                if type(layer) is torch.nn.Linear:
                    sizes = layer.in_features, layer.out_features
                    self.set_submodule(name, Int4Linear(*sizes, False, 32))

    model = quantised(transformers.LlamaForCausalLM(config))
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(8)[None]
    # A model that has the layers before loading gives the same bits.
    assert_same_bits(Quantised.from_pretrained(tmp_path)(ids).logits, model(ids).logits)
    fresh = quantised(transformers.LlamaForCausalLM(config))
    assert not any(fresh.load_state_dict(model.state_dict()))
    assert_same_bits(fresh(ids).logits, model(ids).logits)


def test_weight_answers_what_models_ask(device):
    """T5's feed-forward casts to wo.weight.dtype."""
    for dtype in dtypes(device):
        module = Int4Linear.from_linear(linear_of(17, 64, device, dtype), 16)
        for asked in (module, copy.deepcopy(module)):
            weight = asked.weight
            assert isinstance(weight, torch.Tensor) and not weight.requires_grad
            assert weight.shape == (17, 64) and weight.dtype == dtype
            assert weight.device == asked.scale.device and weight.data_ptr() == 0
        assert module.to(F32).weight.dtype == F32 and "no values" in repr(module.weight)
    assert not list(module.parameters()) and "weight" not in dict(module.named_buffers())
    assert module.to("meta").weight.device.type == "meta"


USES = {
    "linear": lambda m, x: torch.nn.functional.linear(x, m.weight),
    "matmul": lambda m, x: x @ m.weight.t(),
    "data": lambda m, x: m.weight.data,
    "copy_": lambda m, x: m.weight.copy_(torch.ones(17, 64)),
    "init": lambda m, x: torch.nn.init.normal_(m.weight),
    "item": lambda m, x: m.weight[0, 0],
}


@pytest.mark.parametrize("use", USES)
def test_weight_has_no_values(use):
    module = Int4Linear.from_linear(linear_of(17, 64), 16)
    with pytest.raises(RuntimeError, match="only, but got aten.*; use dequantise()"):
        USES[use](module, torch.randn(2, 64))


def test_weight_is_not_assigned():
    """The codes would stay in force."""
    module = Int4Linear.from_linear(linear_of(17, 64), 16)
    for value in (torch.zeros(17, 64), torch.nn.Parameter(torch.zeros(17, 64)), None):
        with pytest.raises(AttributeError, match="weight must stay the codes' own, but got anoth"):
            module.weight = value


class AsksForTheDtype(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.wo = layer

    def forward(self, x):
        if isinstance(self.wo.weight, torch.Tensor) and x.dtype != self.wo.weight.dtype:
            x = x.to(self.wo.weight.dtype)
        return self.wo(x)


class UsesTheValues(AsksForTheDtype):
    def forward(self, x):
        return x @ self.wo.weight.t()


def test_weight_under_compile_and_export():
    layer = Int4Linear.from_linear(linear_of(17, 64, dtype=BF16), 16)
    module, x = AsksForTheDtype(layer), torch.randn(3, 64)
    expected = layer(x.to(BF16))
    assert_same_bits(module(x), expected)
    assert_same_bits(torch.compile(module, fullgraph=True, backend="aot_eager")(x), expected)
    for strict in (True, False):
        exported = torch.export.export(module, (x,), strict=strict).run_decompositions()
        assert_same_bits(exported.module()(x), expected)
        assert "int4_unpack" not in exported.graph_module.code
    compiled = torch.compile(UsesTheValues(layer), fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(x.to(BF16)), x.to(BF16) @ layer.dequantise().t())


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_module_traces(device):
    module = Int4Linear.from_linear(linear_of(17, 64, device), 16)
    x = randn(device, F32, 5, 64)
    assert_same_bits(torch.jit.trace(module, x)(x), module(x))
    both = torch.nn.Sequential(module, torch.nn.ReLU())
    assert_same_bits(torch.jit.trace(both, x)(x), both(x))


def test_module_scripts(device):
    module = Int4Linear.from_linear(linear_of(17, 64, device), 16)
    x = randn(device, F32, 5, 64)
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(module), file)
    file.seek(0)
    assert_same_bits(torch.jit.load(file)(x), module(x))


def test_scripted_and_eager_load_each_other(device):
    """Strictly, in one process and from a file of a scripted module."""
    eager = torch.nn.Sequential(Int4Linear.from_linear(linear_of(17, 64, device), 16))
    other = torch.nn.Sequential(Int4Linear.from_linear(linear_of(17, 64, device), 16))
    scripted, x = torch.jit.script(other), randn(device, F32, 5, 64)
    assert list(scripted.state_dict()) == list(eager.state_dict())
    expected = scripted(x)
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    for state in (scripted.state_dict(), torch.jit.load(file).state_dict()):
        fresh = torch.nn.Sequential(Int4Linear(64, 17, group_size=16, device=device))
        assert not any(fresh.load_state_dict(state))
        assert_same_bits(fresh(x), expected)
    assert not any(scripted.load_state_dict(eager.state_dict()))
    assert_same_bits(scripted(x), eager(x))
    wrong = {**eager.state_dict(), "0.zero": eager.state_dict()["0.zero"].double()}
    with pytest.raises(RuntimeError, match="0.zero must be int32, but got torch.float64"):
        scripted.load_state_dict(wrong)


def test_module_loads_the_repacked_layout():
    """As a module that was scripted on CUDA and loaded by torch.jit.load saves it."""
    module = Int4Linear.from_linear(linear_of(17, 72), 24)
    packed = ops.int4_repack(*module.portable())
    state = dict(zip(("qweight", "scale", "zero"), packed, strict=True))
    fresh = Int4Linear(72, 17, group_size=24)
    assert not any(fresh.load_state_dict({**state, "bias": module.bias}))
    assert_equal(fresh.buffers(), module.buffers())


@needs_gpu
def test_module_changes_its_layout_with_the_device():
    """The weight is resident once; the way back gives the bits of the portable layout."""
    for dtype in dtypes("cuda"):
        module = Int4Linear.from_linear(linear_of(1000, 1088, dtype=dtype), 64)
        before = [t.clone() for t in module.buffers()]
        size = sum(t.nbytes for t in before)
        start = torch.cuda.memory_allocated()
        module.cuda()
        assert torch.cuda.memory_allocated() - start < 1.05 * size
        assert [t.dim() for t in module.buffers()] == [3, 3, 3, 1]
        state = module.state_dict()
        assert_equal(module.cpu().buffers(), before)
        fresh = Int4Linear(1088, 1000, group_size=64, device="cuda", dtype=dtype)
        fresh.load_state_dict(state)
        for got, ref in zip(fresh.portable(), before, strict=False):
            assert_equal(got.cpu(), ref)


def test_module_passes_a_gradient_to_x(device):
    module = Int4Linear.from_linear(linear_of(17, 64, device), 16)
    x = randn(device, F32, 5, 64).requires_grad_()
    module(x).sum().backward()
    assert not list(module.parameters())
    torch.testing.assert_close(x.grad, module.dequantise().sum(0).expand(5, -1))


# Refusals


def test_a_refusal_names_the_three_shapes_and_the_rule():
    weight = random_weight(4, 32, 8, F32, "cpu")
    weight[1] = weight[1][:, :3]
    with pytest.raises(RuntimeError) as error:
        ops.int4_linear(torch.zeros(2, 32), *weight)
    for part in ("(4, 4)", "(4, 3)", "(4, 1)", "a multiple of 8 that divides K"):
        assert part in str(error.value)
