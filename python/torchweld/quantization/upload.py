"""Copies a model from mapped files to a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor, nn

_STAGE_BYTES = 1 << 24


class Stage(NamedTuple):
    """A pinned buffer, and the event after which its last transfer has ended."""

    buffer: Tensor
    sent: torch.cuda.Event


def upload(model: nn.Module, device: torch.device) -> None:
    """Moves a model to a GPU, as `model.to(device)` does.

    All CPU threads copy tensors into one of two pinned buffers while the GPU reads the other one.
    `to` copies with one thread, and the GPU waits meanwhile.
    """
    tensors = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    with torch.cuda.device(device):
        # The allocator keeps this block and splits it, so that memory is requested once.
        torch.empty(sum(t.nbytes for t in tensors.values()), dtype=torch.uint8, device=device)
        # The buffers alternate across tensors, because most tensors fill less than one.
        stages = cycle(
            Stage(
                torch.empty(_STAGE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True),
                torch.cuda.Event(),
            )
            for _ in range(2)
        )

        def copied(tensor: Tensor) -> Tensor:
            if not _is_plain(tensor):
                return tensor.to(device)
            made = torch.empty_like(tensor, device=device)
            copy_bytes(made, tensor, stages)
            vars(made).update(vars(tensor))  # transformers marks the tensors that it loads
            return made

        model._apply(copied)


def _is_plain(tensor: Tensor) -> bool:
    """Whether the bytes of a tensor are contiguous on the CPU."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return plain and tensor.device.type == "cpu" and tensor.is_contiguous()


def copy_bytes(target: Tensor, source: Tensor, stages: Iterator[Stage]) -> None:
    """Copies contiguous tensors of one dtype and size, a stage at a time."""
    to, given = (t.detach().view(-1).view(torch.uint8) for t in (target, source))
    first = 0
    while first < given.numel():
        stage = next(stages)
        stage.sent.synchronize()
        part = given[first : first + stage.buffer.numel()]
        buffer = stage.buffer[: part.numel()]
        buffer.copy_(part)
        to[first : first + part.numel()].copy_(buffer, non_blocking=True)
        stage.sent.record()
        first += part.numel()
