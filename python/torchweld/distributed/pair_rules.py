"""Sharding rules of gated_activation, gated_linear_pair, gated_mlp and experts; see rules.py."""

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
    """A row that shards the tokens, and one that shards the hidden columns I."""
    from torch.distributed.tensor.placement_types import _StridedShard

    weights = ("gate_up", "down", "gate_up_bias", "down_bias")
    tokens = {
        **all_of(("x", "index", "weight", "dy", "dx", "dweight", "result", "y", "z"), shard(0)),
        **all_of(["d" + name for name in weights], partial()),
    }
    if call.has("down_bias"):
        return [tokens]  # a term of the result has no bias
    gated, transposed = "glu" in call.values["gate"], call.values["transposed"]
    interleaved = call.values["interleaved"] or not gated

    def halves(dim: int):
        return shard(dim) if interleaved else _StridedShard(dim, split_factor=2)

    columns = {
        **all_of(("gate_up", "dgate_up"), halves(2 if transposed else 1)),
        **all_of(("gate_up_bias", "dgate_up_bias", "z"), halves(1)),
        **all_of(("down", "ddown"), shard(1 if transposed else 2)),
        **all_of(("dx", "dweight", "result", "y"), partial()),
    }
    return [tokens, columns]


PAIR_RULES: dict[str, Rule] = {
    "experts": _experts,
    "gated_activation": _gated_activation,
    "gated_linear_pair": _gated_linear_pair,
    "gated_mlp": _gated_mlp,
}
