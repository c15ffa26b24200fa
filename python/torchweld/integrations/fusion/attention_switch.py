"""Switches the attention of transformers models other than GPT-2, for ``fuse``.

transformers' own ``set_attn_implementation`` does the switch, for sub-models too. This module
refuses models, keeps their state for ``unfuse`` and fills in the report.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchweld.integrations.attention.fallback import NAME, SDPA, UNSERVED
from torchweld.integrations.attention.forward import config_refusal
from torchweld.integrations.attention.models import (
    asks_for_attention,
    layer_source,
    unsupported_reason,
)
from torchweld.integrations.sdpa.gpus import BIAS, general_kernel, no_kernel_with

from .recognise import sdpa_layers
from .report import FuseReport

_STATE = "_torchweld_implementations"


def of_transformers(module: nn.Module) -> bool:
    """Whether a module is a model of transformers."""
    return isinstance(module, PreTrainedModel)


def roots(
    model: nn.Module, is_root: Callable[[nn.Module], bool] = of_transformers
) -> list[tuple[str, nn.Module]]:
    """Returns ``(path, model)`` of the outermost transformers models in a module.

    Another ``is_root`` decides which modules are models, to find those of other libraries too.
    """
    found: list[tuple[str, nn.Module]] = []
    for path, module in model.named_modules():
        inside = any(not top or path.startswith(f"{top}.") for top, _ in found)
        if is_root(module) and not inside:
            found.append((path, module))
    return found


def layers(path: str, root: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """Returns ``(path, layer)`` of a model's layers that use transformers' AttentionInterface."""
    prefix = f"{path}." if path else ""
    return [
        (prefix + name, module)
        for name, module in root.named_modules()
        if asks_for_attention(type(module))
    ]


def other_attention_layers(path: str, root: PreTrainedModel) -> list[tuple[str, str]]:
    """Returns ``(path, class name)`` of attention layers that don't use AttentionInterface."""
    prefix = f"{path}." if path else ""
    switchable = {f"{where}." for where, _ in layers(path, root)}
    named = {
        f"{prefix}{name}.": type(module).__name__
        for name, module in root.named_modules()
        if name
        and re.search(r"Attention(V\d+)?$", type(module).__name__)
        and not sdpa_layers.of_library(module)
    }
    everything = switchable | named.keys()
    return [
        (where[:-1], name)
        for where, name in named.items()
        if not any(other != where and other.startswith(where) for other in everything)
        and not any(where.startswith(other) for other in switchable)
    ]


class Switch:
    """Switches the attention of a model to torchweld's, and back."""

    def __init__(self, path: str, root: PreTrainedModel) -> None:
        self.root, self.layers = root, layers(path, root)

    def apply(self, report: FuseReport) -> None:
        """Switches the model and its sub-models; lists their layers in the report's ``ops``."""
        report.ops.update((where, "attention") for where, _ in self.layers)
        models = [m for m in self.root.named_modules() if isinstance(m[1], PreTrainedModel)]
        before = {path: module.config._attn_implementation for path, module in models}
        vars(self.root)[_STATE] = before | switch_own_configs(self.root)
        self.root.set_attn_implementation(NAME)
        for _, module in models:  # older versions skip models whose config has the root's class
            module.config._attn_implementation_internal = NAME

    def restore(self) -> bool:
        """Undoes :meth:`apply`; returns False if there was nothing to undo."""
        return restore(self.root)

    def was_eager(self) -> bool:
        """Whether the model or a sub-model ran eager attention before."""
        return "eager" in vars(self.root)[_STATE].values()

    def known_to_run(self, calls: Any, report: FuseReport) -> list[tuple[str, nn.Module]]:
        """Returns the layers that may run the op; the report lists the others with the reason.

        If no sample has run a layer, its source decides. If one would raise, none may run the op.
        """
        unseen = [(where, layer) for where, layer in self.layers if layer not in (calls or {})]
        reasons = {where: unmeasured_refusal(layer) for where, layer in unseen}
        fatal = next((reason for reason, fails in filter(None, reasons.values()) if fails), None)
        known = []
        for where, layer in self.layers:
            reason = fatal or (reasons.get(where) or (None, False))[0]
            if reason is None:
                known.append((where, layer))
            else:
                del report.ops[where]
                report.skipped.append((where, reason))
        return known


def plan(model: nn.Module, report: FuseReport) -> list[Switch]:
    """Returns the switches of a model; the report lists the layers that are not switched."""
    switches = []
    for path, root in roots(model):
        switch, unswitchable = Switch(path, root), other_attention_layers(path, root)
        reason = config_refusal(root.config) or _class_refusal(root) or own_refusal(root)
        if reason is None and not switch.layers:
            reason = "none of its layers takes its attention from transformers' AttentionInterface"
        if reason is None:
            switches.append(switch)
            what = "does not take its attention from transformers' AttentionInterface"
            report.skipped.extend((where, f"{name} {what}") for where, name in unswitchable)
            continue
        paths = [where for where, _ in (*switch.layers, *unswitchable)]
        report.skipped.extend((where, reason) for where in paths or [path or "the model"])
    return switches


def unmeasured_refusal(layer: nn.Module) -> tuple[str, bool] | None:
    """Returns why a layer that no sample has run won't run the op, and whether it would raise.

    The layer's source and head dim decide; None if neither speaks against the op.
    """
    given = re.findall(r"\b(\w+)=", layer_source(type(layer)))
    for name, what in UNSERVED.items():
        if name in given:
            return f"{type(layer).__name__} has {name} ({what}), which torchweld has not", True
    head_dim, weight = getattr(layer, "head_dim", 0), next(layer.parameters(), None)
    if weight is None or not weight.is_floating_point() or not isinstance(head_dim, int):
        return None
    biased = "position_bias" in given
    reason = no_kernel_with(BIAS, weight, head_dim) if biased else None
    reason = reason or general_kernel(weight, head_dim)
    return None if reason is None else (f"{SDPA} runs: {reason}", False)


def _class_refusal(root: PreTrainedModel) -> str | None:
    for module in root.modules():
        lack = unsupported_reason(type(module)) if isinstance(module, PreTrainedModel) else None
        if lack is not None:
            return f"{type(module).__name__} {lack}"
    return None


def own_configs(root: PreTrainedModel) -> Iterator[tuple[str, nn.Module, str]]:
    """Yields ``(path, layer, its model's attention)`` of layers whose config is not a model's.

    Copied layers have such a config, as in merged models and PEFT's layer_replication. They get
    their model's mask, but transformers' ``set_attn_implementation`` does not reach them.
    """
    models = {
        path: module.config
        for path, module in root.named_modules()
        if isinstance(module, PreTrainedModel)
    }
    known = {id(config) for each in models.values() for config in with_sub_configs(each)}
    for path, layer in layers("", root):
        config = vars(layer).get("config")
        if config is not None and id(config) not in known:
            above = (model for model in models if path.startswith(f"{model}." if model else ""))
            yield path, layer, models[max(above, key=len)]._attn_implementation


def own_refusal(root: PreTrainedModel) -> str | None:
    """Returns why layers with configs of their own keep a model's attention stock, or None."""
    for path, layer, implementation in own_configs(root):
        if layer.config._attn_implementation != implementation:
            return (
                f"{path} has a config of its own with "
                f'attn_implementation="{layer.config._attn_implementation}", and its model has '
                f'"{implementation}"; one mask can\'t serve both, so give them the same first'
            )
    return None


def with_sub_configs(config: Any) -> Iterator[Any]:
    yield config
    for name in config.sub_configs:
        below = getattr(config, name, None)
        if below is not None:
            yield from with_sub_configs(below)


def switch_own_configs(root: PreTrainedModel) -> dict[str, str]:
    """Switches only the layers of :func:`own_configs`; returns their state, to restore it."""
    own = {path: layer.config for path, layer, _ in own_configs(root)}
    before = {path: config._attn_implementation for path, config in own.items()}
    for config in own.values():
        config._attn_implementation_internal = NAME
    return before


def restore(root: nn.Module) -> bool:
    """Undoes :meth:`Switch.apply`; returns False if there was nothing to undo."""
    state = vars(root).pop(_STATE, None)
    if state is not None:
        restore_configs(root, state)
    return state is not None


def restore_configs(root: nn.Module, before: dict[str, str]) -> None:
    """Restores the attention of modules' configs; ``before`` maps the modules' paths to it."""
    for path, implementation in before.items():
        config = root.get_submodule(path).config
        if config._attn_implementation == NAME:
            config._attn_implementation_internal = implementation


def sample_of(root: PreTrainedModel) -> dict[str, Any] | None:
    """Returns the default batch of a model, two small random inputs, or None if none is known.

    Tokens are padded as tokenizers pad them: on the left for a decoder that generates, on the
    right for other models.
    """
    config, name = root.config, root.main_input_name
    encoded = bool(getattr(config, "is_encoder_decoder", False))
    decodes = root.can_generate() and not encoded
    generator = torch.Generator().manual_seed(0)
    try:
        batch = _inputs(config, name, decodes, generator)
    except (AttributeError, TypeError):  # the config gives its sizes by other names
        return None
    if batch is None:
        return None
    if encoded:
        vocab = config.get_text_config(decoder=True).vocab_size
        batch["decoder_input_ids"] = torch.randint(vocab, (2, 8), generator=generator, device="cpu")
    if root.can_generate():
        batch["use_cache"] = False
    known = inspect.signature(root.forward).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        batch = {key: value for key, value in batch.items() if key in known}
    tensors = [*root.parameters(), *root.buffers()]
    like = next((t for t in tensors if t.is_floating_point()), None)
    return None if like is None else {key: _moved(value, like) for key, value in batch.items()}


def _inputs(
    config: Any, name: str, decodes: bool, generator: torch.Generator
) -> dict[str, Any] | None:
    if name == "input_ids":
        text = config.get_text_config(decoder=True) if decodes else config
        # A sequence longer than a two-sided window takes other code paths than one within it.
        window = max(
            getattr(text, name, None) or 0 for name in ("sliding_window", "local_attention")
        )
        length = 16 if decodes else max(16, min(window + 2, 512))
        limit = getattr(text, "max_position_embeddings", None) or length
        length = min(length, limit) if limit > 0 else length  # XLNet's is -1
        # Each row of a Musicgen batch is one codebook of a sequence.
        books = text.num_codebooks if text.model_type.startswith("musicgen") else 1
        pad = getattr(text, "pad_token_id", None)
        batch = tokens(
            text.vocab_size, length, generator, 2 * books, "left" if decodes else "right", pad
        )
        if books > 1:
            batch["attention_mask"] = batch["attention_mask"][::books]
        if not decodes or books > 1:
            del batch["position_ids"]
        return batch
    if name == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = vision.image_size
        height, width = (size, size) if isinstance(size, int) else size
        shape = (2, getattr(vision, "num_channels", 3), height, width)
    elif name == "input_features":
        shape = (2, config.num_mel_bins, 2 * config.max_source_positions)
    elif name == "input_values":
        shape = (2, 4000)
    else:
        return None
    return {name: torch.randn(shape, generator=generator, device="cpu")}


def tokens(
    vocab: int,
    length: int,
    generator: torch.Generator,
    rows: int = 2,
    side: str = "left",
    pad_id: int | None = None,
) -> dict[str, Tensor]:
    """Makes random tokens; a third of the last row is padding, and only padding has ``pad_id``.

    Classifiers find a sequence's last token by ``pad_id``.
    """
    ids = torch.randint(vocab, (rows, length), generator=generator, device="cpu")
    mask = torch.ones(rows, length, dtype=torch.int64, device="cpu")
    pad = length // 3
    mask[-1, slice(0, pad) if side == "left" else slice(length - pad, length)] = 0
    if isinstance(pad_id, int) and 0 <= pad_id < vocab:  # some configs have -1
        ids = torch.where(ids == pad_id, (pad_id + 1) % vocab, ids).where(mask == 1, pad_id)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


def _moved(value: Any, like: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(like.device, like.dtype if value.is_floating_point() else None)
