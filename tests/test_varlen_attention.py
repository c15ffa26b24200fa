"""Packed sequences: key_start from cumulative lengths."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import torchweld
from numerics import assert_equal


def ints(*rows) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_starts_from_cumulative_lengths(device, dtype):
    """Documents of 3, 0, 1 and 2 tokens, then padding, which sees nothing."""
    ends = torch.tensor([0, 3, 3, 4, 6], dtype=dtype, device=device)
    starts = torchweld.key_start_from_cu_seqlens(ends, 8)
    assert_equal(starts.cpu(), ints([0, 0, 0, 3, 4, 4, 8, 8]))
    assert_equal(torchweld.key_start_from_cu_seqlens(ends, 6), starts[:, :6])
    assert_equal(torchweld.key_start_from_cu_seqlens(ends[:1], 2).cpu(), ints([2, 2]))
    assert torchweld.key_start_from_cu_seqlens(ends, 0).shape == (1, 0)
    strided = torch.stack([ends, ends + 1], 1)[:, 0]
    assert_equal(torchweld.key_start_from_cu_seqlens(strided, 8), starts)


def test_starts_from_cumulative_lengths_compile_once():
    compiles = CompileCounter()
    compiled = torch.compile(
        torchweld.key_start_from_cu_seqlens, backend=compiles, fullgraph=True, dynamic=False
    )
    for lengths in ([0, 4, 8], [0, 1, 8], [0, 0, 5]):
        ends = torch.tensor(lengths, dtype=torch.int32)
        assert_equal(compiled(ends, 8), torchweld.key_start_from_cu_seqlens(ends, 8))
    assert compiles.frame_count == 1


def test_refused_cumulative_lengths():
    for value, error, sentence in (
        ([0, 3], TypeError, "cu_seqlens must be a Tensor, but got list; use torch.tensor(cu_seq"),
        (
            torch.zeros(3),
            TypeError,
            "cu_seqlens must be int32, but got float32; use cu_seqlens.int",
        ),
        (ints([0, 3]), ValueError, "cu_seqlens must be (documents + 1,), 0 and then the end of"),
        (ints(0)[:0], ValueError, "cu_seqlens must be (documents + 1,), 0 and then the end of"),
    ):
        with pytest.raises(error, match=re.escape(f"key_start_from_cu_seqlens: {sentence}")):
            torchweld.key_start_from_cu_seqlens(value, 4)
