"""Shards the tokens of sequences over processes, head and tail chunks, and gathers them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh

Group = dist.ProcessGroup | DeviceMesh | None


def group_of(group: Group, who: str) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise RuntimeError(
            f"{who}: torch.distributed must be initialised, but it is not; use "
            "torch.distributed.init_process_group"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"{who}: group must have one dim, but got a mesh of {group.ndim}; use one of its "
                'dims, as mesh["cp"]'
            )
        return group.get_group()
    return dist.group.WORLD if group is None else group


def _chunk_order(size: int, device: torch.device) -> Tensor:
    """Returns the index of each of the 2 * size chunks in the concatenation of all shards."""
    first = 2 * torch.arange(size, device=device)
    return torch.cat([first, (first + 1).flip(0)])


def local_positions(group: dist.ProcessGroup, length: int, device: torch.device) -> Tensor:
    """Returns the positions in the sequence of a process's `length` tokens."""
    rank, size, chunk = group.rank(), group.size(), length // 2
    inside = torch.arange(chunk, device=device)
    return torch.cat([inside + rank * chunk, inside + (2 * size - 1 - rank) * chunk])


def shard_sequence(t: Tensor, group: Group = None, *, dim: int = 1) -> Tensor:
    """Selects this process's tokens: chunks r and 2n - 1 - r of 2n, for process r of n.

    Args:
        t: a tensor with all tokens along `dim`, the same in all processes: input_ids, labels that
            are shifted already, position_ids, attention_mask.
        group: a ProcessGroup, a DeviceMesh of one dim, or None for all processes.
        dim: the dim of the tokens.

    Returns:
        A copy with `1 / n` of the tokens.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: the tokens can't be cut into 2n equal chunks, or group is a mesh of more dims.

    Example::

        input_ids = torch.randint(0, 100, (2, 16))
        mine = torchweld.distributed.shard_sequence(input_ids)
        assert mine.shape == (2, 16 // dist.get_world_size())
    """
    group = group_of(group, "shard_sequence")
    chunks = 2 * group.size()
    if t.shape[dim] % chunks:
        raise ValueError(
            f"shard_sequence: the tokens must be a multiple of {chunks} (two chunks a process), "
            f"but got {t.shape[dim]}; pad the sequences"
        )
    every = t.chunk(chunks, dim)
    return torch.cat([every[group.rank()], every[chunks - 1 - group.rank()]], dim)


def gather_sequence(t: Tensor, group: Group = None, *, dim: int = 1) -> Tensor:
    """Gathers the whole sequence from the shards of :func:`shard_sequence`, in every process.

    Backward sums the gradients of each token over the processes.

    Args:
        t: this process's shard.
        group: a ProcessGroup, a DeviceMesh of one dim, or None for all processes.
        dim: the dim of the tokens.

    Returns:
        The whole sequence, n times as long as `t` along `dim`.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: group is a mesh of more dims.

    Example::

        x = torch.randn(2, 16, 32)
        mine = torchweld.distributed.shard_sequence(x)
        assert torch.equal(torchweld.distributed.gather_sequence(mine), x)
    """
    group = group_of(group, "gather_sequence")
    return in_order(gathered(t.movedim(dim, 0), group).unsqueeze(1), 2).squeeze(0).movedim(0, dim)


class _ContiguousGradient(torch.autograd.Function):
    """Returns its input and makes the gradient contiguous: the reduce-scatter in the backward of
    the gather refuses other strides, and the gradient of a batch of one has others.
    """

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, dt: Tensor) -> Tensor:
        return dt.contiguous()


def gathered(t: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gathers t to `(processes, ...)`; backward reduce-scatters the gradient."""
    shape = (group.size(), *t.shape)
    if not t.requires_grad:
        return plain_gather(t.contiguous(), 0, group).view(shape)
    whole = collectives.all_gather_tensor_autograd(t.contiguous(), 0, group)
    return _ContiguousGradient.apply(whole).view(shape)


def plain_gather(t: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return collectives.wait_tensor(collectives.all_gather_tensor(t, dim, group))


def in_order(shards: Tensor, dim: int) -> Tensor:
    """Restores sequences from shards `(processes, ...)` with tokens along `dim` of that."""
    size = shards.shape[0]
    chunks = shards.unflatten(dim, (2, -1)).movedim(0, dim - 1)  # (..., processes, 2, chunk, ...)
    chunks = chunks.flatten(dim - 1, dim)
    return chunks.index_select(dim - 1, _chunk_order(size, shards.device)).flatten(dim - 1, dim)


def out_of_order(t: Tensor, dim: int, size: int) -> Tensor:
    """Undoes :func:`in_order`."""
    place = _chunk_order(size, t.device)
    chunks = t.unflatten(dim, (2 * size, -1)).index_select(dim, place.argsort())
    return chunks.unflatten(dim, (size, 2)).flatten(dim + 1, dim + 2).movedim(dim, 0)
