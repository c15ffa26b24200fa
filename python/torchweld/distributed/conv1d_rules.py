"""Sharding rules of causal_conv1d; see rules.py."""

from __future__ import annotations

from torchweld.distributed.rows import Call, Row, Rule, all_of, partial, shard

_ROWS = ("x", "dy", "dx", "result", "initial_state", "dinitial_state")
_CHANNELS = ("weight", "bias", "dweight", "dbias")


def _conv1d(call: Call) -> list[Row]:
    """Rows that shard the batch, or the channels."""
    batch = all_of((*_ROWS, "key_start"), shard(0)) | all_of(("dweight", "dbias"), partial())
    return [batch, all_of(_ROWS, shard(1)) | all_of(_CHANNELS, shard(0))]


CONV1D_RULES: dict[str, Rule] = {"causal_conv1d": _conv1d}
