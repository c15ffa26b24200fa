"""How a pass over a matrix is cut into blocks: host code, tested without a GPU."""

from __future__ import annotations

import pytest

_C = pytest.importorskip("torchweld._C")

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
