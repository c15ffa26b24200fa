"""Encodes the masks that torchweld's mask function hands to the layers, and decodes them there.

transformers carries one tensor from the mask function to every layer. In place of a dense mask the
tensor may have one of four forms that hold numbers:

int32 ``(batch, 1, 1, 1)``
    ``leftpad``: causal, and the keys end with the last query.
int32 ``(batch, 1 + rows, 1, 1)``
    ``key_end``, then ``key_start`` of every query: causal, and ``rows`` is the number of queries.
uint32 ``(batch, 1, 1 + window, 1)``
    ``key_end``: every query sees every key before it.
uint32 ``(batch, 2, 1 + window, 1)``
    ``key_end``, then the first key: every query sees every key from the first one on.

The size ``1 + window`` says how many keys a query sees to each side, its own counted; a window of 0
is none. That dimension is expanded, so it takes no memory.

All have four dimensions, because transformers hands such masks on as they are, and models that cut
a mask to the number of keys cut the last one. No caller's mask is of these dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdRef

_T = TypeVar("_T")


class Numbers(NamedTuple):
    """A mask, as arguments of ``torch.ops.torchweld.attention``."""

    causal: bool
    leftpad: Tensor | None = None
    key_start: Tensor | None = None  # (batch, seqlen_q); without causal one value a sequence
    key_end: Tensor | None = None
    window: int | None = None  # only without causal, with as many queries as keys

    @property
    def hides_no_key(self) -> bool:
        """Whether nothing but causality hides a key."""
        # This calls no function, because every layer reads it while the GPU waits for the host.
        pads = self.leftpad is not None or self.key_start is not None or self.key_end is not None
        return not pads and self.window is None

    def pads_nothing(self, seqlen_q: int, seqlen_k: int) -> bool:
        """Whether the mask is padding alone, and the padding hides no key; False if unknown.

        On a GPU SDPA has faster kernels without a mask, so the host reads the values there, as
        transformers reads its own masks. On a CPU or while a graph is made the result is False.
        """
        padding = self.leftpad if self.causal else self.key_end
        if padding is None or len(self.tensors()) > 1 or self.window is not None:
            return False
        if not padding.is_cuda or not is_tracked(padding) or (self.causal and seqlen_q != seqlen_k):
            return False
        if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
            return False
        return not (padding > 0 if self.causal else padding < seqlen_k).any()

    def tensors(self) -> list[Tensor]:
        return [t for t in (self.leftpad, self.key_start, self.key_end) if t is not None]

    def ranges(self) -> dict[str, Any]:
        """Returns the op's keyword arguments that are set, besides causal and leftpad."""
        given = {"key_start": self.key_start, "key_end": self.key_end, "window": self.window}
        return {name: value for name, value in given.items() if value is not None}

    def dense(self, seqlen_q: int, seqlen_k: int) -> Tensor | None:
        """Returns the mask as a bool ``(batch, 1, seqlen_q, seqlen_k)``, None if `hides_no_key`."""
        if self.hides_no_key:
            return None
        device = self.tensors()[0].device
        key = torch.arange(seqlen_k, device=device)
        end = seqlen_k if self.key_end is None else self.key_end[:, None]
        if self.causal:
            end = end + torch.arange(1 - seqlen_q, 1, device=device)
        visible = key < torch.as_tensor(end, device=device)[..., None]
        if self.leftpad is not None:
            visible = visible & (key >= self.leftpad[:, None, None])
        if self.key_start is not None:
            visible = visible & (key >= self.key_start[..., None])
        if self.window is not None:
            distance = (key - torch.arange(seqlen_q, device=device)[:, None]).abs()
            visible = visible & (distance < self.window)
        return visible.expand(-1, seqlen_q, -1)[:, None]


def is_numbers(mask: Tensor) -> bool:
    if mask.dim() != 4 or mask.shape[3] != 1:
        return False
    return mask.dtype == torch.uint32 or (mask.dtype == torch.int32 and mask.shape[2] == 1)


def leftpad_mask(leftpad: Tensor) -> Tensor:
    """Encodes leftpad ``(batch,)`` as a causal mask."""
    leftpad = leftpad.to(torch.int32)
    mask = leftpad.view(-1, 1, 1, 1)
    if not torch.compiler.is_compiling():
        # Layers read this attribute, so that none of them has to make a view on the host.
        mask.torchweld_leftpad = leftpad
    return mask


def ranges(key_end: Tensor, key_start: Tensor) -> Tensor:
    """Encodes key_end ``(batch,)`` and key_start ``(batch, rows)`` as a causal mask.

    In memory the batch comes last. In a step with one query, which waits for the host, layers then
    get both tensors without a copy.
    """
    both = torch.cat([key_end[None], key_start.t()]).to(torch.int32)
    return both.view(*both.shape, 1, 1).transpose(0, 1)


def bidirectional(key_end: Tensor, first: Tensor | None = None, window: int = 0) -> Tensor:
    """Encodes a mask that is not causal.

    Args:
        key_end: ``(batch,)``, one past the last key.
        first: ``(batch,)``, the first key, or None for 0.
        window: Keys that a query sees to each side, its own counted; 0 for all.
    """
    bounds = [key_end] if first is None else [key_end, first]
    both = torch.stack(bounds).to(torch.int32).view(torch.uint32)
    return both.view(*both.shape, 1, 1).transpose(0, 1).expand(-1, -1, 1 + window, -1)


def is_tracked(t: Tensor) -> bool:
    """Whether torch counts the writes to a tensor."""
    return type(t) is Tensor and not t.is_inference()


def once(mask: Tensor, name: str, made_for: tuple[Any, ...], make: Callable[[], _T]) -> _T:
    """Returns the result of ``make``, which the first layer of a pass computes for all layers.

    The attribute ``name`` of the mask keeps the result until the mask is freed or written.
    ``made_for`` are the other values that the result depends on.
    """
    # Views of a mask that is no view itself refer to it: kept in it, they would make a cycle.
    if torch.compiler.is_compiling() or not is_tracked(mask) or not mask._is_view():
        return make()
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return make()
    keys = [WeakIdRef(each) if isinstance(each, Tensor) else each for each in made_for]
    made_for = mask._version, torch.is_inference_mode_enabled(), *keys
    kept = vars(mask).get(name)
    if kept is None or kept[0] != made_for:
        kept = made_for, make()
        setattr(mask, name, kept)
    return kept[1]


def split(mask: Tensor, seqlen_q: int, device: torch.device) -> Numbers:
    """Decodes a mask's numbers for a layer of ``seqlen_q`` queries.

    Raises:
        ValueError: the mask was made for another number of queries.
    """
    made_for = seqlen_q, device
    return once(mask, "torchweld_numbers", made_for, lambda: _split(mask, *made_for))


def _split(mask: Tensor, seqlen_q: int, device: torch.device) -> Numbers:
    if mask.device != device:
        mask = mask.to(device)
    if mask.dtype == torch.uint32:
        bounds = mask[:, :, 0, 0].view(torch.int32).unbind(1)
        # The first key is not passed as leftpad, which would hide queries too: in cross-attention
        # the queries belong to another sequence.
        start = None if len(bounds) == 1 else bounds[1][:, None].expand(-1, seqlen_q)
        window = mask.shape[2] - 1 or None
        return Numbers(causal=False, key_start=start, key_end=bounds[0], window=window)
    if mask.shape[1] == 1:
        given = None if torch.compiler.is_compiling() else getattr(mask, "torchweld_leftpad", None)
        return Numbers(causal=True, leftpad=mask.view(-1) if given is None else given)
    numbers = mask[:, :, 0, 0]
    key_end, key_start = numbers[:, 0].contiguous(), numbers[:, 1:]
    if key_start.shape[1] != seqlen_q:
        raise ValueError(
            f'attn_implementation="torchweld": the mask must be for {seqlen_q} queries, but got '
            f'one for {key_start.shape[1]}; use attn_implementation="eager" for this model'
        )
    return Numbers(causal=True, key_start=key_start.contiguous(), key_end=key_end)


def assert_on_device(good: Tensor, message: str) -> None:
    """Makes the device fail with the message if ``good`` is false; the host reads no value."""
    # NOTE: at most 254 characters, because a CUDA assertion holds no more, and no quotation marks,
    # which the code that torch.compile generates does not escape.
    torch._assert_async(good, message.replace('"', ""))
