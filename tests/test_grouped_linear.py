"""grouped_linear and grouped_gated_linear: groups of rows, epilogues and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import reference as R
import torchweld
from cuda_graphs import cuda_graph
from numerics import assert_equal, assert_same_bits
from samples import BF16, F32, call, check_op, dtypes, forward_backward
from tensors import randn

OPS = ("grouped_linear", "grouped_gated_linear")
ENDS = {
    "one": (33,),
    "even": (11, 22, 33),
    "empty groups": (0, 7, 7, 7, 33, 33),
    "rows behind": (5, 20),
    "none": (0, 0),
    "not ascending": (-3, 20, 4, 99, 7),
}


@pytest.fixture(params=OPS)
def op(request):
    return request.param


def call_args(op, device, dtype, rows, n, k, ends, *, bias=True, index=torch.int32):
    width = n if op == "grouped_linear" else 2 * n
    groups = len(ends)
    args = [
        randn(device, dtype, rows, k),
        randn(device, dtype, groups, width, k, scale=k**-0.5),
        torch.tensor(ends, dtype=index, device=device),
    ]
    return [*args, randn(device, dtype, groups, width)] if bias else args


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_groups(op, device, ends):
    for dtype in dtypes(device):
        for n, k in ((24, 40), (7, 13), (1, 1)):
            check_op(op, call_args(op, device, dtype, 33, n, k, ends, bias=n != 24))


def test_epilogues(op, device):
    for dtype in dtypes(device):
        args = call_args(op, device, dtype, 40, 24, 16, (10, 12, 30))
        if op == "grouped_linear":
            for activation in ("relu", "gelu", "gelu_tanh", "silu", "relu_squared"):
                check_op(op, args, {"activation": activation})
            continue
        for gate in R.GATES:
            for interleaved in (False, True):
                check_op(op, args, {"gate": gate, "interleaved": interleaved})


@pytest.mark.parametrize("size", [(300, 128, 64), (700, 136, 264)], ids=str)
def test_large(op, device, size):
    for dtype in dtypes(device):
        rows = size[0]
        ends = (3, rows // 2, rows // 2 + 130, rows - 9)
        check_op(op, call_args(op, device, dtype, *size, ends))


def test_offsets_may_be_int64_and_strided(op, device):
    args = call_args(op, device, F32, 33, 8, 16, (5, 11, 30))
    y = call(op)(*args)
    wide = torch.tensor([5, -1, 11, -1, 30, -1], device=device)
    assert_same_bits(call(op)(*args[:2], wide[::2], *args[3:]), y)
    far = torch.tensor([5, 11, 2**40], device=device)
    args[2] = torch.tensor([5, 11, 33], dtype=torch.int32, device=device)
    assert_same_bits(call(op)(*args[:2], far, *args[3:]), call(op)(*args))


def test_strides(op, device):
    """The operands of F.grouped_mm are column-major; a bias may be one vector for all groups."""
    for dtype in dtypes(device):
        args = call_args(op, device, dtype, 33, 16, 24, (5, 11, 30))
        expected = forward_backward(op, args, {}, dout := randn(device, dtype, 33, 16))
        other = [args[0].mT.contiguous().mT, args[1].mT.contiguous().mT, args[2], args[3]]
        y, grads = forward_backward(op, other, {}, dout.mT.contiguous().mT)
        check_op(op, other, eager=False)
        torch.testing.assert_close(y, expected[0])
        assert grads[1].stride() == other[1].stride()
        args[3] = args[3][:1].expand(3, -1)
        args[0] = args[0][:1].expand(33, -1)
        check_op(op, args, eager=False)


def test_rows_behind_the_last_group_are_not_read(op, device):
    for dtype in dtypes(device):
        args = call_args(op, device, dtype, 90, 64, 64, (30, 71))
        dout = randn(device, dtype, 90, 64)
        good = forward_backward(op, args, {}, dout)
        args[0] = args[0].clone()
        args[0][71:], dout[71:] = float("nan"), float("nan")
        y, grads = forward_backward(op, args, {}, dout)
        assert (y[71:] == 0).all() and (grads[0][71:] == 0).all()
        assert_same_bits([y, *grads], [good[0], *good[1]])


def test_integers_are_exact(op, device):
    for dtype in dtypes(device):
        args = call_args(op, device, dtype, 200, 32, 16, (1, 90, 90, 150))
        args = [a if a.dtype == torch.int32 else torch.randint_like(a, -2, 3) for a in args]
        options = {"activation": "relu"} if op == "grouped_linear" else {"gate": "reglu"}
        wide = getattr(R, op)(*map(R.up, args), **options)
        assert_equal(call(op)(*args, **options), wide.to(dtype).to(device))


def test_the_op_of_torch(op, device):
    """F.grouped_mm has the same groups."""
    x, weight, offsets = call_args(op, device, BF16, 64, 32, 32, (16, 16, 64), bias=False)
    if op == "grouped_linear":
        expected = F.grouped_mm(x, weight.mT, offs=offsets)
        torch.testing.assert_close(torchweld.grouped_linear(x, weight, offsets), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph")
def test_a_cuda_graph_replays_other_groups(op):
    args = call_args(op, "cuda", BF16, 256, 64, 64, (64, 128, 256))
    graph, y = cuda_graph(lambda: call(op)(*args))
    for ends in ((1, 2, 3), (0, 256, 256), (200, 100, 150)):
        args[2].copy_(torch.tensor(ends))
        graph.replay()
        assert_same_bits(y, call(op)(*args))


def test_refuses_offsets_that_are_no_ends(op, device):
    x, weight, offsets = call_args(op, device, F32, 8, 8, 8, (3, 8), bias=False)
    for bad in (offsets.float(), offsets[:1], offsets[None], offsets.to("meta")):
        with pytest.raises(RuntimeError, match="offsets must be"):
            call(op)(x, weight, bad)
    with pytest.raises(RuntimeError, match=r"K = 8, but got .*; use weight.mT"):
        call(op)(x, randn(device, F32, 2, 8, 6), offsets)
