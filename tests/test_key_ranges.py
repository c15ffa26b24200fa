"""_key_ranges, the op that finds the keys of packed tokens."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from numerics import assert_equal
from torchweld._library import ops

key_ranges = ops._key_ranges


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def by_hand(ends, begin, end, tokens, before, after, top_left) -> tuple[list[int], list[int]]:
    """The definition, token by token."""
    starts, row_ends = [], []
    for token in range(tokens):
        i = sum(e <= token for e in ends[1:])
        if i == len(begin):
            starts.append(tokens), row_ends.append(0)
            continue
        position = begin[i] + token - ends[i] if top_left else end[i] + token - ends[i + 1]
        starts.append(max([begin[i]] if before is None else [begin[i], position - before]))
        row_ends.append(min([end[i]] if after is None else [end[i], position + after + 1]))
    return starts, row_ends


CASES = [
    ([0, 3, 3, 4, 9], [0, 5, 5, 9], [5, 5, 9, 11]),
    ([0, 2000, 5000, 5001], [7, 0, 100], [9, 70, 6000]),
    ([0], [], []),
    ([0, 9], [0], [0]),
]


@pytest.mark.parametrize("top_left", [False, True])
@pytest.mark.parametrize(
    "window", [(None, None), (None, 0), (3, 0), (2, 1), (2**62, 2**62)], ids=str
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_definition(device, case, window, top_left):
    for tokens in (case[0][-1], case[0][-1] + 3):
        tensors = [ints(*part).to(device) for part in case]
        got = key_ranges(*tensors, tokens, *window, top_left)
        want = by_hand(*case, tokens, *window, top_left)
        for t, values in zip(got, want, strict=True):
            assert_equal(t.cpu(), torch.tensor([values], dtype=torch.int32).view(1, tokens))


def test_keys_from_cumulative_lengths(device):
    """Without key_end a sequence ends where the next one begins."""
    queries, keys = ints(0, 3, 3, 9).to(device), ints(0, 5, 5, 11).to(device)
    want = key_ranges(queries, keys[:-1], keys[1:], 10, 2, 0)
    strided = torch.stack([keys] * 2, 1)[:, 0]
    for lengths in (keys, strided):
        assert_equal(key_ranges(queries, lengths, None, 10, 2, 0), want)


def test_strided_arguments(device):
    tensors = [torch.stack([ints(*part)] * 2, 1)[:, 0].to(device) for part in CASES[0]]
    assert_equal(key_ranges(*tensors, 9), key_ranges(*(t.contiguous() for t in tensors), 9))


def test_any_values_stay_in_memory(device):
    """Lengths that don't ascend are data, not errors."""
    wild = [ints(5, -9, 2**31 - 1, 3).to(device), *[ints(-(2**31), 7, 2**31 - 1).to(device)] * 2]
    assert key_ranges(*wild, 50, 2**40, 0)[0].shape == (1, 50)


def test_opcheck(device):
    tensors = [ints(*part).to(device) for part in CASES[0]]
    torch.library.opcheck(key_ranges.default, (*tensors, 9, 2, 0))
    torch.library.opcheck(key_ranges.default, (tensors[0], tensors[0], None, 9, 2, 0))


REFUSED = [
    ({"cu_seqlens_q": torch.zeros(3)}, "cu_seqlens_q must be int32, but got float32"),
    ({"cu_seqlens_q": ints()}, "cu_seqlens_q must be (sequences + 1,), but got int32 (0,)"),
    ({"key_begin": ints(1)}, "key_begin must be (sequences,) = (2,), but got int32 (1,)"),
    ({"key_end": None}, "key_begin must be (sequences + 1,) = (3,), but got int32 (2,)"),
    ({"key_end": ints(1)}, "key_end must be (sequences,) = (2,), but got int32 (1,)"),
    ({"tokens": -1}, "tokens must be from 0 to 2^31 - 1, but got -1"),
    ({"before": -1}, "before must be at least 0, but got -1"),
    ({"after": -1}, "after must be at least 0, but got -1"),
]


@pytest.mark.parametrize(("wrong", "sentence"), REFUSED, ids=lambda v: str(v)[:30])
def test_refusals(wrong, sentence):
    given = {
        "cu_seqlens_q": ints(0, 3, 8), "key_begin": ints(0, 3), "key_end": ints(3, 8),
        "tokens": 8, **wrong,
    }  # fmt: skip
    with pytest.raises(RuntimeError, match=re.escape(f"torchweld::_key_ranges: {sentence}")):
        key_ranges(**given)
