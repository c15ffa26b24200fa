"""``aten::_scaled_dot_product_flash_attention`` and its gradient, by torchweld's kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchweld._library import ops

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
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    scale: float | None = None,
) -> str | None:
    """Why a call of the flash op runs torch's own kernel, None where torchweld's serves it.

    Asked of shapes, dtypes and numbers alone. What torch's op refuses is left to it, so that the
    error is the same as ever.
    """
    tensors = (query, key, value)
    if dropout_p != 0:
        return "dropout_p is above 0"
    if return_debug_mask:
        return "return_debug_mask is set"
    reason = common.refusal(tensors, FLASH_DTYPES, 4, 1, scale) or head_dim_refusal(tensors)
    if reason is not None:
        return reason
    if key.shape[0] != query.shape[0]:
        return "the shapes don't belong together"
    if is_causal and query.shape[2] > key.shape[2]:
        return "rows that see no key have another lse"
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
    is_causal: bool,
    scale: float | None = None,
) -> str | None:
    """`refusal` of the gradient. It depends on what was saved alone, not on which forward ran."""
    if cum_seq_q is not None or cum_seq_k is not None:
        return "packed sequences"
    reason = refusal(query, key, value, dropout_p, is_causal, False, scale)
    if reason is not None:
        return reason
    if logsumexp.shape != query.shape[:3] or logsumexp.dtype != torch.float32:
        return "logsumexp is not float32 (batch, nheads, seqlen_q)"
    return gradient_refusal(grad_out, query, out, logsumexp)


class Dense(Pair):
    """SDPA's flash op on (batch, heads, seqlen, head_dim)."""

    FORWARD = "_scaled_dot_product_flash_attention"
    BACKWARD = "_scaled_dot_product_flash_attention_backward"

    def forward(
        self,
        keys: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        """aten::_scaled_dot_product_flash_attention."""
        numbers = (dropout_p, is_causal, return_debug_mask)
        if refusal(query, key, value, *numbers, scale) or not runs_on(query.device):
            return self.torchs_forward.call_boxed(keys, query, key, value, *numbers, scale=scale)
        # Call the CUDA kernel directly. The dispatcher has already applied autograd and autocast
        # for aten's op.
        out, lse = ops.attention_forward.default.redispatch(
            keys, query, key, value, causal=is_causal, scale=scale
        )
        seqlens = (query.size(2), key.size(2))
        state, debug_mask = unused_random_state(query.device), query.new_empty(0)
        return laid_out(out, query), lse, None, None, *seqlens, *state, debug_mask

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
        philox_seed: Tensor,
        philox_offset: Tensor,
        *,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """aten::_scaled_dot_product_flash_attention_backward."""
        saved = (grad_out, query, key, value, out, logsumexp)
        packed = (cum_seq_q, cum_seq_k)
        numbers = (dropout_p, is_causal)
        if backward_refusal(*saved, *packed, *numbers, scale) or not runs_on(query.device):
            more = (max_q, max_k, *numbers, philox_seed, philox_offset)
            return self.torchs_backward.call_boxed(keys, *saved, *packed, *more, scale=scale)
        grads = ops.attention_backward.default.redispatch(
            keys, *saved, causal=is_causal, scale=scale
        )
        dquery, dkey, dvalue = (
            laid_out(grad, like) for grad, like in zip(grads[:3], (query, key, value), strict=True)
        )
        return dquery, dkey, dvalue
