"""torchweld.compat: flash-attn's functions and xformers' memory_efficient_attention."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

import reference as R
import torchweld
from numerics import assert_equal, assert_same_bits
from samples import BF16, F32, F64
from tensors import randn
from torchweld.compat import _windows
from torchweld.compat import flash_attn as fa
from torchweld.compat.xformers import memory_efficient_attention

# (tokens of q, tokens of k): as many, fewer and more keys than queries.
SHAPES = [(9, 9), (5, 12), (12, 5)]
WINDOWS = [(-1, -1), (3, 3), (3, 0), (0, 2), (-1, 1), (2, -1), (4, 1)]


def dense(q, k, v, seen: Tensor, scale: float | None = None, softcap: float = 0.0):
    """(out, lse) of (batch, seqlen, nheads, head_dim), in float64, seen (batch, rows, keys)."""
    q, k, v = (R.up(t).transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    out = scores.softmax(-1).nan_to_num(0.0) @ v
    return out.transpose(1, 2), scores.logsumexp(-1)


def band(sq: int, sk: int, causal: bool, window: tuple[int, int], offset: int | None = None):
    """(sq, sk): flash-attn's mask, written as in its documentation."""
    position = torch.arange(sq)[:, None] + (sk - sq if offset is None else offset)
    j = torch.arange(sk)
    left, right = window
    right = 0 if causal else right
    seen = torch.ones(sq, sk, dtype=torch.bool)
    if left >= 0:
        seen &= j >= position - left
    if right >= 0:
        seen &= j <= position + right
    return seen


def qkv(device, sq, sk, dtype=F64, batch=2, nheads=4, nheads_kv=2, dim=16) -> list[Tensor]:
    shapes = ((batch, sq, nheads, dim), *[(batch, sk, nheads_kv, dim)] * 2)
    return [randn(device, dtype, *shape) for shape in shapes]


def best(device: str) -> torch.dtype:
    return F64 if device == "cpu" else F32


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(R.up(got), want, rtol=1e-4, atol=1e-4)


def test_alibi(device, monkeypatch):
    """Padded, packed and with a cache; uneven windows and slopes of sequences are refused."""
    if device == "cuda":
        monkeypatch.setattr(_windows, "no_kernel_with", lambda *args, **kwargs: None)
    q, k, v = qkv(device, 9, 12, best(device))
    slopes = torch.tensor([0.5, 0.1, 2.0, 0.0], device=device)
    distance = (torch.arange(9)[:, None] + 3 - torch.arange(12)).abs().to(device)
    bias = (-slopes[:, None, None] * distance).to(q.dtype)[None]
    for causal in (False, True):
        heads = [t.transpose(1, 2) for t in (q, k, v)]
        want = torchweld.attention(*heads, causal=causal, bias=bias).transpose(1, 2)
        options = {"causal": causal, "alibi_slopes": slopes}
        close(fa.flash_attn_func(q, k, v, **options), R.up(want))
        last = fa.flash_attn_with_kvcache(q[:, -1:], k, v, cache_seqlens=12, **options)
        close(last, R.up(want[:, -1:]))
    ends = torch.tensor([0, 9, 18], dtype=torch.int32, device=device)
    same = [t[:, :9].flatten(0, 1) for t in (q, k, v)]
    want = fa.flash_attn_func(q, k[:, :9], v[:, :9], causal=True, alibi_slopes=slopes)
    got = fa.flash_attn_varlen_func(*same, ends, ends, 9, 9, causal=True, alibi_slopes=slopes)
    close(got, R.up(want.flatten(0, 1)))
    for call in (
        lambda: fa.flash_attn_varlen_func(*same, ends, ends, 9, 9, alibi_slopes=slopes),
        lambda: fa.flash_attn_func(q, k, v, window_size=(2, 1), alibi_slopes=slopes),
    ):
        with pytest.raises(RuntimeError, match="alibi_slopes must not be given with a key_end per"):
            call()
    with pytest.raises(RuntimeError, match="alibi_slopes must be"):
        fa.flash_attn_func(q, k, v, alibi_slopes=slopes.expand(2, 4))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the CPU has no slow kernel")
def test_alibi_without_a_fast_kernel_is_refused():
    q, k, v = (t.cuda() for t in qkv("cpu", 5, 5, F32))
    with pytest.raises(ValueError, match="alibi_slopes must be None: ALiBi is on, which no kernel"):
        fa.flash_attn_func(q, k, v, alibi_slopes=torch.ones(4, device="cuda"))


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_padded(device, shape, causal, window):
    q, k, v = qkv(device, *shape, best(device))
    seen = band(*shape, causal, window).expand(2, -1, -1)
    want, want_lse = dense(q, k, v, seen, 0.3, 5.0)
    options = {"softmax_scale": 0.3, "causal": causal, "window_size": window, "softcap": 5.0}
    out, lse, probabilities = fa.flash_attn_func(q, k, v, **options, return_attn_probs=True)
    close(out, want)
    close(lse, want_lse)
    assert probabilities is None
    assert_equal(fa.flash_attn_func(q, k, v, **options), out)
    assert_equal(fa.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **options), out)
    if shape[0] == shape[1]:
        k, v = (t.repeat_interleave(2, 2) for t in (k, v))
        packed = fa.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), **options)
        torch.testing.assert_close(packed, out)


def test_windows_without_a_limit():
    """flash-attn 2 says -1, version 4 None."""
    q, k, v = qkv("cpu", 5, 12)
    want = fa.flash_attn_func(q, k, v, causal=True)
    for window in (None, (None, None), (None, 3), (2**40, -5), torch.tensor([-1, 0])):
        assert_same_bits(fa.flash_attn_func(q, k, v, causal=True, window_size=window), want)


@pytest.mark.parametrize("array", [torch.tensor, np.array, list])
def test_windows_in_an_array(array):
    q, k, v = qkv("cpu", 5, 12)
    for window in WINDOWS:
        got = fa.flash_attn_func(q, k, v, window_size=array(window))
        assert_same_bits(got, fa.flash_attn_func(q, k, v, window_size=window))


def test_gradients_of_a_window_with_two_sizes(device):
    q, k, v = (t.requires_grad_() for t in qkv(device, 5, 12, best(device)))
    out = fa.flash_attn_func(q, k, v, window_size=(4, 1))
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    leaves = [R.up(t).requires_grad_() for t in (q, k, v)]
    heads = [t.repeat_interleave(2, 2) for t in leaves[1:]]
    scores = torch.einsum("bihd,bjhd->bhij", leaves[0], heads[0]) / 4
    p = scores.masked_fill(~band(5, 12, False, (4, 1)), -torch.inf).softmax(-1).nan_to_num(0.0)
    want = torch.einsum("bhij,bjhd->bihd", p, heads[1])
    for got, grad in zip(grads, torch.autograd.grad(want, leaves, R.up(dout)), strict=True):
        close(got, grad)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("same", [True, False])
def test_varlen(device, causal, window, same):
    lengths = [4, 0, 9, 1], ([4, 0, 9, 1] if same else [6, 2, 3, 1])
    ends = [torch.tensor([0, *part], device=device).cumsum(0).int() for part in lengths]
    ends[1] = ends[0] if same else ends[1]
    q, k, v = (t[0] for t in qkv(device, sum(lengths[0]), sum(lengths[1]), best(device), 1))
    seen = torch.block_diag(
        *(band(*shape, causal, window).double() for shape in zip(*lengths, strict=True))
    )
    want, want_lse = dense(*(t[None] for t in (q, k, v)), seen.bool()[None])
    options = {"causal": causal, "window_size": window, "return_attn_probs": True}
    out, lse, _ = fa.flash_attn_varlen_func(q, k, v, *ends, 9, 9, **options)
    close(out, want[0])
    close(lse, want_lse[0])
    kv = torch.stack([k, v], 1)
    assert_equal(fa.flash_attn_varlen_kvpacked_func(q, kv, *ends, 9, 9, **options)[0], out)
    if same:
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        packed = torch.stack([q, k, v], 1)
        got = fa.flash_attn_varlen_qkvpacked_func(packed, ends[0], 9, **options)[0]
        torch.testing.assert_close(got, out)


@pytest.mark.parametrize("window", [(-1, -1), (3, -1), (2, 2)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q", [1, 4])
@pytest.mark.parametrize("appends", [True, False])
def test_cache(device, seqlen_q, causal, window, appends):
    """Caches of other lengths, one of them shorter than the queries, and their padding."""
    q, k, v = qkv(device, seqlen_q, seqlen_q, best(device), 3)
    caches = qkv(device, 1, 16, best(device), 3)[1:]
    lengths = torch.tensor([7, 2, 10], dtype=torch.int32, device=device)
    pads = torch.tensor([0, 1, 4], dtype=torch.int32, device=device)
    filled = [cache.clone() for cache in caches]
    totals = lengths.tolist()
    if appends:
        totals = [n + seqlen_q for n in totals]
        for cache, new in zip(filled, (k, v), strict=True):
            for b, n in enumerate(lengths.tolist()):
                cache[b, n : n + seqlen_q] = new[b]
    seen = torch.zeros(3, seqlen_q, 16, dtype=torch.bool)
    for b, n in enumerate(totals):
        seen[b] = band(seqlen_q, 16, causal, window, offset=n - seqlen_q)
        seen[b, :, n:] = False
        seen[b, :, : pads[b]] = False
    want, want_lse = dense(q, *filled, seen)
    out, lse = fa.flash_attn_with_kvcache(
        q, *caches, *((k, v) if appends else ()), cache_seqlens=lengths, cache_leftpad=pads,
        causal=causal, window_size=window, return_softmax_lse=True,
    )  # fmt: skip
    close(out, want)
    close(lse, want_lse)
    assert_same_bits(caches, filled)


def test_cache_of_one_length(device):
    q, k, v = qkv(device, 1, 16, best(device))
    want = fa.flash_attn_func(q, k[:, :6], v[:, :6])
    torch.testing.assert_close(fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=6), want)
    whole = fa.flash_attn_with_kvcache(q, k, v, causal=True)
    torch.testing.assert_close(whole, fa.flash_attn_func(q, k, v, causal=True))


@pytest.mark.parametrize("argument", ["cache_seqlens", "cache_batch_idx"])
def test_negative_places_of_a_gpu_write_nothing(monkeypatch, argument):
    """The host reads no value of a GPU's tensors; an index below 0 must not count from the end."""
    monkeypatch.setattr("torchweld.compat._cache._known", lambda values: [])
    q, *caches = qkv("cpu", 1, 4, F32)
    before = [cache.clone() for cache in caches]
    options = dict.fromkeys(("cache_seqlens", "cache_batch_idx"), torch.zeros(2, dtype=torch.int64))
    options[argument] = torch.full((2,), -1)
    with pytest.raises(IndexError, match="out of bounds"):
        fa.flash_attn_with_kvcache(q, *caches, *(t[:, :1] for t in caches), **options)
    assert_same_bits(caches, before)


def test_a_negative_length_without_new_tokens_counts_as_none(device):
    q, k, v = qkv(device, 3, 8, best(device))
    lengths = torch.tensor([-2, 0], dtype=torch.int32, device=device)
    for options in ({}, {"causal": True}, {"window_size": (2, 1)}):
        out = fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, **options)
        assert (out == 0).all()


X = torch.zeros(2, 4, 4, 16)
ENDS = torch.tensor([0, 8], dtype=torch.int32)
PACKED = torch.zeros(8, 4, 16)
REFUSED = [
    ("flash_attn_func", (X, X, X), {"dropout_p": -0.1}, "dropout_p must be from 0 to 1, but got"),
    ("flash_attn_func", (X[0], X, X), {}, "q must be (batch, seqlen, nheads, head_dim), but got"),
    (
        "flash_attn_func", (X, X[:, :, :3], X[:, :, :3]), {},
        "q, k and v must be (batch, seqlen, nheads, head_dim) with the heads of k a divisor of "
        "those of q, but got 4 heads of q and 3 of k; if the heads come before the tokens use "
        ".transpose(1, 2)",
    ),
    (
        "flash_attn_func", (X, X, X[:, :, :2]), {},
        "v must be (2, 4, 4, head_dim_v) like k, but got (2, 4, 2, 16)",
    ),
    ("flash_attn_qkvpacked_func", (X,), {}, "qkv must be (batch, seqlen, 3, nheads, head_dim),"),
    ("flash_attn_kvpacked_func", (X, X), {}, "kv must be (batch, seqlen_k, 2, nheads_kv, head_"),
    (
        "flash_attn_varlen_func", (PACKED, PACKED, PACKED, ENDS, ENDS, 8, 8),
        {"block_table": ENDS}, "block_table must be None; torchweld reads no paged cache",
    ),
    ("flash_attn_varlen_func", (X, X, X, ENDS, ENDS, 8, 8), {}, "q must be (tokens_q, nheads, he"),
    ("flash_attn_with_kvcache", (X, X, X), {"rotary_cos": X}, "rotary_cos and rotary_sin must be"),
    (
        "flash_attn_with_kvcache", (X, X, X), {"rotary_cos": X, "rotary_sin": X},
        "rotary_cos must come with k and without cache_leftpad; rotate q by torchweld.rotary",
    ),
    (
        "flash_attn_with_kvcache", (X, X, X), {"cache_batch_idx": ENDS.float()},
        "cache_batch_idx must be int32 (2,), but got float32 (2,)",
    ),
    (
        "flash_attn_with_kvcache", (X, X, X), {"cache_seqlens": ENDS[:1]},
        "cache_seqlens must be int32 (2,), but got int32 (1,)",
    ),
    (
        "flash_attn_with_kvcache", (X[:1], X, X), {},
        "k_cache must be (1, seqlen_cache, nheads_kv, head_dim) like q, but got (2, 4, 4, 16); say",
    ),
    (
        "flash_attn_with_kvcache", (X, X, X, X[:, :, :2], X), {"cache_seqlens": 0},
        "k must be float32 (2, seqlen_new, 4, 16) like k_cache, but got float32 (2, 4, 2, 16)",
    ),
    (
        "flash_attn_with_kvcache", (X, X, X, X, X.half()), {"cache_seqlens": 0},
        "v must be float32 (2, seqlen_new, 4, 16) like v_cache, but got float16 (2, 4, 4, 16)",
    ),
    (
        "flash_attn_with_kvcache", (X, X, X, X[:, :1], X[:, :1]), {"cache_seqlens": 4},
        "cache_seqlens must be from 0 to 3, for 1 new tokens in 4 places, but got 4; use a larger",
    ),
    (
        "flash_attn_with_kvcache", (X, X, X, X[:, :1], X[:, :1]), {"cache_seqlens": ENDS - 1},
        "cache_seqlens must be from 0 to 3, for 1 new tokens in 4 places, but got -1; use a larger",
    ),
    (
        "flash_attn_with_kvcache", (X, X, X, X[:, :1], X[:, :1]),
        {"cache_seqlens": 0, "cache_batch_idx": ENDS // 8 - 1},
        "cache_batch_idx must be from 0 to 1, a sequence of k_cache, but got -1",
    ),
    ("flash_attn_with_kvcache", (X, X, X), {"block_table": ENDS}, "block_table must be None"),
    ("flash_attn_with_kvcache", (X, X, X, X), {}, "k and v must be given together"),
    ("flash_attn_with_kvcache", (X, X, X, X, X), {}, "cache_seqlens must be given with k and v"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "args", "options", "sentence"), REFUSED, ids=lambda v: str(v)[:30]
)
def test_refusals(name, args, options, sentence):
    with pytest.raises(ValueError, match=re.escape(f"{name}: {sentence}")):
        getattr(fa, name)(*args, **options)


# xformers


def mask_of(name: str, **fields):
    """A stand-in for a mask of xformers: an object of a class of that name."""
    made = type(name, (), {})()
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_xformers_padded(device, shape):
    q, k, v = qkv(device, *shape, best(device))
    causal = (-1, 0)
    for mask, window, offset in (
        (None, (-1, -1), None),
        (mask_of("LowerTriangularMask"), causal, 0),
        (mask_of("LowerTriangularFromBottomRightMask"), causal, None),
        (mask_of("LowerTriangularFromBottomRightLocalAttentionMask", _window_size=3), (2, 0), None),
        (mask_of("LocalAttentionFromBottomRightMask", window_left=3, window_right=1), (3, 1), None),
    ):
        seen = band(*shape, False, window, offset).expand(2, -1, -1)
        close(memory_efficient_attention(q, k, v, mask), dense(q, k, v, seen)[0])


BLOCKS = [
    ("BlockDiagonalMask", {}, (-1, -1), False),
    ("BlockDiagonalCausalMask", {}, (-1, 0), True),
    ("BlockDiagonalCausalFromBottomRightMask", {}, (-1, 0), False),
    ("BlockDiagonalCausalLocalAttentionMask", {"_window_size": 3}, (2, 0), True),
    ("BlockDiagonalCausalLocalAttentionFromBottomRightMask", {"_window_size": 3}, (2, 0), False),
]


@pytest.mark.parametrize(
    ("name", "fields", "window", "top_left"), BLOCKS, ids=lambda v: str(v)[:50]
)
@pytest.mark.parametrize("same", [True, False])
def test_xformers_packed(device, name, fields, window, top_left, same):
    lengths = [4, 0, 9, 1], ([4, 0, 9, 1] if same else [6, 2, 3, 1])
    info = [SimpleNamespace(seqstart=starts(part)) for part in lengths]
    info_k = info[0] if same else info[1]
    mask = mask_of(name, q_seqinfo=info[0], k_seqinfo=info_k, **fields)
    q, k, v = qkv(device, sum(lengths[0]), sum(lengths[1]), best(device), 1)
    offset = 0 if top_left else None
    parts = [band(*s, False, window, offset).double() for s in zip(*lengths, strict=True)]
    want = dense(q, k, v, torch.block_diag(*parts).bool()[None])[0]
    close(memory_efficient_attention(q, k, v, mask), want)


KEYS = [
    ("BlockDiagonalPaddedKeysMask", {}, (-1, -1)),
    ("BlockDiagonalCausalWithOffsetPaddedKeysMask", {}, (-1, 0)),
    ("BlockDiagonalCausalLocalAttentionPaddedKeysMask", {"_window_size": 3}, (2, 0)),
    ("BlockDiagonalLocalAttentionPaddedKeysMask", {"window_left": 2, "window_right": 1}, (2, 1)),
    ("BlockDiagonalGappyKeysMask", {}, (-1, -1)),
    ("BlockDiagonalCausalWithOffsetGappyKeysMask", {}, (-1, 0)),
    (
        "BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask",
        {"window_left": 1, "window_right": 0},
        (1, 0),
    ),
]


@pytest.mark.parametrize(("name", "fields", "window"), KEYS, ids=lambda v: str(v)[:60])
def test_xformers_keys_with_capacity(device, name, fields, window):
    """Each sequence of keys begins at seqstart and has seqlen keys; the others are not seen."""
    lengths_q, lengths_k, capacity = [2, 1, 3], [5, 0, 3], 6
    info_k = SimpleNamespace(seqstart=starts([capacity] * 3), seqlen=torch.tensor(lengths_k).int())
    info_q = SimpleNamespace(seqstart=starts(lengths_q))
    mask = mask_of(name, q_seqinfo=info_q, k_seqinfo=info_k, **fields)
    q, k, v = qkv(device, 6, 18, best(device), 1)
    seen = torch.zeros(1, 6, 18, dtype=torch.bool)
    row = 0
    for i, (rows, keys) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        part = band(rows, keys, False, window)
        seen[0, row : row + rows, i * capacity : i * capacity + keys] = part
        row += rows
    close(memory_efficient_attention(q, k, v, mask), dense(q, k, v, seen)[0])


def test_xformers_layouts(device):
    q, k, v = qkv(device, 9, 9, best(device))
    single = memory_efficient_attention(q[:, :, 0], k[:, :, 0], v[:, :, 0])
    want = dense(*(t[:, :, :1] for t in (q, k, v)), torch.ones(2, 9, 9, dtype=torch.bool))[0]
    close(single, want[:, :, 0])
    want = memory_efficient_attention(q, k, v)
    grouped = [t.unsqueeze(3).expand(-1, -1, -1, 2, -1) for t in (k, v)]
    got = memory_efficient_attention(q.unflatten(2, (2, 2)), *grouped)
    assert_same_bits(got.flatten(2, 3), want)


def test_dropout_is_that_of_attention(device):
    """With the seed that torch's generator gives."""
    q, k, v = qkv(device, 9, 9, best(device) if device == "cpu" else BF16)
    packed, ends = [t.flatten(0, 1) for t in (q, k, v)], starts([9, 9]).to(device)
    mask = mask_of("LowerTriangularFromBottomRightMask")
    calls = {
        "padded": lambda p: fa.flash_attn_func(q, k, v, p, causal=True),
        "packed": lambda p: fa.flash_attn_varlen_func(*packed, ends, ends, 9, 9, p, causal=True),
        "xformers": lambda p: memory_efficient_attention(q, k, v, mask, p),
    }
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        for call in calls.values():
            with pytest.raises(ValueError, match="must be 0, but got 0.4: attention dropout is on"):
                call(0.4)
        return

    def drawn(call):
        torch.manual_seed(5)
        return call()

    views = [t.transpose(1, 2) for t in (q, k, v)]
    want = drawn(lambda: torchweld.attention(*views, causal=True, dropout_p=0.4)).transpose(1, 2)
    assert not want.equal(calls["padded"](0.0))
    for name in ("padded", "xformers"):
        assert_same_bits(drawn(lambda name=name: calls[name](0.4)), want)
    options = {"causal": True, "dropout_p": 0.4}
    want = drawn(lambda: torchweld.varlen_attention(*packed, ends, ends, **options))
    assert_same_bits(drawn(lambda: calls["packed"](0.4)), want)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_dropout_without_a_fast_kernel_is_refused():
    q = torch.zeros(1, 4, 2, 16, device="cuda")
    sentence = (
        "dropout_p must be 0, but got 0.1: attention dropout is on, which no kernel for tensor"
    )
    with pytest.raises(ValueError, match=sentence):
        fa.flash_attn_func(q, q, q, 0.1)
    with pytest.raises(ValueError, match="attn_bias must be no tensor: a position bias is added"):
        memory_efficient_attention(q, q, q, q.new_zeros(1, 2, 4, 4))


def test_xformers_adds_a_bias():
    q, k, v = torch.randn(3, 2, 9, 6, 16)
    bias = torch.randn(2, 6, 9, 9, requires_grad=True)
    want = torchweld.attention(*(t.transpose(1, 2) for t in (q, k, v)), bias=bias).transpose(1, 2)
    (gradient,) = torch.autograd.grad(want.square().sum(), bias)
    out = memory_efficient_attention(q, k, v, bias)
    assert_same_bits(out.detach(), want.detach())
    assert_same_bits(torch.autograd.grad(out.square().sum(), [bias]), [gradient])
    grouped = [t.unflatten(2, (2, 3)) for t in (q, k, v)]
    out = memory_efficient_attention(*grouped, bias.unflatten(1, (2, 3)))
    assert_same_bits(out.flatten(2, 3).detach(), want.detach())
    out = memory_efficient_attention(q[:, :, 0], k[:, :, 0], v[:, :, 0], bias[:, 0])
    assert_same_bits(out.detach(), want[:, :, 0].detach())


def test_xformers_refusals():
    q = torch.zeros(2, 4, 4, 16)
    blocks = mask_of("BlockDiagonalMask", q_seqinfo=None, k_seqinfo=None)
    for options, sentence in (
        ({"p": 1.1}, "p must be from 0 to 1, but got 1.1"),
        ({"attn_bias": mask_of("PagedBlockDiagonalPaddedKeysMask")}, "attn_bias must be one of"),
        ({"attn_bias": blocks}, "query must be (1, tokens, nheads, head_dim) with BlockDiagonal"),
        ({"output_dtype": BF16}, "output_dtype must be torch.float32 like query, but got"),
        ({"key": q[:, :, :3], "value": q[:, :, :3]}, "q, k and v must be (batch, seqlen, nheads,"),
        ({"key": q[..., :8]}, "key must have the head_dim of query, 16, but got (2, 4, 4, 8)"),
        ({"query": q[0, 0]}, "query must be (batch, seqlen, nheads, head_dim), but got (4, 16)"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"memory_efficient_attention: {sentence}")):
            memory_efficient_attention(**{"query": q, "key": q, "value": q, **options})


def test_import_torchweld_leaves_it_out_until_it_is_used():
    code = """
import sys, torchweld
assert "torchweld.compat" not in sys.modules
assert torchweld.compat.flash_attn.flash_attn_func and torchweld.compat.xformers
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
