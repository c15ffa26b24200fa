"""Tensor parallelism of a Hugging Face GPT-2, for :func:`torchweld.distributed.parallelize`.

transformers has no plan for GPT-2. ``c_attn`` packs query, key and value, so each process needs a
part of all three, and torch's own ops take no such DTensors. So the parameters are DTensors, which
optimizers, checkpoints and the state_dict see, and the layers compute with the process's shards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention, GPT2Block, GPT2Model
from transformers.pytorch_utils import Conv1D

from torchweld.integrations.fusion.layers.fused_module import STOCK

_PROJECTIONS = 3  # c_attn projects query, key and value


class ShardedConv1D(Conv1D):
    """A Conv1D whose columns or rows are sharded, as the weight's placement says.

    With sharded columns, ``x`` has all columns; with sharded rows, ``x`` has this process's
    columns.
    """

    def columns(self, x: Tensor, weight: Tensor, bias: Tensor, *shared: Any) -> tuple[Any, ...]:
        """Returns this process's operands; gradients of x and ``shared`` are summed over all."""
        from torch.distributed.tensor import DTensor

        from torchweld.distributed.collectives import copy_to_tp_region
        from torchweld.distributed.tensors import local_part, local_weight

        mesh, shards = weight.device_mesh, type(bias) is DTensor
        x, whole, *shared = copy_to_tp_region(mesh, x, None if shards else bias, *shared)
        if shards:
            bias = local_part(bias)
        else:
            biases = whole.view(_PROJECTIONS, mesh.size(), -1)
            bias = biases[:, mesh.get_local_rank()].flatten()
        return x, local_weight(weight), bias, *shared

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.placements[0].dim == 1:
            x, weight, bias = self.columns(x, self.weight, self.bias)
            return torch.nn.functional.linear(x, weight.t(), bias)
        from torchweld.distributed.collectives import reduce_from_tp_region
        from torchweld.distributed.tensors import local_weight

        y = torch.matmul(x, local_weight(self.weight))
        return reduce_from_tp_region(self.weight.device_mesh, y) + self.bias.to(y.dtype)

    def __repr__(self) -> str:
        return f"ShardedConv1D(nf={self.nf}, nx={self.nx})"


def refusal(base: GPT2Model, size: int) -> str | None:
    """Returns why ``size`` processes can't shard a model, as the end of a sentence, or None."""
    if base.config.num_attention_heads % size:
        return (
            f"num_attention_heads must be a multiple of the mesh's {size} processes, but got "
            f"{base.config.num_attention_heads}"
        )
    for path, block in base.h.named_children():
        known = vars(type(block)).get(STOCK, type(block)) is GPT2Block  # fused or not
        if not known or hasattr(block, "crossattention"):
            what = "one with cross attention" if known else type(block).__name__
            return f"h.{path} must be transformers' GPT2Block, but got {what}"
        if not isinstance(block.attn, GPT2Attention):
            return f"h.{path}.attn must be GPT2Attention, but got {type(block.attn).__name__}"
        for name, layer in _layers(block).items():
            if type(layer) is not Conv1D:
                return f"h.{path}.{name} must be Conv1D, but got {type(layer).__name__}"
            if type(layer.weight.data) is not Tensor:
                kind = type(layer.weight.data).__name__
                return f"h.{path}.{name}.weight must be a plain parameter, but got {kind}"
        if block.mlp.c_fc.nf % size:
            return (
                f"the MLP's {block.mlp.c_fc.nf} columns must be a multiple of the mesh's {size} "
                "processes"
            )
    return None


def _layers(block: nn.Module) -> dict[str, nn.Module]:
    attn, mlp = block.attn, block.mlp
    return {
        "attn.c_attn": attn.c_attn,
        "attn.c_proj": attn.c_proj,
        "mlp.c_fc": mlp.c_fc,
        "mlp.c_proj": mlp.c_proj,
    }


def shard(base: GPT2Model, mesh: Any, src_data_rank: int | None) -> None:
    """Shards the blocks of a model that `refusal` accepts, in place."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    from torchweld.distributed.tensors import shard_parameter

    # FSDP2 shards dim 0, the other one of c_attn's weight. Its bias has one dim: FSDP2 would shard
    # a strided shard of it again and lose the order, so this bias is replicated.
    # Replicated parameters stay plain tensors, because optimizers need less time for them.
    placements = {
        "attn.c_attn": {"weight": _StridedShard(1, split_factor=_PROJECTIONS), "bias": None},
        "attn.c_proj": {"weight": Shard(0), "bias": None},
        "mlp.c_fc": {"weight": Shard(1), "bias": Shard(0)},
        "mlp.c_proj": {"weight": Shard(0), "bias": None},
    }
    for block in base.h:
        for name, layer in _layers(block).items():
            for key, placement in placements[name].items():
                parameter = getattr(layer, key)
                shard_parameter(layer, key, parameter, mesh, placement, src_data_rank)
            layer.__class__ = ShardedConv1D
        block.attn.split_size = block.attn.embed_dim // mesh.size()
