"""Tells a fused forward about modules that it does not call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import activations

from torchweld.ops.stock import untouched

_NAMES = {
    "NewGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "GELUActivation": "gelu",
    "SiLUActivation": "silu",
    "ReLUSquaredActivation": "relu_squared",
    "LinearActivation": "none",
}
_OF_TIMM = {"GELU": "gelu", "GELUTanh": "gelu_tanh"}
_ACTIVATIONS = {
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    nn.Identity: "none",
    **{getattr(activations, cls): op for cls, op in _NAMES.items() if hasattr(activations, cls)},
}


def activation_name(act: Any) -> str | None:
    """Returns torchweld's name of an activation module, None if it has no fused form."""
    if type(act) is nn.GELU:
        return "gelu_tanh" if act.approximate == "tanh" else "gelu"
    if type(act).__module__ == "timm.layers.activations":
        return _OF_TIMM.get(type(act).__name__)
    return _ACTIVATIONS.get(type(act))


def hooked(module: nn.Module, calls_recorders: bool = False) -> bool:
    """Whether a module has hooks and therefore must be called itself.

    A hook would see values that the fusion changes or never computes; or it brings the module's
    parameters to the device and takes them away again, as accelerate's offloading does. Hooks on
    all modules don't count here; ``_has_any_global_hook`` finds them once for many modules.

    Args:
        module: A submodule of a fused block.
        calls_recorders: Whether the fused block calls transformers' output recorders itself
            (:func:`.gpt2_block._record`); they don't count then.
    """
    if untouched(module):
        return False
    forward = vars(module).get("forward")
    if forward is not None and getattr(forward, "__func__", None) is not type(module).forward:
        return True  # accelerate wraps forward on the instance
    if module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    for key, hook in module._forward_hooks.items():
        records = getattr(hook, "__module__", "").startswith("transformers.utils.")
        if not (calls_recorders and records) or key in module._forward_hooks_with_kwargs:
            return True
    return False


def weight_and_bias(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Returns weight and bias, three times as fast as through ``Module.__getattr__``."""
    own = layer._parameters
    if "weight" in own and "bias" in own:
        return own["weight"], own["bias"]
    # A DataParallel replica has attributes instead, and FSDP1 shards parameters into a flat one.
    return layer.weight, layer.bias


def weight_of(module: nn.Module) -> Any:
    """Returns a module's weight, or None if it has none."""
    own = module._parameters
    return own["weight"] if "weight" in own else getattr(module, "weight", None)


def implementation(config: Any) -> str | None:
    """Returns ``config._attn_implementation``, without its property if it can.

    NOTE: a configuration overrides __getattribute__, in Python: the property takes the host as long
    as an op does. torch.compile can trace the property, but not the read that replaces it.
    """
    if torch.compiler.is_compiling():
        return config._attn_implementation
    try:
        return object.__getattribute__(config, "_attn_implementation_internal")
    except AttributeError:  # this version of transformers stores the value elsewhere
        return config._attn_implementation
