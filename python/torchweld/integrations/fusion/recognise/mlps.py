"""Recognises MLPs with or without a gate by their structure, and compares them."""

from __future__ import annotations

from torch import nn

from torchweld.integrations.fusion.layers.fused_module import ROW, Fusion, stock_class
from torchweld.integrations.fusion.layers.mlp import (
    GATE_LAYERS,
    MLP,
    FusedMLP,
    FusedPlainMLP,
    activation_of,
)
from torchweld.integrations.fusion.layers.stock_modules import activation_name

from . import compare
from .norms import Recognised, choose, fused_replica

_ACTIVATIONS = (
    "transformers.activations",
    "torch.nn.modules.activation",
    "timm.layers.activations",
)
_LFM2 = MLP(("w1", "w3"), None, "w2", "left", called="silu")
_HIDDEN = 24  # of a replica


def find(module: nn.Module) -> Fusion | None:
    """Guesses an MLP's fused class and settings from its structure; None if it is no MLP."""
    package = stock_class(module).__module__.partition(".")[0]
    if package in ("torch", "torchweld") or module._parameters or module._buffers:
        return None
    gated = _gated_row(module)
    if gated is not None:
        return choose(module, lambda _: [gated], RecognisedMLP)
    return choose(module, _rows, RecognisedPlainMLP) if _rows(module) else None


def is_gated_mlp(module: nn.Module, row: MLP) -> bool:
    """Whether a candidate computes the same as the fused gated MLP of its settings."""
    # With an unknown activation the fused module would run the stock forward: nothing to compare.
    if activation_of(module, row) is None:
        return False
    return compare.strict_difference(module, RecognisedMLP.comparison, row) is None


def _gated_row(module: nn.Module) -> MLP | None:
    """Returns the settings of a module with the children of Llama's or LFM2's MLP, else None."""
    children = module._modules.keys()
    if children == {*_LFM2.first, _LFM2.second}:
        return _LFM2
    names = [name for name in ("act_fn", "activation_fn", "act") if name in module._modules]
    if len(names) != 1 or activation_name(module._modules[names[0]]) is None:
        return None
    rows = (MLP(layers, names[0], "down_proj", "left") for layers in GATE_LAYERS)
    return next((r for r in rows if children == {*r.first, r.activation, r.second}), None)


def _rows(module: nn.Module) -> list[MLP]:
    """Returns settings to try for one to three linear layers, an activation and dropouts."""
    layers, activations = [], []
    for name, child in module._modules.items():
        if isinstance(getattr(child, "out_features", None), int):
            layers.append(name)
        elif type(child).__module__ in _ACTIVATIONS and not any(True for _ in child.parameters()):
            activations.append(name)
        elif type(child) not in (nn.Dropout, nn.Identity):
            return []
    package = stock_class(module).__module__.partition(".")[0]
    if package == "diffusers" and len(module._modules) == len(layers) == 1:
        activations.append(None)  # gelu is in the forward
    if len(activations) != 1 or len(layers) not in (1, 2, 3):
        return []
    seconds = [None] if len(layers) == 1 else layers[:0:-1]
    rows = [
        MLP(tuple(name for name in layers if name != second), *activations, second, half)
        for second in seconds
        for half in ("left", "right", None)
    ]
    return [row for row in rows if _fits(module, row)]


def _fits(module: nn.Module, row: MLP) -> bool:
    if len(row.first) == 2 and row.activated is None:
        return False
    if row.second is None:  # a pooler, whose activation is tanh, is no MLP
        return activation_of(module, row) is not None
    width = module._modules[row.second].in_features * (1 + row.packed)
    return all(module._modules[name].out_features == width for name in row.first)


def _replica(module: nn.Module, random: compare.Random) -> nn.Module:
    replica = fused_replica(module)
    row = getattr(replica, ROW)
    for name, child in module._modules.items():
        if name in row.first:
            child = random.linear(compare.WIDTH, _HIDDEN * (1 + row.packed), like=child)
        elif name == row.second:
            child = random.linear(_HIDDEN, compare.WIDTH, like=child)
        elif type(child) is nn.Dropout:
            child = nn.Dropout(0.0)
        replica.add_module(name, child)
    return replica


class RecognisedPlainMLP(Recognised, FusedPlainMLP):
    """An MLP of one to three layers, of a class in no table."""

    comparison = compare.Kind("an MLP", _replica, compare.run_of_one_input)


class RecognisedMLP(Recognised, FusedMLP):
    """A gated MLP of a class in no table."""

    comparison = compare.Kind("a gated MLP", _replica, compare.run_of_one_input)
