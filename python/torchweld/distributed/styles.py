"""Styles for torch.distributed.tensor.parallel.parallelize_module."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from torchweld._library import ops
from torchweld.nn import GatedLinear, LayerNormLinear, RMSNormLinear

from .tensors import entering, gathering, local_part, replicated


class Placed(NamedTuple):
    """How a sharded module's x is placed, and its result."""

    input: Placement
    output: Placement
    local: bool  # whether the result is a plain Tensor


def as_in_autocast(t: Tensor) -> Tensor:
    """In autocast's dtype, where it is on, as an op would take it: norms give float32 there."""
    device = t.device.type
    if t.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return t
    return t.to(torch.get_autocast_dtype(device))


class _Columns:
    """Some columns of a module's result, computed from the process's parts of its parameters.

    The op on DTensors would do, but takes the host several times as long.
    """

    placed: Placed
    norm: tuple[str, ...]  # names of its parameters

    def forward(self, x: Tensor) -> Tensor:
        """`(..., in_features)`, placed as x is, to the columns of `(..., out_features)`."""
        mesh, placed = self.weight.device_mesh, self.placed
        columns = local_part(self.weight), local_part(self.bias)
        norm = [local_part(getattr(self, name)) for name in self.norm]
        if isinstance(x, DTensor) or placed.input.is_partial():
            x = replicated(mesh, x, placed.input)
            norm = entering(mesh, *norm)
        elif placed.input.is_shard():
            norm = entering(mesh, *norm)
            if self.norm and placed.input.dim % x.dim() < x.dim() - 1:
                # NOTE: the norm is a pass of its own in the op too, there over all rows.
                normed = gathering(mesh, placed.input.dim, as_in_autocast(self.norm_rows(x, *norm)))
                return self.as_placed(ops.linear(normed, *columns, activation=self.activation))
            x = gathering(mesh, placed.input.dim, x)
        else:
            x, *norm = entering(mesh, x, *norm)
        return self.as_placed(self.compute(x, *columns, *norm))

    def as_placed(self, y: Tensor) -> Tensor:
        """The process's columns as `placed` says."""
        placed, last = self.placed, y.dim() - 1
        if placed.local and placed.output in (Shard(-1), Shard(last)):
            return y
        mesh = self.weight.device_mesh
        y = DTensor.from_local(y, mesh, [Shard(last)], run_check=False)
        y = y.redistribute(placements=[placed.output])
        return y.to_local() if placed.local else y


class ColumnLayerNormLinear(_Columns, LayerNormLinear):
    norm = ("ln_weight", "ln_bias")

    def norm_rows(self, x: Tensor, ln_weight: Tensor | None, ln_bias: Tensor | None) -> Tensor:
        return F.layer_norm(x, (self.in_features,), ln_weight, ln_bias, self.eps)


class ColumnRMSNormLinear(_Columns, RMSNormLinear):
    norm = ("norm_weight",)

    def norm_rows(self, x: Tensor, norm_weight: Tensor | None) -> Tensor:
        return F.rms_norm(x, (self.in_features,), norm_weight, self.eps)


class ColumnGatedLinear(_Columns, GatedLinear):
    norm = ()


_COLUMNS = {
    LayerNormLinear: ColumnLayerNormLinear,
    RMSNormLinear: ColumnRMSNormLinear,
    GatedLinear: ColumnGatedLinear,
}


class NormColwise(ParallelStyle):
    """`ColwiseParallel` for `LayerNormLinear`, `RMSNormLinear` and `GatedLinear`.

    Each process has some columns of the result: `Shard(0)` of weight and bias, and computes them
    with its own tensors, not through DTensor's dispatch. The norm's parameters are replicated, and
    their gradients are summed over the processes with the one to x, once behind the op. The partner
    behind it stays `nn.Linear` with torch's `RowwiseParallel`.

    Args:
        input_layouts: how x is placed: `Replicate()` by default; `Shard(1)` for sequence parallel
            of `x (batch, seqlen, K)`: each process normalises its rows, these are gathered, and
            their gradient is reduce-scattered.
        output_layouts: how the result is to be placed, `Shard(-1)` by default.
        use_local_output: whether the result is a plain Tensor, the process's part of it.

    Raises:
        TypeError: another module, when it is applied.
        ValueError: the mesh has more than one dim, or does not divide `out_features`.

    Limits: the two halves of a `GatedLinear` that is not interleaved are both sharded, which is
        torch's `_StridedShard`: trained as any other, gathered by
        `torchweld.distributed.full_tensor`, refused by torch.distributed.checkpoint. An interleaved
        one is `Shard(0)`.

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
        2022.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.input_layouts = input_layouts or Replicate()
        self.output_layouts = output_layouts or Shard(-1)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) not in _COLUMNS:
            names = ", ".join(cls.__name__ for cls in _COLUMNS)
            raise TypeError(
                f"NormColwise: module must be one of {names} (no subclass, not sharded yet), but "
                f"got {type(module).__name__}"
            )
        if device_mesh.ndim != 1:
            raise ValueError(
                f"NormColwise: device_mesh must have one dim, but got {device_mesh.ndim}; use one "
                'of its dims, as mesh["tp"]'
            )
        if module.out_features % device_mesh.size():
            raise ValueError(
                f"NormColwise: out_features must be a multiple of the mesh's {device_mesh.size()} "
                f"processes, but got {module.out_features}"
            )
        columns: Placement = Shard(0)
        if isinstance(module, GatedLinear) and not module.interleaved:
            columns = _StridedShard(0, split_factor=2)
        for name, parameter in list(module.named_parameters(recurse=False)):
            placement = columns if name in ("weight", "bias") else Replicate()
            shard_parameter(module, name, parameter, device_mesh, placement, self.src_data_rank)
        module.__class__ = _COLUMNS[type(module)]
        module.placed = Placed(self.input_layouts, self.output_layouts, self.use_local_output)
        return module

    def __repr__(self) -> str:
        return (
            f"NormColwise(input_layouts={self.input_layouts}, "
            f"output_layouts={self.output_layouts}, use_local_output={self.use_local_output})"
        )


def shard_parameter(
    module: nn.Module,
    name: str,
    parameter: nn.Parameter,
    mesh: DeviceMesh,
    placement: Placement | None,
    src_data_rank: int | None,
) -> None:
    """Replaces a parameter of a module by a DTensor of it.

    Args:
        placement: None for what all processes have: it stays plain.
        src_data_rank: the process whose parameter it is; None where all have the same.
    """
    if placement is None:
        if src_data_rank is not None:
            whole = distribute_tensor(
                parameter.data, mesh, [Replicate()], src_data_rank=src_data_rank
            )
            parameter.data.copy_(whole.to_local())
        return
    sharded = distribute_tensor(parameter, mesh, [placement], src_data_rank=src_data_rank)
    module.register_parameter(name, nn.Parameter(sharded, parameter.requires_grad))
