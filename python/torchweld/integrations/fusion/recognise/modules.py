"""Parts of models that the table of families lacks: recognised by structure, then compared.

A module with the parts of an RMSNorm or of a gated MLP is compared with the fused part
(:mod:`.twins`). Where the two differ, the module stays stock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from torchweld.integrations.fusion.layers.decoder import FusedNorm, Norm
from torchweld.integrations.fusion.layers.families import (
    Found,
    fused_class,
    in_table,
    part_of,
    register,
)
from torchweld.integrations.fusion.layers.mlp import MLP, FusedMLP, gate_of
from torchweld.integrations.fusion.layers.modules import activation_name
from torchweld.integrations.fusion.layers.part import ROW, STOCK, is_fused, stock_class
from torchweld.integrations.fusion.probes import Probes

from . import twins

_EPS = ("variance_epsilon", "eps", "epsilon")
_ACTIVATIONS = ("act_fn", "activation_fn", "act")
_LAYERS = (("gate_proj", "up_proj"), ("gate_up_proj",))  # in front of the gate
_HIDDEN = 24  # of the twin of an MLP
# The columns and rows of its layers.
_SIZES = {
    "gate_proj": (twins.WIDTH, _HIDDEN),
    "up_proj": (twins.WIDTH, _HIDDEN),
    "gate_up_proj": (twins.WIDTH, 2 * _HIDDEN),
    "down_proj": (_HIDDEN, twins.WIDTH),
}


def new_fused(stock: type[nn.Module], parent: type[nn.Module], row: Any) -> nn.Module:
    """A fused module without state, for copies and pickles of a part that is in no table."""
    cls = fused_class(stock, (parent, row))
    return cls.__new__(cls)


class Recognised:
    """Pickles a part whose class is in no table."""

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        cls = next(cls for cls in type(self).__mro__ if STOCK in vars(cls))
        _, _, *state = super().__reduce_ex__(protocol)
        return new_fused, (getattr(cls, STOCK), cls.__bases__[0], getattr(cls, ROW)), *state


class RecognisedNorm(Recognised, FusedNorm):
    """An RMSNorm of another class, which multiplies by the weight or by 1 + the weight."""

    @staticmethod
    def probe(module: nn.Module, row: Norm, weight: Tensor, probes: Probes) -> str | None:
        return FusedNorm.probe(module, row, weight, probes) or compared(
            module, NORM, row, weight, probes
        )


class RecognisedMLP(Recognised, FusedMLP):
    """A gated MLP of another class."""

    @staticmethod
    def probe(module: nn.Module, row: MLP, weight: Tensor, probes: Probes) -> str | None:
        return FusedMLP.probe(module, row, weight, probes) or compared(
            module, MLPS, row, weight, probes
        )


def compared(
    module: nn.Module, kind: twins.Kind, row: Any, weight: Tensor, probes: Probes
) -> str | None:
    """:func:`.twins.difference`, once for all modules of a class with the same attributes."""
    key = weight.device, weight.dtype, *twins.key_of(module)
    return probes.once(key, lambda: twins.difference(module, kind, row, weight))


def _norm_twin(module: nn.Module, random: twins.Random) -> nn.Module:
    twin = fused_twin(module)
    twin.weight = nn.Parameter(random(twins.WIDTH))
    return twin


def _mlp_twin(module: nn.Module, random: twins.Random) -> nn.Module:
    twin = fused_twin(module)
    for name, child in module._modules.items():
        if name in _SIZES:
            child = random.linear(*_SIZES[name], like=child)
        twin.add_module(name, child)
    return twin


def fused_twin(module: nn.Module) -> nn.Module:
    """A twin with the fused class of a module."""
    return twins.bare_twin(module, fused_class(stock_class(module)))


NORM = twins.Kind("an RMSNorm", _norm_twin, twins.run_of_one_input)
MLPS = twins.Kind("a gated MLP", _mlp_twin, twins.run_of_one_input)


def known(module: nn.Module) -> Found | None:
    """The fused parent and the row of a module of the table, a norm or an MLP, else None."""
    return part_of(module) if is_fused(module) else in_table(stock_class(module)) or find(module)


def find(module: nn.Module) -> Found | None:
    """The fused parent and the row for a module by its structure, None where it has another.

    It is only a candidate: ``probe`` of the parent compares the two.
    """
    stock = stock_class(module)
    if stock.__module__.partition(".")[0] in ("torch", "torchweld"):
        return None
    rows = _norm_rows(module) or _mlp_rows(module)
    if not rows:
        return None
    is_norm = isinstance(rows[0], Norm)
    parent, kind = (RecognisedNorm, NORM) if is_norm else (RecognisedMLP, MLPS)
    return choose(module, lambda _: rows, parent, kind)


def choose(
    module: nn.Module,
    rows: Callable[[nn.Module], Sequence[Any]],
    parent: type[nn.Module],
    kind: twins.Kind,
) -> Found:
    """Registers the class of a module with the first row that computes the same, or the last."""
    stock = stock_class(module)
    if register(stock) is None:
        for row in rows(module):
            register(stock, (parent, row))
            if twins.strict_difference(module, kind, row) is None:
                break
    return register(stock)


def is_mlp(module: nn.Module, row: MLP) -> bool:
    """Whether a candidate computes what the fused MLP of its row does."""
    # Without a gate the fused part runs the stock forward, and nothing is compared.
    gate = gate_of(module, row)
    return gate is not None and twins.strict_difference(module, MLPS, row) is None


def _norm_rows(module: nn.Module) -> list[Norm]:
    """The rows that a module may have if it is an RMSNorm."""
    weight = module._parameters.get("weight")
    names = [name for name in _EPS if isinstance(getattr(module, name, None), float)]
    alone = set(module._parameters) == {"weight"} and not module._modules and not module._buffers
    if not alone or weight is None or weight.dim() != 1 or len(names) != 1:
        return []
    return [Norm(names[0], offset) for offset in (0.0, 1.0)]


def _mlp_rows(module: nn.Module) -> list[MLP]:
    """The row that a module may have if it is a gated MLP."""
    names = [name for name in _ACTIVATIONS if name in module._modules]
    if len(names) != 1 or module._parameters or module._buffers:
        return []
    if activation_name(module._modules[names[0]]) is None:
        return []
    children = set(module._modules)
    return [
        MLP(packed=len(layers) == 1, activation=names[0])
        for layers in _LAYERS
        if children == {*layers, "down_proj", names[0]}
    ]
