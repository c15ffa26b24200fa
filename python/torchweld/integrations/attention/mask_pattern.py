"""Reads the pattern of a mask function of transformers: causal, window, chunk and documents.

transformers describes a mask by a Python function of (batch, head, query, key), put together by
the factories of its ``masking_utils``. This module identifies a function by its code object, which
all functions of one factory share, and finds the factory's arguments in the function's closure. Any
other function in a mask, such as one of the caller's, makes the mask unknown; unknown masks go to
SDPA.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from torchweld.ops.key_start import key_start_from_documents


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Says which keys a query sees: those that every field allows."""

    causal: bool
    window: int | None = None  # causal: keys up to the row's own; else keys to each side of it
    chunk: int | None = None
    chunk_offset: Tensor | None = None  # (batch,): where each sequence's first chunk begins
    documents: Tensor | None = None  # (batch, seqlen): which packed document a token is of
    positions: Tensor | None = None  # (batch, seqlen): position in its document, if chunks use it
    starts: Tensor | None = None  # (batch, kv_length): the first key that each token sees

    def key_start(self, position: Tensor, kv_offset: int) -> Tensor:
        """Returns the first key that each query sees.

        Args:
            position: ``(seqlen_q,)``, the queries' positions in the sequence.
            kv_offset: Position of the first key.

        Returns:
            ``(batch or 1, seqlen_q)``, counted from the first key.
        """
        start = torch.zeros_like(position)[None]
        if self.window is not None:
            start = start.maximum(position - kv_offset - (self.window - 1))
        if self.chunk is not None:
            inside = position if self.positions is None else self.positions
            offset = self.chunk_offset[:, None].to(position.device)
            start = start.maximum(position - kv_offset - (inside - offset) % self.chunk)
        if self.documents is not None:
            start = start.maximum(key_start_from_documents(self.documents))
        if self.starts is not None:
            start = start.maximum(self.starts[:, position - kv_offset])
        return start

    def is_packed(self) -> Tensor:
        """Whether every document is one run of tokens, whose positions rise by 1; a bool tensor."""
        good = self.documents.diff(dim=1) >= 0
        if self.positions is not None:
            begins = self.documents.diff(dim=1) != 0
            good &= (self.positions.diff(dim=1) != 1) == begins
        return good.all()


def of(mask_function: Callable) -> Pattern | None:
    """Returns the pattern of a mask function, or None if it is unknown."""
    if mask_function is masking_utils.causal_mask_function:
        return Pattern(causal=True)
    if mask_function is getattr(masking_utils, "bidirectional_mask_function", None):
        return Pattern(causal=False)
    operands = _operands(mask_function)
    if operands is None:
        return None
    for operand, rest in (operands, operands[::-1]):
        name, numbers = _closure(operand)
        if name == "documents":
            return _packed(rest, numbers["packed_sequence_mask"])
        base = of(rest)
        if base == Pattern(causal=True) and name == "window":
            return Pattern(causal=True, window=numbers["sliding_window"])
        if base == Pattern(causal=True) and name == "chunk":
            size, offset = numbers["chunk_size"], numbers["left_padding"]
            return Pattern(causal=True, chunk=size, chunk_offset=offset)
        if base == Pattern(causal=False) and name == "two-sided window":
            return Pattern(causal=False, window=numbers["sliding_window"])
    return None


def _packed(rest: Callable, documents: Tensor) -> Pattern | None:
    """Returns the pattern of ``rest`` within each document, or None."""
    name, numbers = _closure(rest)
    positions = None
    if name == "remapped":  # newer versions of transformers
        rest, positions = numbers["mask_function"], numbers["position_ids"]
    base = of(rest)
    if base is None or not base.causal or base.documents is not None:
        return None
    return dataclasses.replace(base, documents=documents, positions=positions)


def of_constants(mask_function: Callable) -> Pattern | None:
    """Like :func:`of`, while torch.compile traces, which can't look into closures itself.

    The mask's functions must close over numbers alone, not over tensors.
    """
    numbers = _causal_and_window(mask_function)
    return None if numbers is None else Pattern(causal=numbers[0], window=numbers[1])


@torch.compiler.assume_constant_result
def _causal_and_window(mask_function: Callable) -> tuple[bool, int | None] | None:
    pattern = of(mask_function)
    return None if pattern is None else (pattern.causal, pattern.window)


def is_simple(mask_function: Callable) -> bool:
    """Whether a mask function is plain causal or bidirectional; torch.compile can trace this."""
    return mask_function is masking_utils.causal_mask_function or (
        mask_function is getattr(masking_utils, "bidirectional_mask_function", None)
    )


def is_combined(mask_function: Callable) -> bool:
    """Whether a mask function is an ``and`` of others; torch.compile can trace this."""
    return getattr(mask_function, "__code__", None) is _AND


def _operands(mask_function: Callable) -> tuple[Callable, Callable] | None:
    """Returns the two functions that an ``and`` combines, or None."""
    name, numbers = _closure(mask_function)
    operands = numbers["mask_functions"] if name == "and" else ()
    return operands if len(operands) == 2 else None


def _closure(function: Callable) -> tuple[str | None, dict[str, Any]]:
    """Returns the name of a function's factory, None if unknown, and the function's closure."""
    code = getattr(function, "__code__", None)
    name = _factories().get(code)
    if name is None:
        return None, {}
    cells = (cell.cell_contents for cell in function.__closure__)
    return name, dict(zip(code.co_freevars, cells, strict=True))


_AND = masking_utils.and_masks().__code__


@functools.cache
def _factories() -> dict[CodeType, str]:
    made = {"and": masking_utils.and_masks()}
    for name, factory, arguments in (
        ("window", "sliding_window_overlay", 1),
        ("two-sided window", "sliding_window_bidirectional_overlay", 1),
        ("chunk", "chunked_overlay", 2),
        ("documents", "packed_sequence_mask_function", 1),
        ("remapped", "remap_positions_for_packed_sequence", 2),
    ):
        if hasattr(masking_utils, factory):
            made[name] = getattr(masking_utils, factory)(*[None] * arguments)
    return {function.__code__: name for name, function in made.items()}
