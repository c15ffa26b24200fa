"""Which kernel a softmax's rows take: host code, tested without a GPU."""

from __future__ import annotations

import itertools

import pytest

from choices_helpers import _C, H200, SMALL, chosen, problem, refusal

FLAGS = (False, True)
LENGTHS = [1, 3, 4, 8, 31, 257, 1000, 8191, 8192, 16384, 16385, 32768, 65535, 65536, 131072]
LENGTHS += [262144, 262145, 400000, 10**6, 2**31]


def row_choices(device=H200, **changes):
    """(fields, choice) of every length, element size, direction, alignment and mask."""
    for n, size in itertools.product(LENGTHS, (2, 4)):
        for backward, in_phase, masked in itertools.product(FLAGS, repeat=3):
            fields = dict(n=n, elem_size=size, backward=backward, in_phase=in_phase)
            fields |= dict(masked=masked, aligned=n * size % 16 == 0) | changes
            yield fields, chosen("softmax", device, **fields)


def listed(engine: str, **fields) -> list[dict]:
    """Every tile or ring, the illegal ones too, in the order of preference."""
    numbers = problem("softmax", **fields)
    return [c for c in _C.candidates("softmax", numbers) if c["engine"] == engine]


def blocks_or_engine(choice: dict) -> int | str:
    return choice["columns"]["cluster"] if choice["engine"] == "ring" else choice["engine"]


def chunk_bytes(ring: dict) -> int:
    """Bytes of a tensor in a block, for the group of threads that computes it."""
    columns = ring["columns"]
    return columns["threads"] // columns["groups"] * columns["loads"] * 16


def kept_chunks(ring: dict, size: int) -> int:
    """Chunks of a row that is read once, in a block."""
    row_bytes = ring["columns"]["read_once_to"] * size
    return row_bytes // (ring["columns"]["cluster"] * chunk_bytes(ring))


def test_a_row_takes_a_kernel_that_holds_it():
    for fields, choice in row_choices():
        columns = choice["columns"]
        assert choice["refusal"] == ""
        if choice["engine"] == "tile":
            assert fields["n"] <= columns["capacity"]
        elif choice["engine"] == "ring":
            assert fields["in_phase"] and fields["n"] <= columns["capacity"]
            assert kept_chunks(choice, fields["elem_size"]) >= 2
            assert columns["ring_bytes"] <= H200["shared_limit"]
        else:
            assert choice["choice"] == "stream" and (fields["n"] > 16384 or not fields["in_phase"])


# Columns, bytes of an element, the gradient, and the fastest choice on an H200: tile, or blocks per
# row.
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
    assert blocks_or_engine(chosen("softmax", n=n, elem_size=size, backward=backward)) == fastest


def test_scores_of_16_bits_take_what_was_measured_as_fastest():
    """Threads with 4 accesses each, up to 128 of them; then 128 with 8."""

    def tile(n, size=2, backward=False, masked=True):
        fields = dict(n=n, elem_size=size, backward=backward, masked=masked)
        choice = chosen("softmax", **fields)
        assert choice["engine"] == "tile"
        return choice["tile"]

    assert [tile(n) for n in (1024, 2048, 4096, 8192)] == ["32x4", "64x4", "128x4", "128x8"]
    assert [tile(n) for n in (1536, 3000, 5000)] == ["64x4", "128x4", "128x8"]
    assert [tile(n) for n in (256, 512, 16384)] == ["32x1", "32x2", "512x4"]
    for n in (64, 512, 1024, 2048, 4096, 8192, 16383):
        for size, backward in ((4, True), (2, True)):
            assert tile(n, size, backward) == tile(n, size, backward, masked=False)


def test_float32_rows_take_what_was_measured_as_fastest():
    """More than 4 accesses a thread where that keeps more rows on their way; not under a mask."""

    def loads(n, backward=False, masked=False):
        choice = chosen("softmax", n=n, backward=backward, masked=masked)
        assert choice["engine"] == "tile"
        return choice["columns"]["loads"]

    assert [loads(n) for n in (1024, 1025, 2048, 4096, 4097)] == [2, 8, 8, 8, 4]
    assert [loads(n, masked=True) for n in (1024, 2048, 4096)] == [2, 4, 4]
    assert [loads(n, backward=True) for n in (1024, 2048, 4096)] == [2, 4, 4]


@pytest.mark.parametrize("of_16", FLAGS)
@pytest.mark.parametrize("backward", FLAGS)
@pytest.mark.parametrize("size", [2, 4])
def test_a_longer_row_takes_no_smaller_cluster(size, backward, of_16):
    """The largest cluster runs every row that fits."""
    device = H200 | dict(clusters_of_16=of_16)
    fields = dict(elem_size=size, backward=backward)
    legal = [
        c
        for c in _C.candidates("softmax", problem("softmax", device, n=8, **fields))
        if c["engine"] == "ring" and not c["refusal"]
    ]
    most = legal[-1]["columns"]["capacity"]
    assert most == max(ring["columns"]["capacity"] for ring in legal)
    taken = []
    for end in range(1024, most + 1025, 1024):
        for n in (end, end + 16 // size):
            choice = chosen("softmax", device, n=n, **fields)
            if choice["engine"] == "ring":
                taken.append(choice["columns"]["cluster"])
            elif taken:
                assert choice["engine"] == "stream" and n > most
    assert taken == sorted(taken) and taken[-1] == legal[-1]["columns"]["cluster"]


def test_rows_that_start_anywhere_have_less_than_an_access_beside_their_whole_ones():
    for size in (2, 4):
        pairs = zip(*(listed("tile", elem_size=size, aligned=a) for a in FLAGS), strict=True)
        for peeled, tile in pairs:
            beside = peeled["columns"]["capacity"] - tile["columns"]["capacity"]
            assert peeled["choice"] == tile["choice"] and beside == 16 // size - 1


def test_a_ring_holds_whole_accesses():
    for size, backward in itertools.product((2, 4), FLAGS):
        fields = dict(elem_size=size, backward=backward)
        pairs = zip(*(listed("ring", aligned=a, **fields) for a in FLAGS), strict=True)
        for shifted, aligned in pairs:
            for most in ("capacity", "read_once_to"):
                assert aligned["columns"][most] - shifted["columns"][most] == 16 // size - 1


def test_a_ring_reads_at_most_a_quarter_of_what_it_keeps_twice():
    """One of 16 blocks nothing."""
    for size, backward in itertools.product((2, 4), FLAGS):
        for ring in listed("ring", elem_size=size, backward=backward):
            columns = ring["columns"]
            kept = kept_chunks(ring, size)
            slot = chunk_bytes(ring) * (2 if backward else 1)  # y and dy
            assert kept * slot <= columns["ring_bytes"] < (kept + 1) * slot
            most = columns["capacity"] * size // (columns["cluster"] * chunk_bytes(ring))
            assert most <= kept * 5 / 4 and (kept < most) == (columns["cluster"] <= 8)


def test_rows_are_read_once_to_262144():
    """Without clusters of 16, only the longest eighth of 4-byte gradients is read twice."""
    for of_16 in FLAGS:
        for p, choice in row_choices(H200 | dict(clusters_of_16=of_16)):
            read_twice = p["elem_size"] == 2 and not p["backward"] and 16384 < p["n"] <= 24576
            if p["in_phase"] and p["n"] <= 262144 and not read_twice:
                assert choice["engine"] != "stream", p
                partly = p["backward"] and p["elem_size"] == 4 and p["n"] > 229376
                twice = p["n"] > choice["columns"]["read_once_to"]
                assert twice == (partly and not of_16), p
                assert ("read twice" in choice["kernel"]) == twice


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
    for of_16, blocks in ((1, fits), (0, does_not)):
        device = H200 | dict(clusters_of_16=of_16)
        choice = chosen("softmax", device, n=n, elem_size=size, backward=backward)
        assert blocks_or_engine(choice) == (blocks or "stream")


def test_chips_without_clusters_or_memory_take_no_ring():
    without = H200 | dict(clusters=0, clusters_of_16=0)
    for device in (without, H200 | dict(shared_limit=SMALL["shared_limit"]), SMALL):
        assert all(choice["engine"] != "ring" for _, choice in row_choices(device))
    assert all(choice["engine"] == "stream" for _, choice in row_choices(tiled=False))


def test_softcap_and_sinks_take_rows_in_registers_or_read_twice():
    for fields, choice in row_choices(masked=True, capped=True):
        if fields["backward"]:
            assert choice["engine"] == "stream"
            threads, accesses = choice["columns"]["threads"], fields["n"] * fields["elem_size"] / 16
            assert threads == 512 or threads - 32 < accesses <= threads
        else:
            tiled = chosen("softmax", **fields | dict(capped=0))["engine"] == "tile"
            assert choice["engine"] == "tile" or not tiled


# Every configuration, with why it is refused


def test_tiles_and_rings_hold_the_row():
    """A configuration for such rows is refused where it is too short for one, and only there."""
    for n, size in ((1000, 4), (1001, 2), (40_000, 2), (300_000, 4), (10**6, 2)):
        for backward, masked in itertools.product(FLAGS, repeat=2):
            fields = dict(elem_size=size, aligned=n * size % 16 == 0)
            fields |= dict(backward=backward, masked=masked)
            short = _C.candidates("softmax", problem("softmax", n=1, **fields))
            found = _C.candidates("softmax", problem("softmax", n=n, **fields))
            for of_one, candidate in zip(short, found, strict=True):
                holds = candidate["columns"]["capacity"] >= n or candidate["engine"] == "stream"
                assert (candidate["refusal"] == "") == (holds and of_one["refusal"] == "")
            engines = [candidate["engine"] for candidate in found]
            assert engines == sorted(engines, key=("tile", "ring", "stream").index)
            assert engines.count("stream") == 1 and found[-1]["refusal"] == ""


def softmax_refusal(choice: str, device=H200, **fields) -> str:
    return refusal("softmax", problem("softmax", device, **fields), choice)


def test_reasons_of_a_softmax():
    for choice in ("tile 32x1", "ring 1"):
        assert "scale is 0" in softmax_refusal(choice, n=64, tiled=False)
    assert softmax_refusal("stream", n=64, tiled=False) == ""
    assert "registers" in softmax_refusal("tile 1024x8", n=64, elem_size=2, backward=True)
    assert softmax_refusal("tile 32x1", n=129) == "holds 128 elements, the row has 129"
    for size, changes in ((2, {}), (2, dict(masked=True, backward=True)), (4, dict(masked=True))):
        for_scores = softmax_refusal("tile 64x4", n=64, elem_size=size, **changes)
        assert for_scores == "for 16-bit scores under a mask"
    scores = dict(n=64, elem_size=2, masked=True)
    assert softmax_refusal("tile 64x4", **scores) == ""
    assert "have other tiles" in softmax_refusal("tile 64x2", **scores)
    assert softmax_refusal("tile 64x4", **scores, capped=True) == ""
    assert "scores" in softmax_refusal("tile 64x2", **scores, capped=True, backward=True)


def test_reasons_of_rings():
    long = dict(n=70_000)
    assert "holds 69632 elements" in softmax_refusal("ring 1", **long)
    assert softmax_refusal("ring 2", **long) == ""
    assert "clusters" in softmax_refusal("ring 2", H200 | dict(clusters=0), **long)
    assert "16-byte" in softmax_refusal("ring 2", **long, in_phase=False)
    assert "2^30 rows" in softmax_refusal("ring 2", **long, rows=2**30 + 1)
    assert "softcap" in softmax_refusal("ring 2", **long, capped=True)
    small = H200 | dict(shared_limit=SMALL["shared_limit"])
    assert "the GPU has 101376" in softmax_refusal("ring 2", small, **long)
    long = dict(n=262_144, backward=True)
    assert softmax_refusal("ring 16", **long) == ""
    assert "gradient" in softmax_refusal("ring 16", n=262_144)
    none_fits = H200 | dict(clusters_of_16=0)
    assert softmax_refusal("ring 16", none_fits, **long) == ("clusters of 16 do not fit on the GPU")
    assert softmax_refusal("ring 8", none_fits, **long) == ""
