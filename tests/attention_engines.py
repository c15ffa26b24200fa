"""Runs attention with a chosen engine, and compares it with the formula."""

from __future__ import annotations

import math

import pytest
import torch

from choices_helpers import _C, dry_records, ops
from cuda_graphs import cuda_graph
from numerics import assert_same_bits
from numerics import check as check_bound
from running import REFERENCES
from samples import BF16

attention_bounds = REFERENCES["attention_forward"]
WGMMA = ("sm90", "wide")  # Hopper's engines: head dims up to 256, and above
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="wgmma is Hopper's",
)


def inputs(dtype, batch, nheads, nheads_kv, seqlen_q, seqlen_k, dim, dim_v=None):
    def draw(heads, rows, columns):
        return torch.randn(batch, heads, rows, columns, device="cuda").to(dtype)

    return (
        draw(nheads, seqlen_q, dim),
        draw(nheads_kv, seqlen_k, dim),
        draw(nheads_kv, seqlen_k, dim_v or dim),
    )


def mask_data(batch, nheads, rows, keys):
    """Tensors of masks and the gradient of lse, by name. The documents have 90 tokens."""
    return {
        "key_end": torch.tensor([keys, 0, keys * 2 // 3], dtype=torch.int32, device="cuda"),
        "key_start": ((torch.arange(rows) + keys - rows) // 90 * 90).int().repeat(batch, 1).cuda(),
        "leftpad": torch.tensor([0, 7, keys // 2], dtype=torch.int32, device="cuda"),
        "sink": torch.randn(nheads, device="cuda"),
        "dlse": torch.randn(batch, nheads, rows, device="cuda"),
    }


def each_configuration(engine, *args, every=False, op="attention_forward", **kwargs):
    """Yields the name of each configuration of an engine, "" for all, with it in force.

    `engine` may be a tuple of engines.

    Configurations that differ only in the number of splits run only if `every` is set.
    """
    (record,) = dry_records(op, *args, device=0, **kwargs)
    family, numbers = record["family"], list(record["problem"])
    names = [c["choice"] for c in _C.candidates(family, numbers) if not c["refusal"]]
    splits = ("", "2", "3", "8", "128") if every else ("", "4")
    for name in names:
        parts = name.partition(" /")[2]
        if not name.startswith(engine) or (parts not in splits and name != record["choice"]):
            continue
        ops._force_choice(family, numbers, name)
        try:
            yield name
        finally:
            ops._force_choice(family, numbers, "")


def check(name, results, bounds):
    """Every result or gradient is within the error of its roundings."""
    for i, (got, bound) in enumerate(zip(results, bounds, strict=False)):
        check_bound(got, bound, label=f"{name} {i}", device="cuda")


def check_views_and_large_scores(engine, rows, dim=128):
    """Strided views, scales of any sign, an infinite key: of an engine for `rows` query rows."""
    q, k, v = inputs(BF16, 2, 8, 2, rows, 600, dim)
    wide = torch.randn(2, 600, 2, 2 * dim + 44, device="cuda").to(BF16).transpose(1, 2)
    for scale in (0.0, -0.3, 2.0, 40.0):
        views = (q, wide[..., :dim], wide[..., dim + 8 : 2 * dim + 8])
        bounds = attention_bounds(*views, scale=scale)
        for name in each_configuration(engine, *views, scale=scale):
            check(name, ops.attention_forward(*views, scale=scale), bounds)
    for name in each_configuration(engine, q, k, v):
        k[0, 0, 5] = math.inf
        out = ops.attention(q, k, v)
        assert out[0, :4].isnan().all() and not out[0, 4:].isnan().any()
        assert not out[1].isnan().any(), name
        k[0, 0, 5] = 1


def check_same_bits(engine, q, k, v, pads, others, **kwargs):
    """A call gives equal bits in every run, and for the first sequence beside `others` too."""
    pads, others = (torch.tensor(p, dtype=torch.int32, device="cuda") for p in (pads, others))
    for _ in each_configuration(engine, q, k, v, pads, **kwargs):
        first = ops.attention(q, k, v, pads, **kwargs)
        for _ in range(50):
            assert_same_bits(ops.attention(q, k, v, pads, **kwargs), first)
        k[1:] = torch.randn_like(k[1:])
        assert_same_bits(ops.attention(q, k, v, others, **kwargs)[0], first[0])


def check_graph(engine, q, k, v, all_pads, **kwargs):
    """A captured graph replays correctly with other paddings."""
    pads = torch.zeros(len(q), dtype=torch.int32, device="cuda")
    bounds = [attention_bounds(q, k, v, torch.tensor(p), **kwargs)[:1] for p in all_pads]
    for name in each_configuration(engine, q, k, v, pads, **kwargs):
        graph, out = cuda_graph(lambda: ops.attention(q, k, v, pads, **kwargs))
        for values, bound in zip(all_pads, bounds, strict=True):
            pads.copy_(torch.tensor(values))
            out.zero_()
            graph.replay()
            check(name, [out], bound)
