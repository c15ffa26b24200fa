"""varlen_attention of packed sequences on a GPU, forward and backward: against one sequence of all
tokens, and against torch.nn.attention.varlen and FlexAttention where they are there.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torchweld
from torchweld.tuning.timer import interleaved
from torchweld_bench.common import largest_error
from torchweld_bench.results import Row, make_row

_ROUNDS = 9
_TOKENS, _HEADS, _DIM = 16384, 16, 128
_WHOLE = "one sequence"
_OVER = ("torch varlen", "flex")
Function = Callable[[Tensor, Tensor, Tensor], Tensor]  # of (tokens, nheads, head_dim)


def log_normal_lengths(tokens: int, least: int = 20, most: int = 4000) -> list[int]:
    """Lengths of documents as in a crawl, with a median of 400, that fill `tokens`."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        drawn = math.exp(6 + 1.1 * torch.randn((), generator=generator).item())
        lengths.append(min(max(int(drawn), least), most, left))
    return lengths


def _torch_varlen(ends: Tensor, longest: int, causal: bool) -> Function | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    by_window = "window_size" in inspect.signature(varlen_attn).parameters
    mask = {"window_size": (-1, 0 if causal else -1)} if by_window else {"is_causal": causal}
    return lambda q, k, v: varlen_attn(q, k, v, ends, ends, longest, longest, **mask)


def _flex(ends: Tensor, causal: bool) -> Function | None:
    """FlexAttention with its block mask ready."""
    try:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    except ImportError:
        return None
    ids = torch.searchsorted(ends[1:], torch.arange(_TOKENS, device="cuda"), right=True)

    def seen(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        same = ids[row] == ids[key]
        return same & (row >= key) if causal else same

    block_mask = create_block_mask(seen, None, None, _TOKENS, _TOKENS, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = [t.transpose(0, 1)[None] for t in (q, k, v)]
        return compiled(*heads_first, block_mask=block_mask)[0].transpose(0, 1)

    return run


def _errors(qkv: list[Tensor], lengths: list[int], causal: bool, out: Tensor) -> dict[str, float]:
    """Our errors and eager torch's in the last head of the last document."""
    part = [t[-lengths[-1] :, -1] for t in qkv]
    count = lengths[-1]
    hidden = torch.ones(count, count, device="cuda", dtype=torch.bool).triu(1) & causal

    def eager(dtype: torch.dtype) -> Tensor:
        q, k, v = (t.to(dtype) for t in part)
        return (q @ k.mT * _DIM**-0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ v

    exact = eager(torch.float64)
    error = largest_error(eager(torch.bfloat16), exact)
    return {
        "error": largest_error(out[-count:, -1], exact),
        "eager_error": error,
        "allowed_error": 3 * error,
    }


def _rows_of(
    name: str, lengths: list[int], causal: bool, targets: dict[str, float]
) -> Iterator[Row]:
    case = f"({_TOKENS}, {_HEADS}, {_DIM}) bfloat16 {'causal' if causal else 'both ways'} {name}"
    shape = (_TOKENS, _HEADS, _DIM)
    qkv = [torch.randn(shape, device="cuda").bfloat16() for _ in range(3)]
    dout = torch.randn(shape, device="cuda").bfloat16()
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    functions: dict[str, Function | None] = {
        "ours": lambda q, k, v: torchweld.varlen_attention(q, k, v, ends, ends, causal=causal),
        _WHOLE: lambda q, k, v: torchweld.attention(
            *(t.transpose(0, 1)[None] for t in (q, k, v)), causal=causal
        )[0].transpose(0, 1),
        "torch varlen": _torch_varlen(ends, max(lengths), causal),
        "flex": _flex(ends, causal),
    }
    calls: dict[str, dict[str, Callable[[], Any]]] = {"": {}, "_backward": {}}
    for peer, function in functions.items():
        if function is None:
            continue
        leaves = [t.detach().requires_grad_() for t in qkv]
        calls[""][peer] = partial(function, *qkv)
        calls["_backward"][peer] = partial(
            torch.autograd.grad, function(*leaves), leaves, dout, retain_graph=True
        )
    errors = _errors(qkv, lengths, causal, calls[""]["ours"]())
    for end, variants in calls.items():
        times = interleaved(variants, device="cuda", rounds=_ROUNDS)
        full = f"varlen_attention{end} {case}"
        row = make_row(full, times, against=_WHOLE, target=targets.get(full), **errors)
        yield row
        for peer in _OVER:
            if peer in variants:
                yield row.over(peer, targets)


def rows(targets: dict[str, float]) -> Iterator[Row]:
    """Documents of 512 tokens and of log-normal lengths, causal and both ways."""
    torch.manual_seed(0)
    for causal in (True, False):
        yield from _rows_of("documents of 512", [512] * (_TOKENS // 512), causal, targets)
        lengths = log_normal_lengths(_TOKENS)
        yield from _rows_of("documents of 20 to 4000", lengths, causal, targets)
