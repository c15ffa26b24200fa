"""The mask function of ``attn_implementation="torchweld"``.

It runs once per forward pass, before the layers, and decides which path they take. What numbers can
say goes to the layers as numbers (:mod:`.hf_numbers`), and they run torchweld's op. Everything else
gets the 4-D mask of ``sdpa`` and runs there, or in the model's own eager attention where the layer
has soft-capped scores or attention sinks, which SDPA lacks.

======================================  ===============
pattern                                 what runs
======================================  ===============
causal                                  the op
causal with a window or in chunks       the op
packed sequences, by position_ids       the op
packed sequences, by cu_seq_lens_q      the op
static cache, sliding or not            the op
bidirectional, cross attention          the op
bidirectional with a window             sdpa
functions of the caller, 4-D masks      sdpa
layers with soft-capped scores, sinks   the op
======================================  ===============

======================================  ===============  ===================
rows of the 2-D mask                    where it can be  where it can't be
                                        read             read
======================================  ===============  ===================
none given                              the op           the op
0..0 1..1, left padding                 the op           sdpa
1..1 0..0, 0..0 1..1 0..0               the op: equal    sdpa
                                        at every token
1..0..1, holes                          sdpa             sdpa
======================================  ===============  ===================

Bidirectional attention runs the op where all rows are padded on one side, whichever it is, and
sdpa where both sides occur; cross attention does so where keys are padded on the right, and where
there is one query.

At padding the values differ from those of other implementations, but they are finite. Holes are a
matter of data: ``generate`` makes them itself where a prompt holds the pad token and no mask is
given. Numbers can't say them, and nothing on the device can choose between two paths, so the host
looks. On a GPU that is one value read back in every forward pass that is given a mask, as
transformers' own ``sdpa`` does; the layers wait for nothing. torch.compile, export, tracing and
CUDA graph capture can't look, so their graphs hold the path that is right for every mask.
``generate`` with a static cache makes its masks outside of the graph that it compiles. Without a
mask and a cache torch.compile can't tell if sequences are packed either: such graphs hold ``sdpa``,
but for a GPT-2 that went through ``fuse``.

transformers looks into position_ids only where there is neither a mask nor a cache, and a model's
cache is on by default: pass ``use_cache=False``, or the ``cu_seq_lens_q`` and ``cu_seq_lens_k`` of
``DataCollatorWithFlattening(return_flash_attn_kwargs=True)``, which hold whatever mask or cache
there is. Where they can't be used they are refused.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

from torchweld.distributed import _active
from torchweld.ops.leftpad import before_first_token, is_readable

from . import hf_pattern
from .hf_attention import MAYBE_PACKED, UNREADABLE, warn_once
from .hf_models import check_config, wants_whole_masks
from .hf_numbers import bidirectional, leftpad_mask, ranges
from .hf_pattern import Pattern

UNKNOWN = "the mask has a function that torchweld does not know (custom, or blocks of tokens)"
TWO_SIDED = "the mask is a window to both sides"
WHOLE = "the model changes the mask, so it gets the whole one"
HOLES = "attention_mask has padding between tokens"
BOTH_SIDES = "attention_mask has padding on both sides of what is not causal"
LEFT_OF_OTHERS = "attention_mask has padding on the left of the keys of a cross attention"
NOT_2D = "attention_mask is not (batch, positions)"
TOO_SHORT = "attention_mask ends before the last query"
NO_POSITION = "the position of the queries among the keys is not known"


class Call(NamedTuple):
    """What transformers asks a mask for, beside the pattern; see :func:`attention_mask`."""

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int | Tensor | None
    kv_offset: int
    attention_mask: Tensor | None
    device: torch.device | str


def _has_holes(tokens: Tensor) -> Tensor:
    runs = tokens[:, :1].sum(1) + (tokens[:, 1:] & ~tokens[:, :-1]).sum(1)
    return (runs > 1).any()


def attention_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | Tensor | None = None,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """The mask as numbers where they can say it, else the mask of ``sdpa``.

    Args:
        batch_size: Sequences in the batch.
        q_length: Query rows; versions that pass ``cache_position`` instead may leave it out.
        kv_length: Keys that the attention will see.
        q_offset: Position of the first query row. A tensor means a static cache.
        kv_offset: Position of the first key.
        mask_function: transformers' description of the pattern.
        attention_mask: 2-D mask ``(batch, positions)``, true at tokens, or None.
        local_size: Window or chunk size of a local pattern.
        allow_is_causal_skip: False when the caller needs a materialised mask.
        **kwargs: Handed to ``sdpa_mask``; ``config`` says which model asks.

    Returns:
        A mask of :mod:`.hf_numbers`, or None (no padding, queries and keys end together), or the
        bool 4-D mask of ``sdpa``.

    Raises:
        ValueError: attention_mask is for another batch. Or the model does not take its attention
            from transformers' AttentionInterface, or neither supports ``sdpa`` nor lacks it for
            what torchweld's op has; or context_parallel does not serve the mask.
    """
    if (config := kwargs.get("config")) is not None:
        check_config(type(config))
    if q_length is None:
        q_length = kwargs["cache_position"].shape[0]
    if mask_function is None:
        mask_function = causal_mask_function
    device = kwargs.get("device")
    if device is None:
        device = "cpu" if attention_mask is None else attention_mask.device
    if attention_mask is not None:
        attention_mask = _of_batch(attention_mask, batch_size)
    call = Call(batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask, device)
    if _active.current is not None:
        from . import hf_context

        pattern = hf_pattern.of(mask_function)
        return hf_context.mask(_active.current, pattern, **call._asdict())
    described = mask_function, local_size, allow_is_causal_skip, call, kwargs
    pattern, mask, reason = _as_numbers(*described)
    if reason is None:
        return mask
    # A traced function gives no pattern, but it may be the plain causal one.
    causal = mask_function is causal_mask_function if pattern is None else pattern.causal
    return _as_dense(*described, causal, reason)


def _as_numbers(
    mask_function: Any,
    local_size: int | None,
    causal_skip: bool,
    call: Call,
    kwargs: dict[str, Any],
) -> tuple[Pattern | None, Tensor | None, str | None]:
    """The numbers path: the pattern if known, the mask if one is needed, or why there are none."""
    config = kwargs.get("config")
    skip = causal_skip or kwargs.get("allow_is_bidirectional_skip", False)
    # transformers takes a local pattern that is wider than the whole context as hiding nothing.
    wide = causal_skip and local_size is not None and call.kv_length < local_size
    if not torch.compiler.is_compiling():
        pattern, reason = hf_pattern.of(mask_function), UNKNOWN
    elif wide:
        pattern, reason = Pattern(causal=True), None
    else:
        custom = local_size is None or kwargs.get("use_vmap", False)
        pattern, reason = _traced(mask_function, custom, skip, config, call)
    if pattern is not None:
        reason = _refusal(pattern, skip, config, call)
    if reason is not None:
        return pattern, None, reason
    if pattern.causal:
        return pattern, *_causal(pattern, causal_skip, call)
    return pattern, *_bidirectional(pattern, skip, call)


def _as_dense(
    mask_function: Any,
    local_size: int | None,
    causal_skip: bool,
    call: Call,
    kwargs: dict[str, Any],
    causal: bool,
    reason: str,
) -> Tensor | None:
    """The dense path: the mask of ``sdpa``, with ``reason`` and ``causal`` as attributes."""
    readable = call.attention_mask is None or is_readable(call.attention_mask)
    mask = sdpa_mask(
        batch_size=call.batch_size,
        q_length=call.q_length,
        kv_length=call.kv_length,
        q_offset=0 if call.q_offset is None else call.q_offset,
        kv_offset=call.kv_offset,
        attention_mask=call.attention_mask,
        mask_function=mask_function,
        local_size=local_size,
        # sdpa_mask reads attention_mask before it leaves the mask out.
        allow_is_causal_skip=causal_skip and readable,
        **kwargs,
    )
    if torch.compiler.is_compiling():
        warn_once(reason, traced=True)
    elif mask is not None:
        mask.torchweld_reason = reason
    if mask is not None:
        mask.torchweld_causal = causal
    return mask


def _of_batch(attention_mask: Tensor, batch_size: int) -> Tensor:
    """The mask with a row for every sequence: one row stands for all.

    Raises:
        ValueError: It has no rows, or not as many as there are sequences.
    """
    if attention_mask.dim() < 2 or attention_mask.shape[0] not in (1, batch_size):
        raise ValueError(
            f'attn_implementation="torchweld": attention_mask must be ({batch_size}, positions), '
            f"but got {tuple(attention_mask.shape)}"
        )
    if attention_mask.shape[0] == batch_size:
        return attention_mask
    return attention_mask.expand(batch_size, *attention_mask.shape[1:])


def _traced(
    mask_function: Any, custom: bool, skip: bool, config: Any, call: Call
) -> tuple[Pattern | None, str]:
    """What torch.compile can tell of a mask function, or None and why it can't."""
    if hf_pattern.is_simple(mask_function):
        return hf_pattern.of(mask_function), UNKNOWN
    if call.attention_mask is not None:
        return None, UNREADABLE
    if not hf_pattern.is_combined(mask_function):
        return None, UNKNOWN
    if not skip and not isinstance(call.q_offset, Tensor) and call.q_offset == 0:
        return None, MAYBE_PACKED
    # What is looked into must close over numbers alone. Chunks close over a tensor.
    if custom or getattr(config, "attention_chunk_size", None) is not None:
        return None, UNKNOWN
    return hf_pattern.of_constants(mask_function), UNKNOWN


def _refusal(pattern: Pattern, skip: bool, config: Any, call: Call) -> str | None:
    """Why the numbers of a pattern must not be used, or None."""
    if not skip and (config is None or wants_whole_masks(type(config))):
        return WHOLE
    if call.attention_mask is not None and call.attention_mask.dim() != 2:
        return NOT_2D
    if call.attention_mask is not None and not is_readable(call.attention_mask):
        return UNREADABLE
    if pattern.documents is not None:
        if not is_readable(pattern.documents):
            return MAYBE_PACKED
        square = call.q_length == call.kv_length == pattern.documents.shape[1]
        if not square or call.q_offset != 0 or call.kv_offset != 0 or not pattern.is_packed():
            return UNKNOWN
    return None


def _causal(pattern: Pattern, skip: bool, call: Call) -> tuple[Tensor | None, str | None]:
    """The numbers of a causal mask, or None and why not."""
    last = call.kv_offset + call.kv_length  # one past the last query's position
    known = not isinstance(call.q_offset, Tensor)  # else it is taken from the device below
    if known and call.q_offset is not None:
        last = call.q_offset + call.q_length
    aligned = known and last == call.kv_offset + call.kv_length
    # What is as wide as all that there is hides nothing.
    windowed = pattern.window is not None and not (aligned and call.kv_length <= pattern.window)
    chunked = pattern.chunk is not None and not (aligned and last <= pattern.chunk)
    packed = pattern.documents is not None
    # In a decode step with a static cache, which is compiled, all steps take one form.
    plain = aligned and skip and not (windowed or chunked or packed)
    if call.q_offset is None and not (
        plain and (call.attention_mask is not None or call.q_length == call.kv_length)
    ):
        return None, NO_POSITION
    leftpad = None
    if call.attention_mask is not None:
        leftpad = _pads_of_suffixes(call, last if known else None)
    if leftpad is not None:
        last = call.attention_mask.shape[1]  # which is what was found
    elif not known:
        last = call.q_offset + call.q_length
    if leftpad is None and call.attention_mask is not None:
        tokens = _tokens(call)
        short = call.attention_mask.shape[1] < last
        if not aligned:
            tokens = tokens & (
                torch.arange(call.kv_length, device=tokens.device) < last - call.kv_offset
            )
        holes, short = _read(_has_holes(tokens), short)
        if short:
            return None, TOO_SHORT
        if holes:
            return None, HOLES
        leftpad = before_first_token(tokens)
    if plain:
        # Equal lengths, or one query that sees everything: nothing to say. Else bottom-right
        # causal, which None would not mean to transformers: zero pads do.
        if leftpad is None and call.q_length != call.kv_length and call.q_length != 1:
            leftpad = torch.zeros(call.batch_size, dtype=torch.int32, device=call.device)
        return None if leftpad is None else leftpad_mask(leftpad), None
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
    if isinstance(end, Tensor):
        key_end = end.expand(call.batch_size)
    else:
        key_end = torch.full((call.batch_size,), end, dtype=torch.int32, device=call.device)
    return ranges(key_end, key_start), None


def _bidirectional(pattern: Pattern, skip: bool, call: Call) -> tuple[Tensor | None, str | None]:
    """The numbers of a mask where every query sees every token, or None and why not."""
    if pattern.window is not None:
        at_start = (
            not isinstance(call.q_offset, Tensor) and call.q_offset == 0 and call.kv_offset == 0
        )
        if not at_start or max(call.q_length, call.kv_length) > pattern.window + 1:
            return None, TWO_SIDED
    if call.attention_mask is None:
        return None, None if skip else WHOLE
    tokens = _tokens(call)
    first, count = before_first_token(tokens), tokens.sum(1)
    some = count > 0
    left = ((first > 0) & some).any()
    right = ((first + count < call.kv_length) & some).any()
    holes, full, left, right = _read(_has_holes(tokens), tokens.all(), left, right)
    if holes:
        return None, HOLES
    if full and skip:
        return None, None
    if not left:
        return bidirectional(count), None
    if call.q_length == 1:  # one query that is the last one sees as much where it is causal
        return ranges(first + count, first[:, None]), None
    if right:
        return None, BOTH_SIDES
    if call.q_length != call.kv_length:
        return None, LEFT_OF_OTHERS
    return bidirectional(first + count, first), None


def _pads_of_suffixes(call: Call, last: int | None) -> Tensor | None:
    """leftpad where every row has tokens from some place on, to the last query; else None.

    What every step of generation asks, in few launches and one value read. ``last`` is one past
    the last query's position, None where the device alone knows it.
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
    ends = first + tokens.sum(1)  # count where a row is so, else less
    if last is not None:
        good = int(ends.min()) == count
    else:
        # One value for both: an end that is too small weighs more than any offset makes up for.
        weight = call.kv_offset + count + 1
        most = torch.sub(call.q_offset, ends, alpha=weight).max()
        good = int(most) == call.kv_offset + count - call.q_length - weight * count
    return first.to(torch.int32) if good else None


def _tokens(call: Call) -> Tensor:
    """bool ``(batch, kv_length)``: which keys are tokens."""
    tokens = call.attention_mask[:, call.kv_offset : call.kv_offset + call.kv_length].to(torch.bool)
    return F.pad(tokens, (0, call.kv_length - tokens.shape[1]))


def _read(*flags: Tensor | bool) -> list[bool]:
    """The values of flags, for which the host waits once."""
    if not any(isinstance(flag, Tensor) for flag in flags[1:]):
        return [bool(flag) for flag in flags]
    return torch.stack([torch.as_tensor(flag) for flag in flags]).tolist()
