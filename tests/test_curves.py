"""The pictures that `bench.py curves` draws from measurements."""

from __future__ import annotations

import pytest

from torchweld_bench import curves
from torchweld_bench.results import Report, Row


def row(case: str, ours: float, ratio: float | None = 2.0) -> Row:
    peers = {"sdpa cudnn": 8.0, "roofline": 4.0}
    return Row(case, ours, (ours, ours), peers, "roofline", ratio, None, 0.0, 0.0)


def report(rows: list[Row]) -> Report:
    return Report("curves", "a GPU", "1", "2.11", "13.0", "abc", "2026-01-01", rows=rows)


def test_a_picture_has_the_share_of_the_roofline_of_everyone():
    found = curves.shares(report([row("decode: 512", 5.0), row("decode: 1024", 4.0)]))
    assert found == {"decode": {"ours": {512: 0.8, 1024: 1.0}, "sdpa cudnn": {512: 0.5, 1024: 0.5}}}


def test_a_wrong_answer_is_no_point():
    assert curves.shares(report([row("decode: 512", 5.0, ratio=None)])) == {}


@pytest.mark.parametrize("rows", [[], [row("decode: 512", 5.0), row("linear: 64", 4.0)]])
def test_pictures_are_drawn(rows, tmp_path):
    curves.draw(report(rows), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000
