"""attention under masks on a GPU, forward and backward: against the same call without them, and
against FlexAttention with its block mask ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torchweld
from torchweld._library import ops
from torchweld_bench.cases import Call, backward, drawn, judged, measured
from torchweld_bench.results import Row

_ROUNDS = 9
# A masked call's target, as a fraction of the plain call's time: its share of live tiles plus this.
_BEYOND = 0.06
_TILE_ROWS, _TILE_KEYS = 128, 64
# A function of the indices of batch, head, row and key: whether the row sees the key.
Seen = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def live_share(first_keys: list[list[int]]) -> float:
    """Returns the share of tiles of causal sequences in which a row sees a key.

    Args:
        first_keys: Each row's first key; the length of the sequence for a row that sees none.
    """
    live = everything = 0
    for first in first_keys:
        for row in range(0, len(first), _TILE_ROWS):
            last = min(row + _TILE_ROWS, len(first))
            tiles = -(-last // _TILE_KEYS)
            everything += tiles
            live += max(0, tiles - min(first[row:last]) // _TILE_KEYS)
    return live / everything


def _exact(
    qkv: list[Tensor], hidden: Tensor, softcap: float, sink: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Computes the last rows of the last head in dtype."""
    q, k, v = (t.to(dtype) for t in qkv)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(hidden, -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.to(dtype).expand(*scores.shape[:-1], 1)], -1)
    return scores.softmax(-1)[..., : k.shape[-2]] @ v


def _rows_of(
    name: str,
    shape: tuple[int, int, int, int],
    masks: dict[str, Any],
    seen: Seen,
    target: float | None = None,
) -> Iterator[Row]:
    """Makes a row each for forward and backward, both with the errors of the forward."""
    batch, nheads, seqlen, dim = shape
    case = f"({batch}, {nheads}, {seqlen}, {dim}) bfloat16 causal {name}"
    *qkv, dout = (drawn(*shape) for _ in range(4))
    last = 128
    part = [qkv[0][-1, -1, -last:], qkv[1][-1, -1], qkv[2][-1, -1]]
    sink = masks["sink"][-1] if "sink" in masks else None
    index = [torch.tensor(i, device="cuda") for i in (batch - 1, nheads - 1)]
    rows = torch.arange(seqlen - last, seqlen, device="cuda")[:, None]
    hidden = ~seen(*index, rows, torch.arange(seqlen, device="cuda"))
    formula = partial(_exact, part, hidden, masks.get("softcap", 0.0), sink)
    exact, eager = formula(torch.float64), formula(torch.bfloat16)
    out = ops.attention(*qkv, causal=True, **masks)[-1, -1, -last:]
    errors = judged(out, eager, exact, times=3, plus=0)

    def backward_of(**given: Any) -> Call:
        out, lse = ops.attention_forward(*qkv, causal=True, **given)
        return partial(ops.attention_backward, dout, *qkv, out, lse, causal=True, **given)

    forwards: dict[str, Call] = {
        "ours": partial(ops.attention, *qkv, causal=True, **masks),
        "without": partial(ops.attention, *qkv, causal=True),
    }
    backwards = {"ours": backward_of(**masks), "without": backward_of()}
    if "sink" not in masks:  # FlexAttention has no sinks
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        block_mask = create_block_mask(seen, batch, None, seqlen, seqlen, device="cuda")
        softcap = masks.get("softcap")

        def cap(score: Tensor, b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return softcap * torch.tanh(score / softcap)

        flex = partial(
            torch.compile(flex_attention, dynamic=False),
            score_mod=cap if softcap else None,
            block_mask=block_mask,
        )
        forwards["flex"], backwards["flex"] = partial(flex, *qkv), backward(flex, qkv, dout)
    for op, calls in (("attention", forwards), ("attention_backward", backwards)):
        case_of = f"{op} {case}"
        yield from measured(case_of, calls, errors, "without", ["flex"], _ROUNDS, target=target)


def rows() -> Iterator[Row]:
    """Measures packed documents, a window, left padding, soft-capped scores and sinks."""
    torch.manual_seed(0)
    shape = batch, nheads, seqlen, dim = 2, 16, 8192, 128
    ids = (torch.arange(seqlen, device="cuda") // 512).int().repeat(batch, 1)
    starts = torchweld.key_start_from_documents(ids)

    def same_document(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (row >= key) & (ids[b, row] == ids[b, key])

    yield from _rows_of("packed documents of 512", shape, {"key_start": starts}, same_document)

    window = 1024

    def near(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (row >= key) & (row - key < window)

    yield from _rows_of(f"window {window}", shape, {"window": window}, near)

    pads = torch.tensor([2048, 0, 1024, 512], device="cuda", dtype=torch.int32)

    def token(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (row >= key) & (key >= pads[b]) & (row >= pads[b])

    shape = (4, nheads, 4096, dim)
    share = live_share([[4096] * pad + [pad] * (4096 - pad) for pad in pads.tolist()])
    yield from _rows_of("left padding", shape, {"leftpad": pads}, token, round(share + _BEYOND, 3))

    def causal(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return row >= key

    sink = torch.randn(nheads, device="cuda")
    for name, masks in (("softcap", {"softcap": 50.0}), ("sink", {"sink": sink})):
        yield from _rows_of(name, shape, masks, causal)
