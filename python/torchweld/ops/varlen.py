"""Attention over sequences that are packed along the tokens, with cumulative lengths."""

from __future__ import annotations

from typing import Any

import torch.fx
from torch import Tensor

from torchweld._library import ops
from torchweld._refusals import readable_errors
from torchweld._types import is_dtensor
from torchweld.ops.attention import attention, attention_with_lse
from torchweld.ops.key_start import check_cu_seqlens, key_start_from_cu_seqlens


@readable_errors
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes `attention` within each of the sequences that are packed one after the other.

    The arguments up to max_seqlen_k have the order of `flash_attn.flash_attn_varlen_func` and of
    `torch.nn.attention.varlen.varlen_attn`. No shape depends on the lengths and the host reads no
    length, so one CUDA graph and one compiled graph serve all packings of the same number of
    tokens.

    With causal and `cu_seqlens_k is cu_seqlens_q` the function calls `attention` with `key_start`,
    otherwise with one `key_start` and one `key_end` per token.

    Args:
        q: `(tokens_q, nheads, head_dim)`, float32, float16 or bfloat16 (float64 on CPU).
        k: `(tokens_k, nheads_kv, head_dim)`, dtype of q; nheads_kv divides nheads.
        v: `(tokens_k, nheads_kv, head_dim_v)`, dtype of q.
        cu_seqlens_q: `(sequences + 1,)`, int32 or int64, on the device of q: 0, then the end of
            each sequence in q. Sequences may be empty. Tokens from `cu_seqlens_q[-1]` on are
            padding. If the first value is not 0, the tokens before it belong to the first sequence,
            at positions before its first key: with causal they see nothing, otherwise its keys.
        cu_seqlens_k: the same for k and v, in the shape and dtype of cu_seqlens_q.
        max_seqlen_q: accepted because flash-attn's function has it; not used.
        max_seqlen_k: accepted and not used.
        causal: whether each token sees its sequence's keys only up to its own position,
            bottom-right aligned in each sequence.
        scale: finite factor on the scores; `head_dim ** -0.5` when None.
        window: at least 1: a token sees the `window` keys that end at its own position, without
            causal also the `window - 1` keys behind it; None for all.
        softcap: above 0: scores become `softcap * tanh(score / softcap)` before the mask; None for
            no cap.
        sink: `(nheads,)`, dtype of q or float32: a logit per head that is in the softmax sum but
            has no value; None for none.
        dropout_p: as in `attention`; a probability's index is (head, token of q, token of k).
        dropout_seed: as in `attention`.
        return_lse: whether to return the log-sum-exp of each token's scores too.

    Returns:
        `(tokens_q, nheads, head_dim_v)`; with return_lse also lse `(nheads, tokens_q)`, float32
        (float64 for float64). Both have gradients. A token that sees no key, such as padding, gets
        0, an lse of -inf (with a sink: the sink) and gradients of 0. The padding of q, k and v may
        be NaN.

    Raises:
        TypeError: cumulative lengths that are no tensor of int32 or int64.
        ValueError: q, k or v not of three dims or of sizes that don't fit, numbers of heads that
            don't divide, cumulative lengths of another shape, dtype or device, or a window below 1.
        RuntimeError: as in `attention`, with its names query, key and value.

    Limits: those of `attention`. Sequences with keys but without queries must have finite values.
        DTensors may be sharded along heads; cumulative lengths may be plain tensors beside them.

    Example::

        q, k, v = (torch.randn(12, 4, 32) for _ in range(3))
        ends = torch.tensor([0, 5, 12], dtype=torch.int32)  # sequences of 5 and of 7 tokens
        out = torchweld.varlen_attention(q, k, v, ends, ends, causal=True)
        assert out.shape == (12, 4, 32)
    """
    options = {"scale": scale, "softcap": softcap, "sink": sink}
    options |= {"dropout_p": dropout_p, "dropout_seed": dropout_seed}
    return _attend(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, window, options, return_lse)


@torch.fx.wrap  # fx's symbolic_trace knows no sizes, so it keeps the call as a node
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool,
    window: int | None,
    options: dict[str, Any],
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    name = "torchweld::varlen_attention"
    check_packed(name, q, k, v)
    check_lengths(name, cu_seqlens_q, cu_seqlens_k, q)
    if window is not None and window < 1:
        raise ValueError(
            f"{name}: window must be at least 1, but got {window}; leave it out for no window"
        )
    before = None if window is None else window - 1
    after = 0 if causal else before
    mask = packed_mask(q, k, cu_seqlens_q, cu_seqlens_k, before, after)
    return packed_attention(q, k, v, {**mask, **options}, return_lse)


def packed_mask(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    before: int | None,
    after: int | None,
) -> dict[str, Any]:
    """Returns attention's mask arguments; `before` and `after` as in `row_ranges`."""
    lengths_q, lengths_k = _whole(cu_seqlens_q), _whole(cu_seqlens_k)
    if cu_seqlens_k is cu_seqlens_q and after == 0 and q.shape[0] == k.shape[0]:
        window = None if before is None else before + 1
        key_start = key_start_from_cu_seqlens(lengths_q, q.shape[0])
        return {"causal": True, "window": window, "key_start": _beside(q, key_start)}
    ranges = row_ranges(lengths_q, lengths_k, None, q.shape[0], before, after)
    return {name: _beside(q, t) for name, t in ranges.items()}


def _whole(t: Any) -> Tensor:
    """Gathers t if it is a DTensor."""
    return t.full_tensor() if is_dtensor(t) else t


def _beside(q: Any, t: Tensor) -> Tensor:
    """Returns t, replicated on the mesh of q if q is a DTensor."""
    if not is_dtensor(q):
        return t
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(t, q.device_mesh, [Replicate()] * q.device_mesh.ndim, run_check=False)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Calls attention on `(tokens, heads, head_dim)` as one sequence, without a copy."""
    query, key, value = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    if not return_lse:
        return attention(query, key, value, **options).squeeze(0).transpose(0, 1)
    out, lse = attention_with_lse(query, key, value, **options)
    return out.squeeze(0).transpose(0, 1), lse.squeeze(0)


def row_ranges(
    cu_seqlens_q: Tensor,
    key_begin: Tensor,
    key_end: Tensor | None,
    tokens_q: int,
    before: int | None,
    after: int | None,
    *,
    top_left: bool = False,
) -> dict[str, Tensor]:
    """Computes attention's key_start and key_end, int32 `(1, tokens_q)`: the keys a token sees.

    Args:
        cu_seqlens_q: `(sequences + 1,)`: 0, then the end of each sequence in q.
        key_begin: `(sequences,)`: the first key of each sequence. Or cumulative lengths `(sequences
            + 1,)`, without key_end.
        key_end: `(sequences,)`: the end of each sequence's keys; None with cumulative lengths.
        tokens_q: number of tokens of q. Tokens behind the last sequence see no key.
        before: how many keys before its own position a token sees; None for all.
        after: how many keys behind its own position; None for all, 0 for a causal mask.
        top_left: True: the first query of a sequence is at its first key. False: the last at the
            last.
    """
    queries, begin = cu_seqlens_q.to(torch.int32), key_begin.to(torch.int32)
    end = None if key_end is None else key_end.to(torch.int32)
    ranges = ops._key_ranges(queries, begin, end, tokens_q, before, after, top_left)
    return dict(zip(("key_start", "key_end"), ranges, strict=True))


def check_packed(name: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    for argument, t, tokens, heads in (
        ("q", q, "tokens_q", "nheads"),
        ("k", k, "tokens_k", "nheads_kv"),
        ("v", v, "tokens_k", "nheads_kv"),
    ):
        if t.dim() != 3:
            raise ValueError(
                f"{name}: {argument} must be ({tokens}, {heads}, head_dim), but got "
                f"{tuple(t.shape)}; for a padded batch use torchweld.attention"
            )
    check_sizes(name, "(tokens, nheads, head_dim)", q, k, v)


def check_sizes(
    name: str, layout: str, q: Tensor, k: Tensor, v: Tensor, names: str = "q k v"
) -> None:
    """Raises ValueError unless k fits q in heads and head dim, and v fits k but for its last dim.

    The heads are the dim before the last.
    """
    called, nheads, nheads_kv = names.split(), q.shape[-2], k.shape[-2]
    if nheads % nheads_kv if nheads_kv else nheads:
        raise ValueError(
            f"{name}: q, k and v must be {layout} with the heads of k a divisor of those of q, but "
            f"got {nheads} heads of q and {nheads_kv} of k; if the heads come before the tokens "
            f"use .transpose({q.dim() - 3}, {q.dim() - 2})"
        )
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"{name}: {called[1]} must have the head_dim of {called[0]}, {q.shape[-1]}, but got "
            f"{tuple(k.shape)}"
        )
    if v.shape[:-1] != k.shape[:-1]:
        sizes = ", ".join(map(str, k.shape[:-1]))
        raise ValueError(
            f"{name}: {called[2]} must be ({sizes}, head_dim_v) like {called[1]}, but got "
            f"{tuple(v.shape)}"
        )


def check_lengths(name: str, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, q: Tensor) -> None:
    for argument, lengths in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_cu_seqlens(name, argument, lengths)
        if lengths.device != q.device:
            raise ValueError(
                f"{name}: {argument} must be on {q.device} like q, but got {lengths.device}"
            )
    if cu_seqlens_q.shape != cu_seqlens_k.shape or cu_seqlens_q.dtype != cu_seqlens_k.dtype:
        raise ValueError(
            f"{name}: cu_seqlens_k must be of the shape and dtype of cu_seqlens_q, but got "
            f"{tuple(cu_seqlens_k.shape)} {cu_seqlens_k.dtype} and {tuple(cu_seqlens_q.shape)} "
            f"{cu_seqlens_q.dtype}"
        )
