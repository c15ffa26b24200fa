"""Between DTensors and the tensors of a process."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import _functional_collectives as collectives
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
    if t.dtype == torch.float64 or not torch.amp.is_autocast_available(device):
        return t
    if not torch.is_autocast_enabled(device):
        return t
    return t.to(torch.get_autocast_dtype(device))


def local_part(parameter: Tensor | None) -> Tensor | None:
    """A process's part of a parameter, the whole of a plain one."""
    if not isinstance(parameter, DTensor):
        return parameter
    traced = torch.compiler.is_compiling() or type(parameter._local_tensor) is not Tensor
    if traced or not (parameter.is_leaf and parameter.requires_grad):
        return parameter.to_local()
    return _LocalPart.apply(parameter)


class _LocalPart(torch.autograd.Function):
    """`to_local()` of a parameter, whose gradient becomes the parameter's at once.

    NOTE: handing the engine a DTensor takes the host 80 us a parameter, this takes 5. The engine
    gets it where somebody looks on: hooks, `torch.autograd.grad`, gradients of gradients.
    """

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.parameter = parameter
        return parameter._local_tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor | None:
        parameter = ctx.parameter
        spec, (node, _) = parameter._spec, ctx.next_functions[0]
        if torch.is_grad_enabled():
            return DTensor.from_local(
                grad,
                spec.mesh,
                spec.placements,
                run_check=False,
                shape=spec.shape,
                stride=spec.stride,
            )
        # As the engine keeps gradients: in the parameter's layout, and nobody else's.
        local = parameter._local_tensor
        if grad.stride() != local.stride() or grad._use_count() > _ONE_OWNER:
            grad = torch.empty_like(local).copy_(grad)
        placed = DTensor(grad, spec, requires_grad=False)
        if not _alone(parameter, node):
            return placed
        if parameter.grad is None:
            parameter.grad = placed
        else:
            parameter.grad += placed
        return None


# References to a gradient in `backward` that nobody else has: Python's and the engine's.
_ONE_OWNER = 2


def _alone(parameter: Tensor, node: torch.autograd.graph.Node) -> bool:
    """Whether a gradient of a parameter goes nowhere but into its `grad`."""
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad
        return False


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


class _Entering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mesh: DeviceMesh, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.mesh = mesh
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # In place: layers of this package alone see what entered, and their gradients are new.
        return None, *_summed(grads, ctx.mesh)


class _Leaving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mesh: DeviceMesh, y: Tensor) -> Tensor:
        # A copy: checkpoints may keep the product as it was.
        return _summed([y.clone(memory_format=torch.contiguous_format)], mesh)[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        return None, dy


def gathered(mesh: DeviceMesh, dim: int, x: Tensor) -> Tensor:
    """The whole of a tensor of which each process has a part along `dim`; without a gradient."""
    x, size = x.contiguous(), mesh.size()
    if torch.compiler.is_compiling():
        whole = collectives.wait_tensor(collectives.all_gather_tensor(x, 0, (mesh, 0)))
    else:
        whole = x.new_empty((size * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(whole, x, group=mesh.get_group())
    return whole.unflatten(0, (size, -1)).movedim(0, dim).flatten(dim, dim + 1)


def starting_scatter(mesh: DeviceMesh, dim: int, t: Tensor) -> Callable[[], Tensor]:
    """Begins to sum a tensor over the processes, of which each gets a part along `dim`.

    Returns:
        What waits for the part and gives it; without a gradient.
    """
    size = mesh.size()
    parts = t.unflatten(dim, (size, -1)).movedim(dim, 0).contiguous().flatten(0, 1)
    if torch.compiler.is_compiling():
        begun = collectives.reduce_scatter_tensor(parts, "sum", 0, (mesh, 0))
        return partial(collectives.wait_tensor, begun)
    part = parts.new_empty((parts.shape[0] // size, *parts.shape[1:]))
    work = dist.reduce_scatter_tensor(part, parts, group=mesh.get_group(), async_op=True)

    def finished() -> Tensor:
        work.wait()
        return part

    return finished


class _Gathering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mesh: DeviceMesh, dim: int, x: Tensor) -> Tensor:
        ctx.mesh, ctx.dim = mesh, dim
        return gathered(mesh, dim, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, Tensor]:
        return None, None, starting_scatter(ctx.mesh, ctx.dim, dy)()


def gathering(mesh: DeviceMesh, dim: int, x: Tensor) -> Tensor:
    """The whole of a tensor of which each process has a part along `dim`, parts of the same size;
    its gradient is the sum of theirs, of which each gets its part.
    """
    return x if mesh.size() == 1 else _Gathering.apply(mesh, dim % x.dim(), x)


def entering(mesh: DeviceMesh, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors themselves, which all processes have; their gradients are the sums of theirs.

    Tensors that enter together have their gradients summed together.
    """
    if not torch.is_grad_enabled() or mesh.size() == 1:
        return tensors
    given = [t for t in tensors if t is not None and t.requires_grad]
    if not given:
        return tensors
    entered = iter(_Entering.apply(mesh, *given))
    return tuple(t if t is None or not t.requires_grad else next(entered) for t in tensors)


class Entered(list[Tensor]):
    """A tensor that entered, for whoever keeps it: lists can't be referenced weakly."""


class _LastEntered(NamedTuple):
    x: weakref.ref[Tensor]
    entered: weakref.ref[Entered]
    mesh: DeviceMesh


_last: _LastEntered | None = None


def entering_once(mesh: DeviceMesh, x: Tensor) -> tuple[Tensor, Entered | None]:
    """The same of one tensor for layers that take it one after the other, such as query, key and
    value: what their gradients have in common is summed over the processes once.

    Returns:
        The tensor, and what a layer keeps for the next one; it is empty as soon as another tensor
        enters. In compiled graphs every layer has its own sum.
    """
    global _last
    if torch.compiler.is_compiling():
        return entering(mesh, x)[0], None
    last, kept = _last, None if _last is None else _last.entered()
    if kept and last.x() is x and last.mesh == mesh and torch.is_grad_enabled():
        return kept[0], kept
    if kept:
        kept.clear()
    _last, entered = None, entering(mesh, x)[0]
    if entered is x:
        return x, None
    kept = Entered([entered])
    _last = _LastEntered(weakref.ref(x), weakref.ref(kept), mesh)
    return entered, kept


def leaving(mesh: DeviceMesh, y: Tensor) -> Tensor:
    """The sum of all processes' y; each gets its gradient."""
    return y if mesh.size() == 1 else _Leaving.apply(mesh, y)


def replicated(mesh: DeviceMesh, x: Tensor, placement: Placement) -> Tensor:
    """All of x, a DTensor or a process's part of one; its gradient is the sum of theirs."""
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [placement], run_check=False)
    return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
