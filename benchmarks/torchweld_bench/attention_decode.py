"""attention of few query rows on a GPU, as in generation: against the backends of torch's SDPA and
the time to read keys and values once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from torchweld._library import ops
from torchweld.tuning.timer import Timing, interleaved
from torchweld_bench.common import each_of, in_turn, judged, largest_error, read_rate, sdpa
from torchweld_bench.results import Row, make_row

_ROUNDS = 11
_FLOOR = "read floor"
# the size of all caches that the calls rotate through; several times any L2 cache
_BYTES = 512 << 20
_BACK_ENDS = {"sdpa flash": SDPBackend.FLASH_ATTENTION, "sdpa cudnn": SDPBackend.CUDNN_ATTENTION}

# batch, nheads, nheads_kv, seqlen_k, head_dim
_SHAPES = [(16, 32, 8, 8192, 128), (1, 32, 8, 65536, 128), (16, 12, 12, 1024, 64),
           (64, 32, 8, 2048, 128), (4, 64, 8, 32768, 128)]  # fmt: skip


def _decode(shape: tuple[int, int, int, int, int], seqlen_q: int, rate: float) -> Iterator[Row]:
    batch, nheads, nheads_kv, seqlen_k, dim = shape
    brain = torch.bfloat16
    q = torch.randn(batch, nheads, seqlen_q, dim, device="cuda").to(brain)
    cache_bytes = 4 * batch * nheads_kv * seqlen_k * dim
    turns = -(-_BYTES // cache_bytes)
    caches = [
        [torch.randn(batch, nheads_kv, seqlen_k, dim, device="cuda").to(brain) for _ in range(2)]
        for _ in range(turns)
    ]
    calls: dict[str, list[Callable[[], Tensor]]] = {
        "ours": [lambda kv=kv: ops.attention(q, *kv) for kv in caches],
    }
    for name, backend in _BACK_ENDS.items():
        calls[name] = [lambda kv=kv, b=backend: sdpa(b, q, *kv) for kv in caches]
    pads = torch.full((batch,), seqlen_k // 2, dtype=torch.int32, device="cuda")
    if seqlen_q == 1:
        calls["half padding"] = [lambda kv=kv: ops.attention(q, *kv, pads) for kv in caches]
    variants = {name: in_turn(own, turns) for name, own in calls.items()}
    us = each_of(turns, interleaved(variants, device="cuda", rounds=_ROUNDS))
    padded = us.pop("half padding", None)
    us[_FLOOR] = Timing(*[cache_bytes / rate] * 3)
    part = [t[-1:].double() for t in (q, *caches[0])]
    exact = sdpa(SDPBackend.MATH, *part)
    flash = sdpa(SDPBackend.FLASH_ATTENTION, q, *caches[0])[-1:]
    allowed = 3 * largest_error(flash, exact) + 1e-6
    errors = judged(ops.attention(q, *caches[0])[-1:], flash, exact, allowed)
    case = f"attention decode {shape} bfloat16, {seqlen_q} query rows"
    for name, against in (
        (case, _FLOOR),
        (f"{case} over SDPA", min(_BACK_ENDS, key=lambda peer: us[peer].us)),
    ):
        yield make_row(name, us, against=against, **errors)
    if padded is not None:
        name, against = f"{case}, half padding", "without padding"
        times = {"ours": padded, against: us["ours"]}
        yield make_row(name, times, against=against, **errors)


def rows() -> Iterator[Row]:
    """Measures every decode case, one per iteration."""
    rate = read_rate()
    for seqlen_q in (1, 4):
        for shape in _SHAPES:
            yield from _decode(shape, seqlen_q, rate)
