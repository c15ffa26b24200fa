"""Recognises layers of timm and diffusers that call ``F.scaled_dot_product_attention``."""

from __future__ import annotations

import re

import torch
from torch import nn

from torchweld.integrations.attention.models import layer_source
from torchweld.integrations.fusion.layers.fused_module import Fusion, register, stock_class
from torchweld.integrations.fusion.layers.sdpa_layer import FusedSdpaLayer

from .norms import PickledByRow

_LIBRARIES = ("timm", "diffusers")
_CALLS = re.compile(r"\b(scaled_dot_product_attention|dispatch_attention_fn)\(")


class RecognisedSdpaLayer(PickledByRow, FusedSdpaLayer):
    """A layer that calls SDPA itself or, in diffusers, through its processor."""

    @staticmethod
    def refusal(module: nn.Module, row: None) -> str | None:
        processor = getattr(module, "processor", None)
        if processor is not None and not _CALLS.search(layer_source(type(processor))):
            return f"{type(processor).__name__} does not call scaled_dot_product_attention"
        return FusedSdpaLayer.refusal(module, row)


def of_library(module: nn.Module) -> bool:
    """Whether the class of a module or one of its parents is of timm or diffusers."""
    roots = {base.__module__.partition(".")[0] for base in stock_class(module).__mro__}
    return not roots.isdisjoint(_LIBRARIES)


def find(module: nn.Module) -> Fusion | None:
    """Returns the FusedModule subclass for a layer that calls SDPA, or None."""
    if not of_library(module):
        return None
    stock = stock_class(module)
    # a layer of diffusers passes its tensors to a processor, which may call SDPA
    by_processor = "self.processor(" in layer_source(stock)
    if not by_processor and not _CALLS.search(layer_source(stock)):
        return None
    return register(stock) or register(stock, (RecognisedSdpaLayer, None))


def sample_of(model: nn.Module) -> dict[str, torch.Tensor] | None:
    """Returns a timm model's default batch: two small random images; None if no size is known."""
    config = getattr(model, "pretrained_cfg", None) or {}
    channels, *size = config.get("input_size", (3,))
    # create_model(img_size=) changes patch_embed, but not pretrained_cfg
    size = getattr(getattr(model, "patch_embed", None), "img_size", None) or size
    like = next((p for p in model.parameters() if p.is_floating_point()), None)
    if not size or like is None:
        return None
    shape = (2, getattr(model, "in_chans", channels), *size)
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.randn(shape, generator=generator, device="cpu").to(like)}
