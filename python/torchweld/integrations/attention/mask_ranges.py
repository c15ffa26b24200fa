"""Computes the numbers that torchweld's op takes from a pattern and a 2-D mask.

If the host can read the mask, it checks whether numbers can express the mask, and returns the
reason if they can't. Otherwise (torch.compile, export, tracing, CUDA graph capture) the numbers are
computed without a check, and an assertion on the device fails for a mask that they can't express.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweld.ops.leftpad import before_first_token, is_readable

from . import mask_numbers
from .mask_pattern import Pattern

TWO_SIDED = "the mask is a window to both sides of queries that are not the keys"
WHOLE = "the model changes the mask, so it gets the whole one"
HOLES = "attention_mask has padding between tokens"
TOO_SHORT = "attention_mask ends before the last query"
NO_POSITION = "the position of the queries among the keys is not known"


class Call(NamedTuple):
    """Holds the arguments of a call of :func:`.mask.attention_mask`."""

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int | Tensor | None  # a tensor for a static cache
    kv_offset: int
    attention_mask: Tensor | None
    device: torch.device | str
    mask_function: Any = None
    local_size: int | None = None
    causal_skip: bool = True  # whether None may stand for plain causal attention
    options: dict[str, Any] = {}  # the keyword arguments of transformers

    @property
    def skip(self) -> bool:
        """Whether None may stand for some mask."""
        return self.causal_skip or self.options.get("allow_is_bidirectional_skip", False)


def surely(condition: bool) -> bool:
    """Whether a condition on lengths holds, under torch.compile for all possible lengths."""
    if not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def first_reason(flags: dict[str, Tensor | bool]) -> str | None:
    """Returns the first reason whose flag is true, or None; the host waits once.

    If the host can't read the flags, they become assertions on the device.
    """
    for reason, flag in flags.items():
        if not isinstance(flag, Tensor) and flag:
            return reason
    unknown = {reason: flag for reason, flag in flags.items() if isinstance(flag, Tensor)}
    if not unknown:
        return None
    if all(is_readable(flag) for flag in unknown.values()):
        values = torch.stack(list(unknown.values())).tolist()
        return next((reason for reason, value in zip(unknown, values, strict=True) if value), None)
    for reason, flag in unknown.items():
        assert_holds(~flag, reason)
    return None


def assert_holds(good: Tensor, reason: str) -> None:
    """Makes the device fail with the reason if ``good`` is false; the host reads no value."""
    where = "which a compiled, exported or captured graph does not serve"
    mask_numbers.assert_on_device(
        good, f'attn_implementation="torchweld": {reason}, {where}; use "sdpa" for such batches'
    )


def causal(pattern: Pattern, call: Call) -> tuple[Tensor | None, str | None]:
    """Encodes a causal mask as numbers; returns the same pairs as :func:`bidirectional`."""
    last = call.kv_offset + call.kv_length  # one past the last query's position
    known = not isinstance(call.q_offset, Tensor)  # a tensor's value is known to the device alone
    if known and call.q_offset is not None:
        last = call.q_offset + call.q_length
    aligned = known and last == call.kv_offset + call.kv_length
    # A window or a chunk of all keys hides none.
    windowed = pattern.window is not None and not (
        aligned and surely(call.kv_length <= pattern.window)
    )
    chunked = pattern.chunk is not None and not (aligned and surely(last <= pattern.chunk))
    packed = pattern.documents is not None or pattern.starts is not None
    # Decode steps over a static cache (causal_skip is False) share a compiled graph: none is plain.
    plain = aligned and call.causal_skip and not (windowed or chunked or packed)
    if call.q_offset is None and not (
        plain and (call.attention_mask is not None or call.q_length == call.kv_length)
    ):
        return None, NO_POSITION
    leftpad = None
    if call.attention_mask is not None and is_readable(call.attention_mask):
        leftpad = _pads_of_suffixes(call, last if known else None)
    if leftpad is not None:
        last = call.attention_mask.shape[1]
    elif not known:
        last = call.q_offset + call.q_length
    if leftpad is None and call.attention_mask is not None:
        tokens = _tokens(call)
        if not aligned:
            tokens = tokens & (
                torch.arange(call.kv_length, device=tokens.device) < last - call.kv_offset
            )
        short = call.attention_mask.shape[1] < last
        reason = first_reason({TOO_SHORT: short, HOLES: _has_holes(tokens)})
        if reason is not None:
            return None, reason
        leftpad = before_first_token(tokens)
    if plain:
        # Equal lengths, or one query that sees every key, need no mask. Other masks are causal at
        # the bottom right, which None does not mean to transformers, so leftpad is zeros.
        if leftpad is None and call.q_length != call.kv_length and call.q_length != 1:
            leftpad = torch.zeros(call.batch_size, dtype=torch.int32, device=call.device)
        return None if leftpad is None else mask_numbers.leftpad_mask(leftpad), None
    if windowed or chunked or packed or leftpad is None:
        position = torch.arange(call.q_length, device=call.device) + (last - call.q_length)
        key_start = pattern.key_start(position, call.kv_offset).expand(call.batch_size, -1)
        if leftpad is not None:
            key_start = key_start.maximum(leftpad[:, None])
    else:
        key_start = leftpad[:, None]
        if call.q_length != 1:
            key_start = key_start.expand(-1, call.q_length)
    end = last - call.kv_offset
    key_end = end.expand(call.batch_size) if isinstance(end, Tensor) else _full(call, end)
    return mask_numbers.ranges(key_end, key_start), None


def bidirectional(pattern: Pattern, call: Call) -> tuple[Tensor | None, str | None]:
    """Encodes a mask that is not causal as numbers for the op.

    ``pattern.window`` counts the keys on each side of a query's own.

    Returns:
        The numbers and None; (None, None) if no mask is needed; (None, reason) if they can't
        express it.
    """
    window = 0
    if pattern.window is not None and not (
        surely(call.q_length <= pattern.window + 1) and surely(call.kv_length <= pattern.window + 1)
    ):
        at_start = not isinstance(call.q_offset, Tensor) and call.q_offset == call.kv_offset == 0
        if not at_start or call.q_length != call.kv_length:
            return None, TWO_SIDED
        window = pattern.window + 1
    if call.attention_mask is None:
        if window:
            return mask_numbers.bidirectional(_full(call, call.kv_length), window=window), None
        return None, None if call.skip else WHOLE
    tokens = _tokens(call)
    first, count = before_first_token(tokens), tokens.sum(1)
    if not is_readable(tokens):
        assert_holds(~_has_holes(tokens), HOLES)
        return mask_numbers.bidirectional(first + count, first, window), None
    left = ((first > 0) & (count > 0)).any()
    holes, full, left = torch.stack([_has_holes(tokens), tokens.all(), left]).tolist()
    if holes:
        return None, HOLES
    if full and call.skip and not window:
        return None, None
    if left:
        return mask_numbers.bidirectional(first + count, first, window), None
    return mask_numbers.bidirectional(count, window=window), None


def _full(call: Call, value: int) -> Tensor:
    return torch.full((call.batch_size,), value, dtype=torch.int32, device=call.device)


def _has_holes(tokens: Tensor) -> Tensor:
    before = F.pad(tokens, (1, 0))[:, :-1]
    return ((tokens & ~before).sum(1) > 1).any()


def _pads_of_suffixes(call: Call, last: int | None) -> Tensor | None:
    """Returns leftpad if each row's tokens are a suffix that ends at the last query, else None.

    Every step of generation calls this, so it takes few launches and reads one value. ``last`` is
    one past the last query's position, None if the device alone knows it.
    """
    tokens = call.attention_mask.to(torch.bool)
    if call.kv_offset != 0:
        tokens = tokens[:, call.kv_offset :]
    count = tokens.shape[1]
    if tokens.numel() == 0 or count > call.kv_length:
        return None
    if last is not None and last != call.kv_offset + count:
        return None
    tokens = tokens.view(torch.uint8)
    first = tokens.argmax(1)
    ends = first + tokens.sum(1)  # `count` if a row's tokens are a suffix, else less
    if last is not None:
        good = int(ends.min()) == count
    else:
        # One value tests both the ends and q_offset: a short end outweighs any q_offset.
        weight = call.kv_offset + count + 1
        most = torch.sub(call.q_offset, ends, alpha=weight).max()
        good = int(most) == call.kv_offset + count - call.q_length - weight * count
    return first.to(torch.int32) if good else None


def _tokens(call: Call) -> Tensor:
    """Returns bool ``(batch, kv_length)``: which keys are tokens."""
    tokens = call.attention_mask[:, call.kv_offset : call.kv_offset + call.kv_length].to(torch.bool)
    return F.pad(tokens, (0, call.kv_length - tokens.shape[1]))
