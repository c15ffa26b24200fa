"""Loads fused modules from a state_dict that has the names of the modules that they replace."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from torch import Tensor

_State = MutableMapping[str, Tensor]


def rename_norm_linear(state: _State, prefix: str, norm: tuple[str, ...]) -> None:
    """Renames the keys of a norm and a linear layer to those of the fused module, in place.

    The two layers may have any names, as `ln` and `fc`, or `0` and `1` in an nn.Sequential: the
    linear layer is the one whose weight has two dims. With other keys below the prefix, none is
    renamed, and loading reports them.

    Args:
        state: the state_dict.
        prefix: of the fused module's keys.
        norm: the fused module's names of the norm's weight and bias.
    """
    children = _children(state, prefix)
    weights = {child: names.get("weight") for child, names in (children or {}).items()}
    linears = [child for child, weight in weights.items() if _dims(weight) == 2]
    norms = [child for child, weight in weights.items() if _dims(weight) == 1]
    if len(linears) != 1 or len(norms) > 1 or len(weights) != len(linears) + len(norms):
        return
    for child, new in ((linears, ("weight", "bias")), (norms, norm)):
        for name, own in zip(("weight", "bias"), new, strict=False):
            if child and name in children[child[0]]:
                state[prefix + own] = state.pop(f"{prefix}{child[0]}.{name}")


def rename_gated_linear(state: _State, prefix: str, gate: str, interleaved: bool) -> None:
    """Turns the keys of a gated MLP's linear layers into those of the packed layer, in place.

    One layer with both branches may have any name. Two layers are packed; they must be called
    `left` and `right`, or `gate_proj`, to which the gate's activation applies, and `up_proj`. With
    other keys below the prefix, nothing is changed, and loading reports them.

    Args:
        state: the state_dict.
        prefix: of the fused module's keys.
        gate: a gate of `gated_linear`.
        interleaved: whether the packed rows alternate between the branches.
    """
    children = _children(state, prefix)
    if not children:
        return
    if len(children) == 1:
        (child,) = children
        for name in children[child]:
            state[prefix + name] = state.pop(f"{prefix}{child}.{name}")
        return
    sides = {"left": "left", "right": "right"}
    if gate != "sigmoid_tanh":  # with two activations, gate_proj could be either
        first = gate == "swiglu"
        sides |= {"gate_proj": "left" if first else "right"}
        sides |= {"up_proj": "right" if first else "left"}
    found = {sides.get(child): names for child, names in children.items()}
    if found.keys() != {"left", "right"} or found["left"].keys() != found["right"].keys():
        return
    if any(t.shape != found["right"][name].shape for name, t in found["left"].items()):
        return
    for name, left in found["left"].items():
        pair = (left, found["right"][name])
        packed = torch.stack(pair, 1).flatten(0, 1) if interleaved else torch.cat(pair)
        for child in children:
            del state[f"{prefix}{child}.{name}"]
        state[prefix + name] = packed


def _children(state: _State, prefix: str) -> dict[str, dict[str, Tensor]] | None:
    """Groups the weights and biases below a prefix by child; None if there are other keys."""
    found: dict[str, dict[str, Tensor]] = {}
    for key in state:
        if key.startswith(prefix):
            child, _, name = key.removeprefix(prefix).rpartition(".")
            if not child or name not in ("weight", "bias"):
                return None
            found.setdefault(child, {})[name] = state[key]
    return found


def _dims(weight: Tensor | None) -> int:
    return -1 if weight is None else weight.dim()
