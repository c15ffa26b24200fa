"""Between DTensors and the tensors of a process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
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


def entering(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """x itself, which all processes have; its gradient is the sum of theirs."""
    replicated = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return replicated.to_local(grad_placements=[Partial()])


def leaving(y: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of all processes' y; each gets its gradient."""
    summed = DTensor.from_local(y, mesh, [Partial()], run_check=False)
    return summed.redistribute(placements=[Replicate()]).to_local()
