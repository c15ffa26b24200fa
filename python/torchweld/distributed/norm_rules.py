"""Sharding rules of norms: leading dims are sharded."""

from __future__ import annotations

from torchweld.distributed.rows import Call, Row, Rule, all_of, partial, shard

# Names of arguments and results that have the same leading dims as x.
_ROWS = (
    "x",
    "residual",
    "gate",
    "dy",
    "dnormed",
    "dsum",
    "dx",
    "dgate",
    "result",
    "y",
    "normed",
    "sum",
)
_STATISTICS = ("mean", "rstd")


def _norm(call: Call) -> list[Row]:
    dims = len(call.shape("x" if call.has("x") else "sum")) - 1
    shared = all_of(("dweight", "dbias"), partial())
    return [{**shared, **all_of((*_ROWS, *_STATISTICS), shard(d))} for d in range(dims)]


NORM_RULES: dict[str, Rule] = dict.fromkeys(
    ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "rms_norm_gated"), _norm
)
