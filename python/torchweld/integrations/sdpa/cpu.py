"""``aten::_scaled_dot_product_flash_attention_for_cpu`` and its gradient, by torchweld's kernels.

SDPA on the CPU calls them. Causal masks are aligned at the top left there, so that calls of unequal
lengths stay torch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchweld._library import ops

from . import common
from .common import Pair, gradient_refusal, laid_out

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def refusal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> str | None:
    """Why a call runs torch's own kernel, None where torchweld's serves it."""
    if dropout_p != 0:
        return "dropout_p is above 0"
    if attn_mask is not None:
        return "attn_mask is given"
    reason = common.refusal((query, key, value), DTYPES, 4, 1, scale)
    if reason is not None:
        return reason
    if key.shape[0] != query.shape[0]:
        return "the shapes don't belong together"
    if is_causal and query.shape[2] != key.shape[2]:
        return "a causal mask is aligned at the top left"
    return None


def _positions_first(t: Tensor) -> Tensor:
    """t (batch, heads, seqlen, ...) in torch's memory order, (batch, seqlen, heads, ...)."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


class Cpu(Pair):
    """SDPA's flash op on the CPU."""

    FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
    BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"

    def forward(
        self,
        keys: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """aten::_scaled_dot_product_flash_attention_for_cpu."""
        tensors = (query, key, value)
        if refusal(*tensors, dropout_p, is_causal, attn_mask, scale):
            return self.torchs_forward.call_boxed(
                keys, *tensors, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
            )
        out, lse = ops.attention_forward.default.redispatch(
            keys, *tensors, causal=is_causal, scale=scale
        )
        return laid_out(out, query), _positions_first(lse)

    def backward(
        self,
        keys: Any,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        dropout_p: float,
        is_causal: bool,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """aten::_scaled_dot_product_flash_attention_for_cpu_backward."""
        saved = (grad_out, query, key, value, out, logsumexp)
        refused = refusal(query, key, value, dropout_p, is_causal, attn_mask, scale)
        if refused or gradient_refusal(grad_out, query, out, logsumexp):
            return self.torchs_backward.call_boxed(
                keys, *saved, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
            )
        grads = ops.attention_backward.default.redispatch(
            keys, *saved, causal=is_causal, scale=scale
        )
        dquery, dkey, dvalue = (_positions_first(grad) for grad in grads[:3])
        return dquery, dkey, dvalue
