"""What ``fuse`` does with a transformers model that is no GPT-2: it switches its attention.

transformers' own ``set_attn_implementation`` does the switch, for sub-models too; here stands which
models are refused, what is remembered for ``unfuse``, and what the report lists.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from .hf_attention import NAME, config_refusal
from .hf_models import shortcoming
from .report import FuseReport

_STATE = "_torchweld_implementations"


def roots(model: nn.Module) -> list[tuple[str, PreTrainedModel]]:
    """``(path, model)`` of the transformers models in a module, those inside of others left out."""
    found: list[tuple[str, PreTrainedModel]] = []
    for path, module in model.named_modules():
        inside = any(not top or path.startswith(f"{top}.") for top, _ in found)
        if isinstance(module, PreTrainedModel) and not inside:
            found.append((path, module))
    return found


def attention_paths(path: str, root: PreTrainedModel) -> list[str]:
    """The attention layers below a model, by the name that transformers gives their classes."""
    prefix = f"{path}." if path else ""
    return [
        prefix + name
        for name, module in root.named_modules()
        if type(module).__name__.endswith("Attention")
    ] or [path or "the model"]


def plan(model: nn.Module, report: FuseReport) -> list[tuple[list[str], PreTrainedModel]]:
    """What to switch; what not to goes to the report."""
    switches = []
    for path, root in roots(model):
        paths = attention_paths(path, root)
        reason = config_refusal(root.config) or _class_refusal(root)
        if reason is not None:
            report.skipped.extend((where, reason) for where in paths)
        else:
            switches.append((paths, root))
    return switches


def _class_refusal(root: PreTrainedModel) -> str | None:
    for module in root.modules():
        lack = shortcoming(type(module)) if isinstance(module, PreTrainedModel) else None
        if lack is not None:
            return f"{type(module).__name__} {lack}"
    return None


def switch(root: PreTrainedModel) -> None:
    """Moves a model and its sub-models to torchweld's attention."""
    root.__dict__[_STATE] = {
        path: module.config._attn_implementation
        for path, module in root.named_modules()
        if isinstance(module, PreTrainedModel)
    }
    root.set_attn_implementation(NAME)


def restore(root: nn.Module) -> bool:
    """Undoes :func:`switch`; False when there was nothing to undo."""
    state = vars(root).get(_STATE)
    if state is None:
        return False
    for path, implementation in state.items():
        config = root.get_submodule(path).config
        if config._attn_implementation == NAME:
            config._attn_implementation_internal = implementation
    del root.__dict__[_STATE]
    return True


def sample_of(root: PreTrainedModel) -> tuple[int, int, torch.device] | None:
    """Vocabulary, positions and device of the default batch, None where it would not fit."""
    if not root.can_generate() or root.main_input_name != "input_ids":
        return None
    config = root.config.get_text_config(decoder=True)
    if getattr(root.config, "is_encoder_decoder", False) or config is not root.config:
        return None
    return config.vocab_size, getattr(config, "max_position_embeddings", 16), root.device
