"""The mask function of ``attn_implementation="torchweld"``.

It runs once per forward pass, before the layers, and decides which path they take. Where the
pattern is plain causal and the tokens of every row are one run, it returns ``leftpad``, an int32
``(batch,)`` tensor on the device, and the layers run torchweld's op. Everything else gets the 4-D
mask of ``sdpa`` and runs there.

=============================  =====================================  ==================
rows of the 2-D mask           where it can be read                   where it can't be
=============================  =====================================  ==================
none given                     the op                                 the op
0..0 1..1, left padding        the op                                 sdpa
1..1 0..0, 0..0 1..1 0..0      the op: equal at every token, because  sdpa
                               a causal row never sees what is
                               behind it; padding gives other,
                               finite values
1..0..1, holes                 sdpa                                   sdpa
=============================  =====================================  ==================

Holes are a matter of data: ``generate`` makes them itself where a prompt holds the pad token and no
mask is given. ``leftpad`` can't say them, and nothing on the device can choose between two paths,
so the host looks. On a GPU that is one bool read back in every forward pass that is given a mask,
as transformers' own ``sdpa`` does; the layers wait for nothing. torch.compile, export, tracing and
CUDA graph capture can't look, so their graphs hold the path that is right for every mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchweld.ops.leftpad import before_first_token, is_readable

from .hf_attention import MAYBE_PACKED, UNREADABLE, warn_once
from .hf_models import check_config


def _has_holes(tokens: Tensor) -> bool:
    runs = tokens[:, :1].sum(1) + (tokens[:, 1:] & ~tokens[:, :-1]).sum(1)
    return bool((runs > 1).any())


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
    """Left pads where the pattern is plain causal, else the mask of ``sdpa``.

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
        int32 ``(batch,)`` left pads, or None (no padding, queries and keys end together), or the
        bool 4-D mask of ``sdpa``.

    Raises:
        ValueError: The model does not take its attention from transformers' AttentionInterface, or
            does not support ``sdpa``.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    config = kwargs.get("config")
    if config is not None:
        check_config(type(config))
    if mask_function is None:
        mask_function = causal_mask_function
    cache_position = kwargs.get("cache_position")
    if q_length is None:
        q_length = cache_position.shape[0]
    end = kv_offset + kv_length  # one past the last key's position
    readable = attention_mask is None or is_readable(attention_mask)

    # A window that is wider than the whole context hides nothing: transformers itself skips it.
    plain = allow_is_causal_skip and (
        mask_function is causal_mask_function or (local_size is not None and kv_length < local_size)
    )
    if isinstance(q_offset, Tensor) or (q_offset is not None and q_offset + q_length != end):
        reason = "a static cache holds keys beyond the last token"
    elif not plain:
        reason = "the mask is not plain causal (window, packed sequences, encoder or custom)"
        if torch.compiler.is_compiling() and attention_mask is None and local_size is None:
            reason = MAYBE_PACKED
    elif q_offset is None and attention_mask is None and q_length != kv_length:
        reason = "the position of the queries among the keys is not known"
    elif attention_mask is None:
        # Equal lengths, or one query that sees everything: nothing to say. Else bottom-right
        # causal, which None would not mean to transformers: zero pads do.
        if q_length == kv_length or q_length == 1:
            return None
        device = kwargs.get("device")
        return torch.zeros(batch_size, dtype=torch.int32, device=device)
    elif attention_mask.dim() != 2 or attention_mask.shape[-1] < end:
        reason = "a static cache holds keys beyond the last token"
    elif not readable:
        reason = UNREADABLE
    else:
        tokens = attention_mask[:, kv_offset:end].to(torch.bool)
        if not _has_holes(tokens):
            return before_first_token(tokens)
        reason = "attention_mask has padding between tokens"

    mask = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=0 if q_offset is None else q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        # sdpa_mask reads attention_mask before it leaves the mask out.
        allow_is_causal_skip=allow_is_causal_skip and readable,
        **kwargs,
    )
    if torch.compiler.is_compiling():
        warn_once(reason)
    elif mask is not None:
        mask.torchweld_reason = reason
    return mask


def causal_mask(leftpad: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """The bool mask ``(batch, 1, seqlen_q, seqlen_k)`` that ``leftpad`` stands for."""
    key = torch.arange(seqlen_k, device=leftpad.device)
    row = torch.arange(seqlen_q, device=leftpad.device) + (seqlen_k - seqlen_q)
    return (key <= row[:, None]) & (key >= leftpad[:, None, None, None])
