"""Sharding rules of the losses; see rules.py."""

from __future__ import annotations

from torchweld.distributed.rows import Call, Row, Rule, all_of, partial, shard

# Names of arguments and results with one row per token.
_ROWS = ("x", "dx", "y", "logits", "dlogits")
# Names of arguments and results with one value per token.
_TOKENS = (
    "target",
    "logprob",
    "entropy",
    "row_entropy",
    "lse",
    "max",
    "log_sum",
    "dlse",
    "mean",
    "dmean",
    "dlogprob",
    "dentropy",
    "factor",
)


def _loss(call: Call) -> list[Row]:
    """Rows that shard batch or sequence dims. A mean needs the count of all rows."""
    reduction = call.values.get("reduction", "none")
    if reduction == "mean":
        return []
    dims = len(call.shape("target")) - call.values.get("shift", 0)
    loss: Row = all_of(("result", "loss"), partial())
    rows = []
    for d in range(dims):
        tokens = all_of((*_ROWS, *_TOKENS), shard(d))
        if reduction == "none":
            loss = all_of(("result", "loss", "dloss"), shard(d))
        rows.append({**tokens, **loss, **all_of(("dweight", "dbias"), partial())})
    return rows


def _loss_gradients(call: Call) -> list[Row]:
    """Rows of the product of gradients and a scalar."""
    if call.has("unit_dlogits"):
        dims = len(call.shape("unit_dlogits"))
        return [all_of(("unit_dlogits", "dlogits"), shard(d)) for d in range(dims)]
    parameters: Row = {}
    for name in ("dweight", "dbias"):
        if tuple(call.shape("unit_" + name)) != (0,):  # size (0,): the gradient was not requested
            parameters |= all_of(("unit_" + name, name), partial())
    dims = len(call.shape("unit_dx")) - 1
    return [{**parameters, **all_of(("unit_dx", "dx"), shard(d))} for d in range(dims)]


LOSS_RULES: dict[str, Rule] = {
    "cross_entropy": _loss,
    "cross_entropy_gradients": _loss,
    "cross_entropy_gradients_backward": _loss_gradients,
    "linear_cross_entropy": _loss,
    "linear_cross_entropy_exponentials": _loss,
    "linear_cross_entropy_gradients": _loss,
    "linear_cross_entropy_gradients_backward": _loss_gradients,
    "linear_token_logprobs": _loss,
}
