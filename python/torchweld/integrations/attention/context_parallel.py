"""transformers' models inside of ``torchweld.distributed.context_parallel``.

The mask function and the attention function of :mod:`.mask` and :mod:`.forward` come here then.
Calls that it does not serve are refused: every other path would see the tokens of one process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchweld.ops.leftpad import before_first_token

from . import mask_numbers
from .mask_pattern import Pattern


def _refuse(reason: str) -> None:
    raise ValueError(f"torchweld: context_parallel must see causal attention, but {reason}")


def mask(
    context: Any,
    pattern: Pattern | None,
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor | None,
    kv_offset: int,
    attention_mask: Tensor | None,
    device: torch.device | str,
) -> Tensor | None:
    """The mask for the layers as :mod:`.mask_numbers`, of the whole sequences.

    Args:
        context: The ContextParallel that is active.
        pattern: The pattern of the mask function, None if it is unknown.
        batch_size: Sequences in the batch.
        q_length: Tokens of this process.
        kv_length: The same; more where a cache holds earlier tokens.
        q_offset: 0, or a position behind a cache.
        kv_offset: 0, or where a sliding cache begins.
        attention_mask: This process's part of the 2-D mask, or None.
        device: Of the tokens.

    Raises:
        ValueError: It is no causal mask, or there are earlier tokens or holes.
    """
    from torchweld.distributed.sequence import gather_sequence, local_positions

    if torch.compiler.is_compiling():
        _refuse("torch.compile traces the model; compile its layers instead")
    if pattern is None or not pattern.causal:
        _refuse("the model's mask is another one")
    if attention_mask is not None and attention_mask.shape != (batch_size, q_length):
        _refuse(
            f"attention_mask is {tuple(attention_mask.shape)}, not this process's "
            f"{(batch_size, q_length)}; use shard_sequence"
        )
    if q_length != kv_length or isinstance(q_offset, Tensor) or q_offset or kv_offset:
        _refuse("there is a cache of earlier tokens; use use_cache=False")
    positions = local_positions(context.group, q_length, torch.device(device))
    if pattern.documents is not None:
        # transformers takes the gap between head and tail for the border of two documents.
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
    start = pattern.key_start(positions, 0).expand(batch_size, -1)
    if leftpad is not None:
        start = start.maximum(leftpad[:, None])
    seqlen = q_length * context.group.size()
    end = torch.full((batch_size,), seqlen, device=start.device)
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
    """Attention of one layer to the tokens of all processes.

    Args:
        context: The ContextParallel that is active.
        query: ``(batch, nheads, tokens, head_dim)``.
        key: ``(batch, nheads_kv, tokens, head_dim)``.
        value: ``(batch, nheads_kv, tokens, head_dim_v)``.
        numbers: The result of :func:`mask`.
        reason: Why the op would not be used outside of the context, or None.
        scaling: Factor of the scores.
        kwargs: The model's keyword arguments for attention functions.

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
    """Refuses positions that a model counts from 0 in every process. Runs once a forward pass."""
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
