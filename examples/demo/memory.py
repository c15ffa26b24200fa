"""Bytes that a model holds, and the most that a step needs beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def model_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Bytes of a model's weights and buffers, and of an optimizer's state."""
    tensors = [*model.parameters(), *model.buffers()]
    if optimizer is not None:
        for state in optimizer.state.values():
            tensors.extend(value for value in state.values() if isinstance(value, torch.Tensor))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def peak_of_step(call: Callable[[], Any]) -> int:
    """The most bytes beyond those at the start that torch's CPU allocator had out in a call.

    Counts the allocations of operators in C++ too. Scratch memory that a math library keeps for
    itself is not seen.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as run:
        call()
    events = [e for e in run.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak
