"""linear, its forward and backward ops, against float64; exact on integer grids."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchweld
from numerics import assert_equal, assert_same_bits, assert_same_nonfinite, check_promise
from reference import ACTIVATIONS
from samples import F32, F64, check_op, dtypes, forward_backward
from strategies import linear_cases, strided, values
from tensors import MATMUL_SIZES, check_output_mask, permuted, randn

linear = torch.ops.torchweld.linear
linear_forward = torch.ops.torchweld.linear_forward

OP = "linear"
OPS = (OP, OP + "_forward", OP + "_backward")


def call_args(device, dtype, m, n, k, bias=True):
    """Weights of the size that keeps the result near 1."""
    weight = randn(device, dtype, n, k, scale=max(k, 1) ** -0.5)
    return [randn(device, dtype, m, k), weight, randn(device, dtype, n) if bias else None]


MANY_PRODUCTS = (128, 96, 97)  # the CPU takes oneDNN from a million on
SIZES = [*MATMUL_SIZES, (128, 64, 63), (2, 3, 4099)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(device, dtype, size):
    for activation in ACTIVATIONS:
        check_op(OP, call_args(device, dtype, *size), {"activation": activation})
    check_op(OP, call_args(device, dtype, *size, bias=False))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", ["plain", "transposed", "stepped", "expanded"])
def test_layouts_of_many_products(device, layout, activation):
    m, n, k = MANY_PRODUCTS

    def matrix(dtype, rows, cols):
        if layout == "transposed":
            return randn(device, dtype, cols, rows).t()
        if layout == "stepped":
            return randn(device, dtype, 2 * rows, 2 * cols)[::2, 1::2]
        if layout == "expanded":
            return randn(device, dtype, 1, cols).expand(rows, cols)
        return randn(device, dtype, rows, cols)

    for dtype in dtypes(device):
        args = [matrix(dtype, m, k), matrix(dtype, n, k) * k**-0.5, randn(device, dtype, n)]
        check_op(OP, args, {"activation": activation})


@pytest.mark.parametrize("rows", [65535, 65536, 65537])
def test_many_rows(device, rows):
    check_op(OP, call_args(device, F32, rows, 2, 3), {"activation": "gelu"})
    check_op(OP, call_args(device, F32, 2, rows, 3))


@pytest.mark.parametrize("lead", [(), (1,), (3, 1), (2, 3, 4), (1, 2, 1, 3)], ids=str)
def test_leading_dims(device, lead):
    for dtype in dtypes(device):
        x = randn(device, dtype, *lead, 17)
        rest = call_args(device, dtype, 1, 9, 17)[1:]
        for activation in ("none", "gelu_tanh"):
            check_op(OP, [x, *rest], {"activation": activation}, eager=False)
            out = linear(x, *rest, activation=activation)
            assert out.shape == (*lead, 9) and out.is_contiguous()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)], ids=str)
def test_empty(device, size, activation):
    """Without K the result is activation(bias); without rows the parameters' gradients are 0."""
    for dtype in dtypes(device):
        args = call_args(device, dtype, *size)
        check_op(OP, args, {"activation": activation}, eager=False)
        if activation == "none":
            expected = args[2].expand(size[0], -1) if size[2] == 0 else linear(*args)
            assert_equal(linear(*args), expected.contiguous())
        _, grads = forward_backward(OP, args, {"activation": activation})
        if 0 in (size[0], size[1]):
            assert all((g == 0).all() for g in grads)


@pytest.mark.parametrize("activation", ["none", "relu"])
@pytest.mark.parametrize("size", [*MATMUL_SIZES, (3, 5, 4096)], ids=str)
def test_integer_grid_is_exact(device, size, activation):
    """Integers up to 8: every sum is exact in any order, the result rounded once."""
    m, n, k = size

    def grid(*shape):
        return torch.randint(-8, 9, shape)

    x, weight, bias, dy = grid(m, k), grid(n, k), grid(n), grid(m, n)
    z = x @ weight.T + bias
    y = z.relu() if activation == "relu" else z
    dz = torch.where(z > 0, dy, 0) if activation == "relu" else dy
    for dtype in dtypes(device):
        args = [t.to(dtype).to(device) for t in (x, weight, bias)]
        out, grads = forward_backward(OP, args, {"activation": activation}, dy.to(args[0]))
        assert_equal(out, y.to(dtype).to(device))
        expected = [dz @ weight, dz.T @ x, dz.sum(0)]
        assert_equal(grads, [ref.to(dtype).to(device) for ref in expected])
        assert_equal(linear(args[0], args[1]), (z - bias).to(dtype).to(device))


def test_gelu_and_its_tanh_form_are_distinguished(device):
    """They differ by up to 4.7e-4, which only float32 can show."""
    z = torch.linspace(-6, 6, 4001, dtype=F64)[:, None]
    one = torch.ones(1, 1, dtype=F32, device=device)
    x = z.float().to(device)
    for activation, approximate in (("gelu", "none"), ("gelu_tanh", "tanh")):
        exact = torch.nn.functional.gelu(x.double(), approximate=approximate)
        error = (linear(x, one, activation=activation).double() - exact).abs().max()
        assert error < 2e-6, f"{activation}: {error:.2g}"
    check_op(OP, [x, one], {"activation": "gelu"})
    check_op(OP, [x, one], {"activation": "gelu_tanh"})


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("size", [(4, 3, 5), MANY_PRODUCTS], ids=str)
def test_inf_and_nan_spread_as_in_torch(device, size, value, activation):
    for dtype in dtypes(device):
        for which in range(3):
            args = call_args(device, dtype, *size)
            args[which].view(-1)[1] = value
            z = torch.nn.functional.linear(*args)
            expected = {
                "none": lambda t: t,
                "relu": torch.relu,
                "gelu": torch.nn.functional.gelu,
                "gelu_tanh": lambda t: torch.nn.functional.gelu(t, approximate="tanh"),
                "silu": torch.nn.functional.silu,
                "relu_squared": lambda t: torch.relu(t).square(),
            }[activation](z)
            got = linear(*args, activation=activation)
            assert_same_nonfinite(got, expected)


def test_relu_at_zero_and_nan(device):
    """relu'(0) = 0, relu(NaN) = NaN."""
    x = torch.tensor([[0.0], [-0.0], [1.0], [-1.0], [math.nan]], device=device)
    one = torch.ones(1, 1, device=device)
    out, (dx, *_) = forward_backward(OP, [x, one], {"activation": "relu"})
    assert_equal(out, torch.tensor([[0.0], [0.0], [1.0], [0.0], [math.nan]], device=device))
    assert_equal(dx[:4], torch.tensor([[0.0], [0.0], [1.0], [0.0]], device=device))


def test_weight_of_a_conv1d_goes_in_as_a_view(device):
    """GPT-2's Conv1D holds (K, N); its transposed view gives the same, gradient included."""
    for dtype in dtypes(device):
        x, weight, bias = call_args(device, dtype, 33, 48, 16)
        conv1d = weight.t().contiguous()
        assert not conv1d.t().is_contiguous()
        for activation in ("none", "gelu_tanh"):
            check_op(OP, [x, conv1d.t(), bias], {"activation": activation})
    conv1d.requires_grad_()
    linear(x, conv1d.t(), bias).sum().backward()
    assert conv1d.grad.shape == (16, 48)


@pytest.mark.parametrize("perm", [(1, 0, 2), (2, 1, 0), (0, 2, 1), (1, 2, 0)], ids=str)
def test_permuted_x_gets_its_whole_gradient(device, perm):
    """x.transpose(0, 1) of a (seqlen, batch, K) tensor, and worse."""
    for dtype in dtypes(device):
        x = permuted(randn(device, dtype, 4, 6, 5), perm)
        assert x.shape == (4, 6, 5)
        check_op(OP, [x, *call_args(device, dtype, 1, 3, 5)[1:]], {"activation": "gelu"})


def test_saved_tensors_of_the_forward_op(device):
    for dtype in dtypes(device):
        args = call_args(device, dtype, 4, 3, 5)
        z = linear(*args)
        for activation in ACTIVATIONS:
            y, preact = linear_forward(*args, activation=activation)
            assert_same_bits(y, linear(*args, activation=activation))
            if activation in ("none", "relu"):
                assert preact.shape == (0,) and preact.dtype == dtype
            else:
                assert_same_bits(preact, z)


@pytest.mark.parametrize("mask", range(8))
def test_output_mask(device, mask):
    x, weight, _ = call_args(device, F32, 4, 3, 5)
    check_output_mask(OP + "_backward", [randn(device, F32, 4, 3), x, weight], mask, 3)


@given(**linear_cases(largest=65), activation=st.sampled_from(ACTIVATIONS), bias=st.booleans())
def test_any_layout(m, n, k, activation, bias, matrix, vector, dtype, seed):
    dtype = getattr(torch, dtype)
    x = values((m, k), "normal", seed).to(dtype)
    weight = (values((n, k), "normal", seed + 1) * max(k, 1) ** -0.5).to(dtype)
    shift = values((n,), "normal", seed + 2).to(dtype)
    dy = values((m, n), "normal", seed + 3).to(dtype)
    args = [strided(x, matrix), strided(weight, matrix), strided(shift, vector) if bias else None]
    check_op(OP, args, {"activation": activation}, dout=strided(dy, matrix), eager=False)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gradient_in_front_of_the_products(device, activation):
    """linear_backward equals _activation_backward followed by the matmuls."""
    part, backward = torch.ops.torchweld._activation_backward, torch.ops.torchweld.linear_backward
    for dtype, (m, n, k) in product(dtypes(device), ((7, 16, 24), (33, 135, 8))):
        x, weight, bias = call_args(device, dtype, 3 * m, n, k)
        x = x.view(3, m, k)
        y, preact = linear_forward(x, weight, bias, activation=activation)
        kept = {"none": None, "relu": y}.get(activation, preact)
        dy = randn(device, dtype, 3, m, n)
        dz, dbias = part(dy, kept, activation=activation, sums=True)
        assert dz.shape == ((0,) if activation == "none" else dy.shape)
        dz = dy if activation == "none" else dz
        of = {"activation": activation}
        for mask in ([True, True, False], [False, False, True]):
            want = backward(dy, x, weight, kept, **of, output_mask=mask)
            assert_same_bits(backward(dz, x, weight, output_mask=mask), want)
        assert_same_bits(dbias, want[2])
        assert part(dy, kept, **of, sums=False)[1].shape == (0,)
        dz, dbias = part(dy[:0], None if kept is None else kept[:0], **of, sums=True)
        assert dz.numel() == 0
        assert_same_bits(dbias, torch.zeros_like(bias))
    if activation != "none":
        with pytest.raises(RuntimeError, match="_activation_backward: preact must be"):
            part(dy, kept[0], **of, sums=True)
        with pytest.raises(RuntimeError, match="_activation_backward: preact must be"):
            part(dy, None, **of, sums=True)
    with pytest.raises(RuntimeError, match=r"_activation_backward: dy must be \(\.\.\., N\)"):
        part(dy.new_zeros(()), sums=True)
    with pytest.raises(RuntimeError, match="_activation_backward: dy must be float32, float16 or"):
        part(torch.zeros(2, 3, dtype=torch.int64, device=device), sums=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_rows_written_into_a_larger_result(device, activation):
    part = torch.ops.torchweld._linear_part
    for dtype in dtypes(device):
        x, weight, bias = call_args(device, dtype, 7, 16, 24)
        y, z = (torch.full((7, 16), math.nan, device=device, dtype=dtype) for _ in range(2))
        part(x[2:5], weight, bias, y[2:5], z[2:5], activation=activation)
        want = linear_forward(x[2:5], weight, bias, activation=activation)[0]
        assert_same_bits(y[2:5], want)
        assert_same_bits(z[2:5], linear(x[2:5], weight, bias))
        for t in (y, z):
            assert t[:2].isnan().all()
            assert t[5:].isnan().all()
        y.fill_(math.nan)
        part(x[2:5], weight, None, y[2:5], activation=activation)
        assert_same_bits(y[2:5], linear(x[2:5], weight, activation=activation))
        part(x[:0], weight, bias, y[:0], activation=activation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_rows_written_into_several_matrices(device, activation):
    """The rows of a batch are written between other rows of y and of the pre-activation."""
    part = torch.ops.torchweld._linear_part
    # Rows that fill 16 bytes, and some that don't.
    sizes = ((3, 16, 24), (5, 12, 8), (150, 135, 72))
    for dtype, (m, n, k) in product(dtypes(device), sizes):
        x, weight, bias = (
            torch.randint(-4, 5, shape).to(device, dtype) for shape in ((3, m, k), (n, k), (n,))
        )
        y, z = (torch.full((3, m + 4, n), math.nan, device=device, dtype=dtype) for _ in range(2))
        rows = slice(1, m + 1)
        part(x, weight, bias, y[:, rows], z[:, rows], activation=activation)
        # Sums of integers are the same in all tiles.
        assert_same_bits(z[:, rows], linear(x, weight, bias))
        want = linear_forward(x, weight, bias, activation=activation)[0]
        assert_same_bits(y[:, rows], want)
        for t in (y, z):
            assert t[:, 0].isnan().all()
            assert t[:, m + 1 :].isnan().all()
        y.fill_(math.nan)
        part(x, weight, None, y[:, rows], activation=activation)
        assert_same_bits(y[:, rows], linear(x, weight, activation=activation))
        assert y[:, 0].isnan().all()


def test_refusals_of_rows_written_into_a_larger_result(device):
    part = torch.ops.torchweld._linear_part
    x, weight, bias = call_args(device, F32, 4, 6, 8)
    y = torch.full((4, 6), math.nan, device=device)
    for args, sentence in (
        ((y[:3],), r"_linear_part: y must be \(\.\.\., N\) = \(4, 6\), but got"),
        ((y.double(),), "_linear_part: y must be float32 like x, but got"),
        (
            (torch.empty(6, 4, device=device).t(),),
            "_linear_part: y must be contiguous, or a batch of contiguous matrices, but got",
        ),
        ((y, y[:, :5]), "_linear_part: preact must be"),
    ):
        with pytest.raises(RuntimeError, match=sentence):
            part(x, weight, bias, *args)
    several = [torch.empty(2, rows, 6, device=device)[:, :4] for rows in (4, 5)]
    with pytest.raises(RuntimeError, match="_linear_part: preact must have y's strides"):
        part(x.expand(2, 4, 8), weight, bias, *several)
    with pytest.raises(RuntimeError, match="_linear_part: activation must be one of none, relu"):
        part(x, weight, bias, y, activation="tanh")
    with pytest.raises(RuntimeError, match="_linear_part: its tensors must need no gradient"):
        part(x, weight.requires_grad_(), bias, y)
    assert y.isnan().all()
    version = y._version
    with torch.no_grad():
        part(x, weight, bias, y)
    assert y._version > version
    assert_same_bits(y, linear(x, weight.detach(), bias))


@pytest.mark.parametrize("m, n, k", [(128, 40, 1560), (512, 512, 2048), (256, 1024, 512)])
def test_long_sums_are_as_accurate_as_promised(m, n, k):
    """README's bound, in float32 on the CPU: one chain of additions over all of K breaks it."""
    for seed in range(4):
        torch.manual_seed(seed)
        x, w, b = torch.randn(m, k), torch.randn(n, k) / k**0.5, torch.randn(n)
        exact = torch.nn.functional.linear(x.double(), w.double(), b.double())
        check_promise(torchweld.linear(x, w, b), torch.nn.functional.linear(x, w, b), exact)
