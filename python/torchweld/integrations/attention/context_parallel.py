"""Runs transformers' models inside of ``torchweld.distributed.context_parallel``.

There the mask function (:mod:`.mask`) and the attention function (:mod:`.forward`) call this
module. It refuses calls that it can't serve: all other paths see only one process's tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchweld.ops.leftpad import before_first_token

from . import mask_numbers, mask_pattern
from .mask_ranges import Call


def _refuse(reason: str) -> None:
    raise ValueError(f"torchweld: context_parallel must see causal attention, but {reason}")


def mask(context: Any, call: Call) -> Tensor | None:
    """Returns the layers' mask for the whole sequences, as :mod:`.mask_numbers`, or None.

    ``call`` describes this process's tokens. None means causal attention without padding.

    Raises:
        ValueError: The mask is not causal, or has cached tokens, packed documents or holes; or
            torch.compile traces the call.
    """
    from torchweld.distributed.sequence import gather_sequence, local_positions

    if torch.compiler.is_compiling():
        _refuse("torch.compile traces the model; compile its layers instead")
    pattern, attention_mask = mask_pattern.of(call.mask_function), call.attention_mask
    if pattern is None or not pattern.causal:
        _refuse("the model's mask is another one")
    if attention_mask is not None and attention_mask.shape != (call.batch_size, call.q_length):
        _refuse(
            f"attention_mask is {tuple(attention_mask.shape)}, not this process's "
            f"{(call.batch_size, call.q_length)}; use shard_sequence"
        )
    offset = isinstance(call.q_offset, Tensor) or call.q_offset or call.kv_offset
    if call.q_length != call.kv_length or offset:
        _refuse("there is a cache of earlier tokens; use use_cache=False")
    positions = local_positions(context.group, call.q_length, torch.device(call.device))
    if pattern.documents is not None:
        # A process has two chunks of the sequence. transformers takes the gap between them for the
        # border of two documents.
        gap = (positions.diff(prepend=positions[:1] - 1) != 1).cumsum(0)
        if not (pattern.documents == gap).all():
            _refuse("position_ids hold packed documents, or are not those of shard_sequence")
    leftpad = None
    if attention_mask is not None:
        tokens = gather_sequence(attention_mask.to(torch.uint8), context.group).to(torch.bool)
        begins = (tokens & ~tokens.roll(1, 1)).sum(1) + (tokens[:, 0] & tokens[:, -1])
        if (begins > 1).any():
            _refuse("attention_mask has padding between tokens")
        leftpad = before_first_token(tokens)
    context.leftpad, context.seen_positions = leftpad, None
    if pattern.window is None and pattern.chunk is None:
        return None if leftpad is None else mask_numbers.leftpad_mask(leftpad)
    start = pattern.key_start(positions, 0).expand(call.batch_size, -1)
    if leftpad is not None:
        start = start.maximum(leftpad[:, None])
    seqlen = call.q_length * context.group.size()
    end = torch.full((call.batch_size,), seqlen, device=start.device)
    return mask_numbers.ranges(end, start)


def attention(
    context: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    numbers: mask_numbers.Numbers | None,
    reason: str | None,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> Tensor:
    """Computes one layer's attention to the tokens of all processes.

    ``reason`` says why the op would not be used outside of the context, or is None.

    Returns:
        ``(batch, nheads, tokens, head_dim_v)``.

    Raises:
        ValueError: The call is not served, or position_ids are not this process's.
    """
    if kwargs.get("cu_seq_lens_q") is not None:
        reason = "cu_seq_lens_q is given"
    if reason is None and (numbers is None or not numbers.causal):
        reason = "the layer's mask is another one"
    if reason is not None:
        _refuse(reason)
    if context.check:
        _check_positions(context, query, kwargs.get("position_ids"))
    return context.attention(
        query,
        key,
        value,
        numbers.leftpad,
        causal=True,
        scale=scaling,
        key_start=numbers.key_start,
        softcap=kwargs.get("softcap"),
        sink=kwargs.get("s_aux"),
    )


def _check_positions(context: Any, query: Tensor, given: Tensor | None) -> None:
    """Refuses position_ids that are not this process's. Runs once per forward pass."""
    from torchweld.distributed.sequence import local_positions

    if given is None:
        _refuse(
            "the model does not hand position_ids to its attention, so they can't be checked; see "
            "that they are those of shard_sequence and use context_parallel(check=False)"
        )
    if given is context.seen_positions:
        return
    positions = local_positions(context.group, query.shape[2], query.device)
    right = given == positions
    if context.leftpad is not None:
        pads = context.leftpad[:, None]
        right = right | (given == positions - pads) | (positions < pads)
    if given.shape[-1] != len(positions) or not right.all():
        _refuse("position_ids are not this process's; give the model shard_sequence(position_ids)")
    context.seen_positions = given
