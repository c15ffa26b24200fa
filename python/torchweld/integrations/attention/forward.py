"""``attn_implementation="torchweld"`` for Hugging Face transformers.

Two functions are registered, and they belong together: the *mask function* (:mod:`.mask`) runs
once per forward pass and decides which path the layers take; the *attention function* runs once per
layer. With a mask of numbers (:mod:`.mask_numbers`) or none it calls
``torch.ops.torchweld.attention``; with a dense mask it calls transformers' SDPA path, and says so
once per reason. If SDPA lacks the feature too (attention weights, attention sinks, soft-capped
scores), it calls the model's own eager attention.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from torchweld.distributed import _active
from torchweld.integrations import recorder
from torchweld.integrations.sdpa.gpus import BIAS, DROPOUT, general_kernel, no_kernel_with
from torchweld.ops.attention import drawn_seed

from . import context_parallel, mask_numbers, packed
from .fallback import EAGER, GIVEN_4D, NAME, SDPA, UNSERVED, Unserved, warn_once
from .mask_numbers import Numbers

try:
    # The outputs that a forward pass records. Older versions pass output_attentions to attention.
    from transformers.utils.output_capturing import _active_collector as _collector
except ImportError:
    _collector = None


def config_refusal(config: Any) -> str | None:
    """Returns why ``fuse`` must not switch the attention of a model of this config, or None."""
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
    if implementation == "eager" and _collector is None:
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
    if not wanted:
        return False
    return any(key.endswith("attentions") for key in wanted)


def _added_mask(mask: Tensor | None, query: Tensor, seqlen_k: int, causal: bool) -> Tensor | None:
    """Returns the mask that eager attention adds to the scores, None if no key is hidden."""
    seqlen_q = query.shape[2]
    if mask is None:
        if not causal or seqlen_q == 1:
            return None
        # Aligned at the top left, as SDPA takes a missing mask.
        key = torch.arange(seqlen_k, device=query.device)
        mask = (key <= key[:seqlen_q, None])[None, None]
    elif mask.dtype != torch.bool:
        return mask
    hidden = torch.finfo(query.dtype).min
    return torch.zeros((), dtype=query.dtype, device=query.device).where(mask, hidden)


def _dense_mask(
    attention_mask: Tensor | None,
    numbers: Numbers,
    start: Tensor | None,
    query: Tensor,
    seqlen_k: int,
    added: bool,
) -> Tensor | None:
    """Makes the dense mask that equals ``numbers``, once for the layers of a pass.

    It is bool, or with ``added`` a float mask for the scores; None if no mask is needed.
    ``attention_mask`` and ``start`` are the tensors that the numbers were computed from.
    """

    def make() -> Tensor | None:
        if not added and numbers.pads_nothing(query.shape[2], seqlen_k):
            return None
        mask = numbers.dense(query.shape[2], seqlen_k)
        return _added_mask(mask, query, seqlen_k, numbers.causal) if added else mask

    if attention_mask is None:
        return make()
    made_for = numbers.causal, query.shape[2], seqlen_k, start, query.device, query.dtype, added
    return mask_numbers.once(attention_mask, "torchweld_dense", made_for, make)


def _eager_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    lacking: str,
    *,
    is_causal: bool,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Runs the model's own eager attention, for a feature that SDPA lacks too.

    ``lacking`` names the feature. ``mask`` is dense, bool or added to the scores; if it is None,
    ``is_causal`` decides. Returns the result and the attention weights.

    Raises:
        ValueError: The model has no eager attention.
    """
    mask = _added_mask(mask, query, key.shape[2], is_causal)
    if getattr(module, "reorder_and_upcast_attn", False):  # GPT-2's second eager form
        return module._upcast_and_reordered_attn(query, key, value, mask)
    homes = (sys.modules.get(cls.__module__) for cls in type(module).__mro__)
    found = (getattr(home, "eager_attention_forward", None) for home in homes)
    eager = next((function for function in found if function is not None), None)
    if eager is None:
        raise ValueError(
            f'attn_implementation="torchweld" has no {lacking}, and '
            f"{type(module).__name__} has no eager attention of its own to ask; use "
            'attn_implementation="eager" for this model'
        )
    return eager(module, query, key, value, mask, **kwargs)


def _op_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    numbers: Numbers,
    scaling: float | None,
    softcap: float | None,
    sink: Tensor | None,
    bias: Tensor | None,
    dropout: float,
) -> Tensor:
    """Runs torchweld's op; returns a contiguous ``(batch, seqlen_q, nheads, head_dim_v)``."""
    # The dispatcher looks at every keyword, which costs host time: leave out those that are None.
    more = numbers.ranges()
    if softcap is not None or sink is not None:
        more.update(softcap=softcap, sink=sink)
    if bias is not None:
        more.update(bias=bias.to(query.dtype))
    if dropout > 0.0:
        more.update(dropout_p=dropout, dropout_seed=drawn_seed(query, dropout, None))
    out = torch.ops.torchweld.attention(
        query, key, value, numbers.leftpad, causal=numbers.causal, scale=scaling, **more
    )
    return out.transpose(1, 2).contiguous()


def _why_not_the_op(
    query: Tensor,
    seqlen_k: int,
    mask: Tensor | None,
    numbers: Numbers | None,
    is_plain: bool,
    weights: bool,
    kwargs: dict[str, Any],
) -> str | None:
    """Returns why a call can't run the op, or None; ``is_plain``: its mask is causality alone."""
    if weights:
        return "attention weights are asked for"
    if numbers is None:
        return getattr(mask, "torchweld_reason", GIVEN_4D)
    if kwargs.get("cache") is not None:
        return "a paged cache is in use"
    if kwargs.get("position_bias") is not None and kwargs.get("softcap") is not None:
        return "a position bias is added to soft-capped scores"
    if is_plain and seqlen_k < query.shape[2]:
        return "there are fewer keys than causal queries"
    if query.is_cuda and query.dtype == torch.float64:
        return "the kernels for CUDA know no float64"
    return None


def _is_causal(module: torch.nn.Module, is_causal: bool | None) -> bool:
    """Whether a layer that is given no mask sees only its own and earlier keys.

    ``is_causal`` decides, else ``module.is_causal``. A layer with neither is causal, as in
    transformers, unless it is a cross-attention.
    """
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
    if is_causal is None:
        is_causal = not getattr(module, "is_cross_attention", "Cross" in type(module).__name__)
    return bool(is_causal)


_CAUSAL, _BIDIRECTIONAL = Numbers(causal=True), Numbers(causal=False)


def _numbers(
    mask: Tensor | None, query: Tensor, module: torch.nn.Module, is_causal: bool | None
) -> Numbers | None:
    """Returns a mask as the op's :class:`.Numbers`, or None if the mask is dense.

    Raises:
        ValueError: The mask is for another number of queries; or the layer is not causal, but the
            mask is, and it holds more than padding.
    """
    numbers = None
    if mask is not None and mask_numbers.is_numbers(mask):
        numbers = mask_numbers.split(mask, query.shape[2], query.device)
    elif mask is None:
        return _CAUSAL if _is_causal(module, is_causal) else _BIDIRECTIONAL
    causal = getattr(mask, "torchweld_causal", False) if numbers is None else numbers.causal
    # The mask follows the config, but a layer with is_causal = False must not be causal.
    if causal and query.shape[2] > 1 and not _is_causal(module, is_causal):
        if numbers is None or numbers.leftpad is None:
            raise ValueError(
                f'attn_implementation="torchweld": {type(module).__name__}.is_causal must be True '
                "where the model makes a causal mask with windows, holes, a static cache or "
                "packed documents, but got False; set config.is_causal = False instead"
            )
        numbers = numbers._replace(causal=False)
    return numbers


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
    """Computes one layer's attention, by torchweld's op if it serves the call.

    Args:
        module: The attention layer.
        query: ``(batch, nheads, seqlen_q, head_dim)``, any strides.
        key: ``(batch, nheads_kv, seqlen_k, head_dim)``, heads not repeated.
        value: ``(batch, nheads_kv, seqlen_k, head_dim_v)``.
        attention_mask: The result of :func:`.mask.attention_mask`, or a 4-D mask.
        dropout: Probability. Above 0 the op runs if a kernel for tensor cores has it, else SDPA.
        scaling: Factor of the scores, head_dim^-0.5 by default.
        is_causal: Overrides ``module.is_causal``. False also overrides a causal mask that holds
            nothing but padding.
        **kwargs: ``softcap``, ``s_aux`` (attention sinks), ``position_bias`` and packed documents
            (:mod:`.packed`) go to the op. On a GPU the op runs with a position bias if a kernel for
            tensor cores has it, else SDPA. With a paged cache SDPA runs.

    Returns:
        ``(batch, seqlen_q, nheads, head_dim_v)``, and the attention weights if they are requested,
        else None.

    Raises:
        NotImplementedError: The build has no attention kernel for the device.
        ValueError: The model needs a feature that no path has (keys chosen for each query) or that
            context_parallel lacks; or the call needs eager attention, and the model has none;
            or packed documents or is_causal don't fit the mask.
        RuntimeError: The call is inside of torch's context_parallel().
    """
    if torch.nn.functional.scaled_dot_product_attention is not _active.STOCK:
        _active.refuse_torchs_own('attn_implementation="torchweld"')
    for name in UNSERVED:
        if name in kwargs and kwargs[name] is not None:
            raise Unserved(
                f'attn_implementation="torchweld" has no {name} ({UNSERVED[name]}); use '
                'attn_implementation="eager" for this model'
            )
    softcap, sink = kwargs.get("softcap"), kwargs.get("s_aux")
    bias = kwargs.get("position_bias")
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    numbers = _numbers(attention_mask, query, module, is_causal)
    causal = numbers is not None and numbers.causal
    is_plain = causal and numbers.hides_no_key
    # transformers aligns a missing mask at the top left: a static cache that has just been filled
    # holds nothing behind the queries yet.
    top_left = is_plain and 1 < seqlen_q < seqlen_k
    start = None
    if "cu_seq_lens_q" in kwargs or "cu_seq_lens_k" in kwargs:
        keys = seqlen_q if top_left else seqlen_k
        start = packed.key_start(module, query, keys, numbers, kwargs)
    if start is not None and numbers is not None:
        numbers = packed.apply(start, numbers, attention_mask)
        is_plain = numbers.causal and numbers.hides_no_key
        key, value, seqlen_k = key[:, :, :keys], value[:, :, :keys], keys
        if bias is not None:
            bias = kwargs["position_bias"] = bias[..., :keys]

    weights = _weights_are_wanted(kwargs)
    reason = _why_not_the_op(query, seqlen_k, attention_mask, numbers, is_plain, weights, kwargs)
    sharded = _active.current is not None  # context parallelism has neither dropout nor a bias
    dims = query.shape[3], value.shape[3]
    if reason is None and dropout > 0.0:
        # On a CPU torch runs every call with dropout, so its random numbers stay the same.
        torchs = sharded or not query.is_cuda
        reason = DROPOUT if torchs else no_kernel_with(DROPOUT, query, *dims, softcap=softcap)
    if reason is None and bias is not None:
        reason = BIAS if sharded else no_kernel_with(BIAS, query, *dims)
    if sharded:
        out = context_parallel.attention(
            _active.current, query, key, value, numbers, reason, scaling, kwargs
        )
        return out.transpose(1, 2).contiguous(), None
    if reason is None:
        reason = general_kernel(query, *dims, softcap=softcap)
    if reason is None:
        if recorder.calls is not None:
            recorder.record(module)
        if top_left:
            key, value = key[:, :, :seqlen_q], value[:, :, :seqlen_q]
            bias = None if bias is None else bias[..., :seqlen_q]
        out = _op_attention(query, key, value, numbers, scaling, softcap, sink, bias, dropout)
        return out, None

    lacking = "attention weights to return" if weights else None
    if softcap is not None or sink is not None:
        lacking = lacking or "attention sinks or soft-capped scores here"
    if numbers is not None:
        added = lacking is not None
        mask = _dense_mask(attention_mask, numbers, start, query, seqlen_k, added)
    else:
        mask = attention_mask if start is None else packed.apply_dense(start, attention_mask)
    instead = EAGER if lacking else SDPA
    if recorder.calls is not None:
        recorder.record(module, f"{instead} runs: {reason}")
    warn_once(reason, instead)
    # NOTE: SDPA has a default of its own for is_causal, so both paths name it.
    more = {"is_causal": causal, "dropout": dropout, "scaling": scaling, **kwargs}
    if lacking is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, mask, **more)
    out, probabilities = _eager_attention(module, query, key, value, mask, lacking, **more)
    return out, probabilities if weights else None
