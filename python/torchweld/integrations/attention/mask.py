"""The mask function of ``attn_implementation="torchweld"``.

It runs once per forward pass, before the layers, and decides which path they take. A mask that
numbers describe (padding, each query's first and last key, a window) goes to the layers as these
numbers (:mod:`.mask_numbers`), and they run torchweld's op. For any other mask the layers get the
4-D mask of ``sdpa`` and run SDPA, or the model's own eager attention if they have soft-capped
scores or attention sinks, which SDPA lacks.

======================================  ===============
pattern                                 what runs
======================================  ===============
causal                                  the op
causal with a window or in chunks       the op
packed sequences, by position_ids       the op
packed sequences, by cu_seq_lens_q      the op
static cache, sliding or not            the op
bidirectional, cross attention          the op
bidirectional with a window             the op
functions of the caller, 4-D masks      sdpa
layers with soft-capped scores, sinks   the op
======================================  ===============

======================================  ===============  ===============
rows of the 2-D mask                    eager mode       traced, captured
======================================  ===============  ===============
none given                              the op           the op
0..0 1..1, left padding                 the op           the op
1..1 0..0, 0..0 1..1 0..0               the op: equal    the op: equal
                                        at every token   at every token
1..0..1, holes                          sdpa             an error
======================================  ===============  ===============

At padding the results differ from those of other implementations, but they are finite. Numbers
can't describe holes, and only the mask's values show them: ``generate`` makes holes itself if a
prompt holds the pad token and no mask is given. In eager mode the host checks: on a GPU it reads
one value back in every forward pass that is given a mask, as transformers' own ``sdpa`` does; the
layers read none. Under torch.compile, export, tracing and CUDA graph capture the host can't check.
The device computes the numbers then, and an assertion on the device fails for a mask with holes;
use ``attn_implementation="sdpa"`` for such batches. ``generate`` with a static cache makes its
masks outside of the graph that it compiles.

docs/packing.md says how packed sequences are given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

from torchweld.distributed import _active
from torchweld.ops.leftpad import is_readable

from . import context_parallel, mask_pattern, mask_ranges, packed, traced_pattern
from .fallback import warn_once
from .mask_pattern import Pattern
from .mask_ranges import WHOLE, Call
from .models import check_config, wants_whole_masks
from .traced_pattern import UNKNOWN

NOT_2D = "attention_mask is not (batch, positions)"


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
    """Returns the mask as numbers if they can describe it, else the mask of ``sdpa``.

    The arguments are those of transformers' mask functions. A tensor as ``q_offset`` means a static
    cache; versions that pass ``cache_position`` leave ``q_length`` out. ``allow_is_causal_skip`` is
    False when the caller needs a materialised mask. The other arguments go to ``sdpa_mask``;
    ``config`` says which model asks.

    Returns:
        A mask of :mod:`.mask_numbers`, or None if none is needed (no padding, queries and keys end
        together), or the bool 4-D mask of ``sdpa``.

    Raises:
        ValueError: attention_mask is for another batch. Or the model does not take its attention
            from transformers' AttentionInterface, or lacks ``sdpa`` for another reason than
            sinks or soft-capped scores; or context_parallel does not serve the mask.
    """
    if not torch.compiler.is_compiling():
        packed.end_pass()
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
    call = Call(
        batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask, device, mask_function,
        local_size, allow_is_causal_skip, kwargs,
    )  # fmt: skip
    if _active.current is not None:
        return context_parallel.mask(_active.current, call)
    pattern, mask, reason = _as_numbers(call)
    if reason is None:
        return mask
    # A function without a known pattern may still be the plain causal one.
    causal = mask_function is causal_mask_function if pattern is None else pattern.causal
    return _as_dense(call, causal, reason)


def _as_numbers(call: Call) -> tuple[Pattern | None, Tensor | None, str | None]:
    """Returns (pattern or None, mask as numbers or None, why a dense mask is needed or None)."""
    traced = torch.compiler.is_compiling()
    pattern = traced_pattern.pattern_of(call) if traced else mask_pattern.of(call.mask_function)
    reason = UNKNOWN if pattern is None else _refusal(pattern, call)
    if reason is not None:
        return pattern, None, reason
    numbers = mask_ranges.causal if pattern.causal else mask_ranges.bidirectional
    return pattern, *numbers(pattern, call)


def _as_dense(call: Call, causal: bool, reason: str) -> Tensor | None:
    """Returns the mask of ``sdpa``, or None, with ``reason`` and ``causal`` as attributes."""
    readable = call.attention_mask is None or is_readable(call.attention_mask)
    mask = sdpa_mask(
        batch_size=call.batch_size,
        q_length=call.q_length,
        kv_length=call.kv_length,
        q_offset=0 if call.q_offset is None else call.q_offset,
        kv_offset=call.kv_offset,
        attention_mask=call.attention_mask,
        mask_function=call.mask_function,
        local_size=call.local_size,
        # To learn whether None will do, sdpa_mask reads attention_mask on the host.
        allow_is_causal_skip=call.causal_skip and readable,
        **call.options,
    )
    if torch.compiler.is_compiling():
        warn_once(reason, traced=True)
    elif mask is not None:
        mask.torchweld_reason = reason
    if mask is not None:
        mask.torchweld_causal = causal
    return mask


def _of_batch(attention_mask: Tensor, batch_size: int) -> Tensor:
    """Returns the mask with a row for every sequence; a single row is expanded to all.

    Raises:
        ValueError: The mask is not 2-D or more, or has neither one row nor one per sequence.
    """
    if attention_mask.dim() < 2 or attention_mask.shape[0] not in (1, batch_size):
        raise ValueError(
            f'attn_implementation="torchweld": attention_mask must be ({batch_size}, positions), '
            f"but got {tuple(attention_mask.shape)}"
        )
    if attention_mask.shape[0] == batch_size:
        return attention_mask
    return attention_mask.expand(batch_size, *attention_mask.shape[1:])


def _refusal(pattern: Pattern, call: Call) -> str | None:
    """Returns why a known pattern must not become numbers, or None."""
    config = call.options.get("config")
    if not call.skip and (config is None or wants_whole_masks(type(config))):
        return WHOLE
    if call.attention_mask is not None and call.attention_mask.dim() != 2:
        return NOT_2D
    if pattern.documents is not None:
        square = call.q_length == call.kv_length == pattern.documents.shape[1]
        if not square or call.q_offset != 0 or call.kv_offset != 0:
            return UNKNOWN
        return mask_ranges.first_reason({UNKNOWN: ~pattern.is_packed()})
    return None
