"""Conversion between CausalSelfAttention and the GPT2Attention of transformers."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

from torchweld.ops.stock import refuse_mixed, refuse_other, text_of

PROJECTIONS = ("c_attn", "c_proj")
# Attention functions of transformers that compute the same as GPT2Attention's eager path.
_PLAIN_FUNCTIONS = (
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "flex_attention",
    "torchweld",
)


def refuse_attention(owner: str, module: nn.Module, kernel: str) -> None:
    """Raises ValueError unless a module is a GPT2Attention that CausalSelfAttention can copy."""
    loaded = sys.modules.get("transformers.models.gpt2.modeling_gpt2")
    expected = "transformers' GPT2Attention"
    if loaded is None or not isinstance(module, loaded.GPT2Attention):
        fix = ""
        if isinstance(module, nn.MultiheadAttention):
            fix = "; copy in_proj_weight to c_attn.weight and out_proj.weight to c_proj.weight"
        raise ValueError(f"{owner}: module must be {expected}, but got {text_of(module)}{fix}")
    refuse_other(owner, "module", expected, module, loaded.GPT2Attention)
    if module.is_cross_attention:
        raise ValueError(f"{owner}: module must be self-attention, but got cross-attention")
    if not getattr(module, "is_causal", True):
        raise ValueError(f"{owner}: module.is_causal must be True, but got False")
    for name in PROJECTIONS:
        layer = getattr(module, name)
        refuse_other(owner, f"module.{name}", "transformers' Conv1D", layer, loaded.Conv1D)
    for name in ("attn_dropout", "resid_dropout"):
        layer = getattr(module, name)
        refuse_other(owner, f"module.{name}", "nn.Dropout", layer, nn.Dropout)
        if layer.p > 0:
            raise ValueError(
                f"{owner}: module.{name}.p must be 0, since CausalSelfAttention has no dropout, "
                f"but got {layer.p}; set it to 0 to do without"
            )
    function = module.config._attn_implementation
    if function is not None and function not in _PLAIN_FUNCTIONS:
        raise ValueError(
            f"{owner}: the module's attention function must be one of "
            f"{', '.join(_PLAIN_FUNCTIONS)}, but got {function}"
        )
    if module.reorder_and_upcast_attn and kernel != "attention":
        raise ValueError(
            f'{owner}: kernel must be "attention" of a module with reorder_and_upcast_attn, whose '
            f"scores are float32, but got {kernel!r}"
        )
    embed_dim = module.c_attn.weight.shape[0]
    for name, parts in (("c_attn", 3), ("c_proj", 1)):
        shape = tuple(getattr(module, name).weight.shape)
        if shape != (embed_dim, parts * embed_dim):
            raise ValueError(
                f"{owner}: module.{name}.weight must be {(embed_dim, parts * embed_dim)}, but got "
                f"{shape}; a block with pruned heads has no CausalSelfAttention"
            )
    refuse_mixed(owner, projection_tensors(module))


def scale_of(module: nn.Module) -> float:
    """Returns the factor by which a GPT2Attention multiplies its scores."""
    if hasattr(module, "scaling"):
        return float(module.scaling)
    # NOTE: older versions of transformers have no `scaling` attribute and compute the scale in
    # forward.
    scale = module.head_dim**-0.5 if module.scale_attn_weights else 1.0
    return scale / (module.layer_idx + 1) if module.scale_attn_by_inverse_layer_idx else scale


def projection_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": getattr(getattr(module, name), key)
        for name in PROJECTIONS
        for key in ("weight", "bias")
    }


def copy_projections(source: nn.Module, target: nn.Module) -> None:
    """Copies from GPT2Attention to CausalSelfAttention or back; frozen parameters stay frozen."""
    for name in PROJECTIONS:
        theirs, ours = getattr(source, name), getattr(target, name)
        with torch.no_grad():
            ours.weight.copy_(theirs.weight.t())
            ours.bias.copy_(theirs.bias)
        ours.weight.requires_grad_(theirs.weight.requires_grad)
        ours.bias.requires_grad_(theirs.bias.requires_grad)
