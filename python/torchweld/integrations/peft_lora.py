"""Puts LoRA adapters of PEFT on `Int4Linear` layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from torchweld.nn import Int4Linear
from torchweld.quantization.float_layers import is_adapter, linear_classes
from torchweld.quantization.layers import heads_in

if TYPE_CHECKING:
    from peft import LoraConfig


def register_lora(config: LoraConfig, model: nn.Module | None = None) -> LoraConfig:
    """Lets a `LoraConfig` put adapters on `Int4Linear` layers.

    PEFT puts adapters on the classes that it knows, and on those that its config registers. A saved
    adapter does not record the registration, so give `PeftModel.from_pretrained` a registered
    config too: `config=register_lora(PeftConfig.from_pretrained(path))`.

    Args:
        config: The config, changed in place.
        model: Needed for `target_modules="all-linear"`, which PEFT applies to float layers
            alone; the names of the 4-bit layers and of the float linear layers, without
            the heads, replace it. With a model, the modules that PEFT trains whole
            (modules_to_save) are checked too.

    Returns:
        The config.

    Raises:
        ImportError: peft is missing.
        ValueError: "all-linear" without a model; use_dora, which reads the weight; an Int4Linear of
            the model in modules_to_save, or a head that PEFT adds to this list for the task_type.

    Example::

        from peft import LoraConfig, get_peft_model

        torchweld.quantize_(model, torchweld.Int4(group_size=32))
        config = torchweld.integrations.register_lora(LoraConfig(target_modules=["q_proj"]))
        model = get_peft_model(model, config)
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
    if model is not None:
        _check_trained_whole(config, model)
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


def _check_trained_whole(config: LoraConfig, model: nn.Module) -> None:
    """Raises ValueError if PEFT is to train an Int4Linear whole: it has no parameters to train."""
    heads = ("classifier", "score", "qa_outputs")  # PEFT adds them for these tasks
    names = [*(config.modules_to_save or ())]
    names += heads if config.task_type in ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS") else ()
    for path, module in model.named_modules():
        # PEFT matches the names with the ends of paths.
        if isinstance(module, Int4Linear) and any(f"{name}." in f"{path}." for name in names):
            raise ValueError(
                "torchweld.integrations.register_lora: modules_to_save must be float layers, but "
                f"got {path}, an Int4Linear, which can't be trained; quantise with it in skip="
            )


def _linear_paths(model: nn.Module) -> Iterator[str]:
    """Yields the paths of a model's linear layers, without heads and the layers of adapters."""
    heads = heads_in(model)
    inside: list[str] = []
    for path, module in model.named_modules():  # a module comes before those inside of it
        if path.startswith(tuple(inside)):
            continue
        if is_adapter(module):
            inside.append(f"{path}.")
        layer = module._modules.get("base_layer", module)
        if isinstance(layer, (*linear_classes(), Int4Linear)) and layer not in heads:
            yield path.removeprefix("base_model.model.")  # of a PeftModel
