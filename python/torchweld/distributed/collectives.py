"""What processes exchange: sums, gathered and scattered tensors, and their gradients."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh

from .tensors import (
    function_input,
    gradient_of,
    local_of,
    local_part,
    once_outside_autocast,
    parameter_of,
)

# So many sequences are moved each on its own, in one call; more of them go through a copy.
_MOST_SLABS = 16


def _summed(tensors: Sequence[Tensor], mesh: DeviceMesh) -> list[Tensor]:
    """The sums over a mesh's processes, in place where tensors are contiguous."""
    # NOTE: the host takes twice as long for functional collectives, and three times for one after
    # the other.
    sums = [t.contiguous() for t in tensors]
    for dtype in dict.fromkeys(t.dtype for t in tensors):  # in the same order in all processes
        places = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        alike = [sums[i] for i in places]
        if torch.compiler.is_compiling():
            if len(alike) == 1:
                done = [collectives.all_reduce(alike[0], "sum", (mesh, 0))]
            else:
                done = collectives.all_reduce_coalesced(alike, "sum", (mesh, 0))
            for i, t in zip(places, done, strict=True):
                sums[i] = collectives.wait_tensor(t)
        elif len(alike) == 1:
            dist.all_reduce(alike[0], group=mesh.get_group())
        else:
            options = dist.AllreduceCoalescedOptions()
            options.asyncOp = False
            work = mesh.get_group().allreduce_coalesced(alike, options)
            if work is not None:
                work.wait()
    return sums


class _CopyToTpRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mesh: DeviceMesh, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.mesh, ctx.parameters = mesh, [parameter_of(t) for t in tensors]
        return tuple(local_of(t).detach() for t in tensors)

    @staticmethod
    @once_outside_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # In place: layers of this package alone see what entered, and their gradients are new.
        sums = _summed(grads, ctx.mesh)
        pairs = zip(ctx.parameters, sums, strict=True)
        return None, *(gradient_of(parameter, grad) for parameter, grad in pairs)


class _ReduceFromTpRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mesh: DeviceMesh, y: Tensor) -> Tensor:
        # A copy: checkpoints may keep the product as it was.
        return _summed([y.clone(memory_format=torch.contiguous_format)], mesh)[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        return None, dy


def _slabs(t: Tensor, dim: int) -> list[Tensor]:
    """A contiguous tensor's parts that have `dim` as their first."""
    return list(t.flatten(0, dim - 1).unbind())


def gathered(mesh: DeviceMesh, dim: int, x: Tensor) -> Tensor:
    """The whole of a tensor of which each process has a part along `dim`; without a gradient."""
    x, size, slabs = x.contiguous(), mesh.size(), x.shape[:dim].numel()
    if size == 1:
        return x
    if torch.compiler.is_compiling() or slabs > _MOST_SLABS:
        whole = collectives.all_gather_tensor(x, 0, (mesh, 0))
        whole = collectives.wait_tensor(whole).unflatten(0, (size, -1))
        return whole.movedim(0, dim).flatten(dim, dim + 1)
    whole = x.new_empty([*x.shape[:dim], size * x.shape[dim], *x.shape[dim + 1 :]])
    if slabs == 1:
        dist.all_gather_into_tensor(whole.view(-1), x.view(-1), group=mesh.get_group())
    elif whole.numel():
        mesh.get_group().allgather_into_tensor_coalesced(_slabs(whole, dim), _slabs(x, dim)).wait()
    return whole


def scattered(mesh: DeviceMesh, dim: int, t: Tensor) -> Tensor:
    """The sum of all processes' t, of which each gets a part along `dim`; without a gradient."""
    t, size, slabs = t.contiguous(), mesh.size(), t.shape[:dim].numel()
    if size == 1:
        return t
    if torch.compiler.is_compiling() or slabs > _MOST_SLABS:
        parts = t.unflatten(dim, (size, -1)).movedim(dim, 0).flatten(0, 1)
        part = collectives.reduce_scatter_tensor(parts.contiguous(), "sum", 0, (mesh, 0))
        return collectives.wait_tensor(part)
    part = t.new_empty([*t.shape[:dim], t.shape[dim] // size, *t.shape[dim + 1 :]])
    if slabs == 1:
        dist.reduce_scatter_tensor(part.view(-1), t.view(-1), group=mesh.get_group())
    elif t.numel():
        mesh.get_group().reduce_scatter_tensor_coalesced(_slabs(part, dim), _slabs(t, dim)).wait()
    return part


class _Gathering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mesh: DeviceMesh, dim: int, x: Tensor) -> Tensor:
        ctx.mesh, ctx.dim = mesh, dim
        return gathered(mesh, dim, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, Tensor]:
        return None, None, scattered(ctx.mesh, ctx.dim, dy)


def gathering(mesh: DeviceMesh, dim: int, x: Tensor) -> Tensor:
    """The whole of a tensor of which each process has a part along `dim`, parts of the same size;
    its gradient is the sum of theirs, of which each gets its part.
    """
    return x if mesh.size() == 1 else _Gathering.apply(mesh, dim, x)


def copy_to_tp_region(mesh: DeviceMesh, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors themselves, which all processes have; their gradients are the sums of theirs.

    Tensors that enter together have their gradients summed together.

    Args:
        tensors: plain ones, or parameters that are DTensors, which all processes have whole.

    Returns:
        Plain tensors.
    """
    if not torch.is_grad_enabled() or mesh.size() == 1:
        return tuple(local_part(t) for t in tensors)
    tensors = tuple(function_input(t) for t in tensors)
    given = [t for t in tensors if t is not None and t.requires_grad]
    if not given:
        return tensors
    entered = iter(_CopyToTpRegion.apply(mesh, *given))
    return tuple(t if t is None or not t.requires_grad else next(entered) for t in tensors)


class CopiedToTpRegion(list[Tensor]):
    """A tensor that entered, for whoever keeps it: lists can't be referenced weakly."""


class _LastEntered(NamedTuple):
    x: weakref.ref[Tensor]
    entered: weakref.ref[CopiedToTpRegion]
    mesh: DeviceMesh


_last: _LastEntered | None = None


def copy_to_tp_region_once(mesh: DeviceMesh, x: Tensor) -> tuple[Tensor, CopiedToTpRegion | None]:
    """The same of one tensor for layers that take it one after the other, such as query, key and
    value: what their gradients have in common is summed over the processes once.

    Returns:
        The tensor, and what a layer keeps for the next one; it is empty as soon as another tensor
        enters. In compiled graphs every layer has its own sum.
    """
    global _last
    if torch.compiler.is_compiling():
        return copy_to_tp_region(mesh, x)[0], None
    last, kept = _last, None if _last is None else _last.entered()
    if kept and last.x() is x and last.mesh == mesh and torch.is_grad_enabled():
        return kept[0], kept
    if kept:
        kept.clear()
    _last, entered = None, copy_to_tp_region(mesh, x)[0]
    if entered is x:
        return x, None
    kept = CopiedToTpRegion([entered])
    _last = _LastEntered(weakref.ref(x), weakref.ref(kept), mesh)
    return entered, kept


def reduce_from_tp_region(mesh: DeviceMesh, y: Tensor) -> Tensor:
    """The sum of all processes' y; each gets its gradient."""
    return y if mesh.size() == 1 else _ReduceFromTpRegion.apply(mesh, y)
