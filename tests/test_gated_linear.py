"""gated_linear, its forward and backward ops, against float64; its linear part is exact."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numerics import assert_equal, assert_same_nonfinite
from reference import EAGER, GATES
from samples import F32, F64, check_op, dtypes, forward_backward
from strategies import linear_cases, strided, values
from tensors import check_empty, check_output_mask, permuted, randn

gated_linear = torch.ops.torchweld.gated_linear
gated_linear_forward = torch.ops.torchweld.gated_linear_forward

OP = "gated_linear"
OPS = (OP, OP + "_forward", OP + "_backward")


def call_args(device, dtype, m, n, k, bias=True):
    weight = randn(device, dtype, 2 * n, k, scale=max(k, 1) ** -0.5)
    return [randn(device, dtype, m, k), weight, randn(device, dtype, 2 * n) if bias else None]


SIZES = [(1, 1, 1), (1, 33, 31), (31, 1, 33), (33, 65, 64), (64, 31, 127), (127, 64, 128)]
SIZES += [(65, 63, 129), (5, 7, 1021)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(device, dtype, size):
    for gate in GATES:
        kwargs = {"gate": gate, "interleaved": False}
        check_op(OP, call_args(device, dtype, *size), kwargs, eager=min(size) > 4)
        kwargs["interleaved"] = True
        check_op(OP, call_args(device, dtype, *size, bias=False), kwargs, eager=min(size) > 4)


@pytest.mark.parametrize("rows", [65535, 65537])
def test_many_rows(device, rows):
    check_op(OP, call_args(device, F32, rows, 2, 3), {"gate": "swiglu"})


@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (2, 1, 4)], ids=str)
def test_leading_dims(device, lead):
    for dtype in dtypes(device):
        x = randn(device, dtype, *lead, 17)
        rest = call_args(device, dtype, 1, 5, 17)[1:]
        check_op(OP, [x, *rest], {"gate": "geglu"}, eager=False)
        out = gated_linear(x, *rest)
        assert out.shape == (*lead, 5) and out.is_contiguous()


@pytest.mark.parametrize("size", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)], ids=str)
def test_empty(device, size):
    for dtype in dtypes(device):
        for gate in GATES:
            for interleaved in (False, True):
                kwargs = {"gate": gate, "interleaved": interleaved}
                check_empty(OP, call_args(device, dtype, *size), kwargs, *size[:2])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("size", [*SIZES, (3, 5, 4096)], ids=str)
def test_linear_part_is_exact_on_an_integer_grid(device, size, interleaved):
    """z is bit-equal to integer arithmetic, and so is reglu of it where the product is small."""
    m, n, k = size

    def grid(*shape, high=8):
        return torch.randint(-high, high + 1, shape)

    x, weight, bias = grid(m, k), grid(2 * n, k), grid(2 * n)
    z = x @ weight.T + bias
    for dtype in dtypes(device):
        args = [t.to(dtype).to(device) for t in (x, weight, bias)]
        _, got = gated_linear_forward(*args, interleaved=interleaved)
        assert_equal(got, z.to(dtype).to(device))
    # Left 1, right an integer: reglu hands the relu through, and its gradients are integers.
    left = slice(0, None, 2) if interleaved else slice(0, n)
    right = slice(1, None, 2) if interleaved else slice(n, None)
    weight[left], bias[left] = 0, 1
    weight[right] = grid(n, k)
    z, dy = x @ weight.T + bias, grid(m, n)
    dright = torch.where(z[:, right] > 0, dy, 0)
    for dtype in (F32, F64) if device == "cpu" else (F32,):
        args = [t.to(dtype).to(device) for t in (x, weight, bias)]
        kwargs = {"gate": "reglu", "interleaved": interleaved}
        out, grads = forward_backward(OP, args, kwargs, dy.to(args[0]))
        assert_equal(out, z[:, right].relu().to(dtype).to(device))
        dz = torch.zeros_like(z)
        dz[:, right], dz[:, left] = dright, dy * z[:, right].relu()
        if (dz.abs().max() * 8 * max(m, 2 * n)).item() < 2**24:
            for grad, ref in zip(grads, (dz @ weight, dz.T @ x, dz.sum(0)), strict=True):
                assert_equal(grad, ref.to(dtype).to(device))


@pytest.mark.parametrize("gate", GATES)
def test_halves_are_where_they_should_be(device, gate):
    """One left and one right row, distinguished by their values, in both layouts."""
    x = torch.ones(1, 1, dtype=F64)
    left, right = torch.tensor([[0.5], [-1.0], [2.0]]), torch.tensor([[1.5], [0.25], [-0.75]])
    packed = torch.cat([left, right])
    woven = torch.stack([left, right], 1).reshape(6, 1)
    f = {
        "sigmoid_tanh": lambda a, b: a.sigmoid() * b.tanh(),
        "geglu": lambda a, b: a * torch.nn.functional.gelu(b),
        "geglu_tanh": lambda a, b: a * torch.nn.functional.gelu(b, approximate="tanh"),
        "swiglu": lambda a, b: torch.nn.functional.silu(a) * b,
        "reglu": lambda a, b: a * b.relu(),
    }[gate]
    expected = f(left, right).T.to(device)
    x = x.float().to(device)
    for weight, interleaved in ((packed, False), (woven, True)):
        out = gated_linear(x, weight.to(device), gate=gate, interleaved=interleaved)
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-7)


def test_gelu_and_its_tanh_form_are_distinguished(device):
    z = torch.linspace(-4, 4, 801, dtype=F64)[:, None]
    weight = torch.tensor([[0.0], [1.0]], device=device)
    bias = torch.tensor([1.0, 0.0], device=device)
    x = z.float().to(device)
    for gate, approximate in (("geglu", "none"), ("geglu_tanh", "tanh")):
        exact = torch.nn.functional.gelu(x.double(), approximate=approximate)
        error = (gated_linear(x, weight, bias, gate=gate).double() - exact).abs().max()
        assert error < 2e-6, f"{gate}: {error:.2g}"


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_inf_and_nan_spread_as_in_torch(device, value, gate):
    for dtype in dtypes(device):
        for which in range(3):
            args = call_args(device, dtype, 4, 3, 5)
            args[which].view(-1)[1] = value
            expected = EAGER[OP](*args, gate=gate)
            got = gated_linear(*args, gate=gate)
            assert_same_nonfinite(got, expected)


def test_weight_of_a_conv1d_goes_in_as_a_view(device):
    for dtype in dtypes(device):
        x, weight, bias = call_args(device, dtype, 33, 24, 16)
        view = weight.t().contiguous().t()
        for interleaved in (False, True):
            check_op(OP, [x, view, bias], {"gate": "swiglu", "interleaved": interleaved})


@pytest.mark.parametrize("perm", [(1, 0, 2), (2, 1, 0), (0, 2, 1)], ids=str)
def test_permuted_x_gets_its_whole_gradient(device, perm):
    for dtype in dtypes(device):
        x = permuted(randn(device, dtype, 4, 6, 5), perm)
        check_op(OP, [x, *call_args(device, dtype, 1, 3, 5)[1:]], {"gate": "geglu"}, eager=False)


@pytest.mark.parametrize("mask", range(8))
def test_output_mask(device, mask):
    x, weight, bias = call_args(device, F32, 4, 3, 5)
    _, z = gated_linear_forward(x, weight, bias)
    check_output_mask(OP + "_backward", [randn(device, F32, 4, 3), x, weight, z], mask, 3)


@given(**linear_cases(), gate=st.sampled_from(GATES), interleaved=st.booleans())
def test_any_layout(m, n, k, gate, interleaved, matrix, vector, dtype, seed):
    dtype = getattr(torch, dtype)
    x = values((m, k), "normal", seed).to(dtype)
    weight = (values((2 * n, k), "normal", seed + 1) * max(k, 1) ** -0.5).to(dtype)
    bias = values((2 * n,), "normal", seed + 2).to(dtype)
    dy = values((m, n), "normal", seed + 3).to(dtype)
    args = [strided(x, matrix), strided(weight, matrix), strided(bias, vector)]
    kwargs = {"gate": gate, "interleaved": interleaved}
    check_op(OP, args, kwargs, dout=strided(dy, matrix), eager=False)
