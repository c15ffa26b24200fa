"""attention of few query rows on a GPU, as in generation: against the backends of torch's SDPA and
the time to read keys and values once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from torchweld._library import ops
from torchweld_bench.cases import Call, compared, drawn, exactly, judged, rotated
from torchweld_bench.common import read_rate, sdpa
from torchweld_bench.results import Row

_ROUNDS = 11
_FLOOR = "read floor"
# the size of all caches that the calls rotate through; several times any L2 cache
_BYTES = 512 << 20
BACK_ENDS = {"sdpa flash": SDPBackend.FLASH_ATTENTION, "sdpa cudnn": SDPBackend.CUDNN_ATTENTION}
# of head dims above 256; it supports no grouped heads
_WIDE_BACK_ENDS = {"sdpa efficient": SDPBackend.EFFICIENT_ATTENTION}

# batch, nheads, nheads_kv, seqlen_k, head_dim
_SHAPES = [(16, 32, 8, 8192, 128), (1, 32, 8, 65536, 128), (16, 12, 12, 1024, 64),
           (64, 32, 8, 2048, 128), (4, 64, 8, 32768, 128)]  # fmt: skip


def drawn_caches(*shape: int, device: str = "cuda") -> tuple[list[list[Tensor]], int]:
    """Draws keys and values that together exceed the L2 cache; returns a pair's bytes too."""
    cache_bytes = 4 * math.prod(shape)
    turns = -(-_BYTES // cache_bytes)
    return [[drawn(*shape, device=device) for _ in range(2)] for _ in range(turns)], cache_bytes


def back_ends(dim: int) -> dict[str, SDPBackend]:
    return BACK_ENDS if dim <= 256 else _WIDE_BACK_ENDS


def attention_calls(q: Tensor, caches: list[list[Tensor]]) -> dict[str, list[Call]]:
    """Lists the calls of ours and of the backends, with every cache."""
    calls: dict[str, list[Call]] = {"ours": [partial(ops.attention, q, *kv) for kv in caches]}
    for name, backend in back_ends(q.shape[-1]).items():
        calls[name] = [partial(sdpa, backend, q, *kv) for kv in caches]
    return calls


def decode_rows(shape: tuple[int, int, int, int, int], seqlen_q: int, rate: float) -> Iterator[Row]:
    batch, nheads, nheads_kv, seqlen_k, dim = shape
    q = drawn(batch, nheads, seqlen_q, dim)
    caches, cache_bytes = drawn_caches(batch, nheads_kv, seqlen_k, dim)
    calls = attention_calls(q, caches)
    pads = torch.full((batch,), seqlen_k // 2, dtype=torch.int32, device="cuda")
    if seqlen_q == 1:
        calls["half padding"] = [partial(ops.attention, q, *kv, pads) for kv in caches]
    us = rotated(calls, len(caches), _ROUNDS)
    padded = us.pop("half padding", None)
    us[_FLOOR] = exactly(cache_bytes / rate)
    exact = sdpa(SDPBackend.MATH, *(t[-1:].double() for t in (q, *caches[0])))
    peers = back_ends(dim)
    theirs = sdpa(next(iter(peers.values())), q, *caches[0])[-1:]
    errors = judged(ops.attention(q, *caches[0])[-1:], theirs, exact, times=3, plus=1e-6)
    case = f"attention decode {shape} bfloat16, {seqlen_q} query rows"
    yield from compared(case, us, errors, _FLOOR)
    fastest = min(peers, key=lambda peer: us[peer].us)
    yield from compared(f"{case} over SDPA", us, errors, fastest)
    if padded is not None:
        times = {"ours": padded, "without padding": us["ours"]}
        yield from compared(f"{case}, half padding", times, errors, "without padding")


def rows() -> Iterator[Row]:
    """Measures every decode case, one per iteration."""
    rate = read_rate()
    for seqlen_q in (1, 4):
        for shape in _SHAPES:
            yield from decode_rows(shape, seqlen_q, rate)
