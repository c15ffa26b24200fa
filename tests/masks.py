"""Mask truth tables, written by hand, and the calls that probe an op with them.

A row is written as one digit per key: 1 where it is visible. The query rows of (2, 5) are at
positions 3 and 4 of the keys, the rows of (5, 2) at -3, -2, -1, 0, 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from numerics import assert_equal
from samples import forward_backward

# (seqlen_q, seqlen_k), causal, leftpad -> rows. None: called without leftpad.
TABLES: dict[tuple[tuple[int, int], bool, int | None], str] = {
    ((2, 5), True, None): "11110 11111",
    ((2, 5), True, -3): "11110 11111",
    ((2, 5), True, 0): "11110 11111",
    ((2, 5), True, 1): "01110 01111",
    ((2, 5), True, 2): "00110 00111",
    ((2, 5), True, 3): "00010 00011",
    ((2, 5), True, 4): "00000 00001",
    ((2, 5), True, 5): "00000 00000",
    ((2, 5), True, 12): "00000 00000",
    ((2, 5), False, None): "11111 11111",
    ((2, 5), False, -3): "11111 11111",
    ((2, 5), False, 0): "11111 11111",
    ((2, 5), False, 1): "01111 01111",
    ((2, 5), False, 2): "00111 00111",
    ((2, 5), False, 3): "00011 00011",
    ((2, 5), False, 4): "00000 00001",
    ((2, 5), False, 5): "00000 00000",
    ((2, 5), False, 12): "00000 00000",
    ((5, 2), True, None): "00 00 00 10 11",
    ((5, 2), True, -3): "00 00 00 10 11",
    ((5, 2), True, 0): "00 00 00 10 11",
    ((5, 2), True, 1): "00 00 00 00 01",
    ((5, 2), True, 2): "00 00 00 00 00",
    ((5, 2), True, 9): "00 00 00 00 00",
    ((5, 2), False, None): "11 11 11 11 11",
    ((5, 2), False, -3): "00 00 00 11 11",
    ((5, 2), False, 0): "00 00 00 11 11",
    ((5, 2), False, 1): "00 00 00 00 01",
    ((5, 2), False, 2): "00 00 00 00 00",
    ((5, 2), False, 9): "00 00 00 00 00",
    ((5, 5), True, None): "10000 11000 11100 11110 11111",
    ((5, 5), True, -3): "10000 11000 11100 11110 11111",
    ((5, 5), True, 0): "10000 11000 11100 11110 11111",
    ((5, 5), True, 1): "00000 01000 01100 01110 01111",
    ((5, 5), True, 2): "00000 00000 00100 00110 00111",
    ((5, 5), True, 3): "00000 00000 00000 00010 00011",
    ((5, 5), True, 4): "00000 00000 00000 00000 00001",
    ((5, 5), True, 5): "00000 00000 00000 00000 00000",
    ((5, 5), True, 12): "00000 00000 00000 00000 00000",
    ((5, 5), False, None): "11111 11111 11111 11111 11111",
    ((5, 5), False, -3): "11111 11111 11111 11111 11111",
    ((5, 5), False, 0): "11111 11111 11111 11111 11111",
    ((5, 5), False, 1): "00000 01111 01111 01111 01111",
    ((5, 5), False, 2): "00000 00000 00111 00111 00111",
    ((5, 5), False, 3): "00000 00000 00000 00011 00011",
    ((5, 5), False, 4): "00000 00000 00000 00000 00001",
    ((5, 5), False, 5): "00000 00000 00000 00000 00000",
    ((5, 5), False, 12): "00000 00000 00000 00000 00000",
}
SHAPES = ((2, 5), (5, 2), (5, 5))


def table(shape: tuple[int, int], causal: bool, pad: int | None) -> Tensor:
    """(seqlen_q, seqlen_k) boolean."""
    rows = TABLES[shape, causal, pad].split()
    return torch.tensor([[digit == "1" for digit in row] for row in rows])


def pads_of(shape: tuple[int, int], causal: bool) -> list[int]:
    """The pads in the tables, for one batch that holds them all."""
    return [p for s, c, p in TABLES if s == shape and c == causal and p is not None]


def tables_of(shape: tuple[int, int], causal: bool) -> Tensor:
    """(len(pads_of), seqlen_q, seqlen_k)."""
    return torch.stack([table(shape, causal, p) for p in pads_of(shape, causal)])


def leftpad_of(shape: tuple[int, int], causal: bool, device: str) -> Tensor:
    return torch.tensor(pads_of(shape, causal), dtype=torch.int32, device=device)


def uniform(seen: Tensor) -> Tensor:
    """Float64 probabilities of equal logits over the keys seen, 0 in a row that sees none."""
    return seen.double() / seen.sum(-1, keepdim=True).clamp(min=1)


def check_one_hot(op: str, args: list[Tensor], causal: bool, **options: Any) -> None:
    """P of sequence j is exactly one-hot at key j: O is V[j] bit for bit, dV a scatter of dO."""
    value = args[-1]
    j = torch.arange(len(value), device=value.device)
    sees = torch.ones(len(j), len(j), dtype=torch.bool, device=value.device)  # [sequence, row]
    if causal:
        sees = j[None, :] >= j[:, None]
    dout = torch.randint(-4, 5, value.shape, device=value.device).to(value.dtype)
    dout = torch.where(sees[:, None, :, None], dout, 0)
    out, grads = forward_backward(op, args, {"causal": causal, **options}, dout)
    expected = value[j, 0, j][:, None].expand_as(value[:, 0])
    assert_equal(out[:, 0][sees], expected[sees])
    scatter = torch.zeros_like(value)
    scatter[j, 0, j] = dout[:, 0].sum(1)
    assert_equal(grads[len(args) - 1], scatter)
