"""The pattern of a mask function while torch.compile or export traces.

The tracer hides a function's closure, so :mod:`.mask_pattern` can't look into one that holds
tensors: the documents of a packed row, or where chunks begin. Such a function is called instead. A
token that does not see the key before it begins a document or a chunk, and rows see the keys from
there up to themselves. The device asserts that the function shows the first and the last key of
each row's range and hides the keys next to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import mask_pattern
from .mask_pattern import Pattern
from .mask_ranges import Call, assert_holds, surely

UNKNOWN = "the mask has a function that torchweld does not know (custom, or blocks of tokens)"


def pattern_of(
    mask_function: Callable,
    local_size: int | None,
    causal_skip: bool,
    skip: bool,
    call: Call,
    *,
    config: Any = None,
    use_vmap: bool = False,
    **_: Any,
) -> Pattern | None:
    """The pattern of a mask function that is being traced, or None if it is unknown.

    Args:
        mask_function: transformers' description of the pattern.
        local_size: Window or chunk size of a local pattern.
        causal_skip: Whether None may stand for plain causal attention.
        skip: Whether None may stand for some mask.
        call: The request for the mask.
        config: The model's.
        use_vmap: Whether a function of the caller's is in the mask.
    """
    # transformers takes a local pattern that is wider than the whole context as hiding nothing.
    if causal_skip and local_size is not None and surely(call.kv_length < local_size):
        return Pattern(causal=True)
    if mask_pattern.is_simple(mask_function):
        return mask_pattern.of(mask_function)
    if use_vmap or not mask_pattern.is_combined(mask_function):
        return None
    square = not isinstance(call.q_offset, Tensor) and call.q_offset == call.kv_offset == 0
    packed = call.attention_mask is None and not skip and square
    if packed or (local_size is not None and _has_chunks(config)):
        return _probed(mask_function, local_size, call)
    return None if local_size is None else mask_pattern.of_constants(mask_function)


def _has_chunks(config: Any) -> bool:
    return getattr(config, "attention_chunk_size", None) is not None


def _probed(mask_function: Callable, local_size: int | None, call: Call) -> Pattern:
    """The causal pattern that a function has where it is called.

    A row sees at most ``local_size`` keys, the size of a window or a chunk.
    """
    key = torch.arange(call.kv_length, device=call.device)[None]
    sequence = torch.arange(call.batch_size, device=call.device)[:, None]
    head = torch.zeros((), dtype=torch.int64, device=call.device)
    last = call.kv_length - 1

    def sees(other: Tensor) -> Tensor:
        offset = call.kv_offset
        return mask_function(sequence, head, key + offset, other + offset)

    continues = sees((key - 1).clamp_min(0))
    start = torch.where(continues, 0, key).expand(call.batch_size, -1).cummax(1).values
    if local_size is not None:
        start = start.maximum(key - (local_size - 1))
    ends = sees(key) & sees(start)
    before = (start == 0) | ~sees((start - 1).clamp_min(0))
    behind = (key == last) | ~sees((key + 1).clamp_max(last))
    assert_holds((ends & before & behind).all(), UNKNOWN)
    return Pattern(causal=True, starts=start)
