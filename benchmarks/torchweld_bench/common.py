"""Shared by the families: dtype names, errors against a reference, allowed errors."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchweld.tuning.timer import Timing, interleaved

_READ_BYTES = 1 << 30


def dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def largest_magnitude(t: torch.Tensor) -> float:
    """Returns the largest magnitude, 0 for an empty tensor."""
    return t.abs().max().item() if t.numel() else 0.0


def largest_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    return largest_magnitude(out.double() - reference)


def padded_conv2d(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Computes torchweld.conv2d in torch."""
    kh, kw = weight.shape
    if not x.numel() or not weight.numel():  # torch refuses an image or a kernel of size 0
        return x * weight.sum()
    return F.conv2d(F.pad(x, (0, kw - 1, 0, kh - 1))[:, None], weight[None, None])[:, 0]


def sdpa(
    backend: SDPBackend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
) -> torch.Tensor:
    """Calls torch's scaled_dot_product_attention with one backend; heads may be grouped."""
    grouped = q.shape[1] != k.shape[1]
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)


def read_rate() -> float:
    """Measures bytes per microsecond of a long sum, a mere read."""
    data = torch.randn(_READ_BYTES // 4, device="cuda")
    return _READ_BYTES / interleaved({"sum": data.sum}, device="cuda")["sum"].us


def in_turn(calls: list[Callable[[], object]], times: int) -> Callable[[], None]:
    """Captures `times` calls, in rotation, as one CUDA graph, as in generation."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    # A compiled function's first calls compile it, so they must precede the capture.
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(times):
            calls[i % len(calls)]()
    return graph.replay


def peak_memory(call: Callable[[], object], held: int | None = None) -> Timing:
    """Returns a call's peak memory in MiB beyond `held` bytes, by default those before the call."""
    if held is None:
        held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    mib = (torch.cuda.max_memory_allocated() - held) / 2**20
    return Timing(mib, mib, mib)


def _leave_out(name: str, error: Exception) -> None:
    reason = f"{type(error).__name__}: {error}"
    print(f"{name} is left out: {reason.splitlines()[0]}", file=sys.stderr)


@cache
def installed(module: str, name: str) -> Any:
    """Returns a peer's function or class, or None if it can't be imported; prints why once."""
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # a peer may raise anything while it is imported
        _leave_out(f"{module}.{name}", error)
        return None


def runs(name: str, call: Callable[[], Any]) -> bool:
    """Whether a peer supports a case; prints the reason if not."""
    try:
        call()
        torch.cuda.synchronize()
    except Exception as error:  # a peer may raise anything
        _leave_out(name, error)
        return False
    return True


def free() -> None:
    """Frees memory that is no longer used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
