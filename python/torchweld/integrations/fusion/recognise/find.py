"""Finds the fused forward for any module, in the table of families or by its structure."""

from __future__ import annotations

from torch import nn

from torchweld.integrations.fusion.layers import decoder, mlp
from torchweld.integrations.fusion.layers.fused_module import Fusion, is_fused

from . import decoder_layers, experts, heads, mlps, norms, post_norms, sdpa_layers


def find_fusion(module: nn.Module) -> Fusion | None:
    """Returns a module's FusedModule subclass and settings, by table or structure, or None."""
    found = norms.known(module)
    if found is None and not is_fused(module):
        found = decoder_layers.find(module) or heads.find(module) or experts.find(module)
        found = found or mlps.find(module) or post_norms.find(module)
        found = found or sdpa_layers.find(module)
    return found


def packs_gate(module: nn.Module) -> bool:
    """Whether a module is a gated MLP whose gate_up_proj packs the two weights of its gate."""
    parent, row = find_fusion(module) or (None, None)
    if parent is None or not issubclass(parent, mlp.FusedMLP) or not row.packed:
        return False
    return parent is mlp.FusedMLP or mlps.is_gated_mlp(module, row)


def packs_heads(module: nn.Module) -> bool:
    """Whether a module is an attention layer whose qkv_proj packs three weights."""
    _, row = find_fusion(module) or (None, None)
    return isinstance(row, decoder.Attention) and row.packed
