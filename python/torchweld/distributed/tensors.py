"""Between DTensors and the tensors of a process."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import _StridedShard


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
            raise ValueError(
                f"full_tensor: dim {placement.dim} of t must be sharded by one dim of the mesh "
                f"beside _StridedShard, but got {t.placements}"
            )
    try:
        return t.redistribute(placements=[Replicate()] * mesh.ndim).to_local()
    except ValueError:  # before anything is sent; FSDP2's strided shards are gathered
        if not any(isinstance(p, _StridedShard) for p in t.placements):
            raise
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


def _summed(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """The sums over a group's processes, in place where tensors are contiguous."""
    # NOTE: the host takes twice as long for functional collectives, and three times for one after
    # the other.
    sums = [t.contiguous() for t in tensors]
    for dtype in dict.fromkeys(t.dtype for t in tensors):  # in the same order in all processes
        places = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        alike = [sums[i] for i in places]
        if torch.compiler.is_compiling():
            ops = torch.ops._c10d_functional
            done = ops.all_reduce_coalesced(alike, "sum", group.group_name)
            for i, t in zip(places, done, strict=True):
                sums[i] = ops.wait_tensor(t)
        elif len(alike) == 1:
            dist.all_reduce(alike[0], group=group)
        else:
            options = dist.AllreduceCoalescedOptions()
            options.asyncOp = False
            work = group.allreduce_coalesced(alike, options)
            if work is not None:
                work.wait()
    return sums


class _Entering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # In place: layers of this package alone see what entered, and their gradients are new.
        wanted = [i for i, wants in enumerate(ctx.needs_input_grad[1:]) if wants]
        found: list[Tensor | None] = [None] * len(grads)
        for i, grad in zip(wanted, _summed([grads[i] for i in wanted], ctx.group), strict=True):
            found[i] = grad
        return None, *found


class _Leaving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, y: Tensor) -> Tensor:
        y = y.contiguous()
        if not torch.compiler.is_compiling():
            ctx.mark_dirty(y)
        return _summed([y], group)[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        return None, dy


class _Gathering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, dim: int, x: Tensor) -> Tensor:
        ctx.group, ctx.dim = group, dim
        x, size = x.contiguous(), group.size()
        if torch.compiler.is_compiling():
            ops = torch.ops._c10d_functional
            whole = ops.wait_tensor(ops.all_gather_into_tensor(x, size, group.group_name))
        else:
            whole = x.new_empty((size * x.shape[0], *x.shape[1:]))
            dist.all_gather_into_tensor(whole, x, group=group)
        return whole.unflatten(0, (size, -1)).movedim(0, dim).flatten(dim, dim + 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, Tensor]:
        group, size = ctx.group, ctx.group.size()
        parts = dy.unflatten(ctx.dim, (size, -1)).movedim(ctx.dim, 0).contiguous().flatten(0, 1)
        if torch.compiler.is_compiling():
            ops, name = torch.ops._c10d_functional, group.group_name
            dx = ops.wait_tensor(ops.reduce_scatter_tensor(parts, "sum", size, name))
        else:
            dx = parts.new_empty((parts.shape[0] // size, *parts.shape[1:]))
            dist.reduce_scatter_tensor(dx, parts, group=group)
        return None, None, dx


def gathering(mesh: DeviceMesh, dim: int, x: Tensor) -> Tensor:
    """The whole of a tensor of which each process has a part along `dim`, parts of the same size;
    its gradient is the sum of theirs, of which each gets its part.
    """
    return x if mesh.size() == 1 else _Gathering.apply(mesh.get_group(), dim % x.dim(), x)


def entering(mesh: DeviceMesh, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors themselves, which all processes have; their gradients are the sums of theirs.

    Tensors that enter together have their gradients summed together.
    """
    given = [t for t in tensors if t is not None]
    enters = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    if not enters or mesh.size() == 1:
        return tensors
    entered = iter(_Entering.apply(mesh.get_group(), *given))
    return tuple(None if t is None else next(entered) for t in tensors)


class _LastEntered(NamedTuple):
    x: weakref.ref[Tensor]
    entered: weakref.ref[Tensor]
    group: str


_last: _LastEntered | None = None


def entering_once(mesh: DeviceMesh, x: Tensor) -> Tensor:
    """The same of one tensor for layers that take it one after the other, such as query, key and
    value: what their gradients have in common is summed over the processes once.

    It is remembered as long as one of them keeps it.
    """
    global _last
    if torch.compiler.is_compiling():
        return entering(mesh, x)[0]
    group, last = mesh.get_group().group_name, _last
    if last is not None and last.x() is x and last.group == group and torch.is_grad_enabled():
        entered = last.entered()
        if entered is not None:
            return entered
    entered = entering(mesh, x)[0]
    if entered is not x:
        _last = _LastEntered(weakref.ref(x), weakref.ref(entered), group)
    return entered


def leaving(mesh: DeviceMesh, y: Tensor) -> Tensor:
    """The sum of all processes' y; each gets its gradient."""
    return y if mesh.size() == 1 else _Leaving.apply(mesh.get_group(), y)
