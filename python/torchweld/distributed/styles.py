"""Styles for torch.distributed.tensor.parallel.parallelize_module."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from torchweld.nn import GatedLinear, LayerNormLinear, RMSNormLinear

from .collectives import copy_to_tp_region, gather_from_sp_region
from .linears import RowLinear, shard_linear
from .products import gathered_linear
from .tensors import local_weight, replicated, shard_parameter, sharded_dim


class Placed(NamedTuple):
    """The placements of a sharded module's x and result."""

    input: Placement
    output: Placement
    local: bool  # whether the result is a plain Tensor


class _Columns:
    """Computes this process's columns of a module's result from local tensors.

    Calling the op on DTensors takes the host several times as long.
    """

    placed: Placed
    norm: tuple[str, ...]  # names of the norm's parameters

    def forward(self, x: Tensor) -> Tensor:
        """Maps `(..., in_features)` to `(..., out_features)`, placed as `self.placed` says."""
        mesh, placed = self.weight.device_mesh, self.placed
        norm = [getattr(self, name) for name in self.norm]
        whole = isinstance(x, DTensor) or placed.input.is_partial()
        if not whole and placed.input.is_shard():
            dim = sharded_dim("NormColwise: input_layouts", placed.input, x)
            norm = copy_to_tp_region(mesh, *norm)
            if norm and dim < x.dim() - 1:
                # NOTE: for many rows the fused op would run the norm as a separate pass too, and
                # over the rows of all processes.
                normed, columns = self.norm_rows(x, *norm), (self.weight, self.bias)
                y = gathered_linear(mesh, dim, normed, *columns, activation=self.activation)
                return self.as_placed(y)
            x = gather_from_sp_region(mesh, dim, x)
        elif whole:
            x, norm = replicated(mesh, x, placed.input), copy_to_tp_region(mesh, *norm)
        else:
            x, *norm = copy_to_tp_region(mesh, x, *norm)
        columns = local_weight(self.weight), local_weight(self.bias)
        return self.as_placed(self.compute(x, *columns, *norm))

    def as_placed(self, y: Tensor) -> Tensor:
        """Redistributes this process's columns to the placement of the result."""
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
        # NOTE: F.rms_norm needs x and weight of one dtype, and autocast casts neither of them.
        if norm_weight is not None and torch.is_autocast_enabled(x.device.type):
            norm_weight = norm_weight.to(x.dtype)
        return F.rms_norm(x, (self.in_features,), norm_weight, self.eps)


class ColumnGatedLinear(_Columns, GatedLinear):
    norm = ()


_COLUMNS = {
    LayerNormLinear: ColumnLayerNormLinear,
    RMSNormLinear: ColumnRMSNormLinear,
    GatedLinear: ColumnGatedLinear,
}


class NormColwise(ParallelStyle):
    """Shards `LayerNormLinear`, `RMSNormLinear` and `GatedLinear` as `ColwiseParallel` does.

    Each process holds some rows of the weight and of the bias, and computes the columns of the
    result that belong to them, with local tensors and not through DTensor's dispatch. The next
    layer is an `nn.Linear` with :class:`Rowwise`, or with torch's `RowwiseParallel`.

    The norm's parameters are replicated. Their gradients are summed over the processes. If x is a
    plain replicated tensor, its gradient is summed in the same collective.

    Args:
        input_layouts: the placement of x: `Replicate()` by default; `Shard(1)` for sequence
            parallel of `x (batch, seqlen, K)`: each process normalises its tokens, which are then
            gathered; their gradient is reduce-scattered.
        output_layouts: the placement of the result, `Shard(-1)` by default.
        use_local_output: True: the result is a plain Tensor, this process's part. False: a DTensor.

    Raises:
        TypeError: the style is applied to another module.
        ValueError: the mesh has more than one dim, or does not divide `out_features`; in a call,
            x lacks the dim of input_layouts.

    Limits: weight and bias are `Shard(0)`, except in a `GatedLinear` that is not interleaved. There
        each half is sharded, as torch's `_StridedShard`. Such a weight trains like any other.
        `torchweld.distributed.full_tensor` gathers it, and torch.distributed.checkpoint refuses it.
        Forward passes on several CUDA streams at once are not ordered.

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
        2022.

    Example::

        mlp = nn.Sequential(torchweld.nn.LayerNormLinear(32, 128), nn.Linear(128, 32))
        styles = {"0": torchweld.distributed.NormColwise(), "1": torchweld.distributed.Rowwise()}
        parallelize_module(mlp, mesh, styles)
        assert mlp(torch.randn(2, 16, 32)).shape == (2, 16, 32)
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
        _check("NormColwise", device_mesh, "out_features", module.out_features)
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


class Rowwise(ParallelStyle):
    """Shards an `nn.Linear` behind :class:`NormColwise` as `RowwiseParallel` does.

    The weight is `Shard(1)`: each process multiplies some columns of x, with local tensors and not
    through DTensor's dispatch, which takes the host several times as long. x is a plain Tensor of
    this process's columns, or a DTensor; the result is a plain Tensor. The bias is replicated, and
    every process gets its whole gradient.

    Args:
        output_layouts: the placement of the result: `Replicate()` by default; `Shard(1)` for
            sequence parallel of `(batch, seqlen, N)`.

    Raises:
        TypeError: the style is applied to another module.
        ValueError: another placement; the mesh has more than one dim, or does not divide
            `in_features`; in a call, the mesh does not divide the tokens.

    Limits: forward passes on several CUDA streams at once are not ordered.

    Example::

        mlp = nn.Sequential(torchweld.nn.GatedLinear(32, 64, gate="swiglu"), nn.Linear(64, 32))
        styles = {"0": torchweld.distributed.NormColwise(), "1": torchweld.distributed.Rowwise()}
        parallelize_module(mlp, mesh, styles)
        mlp(torch.randn(2, 16, 32)).sum().backward()
    """

    def __init__(self, *, output_layouts: Placement | None = None) -> None:
        super().__init__()
        self.output_layouts = output_layouts or Replicate()
        if type(self.output_layouts) not in (Replicate, Shard):
            raise ValueError(
                "Rowwise: output_layouts must be Replicate() or Shard(dim), but got "
                f"{output_layouts}"
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is not nn.Linear:
            raise TypeError(
                "Rowwise: module must be nn.Linear (no subclass, not sharded yet), but got "
                f"{type(module).__name__}"
            )
        _check("Rowwise", device_mesh, "in_features", module.in_features)
        shard_linear(module, RowLinear, Shard(1), Replicate(), device_mesh, self.src_data_rank)
        module.output = self.output_layouts
        return module

    def __repr__(self) -> str:
        return f"Rowwise(output_layouts={self.output_layouts})"


def _check(style: str, mesh: DeviceMesh, name: str, features: int) -> None:
    if mesh.ndim != 1:
        raise ValueError(
            f"{style}: device_mesh must have one dim, but got {mesh.ndim}; use one of its dims, as "
            'mesh["tp"]'
        )
    if features % mesh.size():
        raise ValueError(
            f"{style}: {name} must be a multiple of the mesh's {mesh.size()} processes, but got "
            f"{features}"
        )
