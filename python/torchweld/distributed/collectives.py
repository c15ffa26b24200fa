"""Collectives with gradients: all-reduce, all-gather and reduce-scatter over a mesh dim."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from torchweld._autograd import once_differentiable

from .tensors import (
    function_input,
    gradient_of,
    local_of,
    local_part,
    once_outside_autocast,
    parameter_of,
    replicated,
)

# Up to this many slabs are communicated in place by one coalesced call. With more slabs, or under
# torch.compile, one call communicates the whole tensor, which a copy brings into order.
_MAX_SLABS = 16


def summed(tensors: Sequence[Tensor], mesh: DeviceMesh) -> list[Tensor]:
    """Sums tensors over a mesh's processes, in place where they are contiguous."""
    # NOTE: functional collectives need twice as much host time as one coalesced call, and one call
    # per tensor needs three times as much.
    sums = [t.contiguous() for t in tensors]
    # all processes must reduce the dtypes in the same order
    for dtype in dict.fromkeys(t.dtype for t in tensors):
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


def begin_sum(t: Tensor, mesh: DeviceMesh) -> Callable[[], Tensor]:
    """Begins the sum of a contiguous tensor over a mesh's processes, in place.

    Returns:
        A function that waits for the sum and returns it.
    """
    if torch.compiler.is_compiling():
        done = collectives.all_reduce(t, "sum", (mesh, 0))
        return lambda: collectives.wait_tensor(done)
    work = dist.all_reduce(t, group=mesh.get_group(), async_op=True)

    def finish() -> Tensor:
        if work is not None:
            work.wait()
        return t

    return finish


class _CopyToTpRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mesh: DeviceMesh, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.mesh, ctx.parameters = mesh, [parameter_of(t) for t in tensors]
        return tuple(local_of(t).detach() for t in tensors)

    @staticmethod
    @once_outside_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # summed() may overwrite the gradients. They are new tensors, because only layers of this
        # package use the outputs of forward.
        sums = summed(grads, ctx.mesh)
        pairs = zip(ctx.parameters, sums, strict=True)
        return None, *(gradient_of(parameter, grad) for parameter, grad in pairs)


class _ReduceFromTpRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mesh: DeviceMesh, y: Tensor) -> Tensor:
        # summed() overwrites its argument, and activation checkpointing may still need y.
        return summed([y.clone(memory_format=torch.contiguous_format)], mesh)[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        return None, dy


def _slabs(t: Tensor, dim: int) -> list[Tensor]:
    """Splits a contiguous tensor into views, one for each index of the dims before `dim`."""
    return list(t.flatten(0, dim - 1).unbind())


def gathered(mesh: DeviceMesh, dim: int, x: Tensor) -> Tensor:
    """All-gathers x along `dim`; without a gradient."""
    x, size, slabs = x.contiguous(), mesh.size(), x.shape[:dim].numel()
    if size == 1:
        return x
    if torch.compiler.is_compiling() or slabs > _MAX_SLABS:
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
    """Reduce-scatters t along `dim`; without a gradient."""
    t, size, slabs = t.contiguous(), mesh.size(), t.shape[:dim].numel()
    if size == 1:
        return t
    if torch.compiler.is_compiling() or slabs > _MAX_SLABS:
        shards = t.unflatten(dim, (size, -1)).movedim(dim, 0).flatten(0, 1)
        shard = collectives.reduce_scatter_tensor(shards.contiguous(), "sum", 0, (mesh, 0))
        return collectives.wait_tensor(shard)
    shard = t.new_empty([*t.shape[:dim], t.shape[dim] // size, *t.shape[dim + 1 :]])
    if slabs == 1:
        dist.reduce_scatter_tensor(shard.view(-1), t.view(-1), group=mesh.get_group())
    elif t.numel():
        mesh.get_group().reduce_scatter_tensor_coalesced(_slabs(shard, dim), _slabs(t, dim)).wait()
    return shard


class _GatherFromSpRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mesh: DeviceMesh, dim: int, x: Tensor) -> Tensor:
        ctx.mesh, ctx.dim = mesh, dim
        return gathered(mesh, dim, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, Tensor]:
        return None, None, scattered(ctx.mesh, ctx.dim, dy)


def gather_from_sp_region(mesh: DeviceMesh, dim: int, x: Tensor) -> Tensor:
    """All-gathers x along `dim`, where all processes have shards of the same size; backward
    reduce-scatters the gradient.
    """
    return x if mesh.size() == 1 else _GatherFromSpRegion.apply(mesh, dim, x)


def copy_to_tp_region(mesh: DeviceMesh, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns the tensors; backward sums their gradients over the processes, one call a dtype.

    Args:
        tensors: plain tensors, or replicated DTensor parameters; the same in all processes.

    Returns:
        Plain tensors.

    Source: Shoeybi et al., "Megatron-LM", 2019 (f; `copy_to_tensor_model_parallel_region`).
    """
    if not torch.is_grad_enabled() or mesh.size() == 1:
        return tuple(local_part(t) for t in tensors)
    tensors = tuple(function_input(t) for t in tensors)
    given = [t for t in tensors if t is not None and t.requires_grad]
    if not given:
        return tensors
    copied = iter(_CopyToTpRegion.apply(mesh, *given))
    return tuple(t if t is None or not t.requires_grad else next(copied) for t in tensors)


class CopiedToTpRegion(list[Tensor]):
    """Holds a copy for the layers that share it; unlike a list, it can be referenced weakly."""


class _LastCopied(NamedTuple):
    x: weakref.ref[Tensor]
    copied: weakref.ref[CopiedToTpRegion]
    mesh: DeviceMesh


_last: _LastCopied | None = None


def copy_to_tp_region_once(mesh: DeviceMesh, x: Tensor) -> tuple[Tensor, CopiedToTpRegion | None]:
    """Calls `copy_to_tp_region` once for an x that several layers take in succession, such as
    query, key and value: autograd adds the layers' gradients before one sum over the processes.

    Returns:
        The copy and its holder. A layer keeps the holder alive for the next layer; a copy of
        another tensor empties the holder. The holder is None without gradients, and in compiled
        graphs, where every layer has its own sum.
    """
    global _last
    if torch.compiler.is_compiling():
        return copy_to_tp_region(mesh, x)[0], None
    last, kept = _last, None if _last is None else _last.copied()
    if kept and last.x() is x and last.mesh == mesh and torch.is_grad_enabled():
        return kept[0], kept
    if kept:
        kept.clear()
    _last, copied = None, copy_to_tp_region(mesh, x)[0]
    if copied is x:
        return x, None
    kept = CopiedToTpRegion([copied])
    _last = _LastCopied(weakref.ref(x), weakref.ref(kept), mesh)
    return copied, kept


def columns_of(mesh: DeviceMesh, x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """Computes this process's columns of x; backward sums x's gradient over the processes."""
    if isinstance(x, DTensor):
        return compute(replicated(mesh, x, Replicate()))
    x, kept = copy_to_tp_region_once(mesh, x)
    y = compute(x)
    if kept is not None and y.grad_fn is not None:
        y.grad_fn.metadata["copied_to_tp_region"] = kept  # for the next layer
    return y


def reduce_from_tp_region(mesh: DeviceMesh, y: Tensor) -> Tensor:
    """Sums y over the processes; backward passes the gradient to each.

    Source: Shoeybi et al., "Megatron-LM", 2019 (g; `reduce_from_tensor_model_parallel_region`).
    """
    return y if mesh.size() == 1 else _ReduceFromTpRegion.apply(mesh, y)
