"""attention's gradient on wgmma: every tile against the formula, and which one is taken."""

from __future__ import annotations

import math

import pytest
import torch

from attention_engines import WGMMA, check, each_configuration, inputs, mask_data, on_hopper
from choices_helpers import H200, NO_WGMMA, SMALL, chosen, ops, problem, refusal
from numerics import assert_equal, assert_same_bits
from running import GRADIENTS
from samples import BF16, F16

SIZES = [
    # batch, nheads, nheads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v
    (1, 1, 1, 1, 1, 8, 8), (2, 4, 4, 64, 64, 64, 64), (1, 3, 1, 65, 63, 72, 48),
    (2, 4, 2, 200, 200, 128, 128), (3, 2, 2, 333, 517, 120, 112), (2, 2, 1, 517, 333, 64, 64),
    (1, 2, 2, 129, 777, 40, 64), (2, 8, 1, 191, 193, 40, 128), (2, 2, 1, 160, 161, 128, 24),
    (1, 2, 2, 5, 3000, 96, 96), (1, 1, 1, 1000, 1000, 16, 8), (2, 4, 2, 300, 300, 72, 80),
    (2, 4, 2, 200, 200, 256, 256), (1, 2, 1, 333, 517, 192, 128), (3, 2, 2, 517, 333, 136, 8),
    (1, 4, 1, 1, 65, 40, 256), (1, 1, 1, 700, 700, 256, 200),
    (2, 4, 2, 200, 200, 512, 512), (1, 3, 1, 333, 517, 320, 264), (2, 2, 2, 129, 777, 40, 512),
    (1, 4, 1, 1, 300, 512, 8), (2, 1, 1, 517, 333, 264, 272),
]  # fmt: skip


def each(engine, dout, q, k, v, leftpad=None, *, dlse=None, **kwargs):
    """Name and gradients of each configuration of an engine, "" for all."""
    out, lse = ops.attention_forward(q, k, v, leftpad, **kwargs)
    saved = (dout, q, k, v, out, lse, leftpad)
    given = kwargs if dlse is None else {**kwargs, "dlse": dlse}
    for name in each_configuration(engine, *saved, op="attention_backward", **given):
        yield name, ops.attention_backward(*saved, **given)


def dout_of(q, v):
    return torch.randn(*q.shape[:3], v.shape[3], device="cuda").to(q.dtype)


@on_hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_tile_is_the_formula(sizes, dtype, causal):
    """The tiles of mma.sync are included, because other tests do not reach them on Hopper."""
    q, k, v = inputs(dtype, *sizes)
    dout = dout_of(q, v)
    names, bounds = [], GRADIENTS["attention"](dout, q, k, v, causal=causal)
    for name, grads in each("", dout, q, k, v, causal=causal):
        check(name, grads, bounds)
        names.append(name.split()[0])
    wide = max(sizes[-2:]) > 256
    assert set(names) == ({"wide", "general"} if wide else {"sm90", "sync", "general"})


@on_hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_nothing_is_read_of_the_padding(sizes, causal):
    q, k, v = inputs(BF16, *sizes)
    dout = dout_of(q, v)
    batch, rows, keys = sizes[0], sizes[3], sizes[4]
    pads = torch.tensor([keys // 2, keys + 5, -3], dtype=torch.int32)[:batch].cuda()
    for b, pad in enumerate(pads.clamp(0, keys).tolist()):
        k[b, :, :pad] = math.nan
        v[b, :, :pad] = math.nan
        first = max(0, pad - (keys - rows))
        q[b, :, :first] = math.nan
        dout[b, :, :first] = math.nan
    filled = [t.nan_to_num(0.0) for t in (dout, q, k, v)]
    for name, grads in each(WGMMA, dout, q, k, v, pads, causal=causal):
        check(name, grads, GRADIENTS["attention"](*filled, pads, causal=causal))
        for grad, t in zip(grads, (q, k, v), strict=False):
            unseen = t.isnan()
            assert (grad[unseen] == 0).all()
    clean = each(WGMMA, *filled, pads, causal=causal)
    dirty = each(WGMMA, dout, q, k, v, pads, causal=causal)
    for (_, a), (_, b) in zip(dirty, clean, strict=True):
        assert_same_bits(a, b)


MASKS = [
    {"window": 1}, {"window": 70, "causal": True}, {"window": 130, "softcap": 2.0},
    {"softcap": 2.0, "scale": -1.0}, {"softcap": 20.0, "causal": True},
    {"key_end": True}, {"key_end": True, "causal": True},
    {"key_start": True, "causal": True}, {"key_start": True, "window": 33, "sink": True},
    {"sink": True, "causal": True, "dlse": True}, {"dlse": True},
    {"key_end": True, "key_start": True, "sink": True, "softcap": 5.0, "dlse": True},
]  # fmt: skip


@on_hopper
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("numbers", MASKS, ids=str)
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((3, 4, 2, 300, 300, 64, 64), F16),
        ((3, 2, 1, 130, 450, 128, 72), BF16),
        ((3, 2, 1, 130, 450, 72, 72), BF16),
        ((3, 4, 2, 300, 300, 88, 96), F16),
        ((3, 4, 2, 300, 300, 192, 128), BF16),
        ((3, 2, 1, 130, 450, 256, 256), F16),
        ((3, 4, 2, 300, 300, 512, 512), F16),
        ((3, 2, 1, 130, 450, 264, 320), BF16),
    ],
    ids=str,
)
def test_masks(sizes, dtype, numbers, padded):
    q, k, v = inputs(dtype, *sizes)
    dout = dout_of(q, v)
    batch, nheads, _, rows, keys = sizes[:5]
    data = mask_data(batch, nheads, rows, keys)
    data["key_start"][0, 5] = keys  # a row that sees nothing
    kwargs = {name: data.get(name, value) for name, value in numbers.items()}
    pads = data["leftpad"] if padded else None
    bounds = GRADIENTS["attention"](dout, q, k, v, pads, **kwargs)
    for name, grads in each("", dout, q, k, v, pads, **kwargs):
        check(name, grads, bounds)


@on_hopper
@pytest.mark.parametrize(("rows", "keys"), [(8, 9000), (17000, 300)])
def test_rows_of_key_tiles(rows, keys):
    """The kernel that finds them has fewer blocks than key tiles, or fewer threads than groups."""
    q, k, v = inputs(BF16, 2, 2, 1, rows, keys, 64, 64)
    dout = dout_of(q, v)
    start = (torch.arange(rows) * keys // rows - 20).clamp(min=0).int().repeat(2, 1).cuda()
    start[1] += 7
    mask = {"key_start": start, "key_end": (start + 40).clamp(max=keys)}
    bounds = GRADIENTS["attention"](dout, q, k, v, **mask)
    for name, grads in each("", dout, q, k, v, **mask):
        check(name, grads, bounds)


@on_hopper
@pytest.mark.parametrize(
    "dims", [(64, 64), (128, 128), (192, 128), (256, 256), (512, 512)], ids=str
)
def test_a_block_has_many_work_tiles_without_rows(dims):
    """The consumers may finish such a tile before the producer has acquired K and V for it."""
    batch, rows, keys = 400, 70, 512
    q, k, v = inputs(BF16, batch, 1, 1, rows, keys, *dims)
    dout = dout_of(q, v)
    pads = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    pads[::7] = 400
    masks = [{}, {"window": 200}]
    if max(dims) <= 128:
        masks += [{"dropout_p": 0.3, "dropout_seed": torch.tensor([5], device="cuda")}]
    for mask in masks:
        bounds, names = GRADIENTS["attention"](dout, q, k, v, pads, **mask), []
        for name, grads in each(WGMMA, dout, q, k, v, pads, **mask):
            check(name, grads, bounds)
            names.append(name)
        assert names, mask


# Grouped heads with more blocks than SMs, whose second wave loops over the query tiles upwards if
# causal; with too few, so that the query heads of a KV head are divided; or with both.
BLOCKS = [
    ((2, 80, 10, 136, 1000, 64, 64), True, BF16), ((2, 40, 10, 200, 1000, 128, 128), True, F16),
    ((2, 20, 5, 200, 1000, 256, 192), True, BF16), ((1, 4, 1, 700, 690, 64, 64), True, F16),
    ((2, 7, 1, 300, 450, 128, 72), True, BF16), ((2, 7, 1, 300, 450, 128, 72), False, F16),
    ((1, 10, 2, 290, 200, 192, 128), True, BF16), ((1, 10, 2, 290, 200, 192, 128), False, F16),
    ((1, 16, 1, 136, 8500, 128, 128), True, BF16), ((1, 8, 1, 136, 8192, 256, 256), True, BF16),
    ((2, 80, 10, 136, 1000, 192, 128), True, F16), ((1, 40, 10, 600, 1000, 192, 128), True, BF16),
    ((2, 20, 5, 200, 1000, 512, 512), True, BF16), ((1, 8, 1, 290, 200, 320, 264), False, F16),
]  # fmt: skip


@on_hopper
@pytest.mark.parametrize(
    "numbers",
    [{}, {"softcap": 3.0}, {"key_end": True}, {"window": 99}, {"sink": True, "dlse": True}],
    ids=str,
)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("sizes", "causal", "dtype"), BLOCKS, ids=str)
def test_blocks_of_grouped_heads(sizes, causal, dtype, padded, numbers):
    q, k, v = inputs(dtype, *sizes)
    dout = dout_of(q, v)
    batch, nheads, _, rows, keys = sizes[:5]
    data = {
        "key_end": torch.tensor([keys - 1, keys // 3], dtype=torch.int32)[:batch].cuda(),
        "sink": torch.randn(nheads, device="cuda"),
        "dlse": torch.randn(batch, nheads, rows, device="cuda"),
    }
    kwargs = {"causal": causal, **{name: data.get(name, x) for name, x in numbers.items()}}
    pads = torch.tensor([130, 0], dtype=torch.int32)[:batch].cuda() if padded else None
    bounds = GRADIENTS["attention"](dout, q, k, v, pads, **kwargs)
    runs = (each(WGMMA, dout, q, k, v, pads, **kwargs) for _ in range(2))
    for (name, grads), (_, again) in zip(*runs, strict=True):
        check(name, grads, bounds)
        assert_same_bits(again, grads)


@on_hopper
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
def test_one_key_and_equal_keys_are_exact(dtype, dim):
    """P is 0, 1 or a power of two, dS is 0."""
    ints = lambda *shape: torch.randint(-2, 3, shape, device="cuda").to(dtype)  # noqa: E731
    q = (32 * torch.eye(dim, device="cuda")).to(dtype).expand(2, 4, -1, -1).contiguous()
    k, v, dout = q[:, :2].contiguous(), ints(2, 2, dim, dim), ints(2, 4, dim, dim)
    for _, (dq, dk, dv, *_) in each(WGMMA, dout, q, k, v, scale=1.0):
        assert_equal(dv, dout.view(2, 2, 2, dim, dim).sum(2))
        assert (dq == 0).all() and (dk == 0).all()
    q, k = torch.zeros(1, 2, 256, dim, device="cuda", dtype=dtype), ints(1, 2, 256, dim)
    ones = torch.ones_like(k)
    for _, (dq, dk, dv, *_) in each(WGMMA, ones, q, k, ones):
        assert_equal(dv, ones)
        assert (dq == 0).all() and (dk == 0).all()


@on_hopper
@pytest.mark.parametrize("dim", [128, 192])
def test_views_and_scales(dim):
    q, k, v = inputs(BF16, 2, 8, 2, 100, 600, dim, 128)
    dout = dout_of(q, v)
    wide = torch.randn(2, 600, 2, 336, device="cuda").to(BF16).transpose(1, 2)
    views = wide[..., :dim], wide[..., 200:328]  # both have rows on 16 bytes
    for scale in (0.0, -0.3, 0.5):
        for name, grads in each(WGMMA, dout, q, *views, scale=scale):
            check(name, grads, GRADIENTS["attention"](dout, q, *views, scale=scale))
    shifted_q, shifted_dout = (
        torch.randn(t.numel() + 1, device="cuda").to(BF16)[1:].view_as(t) for t in (q, dout)
    )
    for name, grads in each(WGMMA, shifted_dout, shifted_q, k, v):
        check(name, grads, GRADIENTS["attention"](shifted_dout, shifted_q, k, v))


@on_hopper
def test_scores_beyond_all_bounds_give_no_nan():
    """The rounding error of such a score exceeds the range of fp32 exponents."""
    big = torch.full((1, 2, 300, 64), 1e15, device="cuda", dtype=BF16)
    ones = torch.ones_like(big)
    for _, grads in each(WGMMA, ones, big, big, ones, causal=True):
        assert all(grad.isfinite().all() for grad in grads)


@on_hopper
@pytest.mark.parametrize("mask", [{}, {"window": 200}], ids=str)
@pytest.mark.parametrize(
    "dims", [(64, 64), (128, 128), (192, 128), (256, 256), (512, 512)], ids=str
)
def test_the_same_bits_in_every_run_whatever_the_neighbours_are(dims, mask):
    q, k, v = inputs(BF16, 4, 16, 4, 700, 700, *dims)
    dout = dout_of(q, v)
    kwargs = {"causal": True, **mask}
    pads = torch.tensor([0, 100, 500, 699], dtype=torch.int32, device="cuda")
    others = torch.tensor([0, 650, 7, 0], dtype=torch.int32, device="cuda")
    out, lse = ops.attention_forward(q, k, v, pads, **kwargs)
    saved = (dout, q, k, v, out, lse)
    for _ in each_configuration(WGMMA, *saved, pads, op="attention_backward", **kwargs):
        first = ops.attention_backward(*saved, pads, **kwargs)
        for _ in range(50):
            again = ops.attention_backward(*saved, pads, **kwargs)
            assert_same_bits(again, first)
        k[1:] = torch.randn_like(k[1:])
        dout[1:] = math.nan
        again = ops.attention_backward(*saved, others, **kwargs)
        for x, y in zip(again[:3], first, strict=False):
            assert_same_bits(x[0], y[0])


@on_hopper
@pytest.mark.parametrize("heads", [(20, 10), (8, 1)], ids=["heads", "parts of them"])
@pytest.mark.parametrize("mask", [{}, {"softcap": 30.0}], ids=str)
def test_a_graph_serves_other_paddings(mask, heads):
    """Every replay starts with tickets and turns at 0."""
    q, k, v = inputs(F16, 3, *heads, 300, 300, 64)
    dout = dout_of(q, v)
    kwargs = {"causal": True, **mask}
    pads = torch.zeros(3, dtype=torch.int32, device="cuda")
    for name, grads in each(WGMMA, dout, q, k, v, pads, **kwargs):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = ops.attention_forward(q, k, v, pads, **kwargs)
            grads = ops.attention_backward(dout, q, k, v, out, lse, pads, **kwargs)
        for values in ([0, 5, 299], [300, 1, 100], [7, 7, 7]):
            pads.copy_(torch.tensor(values))
            for grad in grads[:3]:
                grad.fill_(math.nan)
            graph.replay()
            check(name, grads, GRADIENTS["attention"](dout, q, k, v, pads, **kwargs))


@on_hopper
def test_streams_have_turns_of_their_own():
    q, k, v = inputs(BF16, 2, 40, 40, 500, 500, 64)
    dout = dout_of(q, v)
    out, lse = ops.attention_forward(q, k, v, causal=True)
    saved = (dout, q, k, v, out, lse)
    first = ops.attention_backward(*saved, causal=True)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for stream in streams * 5:
        with torch.cuda.stream(stream):
            results.append(ops.attention_backward(*saved, causal=True))
    torch.cuda.synchronize()
    for grads in results:
        assert_same_bits(grads, first)


FAMILY = "attention_backward"
LONG = {"seqlen_q": 4096, "seqlen_k": 4096}


@pytest.mark.parametrize(
    ("dims", "choice"),
    [
        ((64, 64), "sm90 128x128x64"), ((8, 40), "sm90 128x128x64"), ((72, 8), "sm90 128x64x80"),
        ((88, 96), "sm90 128x64x96"),
        ((64, 128), "sm90 128x64x128"), ((128, 128), "sm90 128x64x128"),
        ((60, 64), "sync 16 bits 128x64x64"), ((136, 128), "sm90 128x64x192 to 128"),
        ((200, 128), "sm90 64x64x256 2 blocks"), ((192, 136), "sm90 64x64x256 2 blocks"),
        ((8, 256), "sm90 64x64x256 2 blocks"), ((264, 8), "wide 128x64x512 2 blocks"),
        ((512, 512), "wide 128x64x512 2 blocks"), ((132, 256), "sync 16 bits 64x64x256 paired"),
    ],
    ids=str,
)  # fmt: skip
def test_the_tile_fits_the_head_dims(dims, choice):
    fields = dict(**LONG, head_dim=dims[0], head_dim_v=dims[1])
    assert chosen(FAMILY, **fields)["choice"] == choice
    for device in (NO_WGMMA, SMALL):
        expected = "general" if max(dims) > 256 else "sync"
        assert chosen(FAMILY, device, **fields)["engine"] == expected


def test_reasons_of_a_tile():
    tile = "sm90 128x64x128"
    dims = {"head_dim": 128, "head_dim_v": 128}
    assert refusal(FAMILY, problem(FAMILY, **LONG, **dims), tile) == ""
    for fields, reason in (
        ({"math": 2, "bfloat16": 0}, "another dtype"),
        ({"head_dim": 136}, "head dims of 65 to 128"),
        ({"head_dim": 64, "head_dim_v": 64}, "head dims of 65 to 128"),
        ({"head_dim_v": 100}, "not aligned to 16 bytes"),
        ({"head_dim": 100}, "not aligned to 16 bytes"),
        ({"seqlen_q": 0}, "no query rows"),
        ({"seqlen_k": 0}, "no keys"),
        ({"seqlen_k": 2**29 + 1}, "longer than 536870912"),
        ({"head_dim": 0}, "head dim of 0"),
        ({"heads": 2**20}, "2^31 - 1 query rows"),
        ({"heads": 2**20, "seqlen_q": 64, "seqlen_k": 2**20}, "2^31 - 1 tiles"),
        ({"wgmma": 0}, "no wgmma"),
        ({"shared_limit": SMALL["shared_limit"]}, "shared memory"),
    ):
        fields = {**LONG, **dims, **fields}
        assert reason in refusal(FAMILY, problem(FAMILY, **fields), tile)
    narrow = problem(FAMILY, **LONG, head_dim=72)
    assert "head dims of 1 to 64" in refusal(FAMILY, narrow, "sm90 128x128x64")
    wide = dict(**LONG, head_dim=256, head_dim_v=192)
    pair = "sm90 64x64x256 2 blocks"
    assert "head dims of 129 to 256" in refusal(FAMILY, narrow, pair)
    assert refusal(FAMILY, problem(FAMILY, **wide), pair) == ""
    unequal = "sm90 128x64x192 to 128"
    dims = {"head_dim": 192, "head_dim_v": 128}
    assert refusal(FAMILY, problem(FAMILY, **LONG, **dims), unequal) == ""
    for fields, reason in (
        ({"head_dim": 200}, "the tile is for head dims of 129 to 192"),
        ({"head_dim": 128}, "the tile is for head dims of 129 to 192"),
        ({"head_dim_v": 136}, "the tile supports head dims up to 192 and 128"),
        ({"softcap": 1}, "the tile supports no soft cap"),
    ):
        assert refusal(FAMILY, problem(FAMILY, **LONG, **{**dims, **fields}), unequal) == reason
    assert chosen(FAMILY, **LONG, **dims, softcap=1)["choice"] == pair
    alone = problem(FAMILY, H200 | {"clusters": 0}, **wide)
    assert "no clusters" in refusal(FAMILY, alone, pair)
    dims = {"head_dim": 264, "head_dim_v": 512}
    for fields, reason in (
        ({"softcap": 1}, "no soft cap"),
        ({"head_dim": 260}, "not aligned to 16 bytes"),
        ({"seqlen_q": 0}, "no query rows"),
        ({"heads": 2**20, "seqlen_q": 64, "seqlen_k": 2**20}, "2^31 - 1 tiles"),
    ):
        numbers = problem(FAMILY, **{**LONG, **dims, **fields})
        assert reason in refusal(FAMILY, numbers, "wide 128x64x512 2 blocks")
    assert chosen(FAMILY, H200, **LONG, math=1, bfloat16=0)["engine"] == "sync"
