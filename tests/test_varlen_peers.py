"""The kinds of cases that FlashAttention and torch.nn.attention.varlen test, against the formula.

Sequences of random lengths are cut out of a padded batch, some of them empty. The formula runs on
the padded batch, in float64; the errors may be twice those of the same formula in the dtype.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import reference as R
import torchweld
from numerics import assert_same_bits, eager_floor
from samples import BF16, F16, F32, F64, dtypes
from tensors import randn
from torchweld.compat import flash_attn as fa

HEADS = {"mha": (4, 4), "gqa": (6, 2), "mqa": (3, 1)}
# (seqlen_q, seqlen_k) of the padded batch: a decode step, fewer, as many and more queries.
SIZES = [(1, 33), (17, 40), (48, 48), (40, 17)]
# causal, window_size and softcap of flash-attn's functions.
MASKS = {
    "full": (False, (-1, -1), 0.0),
    "causal": (True, (-1, -1), 0.0),
    "causal, local": (True, (7, 7), 0.0),
    "local": (False, (5, 9), 0.0),
    "left alone": (False, (3, -1), 0.0),
    "right alone": (False, (-1, 4), 0.0),
    "own key": (False, (0, 0), 0.0),
    "softcap": (True, (-1, -1), 3.0),
}


def lengths_of(seqlen: int, seed: int) -> list[int]:
    """Five lengths up to seqlen: the longest one, an empty one, and random ones."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(max(1, seqlen - 20), seqlen + 1, (3,), generator=generator).tolist()
    return [drawn[0], seqlen, 0, *drawn[1:]]


def cut(t: Tensor, lengths: list[int]) -> Tensor:
    """The tokens (tokens, ...) of a padded batch (batch, seqlen, ...)."""
    return torch.cat([row[:length] for row, length in zip(t, lengths, strict=True)])


def starts(lengths: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def visible(
    size: tuple[int, int],
    lengths: tuple[list[int], list[int]],
    causal: bool,
    window: tuple[int, int],
) -> Tensor:
    """(batch, 1, seqlen_q, seqlen_k), from the definition: aligned at each sequence's end."""
    count_q, count_k = (torch.tensor(part)[:, None, None] for part in lengths)
    i, j = torch.arange(size[0])[:, None], torch.arange(size[1])
    position = i + count_k - count_q
    seen = (i < count_q) & (j < count_k)
    left, right = window
    if causal:
        right = 0
    if left >= 0:
        seen = seen & (j >= position - left)
    if right >= 0:
        seen = seen & (j <= position + right)
    return seen[:, None]


def formula(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, softcap: float) -> tuple[Tensor, Tensor]:
    """out and lse of a padded batch (batch, seqlen, heads, head_dim), in the tensors' dtype."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    p = torch.where(seen.any(-1, keepdim=True), scores, 0.0).softmax(-1) * seen
    return (p @ v).transpose(1, 2), scores.logsumexp(-1).transpose(1, 2)


def with_gradients(tensors, dout, seen, softcap, dtype):
    leaves = [R.up(t).to(dtype).requires_grad_() for t in tensors]
    out, lse = formula(*leaves, seen, softcap)
    return [out, lse, *torch.autograd.grad(out, leaves, R.up(dout).to(dtype))]


def assert_close_as_eager(
    got: Tensor, exact: Tensor, eager: Tensor, label: str, terms: float = 0.0
) -> None:
    """Twice eager's error, and two roundings of the largest result or of the terms it sums."""
    got, exact = got.detach(), exact.detach()
    finite = exact.isfinite()
    assert torch.equal(R.up(got).isfinite(), finite), label
    exact, eager = exact[finite], R.up(eager)[finite]
    allowed = eager_floor(torch.cat([exact, exact.new_tensor([terms])]), got.dtype)
    if got.dtype == F64:  # the formula itself, whose sums of up to 64 terms round otherwise
        allowed *= 64
    allowed += 2 * (eager - exact).abs().amax()
    error = (R.up(got)[finite] - exact).abs().amax()
    assert error <= allowed, f"{label}: {error:.2e} > {allowed:.2e}"


def difference_terms(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> float:
    """The size of the terms that cancel in dq and dk for one visible key: scale * dP * k."""
    sizes = [R.up(t).norm(dim=-1).max().item() for t in (dout, v)]
    largest = max(R.up(t).abs().max().item() for t in (q, k))
    return sizes[0] * sizes[1] * largest * q.shape[-1] ** -0.5


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_packed_sequences_equal_a_padded_batch(device, size, heads, mask):
    """Results, lse and gradients of flash_attn_varlen_func."""
    causal, window, softcap = MASKS[mask]
    nheads, nheads_kv = HEADS[heads]
    lengths = lengths_of(size[0], 1), lengths_of(size[1], 1 if size[0] == size[1] else 2)
    seen = visible(size, lengths, causal, window)
    ends = [starts(part, device) for part in lengths]
    for dtype in dtypes(device):
        made = [
            randn(device, dtype, 5, seqlen, count, 16)
            for seqlen, count in ((size[0], nheads), (size[1], nheads_kv), (size[1], nheads_kv))
        ]
        dout = randn(device, dtype, 5, size[0], nheads, 16)
        leaves = [
            cut(t, part).requires_grad_()
            for t, part in zip(made, (lengths[0], lengths[1], lengths[1]), strict=True)
        ]
        out, lse, _ = fa.flash_attn_varlen_func(
            *leaves, *ends, *size, causal=causal, window_size=window, softcap=softcap,
            return_attn_probs=True,
        )  # fmt: skip
        got = [out, lse.t(), *torch.autograd.grad(out, leaves, cut(dout, lengths[0]))]
        exact = with_gradients(made, dout, seen, softcap, F64)
        eager = with_gradients(made, dout, seen, softcap, dtype)
        parts = [lengths[0], lengths[0], lengths[0], lengths[1], lengths[1]]
        for name, part, *results in zip(
            ("out", "lse", "dq", "dk", "dv"), parts, got, exact, eager, strict=True
        ):
            terms = difference_terms(*made, dout) if name in ("dq", "dk") else 0.0
            wanted = [cut(t, part) for t in results[1:]]
            assert_close_as_eager(results[0], *wanted, name, terms)


@pytest.mark.parametrize("causal", [False, True])
def test_a_sequence_does_not_depend_on_its_neighbours(device, causal):
    """Bit-equal results and gradients beside other values, and twice in a row."""
    lengths = [17, 40, 9]
    ends = starts(lengths, device)
    dtype = BF16 if device == "cuda" else F32
    q, k, v, dout = (randn(device, dtype, 66, 4, 32) for _ in range(4))
    results = []
    for factor in (1.0, 1.0, -3.0):
        changed = [t.clone() for t in (q, k, v, dout)]
        for t in changed:
            t[:17] *= factor
            t[57:] *= factor
        leaves = [t.requires_grad_() for t in changed[:3]]
        out = torchweld.varlen_attention(*leaves, ends, ends, causal=causal)
        grads = torch.autograd.grad(out, leaves, changed[3])
        results.append([t[17:57] for t in (out, *grads)])
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert_same_bits(got.contiguous(), want.contiguous())


@pytest.mark.parametrize("causal", [False, True])
def test_a_gradient_with_other_strides(device, causal):
    ends = starts([30, 34], device)
    dtype = BF16 if device == "cuda" else F32
    leaves = [randn(device, dtype, 64, 4, 32).requires_grad_() for _ in range(3)]
    out = torchweld.varlen_attention(*leaves, ends, ends, causal=causal)
    dout = randn(device, dtype, 32, 4, 64).permute(2, 1, 0)
    want = torch.autograd.grad(out, leaves, dout.contiguous(), retain_graph=True)
    assert_same_bits(torch.autograd.grad(out, leaves, dout), want)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_large_scores_overflow_nothing(device, dtype):
    """Scores of some hundreds: results and gradients are finite and as exact as eager's."""
    lengths = [33, 1, 30]
    made = [randn(device, dtype, 3, 33, 2, 64, scale=9.0) for _ in range(3)]
    dout = randn(device, dtype, 3, 33, 2, 64)
    leaves = [cut(t, lengths).requires_grad_() for t in made]
    ends = starts(lengths, device)
    out = torchweld.varlen_attention(*leaves, ends, ends, causal=True)
    grads = torch.autograd.grad(out, leaves, cut(dout, lengths))
    seen = visible((33, 33), (lengths, lengths), True, (-1, -1))
    exact, eager = (with_gradients(made, dout, seen, 0.0, kind) for kind in (F64, dtype))
    for name, got, *want in zip(
        ("out", "dq", "dk", "dv"), (out, *grads), exact[:1] + exact[2:], eager[:1] + eager[2:],
        strict=True,
    ):  # fmt: skip
        assert got.isfinite().all(), name
        terms = difference_terms(*made, dout) if name in ("dq", "dk") else 0.0
        assert_close_as_eager(got, *(cut(t, lengths) for t in want), name, terms)


def test_a_compiled_model_holds_one_op_per_call():
    """Forward and backward of two layers in one graph, whatever the lengths."""
    seen = []

    def keep(graph, inputs):
        seen.append([str(node.target) for node in graph.graph.nodes])
        return counter(graph, inputs)

    counter = CompileCounter()

    @torch.compile(backend=keep, fullgraph=True, dynamic=False)
    def layers(q, k, v, ends):
        out = fa.flash_attn_varlen_func(q, k, v, ends, ends, 9, 9, causal=True)
        return fa.flash_attn_varlen_func(out, k, v, ends, ends, 9, 9, causal=True).sum()

    q, k, v = (torch.randn(12, 2, 8, requires_grad=True) for _ in range(3))
    for lengths in ([3, 9], [12, 0], [5, 5]):
        layers(q, k, v, starts(lengths)).backward()
    assert counter.frame_count == 1
    assert sum("torchweld.attention" in target for target in seen[0]) == 2


# flash_attn_with_kvcache


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (seqlen, heads, head_dim) by tables (seqlen, rotary_dim / 2), from the definition."""
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    out = x.clone()
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [0, 8, 16])
@pytest.mark.parametrize("mask", ["full", "causal", "local"])
@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("chosen", [False, True])
def test_a_cache_with_rotary_embedding(device, chosen, new, mask, rotary_dim, interleaved):
    """New tokens are rotated, appended in place and attended to; rows of the cache are chosen."""
    causal, window, _ = MASKS[mask]
    dtype = F64 if device == "cpu" else F32
    seqlen_q, places = 3, 24
    lengths = torch.tensor([7, 0, 12], dtype=torch.int32, device=device)
    rows = torch.tensor([3, 0, 4], dtype=torch.int32, device=device) if chosen else None
    index = rows.tolist() if chosen else [0, 1, 2]
    caches = [randn(device, dtype, 5 if chosen else 3, places, 2, 16) for _ in range(2)]
    q = randn(device, dtype, 3, seqlen_q, 4, 16)
    k, v = (randn(device, dtype, 3, new, 2, 16) for _ in range(2))
    angles = torch.rand(places, rotary_dim // 2, dtype=torch.float64).mul(6.3)
    tables = [t.to(device, dtype) for t in (angles.cos(), angles.sin())] if rotary_dim else []
    exact = [R.up(t) for t in tables]
    filled, queries = [R.up(t).clone() for t in caches], R.up(q).clone()
    for b, (row, count) in enumerate(zip(index, lengths.tolist(), strict=True)):
        keys = R.up(k)[b]
        if rotary_dim:
            keys = rotate(keys, *(t[count : count + new] for t in exact), interleaved)
            at = torch.arange(seqlen_q) * (mask != "full") + count
            queries[b] = rotate(queries[b], *(t[at] for t in exact), interleaved)
        filled[0][row, count : count + new] = keys
        filled[1][row, count : count + new] = R.up(v)[b]
    total = [count + new for count in lengths.tolist()]
    seen = visible((seqlen_q, places), ([seqlen_q] * 3, total), causal, window)
    want, want_lse = formula(queries, *(t[index] for t in filled), seen, 0.0)
    out, lse = fa.flash_attn_with_kvcache(
        q, *caches, k, v, *(tables or [None, None]), cache_seqlens=lengths, cache_batch_idx=rows,
        causal=causal, window_size=window, rotary_interleaved=interleaved,
        return_softmax_lse=True,
    )  # fmt: skip
    torch.testing.assert_close(R.up(out), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(R.up(lse).transpose(1, 2), want_lse, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close([R.up(cache) for cache in caches], filled, rtol=1e-5, atol=1e-5)
