"""Layers that pack several matrices in one weight, for :func:`parallelize`.

The plan of transformers gathers the results of such layers, and every process computes the whole
gate of an MLP and all heads of an attention. Here a process has the same columns of both halves of
a ``gate_up_proj``, and attends with its own heads of a ``qkv_proj``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.distributed.tensor.placement_types import _StridedShard

from .collectives import gather_from_sp_region
from .linears import ColumnLinear, shard_linear

HALVES, HEADS = "packed_halves", "packed_heads"
# For each packed layer: the style for it, and the layer that takes its columns.
LAYERS = {"gate_up_proj": (HALVES, "down_proj"), "qkv_proj": (HEADS, "o_proj")}


class HeadsLinear(ColumnLinear):
    """Computes query, key and value of this process's heads, one behind the other.

    NOTE: no placement describes the heads of a process in one weight if query and key have
    different numbers of heads. So the weight is sharded in its order, and the results are gathered.
    """

    columns: tuple[int, int, int]  # numbers of columns of query, key and value in all processes

    def forward(self, input: Tensor) -> Tensor:
        mesh, y = self.weight.device_mesh, super().forward(input)
        packed = gather_from_sp_region(mesh, y.dim() - 1, y).split(self.columns, -1)
        rank = mesh.get_local_rank()
        return torch.cat([each.chunk(mesh.size(), -1)[rank] for each in packed], -1)


class LocalConfig:
    """The config of an attention layer with some of the heads; the rest is the model's."""

    def __init__(self, config: Any, heads: int) -> None:
        self.config, self.num_attention_heads = config, heads

    def __getattr__(self, name: str) -> Any:
        if name == "config" or name.startswith("__"):  # copy and pickle read these before __init__
            raise AttributeError(name)
        return getattr(self.config, name)


class PackedColumns(ParallelStyle):
    """Shards a packed `nn.Linear` in place."""

    def __init__(self, cls: type[nn.Linear], columns: Shard | _StridedShard) -> None:
        super().__init__()
        self.cls, self.columns = cls, columns

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return shard_linear(module, self.cls, self.columns, None, device_mesh, self.src_data_rank)


# The styles by their names in a plan. After HEADS, `set_heads` must set the layers' columns.
STYLES = {
    HALVES: lambda: PackedColumns(ColumnLinear, _StridedShard(0, split_factor=2)),
    HEADS: lambda: PackedColumns(HeadsLinear, Shard(0)),
}


def can_shard(module: nn.Module, name: str, size: int) -> bool:
    """Whether the packed layer of a module, and the layer behind it, can be sharded.

    Args:
        module: An MLP or an attention layer, the parent of both layers.
        name: The packed layer's name, a key of LAYERS.
        size: Number of processes.
    """
    from torchweld.integrations.fusion.recognise import find

    layers = [module._modules.get(each) for each in (name, LAYERS[name][1])]
    if any(type(layer) is not nn.Linear for layer in layers):
        return False
    if name == "gate_up_proj":
        return find.packs_gate(module) and layers[1].in_features % size == 0
    counts = module.config.num_attention_heads, module.num_key_value_heads
    return find.packs_heads(module) and all(count % size == 0 for count in counts)


def set_heads(attentions: Iterable[nn.Module], size: int) -> None:
    """Lets attention layers whose `qkv_proj` is sharded compute with their process's heads."""
    for attn in attentions:
        count, count_k = attn.config.num_attention_heads, attn.num_key_value_heads
        attn.qkv_proj.columns = tuple(n * attn.head_dim for n in (count, count_k, count_k))
        attn.config = LocalConfig(attn.config, count // size)
        attn.num_key_value_heads = count_k // size
