"""Lists the decoder families of transformers whose modules ``fuse`` replaces.

An entry of :data:`FAMILIES` says how a family differs from Llama. :data:`FUSIONS` maps the names of
the classes that ``fuse`` knows to the :class:`.FusedModule` subclass that computes the same with
torchweld's ops, and to the subclass's settings (``row``). ``fuse`` gives a module a subclass of
both classes (:func:`fused_class`): ``isinstance``, parameters, state_dict and hooks work as before.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from torchweld.integrations import lora, lora_experts

from . import decoder, gpt2_block, heads, layer_norm, mlp, rms_norm
from .fused_module import Fusion, register, stock_class


class Family(NamedTuple):
    """Says how a model family differs from Llama, and how its classes and modules are named."""

    prefix: str  # of its classes: ``LlamaMLP`` has "Llama"
    eps: str = "variance_epsilon"  # the norm's attribute
    weight_offset: float = 0.0  # the number that the norm adds to its weight
    packed: bool = False  # whether gate and up, and query, key and value, are one layer each
    activation: str = "act_fn"  # the MLP's attribute
    head_norm: str | None = None  # q_norm and k_norm are over each "head" or a "row" of all heads
    interleaved: bool = False  # rotary pairs are neighbours; only half of a table is read
    # The arguments of the attention function that Llama's layer does not pass.
    options: Callable[[Any], dict[str, Any]] = lambda layer: {}
    layer: decoder.Layer | None = decoder.Layer()


def _config_window(layer: Any) -> dict[str, Any]:
    return {"sliding_window": getattr(layer.config, "sliding_window", None)}


def _window(layer: Any) -> dict[str, Any]:
    return {"sliding_window": layer.sliding_window}


def _window_and_softcap(layer: Any) -> dict[str, Any]:
    return {"sliding_window": layer.sliding_window, "softcap": layer.attn_logit_softcapping}


_SANDWICH = decoder.Layer(before_mlp="pre_feedforward_layernorm")
_GEMMA = {"eps": "eps", "weight_offset": 1.0}

FAMILIES = {
    "llama": Family("Llama"),
    "mistral": Family("Mistral", options=_config_window),
    "qwen2": Family("Qwen2", options=_window),
    "qwen3": Family("Qwen3", head_norm="head", options=_window),
    "gemma": Family("Gemma", **_GEMMA),
    "gemma2": Family("Gemma2", **_GEMMA, options=_window_and_softcap, layer=_SANDWICH),
    "gemma3": Family(
        "Gemma3",
        **_GEMMA,
        head_norm="head",
        options=_window,
        layer=_SANDWICH,
    ),
    "phi3": Family(
        "Phi3",
        packed=True,
        activation="activation_fn",
        options=_config_window,
    ),
    # No norm of an OLMo-2 layer takes a sum with the residual as its argument, so the layer itself
    # is not fused.
    "olmo2": Family("Olmo2", head_norm="row", layer=None),
    "smollm3": Family("SmolLM3", options=_window),
    "granite": Family("Granite"),
    "glm4": Family("Glm4", packed=True, activation="activation_fn", interleaved=True),
}
# GLM-4 packs the weights of its MLP and not those of its attention.
_UNPACKED = {"Glm4Attention"}


def _fusions(module: str, family: Family) -> dict[str, tuple[type[nn.Module], Any]]:
    def name(cls: str) -> str:
        return f"transformers.models.{module}.modeling_{module}.{family.prefix}{cls}"

    packed = family.packed and f"{family.prefix}Attention" not in _UNPACKED
    fusions = {
        name("RMSNorm"): (rms_norm.FusedRMSNorm, rms_norm.Norm(family.eps, family.weight_offset)),
        name("MLP"): (
            mlp.FusedMLP,
            mlp.MLP(mlp.GATE_LAYERS[family.packed], family.activation, "down_proj", "left"),
        ),
        name("Attention"): (
            decoder.FusedAttention,
            decoder.Attention(packed, family.head_norm, family.interleaved, family.options),
        ),
    }
    if family.layer is not None:
        fusions[name("DecoderLayer")] = (decoder.FusedLayer, family.layer)
    return fusions


FUSIONS = {
    cls: fusion
    for module, family in FAMILIES.items()
    for cls, fusion in _fusions(module, family).items()
}
_GPT2 = "transformers.models.gpt2.modeling_gpt2.GPT2"
FUSIONS |= {
    f"{_GPT2}Block": (gpt2_block.FusedGPT2Block, None),
    "transformers.models.whisper.modeling_whisper.WhisperAttention": (heads.FusedHeads, None),
    "peft.tuners.lora.layer.Linear": (lora.FusedLora, None),
    "peft.tuners.lora.layer.ParamWrapper": (lora_experts.FusedParamWrapper, None),
    "torch.nn.modules.normalization.LayerNorm": (layer_norm.FusedLayerNorm, None),
    "torch.nn.modules.normalization.RMSNorm": (rms_norm.FusedTorchNorm, rms_norm.Norm("eps", 0.0)),
}


def fusion_in_table(stock: type[nn.Module]) -> Fusion | None:
    """Returns the FusedModule subclass and settings of a stock class in the table, or None."""
    return FUSIONS.get(f"{stock.__module__}.{stock.__qualname__}")


def fusion_of(module: nn.Module) -> Fusion | None:
    """Returns the FusedModule subclass and settings of a module's class, or None if unknown."""
    stock = stock_class(module)
    return fusion_in_table(stock) or register(stock)


def fused_class(stock: type[nn.Module], fusion: Fusion | None = None) -> type[nn.Module]:
    """Returns the fused class of a stock class, by ``fusion`` or by default the known fusion."""
    return _subclass(stock, *(fusion or fusion_in_table(stock) or register(stock)))


@functools.cache
def _subclass(stock: type[nn.Module], parent: type[nn.Module], row: Any) -> type[nn.Module]:
    return parent.subclass(stock, row, __name__)


def __getattr__(name: str) -> type[nn.Module]:
    """Finds a fused class by its name, as pickle does."""
    for path in FUSIONS if name.startswith("Fused") else ():
        module, _, stock = path.rpartition(".")
        if name == f"Fused{stock}":
            return fused_class(getattr(importlib.import_module(module), stock))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
