"""Interleaved timing: every variant runs once in a round; medians are compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_FLUSH_BYTES = 256 << 20  # more than the L2 cache of any NVIDIA GPU
_FLUSH_SECONDS = 30e-6  # no GPU fills _FLUSH_BYTES faster
_MAX_FLUSHES = 20  # for variants that wait for the GPU, which no number of fills would hide


@dataclass
class Timing:
    """Microseconds: the median of the rounds and their quartiles."""

    us: float
    low: float
    high: float


def summary(samples: list[float]) -> Timing:
    if len(samples) == 1:
        return Timing(samples[0], samples[0], samples[0])
    low, middle, high = statistics.quantiles(samples, n=4)
    return Timing(middle, low, high)


class CudaRounds:
    """Timed rounds on the current GPU: each calls every variant once, with the L2 cache flushed
    before, and starts with another variant. The timings of finished rounds are always available.

    Args:
        variants: the functions to call, by name.
        before: called with the name before each call, outside the timed region.
    """

    def __init__(
        self,
        variants: dict[str, Callable[[], object]],
        before: Callable[[str], object] | None = None,
    ) -> None:
        self._variants = variants
        self._before = before
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self._host_seconds = dict.fromkeys(variants, 0.0)
        self._rounds: list[dict[str, tuple[torch.cuda.Event, torch.cuda.Event]]] = []

    def run(self) -> None:
        """Runs one more round, which counts once it is complete."""
        names = list(self._variants)
        first = len(self._rounds) % len(names) if names else 0
        events = {}
        for name in names[first:] + names[:first]:
            if self._before:
                self._before(name)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # While these fills run, the host queues the next launches, so that launch overhead is
            # not timed.
            fills = 1 + int(self._host_seconds[name] / _FLUSH_SECONDS)
            for _ in range(min(fills, _MAX_FLUSHES)):
                self._flush.fill_(len(self._rounds) & 255)
            queued = time.perf_counter()
            start.record()
            self._variants[name]()
            end.record()
            self._host_seconds[name] = time.perf_counter() - queued
            events[name] = (start, end)
        self._rounds.append(events)

    def timings(self) -> dict[str, Timing]:
        """Returns the finished rounds' timings by name; {} before the first."""
        torch.cuda.synchronize()
        if not self._rounds:
            return {}
        return {
            name: summary([r[name][0].elapsed_time(r[name][1]) * 1e3 for r in self._rounds])
            for name in self._variants
        }


def _seconds(call: Callable[[], object], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return time.perf_counter() - start


def _time_cpu(
    variants: dict[str, Callable[[], object]], rounds: int, sample_seconds: float
) -> dict[str, Timing]:
    times = dict.fromkeys(variants, 1)
    if sample_seconds:
        for name, call in variants.items():
            fastest = min(_seconds(call, 1) for _ in range(5))  # another process may slow a call
            times[name] = max(1, min(1000, int(sample_seconds / max(fastest, 1e-7))))
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, call in variants.items():
            if sample_seconds:
                # An untimed call: after another variant, the caches are cold and the allocator's
                # free blocks have other sizes. This would dominate a sample of few calls.
                call()
            samples[name].append(_seconds(call, times[name]) / times[name] * 1e6)
    return {name: summary(s) for name, s in samples.items()}


def interleaved(
    variants: dict[str, Callable[[], object]],
    *,
    device: str,
    rounds: int = 21,
    warmup: int = 3,
    sample_seconds: float = 0.0,
) -> dict[str, Timing]:
    """Times the variants against each other in one run; on a GPU, L2 is flushed before each call.

    Args:
        variants: the functions to call, by name.
        device: "cpu" or "cuda".
        rounds: how often each variant is timed; at least 2.
        warmup: untimed calls of each variant before that.
        sample_seconds: on the CPU, each sample repeats a call for about so long, after one untimed
            call; 0: a sample is one call.

    Returns:
        A `Timing` by name.
    """
    for call in variants.values():
        for _ in range(warmup):
            call()
    if device == "cuda":
        torch.cuda.synchronize()
        timer = CudaRounds(variants)
        for _ in range(rounds):
            timer.run()
        return timer.timings()
    return _time_cpu(variants, rounds, sample_seconds)
