"""Layers of a Hugging Face GPT-2 as the host runs them fastest: the same calls, less beside them.

A step of generation computes so little that the GPU waits for the host. So what a stock layer does
in every call and changes nothing is left out: looking its attention function up, six views where
three do, modules that hand on what they get. A module that was hooked, replaced or wrapped is
called as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.pytorch_utils import Conv1D

from torchweld.ops.stock import is_plain

from .gpt2_site import site_of, weight_and_bias
from .hf_attention import NAME, attention_forward


def project(layer: nn.Module, x: Tensor, dims: int = 1) -> Tensor:
    """``layer`` of x, whose last ``dims`` dimensions hold the features.

    Of a Conv1D it is the product that its forward computes.
    """
    if is_plain(layer, Conv1D):
        weight, bias = weight_and_bias(layer)
        y = torch.addmm(bias, x.reshape(-1, x.shape[-dims:].numel()), weight)
        return y.view(*x.shape[:-dims], layer.nf)
    return layer(x.flatten(-dims))


def drop(layer: nn.Module, x: Tensor) -> Tensor:
    """``layer(x)``, which is x behind a Dropout in eval mode."""
    if not layer.training and is_plain(layer, nn.Dropout):
        return x
    return layer(x)


def _implementation(config: Any) -> str | None:
    """``config._attn_implementation``.

    NOTE: a configuration overrides __getattribute__, in Python: the property takes the host as long
    as an op does. torch.compile can trace it and not what is done instead.
    """
    if torch.compiler.is_compiling():
        return config._attn_implementation
    try:
        return object.__getattribute__(config, "_attn_implementation_internal")
    except AttributeError:  # a version of transformers that keeps it elsewhere
        return config._attn_implementation


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
            or _implementation(self.config) != NAME
        ):
            return GPT2Attention.forward(self, hidden_states, *args, **kwargs)
        mask = kwargs.get("attention_mask")
        for name in _OWN:
            kwargs.pop(name, None)
        modules = self._modules
        c_attn = modules["c_attn"]
        site = site_of(c_attn)
        # Hooks that transformers records outputs with see c_attn's.
        applies = site is not None and site.owner is self and not c_attn._forward_hooks
        qkv = site.compute(hidden_states) if applies else c_attn(hidden_states)
        batch, rows, _ = qkv.shape
        # 3 x (batch, nheads, seqlen, head_dim)
        if rows == 1:  # as below, with a view less
            parts = qkv.view(batch, 3, -1, 1, self.head_dim).unbind(1)
        else:
            parts = qkv.view(batch, rows, 3, -1, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        query, key, value = parts
        if cache is not None:
            cached = cache.update(key, value, self.layer_idx)
            # NOTE: what was empty holds copies now, which the gradient would keep beside qkv.
            first = type(cache) is DynamicCache and cached[0].shape == key.shape
            if not (first and key.requires_grad):
                key, value = cached
        dropout = modules["attn_dropout"].p if self.training else 0.0
        out, weights = attention_forward(
            self, query, key, value, mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        return drop(modules["resid_dropout"], project(modules["c_proj"], out, 2)), weights
