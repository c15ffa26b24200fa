"""Sharding rules of rms_norm, layer_norm and their add_ ops: leading dims are sharded."""

from __future__ import annotations

from typing import Any

# Names of arguments and results that have the leading dims of the rows.
_ROWS = ("x", "residual", "dy", "dnormed", "dsum", "dx", "result", "y", "normed", "sum")
_STATISTICS = ("mean", "rstd")


def _norm(call: Any) -> list[dict[str, Any]]:
    from torch.distributed.tensor import Partial, Shard

    dims = len(call.shape("x" if call.has("x") else "sum")) - 1
    shared = dict.fromkeys(("dweight", "dbias"), Partial())
    return [{**shared, **dict.fromkeys((*_ROWS, *_STATISTICS), Shard(d))} for d in range(dims)]


RULES = {
    op + end: _norm
    for op in ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm")
    for end in ("", "_forward", "_backward")
}
