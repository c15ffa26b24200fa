"""The share of tiles that a mask leaves, by which `bench.py attention_masks` judges."""

from __future__ import annotations

from torchweld_bench.attention_masks import live_share


def test_share_of_live_tiles():
    assert live_share([[0] * 256]) == 1
    # The second row tile has four key tiles and sees two of them.
    assert live_share([[0] * 128 + [128] * 128]) == 4 / 6
    # Two of its rows see the first key.
    assert live_share([[0] * 130 + [128] * 126]) == 1


def test_rows_that_see_nothing():
    assert live_share([[256] * 256]) == 0
    assert live_share([[256] * 128 + [128] * 128]) == 2 / 6
    assert live_share([[256] * 130 + [130] * 126, [0] * 256]) == 8 / 12
