"""The changes that ``fuse`` makes to a Hugging Face GPT-2, and the reasons against them.

A GPT-2 block computes ``c_attn(ln_1(x))`` and ``act(c_fc(ln_2(x)))``, which torchweld has as one op
each. ``fuse`` gives a block the class of :mod:`.families` that runs them: no module or parameter
moves, and state_dict, optimizer and file formats see no difference. Swapping ``__class__`` instead
of binding a forward keeps deepcopy and pickle whole.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention, GPT2Block, GPT2Model

from torchweld.distributed.gpt2 import ShardedConv1D
from torchweld.integrations.attention.fallback import NAME
from torchweld.integrations.attention.forward import config_refusal
from torchweld.integrations.fusion.layers.families import fused_class
from torchweld.integrations.fusion.layers.gpt2_block import LINEARS, SITES, Site, fused_paths
from torchweld.integrations.fusion.layers.modules import activation_name, hooked
from torchweld.integrations.fusion.layers.part import is_fused, set_class, stock_class

from . import attention_switch


def uses(model: nn.Module) -> Counter[nn.Module]:
    """In how many places each module of a model is."""
    return Counter(child for module in model.modules() for child in module._modules.values())


def sites(
    block: nn.Module, used: Counter[nn.Module], gathered: Container[int]
) -> list[tuple[Site, str | None]]:
    """The sites of a GPT2Block, each with the reason why it must stay stock, or None.

    Args:
        block: A block of the model.
        used: What :func:`uses` gives.
        gathered: What :func:`.fsdp.gathered` gives.
    """
    if stock_class(block) is not GPT2Block:
        reason = f"the block is {_class(block)}, not transformers' GPT2Block"
        return [(site, reason) for site in SITES]
    return [(site, _refusal(block, site, used, gathered)) for site in SITES]


def _refusal(
    block: nn.Module, site: Site, used: Counter[nn.Module], gathered: Container[int]
) -> str | None:
    if site.path in fused_paths(block):
        return "fused already"
    norm, owner = getattr(block, site.norm), getattr(block, site.owner)
    if type(owner) is not site.owner_class:
        return f"{site.owner} is {_class(owner)}, not {site.owner_class.__name__}"
    linear = getattr(owner, site.linear)
    act = None if site.act is None else getattr(owner, site.act)
    if site.act is not None and activation_name(act) is None:
        return f"no fused form of the activation {_class(act)}"
    members = {site.norm: norm, site.owner: owner, site.linear: linear}
    for name, module in members.items():
        if used[module] > 1:
            return f"{name} is used in {used[module]} places of the model"
    if type(norm) is not nn.LayerNorm:
        return f"{site.norm} is {_class(norm)}, not torch's LayerNorm"
    if type(linear) not in LINEARS:
        return (
            f"{site.linear} is {_class(linear)}, not transformers' Conv1D "
            "(LoRA, quantised or otherwise replaced)"
        )
    if site.act is not None:
        members[site.act] = act
    for name, module in members.items():
        if hasattr(module, "_hf_hook"):
            return f"{name} has accelerate's hooks, which move its parameters"
        if "forward" in vars(module):
            return f"{name}.forward was replaced on the instance"
        called = module is owner or (module is linear and act is None)
        if hooked(module, calls_recorders=called) or _has_any_global_hook():
            return f"{name} has hooks, which would see other values"
    return _parameter_refusal(site, norm, linear, gathered)


def _parameter_refusal(
    site: Site, norm: nn.LayerNorm, linear: nn.Module, gathered: Container[int]
) -> str | None:
    if tuple(norm.normalized_shape) != (linear.nx,):
        return f"{site.norm} normalises {tuple(norm.normalized_shape)}, not ({linear.nx},)"
    tensors = {}
    for name, module in ((site.norm, norm), (site.linear, linear)):
        for key in ("weight", "bias"):
            tensor = module._parameters.get(key)
            if tensor is None and key == "weight" and module is linear:
                return f"{name}.weight is not a plain parameter (sharded or parametrised)"
            if tensor is not None:
                tensors[f"{name}.{key}"] = tensor
    for name, tensor in tensors.items():
        sharded = type(linear) is ShardedConv1D and name.startswith(site.linear)
        plain = type(tensor) is nn.Parameter and type(tensor.data) is Tensor
        if not plain and not sharded and id(tensor) not in gathered:
            kind = tensor if type(tensor) is not nn.Parameter else tensor.data
            return f"{name} is {_class(kind)}, not a plain parameter (sharded or quantised)"
        if not tensor.is_floating_point():
            return f"{name} is {tensor.dtype}, not floating point"
        if tensor.device.type == "meta":
            return f"{name} is on the meta device"
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    if len(set(dtypes.values())) > 1:
        listed = ", ".join(f"{name} {str(dtype)[6:]}" for name, dtype in dtypes.items())
        return f"mixed dtypes: {listed}"
    if len({tensor.device for tensor in tensors.values()}) > 1:
        return f"{site.norm} and {site.linear} are on different devices"
    return None


def fuse_site(block: nn.Module, site: Site) -> None:
    """Has a block run a site fused, from its next call on."""
    vars(block)["_torchweld_sites"] = (*fused_paths(block), site.path)
    if not is_fused(block):
        set_class(block, fused_class(GPT2Block))


def unfuse_block(block: nn.Module) -> None:
    """Undoes :func:`fuse_site`."""
    vars(block).pop("_torchweld_sites", None)
    set_class(block, stock_class(block))


@dataclass(eq=False)
class AttentionState:
    """The state of a GPT2Model before its attention was switched; kept in its ``__dict__``."""

    stock_config: Any
    stock_dict: dict[str, Any]
    implementation: str
    own_configs: dict[str, str]


def attention_refusal(base: GPT2Model) -> str | None:
    """Why the attention of a model must stay stock, or None. It is one switch for all layers."""
    reason = config_refusal(base.config) or attention_switch.own_refusal(base)
    if reason is not None:
        return reason
    for index, block in enumerate(base.h):
        if not isinstance(block, GPT2Block):
            return f"h.{index} is {_class(block)}, not transformers' GPT2Block"
        for name in ("attn", "crossattention"):
            attn = getattr(block, name, None)
            if attn is not None and not isinstance(attn, GPT2Attention):
                return f"h.{index}.{name} is {_class(attn)}, not transformers' GPT2Attention"
    return None


def switch_attention(model: nn.Module, base: GPT2Model) -> None:
    """Moves a GPT2Model to torchweld's attention.

    The switch is a field of the config, and one config object may serve several models: the model
    gets a copy of its own, so that the others stay stock.
    """
    old = base.config
    new = copy.deepcopy(old)
    new._attn_implementation = NAME
    base.__dict__["_torchweld_attention"] = AttentionState(
        stock_config=old,
        stock_dict=old.to_dict(),
        implementation=old._attn_implementation,
        own_configs=attention_switch.switch_own_configs(base),
    )
    _replace_config(model, old, new)


def was_eager(base: GPT2Model) -> bool:
    """Whether a model was on eager attention before :func:`switch_attention`."""
    return vars(base)["_torchweld_attention"].implementation == "eager"


def restore_attention(model: nn.Module, base: GPT2Model) -> bool:
    """Undoes :func:`switch_attention`; False when there was nothing to undo."""
    state = vars(base).get("_torchweld_attention")
    if state is None:
        return False
    new = base.config
    attention_switch.restore_configs(base, state.own_configs)
    if new._attn_implementation == NAME:
        new._attn_implementation = state.implementation
    # Unless the copy or the old config was edited meanwhile, the model gets the old config
    # object back. Otherwise it keeps the edited copy.
    if new.to_dict() == state.stock_dict and state.stock_config.to_dict() == state.stock_dict:
        _replace_config(model, new, state.stock_config)
    del base.__dict__["_torchweld_attention"]
    return True


def _replace_config(model: nn.Module, old: Any, new: Any) -> None:
    for module in model.modules():
        if vars(module).get("config") is old:
            module.config = new


def _class(value: Any) -> str:
    cls = type(value)
    return f"{cls.__module__}.{cls.__qualname__}"
