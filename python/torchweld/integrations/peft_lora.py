"""LoRA of PEFT on models with `Int4Linear` layers."""

from __future__ import annotations

import warnings
from typing import Any

from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from torch import nn

from torchweld.ops.int4_module import Int4Linear


class Int4LoraLinear(LoraLinear):
    """PEFT's LoRA layer on an `Int4Linear`: the 4-bit product, plus that of the two adapters."""

    def __init__(self, base_layer: Any, adapter_name: str, config: LoraConfig, **kwargs: Any):
        with warnings.catch_warnings():
            # PEFT reads in_features and out_features, and warns of a class that it does not know.
            warnings.filterwarnings("ignore", "Unsupported layer type .*Int4Linear", UserWarning)
            super().__init__(base_layer, adapter_name, config, **kwargs)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Adds the adapters to the weight, once `torchweld.dequantize_` has made it floats."""
        if isinstance(self.get_base_layer(), Int4Linear):
            raise RuntimeError(
                "torchweld: the base layer must have float weights to merge an adapter, but got "
                "an Int4Linear; call torchweld.dequantize_(model) first"
            )
        super().merge(safe_merge, adapter_names)


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
        head = getattr(model, "get_output_embeddings", lambda: None)()
        config.target_modules = {
            path
            for path, module in model.named_modules()
            if isinstance(module, (nn.Linear, Int4Linear)) and module is not head
        }
    config._register_custom_module({Int4Linear: Int4LoraLinear})
    return config
