"""Layers of a Hugging Face GPT-2 as the host runs them fastest: the same calls, less beside them.

A step of generation computes so little that the GPU waits for the host. So what a stock layer does
in every call and changes nothing is left out: looking its attention function up, six views where
three do, modules that hand on what they get. A module that somebody hooked, replaced or wrapped is
called as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.cache_utils import EncoderDecoderCache
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.pytorch_utils import Conv1D

from .gpt2_site import site_of, untouched
from .hf_attention import NAME, attention_forward


def _is_plain(module: nn.Module, cls: type[nn.Module]) -> bool:
    """Whether calling a module runs what this class computes, and nothing looks on."""
    return type(module) is cls and untouched(module) and not _has_any_global_hook()


def project(layer: nn.Module, x: Tensor) -> Tensor:
    """``layer(x)``; of a Conv1D the product that its forward computes."""
    if _is_plain(layer, Conv1D):
        y = torch.addmm(layer.bias, x.view(-1, x.shape[-1]), layer.weight)
        return y.view(*x.shape[:-1], layer.nf)
    return layer(x)


def drop(layer: nn.Module, x: Tensor) -> Tensor:
    """``layer(x)``, which is x behind a Dropout in eval mode."""
    if not layer.training and _is_plain(layer, nn.Dropout):
        return x
    return layer(x)


# Arguments of the stock forward that attention functions don't get.
_OWN = (
    "past_key_values",
    "attention_mask",
    "encoder_hidden_states",
    "encoder_attention_mask",
    "output_attentions",
)


class DirectAttention(GPT2Attention):
    """A GPT2Attention whose self-attention calls torchweld's attention function itself.

    Everything else takes the stock forward: cross attention and caches that hold its keys, a config
    that names another implementation by now, and a ``cache_position``, which older versions of
    transformers hand to their caches.
    """

    # NOTE: a wrapped forward outlives unfuse in whoever wrapped it, so `self` may be of the stock
    # class, and the stock forward is named: super() would not find it.
    def forward(
        self, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        cache = kwargs.get("past_key_values")
        if (
            args
            or kwargs.get("encoder_hidden_states") is not None
            or isinstance(cache, EncoderDecoderCache)
            or "cache_position" in kwargs
            or self.config._attn_implementation != NAME
        ):
            return GPT2Attention.forward(self, hidden_states, *args, **kwargs)
        mask = kwargs.get("attention_mask")
        for name in _OWN:
            kwargs.pop(name, None)
        site = site_of(self.c_attn)
        # Hooks that transformers records outputs with see c_attn's.
        applies = site is not None and site.owner is self and not self.c_attn._forward_hooks
        qkv = site.compute(hidden_states) if applies else self.c_attn(hidden_states)
        # (batch, seqlen, 3, nheads, head_dim) -> 3 x (batch, nheads, seqlen, head_dim)
        parts = qkv.view(*qkv.shape[:-1], 3, -1, self.head_dim).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        dropout = self.attn_dropout.p if self.training else 0.0
        out, weights = attention_forward(
            self, query, key, value, mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        return drop(self.resid_dropout, project(self.c_proj, out.flatten(2))), weights
