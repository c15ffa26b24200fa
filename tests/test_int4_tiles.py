"""Which tile a product with a 4-bit weight takes: host code, tested without a GPU."""

from __future__ import annotations

import itertools

import pytest

from choices_helpers import _C, H200, SMALL, chosen, problem, refusal

SIZES = [1, 2, 7, 16, 17, 63, 64, 65, 512, 1000, 4096, 16385]
SHAPES = list(itertools.product(SIZES, repeat=3))
GROUPS = [8, 24, 32, 64, 128, 0]  # 0: all of K

NO_CLUSTERS = dict(clusters=0, clusters_of_16=0, tma=0, wgmma=0)
NO_WGMMA = dict(wgmma=0)


def splits_cover_k_once(columns: dict[str, int], k: int) -> bool:
    """All splits but the last have equally many k-blocks, and none is empty."""
    chunks, k_block, splits = -(-k // 64), columns["block_k"] // 64, columns["splits"]
    k_blocks = -(-chunks // k_block)
    split = -(-k_blocks // splits) * k_block
    return (splits - 1) * split < chunks <= splits * split


@pytest.mark.parametrize("gpu", [H200, SMALL], ids=["h200", "small"])
@pytest.mark.parametrize("size", [2, 4])
def test_splits_cover_k_once_in_a_tile_that_fits(size, gpu):
    devices = [gpu | dict(clusters=c, wgmma=w) for c, w in ((0, 0), (1, 0), (1, 1))]
    for (m, n, k), group in itertools.product(SHAPES, GROUPS):
        k_padded = -(-k // (group or 8)) * (group or 8)
        groups = k_padded // group if group else 1
        whole = k_padded % (groups * 64) == 0
        for device in devices:
            fields = dict(m=m, n=n, k=k_padded, groups=groups, elem_size=size)
            choice = chosen("int4", device, **fields)
            columns = choice["columns"]
            assert choice["refusal"] == ""
            if choice["engine"] == "dense":
                assert m > 128 and not (whole and size == 2)
                continue
            # A GPU with wgmma has the shared memory for the wgmma tiles.
            suits = whole and size == 2 and m > 16
            takes_wgmma = choice["engine"] in ("large_m", "small_m")
            assert takes_wgmma == (suits and bool(device["wgmma"]) and gpu == H200)
            if choice["engine"] == "decode":
                assert columns["blocks"] % columns["splits"] == 0
                assert columns["splits"] == 1 or device["clusters"]
            assert columns["tile_bytes"] <= device["shared_limit"]
            assert splits_cover_k_once(columns, k_padded)


def test_the_smallest_tile_is_taken_and_a_long_k_is_cut():
    """In float32, and where few tokens have no tiles of their own."""
    few, many = ((1, 8), (8, 8), (9, 16), (17, 32)), ((17, 32), (33, 64), (65, 128), (4096, 128))
    for size, sizes in ((4, few), (2, many)):
        for m, tokens in sizes:
            choice = chosen("int4", H200 | NO_WGMMA, m=m, elem_size=size)
            assert choice["engine"] == "sync" and choice["columns"]["tokens"] == tokens
    assert chosen("int4", H200 | NO_WGMMA, m=1, elem_size=4)["columns"]["splits"] > 1
    assert chosen("int4", H200 | NO_WGMMA, m=4096)["columns"]["splits"] == 1


# Few tokens


def decoding(device=H200 | NO_WGMMA, **fields) -> dict[str, int] | None:
    """Returns the columns of the tile if a product takes one for few tokens, or None."""
    choice = chosen("int4", device, **fields)
    return choice["columns"] if choice["engine"] == "decode" else None


@pytest.mark.parametrize("gpu", [H200, SMALL | dict(clusters=1)], ids=["h200", "small"])
def test_every_tile_of_rows_has_a_block_or_a_cluster(gpu):
    taken = {1: 0, 4: 0}
    for m, n, group in itertools.product(range(1, 18), SIZES, (64, 128, 192, 4096)):
        for k in (group, 2 * group, 3 * group, 32 * group, 8192):
            if k % group:
                continue
            tile = decoding(gpu, m=m, n=n, k=k, groups=k // group)
            if tile is None:
                continue
            assert m <= tile["tokens"]
            # A k-block has two slices; each is within one group.
            assert group % (tile["block_k"] // 2) == 0 and k % tile["block_k"] == 0
            assert tile["tile_bytes"] <= gpu["shared_limit"] and tile["blocks"] <= gpu["sms"]
            owners, rest = divmod(tile["blocks"], tile["splits"])
            # Only one CTA of a pair that shares its loads of x may be idle.
            assert rest == 0 and 1 <= owners <= max(2, -(-n // 16))
            taken[tile["splits"]] += 1
    assert taken[1] > 500 and taken[4] > 20


def test_decoding_ends_where_x_is_too_large():
    """And with more tokens, float32, groups that are no whole chunks."""
    assert decoding(m=8)["tokens"] == 8
    assert decoding(m=9)["tokens"] == 16
    assert decoding(m=17) is None
    assert decoding(m=1, elem_size=4) is None
    assert decoding(m=1, groups=128) is None
    assert decoding(m=8, n=131072)["blocks"] == 132
    assert decoding(m=16, n=14336)["tokens"] == 16
    assert decoding(m=16, k=65536, groups=512) is None
    # A cluster of four blocks holds four times the x; not all multiprocessors have space for one.
    one, four = (decoding(m=m, k=14336, groups=112) for m in (4, 8))
    assert one["splits"] == 1 and (four["splits"], four["blocks"]) == (4, 120)
    assert decoding(H200 | NO_CLUSTERS, m=8, k=14336, groups=112) is None
    # A slice has one group: two chunks of 128 columns, one of 64 or of three of them.
    assert decoding(m=1)["block_k"] == 2 * 128
    assert decoding(m=1, groups=64)["block_k"] == 2 * 64
    assert decoding(m=1, k=4224, groups=22)["block_k"] == 2 * 64
    assert decoding(m=1, k=4032, groups=21) is None  # an odd number of chunks


# Many tokens


# M, N, and microseconds on an H200 (bfloat16, K 4096, groups of 128) by "tokens of a tile /
# splits of K", prefixed by the tile's rows for wgmma. The fastest measured tile is among them.
SYNC_TIMES = {
    (32, 14336): {"32/1": 36.8, "32/2": 31.7, "32/4": 31.8, "32/8": 45.0},
    (64, 14336): {"64/1": 41.9, "64/2": 38.8, "64/4": 44.3, "64/8": 67.5},
    (128, 14336): {"128/1": 59.9, "128/2": 60.7, "128/4": 73.9, "128/8": 115.4},
    (256, 14336): {"128/1": 95.0, "128/2": 112.4, "128/4": 131.8},
    (1024, 14336): {"128/1": 310.7},
    (4096, 14336): {"128/1": 1308.4},
    (32, 4096): {"32/1": 37.5, "32/2": 25.6, "32/8": 22.9},
    (64, 4096): {"64/1": 41.1, "64/2": 28.5, "64/4": 27.3, "64/8": 28.7},
    (128, 4096): {"128/1": 58.8, "128/2": 41.8, "128/4": 39.0, "128/8": 50.0},
    (256, 4096): {"128/1": 58.9, "128/2": 41.4, "128/4": 59.1},
    (1024, 4096): {"128/1": 96.5},
    (4096, 4096): {"128/1": 357.2},
}
WGMMA_TIMES = {
    (32, 14336): {"128x32/1": 22.6},
    (64, 14336): {"128x64/1": 25.3},
    (128, 14336): {"128x128/1": 38.6, "128x128/2": 36.3, "128x128/4": 49.7, "256x128/2": 32.4},
    (256, 14336): {"128x128/1": 59.6, "128x128/2": 67.6, "128x256/1": 51.6, "256x128/1": 49.2},
    (1024, 14336): {"128x128/1": 202.2, "128x256/1": 197.2, "256x128/1": 191.0},
    (4096, 14336): {"128x128/1": 771.5, "128x256/1": 686.4, "256x128/1": 669.9},
    (32, 4096): {"128x32/3": 14.1},
    (64, 4096): {"128x64/3": 16.1, "64x64/2": 14.9},
    (256, 4096): {"128x128/1": 37.1, "128x128/2": 25.0, "128x128/4": 38.5, "128x256/2": 33.9},
    (1024, 4096): {"128x128/1": 59.8, "128x256/1": 52.3, "256x128/1": 50.5},
    (4096, 4096): {"128x128/1": 230.5, "128x256/1": 201.0, "256x128/1": 192.8},
}


@pytest.mark.parametrize("wgmma", [False, True], ids=["sync", "wgmma"])
def test_what_was_fastest_is_taken(wgmma):
    for (m, n), times in (WGMMA_TIMES if wgmma else SYNC_TIMES).items():
        choice = chosen("int4", H200 | dict(wgmma=wgmma), m=m, n=n)
        columns = choice["columns"]
        assert (choice["engine"] in ("large_m", "small_m")) == wgmma
        taken = f"{columns['tokens']}/{columns['splits']}"
        if wgmma:
            taken = f"{columns['rows']}x{taken}"
        assert taken in times and times[taken] <= 1.1 * min(times.values()), (m, n, taken)


@pytest.mark.parametrize("m", [17, 40, 64, 100, 128])
def test_split_tiles_run_in_one_wave(m):
    """Split tiles run in one wave: 132 SMs run 39 clusters of three, or 30 of four."""
    most, cut = {2: 66, 3: 39, 4: 30, 8: 15}, set()
    for n in (*range(64, 2048, 64), 3072, 4096, 4992, 5120, 8192):
        choice = chosen("int4", m=m, n=n)
        columns = choice["columns"]
        if choice["engine"] == "small_m" and columns["splits"] > 1:
            tiles = -(-n // columns["rows"]) * -(-m // columns["tokens"])
            assert tiles <= most[columns["splits"]]
            cut.add(columns["splits"])
    assert cut >= {2, 3, 4}


def test_few_tokens_are_left_to_the_other_engines():
    """And float32, odd groups and GPUs without wgmma."""
    for m in (17, 32, 33, 128, 129, 4096):
        assert chosen("int4", m=m)["engine"] in ("large_m", "small_m")
        for others in (dict(elem_size=4), dict(groups=128)):
            engine = "sync" if m <= 128 else "dense"
            assert chosen("int4", m=m, **others)["engine"] == engine
        assert chosen("int4", H200 | NO_WGMMA, m=m)["engine"] == "sync"
    assert chosen("int4", m=16)["engine"] == "decode"


def test_without_clusters_k_is_cut_where_tiles_are_few():
    for m, n, cut in ((64, 1024, True), (4096, 4096, False)):
        choice = chosen("int4", H200 | NO_CLUSTERS, m=m, n=n)
        assert choice["engine"] == "sync" and (choice["columns"]["splits"] > 1) == cut


# Every configuration, with why it is refused


def int4_refusal(choice: str, device=H200, **fields) -> str:
    return refusal("int4", problem("int4", device, **fields), choice)


def test_reasons_of_tiles_on_wgmma():
    small_m, large_m = (chosen("int4", m=m)["choice"].split(" /")[0] for m in (64, 8192))
    assert (small_m.split()[0], large_m.split()[0]) == ("small_m", "large_m")
    for splits in (2, 3, 4, 8):
        assert int4_refusal(f"{small_m} /{splits}") == ""
    short = dict(k=1024, groups=8)
    assert "leaves one of 3 splits empty" in int4_refusal(f"{small_m} /3", **short)
    assert "fewer rows" in int4_refusal(small_m, m=4097)
    for device in (H200 | NO_WGMMA, H200 | dict(clusters=0)):
        assert "Hopper" in int4_refusal(large_m, device)
    for changes in (dict(elem_size=4), dict(groups=128), dict(groups=1, k=4064)):
        assert "multiple of 64" in int4_refusal(large_m, **changes)
    assert "leaves one of 8 splits empty" in int4_refusal(f"{large_m} /8", k=192, groups=1)
    assert "the GPU has 65536" in int4_refusal(large_m, H200 | dict(shared_limit=65536))
    assert "2^31" in int4_refusal(large_m, m=2**40, n=2**40)


def test_only_small_m_tiles_split_k_into_three():
    """No tile splits K into five."""
    names = [c["choice"] for c in _C.candidates("int4", problem("int4"))]
    thirds = {name.split()[0] for name in names if name.endswith("/3")}
    assert thirds == {"small_m"} and not any(name.endswith("/5") for name in names)
    with pytest.raises(ValueError, match="int4 has no configuration called 'large_m 128x128 /3'"):
        int4_refusal("large_m 128x128 /3")


def test_reasons_of_tiles_for_few_tokens():
    tile = chosen("int4", m=8)["choice"]
    assert tile == "decode 16x8x256" and int4_refusal(tile, m=8) == ""
    assert int4_refusal(tile, m=9) == "the tile has fewer tokens"
    assert "multiple of 64" in int4_refusal(tile, m=8, elem_size=4)
    assert "does not divide a group" in int4_refusal(tile, m=8, groups=64)
    assert "not a multiple of the tile's k-block" in int4_refusal(tile, m=8, k=4224, groups=33)
    assert "shared memory" in int4_refusal(tile, m=8, k=65536, groups=512)
    assert "clusters of blocks" in int4_refusal(f"{tile} /4", H200 | dict(clusters=0), m=8)
    assert int4_refusal(f"{tile} /4", m=8) == ""


def test_every_product_may_dequantise_its_weight():
    for device in (H200, SMALL):
        for fields in (dict(m=1), dict(m=4096, elem_size=4), dict(k=8, groups=1)):
            assert int4_refusal("dense", device, **fields) == ""
