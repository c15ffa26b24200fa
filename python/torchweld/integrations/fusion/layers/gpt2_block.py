"""Defines a GPT-2 block that runs ``norm -> linear (-> activation)`` as one op.

:class:`FusedGPT2Block` reads the parameters of its stock submodules, which stay as they are: each
of them still works when it is called alone, and may be moved or shared. In every call the block
asks which of its :data:`SITES` may run fused. A hook that was added after ``fuse``
(accelerate's offloading too) or a replaced layer (LoRA) makes that site run stock.

A step of generation computes so little that the GPU waits for the host. So the block also leaves
out work without effect: the look-up of its attention, views, and calls of modules that return their
input.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt2.modeling_gpt2 import (
    GPT2MLP,
    GPT2Attention,
    eager_attention_forward,
)
from transformers.pytorch_utils import Conv1D

from torchweld.distributed.gpt2 import ShardedConv1D
from torchweld.integrations import recorder
from torchweld.integrations.attention.fallback import NAME
from torchweld.integrations.attention.forward import attention_forward
from torchweld.integrations.register import register_attention
from torchweld.ops.stock import is_plain

from .arguments import Arguments
from .fused_module import (
    ARGUMENTS,
    FUSED_SITES,
    FusedModule,
    Replacement,
    call_arguments,
    stock_forward,
)
from .stock_modules import activation_name, hooked, implementation, weight_and_bias

# A copied or unpickled block looks torchweld's attention up by name in transformers. Unpickling
# imports this module, which registers the attention.
register_attention()


class Site(NamedTuple):
    """One ``norm -> linear (-> activation)`` of a block, by the names of its modules.

    ``block.<norm>`` feeds ``block.<owner>.<linear>``, whose result ``block.<owner>.<act>`` takes.
    """

    kind: str  # the word for it in fuse's argument ``only``
    path: str  # the path of the replaced module below the block, for reports
    norm: str
    owner: str
    owner_class: type[nn.Module]
    linear: str
    act: str | None = None


ATTENTION = Site("norm", "attn.c_attn", "ln_1", "attn", GPT2Attention, "c_attn")
MLP = Site("mlp", "mlp", "ln_2", "mlp", GPT2MLP, "c_fc", "act")
SITES = (ATTENTION, MLP)
LINEARS = (Conv1D, ShardedConv1D)
_ENCODED = ("encoder_hidden_states", "encoder_attention_mask")  # of crossattention


def _record(module: nn.Module, output: Any) -> None:
    """Calls the forward hooks of a module whose output was computed without it."""
    for hook in module._forward_hooks.values():
        hook(module, (), output)


def _holds(block: nn.Module, site: Site) -> bool:
    """Whether a site's modules are stock, without hooks that would see other values."""
    norm, owner = block._modules.get(site.norm), block._modules.get(site.owner)
    if type(norm) is not nn.LayerNorm or type(owner) is not site.owner_class:
        return False
    linear = owner._modules.get(site.linear)
    if type(linear) not in LINEARS or _mixed(norm, linear):
        return False
    if hooked(norm) or hooked(owner, True) or hooked(linear, site.act is None):
        return False
    if site.act is None:
        return True
    act = owner._modules.get(site.act)
    return activation_name(act) is not None and not hooked(act)


def _mixed(norm: nn.Module, linear: nn.Module) -> bool:
    """Whether the norm has another dtype than the layer, which the op does not support."""
    scale, weight = norm._parameters.get("weight"), linear._parameters.get("weight")
    if scale is None or weight is None or scale.dtype == weight.dtype:
        return False
    return not torch.is_autocast_enabled(scale.device.type)


def fused_paths(block: nn.Module) -> tuple[str, ...]:
    """Returns the paths below a block of the sites that ``fuse`` has fused."""
    return vars(block).get(FUSED_SITES, ())


def fused_sites(block: nn.Module) -> list[Site]:
    """Returns the sites that a block runs fused if it is called now."""
    paths = fused_paths(block)
    if not paths or _has_any_global_hook():
        return []
    return [site for site in SITES if site.path in paths and _holds(block, site)]


def norm_linear(x: Tensor, norm: nn.LayerNorm, linear: Conv1D, activation: str) -> Tensor:
    """Computes ``activation(linear(norm(x)))`` in one op; x is ``(batch, rows, features)``."""
    tensors = x, *weight_and_bias(linear), *weight_and_bias(norm)
    if isinstance(linear, ShardedConv1D):
        tensors = linear.columns(*tensors)
    x, weight, bias, scale, shift = tensors
    # The weight of a Conv1D is (in, out). The op supports any strides, so the transposed view is
    # not copied.
    return torch.ops.torchweld.layer_norm_linear(
        x, weight.t(), bias, scale, shift, eps=norm.eps, activation=activation
    )


def project(layer: nn.Module, x: Tensor, dims: int = 1) -> Tensor:
    """Computes ``layer`` of x, whose last ``dims`` dimensions hold the features."""
    if is_plain(layer, Conv1D):
        weight, bias = weight_and_bias(layer)
        y = torch.addmm(bias, x.reshape(-1, x.shape[-dims:].numel()), weight)
        return y.view(*x.shape[:-dims], layer.nf)
    return layer(x.flatten(-dims))


def _drop(layer: nn.Module, x: Tensor) -> Tensor:
    """Returns ``layer(x)``, without a call if it is a Dropout in eval mode."""
    if not layer.training and is_plain(layer, nn.Dropout):
        return x
    return layer(x)


def _self_attention(
    attn: GPT2Attention, qkv: Tensor, signature: Arguments, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Runs the attention function that the config names; returns its result and weights or None.

    ``qkv`` is ``(batch, rows, 3 * nheads * head_dim)``, the result ``(batch, rows, nheads,
    head_dim)``. ``kwargs`` are the stock layer's arguments: cache and mask are removed from them,
    and the others go to the attention function.
    """
    cache, mask = kwargs.pop(signature.cache, None), kwargs.pop("attention_mask", None)
    batch, rows, _ = qkv.shape
    # 3 x (batch, nheads, rows, head_dim)
    if rows == 1:  # one view fewer than below
        packed = qkv.view(batch, 3, -1, 1, attn.head_dim).unbind(1)
    else:
        packed = qkv.view(batch, rows, 3, -1, attn.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
    query, key, value = packed
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if cache is not None:
        cached = signature.update(cache, key, value, attn.layer_idx, kwargs)
        # NOTE: if the cache was empty, `cached` holds copies of key and value. In training, the
        # copies would be saved for the backward in addition to qkv, so key and value are used
        # instead.
        first = type(cache) is DynamicCache and cached[0].shape == key.shape
        if not (first and key.requires_grad):
            key, value = cached
    name = implementation(attn.config)
    if name == "eager" and attn.reorder_and_upcast_attn:
        return attn._upcast_and_reordered_attn(query, key, value, mask)
    function = attention_forward
    if name != NAME:
        function = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
    dropout = attn.attn_dropout.p if attn.training else 0.0
    # GPT2Attention does not pass it to its attention function either
    kwargs.pop("output_attentions", None)
    return function(attn, query, key, value, mask, dropout=dropout, scaling=attn.scaling, **kwargs)


class FusedGPT2Block(FusedModule):
    """A GPT2Block whose :data:`SITES` run ``torchweld::layer_norm_linear``.

    :mod:`.gpt2` fuses the sites of a block one by one, so the report does not list the block.
    """

    kind = "block"
    knows = (
        *("hidden_states", "cache", "attention_mask", "encoder_hidden_states"),
        *("encoder_attention_mask", "use_cache"),
    )

    @staticmethod
    def replacement(path: str, module: nn.Module, row: None) -> Replacement:
        return Replacement(path, module._modules["mlp"], (module,))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        fused = fused_sites(self)
        given = call_arguments(self, args, kwargs) if fused else None
        if given is None:
            return stock_forward(self, *args, **kwargs)
        encoded = {name: given.pop(name, None) for name in _ENCODED}
        crosses, modules = encoded["encoder_hidden_states"] is not None, self._modules
        if crosses and "crossattention" not in modules:
            return stock_forward(self, *args, **kwargs)

        x, signature = given.pop("hidden_states"), getattr(self, ARGUMENTS)
        if crosses:
            encoded |= {name: given.get(name) for name in (signature.cache, "attention_mask")}
        ln_1, attn, ln_2, mlp = modules["ln_1"], modules["attn"], modules["ln_2"], modules["mlp"]
        if ATTENTION in fused:
            x = x + _fused_attention(ln_1, attn, x, signature, given)
        else:
            x = x + attn(ln_1(x), **given)[0]
        if crosses:
            x = x + modules["crossattention"](modules["ln_cross_attn"](x), **encoded)[0]
        return x + (_fused_mlp(ln_2, mlp, x) if MLP in fused else mlp(ln_2(x)))


def _fused_attention(
    ln_1: nn.LayerNorm,
    attn: GPT2Attention,
    x: Tensor,
    signature: Arguments,
    kwargs: dict[str, Any],
) -> Tensor:
    """Computes ``attn(ln_1(x))[0]``, with ln_1 and c_attn as one op."""
    modules = attn._modules
    qkv = norm_linear(x, ln_1, modules["c_attn"], "none")
    if recorder.calls is not None:
        recorder.record(modules["c_attn"])
    _record(modules["c_attn"], qkv)
    out, weights = _self_attention(attn, qkv, signature, kwargs)
    out = _drop(modules["resid_dropout"], project(modules["c_proj"], out, 2))
    _record(attn, (out, weights))
    return out


def _fused_mlp(ln_2: nn.LayerNorm, mlp: GPT2MLP, x: Tensor) -> Tensor:
    """Computes ``mlp(ln_2(x))``, with ln_2, c_fc and the activation as one op."""
    modules = mlp._modules
    hidden = norm_linear(x, ln_2, modules["c_fc"], activation_name(modules["act"]))
    if recorder.calls is not None:
        recorder.record(mlp)
    out = _drop(modules["dropout"], project(modules["c_proj"], hidden))
    _record(mlp, out)
    return out
