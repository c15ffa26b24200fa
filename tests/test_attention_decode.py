"""attention of few query rows on a GPU: every tile and number of splits against the formula.

The engine "chain" is the one of the batch-invariant mode.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch

import torchweld
from attention_engines import (
    attention_bounds,
    check,
    check_graph,
    check_same_bits,
    check_views_and_large_scores,
    each_configuration,
    inputs,
    on_hopper,
)
from choices_helpers import chosen, ops, picked, problem, refusal
from cuda_graphs import cuda_graph
from numerics import assert_same_bits
from samples import BF16, F16

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels run on a GPU")


@pytest.fixture(params=["decode", pytest.param("chain", marks=on_hopper)])
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    with torchweld.batch_invariant(enabled=request.param == "chain"):
        yield request.param


SIZES = [
    # batch, nheads, nheads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v
    (1, 1, 1, 1, 1, 8, 8), (2, 4, 4, 1, 17, 64, 64), (3, 8, 2, 1, 1000, 128, 128),
    (2, 32, 4, 4, 777, 128, 128), (1, 16, 1, 16, 300, 64, 64), (2, 6, 3, 5, 130, 80, 40),
    (1, 4, 2, 2, 515, 256, 192), (1, 2, 1, 3, 2, 96, 128), (1, 24, 1, 1, 100, 40, 72),
    (2, 6, 2, 3, 2100, 33, 37),
]  # fmt: skip


@on_gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_configuration_is_the_formula(sizes, dtype, causal, engine):
    q, k, v = inputs(dtype, *sizes)
    bounds, names = attention_bounds(q, k, v, causal=causal), []
    for name in each_configuration(engine, q, k, v, every=True, causal=causal):
        check(name, ops.attention_forward(q, k, v, causal=causal), bounds)
        names.append(name)
    assert names or (engine == "chain" and sizes[-1] % 8 != 0)


@on_gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_nothing_is_read_of_the_padding(sizes, causal, engine):
    q, k, v = inputs(BF16, *sizes)
    batch, keys = sizes[0], sizes[4]
    pads = torch.tensor([keys // 2, keys + 5, -3], dtype=torch.int32)[:batch].cuda()
    for b, pad in enumerate(pads.clamp(0, keys).tolist()):
        k[b, :, :pad] = math.nan
        v[b, :, :pad] = math.nan
    bounds = attention_bounds(q, k, v, pads, causal=causal)
    for name in each_configuration(engine, q, k, v, pads, every=True, causal=causal):
        check(name, ops.attention_forward(q, k, v, pads, causal=causal), bounds)


@on_gpu
def test_views_scales_and_large_scores(engine):
    check_views_and_large_scores(engine, rows=1)


@on_gpu
def test_the_same_bits_in_every_run_whatever_the_neighbours_are(engine):
    qkv = inputs(BF16, 4, 32, 8, 1, 3000, 128)
    check_same_bits(engine, *qkv, [0, 100, 2000, 2999], [0, 2500, 7, 0])


@on_gpu
def test_a_graph_serves_other_paddings(engine):
    qkv = inputs(F16, 3, 12, 4, 1, 2048, 64)
    check_graph(engine, *qkv, ([0, 5, 2047], [2048, 1, 300], [7, 7, 7]))


@on_gpu
def test_calls_in_a_row_give_what_each_gives_alone(engine):
    """A call starts while the call before it, whose results are its query, still runs."""
    q, k, v = inputs(BF16, 2, 8, 2, 1, 4000, 128)
    k *= 4
    v *= 16  # so that each call picks other keys

    def chain(after=lambda: None):
        outs = [q]
        for _ in range(20):
            outs.append(ops.attention(outs[-1], k, v))
            after()
        return outs[1:]

    for _ in each_configuration(engine, q, k, v, every=True):
        expected = chain(torch.cuda.synchronize)
        assert all((a - b).abs().max() > 1 for a, b in itertools.pairwise(expected))
        assert_same_bits(chain(), expected)
        graph, outs = cuda_graph(chain)
        for _ in range(5):
            for out in outs:
                out.zero_()
            graph.replay()
            assert_same_bits(outs, expected)


def test_splits_fill_the_gpu_and_are_never_empty_of_steps():
    for heads, keys in ((8, 65536), (128, 8192), (512, 2048), (12, 1024), (1, 64), (1, 1)):
        choice = chosen("attention", heads=heads, group=1, seqlen_q=1, seqlen_k=keys, head_dim=128,
                        head_dim_v=128)  # fmt: skip
        columns = choice["columns"]
        assert choice["engine"] == "decode"
        steps = -(-keys // (columns["warps"] * columns["keys"]))
        assert 1 <= columns["splits"] <= max(1, min(128, steps // 2))
        if steps * heads >= 4 * 132:
            assert columns["splits"] * heads > 132 // 2


def test_which_steps_of_the_batch_invariant_mode_are_chains():
    """Few kv heads are, and heads that the tiles of Hopper's kernel can't read once."""
    step = dict(invariant=1, seqlen_q=1, seqlen_k=4096, head_dim=128, head_dim_v=128)
    few, many = dict(heads=128, group=4, packable=1), dict(heads=256, group=4, packable=1)
    assert chosen("attention", **step, **few)["choice"] == "chain 16x160x128 /26"
    assert chosen("attention", **step, **many)["engine"] == "sm90"
    assert chosen("attention", **step, **many | dict(packable=0))["engine"] == "chain"
    assert chosen("attention", **step, heads=64)["engine"] == "sm90"
    chain = "chain 16x160x128 /26"
    for changes, reason in (
        (dict(invariant=0), "for the batch-invariant mode"),
        (dict(seqlen_q=17), "at most 16 query rows"),
        (dict(softcap=1), "no soft cap"),
        (dict(seqlen_q=2, packed=1), "one key_start and one key_end per sequence"),
        (dict(dropout=1), "dropout"),
        (dict(wgmma=0), "no wgmma"),
        (dict(head_dim_v=100), "aligned to 16 bytes"),
        (dict(head_dim=64, head_dim_v=64), "steps of another number of keys"),
    ):
        found = problem("attention", **step | few | changes)
        assert reason in refusal("attention", found, chain), changes


def test_remembered_steps_are_those_of_one_number_of_keys():
    """A shape class holds several numbers of keys; with too few steps a call would never end."""
    few = dict(heads=8, invariant=1, seqlen_q=1, head_dim=128, head_dim_v=128)
    ours, other = (problem("attention", **few, seqlen_k=keys) for keys in (4000, 3900))
    gpu = "a GPU of this test"
    assert picked("attention", other, gpu) == ("chain 16x160x128 /25", "heuristic")
    ops._remember_choice(gpu, "attention", other, "sm90 128x160x128")
    assert picked("attention", ours, gpu) == ("sm90 128x160x128", "tuned")  # one class
    ops._remember_choice(gpu, "attention", ours, "chain 16x160x128 /25")
    shorter = problem("attention", **few, seqlen_k=2100)
    assert picked("attention", shorter, gpu) == ("chain 16x160x128 /14", "heuristic")


def test_reasons_of_a_decode():
    few = problem("attention", seqlen_q=16)
    tile = "decode 16x64 8 warps 3 stages"
    assert refusal("attention", few, tile) == ""
    assert "at most 16 query rows" in refusal("attention", problem("attention", seqlen_q=17), tile)
    assert "another dtype" in refusal("attention", problem("attention", seqlen_q=1, math=2), tile)
    assert "head dims up to 64" in refusal(
        "attention", problem("attention", seqlen_q=1, head_dim=65), tile
    )
    small = problem("attention", seqlen_q=1, shared_limit=65536)
    assert "shared memory" in refusal("attention", small, tile)
    wide = problem("attention", seqlen_q=16, heads=2**28, group=2**28)
    assert "query rows of a kv head" in refusal("attention", wide, tile)
    assert chosen("attention", seqlen_q=17, seqlen_k=64)["engine"] == "sm90"
