"""Styles for torch.distributed.tensor.parallel.parallelize_module."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from torchweld.nn import GatedLinear, LayerNormLinear, RMSNormLinear

_LINEAR = ("weight", "bias")  # of each module; its other parameters are the norm's
_MODULES = (LayerNormLinear, RMSNormLinear, GatedLinear)


class NormColwise(ParallelStyle):
    """`ColwiseParallel` for `LayerNormLinear`, `RMSNormLinear` and `GatedLinear`.

    Each process has some columns of the result: `Shard(0)` of weight and bias. The norm's
    parameters are replicated, and their gradients are `Partial`, as torch's own norms have them:
    what is summed over the processes is the gradient to x, once behind the op. The partner behind
    it stays `nn.Linear` with torch's `RowwiseParallel`.

    Args:
        input_layouts: how x is placed: `Replicate()` by default; `Shard(1)` for sequence parallel
            of `x (batch, seqlen, K)`: it is gathered before the op, and its gradient is
            reduce-scattered.
        output_layouts: how the result is to be placed, `Shard(-1)` by default.
        use_local_output: whether the result is a plain Tensor, the process's part of it.

    Raises:
        TypeError: another module, when it is applied.
        ValueError: the mesh has more than one dim, or does not divide `out_features`.

    Limits: the two halves of a `GatedLinear` that is not interleaved are both sharded, which is
        torch's `_StridedShard`: trained as any other, gathered by
        `torchweld.distributed.full_tensor`, refused by torch.distributed.checkpoint. An interleaved
        one is `Shard(0)`. In sequence parallel every process computes the norm's statistics of all
        rows.

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
        self.input_layouts = (input_layouts or Replicate(),)
        self.output_layouts = (output_layouts or Shard(-1),)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, _MODULES):
            names = ", ".join(cls.__name__ for cls in _MODULES)
            raise TypeError(
                f"NormColwise: module must be one of {names}, but got {type(module).__name__}"
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
        return distribute_module(
            module,
            device_mesh,
            self._shard,
            partial(self._prepare_input, self.input_layouts),
            partial(self._prepare_output, self.output_layouts, self.use_local_output),
        )

    def _shard(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        columns: Placement = Shard(0)
        if isinstance(module, GatedLinear) and not module.interleaved:
            columns = _StridedShard(0, split_factor=2)
        for name, parameter in list(module.named_parameters(recurse=False)):
            placements = [columns if name in _LINEAR else Replicate()]
            shard_parameter(module, name, parameter, mesh, placements, self.src_data_rank)

    @staticmethod
    def _prepare_input(
        layouts: tuple[Placement, ...], module: nn.Module, inputs: Any, mesh: DeviceMesh
    ) -> tuple[Any, ...]:
        _tell_dtypes(module)
        x, *others = inputs
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, layouts, run_check=False)
        return x.redistribute(placements=(Replicate(),)), *others

    @staticmethod
    def _prepare_output(
        layouts: tuple[Placement, ...],
        use_local_output: bool,
        module: nn.Module,
        output: DTensor,
        mesh: DeviceMesh,
    ) -> Tensor:
        output = output.redistribute(placements=layouts)
        return output.to_local() if use_local_output else output

    def __repr__(self) -> str:
        return (
            f"NormColwise(input_layouts={self.input_layouts}, "
            f"output_layouts={self.output_layouts}, use_local_output={self.use_local_output})"
        )


def _tell_dtypes(module: nn.Module) -> None:
    """FSDP2's mixed precision gathers parameters in another dtype than their DTensors say (torch
    2.11). torch's own ops don't look; torchweld's would refuse them.
    """
    for parameter in module.parameters(recurse=False):
        if isinstance(parameter, DTensor):
            spec, dtype = parameter._spec, parameter._local_tensor.dtype
            if spec.tensor_meta is not None and spec.tensor_meta.dtype != dtype:
                spec.tensor_meta = spec.tensor_meta._replace(dtype=dtype)


def shard_parameter(
    module: nn.Module,
    name: str,
    parameter: nn.Parameter,
    mesh: DeviceMesh,
    placements: list[Placement],
    src_data_rank: int | None,
) -> None:
    """Replaces a parameter of a module by a DTensor of it."""
    sharded = distribute_tensor(parameter, mesh, placements, src_data_rank=src_data_rank)
    module.register_parameter(name, nn.Parameter(sharded, parameter.requires_grad))
