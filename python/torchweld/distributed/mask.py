"""The arguments of attention other than query, key and value."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Mask:
    """Holds a call's mask and scale; key_start is this process's shard, leftpad and sink whole."""

    causal: bool
    scale: float | None
    leftpad: Tensor | None
    key_start: Tensor | None
    window: int | None
    softcap: float | None
    sink: Tensor | None

    def first_keys(self, positions: Tensor, seqlen: int, batch: int) -> Tensor | None:
        """Returns rows' first visible keys, int32 `(batch, rows)`; seqlen hides all, None none."""
        if self.leftpad is None and self.key_start is None and self.window is None:
            return None
        start = torch.zeros(batch, len(positions), dtype=torch.int32, device=positions.device)
        if self.key_start is not None:
            start = self.key_start.clamp(0, seqlen)
        if self.window is not None:
            start = start.maximum(positions - (self.window - 1))
        if self.leftpad is not None:
            padding = positions < self.leftpad[:, None]
            start = start.maximum(self.leftpad[:, None]).masked_fill(padding, seqlen)
        return start.to(torch.int32)
