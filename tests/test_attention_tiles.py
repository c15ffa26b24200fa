"""Which tiles attention, its gradient and scalar_attention take: host code, without a GPU."""

from __future__ import annotations

import pytest

from choices_helpers import _C, ATTENTION_MATHS, H200, NO_WGMMA, SMALL, chosen, problem, refusal


@pytest.mark.parametrize("math", ATTENTION_MATHS)
def test_attention_tiles_hold_both_head_dims(math):
    number = ATTENTION_MATHS[math]
    for dims in ((1, 1), (64, 64), (65, 3), (3, 128), (129, 64), (256, 256)):
        fields = dict(head_dim=dims[0], head_dim_v=dims[1], math=number)
        tile = chosen("attention", NO_WGMMA, **fields)["columns"]
        assert tile["head_dim"] >= max(dims) and tile["tile_bytes"] <= SMALL["shared_limit"]
        for device in (H200, NO_WGMMA, SMALL):
            choice = chosen("attention_backward", device, **fields)
            if device == SMALL and max(dims) > 128 and number > 0:
                assert choice["choice"] == "general"  # bf16x3 takes six bytes a value
                continue
            wgmma = device == H200 and number == 0 and dims in ((64, 64), (256, 256))
            assert choice["engine"] == ("sm90" if wgmma else "sync") and choice["refusal"] == ""
            tile = choice["columns"]
            assert tile["head_dim"] >= max(dims) and tile["tile_bytes"] <= device["shared_limit"]
    for family in ("attention", "attention_backward"):
        for device in (H200, NO_WGMMA, SMALL):
            wide = device == H200 and number == 0
            for dims in ((264, 8), (8, 512)):
                fields = dict(head_dim=dims[0], head_dim_v=dims[1], math=number)
                assert chosen(family, device, **fields)["engine"] == ("wide" if wide else "general")
        assert chosen(family, head_dim=513, head_dim_v=8, math=number)["choice"] == "general"


def test_a_tile_of_the_gradient_never_writes_beyond_its_scratch():
    """dQ's scratch has 64, 128 or 256 columns, which the head dims decide, not the tile."""
    for dims in ((64, 64), (1, 8), (65, 64), (128, 3), (129, 8), (256, 256)):
        columns = next(c for c in (64, 128, 256) if max(dims) <= c)
        for math in range(3):
            fields = dict(seqlen_q=128, seqlen_k=128, head_dim=dims[0], head_dim_v=dims[1])
            numbers = problem("attention_backward", **fields, math=math, bfloat16=0)
            legal = [c for c in _C.candidates("attention_backward", numbers) if not c["refusal"]]
            assert {c["columns"]["head_dim"] for c in legal} <= {0, columns}
            assert len(legal) > 1


def test_reasons_of_attention():
    tile = "sync 16 bits 128x64x64"
    assert refusal("attention", problem("attention"), tile) == ""
    assert (
        refusal("attention", problem("attention", math=2), tile) == "the tile is for another dtype"
    )
    wide = problem("attention", head_dim=65)
    assert refusal("attention", wide, tile) == "the tile supports head dims up to 64"
    assert "longer than 536870912" in refusal(
        "attention", problem("attention", seqlen_k=2**29 + 1), tile
    )
    assert "head dim of 0" in refusal("attention", problem("attention", head_dim_v=0), tile)


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
