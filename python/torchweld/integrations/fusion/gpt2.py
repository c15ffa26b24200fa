"""Plans the changes of ``fuse`` to a Hugging Face GPT-2, and finds the reasons against them.

A GPT-2 block computes ``c_attn(ln_1(x))`` and ``act(c_fc(ln_2(x)))``; torchweld has one op for
each. ``fuse`` gives a block the class of :mod:`.families` that runs these ops: no module or
parameter moves, and state_dict, optimizer and file formats stay the same. deepcopy and pickle work,
because ``fuse`` swaps ``__class__`` and binds no forward to the instance.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention, GPT2Block, GPT2Model

from torchweld.distributed.gpt2 import ShardedConv1D
from torchweld.integrations.attention.fallback import NAME
from torchweld.integrations.attention.forward import config_refusal
from torchweld.integrations.fusion.layers import fsdp
from torchweld.integrations.fusion.layers.fused_module import Replacement, stock_class
from torchweld.integrations.fusion.layers.gpt2_block import LINEARS, SITES, Site, fused_paths
from torchweld.integrations.fusion.layers.stock_modules import activation_name, hooked

from . import attention_switch
from .plan import undo
from .probes import Probes, device_of
from .report import FuseReport

_STATE = "_torchweld_attention"


def bases(model: nn.Module) -> list[tuple[str, GPT2Model]]:
    """Returns ``(path, model)`` of the GPT2Models in a module."""
    return [(path, m) for path, m in model.named_modules() if isinstance(m, GPT2Model)]


def plan(
    model: nn.Module, kinds: Collection[str], report: FuseReport
) -> tuple[list[Replacement], list[GPT2Switch]]:
    """Returns the replacements and the attention switches; the report lists what stays stock."""
    probes, gathered = Probes(), fsdp.gathered(model)
    # In how many places each module is: fusing one that is in several would change all of them.
    used = Counter(child for module in model.modules() for child in module._modules.values())
    replacements, switches = [], []
    for path, base in bases(model):
        prefix = f"{path}." if path else ""
        for index, block in enumerate(base.h):
            if not isinstance(block, GPT2Block):
                reason = f"it is {type(block).__name__}, not transformers' GPT2Block"
                report.skipped.append((f"{prefix}h.{index}", reason))
                continue
            for site in SITES:
                if site.kind not in kinds:
                    continue
                where = f"{prefix}h.{index}.{site.path}"
                reason = _refusal(block, site, used, gathered)
                if reason is None:
                    owner = getattr(block, site.owner)
                    activation = activation_name(getattr(owner, site.act)) if site.act else "none"
                    weight = getattr(owner, site.linear).weight
                    reason = probes.refusal("layer_norm_linear", weight, activation)
                if reason is not None:
                    report.skipped.append((where, reason))
                    continue
                key = block.get_submodule(site.path)
                replacements.append(Replacement(where, key, (block,), site.path))
                names = [site.norm, site.linear, *([activation] if site.act else [])]
                report.ops[where] = f"layer_norm_linear ({' -> '.join(names)})"
        switch = GPT2Switch(model, path, base)
        if "attention" not in kinds or not switch.layers:
            continue
        reason = attention_refusal(base)
        for block in base.h if reason is None else ():
            reason = reason or _attention_probe(block.attn, base, probes)
        if reason is None:
            switches.append(switch)
        else:
            report.skipped.extend((where, reason) for where, _ in switch.layers)
    return replacements, switches


def _attention_probe(attn: nn.Module, base: GPT2Model, probes: Probes) -> str | None:
    # A quantised layer computes in the dtype of its input, which its integer weights don't tell:
    # take a floating-point parameter, or the embedding's.
    floating = (p for p in attn.parameters() if p.is_floating_point())
    weight = next(floating, base.wte.weight)
    return probes.refusal("attention", weight, attn.head_dim, device=device_of(attn, weight))


def unfuse(model: nn.Module) -> list[str]:
    """Restores the stock blocks and attention; returns the paths that were restored."""
    everything = list(model.named_modules(remove_duplicate=False))
    fused = [(path, module, fused_paths(module)) for path, module in everything]
    restored = [f"{path}.{below}" for path, _, paths in fused for below in paths]
    for _, module, paths in fused:
        if paths:
            undo(Replacement("", None, (module,)))
    switches = (GPT2Switch(model, path, base) for path, base in bases(model))
    return restored + [
        where for switch in switches if switch.restore() for where, _ in switch.layers
    ]


def sample_of(model: Any) -> dict[str, Any]:
    """Returns the default batch of a GPT-2: two random sequences, one padded on the left."""
    base = getattr(model, "transformer", model)
    length, generator = min(16, base.config.n_positions), torch.Generator().manual_seed(0)
    batch = attention_switch.tokens(base.config.vocab_size, length, generator)
    device = device_of(base.wte, base.wte.weight)
    return {**{name: value.to(device) for name, value in batch.items()}, "use_cache": False}


def _refusal(
    block: nn.Module, site: Site, used: Counter[nn.Module], gathered: Container[int]
) -> str | None:
    """Returns why a :class:`.Site` of a GPT2Block must stay stock, or None."""
    if stock_class(block) is not GPT2Block:
        return f"the block is {_class(block)}, not transformers' GPT2Block"
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


@dataclass(eq=False)
class AttentionState:
    """Holds a GPT2Model's state before the switch of its attention, in the model's ``__dict__``."""

    stock_config: Any
    stock_dict: dict[str, Any]
    implementation: str
    own_configs: dict[str, str]


def attention_refusal(base: GPT2Model) -> str | None:
    """Returns why a model's attention must stay stock, or None. All layers switch together."""
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


class GPT2Switch(attention_switch.Switch):
    """Switches the attention of a GPT2Model, and back.

    The config names the attention, and several models may share one config object. The switched
    model gets a copy of the config, so the others stay stock.
    """

    def __init__(self, model: nn.Module, path: str, base: GPT2Model) -> None:
        self.model, self.root = model, base
        prefix = f"{path}." if path else ""
        self.layers = [
            (f"{prefix}h.{index}.{name}", getattr(block, name))
            for index, block in enumerate(base.h)
            for name in ("attn", "crossattention")
            if hasattr(block, name)
        ]

    def apply(self, report: FuseReport) -> None:
        report.ops.update((where, "attention") for where, _ in self.layers)
        old = self.root.config
        new = copy.deepcopy(old)
        new._attn_implementation = NAME
        vars(self.root)[_STATE] = AttentionState(
            stock_config=old,
            stock_dict=old.to_dict(),
            implementation=old._attn_implementation,
            own_configs=attention_switch.switch_own_configs(self.root),
        )
        _replace_config(self.model, old, new)

    def restore(self) -> bool:
        state, new = vars(self.root).pop(_STATE, None), self.root.config
        if state is None:
            return False
        attention_switch.restore_configs(self.root, state.own_configs)
        if new._attn_implementation == NAME:
            new._attn_implementation = state.implementation
        # Unless the copy or the old config was edited meanwhile, the model gets the old config
        # object back. Otherwise it keeps the edited copy.
        if new.to_dict() == state.stock_dict and state.stock_config.to_dict() == state.stock_dict:
            _replace_config(self.model, new, state.stock_config)
        return True

    def was_eager(self) -> bool:
        return vars(self.root)[_STATE].implementation == "eager"

    def known_to_run(self, calls: Any, report: FuseReport) -> list[tuple[str, nn.Module]]:
        return self.layers


def _replace_config(model: nn.Module, old: Any, new: Any) -> None:
    for module in model.modules():
        if vars(module).get("config") is old:
            module.config = new


def _class(value: Any) -> str:
    cls = type(value)
    return f"{cls.__module__}.{cls.__qualname__}"
