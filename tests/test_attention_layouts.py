"""The results of attention lie in memory as its inputs do: out and dquery as query, dkey as key,
dvalue as value, position by position or head by head.
"""

from __future__ import annotations

import pytest
import torch

from choices_helpers import dry_records
from numerics import assert_same_bits
from samples import BF16, F32
from tensors import randn
from torchweld import _C

ops = torch.ops.torchweld

# nheads, nheads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v
SIZES = [
    (4, 2, 130, 130, 64, 64),
    (4, 4, 70, 200, 128, 64),  # backward with head dims that differ
    (4, 2, 130, 70, 192, 128),
    (8, 2, 3, 300, 64, 64),  # decode
    (2, 2, 9, 20, 13, 7),  # rows that don't start on 16-byte boundaries
    (4, 2, 9, 33, 264, 264),  # the general kernels
]


def by_position(t):
    """Copies t into a view of a tensor (batch, seqlen, heads, columns)."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def lies_by_position(t):
    return t.transpose(1, 2).is_contiguous()


def inputs(device, dtype, nheads, nheads_kv, seqlen_q, seqlen_k, dim, dim_v, batch=3):
    return [
        randn(device, dtype, batch, nheads, seqlen_q, dim),
        randn(device, dtype, batch, nheads_kv, seqlen_k, dim),
        randn(device, dtype, batch, nheads_kv, seqlen_k, dim_v),
    ]


def options(device, masked):
    """A mask that hides all keys of some rows."""
    if not masked:
        return [torch.tensor([0, 1, 300], dtype=torch.int32, device=device)], {"causal": True}
    return [None], {"key_end": torch.tensor([300, 5, 0], dtype=torch.int32, device=device)}


def results(tensors, dout, args, kwargs):
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = ops.attention(*leaves, *args, **kwargs)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def each_choice(op, *args, **kwargs):
    """Forces each kernel of the op in turn."""
    (record,) = dry_records(op, *args, device=0, **kwargs)
    family, numbers = record["family"], list(record["problem"])
    for candidate in _C.candidates(family, numbers):
        if candidate["refusal"] or candidate["choice"].partition(" /")[2] not in ("", "4"):
            continue
        ops._force_choice(family, numbers, candidate["choice"])
        try:
            yield candidate["choice"]
        finally:
            ops._force_choice(family, numbers, "")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_results_lie_as_the_inputs(device, sizes, masked):
    args, kwargs = options(device, masked)
    for dtype in (F32, BF16):
        q, k, v = inputs(device, dtype, *sizes)
        moved = [by_position(t) for t in (q, k, v)]
        dout = randn(device, dtype, *q.shape[:3], v.shape[3])
        plain = results((q, k, v), dout, args, kwargs)
        assert all(t.is_contiguous() for t in plain)
        for d in (dout, by_position(dout)):
            got = results(moved, d, args, kwargs)
            assert all(lies_by_position(t) for t in got)
            assert_same_bits(got, plain)
        mixed = results((moved[0], k, moved[2]), dout, args, kwargs)
        assert [lies_by_position(t) for t in mixed] == [True, True, False, True]
        assert_same_bits(mixed, plain)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_every_kernel_stores_by_position(sizes, masked):
    device = "cuda"
    args, kwargs = options(device, masked)
    for dtype in (BF16, F32):
        q, k, v = inputs(device, dtype, *sizes)
        moved = [by_position(t) for t in (q, k, v)]
        for name in each_choice("attention_forward", q, k, v, *args, **kwargs):
            plain = ops.attention_forward(q, k, v, *args, **kwargs)
            assert_same_bits(ops.attention_forward(*moved, *args, **kwargs), plain, name)
        dout = torch.randn_like(plain[0])
        given = (dout, q, k, v, *plain, *args)
        for name in each_choice("attention_backward", *given, **kwargs):
            saved = (by_position(plain[0]), plain[1])
            got = ops.attention_backward(by_position(dout), *moved, *saved, *args, **kwargs)
            assert all(lies_by_position(t) for t in got[:3]), name
            grads = ops.attention_backward(*given, **kwargs)
            assert_same_bits(got, grads, name)


def test_packed_projections(device):
    """Query, key and value are views of one (batch, seqlen, 3 * heads * head_dim)."""
    packed = randn(device, F32, 2, 50, 3 * 4 * 16).requires_grad_()
    q, k, v = (t.view(2, 50, 4, 16).transpose(1, 2) for t in packed.chunk(3, -1))
    out = ops.attention(q, k, v, causal=True)
    flat = out.transpose(1, 2).reshape(2, 50, 64)
    assert flat.data_ptr() == out.data_ptr()  # no copy
    dout = randn(device, F32, 2, 50, 64)
    (grad,) = torch.autograd.grad(flat, packed, dout)
    dense = [t.detach().contiguous().requires_grad_() for t in (q, k, v)]
    plain = ops.attention(*dense, causal=True)
    assert_same_bits(out, plain)
    grads = torch.autograd.grad(plain, dense, dout.view(2, 50, 4, 16).transpose(1, 2))
    assert_same_bits(grad, torch.cat([g.transpose(1, 2).reshape(2, 50, 64) for g in grads], -1))


def test_other_layouts_give_contiguous_results(device):
    q, k, v = inputs(device, F32, 4, 2, 9, 11, 8, 8)
    columns_first = q.mT.contiguous().mT
    expanded = [t[:, :1].expand(-1, 2, -1, -1) for t in (k, v)]
    got = results((columns_first, *expanded), torch.ones_like(q), [], {})
    assert all(t.is_contiguous() for t in got)
    for empty in (q[:0], q[:, :, :0]):
        out = ops.attention(by_position(empty), k[: len(empty)], v[: len(empty)])
        assert out.shape == empty.shape


def test_meta_reports_the_strides(device):
    """torch.compile relies on them."""
    q, k, v = (by_position(t) for t in inputs(device, F32, 4, 2, 9, 11, 8, 6))
    real = ops.attention_forward(q, k, v)
    meta = ops.attention_forward(*(t.to("meta") for t in (q, k, v)))
    assert [t.stride() for t in meta] == [t.stride() for t in real]
    given = (real[0], q, k, v, *real)
    real = ops.attention_backward(*given)
    meta = ops.attention_backward(*(t.to("meta") for t in given))
    assert [t.stride() for t in meta] == [t.stride() for t in real]


def test_compiled_with_symbolic_sizes(device):
    """A dynamic shape keeps the memory order."""

    def flattened(q, k, v):
        out = ops.attention(*(t.transpose(1, 2) for t in (q, k, v)), causal=True)
        return out.transpose(1, 2).flatten(2)

    compiled = torch.compile(flattened, dynamic=True, fullgraph=True, backend="aot_eager")
    for seqlen in (17, 40):
        qkv = [randn(device, F32, 2, seqlen, 4, 8) for _ in range(3)]
        got = compiled(*qkv)
        assert got.is_contiguous()
        assert_same_bits(got, flattened(*qkv))
