"""Converts DTensors to the tensors of a process, and gradients back to DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from torchweld._autograd import once_differentiable


def full_tensor(t: DTensor) -> Tensor:
    """Gathers a DTensor as `t.full_tensor()` does, strided shards of packed weights included.

    torch does not gather `_StridedShard`, the placement by :class:`NormColwise` and
    :func:`parallelize` of weights that are packed without interleaving.

    Args:
        t: any DTensor; every process of its mesh makes the call.

    Returns:
        The whole tensor, in every process.

    Raises:
        TypeError: t is no DTensor.
        ValueError: strided shards that torch does not gather have different sizes, or another dim
            of the mesh shards the same dim of t, as FSDP2 does with the weight of such a module.

    Limits: strided shards get no gradient through this function.

    Example::

        layer = torchweld.nn.GatedLinear(32, 64)
        parallelize_module(layer, mesh, torchweld.distributed.NormColwise())
        assert torchweld.distributed.full_tensor(layer.weight).shape == (128, 32)
    """
    if not isinstance(t, DTensor):
        raise TypeError(f"full_tensor: t must be a DTensor, but got {type(t).__name__}")
    mesh = t.device_mesh
    for i, placement in enumerate(t.placements):
        earlier = (getattr(p, "dim", None) for p in t.placements[:i] if p.is_shard())
        if isinstance(placement, _StridedShard) and placement.dim in earlier:
            # FSDP2 shards the tensor-parallel shard, but its placements list the two shards in the
            # opposite order.
            raise ValueError(_sharded_twice(t))
    strided = [p.dim for p in t.placements if isinstance(p, _StridedShard)]
    try:
        whole = t.redistribute(placements=[Replicate()] * mesh.ndim).to_local()
    except ValueError:  # torch raises it before any communication
        if not strided:
            raise
    except AssertionError:  # torch 2.15 raises it if FSDP2 has sharded a strided shard
        raise ValueError(_sharded_twice(t)) from None
    else:
        if len(set(strided)) < len(strided):
            # torch 2.15 describes two different layouts by one placement, and gathers one of them
            # wrongly.
            raise ValueError(_sharded_twice(t))
        return whole
    for placement, size in zip(t.placements, mesh.shape, strict=True):
        count = size * getattr(placement, "split_factor", 1)
        dim = getattr(placement, "dim", None)
        if dim is not None and t.shape[dim] % count:
            raise ValueError(
                f"full_tensor: dim {dim} of t must be a multiple of its {count} parts, but got "
                f"{t.shape[dim]}"
            )
    whole = t.detach().to_local()
    for dim in reversed(range(mesh.ndim)):
        placement, group = t.placements[dim], mesh.get_group(dim)
        if isinstance(placement, Partial):
            dist.all_reduce(whole := whole.clone(), group=group)
        elif not isinstance(placement, Replicate):
            shards = [torch.empty_like(whole) for _ in range(mesh.shape[dim])]
            dist.all_gather(shards, whole.contiguous(), group=group)
            split = getattr(placement, "split_factor", 1)
            chunks = [shard.chunk(split, placement.dim) for shard in shards]
            whole = torch.cat([p for row in zip(*chunks, strict=True) for p in row], placement.dim)
    return whole


def as_in_autocast(t: Tensor) -> Tensor:
    """Casts t to autocast's dtype as an op does; under autocast norms return float32."""
    device = t.device.type
    # the ops support only CPU and CUDA
    if t.dtype == torch.float64 or device not in ("cpu", "cuda"):
        return t
    return t.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else t


def sharded_dim(argument: str, placement: Placement, x: Tensor) -> int:
    """Returns the dim of x that a placement shards, counted from 0.

    Raises:
        ValueError: x has no such dim.
    """
    if not -x.dim() <= placement.dim < x.dim():
        raise ValueError(
            f"{argument} must shard one of the {x.dim()} dims of x, but got Shard({placement.dim})"
        )
    return placement.dim % x.dim()


# Below are functions for an autograd.Function that takes a DTensor parameter as it is and returns a
# DTensor as its gradient. NOTE: `DTensor.to_local()` would add two nodes to the autograd graph and
# 80 us of host time, forward and backward. Batched gradients (`is_grads_batched`) work neither here
# nor with `to_local()`: torch raises NotImplementedError.


def is_dtensor_parameter(t: Tensor | None) -> bool:
    """Whether a tensor is a DTensor parameter that a Function can take. Compiled code uses
    `to_local()`.
    """
    return (
        isinstance(t, DTensor)
        and t.requires_grad
        and t.is_leaf
        and type(t._local_tensor) is Tensor
        and not torch.compiler.is_compiling()
    )


def local_of(t: Tensor | None) -> Tensor | None:
    """Returns a DTensor's local tensor, or the tensor itself; no gradient flows back."""
    return t._local_tensor if isinstance(t, DTensor) else t


def local_parameters(*parameters: Tensor | None) -> list[Tensor | None]:
    return [None if p is None else as_in_autocast(local_of(p)) for p in parameters]


def parameter_of(t: Tensor | None) -> DTensor | None:
    """Returns t if it is a DTensor, for :func:`gradient_of`; None for a plain tensor."""
    return t if isinstance(t, DTensor) else None


def once_outside_autocast(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a backward with `once_differentiable` and, in the dtypes of forward, runs it
    outside of autocast.
    """
    once = once_differentiable(backward)

    def without_autocast(ctx: Any, *grads: Tensor) -> Any:
        device = grads[0].device.type
        if torch.compiler.is_compiling() or not torch.is_autocast_enabled(device):
            return once(ctx, *grads)
        with torch.autocast(device, enabled=False):
            return once(ctx, *grads)

    return without_autocast


def gradient_of(parameter: DTensor | None, grad: Tensor) -> Tensor:
    """Converts the gradient of a parameter's local tensor to the result of backward.

    Args:
        parameter: The result of :func:`parameter_of`; None for a plain tensor.
        grad: A new tensor that nothing else references.
    """
    if parameter is None:
        return grad
    local = parameter._local_tensor
    # Autograd wants a gradient in the dtype and layout of its parameter.
    if grad.stride() != local.stride() or grad.dtype != local.dtype:
        grad = torch.empty_like(local).copy_(grad)
    return DTensor(grad, parameter._spec, requires_grad=False)


def parameter_gradients(
    ctx: Any, wanted: list[bool], dweight: Tensor | None, dbias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients of weight and bias, the last two inputs of a Function."""
    needs_dweight, needs_dbias = wanted
    return (
        gradient_of(ctx.weight, dweight) if needs_dweight else None,
        gradient_of(ctx.bias, dbias) if needs_dbias else None,
    )


class _LocalPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: DTensor, copies: bool) -> Tensor:
        ctx.parameter, ctx.copies = parameter, copies
        return local_of(parameter).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if not torch.is_grad_enabled():
            return gradient_of(ctx.parameter, grad.clone() if ctx.copies else grad), None
        spec = ctx.parameter._spec
        placed = DTensor.from_local(
            grad, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )
        return placed, None


def local_part(parameter: Tensor | None) -> Tensor | None:
    """Returns this process's part of a DTensor parameter, or a plain parameter as it is.

    NOTE: backward copies the gradient, because autograd may pass one tensor to several parameters
    and does not see that DTensors around it share it. torch's `to_local` does not copy.
    """
    return _local_part(parameter, copies=True)


def local_weight(parameter: Tensor | None) -> Tensor | None:
    """Returns `local_part` for a matmul's weight: its gradient is a new tensor and not copied."""
    return _local_part(parameter, copies=False)


def _local_part(parameter: Tensor | None, copies: bool) -> Tensor | None:
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.is_grad_enabled() and is_dtensor_parameter(parameter):
        return _LocalPart.apply(parameter, copies)
    return parameter.to_local()


def function_input(parameter: Tensor | None) -> Tensor | None:
    """Returns a DTensor parameter that a Function can take as it is; for others, `local_part`."""
    return parameter if is_dtensor_parameter(parameter) else local_part(parameter)


def shard_parameter(
    module: nn.Module,
    name: str,
    parameter: nn.Parameter,
    mesh: DeviceMesh,
    placement: Placement | None,
    src_data_rank: int | None,
) -> None:
    """Replaces a module's parameter by a sharded DTensor.

    Args:
        placement: None keeps the parameter plain, the same in all processes.
        src_data_rank: the process whose values are used; None if all have the same.
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


def _sharded_twice(t: DTensor) -> str:
    dim = next(p.dim for p in t.placements if isinstance(p, _StridedShard))
    return (
        f"full_tensor: dim {dim} of t must be sharded by one dim of the mesh beside _StridedShard, "
        f"but got {t.placements}"
    )


def replicated(mesh: DeviceMesh, x: Tensor, placement: Placement) -> Tensor:
    """Gathers x, a DTensor or a part of one; backward sums the gradients of all processes."""
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [placement], run_check=False)
    return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
