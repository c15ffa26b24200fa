"""attention on wgmma: every tile against the formula, and which one is taken."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from attention_engines import (
    WGMMA,
    attention_bounds,
    check,
    check_graph,
    check_same_bits,
    check_views_and_large_scores,
    each_configuration,
    inputs,
    on_hopper,
)
from choices_helpers import _C, H200, SMALL, chosen, ops, problem, refusal
from numerics import assert_same_bits
from samples import BF16, F16

SIZES = [
    # batch, nheads, nheads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v
    (1, 1, 1, 1, 1, 8, 8), (2, 4, 4, 64, 64, 64, 64), (1, 3, 1, 65, 63, 72, 48),
    (2, 4, 2, 200, 200, 128, 128), (3, 2, 2, 333, 517, 120, 112), (2, 2, 1, 517, 333, 192, 128),
    (1, 2, 2, 129, 777, 256, 256), (2, 8, 1, 191, 193, 40, 128), (2, 2, 1, 160, 161, 128, 24),
    (1, 2, 2, 5, 3000, 96, 96), (1, 1, 1, 1000, 1000, 17, 8),
    (1, 13, 13, 200, 8192, 64, 64),  # the last section of heads is smaller
    (2, 4, 2, 200, 200, 512, 512), (1, 3, 1, 333, 517, 320, 264), (2, 2, 2, 129, 777, 40, 512),
    (1, 8, 2, 1, 300, 512, 8), (1, 3, 3, 130, 4200, 264, 272),
]  # fmt: skip


@on_hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_tile_is_the_formula(sizes, dtype, causal):
    q, k, v = inputs(dtype, *sizes)
    bounds, names = attention_bounds(q, k, v, causal=causal), []
    for name in each_configuration(WGMMA, q, k, v, causal=causal):
        check(name, ops.attention_forward(q, k, v, causal=causal), bounds)
        names.append(name)
    assert names


@on_hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_nothing_is_read_of_the_padding(sizes, causal):
    q, k, v = inputs(BF16, *sizes)
    batch, rows, keys = sizes[0], sizes[3], sizes[4]
    pads = torch.tensor([keys // 2, keys + 5, -3], dtype=torch.int32)[:batch].cuda()
    for b, pad in enumerate(pads.clamp(0, keys).tolist()):
        k[b, :, :pad] = math.nan
        v[b, :, :pad] = math.nan
        q[b, :, : max(0, pad - (keys - rows))] = math.nan
    filled = q.nan_to_num(0.0)
    bounds = attention_bounds(filled, k, v, pads, causal=causal)
    for name in each_configuration(WGMMA, q, k, v, pads, causal=causal):
        check(name, ops.attention_forward(filled, k, v, pads, causal=causal), bounds)
        assert_same_bits(
            ops.attention(q, k, v, pads, causal=causal),
            ops.attention(filled, k, v, pads, causal=causal),
        )


@on_hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("given", [False, True], ids=["plain", "sink"])
@pytest.mark.parametrize("dim", [64, 512])
def test_rows_of_tiles_without_keys_are_written(dim, given, causal):
    """Zeros, and the sink or -inf as lse, whatever lay in the memory before."""
    q, k, v = inputs(BF16, 3, 4, 2, 700, 700, dim)
    pads = torch.tensor([0, 650, 700], dtype=torch.int32, device="cuda")
    sink = torch.randn(4, device="cuda")
    numbers = {"causal": causal, **({"sink": sink} if given else {})}
    nothing = sink[:, None] if given else -math.inf
    for name in each_configuration(WGMMA, q, k, v, pads, **numbers):
        before = [torch.full_like(t, math.nan) for t in ops.attention_forward(q, k, v)]
        del before
        out, lse = ops.attention_forward(q, k, v, pads, **numbers)
        for rows, of_lse in ((out[1, :, :650], lse[1, :, :650]), (out[2], lse[2])):
            assert (rows == 0).all(), name
            assert (of_lse == nothing).all(), name
        assert out[1, :, 650:].isfinite().all() and lse[1, :, 650:].isfinite().all(), name


@on_hopper
@pytest.mark.parametrize("dim", [128, 512])
def test_views_scales_and_large_scores(dim):
    check_views_and_large_scores(WGMMA, rows=100, dim=dim)


@on_hopper
def test_splits_of_huge_scores_are_weighted_by_their_keys():
    """In fp32, the lse of such scores would lose the logarithm of the number of keys."""
    q = torch.full((1, 1, 3, 512), 2.0**20, device="cuda", dtype=BF16)
    k, v = q[:, :, :1].expand(-1, -1, 700, -1), torch.arange(700, device="cuda") % 128
    v = v[:, None].expand(1, 1, -1, 264).to(BF16)
    for name in each_configuration("wide", q, k, v, every=True):
        out, lse = ops.attention_forward(q, k, v)
        assert_close(out.float(), v.float().mean(2, keepdim=True).expand_as(out), rtol=0.01, atol=0)
        assert lse.isfinite().all(), name


@on_hopper
@pytest.mark.parametrize("dim", [128, 512])
def test_the_same_bits_in_every_run_whatever_the_neighbours_are(dim):
    qkv = inputs(BF16, 4, 16, 4, 700, 700, dim)
    check_same_bits(WGMMA, *qkv, [0, 100, 500, 699], [0, 650, 7, 0], causal=True)


@on_hopper
@pytest.mark.parametrize("dim", [64, 512])
def test_a_graph_serves_other_paddings_and_many_tiles(dim):
    """More tiles than blocks: every replay starts with the tickets at 0."""
    qkv = inputs(F16, 3, 50, 10, 300, 300, dim)
    check_graph(WGMMA, *qkv, ([0, 5, 299], [300, 1, 100], [7, 7, 7]), causal=True)


@on_hopper
def test_streams_have_tickets_of_their_own():
    q, k, v = inputs(BF16, 2, 40, 40, 500, 500, 64)
    first = ops.attention(q, k, v, causal=True)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    outs = []
    for stream in streams * 5:
        with torch.cuda.stream(stream):
            outs.append(ops.attention(q, k, v, causal=True))
    torch.cuda.synchronize()
    for out in outs:
        assert_same_bits(out, first)


LONG = {"seqlen_q": 4096, "seqlen_k": 4096}


@pytest.mark.parametrize(
    "dims", [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (64, 128), (128, 64), (256, 256)]
)
def test_the_tile_fits_the_head_dims(dims):
    """No tile is taken that computes more columns than the smallest that holds both."""
    numbers = problem("attention", **LONG, head_dim=dims[0], head_dim_v=dims[1])
    legal = [c for c in _C.candidates("attention", numbers) if not c["refusal"]]
    mine = [c for c in legal if c["engine"] == "sm90"]
    choice = chosen("attention", **LONG, head_dim=dims[0], head_dim_v=dims[1])
    assert choice["engine"] == "sm90" and choice["columns"]["head_dim"] >= dims[0]
    least = min(c["columns"]["head_dim"] for c in mine)
    assert choice["columns"]["head_dim"] == least


def test_short_rows_take_smaller_tiles():
    def rows(**fields: int) -> int:
        return chosen("attention", **{"heads": 96, "causal": 1, **fields})["columns"]["rows"]

    assert rows(seqlen_q=1024, seqlen_k=1024) == 64
    assert rows(seqlen_q=8192, seqlen_k=8192) == 192
    assert rows(heads=768, causal=0, seqlen_q=128, seqlen_k=128) == 128
    # Packed documents count as short ones, however long their rows are together.
    assert rows(heads=12, seqlen_q=8192, seqlen_k=8192, packed=1) == 64
    wide = {"heads": 16, "seqlen_q": 8192, "seqlen_k": 8192, "head_dim": 128, "head_dim_v": 128}
    assert rows(seqlen_q=0, seqlen_k=128, packed=1, shared_limit=70000) > 0  # no documents
    keys = [chosen("attention", **wide, causal=1, packed=p)["columns"]["keys"] for p in (0, 1)]
    assert keys == [160, 128]


def test_a_window_takes_the_tile_whose_steps_fit_it():
    """A window of 1024 over 128 rows has 9 steps of 128 keys, but 8 of 160."""
    fields = dict(heads=32, causal=1, seqlen_q=16384, seqlen_k=16384, head_dim=128, head_dim_v=128)
    assert chosen("attention", **fields)["columns"]["keys"] == 160
    assert chosen("attention", **fields, window=1024)["columns"]["keys"] == 128
    assert chosen("attention", **fields, window=2**40)["columns"]["keys"] == 160


def test_clusters_divide_the_keys_of_few_rows():
    """At most as many CTAs as SMs, and none if the second kernel would take longer."""
    dims = dict(head_dim=512, head_dim_v=512)
    for heads, rows, keys, splits in (
        (1, 1, 4096, 32), (4, 16, 4096, 16), (5, 16, 4096, 8), (8, 128, 4096, 8),
        (8, 129, 4096, 4), (1, 1, 500, 4), (8, 512, 512, 1), (1, 1, 100, 1), (70, 1, 4096, 1),
    ):  # fmt: skip
        few = dict(heads=heads, seqlen_q=rows, seqlen_k=keys, **dims)
        assert chosen("attention", **few)["columns"]["splits"] == splits, few
        for option in ("softcap", "invariant"):
            assert chosen("attention", **few, **{option: 1})["columns"]["splits"] == 1
            numbers = problem("attention", **few, **{option: 1})
            assert refusal("attention", numbers, "wide 128x128x512 2 blocks /4")


def test_reasons_of_a_tile():
    tile = "sm90 128x160x128"
    long = problem("attention", **LONG, head_dim=128, head_dim_v=128)
    assert refusal("attention", long, tile) == ""
    for fields, reason in (
        ({"math": 2, "bfloat16": 0}, "another dtype"),
        ({"head_dim": 129}, "head dims up to 128 and 128"),
        ({"head_dim_v": 100}, "not aligned to 16 bytes"),
        ({"seqlen_k": 0}, "no keys"),
        ({"seqlen_k": 2**29 + 1}, "longer than 536870912"),
        ({"head_dim": 0}, "head dim of 0"),
        ({"heads": 2**31}, "tiles"),
        ({"wgmma": 0}, "no wgmma"),
        ({"shared_limit": SMALL["shared_limit"]}, "shared memory"),
    ):
        fields = {**LONG, "head_dim": 128, "head_dim_v": 128, **fields}
        assert reason in refusal("attention", problem("attention", **fields), tile)
    wide = "wide 128x128x512 2 blocks"
    dims = {"head_dim": 512, "head_dim_v": 264}
    assert chosen("attention", **LONG, **dims)["choice"] == wide
    for fields, reason in (
        ({"math": 2, "bfloat16": 0}, "another dtype"),
        ({"head_dim": 256, "head_dim_v": 8}, "head dims of 257 to 512"),
        ({"head_dim": 520}, "head dims up to 512"),
        ({"head_dim_v": 508}, "not aligned to 16 bytes"),
        ({"dropout": 1}, "does not support dropout"),
        ({"seqlen_k": 0}, "no keys"),
        ({"heads": 2**28}, "tiles"),
        ({"clusters": 0}, "no wgmma"),
        ({"shared_limit": SMALL["shared_limit"]}, "shared memory"),
    ):
        numbers = problem("attention", **{**LONG, **dims, **fields})
        assert reason in refusal("attention", numbers, wide)
    assert chosen("attention", H200, **LONG, math=1, bfloat16=0)["engine"] == "sync"
    assert chosen("attention", SMALL, **LONG)["engine"] == "sync"
