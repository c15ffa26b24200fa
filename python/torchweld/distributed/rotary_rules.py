"""Sharding rules of rotary; see rules.py."""

from __future__ import annotations

from torchweld.distributed.rows import Call, Row, Rule, all_of, shard

_QUERIES = ("q", "q_out", "dq", "dq_out")
_KEYS = ("k", "k_out", "dk", "dk_out")
_TABLES = ("cos", "sin")


def _rotary(call: Call) -> list[Row]:
    """Rows that shard the batch, the sequence, or the heads of q, of k or of both."""
    batch, sequence = (all_of((*_QUERIES, *_KEYS), shard(dim)) for dim in (0, 2))
    *lead, _, _ = call.shape("cos")
    if lead and lead[0] > 1:
        batch |= all_of(_TABLES, shard(0))
    sequence |= all_of(_TABLES, shard(len(lead)))
    heads = [all_of(names, shard(1)) for names in (_QUERIES, _KEYS)]
    return [batch, sequence, heads[0] | heads[1], *heads]


ROTARY_RULES: dict[str, Rule] = {"rotary": _rotary}
