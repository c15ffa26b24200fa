"""``attn_implementation="torchweld"`` for Hugging Face transformers.

Two functions are registered, and they belong together: the *mask function* (:mod:`.hf_mask`) runs
once per forward pass and decides which path the layers take; the *attention function* runs once per
layer. With ``leftpad`` or no mask it calls ``torch.ops.torchweld.attention``; with a 4-D mask it
calls transformers' SDPA path, and says so once per reason. Where attention weights are asked for,
which neither of the two can give, it calls the model's own eager attention.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch import Tensor

from torchweld import _library

try:
    # Says what a forward pass records. Older versions of transformers pass output_attentions on.
    from transformers.utils.output_capturing import _active_collector as _collector
except ImportError:
    _collector = None

NAME = "torchweld"

# Arguments of models whose result neither torchweld's op nor SDPA gives, and what they are.
_UNSERVED = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "softcap": "soft-capped scores",
    "indices": "keys chosen for each query",
    "block_indices": "blocks of keys chosen for each query",
}

# What the mask function finds out while torch.compile traces.
UNREADABLE = (
    "attention_mask can't be looked at here (torch.compile, export, tracing or CUDA graph capture)"
)
MAYBE_PACKED = (
    "transformers can't tell here if position_ids hold packed sequences (torch.compile, export or "
    "tracing, without a mask and without a cache)"
)
TRACED = {UNREADABLE, MAYBE_PACKED}
# Of a mask that nobody says anything else of.
GIVEN_4D = "the attention mask is 4-D (given so, or made so under torch.compile)"

_warned: set[str] = set()


@torch.compiler.assume_constant_result
def warn_once(reason: str, instead: str = "torch's scaled_dot_product_attention") -> bool:
    """Says why calls don't take the op; under torch.compile while it traces."""
    # A traced mask carries no reason, but the mask function has said it then.
    if reason in _warned or (reason == GIVEN_4D and _warned & TRACED):
        return False
    _warned.add(reason)
    warnings.warn(
        f"torchweld: {reason}; such calls use {instead} instead of torchweld::attention (said "
        "once)",
        stacklevel=3,
    )
    return True


def records_weights() -> bool:
    """Whether this transformers tells an attention function that its weights are recorded."""
    return _collector is not None


def config_refusal(config: Any) -> str | None:
    """Why ``fuse`` must not switch the attention of a model of this config, or None."""
    implementation = config._attn_implementation
    if implementation == NAME:
        return "fused already"
    if implementation not in ("eager", "sdpa"):
        return (
            f'attn_implementation="{implementation}" was chosen; '
            'call model.set_attn_implementation("sdpa") first'
        )
    if getattr(config, "output_attentions", False):
        return "config.output_attentions is on, and torchweld has no attention weights to return"
    if implementation == "eager" and not records_weights():
        return (
            "it is eager and returns attention weights when asked; this version of transformers "
            "doesn't say when (a newer one does)"
        )
    return None


def _weights_are_wanted(kwargs: dict[str, Any]) -> bool:
    if kwargs.get("output_attentions"):
        return True
    if _collector is None:
        return False
    # A ContextVar can't be traced; transformers keeps a plain variable beside it for torch.compile.
    wanted = _collector.global_var if torch.compiler.is_compiling() else _collector.get()
    return wanted is not None and any(key.endswith("attentions") for key in wanted)


def no_mask(device: torch.device) -> Tensor:
    """A 4-D mask, which transformers hands on as it is, that stands for plain causal attention."""
    return torch.empty(0, 0, 0, 0, dtype=torch.bool, device=device)


def _dense_mask(
    attention_mask: Tensor | None, query: Tensor, seqlen_k: int, causal: bool
) -> Tensor | None:
    """What eager attention adds to the scores; None where every query sees every key."""
    seqlen_q = query.shape[2]
    if attention_mask is None:
        if not causal or seqlen_q == 1:
            return None
        # Aligned at the top left, as SDPA takes a missing mask.
        key = torch.arange(seqlen_k, device=query.device)
        visible = (key <= key[:seqlen_q, None])[None, None]
    elif attention_mask.dim() == 1:
        from .hf_mask import causal_mask

        visible = causal_mask(attention_mask, seqlen_q, seqlen_k)
    elif attention_mask.dtype != torch.bool:
        return attention_mask
    else:
        visible = attention_mask
    hidden = torch.finfo(query.dtype).min
    return torch.zeros((), dtype=query.dtype, device=query.device).where(visible, hidden)


def _eager_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The model's own attention that returns weights."""
    if getattr(module, "reorder_and_upcast_attn", False):  # GPT-2's second eager form
        return module._upcast_and_reordered_attn(query, key, value, mask)
    homes = (sys.modules.get(cls.__module__) for cls in type(module).__mro__)
    found = (getattr(home, "eager_attention_forward", None) for home in homes)
    eager = next((function for function in found if function is not None), None)
    if eager is None:
        raise ValueError(
            f'attn_implementation="torchweld" has no attention weights to return, and '
            f"{type(module).__name__} has no eager attention of its own to ask; use "
            'attn_implementation="eager" for output_attentions=True'
        )
    return eager(module, query, key, value, mask, **kwargs)


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
) -> tuple[Tensor, Tensor | None]:
    """Attention of one layer through ``torch.ops.torchweld.attention``.

    Args:
        module: The attention layer; ``module.is_causal`` counts where ``is_causal`` is None.
        query: ``(batch, nheads, seqlen_q, head_dim)``, any strides.
        key: ``(batch, nheads_kv, seqlen_k, head_dim)``, heads not repeated.
        value: ``(batch, nheads_kv, seqlen_k, head_dim_v)``.
        attention_mask: What :func:`.hf_mask.attention_mask` returned, or a 4-D mask.
        dropout: Dropout probability of the attention weights; above 0 SDPA is used.
        scaling: Factor of the scores, head_dim^-0.5 by default.
        is_causal: Overrides ``module.is_causal``.
        **kwargs: Other features of transformers; those that change the result take SDPA.

    Returns:
        ``(batch, seqlen_q, nheads, head_dim_v)``, and the attention weights where they are asked
        for (``output_attentions=True``), else None.

    Raises:
        NotImplementedError: The build has no attention kernel for the device.
        ValueError: The model needs what no path has (attention sinks, soft-capped scores, keys
            chosen for each query), or weights are asked for and the model has no eager attention.
    """
    for name, what in _UNSERVED.items():
        if kwargs.get(name) is not None:
            raise ValueError(
                f'attn_implementation="torchweld" has no {name} ({what}); use '
                'attn_implementation="eager" for this model'
            )
    leftpad = None
    reason = None
    if attention_mask is not None and attention_mask.shape == (0, 0, 0, 0):
        attention_mask = None
    if attention_mask is not None:
        if attention_mask.dim() == 1 and attention_mask.dtype == torch.int32:
            leftpad = attention_mask.to(query.device)
        else:
            reason = getattr(
                attention_mask,
                "torchweld_reason",
                GIVEN_4D,
            )
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    causal = True if leftpad is not None else is_causal
    if causal is None:
        causal = bool(getattr(module, "is_causal", True))

    if _weights_are_wanted(kwargs):
        warn_once("attention weights are asked for", instead="the model's eager attention")
        mask = _dense_mask(attention_mask if leftpad is None else leftpad, query, seqlen_k, causal)
        return _eager_attention(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
        )

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
        warn_once(reason)
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        from .hf_mask import causal_mask

        if leftpad is not None:
            attention_mask = causal_mask(leftpad, seqlen_q, seqlen_k)
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

    ``import torchweld`` has it called once transformers is there, so no program needs to.
    Registers the attention function and the mask function: without the second one transformers
    would hand every layer no mask at all. Classes that would not use the two together are refused
    when they are built with this name, and again when they run. Calling it again changes nothing.

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
    from .hf_mask import attention_mask
    from .hf_models import refuse_at_construction

    refuse_at_construction()
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
