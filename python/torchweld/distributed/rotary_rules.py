"""Sharding rules of rotary; see rules.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_QUERIES = ("q", "q_out", "dq", "dq_out")
_KEYS = ("k", "k_out", "dk", "dk_out")
_TABLES = ("cos", "sin")


def _rotary(call: Any) -> list[dict[str, Any]]:
    """Rows that shard the batch, the sequence, or the heads of q, of k or of both."""
    from torch.distributed.tensor import Shard

    batch, sequence = (dict.fromkeys((*_QUERIES, *_KEYS), Shard(dim)) for dim in (0, 2))
    *lead, _, _ = call.shape("cos")
    if lead and lead[0] > 1:
        batch |= dict.fromkeys(_TABLES, Shard(0))
    sequence |= dict.fromkeys(_TABLES, Shard(len(lead)))
    heads = [dict.fromkeys(names, Shard(1)) for names in (_QUERIES, _KEYS)]
    return [batch, sequence, heads[0] | heads[1], *heads]


ROTARY_RULES: dict[str, Callable[[Any], list[dict[str, Any]]]] = {
    "rotary": _rotary,
    "rotary_backward": _rotary,
}
