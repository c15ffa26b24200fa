"""LoRA of PEFT on models with `Int4Linear` layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from torchweld.nn import Int4Linear
from torchweld.quantization.float_layers import is_adapter, linear_classes

if TYPE_CHECKING:
    from peft import LoraConfig


def register_lora(config: LoraConfig, model: nn.Module | None = None) -> LoraConfig:
    """Lets a `LoraConfig` put adapters on `Int4Linear` layers.

    PEFT keeps the classes of its own layers, and those registered with a config. A saved adapter
    does not record them, so give `PeftModel.from_pretrained` a registered config too:
    `config=register_lora(PeftConfig.from_pretrained(path))`.

    Args:
        config: changed in place.
        model: needed for `target_modules="all-linear"`, in which PEFT counts nn.Linear layers
            alone; the names of the 4-bit layers and of nn.Linear layers, without the output head,
            take its place.

    Returns:
        The config.

    Raises:
        ImportError: peft is missing.
        ValueError: "all-linear" without a model, or use_dora, which reads the weight.
    """
    try:
        from .peft_layer import Int4LoraLinear
    except ImportError as error:
        raise ImportError(
            "torchweld.integrations.register_lora needs peft; install it with `pip install peft`"
        ) from error
    if config.use_dora:
        raise ValueError(
            "torchweld.integrations.register_lora: use_dora must be False, but got True; DoRA "
            "needs the norms of float weights"
        )
    targets = config.target_modules
    if isinstance(targets, str) and targets.lower() == "all-linear":
        if model is None:
            raise ValueError(
                'torchweld.integrations.register_lora: model must be given for "all-linear", but '
                "got None"
            )
        config.target_modules = set(_linear_paths(model))
    config._register_custom_module({Int4Linear: Int4LoraLinear})
    return config


def _linear_paths(model: nn.Module) -> Iterator[str]:
    """The linear layers but the output head, without those of the adapters that are there."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    inside: list[str] = []
    for path, module in model.named_modules():  # a module comes before those inside of it
        if path.startswith(tuple(inside)):
            continue
        if is_adapter(module) or module is head:
            inside.append(f"{path}.")
        layer = module._modules.get("base_layer", module)
        if isinstance(layer, (*linear_classes(), Int4Linear)) and module is not head:
            yield path.removeprefix("base_model.model.")  # of a PeftModel
