"""Sharding rules of gates, gated_mlp, experts and linear layers of groups; see rules.py."""

from __future__ import annotations

from torchweld.distributed.rows import Call, Row, Rule, all_of, partial, shard

_ROWS = ("x", "dy", "dx", "result", "y", "z")
_PARAMETERS = ("left", "right", "left_bias", "right_bias")
_GRADIENTS = tuple("d" + name for name in _PARAMETERS)


def _gated_activation(call: Call) -> list[Row]:
    """Rows that shard any dim."""
    names = ("left", "right", "dy", "result", "dleft", "dright")
    return [all_of(names, shard(dim)) for dim in range(len(call.shape("left")))]


def _gated_linear_pair(call: Call) -> list[Row]:
    """Rows that shard the batch or the sequence, and one that shards the columns of the result."""
    from torch.distributed.tensor.placement_types import _StridedShard

    last = len(call.shape("x")) - 1
    sums = all_of(_GRADIENTS, partial())
    rows = [{**all_of(_ROWS, shard(dim)), **sums} for dim in range(last)]
    columns = {
        **all_of((*_PARAMETERS, *_GRADIENTS), shard(0)),
        **all_of(("dy", "result", "y"), shard(last)),
        # The columns of z are those of the left branch, followed by those of the right branch.
        "z": _StridedShard(last, split_factor=2),
        "dx": partial(),
    }
    return [*rows, columns]


def _gated_mlp(call: Call) -> list[Row]:
    """Rows that shard the batch or the sequence, and one that shards the hidden columns, as tensor
    parallelism does: each process then has a term of the result.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    last = len(call.shape("x")) - 1
    weights = (*_PARAMETERS, "down", "down_bias")
    sums = all_of(["d" + name for name in weights], partial())
    rows = [{**all_of(_ROWS, shard(dim)), **sums} for dim in range(last)]
    if call.has("down_bias"):
        return rows  # a term of the result has no bias
    columns = {
        **all_of((*_PARAMETERS, *_GRADIENTS), shard(0)),
        **all_of(("down", "ddown"), shard(1)),
        "z": _StridedShard(last, split_factor=2),
        **all_of(("dx", "result", "y"), partial()),
    }
    return [*rows, columns]


def _experts(call: Call) -> list[Row]:
    """A row that shards the hidden columns I of all experts.

    Tokens can't be sharded: z has the order of the experts of all tokens, which is not that of one
    shard after the other.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    if call.has("down_bias"):
        return []  # a term of the result has no bias
    transposed = call.values["transposed"]
    halves = "glu" in call.values["gate"] and not call.values["interleaved"]

    def cut(dim: int):
        return _StridedShard(dim, split_factor=2) if halves else shard(dim)

    return [
        {
            **all_of(("gate_up", "dgate_up"), cut(2 if transposed else 1)),
            **all_of(("gate_up_bias", "dgate_up_bias", "z"), cut(1)),
            **all_of(("down", "ddown"), shard(1 if transposed else 2)),
            **all_of(("dx", "dweight", "result", "y"), partial()),
        }
    ]


def _grouped_linear(call: Call) -> list[Row]:
    """A row that shards the columns of the result. The rows of a group can't be sharded: the
    offsets count those of all processes.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    halves = not call.values.get("interleaved", True)
    cut = _StridedShard(1, split_factor=2) if halves else shard(1)
    return [
        {
            **all_of(("weight", "bias", "preact", "z", "dweight", "dbias"), cut),
            **all_of(("dy", "result", "y"), shard(1)),
            "dx": partial(),
        }
    ]


PAIR_RULES: dict[str, Rule] = {
    "experts": _experts,
    "gated_activation": _gated_activation,
    "gated_linear_pair": _gated_linear_pair,
    "gated_mlp": _gated_mlp,
    "grouped_linear": _grouped_linear,
    "grouped_gated_linear": _grouped_linear,
}
