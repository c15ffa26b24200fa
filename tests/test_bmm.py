"""bmm and its backward op against float64; exact on integer grids."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given

from numerics import assert_equal, assert_same_nonfinite
from samples import F32, check_op, dtypes, forward_backward
from strategies import dtype_names, layouts, seeds, sizes, strided, values
from tensors import MATMUL_SIZES, check_output_mask, randn

bmm = torch.ops.torchweld.bmm
bmm_backward = torch.ops.torchweld.bmm_backward

OP = "bmm"
OPS = (OP, OP + "_backward")
BATCHES = [(3, 3), (1, 3), (3, 1), (1, 1)]  # of a and b


def call_args(device, dtype, m, n, k, batches=(2, 2)):
    scale = max(k, 1) ** -0.5  # keeps the result near 1
    return [randn(device, dtype, batches[0], m, k), randn(device, dtype, batches[1], k, n) * scale]


@pytest.mark.parametrize("size", MATMUL_SIZES, ids=str)
def test_sizes(device, dtype, size):
    # On a CPU both are torch's own matmul, and which order of a sum is luckier depends on the chip.
    for batches in BATCHES:
        check_op(OP, call_args(device, dtype, *size, batches), eager=device == "cuda")


@pytest.mark.parametrize("batch", [65535, 65537])
@pytest.mark.parametrize("one", ["neither", "a", "b"])
def test_many_batches(device, batch, one):
    batches = (1 if one == "a" else batch, 1 if one == "b" else batch)
    # The gradient of the operand of batch 1 sums up to 131074 products.
    check_op(OP, call_args(device, F32, 2, 1, 3, batches), eager=False)


@pytest.mark.parametrize("batches", BATCHES, ids=str)
@pytest.mark.parametrize("transposed", range(4))
def test_transpositions(device, transposed, batches):
    """Either operand and the gradient as a transposed view."""
    for dtype in dtypes(device):
        for size in ((33, 48, 16), (40, 24, 64), (7, 5, 9)):
            a, b = call_args(device, dtype, *size, batches)
            dout = randn(device, dtype, max(batches), *size[:2])
            if transposed & 1:
                a = a.mT.contiguous().mT
            if transposed & 2:
                b, dout = b.mT.contiguous().mT, dout.mT.contiguous().mT
            check_op(OP, [a, b], dout=dout)


def test_heads_of_a_projection(device):
    """(seqlen, batch * heads, head_dim) tensors seen as (batch * heads, seqlen, head_dim)."""
    for dtype in dtypes(device):
        q, k = randn(device, dtype, 17, 6, 16), randn(device, dtype, 19, 6, 16)
        check_op(OP, [q.transpose(0, 1), k.permute(1, 2, 0)])


@pytest.mark.parametrize("zero", ["batch", "M", "N", "K"])
@pytest.mark.parametrize("one", ["neither", "a", "b"])
def test_empty(device, zero, one):
    dims = {"batch": 2, "M": 3, "N": 4, "K": 5, zero: 0}
    batch, m, n, k = dims.values()
    batches = (1 if one == "a" else batch, 1 if one == "b" else batch)
    for dtype in dtypes(device):
        args = call_args(device, dtype, m, n, k, batches)
        check_op(OP, args, eager=False)
        out, grads = forward_backward(OP, args, {})
        assert out.shape == (batch, m, n) and (out == 0).all()
        assert all((g == 0).all() for g in grads)


@pytest.mark.parametrize("batches", BATCHES, ids=str)
@pytest.mark.parametrize("size", [*MATMUL_SIZES[:10], (3, 5, 2048)], ids=str)
def test_integer_grid_is_exact(device, size, batches):
    """Integers up to 8: every sum is exact in any order, the result rounded once."""
    m, n, k = size

    def grid(*shape):
        return torch.randint(-8, 9, shape)

    a, b, dy = grid(batches[0], m, k), grid(batches[1], k, n), grid(max(batches), m, n)
    da, db = dy @ b.mT, a.mT @ dy
    da = da.sum(0, keepdim=True) if batches[0] == 1 else da
    db = db.sum(0, keepdim=True) if batches[1] == 1 else db
    for dtype in dtypes(device):
        args = [t.to(dtype).to(device) for t in (a, b)]
        out, grads = forward_backward(OP, args, {}, dy.to(args[0]))
        assert_equal(out, (a @ b).to(dtype).to(device))
        assert_equal(grads[0], da.to(dtype).to(device))
        assert_equal(grads[1], db.to(dtype).to(device))


@pytest.mark.parametrize("batches", BATCHES, ids=str)
def test_every_batch_is_its_own_product(device, batches):
    for dtype in dtypes(device):
        a, b = call_args(device, dtype, 33, 17, 40, batches)
        whole = bmm(a, b)
        for i in range(max(batches)):
            one = (a[i % batches[0]], b[i % batches[1]])
            single = bmm(one[0][None], one[1][None])[0]
            torch.testing.assert_close(whole[i], single)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_inf_and_nan_spread_as_in_torch(device, value):
    for dtype in dtypes(device):
        for which in range(2):
            args = call_args(device, dtype, 4, 3, 5)
            args[which][1, 0, 1] = value
            got, expected = bmm(*args), torch.bmm(*args)
            assert_same_nonfinite(got, expected)
            assert not got[0].isnan().any()


@pytest.mark.parametrize("batches", BATCHES, ids=str)
@pytest.mark.parametrize("mask", range(4))
def test_output_mask(device, mask, batches):
    dy = randn(device, F32, max(batches), 4, 3)
    args = call_args(device, F32, 4, 3, 5, batches)
    check_output_mask("bmm_backward", [dy, *args], mask, 2)


@given(
    m=sizes(65),
    n=sizes(65),
    k=sizes(65),
    layout_a=layouts(3),
    layout_b=layouts(3),
    dtype=dtype_names,
    seed=seeds,
)
def test_any_layout(m, n, k, layout_a, layout_b, dtype, seed):
    dtype = getattr(torch, dtype)
    batches = BATCHES[seed % 4]
    a = values((batches[0], m, k), "normal", seed).to(dtype)
    b = (values((batches[1], k, n), "normal", seed + 1) * max(k, 1) ** -0.5).to(dtype)
    dy = values((max(batches), m, n), "normal", seed + 2).to(dtype)
    args = [strided(a, layout_a), strided(b, layout_b)]
    check_op(OP, args, dout=strided(dy, layout_a), eager=False)


def test_batches_that_do_not_match(device):
    a, b = call_args(device, F32, 4, 3, 5, (2, 3))
    with pytest.raises(
        RuntimeError, match=r"torchweld::bmm: b must be \(batch, K, N\) = \(2, 5, 3\)"
    ):
        bmm(a, b)
