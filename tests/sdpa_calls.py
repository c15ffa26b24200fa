"""Calls of torch's flash attention op, and their expected results."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch

import reference as R
from samples import BF16

FLASH = torch.ops.aten._scaled_dot_product_flash_attention


def formula(q, k, v, is_causal, scale):
    """out and lse in float64; lse is inf for a row without visible keys, as in flash attention."""
    given = (t.cpu().double() for t in (q, k, v))
    out, lse = R.attention_forward(*given, causal=is_causal, scale=scale)
    return out.to(q.device), torch.where(lse == -math.inf, math.inf, lse).to(q.device)


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


def packed_formula(q, k, v, lengths, window):
    """out (tokens, heads, head_dim) and lse (heads, tokens) of each sequence, in the dtype."""
    outs, lses = [], []
    for a, b, c in zip(*(t.split(lengths) for t in (q, k, v)), strict=True):
        a, b, c = (t.transpose(0, 1) for t in (a, b, c))
        distance = torch.arange(a.shape[1], device=a.device) - torch.arange(
            a.shape[1], device=a.device
        ).unsqueeze(1)
        left, right = (math.inf if size < 0 else size for size in window)
        seen = (distance >= -left) & (distance <= right)
        scores = (a @ b.mT * a.shape[-1] ** -0.5).masked_fill(~seen, -math.inf)
        outs.append((scores.softmax(-1) @ c).transpose(0, 1)), lses.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(lses, 1)


class Counted:
    """Replaces torchweld's ops, and counts and forwards the calls."""

    def __init__(self, ops):
        self.forwards = self.backwards = 0
        self.attention_forward = self._counted(ops.attention_forward.default, "forwards")
        self.attention_backward = self._counted(ops.attention_backward.default, "backwards")

    def _counted(self, op, counter):
        def redispatch(*args, **kwargs):
            setattr(self, counter, getattr(self, counter) + 1)
            return op.redispatch(*args, **kwargs)

        return SimpleNamespace(default=SimpleNamespace(redispatch=redispatch))


def count_calls(monkeypatch, module):
    """Counts the calls of torchweld's ops in a module of integrations."""
    ops = Counted(module.ops)
    monkeypatch.setattr(module, "ops", ops)
    return ops
