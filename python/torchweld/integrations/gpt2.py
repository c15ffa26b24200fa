"""The places of a Hugging Face GPT-2 that torchweld takes over, and how.

A GPT-2 block computes ``c_attn(ln_1(x))`` and ``act(c_fc(ln_2(x)))``. Both cross a module boundary,
so two modules change together: the LayerNorm hands its input on untouched, and the consumer reads
the norm's weight, bias and eps through a :class:`Site` that both hold. The site is an ordinary
attribute, not a submodule: no parameter moves, and state_dict, optimizer and file formats see no
difference. Swapping ``__class__`` instead of binding functions keeps deepcopy and pickle whole:
the site is copied along with the modules it names.

Every forward asks the site whether the fusion still holds. A hook that was added after ``fuse``
(accelerate's offloading too), a replaced layer (LoRA) or a DataParallel replica makes *both*
modules behave as stock again.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers import activations
from transformers.models.gpt2.modeling_gpt2 import (
    GPT2MLP,
    GPT2Attention,
    GPT2Block,
    GPT2Model,
)
from transformers.pytorch_utils import Conv1D

from . import gpt2_mask
from .gpt2_layers import DirectAttention, drop, project
from .gpt2_sharded import ShardedConv1D
from .gpt2_site import Site, hooked, site_of
from .hf_attention import NAME, config_refusal, register_attention

# Copied or unpickled models look the attention up by name: importing this module is enough.
register_attention()


# NOTE: a wrapped forward outlives unfuse in whoever wrapped it. So these forwards take a module of
# the stock class too, and name the stock forward: super() would not.


class PassThroughLayerNorm(nn.LayerNorm):
    """A LayerNorm whose work is done by the layer that follows it."""

    def forward(self, input: Tensor) -> Tensor:
        site = site_of(self)
        if site is not None and site.norm is self:
            return input
        return nn.LayerNorm.forward(self, input)

    def extra_repr(self) -> str:
        return super().extra_repr() + ", computed by the next layer"


class LayerNormConv1D(Conv1D):
    """``c_attn`` with ``ln_1`` in front of it."""

    def forward(self, x: Tensor) -> Tensor:
        site = site_of(self)
        if site is not None and site.linear is self:
            return site.compute(x)
        return Conv1D.forward(self, x)

    def __repr__(self) -> str:
        return f"LayerNormConv1D(nf={self.nf}, nx={self.nx})"


class LayerNormShardedConv1D(ShardedConv1D):
    """The same of a model that went through ``torchweld.distributed.parallelize``."""

    def forward(self, x: Tensor) -> Tensor:
        site = site_of(self)
        if site is not None and site.linear is self:
            return site.compute(x)
        return ShardedConv1D.forward(self, x)


class LayerNormMLP(GPT2MLP):
    """GPT-2's MLP with ``ln_2`` in front of it and the activation inside the first matmul."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        site = site_of(self)
        if site is None or site.owner is not self:
            return GPT2MLP.forward(self, hidden_states)
        return drop(self.dropout, project(self.c_proj, site.compute(hidden_states)))


FUSED = {
    PassThroughLayerNorm: nn.LayerNorm,
    LayerNormConv1D: Conv1D,
    LayerNormShardedConv1D: ShardedConv1D,
    LayerNormMLP: GPT2MLP,
}


def activation_name(act: Any) -> str | None:
    """torchweld's name of an activation object, None when there is no fused form of it."""
    if isinstance(act, nn.GELU):
        return "gelu_tanh" if act.approximate == "tanh" else "gelu"
    names = {
        "NewGELUActivation": "gelu_tanh",
        "GELUTanh": "gelu_tanh",
        "PytorchGELUTanh": "gelu_tanh",
        "FastGELUActivation": "gelu_tanh",
        "GELUActivation": "gelu",
        "SiLUActivation": "silu",
        "LinearActivation": "none",
    }
    for cls, name in [(nn.ReLU, "relu"), (nn.SiLU, "silu"), (nn.Identity, "none")]:
        if type(act) is cls:
            return name
    name = names.get(type(act).__name__)
    if name is not None and type(act) is getattr(activations, type(act).__name__, None):
        return name
    return None


def uses(model: nn.Module) -> Counter[nn.Module]:
    """In how many places each module of a model is."""
    return Counter(child for module in model.modules() for child in module._modules.values())


def sites(block: nn.Module, used: Counter[nn.Module]) -> list[tuple[str, Site | None, str | None]]:
    """The two places of a block: ``(path below it, site, None)`` or ``(path, None, reason)``."""
    out: list[tuple[str, Site | None, str | None]] = []
    for norm_name, owner_name, linear_name, owner_types, path in (
        ("ln_1", "attn", "c_attn", (GPT2Attention, DirectAttention), "attn.c_attn"),
        ("ln_2", "mlp", "c_fc", (GPT2MLP,), "mlp"),
    ):
        owner = getattr(block, owner_name)
        if type(block) is not GPT2Block:
            other = f"{_class(block)}, not transformers' GPT2Block"
            what = "sharded; call fuse before fully_shard" if _is_sharded(block) else other
            out.append((path, None, f"the block is {what}"))
        elif type(owner) in FUSED or type(getattr(owner, linear_name)) in FUSED:
            out.append((path, None, "fused already"))
        elif type(owner) not in owner_types:
            stock = owner_types[0].__name__
            out.append((path, None, f"{owner_name} is {_class(owner)}, not {stock}"))
        else:
            act = owner.act if owner_name == "mlp" else None
            activation = "none" if act is None else activation_name(act)
            if activation is None:
                out.append((path, None, f"no fused form of the activation {_class(act)}"))
                continue
            site = Site(
                block=block,
                norm_name=norm_name,
                owner_name=owner_name,
                linear_name=linear_name,
                norm=getattr(block, norm_name),
                owner=owner,
                linear=getattr(owner, linear_name),
                act=act if isinstance(act, nn.Module) else None,
                activation=activation,
            )
            reason = refusal(site, used)
            out.append((path, None if reason else site, reason))
    return out


def refusal(site: Site, used: Counter[nn.Module]) -> str | None:
    """Why a site must stay stock, or None."""
    norm, linear = site.norm, site.linear
    # What changes its class, and what that is in. Whole blocks may be in several places.
    changed = [(site.norm_name, norm), (site.owner_name, site.owner)]
    if site.owner_name == "attn":
        changed.append((site.linear_name, linear))
    for name, module in changed:
        if used[module] > 1:
            return f"{name} is used in {used[module]} places of the model"
    if type(norm) is not nn.LayerNorm:
        return f"{site.norm_name} is {_class(norm)}, not torch's LayerNorm"
    if type(linear) not in (Conv1D, ShardedConv1D):
        return (
            f"{site.linear_name} is {_class(linear)}, not transformers' Conv1D "
            "(LoRA, quantised or otherwise replaced)"
        )
    for name, module in site.members():
        if hasattr(module, "_hf_hook"):
            return f"{name} has accelerate's hooks, which move its parameters"
        if "forward" in vars(module):
            return f"{name}.forward was replaced on the instance"
        if hooked(module) or _has_any_global_hook():
            return f"{name} has hooks, which would see other values"
    if tuple(norm.normalized_shape) != (linear.nx,):
        return f"{site.norm_name} normalises {tuple(norm.normalized_shape)}, not ({linear.nx},)"
    tensors = {}
    for name, module in ((site.norm_name, norm), (site.linear_name, linear)):
        for key in ("weight", "bias"):
            tensor = module._parameters.get(key)
            if tensor is None and key == "weight" and module is linear:
                return f"{name}.weight is not a plain parameter (sharded or parametrised)"
            if tensor is not None:
                tensors[f"{name}.{key}"] = tensor
    for name, tensor in tensors.items():
        sharded = type(linear) is ShardedConv1D and name.startswith(site.linear_name)
        plain = type(tensor) is nn.Parameter and type(tensor.data) is Tensor
        if not plain and not sharded:
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
        return f"{site.norm_name} and {site.linear_name} are on different devices"
    return None


def join(site: Site) -> None:
    """Puts a site to work: changes the two modules' classes and hands both the site."""
    consumer = site.owner if site.owner_name == "mlp" else site.linear
    for module in (site.norm, consumer):
        # Into __dict__ and not through setattr: a registered reference would rename parameters.
        module.__dict__["_torchweld_site"] = site
    site.norm.__class__ = PassThroughLayerNorm
    consumer.__class__ = next(cls for cls, stock in FUSED.items() if stock is type(consumer))


def is_fused(module: nn.Module) -> bool:
    """Whether :func:`join` changed a module.

    Raises:
        RuntimeError: It did, but the module has been given yet another class since.
    """
    if "_torchweld_site" not in vars(module):
        return False
    if type(module) not in FUSED:
        raise RuntimeError(
            f"torchweld.unfuse: a fused module has become {_class(module)} since (sharded or "
            "parametrised after fuse); undo that first, then call unfuse"
        )
    return True


def part(module: nn.Module) -> None:
    """Gives a module its stock class back."""
    if is_fused(module):
        module.__class__ = FUSED[type(module)]
        del module.__dict__["_torchweld_site"]


@dataclass(eq=False)
class AttentionState:
    """What a GPT2Model was before its attention was switched; lives in its ``__dict__``."""

    stock_config: Any
    stock_dict: dict[str, Any]
    implementation: str


def attention_refusal(base: GPT2Model) -> str | None:
    """Why the attention of a model must stay stock, or None. It is one switch for all layers."""
    reason = config_refusal(base.config)
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
        stock_config=old, stock_dict=old.to_dict(), implementation=old._attn_implementation
    )
    _replace_config(model, old, new)
    gpt2_mask.install(base)
    _change_attention(base, GPT2Attention, DirectAttention)


def restore_attention(model: nn.Module, base: GPT2Model) -> bool:
    """Undoes :func:`switch_attention`; False when there was nothing to undo."""
    state = vars(base).get("_torchweld_attention")
    if state is None:
        return False
    gpt2_mask.remove(base)
    _change_attention(base, DirectAttention, GPT2Attention)
    new = base.config
    if new._attn_implementation == NAME:
        new._attn_implementation = state.implementation
    # The old object comes back, unless the config was edited meanwhile: edits are not lost.
    if new.to_dict() == state.stock_dict and state.stock_config.to_dict() == state.stock_dict:
        _replace_config(model, new, state.stock_config)
    del base.__dict__["_torchweld_attention"]
    return True


def _change_attention(base: GPT2Model, old: type[nn.Module], new: type[nn.Module]) -> None:
    """Of the self-attention; what is neither class computes as it did.

    NOTE: older versions of transformers know the scaling in the stock forward alone.
    """
    for block in base.h:
        if type(block.attn) is old and hasattr(block.attn, "scaling"):
            block.attn.__class__ = new


def _replace_config(model: nn.Module, old: Any, new: Any) -> None:
    for module in model.modules():
        if vars(module).get("config") is old:
            module.config = new


def _is_sharded(module: nn.Module) -> bool:
    """By fully_shard, whose package takes seconds to import."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _class(value: Any) -> str:
    cls = type(value)
    return f"{cls.__module__}.{cls.__qualname__}"
