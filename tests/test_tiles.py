"""The choice of tiles for matmuls and attention: host code, tested without a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch

import torchweld
import torchweld._library as library

if library.build_facts()["cuda"] is None:
    pytest.skip("a CPU-only build chooses no tiles", allow_module_level=True)

import torchweld._C as _C

MATHS = ["float16", "bfloat16", "tf32", "float32"]
H200 = (132, 232448)
SMALL = (24, 101376)  # the least that sm_80 and newer chips offer a block: 99 KiB
SIZES = [1, 2, 7, 16, 17, 63, 64, 65, 512, 1000, 4096, 16385]
SHAPES = [(m, n, k) for m in SIZES for n in SIZES for k in SIZES]


def step(math: str) -> int:
    return 64 if math in ("float16", "bfloat16") else 32


ROWS = [1, 3, 4, 8, 31, 257, 1000, 8191, 8192, 16384, 16385, 32768, 65535, 65536, 131072, 262144]


def row_choices(**changes):
    """(problem, kernel, index) of every length, element size, direction, alignment and mask."""
    for n in ROWS + [262145, 400000, 10**6, 2**31]:
        for size in (2, 4):
            for backward in (False, True):
                for in_phase, masked in itertools.product((False, True), repeat=2):
                    problem = dict(n=n, elem_size=size, backward=backward, in_phase=in_phase)
                    problem |= dict(aligned=n * size % 16 == 0, tiled=True, masked=masked)
                    problem |= dict(clusters=True, shared_limit=H200[1]) | changes
                    yield problem, *_C.choose_softmax(**problem)


def test_a_row_takes_a_kernel_that_holds_it():
    for p, kernel, index in row_choices():
        if kernel == "tile":
            where = [p[k] for k in ("elem_size", "backward", "aligned", "masked")]
            tile = _C.softmax_tiles(*where)[index]
            assert tile["suits"] and p["n"] <= tile["capacity"]
        elif kernel == "ring":
            ring = _C.softmax_rings(p["elem_size"], p["backward"], p["aligned"])[index]
            assert p["in_phase"] and p["n"] <= ring["capacity"]
            assert ring["pieces"] >= 2 and ring["shared_bytes"] <= H200[1]
        else:
            assert index == -1 and (p["n"] > 16384 or not p["in_phase"])


# Columns, bytes of an element, the gradient, and what was fastest on an H200: tile or blocks a row.
FASTEST = [
    (16384, 4, False, "tile"), (32768, 4, False, "tile"), (50257, 4, False, 4),
    (65536, 4, False, 4), (262144, 4, False, 8),
    (16384, 2, False, "tile"), (20000, 2, False, "stream"), (24576, 2, False, "stream"),
    (32768, 2, False, 1), (32769, 2, False, 1), (50257, 2, False, 2), (65536, 2, False, 2),
    (131072, 2, False, 4), (262144, 2, False, 8),
    (16384, 4, True, "tile"), (32768, 4, True, 4), (65536, 4, True, 8), (151936, 4, True, 8),
    (16384, 2, True, 2), (32768, 2, True, 2), (65536, 2, True, 4), (151936, 2, True, 8),
    (262144, 2, True, 8),
]  # fmt: skip


@pytest.mark.parametrize(("n", "size", "backward", "fastest"), FASTEST)
def test_rows_take_what_was_measured_as_fastest(n, size, backward, fastest):
    kernel, index = _C.choose_softmax(n, size, True, backward, True, True, True, H200[1])
    rings = _C.softmax_rings(size, backward, True)
    assert fastest == (rings[index]["blocks_per_row"] if kernel == "ring" else kernel)


def test_scores_of_16_bits_take_what_was_measured_as_fastest():
    """Threads with 4 accesses each, up to 128 of them; then 128 with 8."""

    def tile(n, size=2, backward=False, masked=True):
        limits = (True, True, True, H200[1], masked)
        kernel, index = _C.choose_softmax(n, size, True, backward, *limits)
        assert kernel == "tile"
        found = _C.softmax_tiles(size, backward, True, masked)[index]
        return found["threads"], found["loads"]

    assert [tile(n) for n in (1024, 2048, 4096, 8192)] == [(32, 4), (64, 4), (128, 4), (128, 8)]
    assert [tile(n) for n in (1536, 3000, 5000)] == [(64, 4), (128, 4), (128, 8)]
    assert [tile(n) for n in (256, 512, 16384)] == [(32, 1), (32, 2), (512, 4)]
    for n in (64, 512, 1024, 2048, 4096, 8192, 16383):
        for size, backward in ((4, True), (2, True)):
            assert tile(n, size, backward) == tile(n, size, backward, masked=False)


def test_float32_rows_take_what_was_measured_as_fastest():
    """More than 4 accesses a thread where that keeps more rows on their way; not under a mask."""

    def loads(n, backward=False, masked=False):
        kernel, index = _C.choose_softmax(n, 4, True, backward, True, True, True, H200[1], masked)
        assert kernel == "tile"
        return _C.softmax_tiles(4, backward, True, masked)[index]["loads"]

    assert [loads(n) for n in (1024, 1025, 2048, 4096, 4097)] == [2, 8, 8, 8, 4]
    assert [loads(n, masked=True) for n in (1024, 2048, 4096)] == [2, 4, 4]
    assert [loads(n, backward=True) for n in (1024, 2048, 4096)] == [2, 4, 4]


def test_a_longer_row_takes_no_smaller_cluster():
    for size in (2, 4):
        for backward in (False, True):
            rings = [r for r in _C.softmax_rings(size, backward, True) if r["suits"]]
            assert all(ring["preferred_to"] <= ring["capacity"] for ring in rings)
            assert rings[-1]["preferred_to"] == rings[-1]["capacity"]
            ends = [ring["preferred_to"] for ring in rings]
            assert ends == sorted(ends)


def test_rows_that_start_anywhere_have_less_than_an_access_beside_their_whole_ones():
    for size in (2, 4):
        aligned = _C.softmax_tiles(size, False, True)
        for tile, peeled in zip(aligned, _C.softmax_tiles(size, False, False), strict=True):
            assert peeled["capacity"] - tile["capacity"] == 16 // size - 1


def test_a_ring_holds_whole_accesses():
    for size in (2, 4):
        for backward in (False, True):
            pairs = zip(*(_C.softmax_rings(size, backward, a) for a in (True, False)), strict=True)
            for aligned, shifted in pairs:
                for most in ("capacity", "read_once_to"):
                    assert aligned[most] - shifted[most] == 16 // size - 1


def test_a_ring_reads_at_most_a_quarter_of_what_it_keeps_twice():
    """One of 16 blocks nothing."""
    for size in (2, 4):
        for backward in (False, True):
            for ring in _C.softmax_rings(size, backward, True):
                columns = ring["blocks_per_row"] * ring["piece_bytes"] // size
                kept, most = ring["read_once_to"] // columns, ring["capacity"] // columns
                assert kept == ring["pieces"] and most <= kept * 5 / 4
                assert (kept < most) == (ring["blocks_per_row"] <= 8)


def test_rows_are_read_once_to_262144():
    """Without clusters of 16 but for an eighth of the gradient's longest ones in 4 bytes."""
    for of_16 in (True, False):
        for p, kernel, index in row_choices(clusters_of_16=of_16):
            read_twice = p["elem_size"] == 2 and not p["backward"] and 16384 < p["n"] <= 24576
            if p["in_phase"] and p["n"] <= 262144 and not read_twice:
                assert kernel != "stream", p
                if kernel == "ring":
                    ring = _C.softmax_rings(p["elem_size"], p["backward"], p["aligned"])[index]
                    partly = p["backward"] and p["elem_size"] == 4 and p["n"] > 229376
                    assert (p["n"] > ring["read_once_to"]) == (partly and not of_16), p


# Columns, bytes of an element, the gradient, and blocks a row where clusters of 16 fit and where
# they don't; 0 for rows that are read twice.
VERY_LONG = [
    (229376, 4, True, 8, 8), (229380, 4, True, 16, 8), (262144, 4, True, 16, 8),
    (278528, 4, True, 16, 8), (278532, 4, True, 16, 0), (458752, 4, True, 16, 0),
    (458756, 4, True, 0, 0),
    (458752, 2, True, 8, 8), (458760, 2, True, 16, 8), (917504, 2, True, 16, 0),
    (917512, 2, True, 0, 0),
    (500000, 4, False, 8, 8), (1000000, 2, False, 8, 8),
]  # fmt: skip


@pytest.mark.parametrize(("n", "size", "backward", "fits", "does_not"), VERY_LONG)
def test_the_gradients_longest_rows_take_16_blocks_where_these_fit(
    n, size, backward, fits, does_not
):
    rings = _C.softmax_rings(size, backward, True)
    for clusters_of_16, blocks in ((True, fits), (False, does_not)):
        problem = dict(n=n, elem_size=size, aligned=True, backward=backward, tiled=True)
        problem |= dict(clusters=True, in_phase=True, shared_limit=H200[1])
        kernel, index = _C.choose_softmax(**problem, clusters_of_16=clusters_of_16)
        assert (rings[index]["blocks_per_row"] if kernel == "ring" else 0) == blocks


def test_chips_without_clusters_or_memory_take_no_ring():
    for changes in (dict(clusters=False), dict(shared_limit=SMALL[1])):
        assert all(kernel != "ring" for _, kernel, _ in row_choices(**changes))
    assert all(kernel == "stream" for _, kernel, _ in row_choices(tiled=False))


@pytest.mark.parametrize("limits", [H200, SMALL], ids=["h200", "small"])
@pytest.mark.parametrize("math", MATHS)
def test_every_product_has_a_tile_that_fits_the_device(math, limits):
    tiles = _C.gemm_tiles(math)
    for m, n, k in SHAPES:
        for batch, gated in ((1, False), (3, True)):
            choice = _C.choose_gemm(m, n, k, batch, gated, gated, math, *limits)
            tile = tiles[choice["tile"]]
            assert tile["suits"] and tile["shared_bytes"] <= limits[1]
            assert tile["threads"] == 32 * tile["warps"][0] * tile["warps"][1]


@pytest.mark.parametrize("math", MATHS)
def test_splits_cover_k_once_and_none_is_empty(math):
    for m, n, k in SHAPES:
        choice = _C.choose_gemm(m, n, k, 1, False, False, math, *H200)
        splits, k_split = choice["splits"], choice["k_split"]
        assert k_split % step(math) == 0
        assert (splits - 1) * k_split < k <= splits * k_split
        columns = -(-n // 8) * 8
        assert choice["workspace_floats"] == (splits * m * columns if splits > 1 else 0)


def test_small_products_with_a_long_k_are_split():
    choice = _C.choose_gemm(16, 4096, 4096, 1, False, False, "bfloat16", *H200)
    assert choice["splits"] > 1
    choice = _C.choose_gemm(4096, 4096, 4096, 1, False, False, "bfloat16", *H200)
    assert choice["splits"] == 1


def test_a_k_beyond_32_bits_is_split():
    for math in ("bfloat16", "tf32", "float32"):
        choice = _C.choose_gemm(1, 1, 2**33, 1, False, False, math, *H200)
        assert choice["k_split"] < 2**31 and choice["splits"] * choice["k_split"] >= 2**33


@pytest.mark.parametrize("math", MATHS)
def test_attention_tiles_hold_both_head_dims(math):
    for dims in ((1, 1), (64, 64), (65, 3), (3, 128), (129, 64), (256, 256)):
        tile = _C.attention_tile(1024, 1024, *dims, math)
        assert tile["head_dim"] >= max(dims) and tile["shared_bytes"] <= SMALL[1]
        for limit in (H200[1], SMALL[1]):
            tile = _C.attention_backward_tile(*dims, math, limit)
            if limit == SMALL[1] and max(dims) > 128 and step(math) == 32:
                assert tile == {}  # the pieces of fp32 take six bytes a value
                continue
            assert tile["head_dim"] >= max(dims) and tile["shared_bytes"] <= limit
    assert _C.attention_tile(1024, 1024, 257, 8, math) == {}
    assert _C.attention_backward_tile(8, 257, math, H200[1]) == {}


def test_explain_names_the_products_of_a_matmul():
    x = torch.empty(512, 768, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(3072, 768, dtype=torch.bfloat16, device="meta")
    forward = torchweld.explain("linear", x, weight)
    assert forward.kernel.startswith("matmul") and "(512, 3072, 768)" in forward.tile["y"]
    backward = torchweld.explain("linear_backward", x.new_empty(512, 3072), x, weight)
    assert set(backward.tile) == {"dx", "dweight"}
    assert "(3072, 768, 512)" in backward.tile["dweight"]
    gated = torchweld.explain("gated_linear", x, weight)
    assert "(512, 1536, 768)" in gated.tile["y"]


def test_explain_names_attentions_tile():
    query = torch.empty(1, 2, 8, 64, dtype=torch.bfloat16, device="meta")
    assert torchweld.explain("attention", query, query, query).tile["head_dim"] == 64
    wide = query.new_empty(1, 2, 8, 300)
    assert torchweld.explain("attention", wide, wide, wide).kernel == "general"


def test_explain_names_the_kernel_of_a_convolution():
    def explained(dtype, *sizes):
        *shape, kernel = sizes
        x = torch.empty(shape, dtype=dtype, device="meta")
        return torchweld.explain("conv2d", x, x.new_empty(kernel, kernel))

    half, single = torch.bfloat16, torch.float32
    for size, rows in ((1, 32), (3, 32), (4, 32), (5, 32), (7, 64), (8, 64)):
        cells = explained(half, 9, 33, 64, size)
        assert cells.kernel == "cells, on tensor cores"
        assert cells.tile == {"tile_rows": rows, "ahead": 2}
    assert explained(half, 9, 64, 64, 11).tile == {"tile_rows": 128, "tile_columns": 64}
    for height, size in ((8, 3), (1, 4), (5, 5), (8, 7)):
        assert explained(half, 9, height, 8, size).kernel == "images of 8 columns, on tensor cores"
        assert explained(half, 9, height, 8, size).tile == {}
    for height, width, size in ((9, 8, 3), (8, 7, 5), (8, 16, 4), (8, 8, 8)):
        assert explained(half, 9, height, width, size).kernel == "cells, on tensor cores"
    assert explained(single, 9, 8, 8, 7).kernel == "small images, through shared memory"
    assert explained(single, 9, 16, 16, 7).kernel == "direct, in registers"
    assert explained(single, 9, 16, 16, 6).kernel == "general"


# Products with a 4-bit weight

GROUPS = [8, 24, 32, 64, 128, 0]  # 0: all of K
WIDE = _C.int4_wide_tiles()
FIRST_WIDE = len(_C.int4_tiles(2)) + len(_C.int4_decode_tiles(1, 16, 64, 1, 132))


def int4_tile(choice: dict) -> dict:
    """Of 16-bit x, in the ring or wide."""
    wide = choice["tile"] - FIRST_WIDE
    return WIDE[wide] if wide >= 0 else _C.int4_tiles(2)[choice["tile"]]


@pytest.mark.parametrize("limits", [H200, SMALL], ids=["h200", "small"])
@pytest.mark.parametrize("elem_size", [2, 4])
def test_int4_parts_cover_k_once_in_a_tile_that_fits(elem_size, limits):
    tiles = _C.int4_tiles(elem_size)
    for m, n, k in SHAPES:
        for group in GROUPS:
            k_padded = -(-k // (group or 8)) * (group or 8)
            groups = k_padded // group if group else 1
            whole = k_padded % (groups * 64) == 0
            for clusters, warpgroups in ((False, False), (True, False), (True, True)):
                problem = m, n, k_padded, groups, elem_size, *limits, clusters, warpgroups
                choice = _C.choose_int4(*problem)
                if choice["tile"] < 0:
                    assert m > 128 and not (whole and elem_size == 2)
                    continue
                parts, chunks = choice["parts"], choice["part_chunks"]
                wide = choice["tile"] >= FIRST_WIDE
                # Chips with products of warpgroups have the memory for their tiles.
                suits = whole and elem_size == 2 and m > 16
                assert wide == (suits and warpgroups and limits == H200)
                if wide:
                    tile = int4_tile(choice)
                elif choice["tile"] >= len(tiles):
                    decode = _C.int4_decode_tiles(m, n, k_padded, groups, limits[0])
                    tile = decode[choice["tile"] - len(tiles)]
                    assert parts == 1 or (clusters and tile["blocks"] == parts * tile["owners"])
                else:
                    tile = tiles[choice["tile"]]
                    assert tile["suits" if whole else "suits_any_group"]
                assert tile["shared_bytes"] <= limits[1]
                assert chunks % tile["chunks"] == 0 or parts == 1
                assert (parts - 1) * chunks < -(-k_padded // 64) <= parts * chunks
                assert choice["cluster"] == (clusters and parts > 1)


def test_int4_takes_the_smallest_tile_and_splits_a_long_k():
    """In float32, and where few tokens have no tiles of their own."""
    few, many = ((1, 8), (8, 8), (9, 16), (17, 32)), ((17, 32), (33, 64), (65, 128), (4096, 128))
    for size, sizes in ((4, few), (2, many)):
        for m, tokens in sizes:
            choice = _C.choose_int4(m, 4096, 4096, 32, size, *H200, True)
            assert _C.int4_tiles(size)[choice["tile"]]["tokens"] == tokens
    assert _C.choose_int4(1, 4096, 4096, 32, 4, *H200, True)["parts"] > 1
    assert _C.choose_int4(4096, 4096, 4096, 32, 2, *H200, True)["parts"] == 1


# Passes over a matrix

# (reads, column values, column sums): a fill, mul_relu, its gradient, and the sums both ways
PASSES = [(0, True, False), (1, False, False), (2, False, False), (1, False, True), (1, True, True)]
PASS_SIZES = [1, 2, 3, 8, 31, *range(63, 68), 127, 300, 511, 1000, 1024, 1025, 2049, 4099, 9000]
PASS_SIZES += [50000]  # more than a block has of a row at a time


def pass_plans():
    """(rows, n, the pass, plan) of matrices that start anywhere, with and without gaps."""
    for rows in (1, 2, 5, 33, 1000):
        for n in PASS_SIZES:
            for size in (2, 4):
                for reads, values, sums in PASSES:
                    for shift, gap in ((0, 0), (0, 8), (1, 0), (3, 2)):
                        stride = n + (gap if sums else 0)
                        plan = _C.matrix_pass_plan(
                            rows, n, size, reads, values, sums, shift % (16 // size), stride, 132
                        )
                        yield rows, n, (reads, values, sums), plan


def test_blocks_of_a_matrix_pass_cover_every_row_once():
    for rows, _, (_, values, sums), p in pass_plans():
        assert p["blocks"] == p["tiles"] * p["phases"] * p["chunks"]
        phase_rows = -(-rows // p["phases"])
        assert (p["chunks"] - 1) * p["rows_per_chunk"] < phase_rows
        assert p["chunks"] * p["rows_per_chunk"] >= phase_rows
        assert p["rows_per_chunk"] % p["batch"] == 0
        if values or sums:  # a block's rows start at the same distance from a boundary
            heads = p["heads"]
            assert all(a == b for a, b in zip(heads, heads[p["phases"] :], strict=False))
        else:
            assert p["phases"] == 1


def test_lanes_of_a_matrix_pass_cover_every_column_once():
    for _, n, _, p in pass_plans():
        if p["whole_rows"]:  # the lanes go on along the row
            assert p["lanes"] % 32 == 0 and p["lanes"] <= 512 and p["heads"][0] == 0
            assert p["tiles"] == p["groups"] == p["rows_per_chunk"] == 1 and not p["peeled"]
            continue
        assert p["lanes"] & (p["lanes"] - 1) == 0
        assert 32 <= p["lanes"] * p["groups"] <= 256
        for head in set(p["heads"]):
            whole = (n - head) // p["elems"]
            tail = n - head - whole * p["elems"]
            assert 0 <= head < p["elems"] and whole >= 1 and tail < p["elems"]
            assert whole <= p["tiles"] * p["lanes"] < whole + 1 + p["lanes"]
            assert p["peeled"] or head == tail == 0


def test_a_row_longer_than_a_block_is_not_left_to_idle_lanes():
    for accesses, lanes in ((1, 1), (5, 8), (33, 64), (192, 64), (256, 256), (300, 128)):
        p = _C.matrix_pass_plan(64, accesses * 4, 4, 1, False, False, 0, accesses * 4, 132)
        assert p["lanes"] == lanes and p["tiles"] == -(-accesses // lanes)


def test_blocks_have_whole_rows_where_a_tile_does_not():
    """In 16 bits, where rows alone are summed; if they are long, only where they are many."""

    def lanes(n, rows=33, size=2, reads=2, shift=0, sms=132):
        p = _C.matrix_pass_plan(rows, n, size, reads, False, False, shift, n, sms)
        assert p["row_parts"] > 1 or not p["scratch"]
        return p["lanes"] if p["whole_rows"] else None

    assert lanes(2048) is None and lanes(2056) == 96
    # Whole warps, and nearly as many accesses as the row has.
    for n in range(2056, 16392, 8):
        assert 0 <= lanes(n) * 4 - n // 8 < 4 * 32
    assert lanes(16384) == 512
    assert lanes(131072, rows=2112) is None  # tiles were faster
    assert lanes(16392, rows=4223) is None and lanes(16392, rows=4224) == 512
    assert lanes(1 << 20, rows=4224) == 512 and lanes(16392, rows=512, sms=16) == 512
    for other in ({"size": 4}, {"reads": 1}, {"shift": 1}, {"n": 16385}, {"n": 16388}):
        assert lanes(**{"n": 16384, "rows": 65536, **other}) is None


def test_scratch_of_a_matrix_pass_holds_every_part_of_a_sum():
    for rows, n, (reads, _, sums), p in pass_plans():
        assert p["row_parts"] == p["tiles"] + p["peeled"]
        assert p["column_parts"] == p["phases"] * p["chunks"]
        row_parts = p["row_parts"] if sums or reads == 2 else 1
        column_parts = p["column_parts"] if sums else 1
        expected = rows * row_parts if row_parts > 1 else 0
        expected += n * column_parts if column_parts > 1 else 0
        assert p["scratch"] == expected


@pytest.mark.parametrize("size", [2, 4])
def test_sums_of_columns_fill_the_device_in_whole_rounds(size):
    for n in (4096, 16384, 16383, 200000, 300000, 1 << 20):
        p = _C.matrix_pass_plan(65536, n, size, 1, True, True, 0, n, 132)
        rounds = -(-p["blocks"] // 264)
        assert p["blocks"] >= 0.85 * 264 * rounds


def int4_decode_tile(
    m: int, n: int, k: int, groups: int, limits=H200, elem_size=2, clusters=True
) -> dict | None:
    """The tile for few tokens that a product takes, None where it takes the ring."""
    rings = len(_C.int4_tiles(elem_size))
    index = _C.choose_int4(m, n, k, groups, elem_size, *limits, clusters)["tile"] - rings
    return _C.int4_decode_tiles(m, n, k, groups, limits[0])[index] if index >= 0 else None


@pytest.mark.parametrize("limits", [H200, SMALL], ids=["h200", "small"])
def test_int4_decode_divides_every_tile_of_rows_once(limits):
    taken = {1: 0, 4: 0}
    for m in range(1, 18):
        for n in SIZES:
            for group in (64, 128, 192, 4096):
                for k in (group, 2 * group, 3 * group, 32 * group, 8192):
                    if k % group:
                        continue
                    tile = int4_decode_tile(m, n, k, k // group, limits)
                    if tile is None:
                        continue
                    assert tile["refusal"] == "" and m <= tile["tokens"]
                    assert group // 64 % tile["chunks"] == 0
                    assert tile["shared_bytes"] <= limits[1]
                    assert tile["blocks"] <= limits[0] and tile["more_tiles"] < tile["owners"]
                    parts = tile["blocks"] // tile["owners"]
                    assert tile["blocks"] == parts * tile["owners"]
                    taken[parts] += 1
                    rows = tile["owners"] * tile["base_tiles"] + tile["more_tiles"]
                    assert rows == -(-n // 16)
    assert taken[1] > 500 and taken[4] > 20


def test_int4_decode_ends_where_x_is_too_large():
    """And with more tokens, float32, groups that are no whole chunks."""
    assert int4_decode_tile(8, 4096, 4096, 32)["tokens"] == 8
    assert int4_decode_tile(9, 4096, 4096, 32)["tokens"] == 16
    assert int4_decode_tile(17, 4096, 4096, 32) is None
    assert int4_decode_tile(1, 4096, 4096, 32, elem_size=4) is None
    assert int4_decode_tile(1, 4096, 4096, 128) is None
    assert int4_decode_tile(8, 131072, 4096, 32)["blocks"] == 132
    assert int4_decode_tile(16, 14336, 4096, 32)["tokens"] == 16
    assert int4_decode_tile(16, 4096, 65536, 512) is None
    # A cluster of four blocks holds four times the x; not all multiprocessors have room for one.
    one, four = (int4_decode_tile(m, 4096, 14336, 112) for m in (4, 8))
    assert one["blocks"] == one["owners"] and four["blocks"] == 4 * four["owners"] == 120
    assert int4_decode_tile(8, 4096, 14336, 112, clusters=False) is None
    # A slice has one group: two chunks of 128 columns, one of 64 or of three of them.
    assert int4_decode_tile(1, 4096, 4096, 32)["chunks"] == 2
    assert int4_decode_tile(1, 4096, 4096, 64)["chunks"] == 1
    assert int4_decode_tile(1, 4096, 4224, 22)["chunks"] == 1
    assert int4_decode_tile(1, 4096, 4032, 21) is None  # an odd number of chunks


def test_explain_names_a_4_bit_products_tile():
    n, k, groups = 4096, 4096, 32
    weight = [torch.empty(n, k // 8, dtype=torch.int32, device="meta")]
    weight += [torch.empty(n, groups, dtype=torch.bfloat16, device="meta")]
    weight += [torch.empty(n, groups // 8, dtype=torch.int32, device="meta")]
    for m, kernel in ((4, "4-bit decoding"), (32, "4-bit tiles")):
        x = torch.empty(m, k, dtype=torch.bfloat16, device="meta")
        explanation = torchweld.explain("int4_linear", x, *weight)
        assert explanation.kernel.startswith(kernel), explanation
        assert explanation.tile["tokens"] >= m and "shared_bytes" in explanation.tile


# M, N, and microseconds on an H200 (bfloat16, K 4096, groups of 128) by "tokens of a tile / parts
# of K", with the rows of the tile before them where they are wide. Of all that was timed the
# fastest is among them.
RING_TIMES = {
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
WIDE_TIMES = {
    (32, 14336): {"128x32/1": 22.6},
    (64, 14336): {"128x64/1": 25.3},
    (128, 14336): {"128x128/1": 39.2, "128x128/2": 36.9, "128x128/4": 51.0, "256x128/2": 34.9},
    (256, 14336): {"128x128/1": 59.8, "128x128/2": 68.4, "128x256/1": 53.3, "128x256/2": 65.6},
    (1024, 14336): {"128x128/1": 205.1, "128x256/1": 204.9},
    (4096, 14336): {"128x128/1": 815.5, "128x256/1": 740.1},
    (32, 4096): {"128x32/3": 14.1},
    (64, 4096): {"128x64/3": 16.1, "64x64/2": 14.9},
    (256, 4096): {"128x128/1": 37.1, "128x128/2": 25.0, "128x128/4": 38.5, "128x256/2": 33.9},
    (1024, 4096): {"128x128/1": 60.8, "128x256/1": 54.8},
    (4096, 4096): {"128x128/1": 233.0, "128x256/1": 209.3},
}


@pytest.mark.parametrize("warpgroups", [False, True], ids=["ring", "wide"])
def test_int4_takes_what_was_fastest(warpgroups):
    for (m, n), times in (WIDE_TIMES if warpgroups else RING_TIMES).items():
        choice = _C.choose_int4(m, n, 4096, 32, 2, *H200, True, warpgroups)
        tile = int4_tile(choice)
        taken = f"{tile['tokens']}/{choice['parts']}"
        if warpgroups:
            taken = f"{tile['rows']}x{taken}"
        assert taken in times and times[taken] <= 1.1 * min(times.values()), (m, n, taken)


@pytest.mark.parametrize("m", [17, 40, 64, 100, 128])
def test_int4_wide_tiles_find_room_for_their_clusters(m):
    """In one wave where K is in parts: of 132 SMs 39 clusters of three and 30 of four."""
    most, cut = {2: 66, 3: 39, 4: 30, 8: 15}, set()
    for n in (*range(64, 2048, 64), 3072, 4096, 4992, 5120, 8192):
        choice = _C.choose_int4(m, n, 4096, 32, 2, *H200, True, True)
        tile, parts = int4_tile(choice), choice["parts"]
        if tile["threads"] == 512 and parts > 1:
            assert -(-n // tile["rows"]) * -(-m // tile["tokens"]) <= most[parts]
            cut.add(parts)
    assert cut >= {2, 3, 4}


def test_int4_wide_tiles_leave_few_tokens_to_the_ring():
    """And float32, odd groups and GPUs without products of warpgroups."""
    for m in (17, 32, 33, 128, 129, 4096):
        assert _C.choose_int4(m, 4096, 4096, 32, 2, *H200, True, True)["tile"] >= FIRST_WIDE
        for changed in ((32, 4, *H200, True, True), (128, 2, *H200, True, True)):
            assert _C.choose_int4(m, 4096, 4096, *changed)["tile"] < FIRST_WIDE
        assert _C.choose_int4(m, 4096, 4096, 32, 2, *H200, True)["tile"] < FIRST_WIDE
    assert _C.choose_int4(16, 4096, 4096, 32, 2, *H200, True, True)["tile"] < FIRST_WIDE


def test_int4_without_clusters_cuts_k_where_tiles_are_few():
    for m, n, cut in ((64, 1024, True), (4096, 4096, False)):
        assert (_C.choose_int4(m, n, 4096, 32, 2, *H200, False)["parts"] > 1) == cut


def test_explain_names_a_wide_tile():
    x = torch.empty(64, 4096, dtype=torch.bfloat16, device="meta")
    weight = [
        torch.empty(4096, 512, dtype=torch.int32, device="meta"),
        torch.empty(4096, 32, dtype=torch.bfloat16, device="meta"),
        torch.empty(4096, 4, dtype=torch.int32, device="meta"),
    ]
    if not torch.cuda.is_available():
        explanation = torchweld.explain("int4_linear", x, *weight)
        assert explanation.kernel == "4-bit tiles (wgmma)" and explanation.tile["tokens"] >= 32
    explanation = torchweld.explain(
        "int4_linear", x.float(), weight[0], weight[1].float(), weight[2]
    )
    assert explanation.kernel == "4-bit tiles (mma.sync)"


# scalar_attention


@pytest.mark.parametrize("backward", [False, True])
def test_splits_of_a_sweep_cover_what_is_streamed_once(backward):
    for n in (1, 31, 32, 33, 1000, 4096, 65_536, 2**24):
        for sms in (1, 16, 132):
            sweeps = _C.scalar_attention_sweeps(n, backward, sms)
            assert len(sweeps) == (2 if backward else 1)
            for sweep in sweeps:
                assert (sweep["splits"] - 1) * sweep["per_split"] < n
                assert sweep["splits"] * sweep["per_split"] >= n
                assert 0 <= sweep["polynomial"] <= sweep["owners"]
