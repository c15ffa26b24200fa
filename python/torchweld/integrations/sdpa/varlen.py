"""``aten::_flash_attention_forward`` of packed sequences and its gradient, by torchweld's kernels.

``torch.nn.attention.varlen.varlen_attn`` and SDPA of jagged nested tensors call them, on tensors
(tokens, heads, head_dim) with cumulative lengths, which the host does not read here. In torch's
kernel lse of a row that sees no key is inf, here -inf, so it is exchanged in both directions.
Dense calls, of which SDPA's flash op makes some, stay torch's.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchweld._library import ops
from torchweld.compat._windows import Window
from torchweld.ops.varlen import packed_mask

from . import common
from .common import (
    FLASH_DTYPES,
    Pair,
    gradient_refusal,
    head_dim_refusal,
    laid_out,
    runs_on,
    unused_random_state,
)


def refusal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    dropout_p: float = 0.0,
    return_debug_mask: bool = False,
    scale: float | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> str | None:
    """Why a call runs torch's own kernel, None where torchweld's serves it."""
    if cum_seq_q is None or cum_seq_k is None:
        return "the sequences are not packed"
    if dropout_p != 0:
        return "dropout_p is above 0"
    if return_debug_mask:
        return "return_debug_mask is set"
    if seqused_k is not None:
        return "seqused_k is given"
    if alibi_slopes is not None:
        return "alibi_slopes is given"
    tensors = (query, key, value)
    reason = common.refusal(tensors, FLASH_DTYPES, 3, 1, scale) or head_dim_refusal(tensors)
    if reason is not None:
        return reason
    lengths = (cum_seq_q, cum_seq_k)
    if any(t.dtype != torch.int32 or t.dim() != 1 or t.device != query.device for t in lengths):
        return "cumulative lengths are not int32 (sequences + 1,) beside query"
    if cum_seq_q.shape != cum_seq_k.shape or cum_seq_q.shape[0] < 2:
        return "cumulative lengths are not (sequences + 1,) of query and of key"
    return None


def backward_refusal(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    dropout_p: float,
    scale: float | None = None,
) -> str | None:
    """`refusal` of the gradient. It depends on what was saved alone, not on which forward ran."""
    reason = refusal(query, key, value, cum_seq_q, cum_seq_k, dropout_p, False, scale)
    if reason is not None:
        return reason
    if logsumexp.shape != query.shape[1::-1] or logsumexp.dtype != torch.float32:
        return "logsumexp is not float32 (nheads, tokens_q)"
    return gradient_refusal(grad_out, query, out, logsumexp)


def _rows(t: Tensor) -> Tensor:
    """(1, heads, tokens, head_dim) of (tokens, heads, head_dim), as a view."""
    return t.transpose(0, 1).unsqueeze(0)


def _tokens(t: Tensor, like: Tensor) -> Tensor:
    return laid_out(t.squeeze(0).transpose(0, 1), like)


def _exchanged(lse: Tensor, before: float) -> Tensor:
    return lse.masked_fill(lse == before, -before)


class Varlen(Pair):
    """torch's flash op of packed sequences."""

    FORWARD = "_flash_attention_forward"
    BACKWARD = "_flash_attention_backward"

    def forward(
        self,
        keys: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        seqused_k: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> tuple[Any, ...]:
        """aten::_flash_attention_forward."""
        tensors = (query, key, value)
        lengths = (cum_seq_q, cum_seq_k)
        more = (dropout_p, return_debug_mask, scale, seqused_k, alibi_slopes)
        if refusal(*tensors, *lengths, *more) or not runs_on(query.device):
            return self.torchs_forward.call_boxed(
                keys, *tensors, *lengths, max_q, max_k, dropout_p, is_causal, return_debug_mask,
                scale=scale, window_size_left=window_size_left,
                window_size_right=window_size_right, seqused_k=seqused_k,
                alibi_slopes=alibi_slopes,
            )  # fmt: skip
        window = Window.of((window_size_left, window_size_right), is_causal)
        out, lse = ops.attention_forward.default.redispatch(
            keys, *map(_rows, tensors), **packed_mask(query, key, *lengths, *window), scale=scale
        )
        lse = _exchanged(lse.squeeze(0), -math.inf)
        state, debug_mask = unused_random_state(query.device), query.new_empty(0)
        return _tokens(out, query), lse, *state, debug_mask

    def backward(
        self,
        keys: Any,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        rng_state: Tensor,
        unused: Tensor,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """aten::_flash_attention_backward."""
        saved = (grad_out, query, key, value, out, logsumexp)
        lengths = (cum_seq_q, cum_seq_k)
        if backward_refusal(*saved, *lengths, dropout_p, scale) or not runs_on(query.device):
            return self.torchs_backward.call_boxed(
                keys, *saved, *lengths, max_q, max_k, dropout_p, is_causal, rng_state, unused,
                scale=scale, window_size_left=window_size_left,
                window_size_right=window_size_right,
            )  # fmt: skip
        window = Window.of((window_size_left, window_size_right), is_causal)
        lse = _exchanged(logsumexp, math.inf).unsqueeze(0)
        grads = ops.attention_backward.default.redispatch(
            keys,
            *map(_rows, saved[:5]),
            lse,
            **packed_mask(query, key, *lengths, *window),
            scale=scale,
        )
        dquery, dkey, dvalue = (
            _tokens(grad, like) for grad, like in zip(grads[:3], (query, key, value), strict=True)
        )
        return dquery, dkey, dvalue
