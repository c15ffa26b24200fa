"""Linear layers whose columns or rows are sharded over the processes.

Optimizers, checkpoints and the state_dict see DTensor parameters; forward computes with the local
tensors. torch's own styles call ops on DTensors, which takes the host several times as long as a
GPU takes for a layer of a few thousand tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from torchweld.nn import Int4Linear

from .collectives import columns_of, reduce_from_tp_region
from .int4_linears import shard_int4
from .products import scattered_linear
from .tensors import local_part, local_weight, shard_parameter, sharded_dim


class ColumnLinear(nn.Linear):
    """Computes this process's columns of the result from a replicated x."""

    def forward(self, input: Tensor) -> Tensor:
        return columns_of(
            self.weight.device_mesh,
            input,
            lambda x: F.linear(x, local_weight(self.weight), local_part(self.bias)),
        )


class GatheredLinear(ColumnLinear):
    """Computes this process's columns and gathers all columns; shards may differ in size."""

    def forward(self, input: Tensor) -> Tensor:
        mesh, y = self.weight.device_mesh, super().forward(input)
        shape = torch.Size((*y.shape[:-1], self.out_features))
        stride = torch.empty(shape, device="meta").stride()
        columns = DTensor.from_local(
            y, mesh, [Shard(y.dim() - 1)], run_check=False, shape=shape, stride=stride
        )
        return columns.full_tensor()


class RowLinear(nn.Linear):
    """Sums the products of all processes' columns of x; returns all tokens or this process's."""

    output: Placement = Replicate()

    def forward(self, input: Tensor) -> Tensor:
        mesh, output = self.weight.device_mesh, self.output
        if isinstance(input, DTensor):
            input = input.redistribute(placements=[Shard(input.dim() - 1)]).to_local()
        if output.is_shard():
            dim = sharded_dim("Rowwise: output_layouts", output, input)
            return scattered_linear(mesh, dim, input, self.weight, self.bias)
        return self.summed(F.linear(input, local_weight(self.weight)))

    def summed(self, y: Tensor) -> Tensor:
        """Sums the terms y of the result over all processes, and adds the bias."""
        y, bias = reduce_from_tp_region(self.weight.device_mesh, y), local_part(self.bias)
        return y if bias is None else y + bias.to(y.dtype)


def shard_linear(
    module: nn.Linear,
    cls: type[nn.Linear],
    sharded: Shard | _StridedShard,
    rest: Placement | None,
    mesh: DeviceMesh,
    src_data_rank: int | None,
) -> nn.Linear:
    """Shards a layer's parameters in place and sets the layer's class to `cls`.

    Args:
        sharded: the placement of the parameters that have the dim it shards.
        rest: the placement of a bias that lacks the dim; None keeps it plain.
    """
    for name, parameter in list(module.named_parameters(recurse=False)):
        placement = sharded if parameter.dim() > sharded.dim else rest
        shard_parameter(module, name, parameter, mesh, placement, src_data_rank)
    module.__class__ = cls
    return module


class ShardedLinears(ParallelStyle):
    """Shards an `nn.Linear` or `Int4Linear`, in place; applies torch's style to other modules."""

    def __init__(self, sharded: type[nn.Linear], dim: int, style: ParallelStyle) -> None:
        super().__init__()
        self.sharded, self.dim, self.style = sharded, dim, style

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is Int4Linear:
            return shard_int4(module, self.dim, device_mesh, self.src_data_rank)
        if type(module) is not nn.Linear:
            self.style.src_data_rank = self.src_data_rank
            return self.style._apply(module, device_mesh)
        placement = Shard(self.dim)
        return shard_linear(module, self.sharded, placement, None, device_mesh, self.src_data_rank)
