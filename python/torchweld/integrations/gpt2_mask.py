"""A compiled GPT-2 that is given no mask keeps the plain causal path.

Where there is no mask and no cache, transformers looks in position_ids for packed sequences. While
torch.compile traces, it can't read them and makes a 4-D mask. Where the caller gives no
position_ids either, GPT-2 counts them from 0 and nothing is packed: a forward pre-hook says so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .hf_attention import NAME, no_mask


def _keep_causal(base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not torch.compiler.is_compiling() or base.config._attn_implementation != NAME:
        return None
    given = [kwargs.get(n) for n in ("attention_mask", "position_ids", "past_key_values")]
    if len(args) > 1 or any(value is not None for value in given):
        return None
    embeds = kwargs.get("inputs_embeds")
    ids = args[0] if args else kwargs.get("input_ids", embeds)
    device = (embeds if ids is None else ids).device
    return args, {**kwargs, "attention_mask": no_mask(device)}


def install(base: nn.Module) -> None:
    """Adds the hook to a GPT2Model."""
    base.register_forward_pre_hook(_keep_causal, with_kwargs=True)


def remove(base: nn.Module) -> None:
    """Takes the hook away, from a copy or an unpickled model too."""
    for key in [k for k, hook in base._forward_pre_hooks.items() if hook is _keep_causal]:
        del base._forward_pre_hooks[key]
        base._forward_pre_hooks_with_kwargs.pop(key, None)
