"""The float layers that become `Int4Linear`: nn.Linear, and transformers' Conv1D of GPT-2."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from torchweld.nn import Int4Linear

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def linear_classes() -> tuple[type[nn.Module], ...]:
    """Returns nn.Linear, and Conv1D if transformers is loaded."""
    utils = sys.modules.get("transformers.pytorch_utils")
    return (nn.Linear,) if utils is None else (nn.Linear, utils.Conv1D)


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' Conv1D, a linear layer with a transposed weight."""
    return isinstance(module, linear_classes()[1:])


def is_adapter(module: nn.Module) -> bool:
    """Whether a module is a wrapper of PEFT that adapts a layer or trains it whole."""
    return not module._modules.keys().isdisjoint(("base_layer", "original_module"))


def heads_of(model: PreTrainedModel) -> list[str]:
    """Lists a model's heads by path: its output embeddings, and linear layers outside its base."""
    base, output = model.base_model_prefix, model.get_output_embeddings()
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, (*linear_classes(), Int4Linear))
        if module is output or hasattr(model, base) and not path.startswith(f"{base}.")
    ]


def features_of(module: nn.Module) -> tuple[int, int]:
    """Returns in_features and out_features of one of the `linear_classes`."""
    if is_conv1d(module):
        return module.nx, module.nf
    return module.in_features, module.out_features


def as_linear(module: nn.Module, weight: Tensor | None = None) -> nn.Linear:
    """Returns an nn.Linear with the tensors of a layer; nothing is copied.

    Args:
        module: an nn.Linear or Conv1D.
        weight: its weight, if the module does not have it yet.
    """
    weight = module.weight if weight is None else weight
    if module.weight is weight and not is_conv1d(module):
        return module
    linear = nn.Linear(*features_of(module), device="meta")
    weight = weight.t() if is_conv1d(module) else weight
    linear.weight, linear.bias = nn.Parameter(weight, requires_grad=False), module.bias
    return linear.train(module.training)


def without_values(module: nn.Module, group_size: int | None) -> Int4Linear:
    """Makes an Int4Linear on the meta device for a layer of any device."""
    biased = module.bias is not None
    layer = Int4Linear(*features_of(module), biased, group_size, "meta", module.weight.dtype)
    layer.replaces_conv1d = is_conv1d(module)
    return layer


def quantized(module: nn.Module, linear: nn.Linear, group: int | None, method: str) -> Int4Linear:
    """Quantises a layer to an Int4Linear.

    Args:
        module: an nn.Linear or Conv1D.
        linear: `module` as an nn.Linear, from `as_linear`.
    """
    if linear.weight.is_meta:
        return without_values(module, group)
    layer = Int4Linear.from_linear(linear, group, method)
    layer.replaces_conv1d = is_conv1d(module)
    return layer


def float_layer(layer: Int4Linear) -> nn.Module:
    """Makes the frozen layer by which `dequantize_` replaces an Int4Linear."""
    linear = layer.to_torch()
    if not layer.replaces_conv1d:
        return linear
    from transformers.pytorch_utils import Conv1D

    with torch.device("meta"):
        conv = Conv1D(layer.out_features, layer.in_features)
    conv.weight = nn.Parameter(linear.weight.t().contiguous())
    conv.bias = linear.bias
    return conv.requires_grad_(False).eval()
