"""``attn_implementation="torchweld"`` for Hugging Face transformers.

Two functions are registered, and they belong together:

* the *mask function* runs once per forward pass. Where the pattern is plain causal it returns
  ``leftpad``, an int32 ``(batch,)`` tensor on the device, or None when nothing is padded by
  construction. Everything else gets the mask that ``sdpa`` would get.
* the *attention function* runs once per layer. With ``leftpad`` or None it calls
  ``torch.ops.torchweld.attention``; with a 4-D mask it calls transformers' SDPA path, and says so
  once per reason.

Which of the two is taken never depends on mask values that live on an accelerator, so no forward
pass waits for the device. What that means for a 2-D ``attention_mask``:

========================  =======================  ==========================================
rows of the mask          on the CPU               on a GPU, or while compiling
========================  =======================  ==========================================
0..0 1..1 (left padding)  leftpad                  leftpad
1..1 0..0, 0..0 1..1 0..0 sdpa                     leftpad: equal at every real token (a causal
                                                   row never sees the pads on its right);
                                                   outputs at the pads differ
1..0..1 (holes)           sdpa                     refused by a device-side assertion, because
                                                   leftpad would be silently wrong
========================  =======================  ==========================================
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from torchweld import _library
from torchweld.ops.leftpad import leftpad_from_mask

NAME = "torchweld"

_HOLES = (
    "torchweld: attention_mask has a row with padding between tokens, which "
    'attn_implementation="torchweld" cannot express on this device; pad on the left, or use '
    'attn_implementation="sdpa"'
)

_warned: set[str] = set()


@torch.compiler.assume_constant_result
def _warn_once(reason: str) -> bool:
    # Under torch.compile this runs while tracing, so a compiled model warns as well.
    if reason in _warned:
        return False
    _warned.add(reason)
    warnings.warn(
        f"torchweld: {reason}; such calls use torch's scaled_dot_product_attention instead of "
        "torchweld::attention (said once)",
        stacklevel=3,
    )
    return True


def _values_are_free(mask: Tensor) -> bool:
    """Whether reading the mask's values costs no wait and breaks no trace."""
    return (
        mask.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and type(mask) is Tensor
    )


def _is_left_padded(mask: Tensor) -> bool:
    return bool((mask[:, 1:] >= mask[:, :-1]).all())


def _assert_no_holes(mask: Tensor) -> None:
    starts = mask[:, :1].sum(-1) + (mask[:, 1:] & ~mask[:, :-1]).sum(-1)
    torch._assert_async((starts <= 1).all(), _HOLES)


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
        **kwargs: Handed to ``sdpa_mask``.

    Returns:
        int32 ``(batch,)`` left pads, or None (no padding, queries and keys end together), or the
        bool 4-D mask of ``sdpa``.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    if mask_function is None:
        mask_function = causal_mask_function
    cache_position = kwargs.get("cache_position")
    if q_length is None:
        q_length = cache_position.shape[0]
    end = kv_offset + kv_length  # one past the last key's position

    # A window that is wider than the whole context hides nothing: transformers itself skips it.
    plain = allow_is_causal_skip and (
        mask_function is causal_mask_function or (local_size is not None and kv_length < local_size)
    )
    if isinstance(q_offset, Tensor) or (q_offset is not None and q_offset + q_length != end):
        reason = "a static cache holds keys beyond the last token"
    elif not plain:
        reason = "the mask is not plain causal (window, packed sequences, encoder or custom)"
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
    else:
        visible = attention_mask[:, kv_offset:end].to(torch.bool)
        if not _values_are_free(visible):
            if visible.device.type != "meta":
                _assert_no_holes(visible)
            return leftpad_from_mask(visible)
        if _is_left_padded(visible):
            return leftpad_from_mask(visible)
        reason = "attention_mask is not left padding (zeros, then ones, in every row)"

    mask = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=0 if q_offset is None else q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        **kwargs,
    )
    if mask is not None and not torch.compiler.is_compiling():
        mask.torchweld_reason = reason
    return mask


def _dense_mask(leftpad: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """The bool mask ``(batch, 1, seqlen_q, seqlen_k)`` that ``leftpad`` stands for."""
    key = torch.arange(seqlen_k, device=leftpad.device)
    row = torch.arange(seqlen_q, device=leftpad.device) + (seqlen_k - seqlen_q)
    return (key <= row[:, None]) & (key >= leftpad[:, None, None, None])


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer through ``torch.ops.torchweld.attention``.

    Args:
        module: The attention layer; ``module.is_causal`` counts where ``is_causal`` is None.
        query: ``(batch, nheads, seqlen_q, head_dim)``, any strides.
        key: ``(batch, nheads_kv, seqlen_k, head_dim)``, heads not repeated.
        value: ``(batch, nheads_kv, seqlen_k, head_dim_v)``.
        attention_mask: What :func:`attention_mask` returned, or a 4-D mask.
        dropout: Dropout probability of the attention weights; above 0 SDPA is used.
        scaling: Factor of the scores, head_dim^-0.5 by default.
        is_causal: Overrides ``module.is_causal``.
        **kwargs: Other features of transformers; those that change the result take SDPA.

    Returns:
        ``(batch, seqlen_q, nheads, head_dim_v)`` and None (there are no attention weights).

    Raises:
        NotImplementedError: The build has no attention kernel for the device.
        ValueError: The model needs attention sinks or soft-capped scores; neither path has them.
    """
    for name in ("s_aux", "softcap"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f'attn_implementation="torchweld" has no {name} (attention sinks, soft-capped '
                'scores); use attn_implementation="eager" for this model'
            )
    leftpad = None
    reason = None
    if attention_mask is not None:
        if attention_mask.dim() == 1 and attention_mask.dtype == torch.int32:
            leftpad = attention_mask.to(query.device)
        else:
            reason = getattr(attention_mask, "torchweld_reason", "the attention mask is 4-D")
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    causal = True if leftpad is not None else is_causal
    if causal is None:
        causal = bool(getattr(module, "is_causal", True))

    if reason is None:
        if dropout > 0.0:
            reason = "attention dropout is on"
        elif kwargs.get("position_bias") is not None:
            reason = "a position bias is added to the scores"
        elif kwargs.get("cache") is not None:
            reason = "a paged cache is in use"
        elif causal and leftpad is None and seqlen_k < seqlen_q:
            reason = "there are fewer keys than causal queries"
    if reason is not None:
        _warn_once(reason)
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        if leftpad is not None:
            attention_mask = _dense_mask(leftpad, seqlen_q, seqlen_k)
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **kwargs,
        )

    if causal and leftpad is None and seqlen_q > 1 and seqlen_k > seqlen_q:
        # No mask at all means "aligned at the top left" to transformers: a static cache that has
        # just been filled, with nothing behind the queries yet.
        key, value = key[:, :, :seqlen_q], value[:, :, :seqlen_q]
    out = torch.ops.torchweld.attention(query, key, value, leftpad, causal=causal, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def register_attention() -> None:
    """Makes ``attn_implementation="torchweld"`` known to transformers.

    Registers the attention function and the mask function: without the second one transformers
    would hand every layer no mask at all. Calling it again changes nothing.

    Raises:
        ImportError: transformers is missing or older than its AttentionMaskInterface.
        RuntimeError: torchweld's operators can't be loaded.
    """
    _library.require()
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            "torchweld.integrations needs transformers 5.0 or newer; "
            "install it with `pip install transformers`"
        ) from error
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
