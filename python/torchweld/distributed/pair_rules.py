"""Sharding rules of gated_linear_pair; see rules.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ROWS = ("x", "dy", "dx", "result", "y", "z")
_PARAMETERS = ("left", "right", "left_bias", "right_bias")
_GRADIENTS = tuple("d" + name for name in _PARAMETERS)


def _gated_linear_pair(call: Any) -> list[dict[str, Any]]:
    """Rows that shard the batch or the sequence, and one that shards the columns of the result."""
    from torch.distributed.tensor import Partial, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    last = len(call.shape("x")) - 1
    sums = dict.fromkeys(_GRADIENTS, Partial())
    rows = [{**dict.fromkeys(_ROWS, Shard(dim)), **sums} for dim in range(last)]
    columns = {
        **dict.fromkeys((*_PARAMETERS, *_GRADIENTS), Shard(0)),
        **dict.fromkeys(("dy", "result", "y"), Shard(last)),
        # z has the left and the right branch side by side.
        "z": _StridedShard(last, split_factor=2),
        "dx": Partial(),
    }
    return [*rows, columns]


PAIR_RULES: dict[str, Callable[[Any], list[dict[str, Any]]]] = {
    "gated_linear_pair" + end: _gated_linear_pair for end in ("", "_forward", "_backward")
}
