"""The masks that torchweld's mask function hands to the layers, and what they stand for.

transformers carries one tensor from the mask function to every layer. Beside the dense masks that
it knows there are two that hold numbers, all int32:

``(batch,)``
    ``leftpad``: causal, and the keys end with the last query.
``(batch, 1 + rows, 1, 1)``
    ``key_end``, then ``key_start`` of every row. With as many rows as queries: causal. With one row
    for all queries: each of them sees all keys from key_start to key_end. Four dimensions, because
    transformers hands such masks on as they are, and models that cut a mask to the number of keys
    cut the last one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Numbers(NamedTuple):
    """Arguments of ``torch.ops.torchweld.attention``."""

    causal: bool
    leftpad: Tensor | None = None
    key_start: Tensor | None = None  # (batch, seqlen_q)
    key_end: Tensor | None = None

    def dense(self, seqlen_q: int, seqlen_k: int) -> Tensor | None:
        """The bool mask ``(batch, 1, seqlen_q, seqlen_k)`` of the same meaning, None for none."""
        if self.leftpad is not None:
            return causal_mask(self.leftpad, seqlen_q, seqlen_k)
        if self.key_end is None:
            return None
        key = torch.arange(seqlen_k, device=self.key_end.device)
        end = self.key_end[:, None]
        if self.causal:
            end = end + torch.arange(1 - seqlen_q, 1, device=end.device)
        visible = (key >= self.key_start[..., None]) & (key < end[..., None])
        return visible.expand(-1, seqlen_q, -1)[:, None]


def causal_mask(leftpad: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """The bool mask ``(batch, 1, seqlen_q, seqlen_k)`` that ``leftpad`` stands for."""
    key = torch.arange(seqlen_k, device=leftpad.device)
    row = torch.arange(seqlen_q, device=leftpad.device) + (seqlen_k - seqlen_q)
    return (key <= row[:, None]) & (key >= leftpad[:, None, None, None])


def is_leftpad(mask: Tensor) -> bool:
    return mask.dim() == 1 and mask.dtype == torch.int32


def is_ranges(mask: Tensor) -> bool:
    return mask.dim() == 4 and mask.dtype == torch.int32 and mask.shape[2:] == (1, 1)


def ranges(key_end: Tensor, key_start: Tensor) -> Tensor:
    """The mask of key_end ``(batch,)`` and key_start ``(batch, rows)``.

    In memory the batch comes last: of a step with one query, which waits for the host, layers then
    take both parts without a copy.
    """
    both = torch.cat([key_end[None], key_start.t()]).to(torch.int32)
    return both.view(*both.shape, 1, 1).transpose(0, 1)


def split(mask: Tensor, seqlen_q: int, device: torch.device) -> Numbers:
    """What a mask of :func:`ranges` says to a layer of so many queries.

    Raises:
        ValueError: it was made for another number of queries.
    """
    numbers = mask[:, :, 0, 0].to(device)
    key_end, key_start = numbers[:, 0].contiguous(), numbers[:, 1:]
    if key_start.shape[1] not in (1, seqlen_q):
        raise ValueError(
            f'attn_implementation="torchweld": the mask must be for {seqlen_q} queries, but got '
            f'one for {key_start.shape[1]}; use attn_implementation="eager" for this model'
        )
    # One query that is the last one sees every key: causal or not is the same.
    causal = key_start.shape[1] == seqlen_q
    return Numbers(
        causal=causal,
        key_start=key_start.expand(-1, seqlen_q).contiguous(),
        key_end=key_end,
    )
