"""The LoRA layer that PEFT puts on an `Int4Linear`; importing it needs peft."""

from __future__ import annotations

import copy
import warnings
from typing import Any

from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear

from torchweld.nn import Int4Linear


class Int4LoraLinear(LoraLinear):
    """PEFT's LoRA layer on an `Int4Linear`: adds the adapters' product to the 4-bit product."""

    def __init__(self, base_layer: Any, adapter_name: str, config: LoraConfig, **kwargs: Any):
        config = copy.copy(config)  # the layers share it, but fan_in_fan_out may differ
        config.fan_in_fan_out = base_layer.replaces_conv1d  # that of the layer dequantize_ restores
        with warnings.catch_warnings():
            # PEFT warns of an unknown class, although it finds in_features and out_features there.
            warnings.filterwarnings("ignore", "Unsupported layer type .*Int4Linear", UserWarning)
            super().__init__(base_layer, adapter_name, config, **kwargs)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Adds the adapters to the weight; raises RuntimeError before `torchweld.dequantize_`."""
        if isinstance(self.get_base_layer(), Int4Linear):
            raise RuntimeError(
                "torchweld: the base layer must have float weights to merge an adapter, but got "
                "an Int4Linear; call torchweld.dequantize_(model) first"
            )
        super().merge(safe_merge, adapter_names)
