"""Calls of torch's flash attention op, and their expected results."""

from __future__ import annotations

import math

import torch

import attention_engines
from samples import BF16

FLASH = torch.ops.aten._scaled_dot_product_flash_attention


def formula(q, k, v, is_causal, scale):
    """out and lse in float64; lse is inf for a row without visible keys, as in flash attention."""
    out, lse = attention_engines.formula(q, k, v, None, is_causal, scale)
    return out, torch.where(lse == -math.inf, math.inf, lse)


def draw(sizes, sizes_k=None, device="cpu", dtype=BF16, transposed=False):
    """query, key and value that want gradients; transposed: seqlen comes before the heads."""
    made = []
    for batch, nheads, seqlen, dim in (sizes, sizes_k or sizes, sizes_k or sizes):
        if transposed:
            t = torch.randn(batch, seqlen, nheads, dim, device=device).to(dtype).transpose(1, 2)
        else:
            t = torch.randn(batch, nheads, seqlen, dim, device=device).to(dtype)
        made.append(t.detach().requires_grad_())
    return made


def strides(t):
    """The strides of t, without dims of size 1, whose stride does not matter."""
    return [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]
