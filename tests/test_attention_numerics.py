"""attention and its gradient where numbers are at their edges: the same bits in a thousand runs,
every head_dim beside NaN, large logits, strides beyond 2^31, errors beside flash's.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import reference as R
import torchweld
from attention_engines import attention_bounds, check, inputs, on_hopper
from choices_helpers import ops
from numerics import assert_same_bits, check_promise, eager_floor
from running import GRADIENTS
from samples import BF16, F16

RUNS = 1000
SHAPES = [
    # batch, nheads, nheads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v
    (8, 12, 12, 1024, 1024, 64, 64), (16, 12, 12, 512, 512, 64, 64), (64, 12, 12, 128, 128, 64, 64),
    (1, 16, 16, 4096, 4096, 128, 128), (2, 16, 2, 1024, 1024, 128, 128),
    (1, 8, 8, 2048, 2048, 256, 256), (2, 8, 8, 1024, 1024, 192, 128), (2, 8, 4, 777, 1333, 96, 96),
    (4, 8, 2, 300, 200, 80, 80), (2, 4, 4, 65, 4097, 128, 64), (3, 6, 3, 1000, 1000, 40, 72),
    (2, 4, 1, 129, 129, 16, 8),
]  # fmt: skip


def gradients(dout, q, k, v, **kwargs):
    out, lse = ops.attention_forward(q, k, v, **kwargs)
    return [out, lse, *ops.attention_backward(dout, q, k, v, out, lse, **kwargs)[:3]]


def check_call(label, dout, q, k, v, **kwargs):
    """Result and gradients are within the error of their roundings."""
    found = gradients(dout, q, k, v, **kwargs)
    bounds = attention_bounds(q, k, v, **kwargs) + GRADIENTS["attention"](dout, q, k, v, **kwargs)
    check(label, found, bounds)


@on_hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_a_thousand_runs_have_the_same_bits(sizes, causal):
    q, k, v = inputs(BF16, *sizes)
    dout = torch.randn(*q.shape[:3], v.shape[3], device="cuda").to(BF16)
    as_bits = {BF16: torch.int16, torch.float32: torch.int32}
    first = [t.view(as_bits[t.dtype]) for t in gradients(dout, q, k, v, causal=causal)]
    differs = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(RUNS):
        for bits, t in zip(first, gradients(dout, q, k, v, causal=causal), strict=True):
            differs |= (t.view(bits.dtype) != bits).any()
    assert not differs


def beside_nan(t):
    """A view of t's values with NaN after every row and column, its rows aligned to 16 bytes."""
    batch, nheads, rows, columns = t.shape
    wide = t.new_full((batch, nheads, rows + 5, -(-columns // 8) * 8 + 8), math.nan)
    wide[:, :, :rows, :columns] = t
    return wide[:, :, :rows, :columns]


@on_hopper
@pytest.mark.parametrize("first_dim", range(1, 257, 16))
def test_every_head_dim_beside_nan(first_dim):
    for dim in range(first_dim, first_dim + 16):
        dim_v = min(264 - dim, 256)  # Hopper's backward needs both to be multiples of 8
        q, k, v = (beside_nan(t) for t in inputs(BF16, 1, 2, 1, 70, 90, dim, dim_v))
        dout = beside_nan(torch.randn(1, 2, 70, dim_v, device="cuda").to(BF16))
        check_call(f"head_dim {dim}", dout, q, k, v, causal=True)


@on_hopper
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_logits_to_5e4(dim, dtype):
    """Some rows have one such logit, others many."""
    q, k, v = inputs(dtype, 2, 4, 2, 200, 300, dim)
    dout = torch.randn_like(q)
    scale = 5e4 / (q[0, 0].double() @ k[0, 0].double().mT).abs().max().item()
    check_call("", dout, q, k, v, causal=True, scale=scale)


@on_hopper
@pytest.mark.parametrize("strides", [(2**31, 64 * 130, 64), (64, 64 * 130, 2**24)], ids=str)
def test_strides_beyond_2_to_the_31(strides):
    """The last batch entry, or the last row, begins at an offset beyond 2^31."""
    batch, nheads, rows, dim = 2 if strides[0] > 2**30 else 1, 2, 130, 64
    storage = torch.empty(2**31 + 2**24 * 2, dtype=BF16, device="cuda")
    far = []
    for i in range(3):  # consecutive, without overlap
        at = i * 3 * nheads * rows * dim if batch == 2 else i * 2**22
        head_stride = strides[1] if batch == 2 else 2**20
        where = (strides[0], head_stride, strides[2], 1)
        far.append(storage.as_strided((batch, nheads, rows, dim), where, at))
    near = inputs(BF16, batch, nheads, nheads, rows, rows, dim)
    for there, here in zip(far, near, strict=True):
        there.copy_(here)
    dout = torch.randn_like(near[0])
    assert_same_bits(gradients(dout, *far), gradients(dout, *near))


@on_hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_errors_are_those_of_flash(dim, dtype, causal):
    """The largest errors agree, up to a rounding of the result."""
    q, k, v = (t.requires_grad_() for t in inputs(dtype, 2, 4, 4, 700, 700, dim))
    dout = torch.randn_like(q)
    wide = [R.up(t).requires_grad_() for t in (q, k, v)]
    exact, _ = R.attention_forward(*wide, causal=causal)
    exact = [exact.detach(), *torch.autograd.grad(exact, wide, R.up(dout))]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        flash = scaled_dot_product_attention(q, k, v, is_causal=causal)
        theirs = [flash, *torch.autograd.grad(flash, (q, k, v), dout)]
    out, _, *grads = gradients(dout, q.detach(), k.detach(), v.detach(), causal=causal)
    for ours, flash, want in zip([out, *grads], theirs, exact, strict=True):
        errors = [(R.up(t) - want).abs().max().item() for t in (ours, flash)]
        assert errors[0] <= errors[1] + eager_floor(want, dtype), errors


@on_hopper
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_scores_below_and_above_half_of_the_cap(dim, dtype):
    """Warps with small scores alone take another way to tanh than the others."""
    q, k, v = inputs(dtype, 2, 4, 2, 300, 300, dim)
    dout = torch.randn_like(q)
    for softcap in (0.3, 2.0, 8.0, 50.0, 1e4):
        for row, size in ((0, 0.02), (64, 1.0), (128, 8.0), (200, 30.0)):
            q[:, :, row:] = torch.randn_like(q[:, :, row:]) * size
        check_call(f"softcap {softcap}", dout, q, k, v, causal=True, softcap=softcap)


@on_hopper
@pytest.mark.parametrize("mask", [{}, {"window": 300}], ids=str)
@pytest.mark.parametrize("softcap", [0.5, 50.0, 80.0])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_steps_of_small_and_large_capped_scores_take_turns(dim, softcap, mask):
    """A step with only small scores leaves the maximum of a row unchanged."""
    q, k, v = inputs(BF16, 1, 2, 2, 400, 900, dim)
    dout = torch.randn_like(q)
    for sizes in ((0.01, 40.0), (40.0, 0.01), (1.0, 1.0)):
        for i, first in enumerate(range(0, 900, 200)):
            k[:, :, first : first + 200] = torch.randn_like(k[:, :, first : first + 200])
            k[:, :, first : first + 200] *= sizes[i % 2]
        check_call(f"{sizes}", dout, q, k, v, causal=True, softcap=softcap, **mask)
        # All logits of a row near -softcap; large values.
        check_call(f"{sizes} below", dout, q.abs(), -k.abs(), v, softcap=softcap, **mask)
        check_call(f"{sizes} large", dout, q, k, v * 1e15, softcap=softcap, **mask)
        # A small scale: the coefficients of the longest series leave the range of fp32.
        few = {"softcap": softcap, "scale": 0.003 * softcap / 50, **mask}
        check_call(f"{sizes} few", dout, q * 20, k, v, causal=True, **few)


@pytest.mark.parametrize(
    "rows, keys, head_dim",
    [(1, 8192, 64), (4, 8192, 64), (8, 4096, 128), (1, 1023, 256), (320, 16, 576), (64, 64, 300)],
)
def test_long_sums_are_as_accurate_as_promised(rows, keys, head_dim, device):
    """README's bound, in float32: one chain of additions over the keys breaks it."""

    def formula(q, k, v):
        return (q @ k.mT * head_dim**-0.5).softmax(-1) @ v

    for seed in range(4):
        torch.manual_seed(seed)
        tensors = [torch.randn(1, 2, n, head_dim, device=device) for n in (rows, keys, keys)]
        exact = formula(*(t.double() for t in tensors))
        check_promise(torchweld.attention(*tensors), formula(*tensors), exact)
