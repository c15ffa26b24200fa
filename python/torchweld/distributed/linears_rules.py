"""Sharding rules of rms_norm_linears and layer_norm_linears; see rules.py."""

from __future__ import annotations

from torchweld.distributed.rows import OF_NORM, Call, Row, Rule, all_of, partial, shard


def _norm_linears(call: Call) -> list[Row]:
    """Rows that shard the batch or the sequence, and one that shards the columns of all results."""
    last = len(call.shape("x")) - 1
    count = range(len(call.listed("weights")))

    def lists(*names: str) -> list[str]:
        return [f"{name}[{i}]" for name in names for i in count]

    gradients = lists("dweights", "dbiases")
    rows = ["x", "dx", "mean", "rstd", *lists("ys", "dys")]
    sums = all_of([*gradients, *OF_NORM], partial())
    leading = [{**all_of(rows, shard(dim)), **sums} for dim in range(last)]
    columns = {
        **all_of([*lists("weights", "biases"), *gradients], shard(0)),
        **all_of(lists("ys", "dys"), shard(last)),
        **all_of(["dx", *OF_NORM], partial()),
    }
    return [*leading, columns]


LINEARS_RULES: dict[str, Rule] = dict.fromkeys(
    ("layer_norm_linears", "rms_norm_linears"), _norm_linears
)
