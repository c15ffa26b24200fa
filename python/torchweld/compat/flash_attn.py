"""flash-attn's functions, with the same layouts and defaults, on torchweld's ops.

`from torchweld.compat import flash_attn` and `flash_attn.flash_attn_func(q, k, v, causal=True)`:
arguments, results and the bottom-right aligned causal mask are flash-attn 2's. Features that
torchweld's attention lacks are refused: paged caches, ALiBi and dropout on a GPU where no kernel
for tensor cores has them. `deterministic` and `num_splits` are accepted and change nothing, because
gradients are always deterministic and the number of splits is chosen by torchweld.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchweld.compat._cache import Cache, check_new, rotated
from torchweld.compat._windows import (
    Window,
    check_alibi_slopes,
    check_dropout,
    check_padded,
    padded_attention,
)
from torchweld.ops.varlen import (
    check_lengths,
    check_packed,
    packed_attention,
    packed_mask,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def _options(
    name: str,
    q: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> tuple[Window, bool, dict[str, Any]]:
    """Converts the options of all functions here but `flash_attn_with_kvcache`.

    Returns:
        The window, whether to return lse, and the other options of torchweld's attention.
    """
    check_alibi_slopes(name, alibi_slopes, q, v)
    check_dropout(name, "dropout_p", dropout_p, q, v, softcap or None)
    more = {
        "scale": softmax_scale,
        "softcap": softcap or None,
        "dropout_p": dropout_p,
        "alibi_slopes": alibi_slopes,
    }
    return Window.of(window_size, causal), return_attn_probs, more


def _with_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Shows the options by name in the signature of a function that takes `*options`."""
    shown = inspect.signature(function)
    own = [p for p in shown.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    _, _, _, *options = inspect.signature(_options).parameters.values()
    function.__signature__ = shown.replace(parameters=own + options)
    return function


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Computes `flash_attn.flash_attn_func`.

    Args:
        q: `(batch, seqlen_q, nheads, head_dim)`, float32, float16 or bfloat16 (float64 on CPU).
        k, v: `(batch, seqlen_k, nheads_kv, head_dim)`, dtype of q; nheads_kv divides nheads.
        dropout_p: the share of the probabilities that become 0, as in :func:`torchweld.attention`.
            The random numbers are not flash-attn's.
        softmax_scale: `head_dim ** -0.5` when None.
        causal: whether a row sees keys only up to its own position, aligned at the bottom right.
        window_size: `(left, right)`: a row at position p sees the keys from `p - left` to `p +
            right`; a negative size is no limit.
        softcap: 0 for none.
        alibi_slopes: `(nheads,)`, as in :func:`torchweld.attention`; None for none. A window that
            is not causal and differs left and right excludes it, and packed sequences need causal
            and one tensor of cumulative lengths.
        deterministic: accepted; gradients are always deterministic.
        return_attn_probs: whether to return `(out, lse, None)`. With dropout, flash-attn returns
            probabilities for tests in place of the None.

    Returns:
        `(batch, seqlen_q, nheads, head_dim)`, and with return_attn_probs lse `(batch, nheads,
        seqlen_q)`.

    Raises:
        ValueError: dropout or ALiBi on a GPU without a fast kernel for it, that is, not on Hopper
            in 16 bits with head dims that are multiples of 8 up to 128 and without a soft cap; q, k
            and v in another layout.
        RuntimeError: a wrong dtype or device, or a number out of range, as `torchweld.attention`.

    Example::

        q = torch.randn(2, 16, 8, 64)
        k, v = torch.randn(2, 2, 16, 2, 64)  # two heads of keys for eight
        out = flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(7, 0))
    """
    return _padded(
        "flash_attn_func", q, k, v, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@_with_options
def flash_attn_qkvpacked_func(qkv: Tensor, *options: Any, **named: Any) -> Any:
    """Computes `flash_attn_qkvpacked_func`: qkv is `(batch, seqlen, 3, nheads, head_dim)`.

    The other arguments, the result and the errors are those of :func:`flash_attn_func`.

    Example::

        qkv = torch.randn(2, 16, 3, 8, 64)
        out = flash_attn.flash_attn_qkvpacked_func(qkv, causal=True)
    """
    name = "flash_attn_qkvpacked_func"
    q, k, v = _unpacked(name, "qkv", qkv, "(batch, seqlen, 3, nheads, head_dim)")
    return _padded(name, q, k, v, *options, **named)


@_with_options
def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *options: Any, **named: Any) -> Any:
    """Computes `flash_attn_kvpacked_func`: kv is `(batch, seqlen_k, 2, nheads_kv, head_dim)`.

    The other arguments, the result and the errors are those of :func:`flash_attn_func`.

    Example::

        q, kv = torch.randn(2, 4, 8, 64), torch.randn(2, 16, 2, 8, 64)
        out = flash_attn.flash_attn_kvpacked_func(q, kv, causal=True)
    """
    name = "flash_attn_kvpacked_func"
    k, v = _unpacked(name, "kv", kv, "(batch, seqlen_k, 2, nheads_kv, head_dim)")
    return _padded(name, q, k, v, *options, **named)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Computes `flash_attn.flash_attn_varlen_func` as :func:`torchweld.varlen_attention` does.

    Args:
        q: `(tokens_q, nheads, head_dim)`.
        k, v: `(tokens_k, nheads_kv, head_dim)`; nheads_kv divides nheads.
        cu_seqlens_q, cu_seqlens_k: int32 or int64 `(batch + 1,)`: 0, then the end of each sequence.
            The host never reads them.
        max_seqlen_q, max_seqlen_k: accepted and not used.
        block_table: must be None.
        return_attn_probs: whether to return `(out, lse, None)`.

    Returns:
        `(tokens_q, nheads, head_dim)`, and with return_attn_probs lse `(nheads, tokens_q)`.

    The other arguments and errors are those of :func:`flash_attn_func`. Errors of cumulative
    lengths are those of :func:`torchweld.varlen_attention`.

    Example::

        q, k, v = torch.randn(3, 12, 8, 64)
        ends = torch.tensor([0, 5, 12], dtype=torch.int32)  # sequences of 5 and of 7 tokens
        out = flash_attn.flash_attn_varlen_func(q, k, v, ends, ends, 7, 7, causal=True)
    """
    name = "flash_attn_varlen_func"
    _refuse(name, block_table)
    return _varlen(
        name, q, k, v, cu_seqlens_q, cu_seqlens_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@_with_options
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | None = None, *options: Any, **named: Any
) -> Any:
    """Computes `flash_attn_varlen_qkvpacked_func`: qkv is `(tokens, 3, nheads, head_dim)`.

    The other arguments, the result and the errors are those of :func:`flash_attn_varlen_func`.

    Example::

        qkv, ends = torch.randn(12, 3, 8, 64), torch.tensor([0, 5, 12], dtype=torch.int32)
        out = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, ends, 7, causal=True)
    """
    name = "flash_attn_varlen_qkvpacked_func"
    q, k, v = _unpacked(name, "qkv", qkv, "(tokens, 3, nheads, head_dim)")
    return _varlen(name, q, k, v, cu_seqlens, cu_seqlens, *options, **named)


@_with_options
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *options: Any,
    **named: Any,
) -> Any:
    """Computes `flash_attn_varlen_kvpacked_func`: kv is `(tokens_k, 2, nheads_kv, head_dim)`.

    The other arguments, the result and the errors are those of :func:`flash_attn_varlen_func`.

    Example::

        q, kv = torch.randn(2, 8, 64), torch.randn(12, 2, 8, 64)
        ends_q, ends_k = torch.tensor([[0, 1, 2], [0, 5, 12]], dtype=torch.int32)
        out = flash_attn.flash_attn_varlen_kvpacked_func(q, kv, ends_q, ends_k, 1, 7)
    """
    name = "flash_attn_varlen_kvpacked_func"
    k, v = _unpacked(name, "kv", kv, "(tokens_k, 2, nheads_kv, head_dim)")
    return _varlen(name, q, k, v, cu_seqlens_q, cu_seqlens_k, *options, **named)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Computes `flash_attn.flash_attn_with_kvcache`, without pages and without gradients.

    Args:
        q: `(batch, seqlen_q, nheads, head_dim)`.
        k_cache, v_cache: `(batch, seqlen_cache, nheads_kv, head_dim)`; more sequences with
            cache_batch_idx.
        k, v: `(batch, seqlen_new, nheads_kv, head_dim)`, dtype of the caches, written into them in
            place, from slot `cache_seqlens[b]` on.
        rotary_cos, rotary_sin: `(positions, rotary_dim / 2)`, only with k: k is rotated by the
            positions from `cache_seqlens[b]` on before it is written. With causal or a window, q is
            rotated by the same positions; otherwise all of q by `cache_seqlens[b]`. Not with
            cache_leftpad.
        cache_seqlens: int32 `(batch,)`, or one number: how many tokens the caches have before k and
            v. None: the caches are full; not with k.
        cache_batch_idx: int32 `(batch,)`: the sequence of the caches that belongs to each sequence
            of q. Those sequences are copied; new tokens are written in place.
        cache_leftpad: int32 `(batch,)`: the number of padding slots at the start of each sequence.
        rotary_interleaved: whether a pair is two neighbours, and not `rotary_dim / 2` apart.
        block_table: must be None.
        num_splits: accepted and not used.
        return_softmax_lse: whether to return lse `(batch, nheads, seqlen_q)` too.

    Returns:
        `(batch, seqlen_q, nheads, head_dim)`. The host reads no value of a GPU's cache_seqlens and
        cache_batch_idx: new tokens before or behind the cache fail there as an index that is out of
        bounds. Without new tokens a negative cache_seqlens counts as 0.

    Raises:
        ValueError: arguments that do not go together, as above; too few free slots if cache_seqlens
            is a number or on the CPU.

    The other arguments and errors are those of :func:`flash_attn_func`.

    Example::

        k_cache, v_cache = torch.zeros(2, 2, 32, 8, 64)
        q, k, v = torch.randn(3, 2, 1, 8, 64)
        lengths = torch.tensor([5, 9], dtype=torch.int32)  # k and v are written behind them
        out = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths)
    """
    name = "flash_attn_with_kvcache"
    _refuse(name, block_table)
    check_alibi_slopes(name, alibi_slopes, q, v_cache)
    if (k is None) != (v is None):
        raise ValueError(f"{name}: k and v must be given together; give both or neither")
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError(f"{name}: rotary_cos and rotary_sin must be given together")
    if rotary_cos is not None and (k is None or cache_leftpad is not None):
        raise ValueError(
            f"{name}: rotary_cos must come with k and without cache_leftpad; rotate q by "
            "torchweld.rotary"
        )
    check_padded(name, q, k_cache, v_cache)
    window = Window.of(window_size, causal)
    cache = Cache.of(name, q, k_cache, v_cache, cache_seqlens, cache_batch_idx)
    with torch.no_grad():
        if k is not None and v is not None:
            check_new(name, cache, cache_seqlens, q, k, v)
            if rotary_cos is not None and rotary_sin is not None:
                moves = window != (None, None)
                tables = rotary_cos, rotary_sin
                q, k = rotated(cache, q, k, *tables, moves, rotary_interleaved)
            cache = cache.append(k, v)
        start = cache_leftpad
        return padded_attention(
            q,
            *cache.of_batch(),
            window,
            lengths=None if cache.lengths is None else cache.lengths.int(),
            key_start=None if start is None else start.int()[:, None].expand(-1, q.shape[1]),
            return_lse=return_softmax_lse,
            scale=softmax_scale,
            softcap=softcap or None,
            alibi_slopes=alibi_slopes,
        )


def _refuse(name: str, block_table: Tensor | None) -> None:
    if block_table is not None:
        raise ValueError(
            f"{name}: block_table must be None; torchweld reads no paged cache, pass contiguous "
            "keys and values"
        )


def _unpacked(name: str, argument: str, packed: Tensor, layout: str) -> tuple[Tensor, ...]:
    """Splits a packed tensor along its dim -3."""
    *leading, parts, _, _ = layout.split(", ")
    if packed.dim() != len(leading) + 3 or packed.shape[-3] != int(parts):
        raise ValueError(f"{name}: {argument} must be {layout}, but got {tuple(packed.shape)}")
    return packed.unbind(-3)


def _padded(name: str, q: Tensor, k: Tensor, v: Tensor, *options: Any, **named: Any) -> Any:
    check_padded(name, q, k, v)
    window, return_lse, more = _options(name, q, v, *options, **named)
    result = padded_attention(q, k, v, window, return_lse=return_lse, **more)
    return (*result, None) if return_lse else result


def _varlen(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *options: Any,
    **named: Any,
) -> Any:
    check_packed(name, q, k, v)
    window, return_lse, more = _options(name, q, v, *options, **named)
    check_lengths(name, cu_seqlens_q, cu_seqlens_k, q)
    mask = packed_mask(q, k, cu_seqlens_q, cu_seqlens_k, *window)
    result = packed_attention(q, k, v, {**mask, **more}, return_lse)
    return (*result, None) if return_lse else result
