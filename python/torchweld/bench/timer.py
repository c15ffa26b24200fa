"""Interleaved timing: every variant runs once a round, medians are compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_FLUSH_BYTES = 256 << 20  # several times any L2


@dataclass
class Timing:
    """Microseconds: the median of the rounds and their quartiles."""

    us: float
    low: float
    high: float


def _summary(samples: list[float]) -> Timing:
    low, middle, high = statistics.quantiles(samples, n=4)
    return Timing(middle, low, high)


def _time_cuda(variants: dict[str, Callable[[], object]], rounds: int) -> dict[str, Timing]:
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    pairs = {
        name: [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
        for name in variants
    }
    for index in range(rounds):
        for name, call in variants.items():
            # Also a backlog: the next launches are queued while this runs.
            flush.fill_(index & 255)
            start, end = pairs[name][index]
            start.record()
            call()
            end.record()
    torch.cuda.synchronize()
    return {
        name: _summary([start.elapsed_time(end) * 1e3 for start, end in pairs[name]])
        for name in variants
    }


def _seconds(call: Callable[[], object], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return time.perf_counter() - start


def _time_cpu(
    variants: dict[str, Callable[[], object]], rounds: int, sample_seconds: float
) -> dict[str, Timing]:
    times = {
        name: max(1, min(1000, int(sample_seconds / max(_seconds(call, 1), 1e-7))))
        for name, call in variants.items()
    }
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, call in variants.items():
            samples[name].append(_seconds(call, times[name]) / times[name] * 1e6)
    return {name: _summary(s) for name, s in samples.items()}


def interleaved(
    variants: dict[str, Callable[[], object]],
    *,
    device: str,
    rounds: int = 21,
    warmup: int = 3,
    sample_seconds: float = 0.0,
) -> dict[str, Timing]:
    """Time the variants against each other in one run, L2 flushed before each on a GPU.

    Args:
        variants: what to call, by name.
        device: "cpu" or "cuda".
        rounds: how often each is timed; at least 2.
        warmup: calls of each before that.
        sample_seconds: on the CPU a sample repeats a call for about so long, for calls that take
            microseconds.

    Returns:
        A `Timing` by name.
    """
    for call in variants.values():
        for _ in range(warmup):
            call()
    if device == "cuda":
        torch.cuda.synchronize()
        return _time_cuda(variants, rounds)
    return _time_cpu(variants, rounds, sample_seconds)
