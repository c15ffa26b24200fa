"""Finds the pattern of a mask function while torch.compile or export traces.

The tracer hides a function's closure, so :mod:`.mask_pattern` can't look into a closure that holds
tensors: the documents of a packed row, or where chunks begin. This module calls such a function. A
token that does not see the key before it begins a document or a chunk, and queries see the keys
from there up to their own. The device asserts that the function shows the first and the last key of
each query's range and hides the keys next to them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import mask_pattern
from .mask_pattern import Pattern
from .mask_ranges import Call, assert_holds, surely

UNKNOWN = "the mask has a function that torchweld does not know (custom, or blocks of tokens)"


def pattern_of(call: Call) -> Pattern | None:
    """Returns the pattern of a mask function that is being traced, or None if it is unknown."""
    function, local_size = call.mask_function, call.local_size
    # transformers leaves out a window or chunk that is wider than all keys.
    if call.causal_skip and local_size is not None and surely(call.kv_length < local_size):
        return Pattern(causal=True)
    if mask_pattern.is_simple(function):
        return mask_pattern.of(function)
    if call.options.get("use_vmap", False) or not mask_pattern.is_combined(function):
        return None  # the mask contains a function of the caller
    square = not isinstance(call.q_offset, Tensor) and call.q_offset == call.kv_offset == 0
    packed = call.attention_mask is None and not call.skip and square
    chunked = getattr(call.options.get("config"), "attention_chunk_size", None) is not None
    if packed or (local_size is not None and chunked):
        return _probed(call)
    return None if local_size is None else mask_pattern.of_constants(function)


def _probed(call: Call) -> Pattern:
    """Finds the causal pattern of a function by calling it on neighbouring keys.

    A query sees at most ``local_size`` keys, the size of a window or a chunk.
    """
    key = torch.arange(call.kv_length, device=call.device)[None]
    sequence = torch.arange(call.batch_size, device=call.device)[:, None]
    head = torch.zeros((), dtype=torch.int64, device=call.device)
    last = call.kv_length - 1

    def sees(other: Tensor) -> Tensor:
        offset = call.kv_offset
        return call.mask_function(sequence, head, key + offset, other + offset)

    continues = sees((key - 1).clamp_min(0))
    start = torch.where(continues, 0, key).expand(call.batch_size, -1).cummax(1).values
    if call.local_size is not None:
        start = start.maximum(key - (call.local_size - 1))
    ends = sees(key) & sees(start)
    before = (start == 0) | ~sees((start - 1).clamp_min(0))
    behind = (key == last) | ~sees((key + 1).clamp_max(last))
    assert_holds((ends & before & behind).all(), UNKNOWN)
    return Pattern(causal=True, starts=start)
