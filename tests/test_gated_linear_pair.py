"""gated_linear_pair, its forward and backward ops, for weights anywhere in memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchweld
from numerics import assert_equal, assert_same_bits
from reference import GATES
from samples import BF16, F16, F32, F64, check_op, dtypes, forward_backward
from tensors import check_empty, check_output_mask, randn

OP = "gated_linear_pair"
OPS = (OP, OP + "_forward", OP + "_backward")
ops = torch.ops.torchweld

SIZES = [(1, 1, 1), (1, 33, 31), (31, 1, 33), (33, 65, 64), (64, 32, 127), (127, 64, 128)]
SIZES += [(65, 63, 129), (5, 128, 1021), (96, 192, 192)]
# Where the two weights (N, K) lie.
LAYOUTS = ("apart", "packed", "reversed", "woven", "gaps", "transposed", "unlike", "one")


def laid_out(left: Tensor, right: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """The values of two weights in a layout; of "one", left is right."""
    n, k = left.shape
    if layout == "packed":
        left, right = torch.cat([left, right]).split(n)
    elif layout == "reversed":
        right, left = torch.cat([right, left]).split(n)
    elif layout == "woven":
        woven = torch.stack([left, right], 1).view(2 * n, k)
        left, right = woven[::2], woven[1::2]
    elif layout == "gaps":
        wide = left.new_full((2, n + 1, k + 16), torch.nan)
        wide[:, :-1, 8:-8] = torch.stack([left, right])
        left, right = wide[:, :-1, 8:-8]
    elif layout == "transposed":
        left, right = (t.t().contiguous().t() for t in (left, right))
    elif layout == "unlike":
        right = right.t().contiguous().t()
    elif layout == "one":
        right = left
    return left, right


def call_args(device, dtype, m, n, k, layout="apart", biases=(True, True)):
    weights = [randn(device, dtype, n, k, scale=max(k, 1) ** -0.5) for _ in range(2)]
    vectors = [randn(device, dtype, n) if given else None for given in biases]
    return [randn(device, dtype, m, k), *laid_out(*weights, layout), *vectors]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(device, dtype, size):
    for gate in GATES:
        eager = min(size) > 4
        check_op(OP, call_args(device, dtype, *size), {"gate": gate}, eager=eager)
        bare = call_args(device, dtype, *size, biases=(False, False))
        check_op(OP, bare, {"gate": gate}, eager=eager)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_anywhere(device, layout):
    for dtype in dtypes(device):
        for size in ((33, 64, 128), (40, 128, 72), (3, 24, 40), (17, 33, 31), (130, 192, 256)):
            for biases in ((True, True), (False, True), (True, False)):
                check_op(OP, call_args(device, dtype, *size, layout, biases), eager=size[0] > 4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_changes_no_integer(device, layout):
    """Branches and gradients are sums of small integers, exact in any order."""
    for m, n, k in ((5, 64, 72), (130, 128, 200), (20, 33, 24), (64, 192, 128)):

        def grid(*shape):
            return torch.randint(-4, 5, shape).double()

        x, left, right, dy = grid(m, k), grid(n, k), grid(n, k), grid(m, n)
        left = right if layout == "one" else left
        z_left, z_right = x @ left.T, x @ right.T
        for dtype in dtypes(device):
            given = [t.to(dtype).to(device) for t in (x, left, right)]
            given[1:] = laid_out(*given[1:], layout)
            _, z = ops.gated_linear_pair_forward(*given, gate="reglu")
            assert_equal(z, torch.cat([z_left, z_right], 1).to(dtype).to(device))
        # With z = (1, 1) and reglu both branches of the gradient are dy.
        ones = torch.ones(m, 2 * n, dtype=F64)
        for dtype in (F32, F64) if device == "cpu" else (F32,):
            given = [t.to(dtype).to(device) for t in (x, left, right, ones, dy)]
            weights = laid_out(*given[1:3], layout)
            dx, dleft, dright, dleft_bias, dright_bias = ops.gated_linear_pair_backward(
                given[4], given[0], *weights, given[3], gate="reglu", output_mask=[True] * 5
            )
            assert_equal(dx, (dy @ (left + right)).to(dtype).to(device))
            for grad in (dleft, dright):
                assert_equal(grad, (dy.T @ x).to(dtype).to(device))
            for grad in (dleft_bias, dright_bias):
                assert_equal(grad, dy.sum(0).to(dtype).to(device))


@pytest.mark.parametrize("gate", GATES)
def test_equals_gated_linear_of_the_packed_weight(device, gate):
    for dtype in dtypes(device):
        for m, n, k in ((40, 64, 128), (7, 33, 31)):
            x, left, right, *biases = call_args(device, dtype, m, n, k)
            y = torchweld.gated_linear(x, torch.cat([left, right]), torch.cat(biases), gate=gate)
            pair = torchweld.gated_linear_pair(x, left, right, *biases, gate=gate)
            tolerance = {F64: 1e-12, F32: 1e-5}.get(dtype, 2e-2)
            torch.testing.assert_close(pair, y, rtol=tolerance, atol=tolerance)


def test_a_llama_mlp(device):
    gate_proj, up_proj = (nn.Linear(64, 192, bias=False, device=device) for _ in range(2))
    x = torch.randn(2, 5, 64, device=device)
    y = torchweld.gated_linear_pair(x, gate_proj.weight, up_proj.weight)
    assert y.shape == (2, 5, 192) and y.is_contiguous()
    torch.testing.assert_close(y, F.silu(gate_proj(x)) * up_proj(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0)], ids=str)
def test_empty(device, size):
    for dtype in dtypes(device):
        for gate in GATES:
            check_empty(OP, call_args(device, dtype, *size), {"gate": gate}, *size[:2])


def test_output_mask(device):
    for dtype in dtypes(device):
        x, left, right, *_ = call_args(device, dtype, 9, 64, 24)
        z, dy = randn(device, dtype, 9, 128), randn(device, dtype, 9, 64)
        for mask in (0b00001, 0b00010, 0b10100, 0b01000, 0):
            check_output_mask(OP + "_backward", [dy, x, left, right, z], mask, 5)


def test_gradients_keep_the_weights_layouts(device):
    args = call_args(device, F32, 9, 16, 24, "unlike", (False, False))
    _, (_, dleft, dright, *_) = forward_backward(OP, args, {})
    assert dleft.stride() == (24, 1) and dright.stride() == (1, 16)


def allocated_by(call, *args, **kwargs) -> int:
    """Bytes that a call allocates on the GPU, one after the other, after a first call."""
    call(*args, **kwargs)
    before = torch.cuda.memory_stats()["allocated_bytes.all.allocated"]
    call(*args, **kwargs)
    return torch.cuda.memory_stats()["allocated_bytes.all.allocated"] - before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the engines run on a GPU")
@pytest.mark.parametrize("layout", ["apart", "packed", "reversed", "woven", "gaps", "one"])
def test_no_weight_is_copied(layout):
    """A call allocates less than a weight beside its results and dz."""
    m, n, k = 256, 4096, 4096
    for dtype in (F16, BF16):
        x, left, right, *_ = call_args("cuda", dtype, m, n, k, layout, (False, False))
        z, dy = randn("cuda", dtype, m, 2 * n), randn("cuda", dtype, m, n)
        weight = left.numel() * left.element_size()
        forward = allocated_by(ops.gated_linear_pair, x, left, right)
        assert forward - m * n * x.element_size() < weight
        backward = allocated_by(
            ops.gated_linear_pair_backward, dy, x, left, right, z, output_mask=[True] + [False] * 4
        )
        assert backward - m * (2 * n + k) * x.element_size() < weight


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the engines run on a GPU")
def test_bits_are_those_of_gated_linear():
    """The kernel is the same, and the order of its sums."""
    for dtype in (F16, BF16, F32):
        for m, n, k in ((512, 256, 512), (16, 128, 256), (64, 512, 128)):
            x, left, right, *_ = call_args("cuda", dtype, m, n, k, biases=(False, False))
            y = ops.gated_linear(x, torch.cat([left, right]), gate="swiglu")
            for layout in ("apart", "packed", "reversed", "gaps"):
                weights = laid_out(left, right, layout)
                assert_same_bits(ops.gated_linear_pair(x, *weights), y, layout)
