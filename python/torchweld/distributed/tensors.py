"""Between DTensors and the tensors of a process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard


def full_tensor(t: DTensor) -> Tensor:
    """`t.full_tensor()`, of the strided shards of packed weights too.

    torch does not gather `_StridedShard`, in which :class:`NormColwise` and :func:`parallelize`
    place weights that are packed without interleaving.

    Args:
        t: any DTensor; every process of its mesh makes the call.

    Returns:
        The whole tensor, in every process.

    Raises:
        TypeError: t is no DTensor.
        ValueError: strided shards that torch does not gather have different sizes, or another dim
            of the mesh shards the same dim of t, as FSDP2 does with the weight of such a module.

    Limits: strided shards have no gradient through this.
    """
    if not isinstance(t, DTensor):
        raise TypeError(f"full_tensor: t must be a DTensor, but got {type(t).__name__}")
    mesh = t.device_mesh
    for i, placement in enumerate(t.placements):
        earlier = (getattr(p, "dim", None) for p in t.placements[:i] if p.is_shard())
        if isinstance(placement, _StridedShard) and placement.dim in earlier:
            # FSDP2 cuts what tensor parallelism left, but its placements say the opposite order.
            raise ValueError(_sharded_twice(t))
    strided = [p.dim for p in t.placements if isinstance(p, _StridedShard)]
    try:
        whole = t.redistribute(placements=[Replicate()] * mesh.ndim).to_local()
    except ValueError:  # before anything is sent; FSDP2's strided shards are gathered
        if not strided:
            raise
    except AssertionError:  # torch 2.15, of FSDP2's shards of strided ones
        raise ValueError(_sharded_twice(t)) from None
    else:
        if len(set(strided)) < len(strided):
            # torch 2.15 has one name for two layouts, and gathers one of them wrongly.
            raise ValueError(_sharded_twice(t))
        return whole
    for placement, size in zip(t.placements, mesh.shape, strict=True):
        parts = size * getattr(placement, "split_factor", 1)
        dim = getattr(placement, "dim", None)
        if dim is not None and t.shape[dim] % parts:
            raise ValueError(
                f"full_tensor: dim {dim} of t must be a multiple of its {parts} parts, but got "
                f"{t.shape[dim]}"
            )
    whole = t.detach().to_local()
    for dim in reversed(range(mesh.ndim)):
        placement, group = t.placements[dim], mesh.get_group(dim)
        if isinstance(placement, Partial):
            dist.all_reduce(whole := whole.clone(), group=group)
        elif not isinstance(placement, Replicate):
            parts = [torch.empty_like(whole) for _ in range(mesh.shape[dim])]
            dist.all_gather(parts, whole.contiguous(), group=group)
            split = getattr(placement, "split_factor", 1)
            pieces = [part.chunk(split, placement.dim) for part in parts]
            whole = torch.cat([p for row in zip(*pieces, strict=True) for p in row], placement.dim)
    return whole


def as_in_autocast(t: Tensor) -> Tensor:
    """In autocast's dtype, where it is on, as an op would take it: norms give float32 there."""
    device = t.device.type
    if t.dtype == torch.float64 or device not in ("cpu", "cuda"):  # those that the ops have
        return t
    return t.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else t


def sharded_dim(argument: str, placement: Placement, x: Tensor) -> int:
    """The dim of x that a placement shards, from 0 on.

    Raises:
        ValueError: x has no such dim.
    """
    if not -x.dim() <= placement.dim < x.dim():
        raise ValueError(
            f"{argument} must shard one of the {x.dim()} dims of x, but got Shard({placement.dim})"
        )
    return placement.dim % x.dim()


# Below are functions that take a parameter's part and hand the gradient to the parameter.
#
# NOTE: a DTensor's `to_local()` takes the host 80 us forward and backward, most of it on the
# gradient's way through the engine; this takes 10. The engine gets a gradient only where somebody
# looks on: hooks of the parameter, torch.autograd.grad, gradients of gradients. Python can't see
# hooks of the accumulating node: they find no gradient.


def takes_gradients(t: Tensor | None) -> bool:
    """Whether :func:`hand_over` serves a tensor: a parameter that is a DTensor. Traced code has its
    own ways.
    """
    return (
        isinstance(t, DTensor)
        and t.requires_grad
        and t.is_leaf
        and type(t._local_tensor) is Tensor
        and not torch.compiler.is_compiling()
    )


def local_of(t: Tensor | None) -> Tensor | None:
    """A DTensor's local tensor, or the tensor itself; no gradient flows back."""
    return t._local_tensor if isinstance(t, DTensor) else t


def parameter_of(t: Tensor | None) -> Tensor | None:
    """What :func:`hand_over` takes for a tensor."""
    return t if isinstance(t, DTensor) else None


def handing_over(backward: Callable[..., Any]) -> Callable[..., Any]:
    """`once_differentiable` for a backward that calls :func:`hand_over`. It computes in the dtypes
    that forward had, also inside autocast.
    """
    once = once_differentiable(backward)

    def recording(ctx: Any, *grads: Tensor) -> Any:
        if torch.compiler.is_compiling():
            return once(ctx, *grads)
        ctx.makes_graph, device = torch.is_grad_enabled(), grads[0].device.type
        if not torch.is_autocast_enabled(device):
            return once(ctx, *grads)
        with torch.autocast(device, enabled=False):
            return once(ctx, *grads)

    return recording


def hand_over(ctx: Any, place: int, parameter: Tensor | None, grad: Tensor) -> Tensor | None:
    """Adds a part's gradient to its parameter, where it goes nowhere else.

    Args:
        ctx: of the function whose backward this is, a :func:`handing_over`.
        place: the parameter's, among the tensors that the function took.
        parameter: what :func:`takes_gradients`; None for a plain tensor.
        grad: the gradient, which nobody else keeps.

    Returns:
        What backward returns for the parameter.
    """
    if parameter is None:
        return grad
    local = parameter._local_tensor
    # As the engine keeps gradients: of the parameter's dtype, in its layout.
    if grad.stride() != local.stride() or grad.dtype != local.dtype:
        grad = torch.empty_like(local).copy_(grad)
    placed = DTensor(grad, parameter._spec, requires_grad=False)
    hooked = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    if hooked or ctx.makes_graph:  # which can't be made: the engine says so
        return placed
    if parameter.grad_dtype not in (None, grad.dtype):  # FSDP2's mixed precision
        return placed
    try:
        runs = torch._C._will_engine_execute_node(ctx.next_functions[place][0])
    except RuntimeError:  # torch.autograd.grad
        runs = False
    if not runs:
        return placed
    if parameter.grad is None:
        parameter.grad = placed
    else:
        parameter.grad += placed
    return None


class _LocalPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        ctx.parameter = parameter
        return local_of(parameter).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor | None:
        parameter, ctx.makes_graph = ctx.parameter, False
        if torch.is_grad_enabled():
            spec = parameter._spec
            return DTensor.from_local(
                grad,
                spec.mesh,
                spec.placements,
                run_check=False,
                shape=spec.shape,
                stride=spec.stride,
            )
        if grad._use_count() > _one_owner():
            grad = grad.clone()
        return hand_over(ctx, 0, parameter, grad)


class _CountedOwners(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, counts: list[int]) -> Tensor:
        ctx.counts = counts
        return t.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.counts.append(grad._use_count())
        return grad, None


@functools.cache
def _one_owner() -> int:
    """References to a gradient in `backward` that nobody keeps; versions of torch differ."""
    counts: list[int] = []
    with torch.inference_mode(False), torch.enable_grad():
        t = torch.ones(1, device="cpu", requires_grad=True)
        (_CountedOwners.apply(t, counts) * 2).backward()
    return counts[0]


def local_part(parameter: Tensor | None) -> Tensor | None:
    """A process's part of a parameter, the whole of a plain one."""
    if not isinstance(parameter, DTensor):
        return parameter
    if torch.is_grad_enabled() and takes_gradients(parameter):
        _one_owner()  # here, because it runs a backward of its own
        return _LocalPart.apply(parameter)
    return parameter.to_local()


def leaf(parameter: Tensor | None) -> Tensor | None:
    """A parameter for a function that hands gradients over itself, or its part."""
    return parameter if takes_gradients(parameter) else local_part(parameter)


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


def _sharded_twice(t: DTensor) -> str:
    dim = next(p.dim for p in t.placements if isinstance(p, _StridedShard))
    return (
        f"full_tensor: dim {dim} of t must be sharded by one dim of the mesh beside _StridedShard, "
        f"but got {t.placements}"
    )


def replicated(mesh: DeviceMesh, x: Tensor, placement: Placement) -> Tensor:
    """All of x, a DTensor or a process's part of one; its gradient is the sum of theirs."""
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [placement], run_check=False)
    return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
