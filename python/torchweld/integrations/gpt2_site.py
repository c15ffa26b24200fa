"""One ``norm -> linear`` of a GPT-2 that torchweld computes, and whether it still may.

:mod:`.gpt2` says how the modules and their site belong together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from torchweld.ops.stock import untouched

from . import measure
from .gpt2_sharded import ShardedConv1D


def hooked(module: nn.Module) -> bool:
    """Whether a hook runs with a module.

    It would see values that the fusion changes or never computes; or it is what brings the
    module's parameters to the device and takes them away again, as accelerate's offloading does,
    and another module must not read them. Hooks on all modules are another question, which
    ``_has_any_global_hook`` answers once for many modules.
    """
    if untouched(module):
        return False
    forward = vars(module).get("forward")
    if forward is not None and getattr(forward, "__func__", None) is not type(module).forward:
        return True  # accelerate wraps forward on the instance
    if module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    # transformers records outputs with forward hooks that look at the layer's output alone.
    for hook in module._forward_hooks.values():
        if not getattr(hook, "__module__", "").startswith("transformers.utils."):
            return True
    return False


def weight_and_bias(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """The two parameters of a layer, read three times as fast as through ``Module.__getattr__``."""
    own = layer._parameters
    try:
        return own["weight"], own["bias"]
    except KeyError:  # parametrised, or sharded into flat parameters
        return layer.weight, layer.bias


def _mixed(norm: nn.Module, linear: nn.Module) -> bool:
    """Whether the norm was cast alone, which torch's LayerNorm takes and the op does not."""
    scale, weight = norm._parameters.get("weight"), linear._parameters.get("weight")
    if scale is None or weight is None or scale.dtype == weight.dtype:
        return False
    return not torch.is_autocast_enabled(scale.device.type)


class Site(nn.Module):
    """One ``norm -> linear (-> activation)`` of a block, held by the two modules that changed.

    ``block.<norm_name>`` is the norm, ``block.<owner_name>.<linear_name>`` the Conv1D; ``act`` is
    the activation module between them and the result, if there is one.

    NOTE: it is a Module for torch.compile alone. Dynamo skips the guards of a module while no
    dictionary below it changes, but not where anything but modules is between: every call of a
    compiled model would check all that a site names.
    """

    def __init__(
        self,
        *,
        block: nn.Module,
        norm_name: str,
        owner_name: str,
        linear_name: str,
        norm: nn.Module,
        owner: nn.Module,
        linear: nn.Module,
        act: nn.Module | None,
        activation: str,
    ) -> None:
        super().__init__()
        # Not through setattr, which would register the modules as the site's own.
        vars(self).update(
            block=block,
            norm_name=norm_name,
            owner_name=owner_name,
            linear_name=linear_name,
            norm=norm,
            owner=owner,
            linear=linear,
            act=act,
            activation=activation,
            # The paths of the two modules that hold the site.
            places=(norm_name, "mlp" if owner_name == "mlp" else f"{owner_name}.{linear_name}"),
        )

    def members(self) -> list[tuple[str, nn.Module]]:
        """``(name, module)`` of everything whose input or output the fusion changes."""
        out = [
            (self.norm_name, self.norm),
            (self.owner_name, self.owner),
            (self.linear_name, self.linear),
        ]
        return out if self.act is None else [*out, ("act", self.act)]

    def holds(self) -> bool:
        """Whether norm and consumer are still in their places and nothing looks in between."""
        own = vars(self)  # reading attributes of a Module takes three times as long
        norm, owner, linear, act = own["norm"], own["owner"], own["linear"], own["act"]
        outer, inner = own["block"]._modules, owner._modules
        if (
            outer.get(own["norm_name"]) is not norm
            or outer.get(own["owner_name"]) is not owner
            or inner.get(own["linear_name"]) is not linear
            or (act is not None and inner.get("act") is not act)
        ):
            return False
        if hooked(norm) or hooked(owner) or hooked(linear) or _mixed(norm, linear):
            return False
        return (act is None or not hooked(act)) and not _has_any_global_hook()

    def compute(self, x: Tensor) -> Tensor:
        """``activation(linear(norm(x)))`` in one op."""
        own = vars(self)
        norm, linear = own["norm"], own["linear"]
        if measure.seen is not None:
            measure.note(self)
        tensors = x, *weight_and_bias(linear), *weight_and_bias(norm)
        if isinstance(linear, ShardedConv1D):
            tensors = linear.columns(*tensors)
        x, weight, bias, scale, shift = tensors
        return torch.ops.torchweld.layer_norm_linear(
            x,
            weight.t(),  # Conv1D keeps (in, out); the op takes any strides
            bias,
            scale,
            shift,
            eps=norm.eps,
            activation=own["activation"],
        )


def site_of(module: nn.Module) -> Site | None:
    """The site that a module works for, where the fusion holds."""
    site = vars(module).get("_torchweld_site")
    return site if site is not None and site.holds() else None


def _check_places(base: nn.Module, args: Any = ()) -> None:
    """Raises where a part of a fused block is in another place than the one it was fused in.

    A part does what its own block's parts leave to it, and can't tell who calls it.

    Raises:
        RuntimeError: There is such a part.
    """
    for index, block in enumerate(base.h):
        parts = block._modules
        attn = parts.get("attn")
        for name, part in (
            ("ln_1", parts.get("ln_1")),
            ("attn.c_attn", None if attn is None else attn._modules.get("c_attn")),
            ("ln_2", parts.get("ln_2")),
            ("mlp", parts.get("mlp")),
        ):
            site = None if part is None else vars(part).get("_torchweld_site")
            if site is not None:
                own = vars(site)
                if own["block"] is not block or name not in own["places"]:
                    raise _moved(f"h.{index}.{name}")
    if vars(base.ln_f).get("_torchweld_site") is not None:
        raise _moved("ln_f")


def _moved(where: str) -> RuntimeError:
    return RuntimeError(
        f"torchweld.fuse: {where} must be in the place where it was fused, but was moved there "
        "since; call torchweld.unfuse(model), and torchweld.fuse(model) again"
    )


def watch_places(base: nn.Module) -> None:
    """Has a GPT2Model look before every forward pass if its fused parts are in their places."""
    if _check_places not in base._forward_pre_hooks.values():
        base.register_forward_pre_hook(_check_places)


def unwatch_places(base: nn.Module) -> None:
    """Undoes :func:`watch_places`, in a copy or an unpickled model too."""
    for key in [k for k, hook in base._forward_pre_hooks.items() if hook is _check_places]:
        del base._forward_pre_hooks[key]
