"""Experts that are divided over the processes: stacked weights with `Shard(0)` along a mesh dim.

A sharding rule can't serve them, because each process needs ids of its own: those of its experts
counted from 0, all others as sentinels.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torchweld._library import ops


def experts_of_shards(
    x: DTensor, gate_up: DTensor, down: DTensor, index: DTensor, weight: DTensor,
    *biases: DTensor | None, **options: Any,
) -> Tensor | None:  # fmt: skip
    """Computes `torchweld.experts` if each process has some of the experts, else returns None.

    Along the mesh dim that divides the experts, tokens are gathered and the result is `Partial`.
    Along the other mesh dims the weights are replicated, and tokens may be sharded.
    """
    tokens, stacks = (x, index, weight), (gate_up, down, *biases)
    given = [t for t in stacks if t is not None]
    if not all(isinstance(t, DTensor) for t in (*tokens, *given)):
        return None
    mesh, placements, experts = gate_up.device_mesh, gate_up.placements, gate_up.shape[0]
    divided = [_is_shard_0(p) for p in placements]
    if divided.count(True) != 1 or not all(
        d or p.is_replicate() for d, p in zip(divided, placements, strict=True)
    ):
        return None
    if any(t.device_mesh != mesh for t in tokens) or any(
        (t.device_mesh, t.placements, t.shape[0]) != (mesh, placements, experts) for t in given
    ):
        return None
    dim = divided.index(True)
    count = -(-experts // mesh.size(dim))
    if count * (mesh.size(dim) - 1) >= experts:  # a process would have no expert
        return None
    rows = tuple(
        Shard(0) if _is_shard_0(p) and not d else Replicate()
        for p, d in zip(x.placements, divided, strict=True)
    )
    terms = [Partial() if d else row for row, d in zip(rows, divided, strict=True)]
    sums = [Partial() if _is_shard_0(row) else p for row, p in zip(rows, placements, strict=True)]
    # NOTE: redistribute() would sum the terms of a gradient even if no token moves.
    moved = (t if t.placements == rows else t.redistribute(placements=rows) for t in tokens)
    x_part, index_part, weight_part = (t.to_local(grad_placements=terms) for t in moved)
    parts = (None if t is None else t.to_local(grad_placements=sums) for t in stacks)
    gate_up_part, down_part, *bias_parts = parts
    index_part = index_part - count * mesh.get_local_rank(dim)
    y = ops.experts(
        x_part, gate_up_part, down_part, index_part, weight_part, *bias_parts, **options
    )
    return DTensor.from_local(y, mesh, terms, run_check=False, shape=x.shape, stride=y.stride())


def _is_shard_0(placement: Placement) -> bool:
    return type(placement) is Shard and placement.dim == 0
