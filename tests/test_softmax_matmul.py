"""softmax_matmul, its forward and backward ops, against float64 and hand-written masks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import masks
import reference as R
from numerics import acc_dtype, assert_equal, assert_same_bits, check
from running import REFERENCES
from samples import BF16, F16, F32, F64, check_op, dtypes, forward_backward
from strategies import dtype_names, kinds, layouts, seeds, sizes, strided, values
from tensors import pads, randn

softmax_matmul = torch.ops.torchweld.softmax_matmul
softmax_matmul_forward = torch.ops.torchweld.softmax_matmul_forward
softmax_matmul_backward = torch.ops.torchweld.softmax_matmul_backward

OP = "softmax_matmul"
OPS = (OP, OP + "_forward", OP + "_backward")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", masks.SHAPES, ids=str)
def test_truth_table(device, shape, causal):
    """Equal visible logits, the identity as value: the result is the table, divided by its rows."""
    seqlen_q, seqlen_k = shape
    leftpad = masks.leftpad_of(shape, causal, device)
    seen = masks.tables_of(shape, causal)
    lse = torch.log(seen.sum(-1).double())
    for dtype in dtypes(device):
        scores = torch.where(seen, 0.0, math.nan).to(dtype).to(device)[:, None]
        value = torch.eye(seqlen_k, dtype=dtype, device=device).expand(len(seen), 1, -1, -1)
        out, got_lse = softmax_matmul_forward(scores, value, leftpad, causal=causal)
        assert_equal(out[:, 0], masks.uniform(seen).to(dtype).to(device))
        expected = lse.to(acc_dtype(dtype)).to(device)
        assert_close(got_lse[:, 0], expected, rtol=1e-6, atol=1e-7)
        assert_equal(got_lse[:, 0].isneginf(), expected.isneginf())
        # d value of row i's result is 1 / count where i sees the key: summed over rows, the table.
        dscores, dvalue, _ = softmax_matmul_backward(
            torch.ones_like(out), scores, value, out, got_lse, leftpad, causal=causal
        )
        share = masks.uniform(seen).sum(1).to(device)
        assert_close(dvalue[:, 0, :, 0].double(), share, rtol=0, atol=8 * seqlen_q * 2.0**-9)
        assert (dvalue[:, 0][share == 0] == 0).all()
        assert (dscores[:, 0][~seen.to(device)] == 0).all()
        plain = masks.table(shape, causal, None)
        scores = torch.where(plain, 0.0, math.nan).to(dtype).to(device)[None, None]
        out = softmax_matmul(scores, value[:1], causal=causal)
        assert_equal(out[0, 0], masks.uniform(plain).to(dtype).to(device))


SIZES = [
    (1, 1, 1), (1, 33, 7), (31, 31, 32), (32, 32, 33), (33, 65, 64), (63, 127, 65), (64, 64, 128),
    (65, 128, 127), (127, 129, 1), (129, 33, 129), (7, 251, 13), (3, 1025, 17),
]  # fmt: skip


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(device, dtype, size):
    sq, sk, dv = size
    scores, value = randn(device, dtype, 2, 2, sq, sk), randn(device, dtype, 2, 2, sk, dv)
    check_op(OP, [scores, value], {"scale": 0.37})
    check_op(OP, [scores, value], {"causal": True})
    leftpad = pads(device, sk // 3, sk // 2)
    check_op(OP, [scores, value, leftpad], {"causal": True, "scale": 0.125})
    check_op(OP, [scores, value, leftpad], {"causal": False})
    # So few elements are left that eager's largest error is a matter of luck.
    leftpad = pads(device, sk - 1, sk)
    check_op(OP, [scores, value, leftpad], {"causal": True}, eager=False)
    for out, bound in zip(
        softmax_matmul_forward(scores, value, leftpad, causal=True),
        REFERENCES["softmax_matmul_forward"](scores, value, leftpad, causal=True),
        strict=True,
    ):
        check(out, bound, label="softmax_matmul_forward", device=device)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize(
    "size", [(1, 640, 256), (72, 1032, 136), (200, 520, 64), (130, 2048, 128)], ids=str
)
def test_rows_on_16_bytes(device, dtype, size):
    """As Hopper's kernel takes them, which starts on 16 bytes before the first live key: the same
    bits in every run, and NaN in padding is not read.
    """
    sq, sk, dv = size
    scores, value = randn(device, dtype, 3, 1, sq, sk), randn(device, dtype, 3, 1, sk, dv)
    for leftpad in (None, pads(device, 0, 13, 130)):
        for causal in (False, True):
            args = [scores.clone(), value.clone()] + ([] if leftpad is None else [leftpad])
            if leftpad is not None:
                for b, pad in enumerate(leftpad.tolist()):
                    args[0][b, :, :, :pad] = args[1][b, :, :pad] = math.nan
            check_op(OP, args, {"causal": causal, "scale": 0.5}, eager=leftpad is None)
            first = softmax_matmul(*args, causal=causal)
            for _ in range(20 if scores.is_cuda else 1):
                assert_same_bits(softmax_matmul(*args, causal=causal), first)


@pytest.mark.parametrize("batch", [65535, 65537])
def test_many_sequences(device, batch):
    scores, value = randn(device, F32, batch, 1, 1, 2), randn(device, F32, batch, 1, 2, 1)
    leftpad = torch.arange(batch, dtype=torch.int32, device=device) % 4 - 1
    check_op(OP, [scores, value, leftpad], {"causal": True})


@pytest.mark.parametrize("zero", ["batch", "nheads", "seqlen_q", "seqlen_k", "head_dim_v"])
def test_empty(device, zero):
    dims = {"batch": 2, "nheads": 2, "seqlen_q": 3, "seqlen_k": 4, "head_dim_v": 5, zero: 0}
    b, h, sq, sk, dv = dims.values()
    for dtype in dtypes(device):
        scores, value = randn(device, dtype, b, h, sq, sk), randn(device, dtype, b, h, sk, dv)
        leftpad = torch.ones(b, dtype=torch.int32, device=device)
        for causal in (False, True):
            check_op(OP, [scores, value], {"causal": causal}, eager=False)
            check_op(OP, [scores, value, leftpad], {"causal": causal}, eager=False)
        out, lse = softmax_matmul_forward(scores, value)
        if zero == "seqlen_k":
            assert (out == 0).all() and lse.isneginf().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen", [1, 2, 5, 33, 64])
def test_one_hot_at_every_visible_position(device, seqlen, causal):
    for dtype in dtypes(device):
        scores = torch.full((seqlen, 1, seqlen, seqlen), -1000.0, dtype=dtype, device=device)
        j = torch.arange(seqlen, device=device)
        scores[j, :, :, j] = 0  # sequence j has its 0 at key j
        value = randn(device, dtype, seqlen, 1, seqlen, 3)
        masks.check_one_hot(OP, [scores, value], causal)


@pytest.mark.parametrize("power", range(8))
def test_uniform(device, power):
    """Equal logits over 2^k keys and small integer values: the exact mean, rounded once."""
    n = 2**power
    for dtype in dtypes(device):
        value = torch.randint(-8, 9, (2, 1, n, 5), device=device)
        mean = (value.sum(2, keepdim=True).double() / n).to(dtype)
        for logit, scale in ((0.0, 1.0), (3000.0, -2.0), (5.0, 0.0)):
            scores = torch.full((2, 1, 3, n), logit, dtype=dtype, device=device)
            out = softmax_matmul(scores, value.to(dtype), scale=scale)
            assert_equal(out, mean.expand_as(out))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("hole", [math.nan, math.inf])
@pytest.mark.parametrize("shape", [(5, 5), (2, 5), (5, 2), (33, 70)], ids=str)
def test_padding_is_not_read(device, shape, hole, causal):
    """Scores, values and dout under the padding, and scores under the causal mask."""
    sq, sk = shape
    leftpad = pads(device, 0, 1, sk // 2, sk)
    seen = R.visible(4, sq, sk, leftpad.cpu(), causal)[:, None].to(device)
    keys = R.padding_keys(4, sk, leftpad.cpu())[:, None, :, None].to(device)
    rows = R.padding_rows(4, sq, sk, leftpad.cpu())[:, None, :, None].to(device)
    for dtype in dtypes(device):
        scores, value = randn(device, dtype, 4, 2, sq, sk), randn(device, dtype, 4, 2, sk, 3)
        dout = randn(device, dtype, 4, 2, sq, 3)

        def filled(by, scores=scores, value=value, dout=dout):
            args = [torch.where(seen, scores, by), torch.where(keys, by, value), leftpad]
            return forward_backward(OP, args, {"causal": causal}, torch.where(rows, by, dout))

        clean, dirty = filled(0.0), filled(hole)
        assert_same_bits(dirty[0], clean[0])
        assert_same_bits(dirty[1][:2], clean[1][:2])
        assert (clean[1][1][keys.expand_as(value)] == 0).all()


@pytest.mark.parametrize("scale", [0.0, -1.0, -0.37, 1e-30, 30.0])
def test_scale(device, scale):
    for dtype in dtypes(device):
        args = [randn(device, dtype, 2, 1, 9, 9), randn(device, dtype, 2, 1, 9, 4)]
        check_op(OP, [*args, pads(device, 0, 4)], {"scale": scale, "causal": True})


@pytest.mark.parametrize("offset", [0.0, -1e4, -2.5e5, 133120.0])
def test_offset_of_a_row(device, offset):
    steps = torch.randint(-64, 65, (2, 1, 9, 37), dtype=F64) / 8 + offset
    args = [steps.to(F32).to(device), randn(device, F32, 2, 1, 37, 4)]
    check_op(OP, [*args, pads(device, 2, 20)], {"causal": True})


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_visible_inf_and_nan_spread_as_in_torch(device, value):
    for dtype in dtypes(device):
        args = [randn(device, dtype, 2, 1, 7, 7), randn(device, dtype, 2, 1, 7, 4)]
        for which in (0, 1):
            bad = [a.clone() for a in args]
            bad[which][1, 0, 2, 1] = value
            check_op(OP, bad, backward=False, eager=False)
            expected = torch.softmax(bad[0], -1) @ bad[1]
            assert_equal(softmax_matmul(*bad).isnan(), expected.isnan())


@given(
    seqlen_q=sizes(33),
    seqlen_k=sizes(65),
    head_dim_v=sizes(33),
    batch=st.integers(1, 3),
    leftpad=st.one_of(st.none(), st.lists(st.integers(-4, 70), min_size=3, max_size=3)),
    causal=st.booleans(),
    scale=st.sampled_from([1.0, 0.25, -0.6]),
    layout=layouts(4),
    kind=kinds,
    dtype=dtype_names,
    seed=seeds,
)
def test_any_layout_and_pads(
    seqlen_q, seqlen_k, head_dim_v, batch, leftpad, causal, scale, layout, kind, dtype, seed
):
    dtype = getattr(torch, dtype)
    scores = values((batch, 2, seqlen_q, seqlen_k), kind, seed).to(dtype)
    value = values((batch, 2, seqlen_k, head_dim_v), "normal", seed + 1).to(dtype)
    dout = values((batch, 2, seqlen_q, head_dim_v), "normal", seed + 2).to(dtype)
    args = [strided(scores, layout), strided(value, layout)]
    if leftpad is not None:
        args.append(torch.tensor(leftpad[:batch], dtype=torch.int32))
    kwargs = {"causal": causal, "scale": scale}
    check_op(OP, args, kwargs, dout=strided(dout, layout), eager=False)
