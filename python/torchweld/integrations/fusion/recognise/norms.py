"""Recognises norms that the table of families lacks by structure, and compares them.

A module with the parts of a norm is compared with the fused one (:mod:`.compare`). If the two
differ, the module stays stock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torchweld.integrations.fusion.layers import arguments
from torchweld.integrations.fusion.layers.families import fused_class, fusion_in_table, fusion_of
from torchweld.integrations.fusion.layers.fused_module import (
    ROW,
    STOCK,
    Fusion,
    is_fused,
    register,
    stock_class,
)
from torchweld.integrations.fusion.layers.layer_norm import (
    CentredNorm,
    FusedCentredNorm,
    FusedLayerNorm,
)
from torchweld.integrations.fusion.layers.rms_norm import (
    FusedGatedNorm,
    FusedRMSNorm,
    GatedNorm,
    Norm,
)
from torchweld.integrations.fusion.probes import Probes

from . import compare

_TIMM_LAYER_NORM = "timm.layers.norm.LayerNorm"
_EPS = ("variance_epsilon", "eps", "epsilon")


def new_fused(stock: type[nn.Module], parent: type[nn.Module], row: Any) -> nn.Module:
    """Makes a fused module without state, to copy or unpickle one whose class is in no table."""
    register(stock, (parent, row))  # unfuse asks for it
    cls = fused_class(stock, (parent, row))
    return cls.__new__(cls)


def norm_replica(
    module: nn.Module, random: compare.Random, cls: type[nn.Module] | None = None
) -> nn.Module:
    """Makes a replica of a norm, of its fused class or of ``cls``."""
    replica = fused_replica(module) if cls is None else compare.bare_replica(module, cls)
    for name, parameter in module._parameters.items():
        value = None if parameter is None else nn.Parameter(random(compare.WIDTH))
        replica.register_parameter(name, value)
    if hasattr(module, "normalized_shape"):
        replica.normalized_shape = (compare.WIDTH,)
    weight = module._parameters.get("weight")
    if weight is not None:  # attributes with the weight's size (hidden_size) get the replica's
        sizes = [name for name, value in vars(module).items() if value == weight.numel()]
        vars(replica).update(dict.fromkeys(sizes, compare.WIDTH))
    return replica


def _run_gated(
    module: nn.Module, forward: compare.Forward, random: compare.Random
) -> tuple[list[Tensor], None]:
    x, gate = random.inputs(), random(4, 3, compare.WIDTH).requires_grad_()
    y = forward(module, x, gate)
    grads = torch.autograd.grad(y, [gate], random(*y.shape).to(y.dtype), retain_graph=True)
    return [*grads, *compare.with_gradients(module, y, x, random)], None


def fused_replica(module: nn.Module) -> nn.Module:
    """Makes a replica of a module, of its fused class."""
    return compare.bare_replica(module, fused_class(stock_class(module)))


class PickledByRow:
    """Copies and pickles a fused module whose class is in no table."""

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        cls = next(cls for cls in type(self).__mro__ if STOCK in vars(cls))
        _, _, *state = super().__reduce_ex__(protocol)
        return new_fused, (getattr(cls, STOCK), cls.__bases__[0], getattr(cls, ROW)), *state


class Recognised(PickledByRow):
    """A fused module whose class is in no table, compared before it is used."""

    comparison: ClassVar[compare.Kind]

    @classmethod
    def probe(cls, module: nn.Module, row: Any, weight: Tensor, probes: Probes) -> str | None:
        reason = super().probe(module, row, weight, probes)
        if reason is not None:
            return reason
        # Modules of one class with equal attributes, device and dtype share one comparison.
        key = weight.device, weight.dtype, *compare.key_of(module)
        return probes.once(key, lambda: compare.difference(module, cls.comparison, row, weight))


def _fast_norm(norm: nn.Module) -> str | None:
    """Returns why a norm of timm that was made under ``set_fast_norm`` stays stock, or None."""
    on = getattr(norm, "_fast_norm", False)
    return "timm's fast norm is on, which computes in the dtype of autocast" if on else None


class RecognisedNorm(Recognised, FusedRMSNorm):
    """An RMSNorm of a class in no table, which multiplies by the weight or by 1 + the weight."""

    comparison = compare.Kind("an RMSNorm", norm_replica, compare.run_of_one_input)

    @staticmethod
    def refusal(module: nn.Module, row: Norm) -> str | None:
        return _fast_norm(module) or FusedRMSNorm.refusal(module, row)


class RecognisedLayerNorm(Recognised, FusedLayerNorm):
    """timm's LayerNorm."""

    comparison = compare.Kind("a LayerNorm", norm_replica, compare.run_of_one_input)

    @staticmethod
    def refusal(module: nn.Module, row: None) -> str | None:
        return _fast_norm(module) or FusedLayerNorm.refusal(module, row)


class RecognisedCentredNorm(Recognised, FusedCentredNorm):
    """A LayerNorm of a class in no table."""

    comparison = compare.Kind("a LayerNorm", norm_replica, compare.run_of_one_input)


class RecognisedGatedNorm(Recognised, FusedGatedNorm):
    """An RMSNorm with a gate, of a class in no table."""

    comparison = compare.Kind("an RMSNorm with a gate", norm_replica, _run_gated)


def known(module: nn.Module) -> Fusion | None:
    """Returns the FusedModule subclass and settings of a norm or a class in the table, or None."""
    if is_fused(module):
        return fusion_of(module)
    return fusion_in_table(stock_class(module)) or find(module)


def find(module: nn.Module) -> Fusion | None:
    """Guesses a norm's fused class and settings from its structure; None if it is no norm.

    ``probe`` then compares the module with its fused version.
    """
    stock = stock_class(module)
    if stock.__module__.partition(".")[0] in ("torch", "torchweld"):
        return None
    if f"{stock.__module__}.{stock.__qualname__}" == _TIMM_LAYER_NORM:
        return choose(module, lambda _: [None], RecognisedLayerNorm)
    rows = _norm_rows(module)
    return choose(module, lambda _: rows) if rows else None


def choose(
    module: nn.Module,
    rows: Callable[[nn.Module], Sequence[Any]],
    parent: type[Recognised] | None = None,
) -> Fusion:
    """Registers a module's class with the first settings that compute the same, or the last ones.

    ``rows`` returns the settings to try. The type of the settings decides ``parent``, the
    FusedModule subclass, if it is None.
    """
    stock = stock_class(module)
    if register(stock) is None:
        for row in rows(module):
            found = parent or _PARENTS[type(row)]
            register(stock, (found, row))
            if compare.strict_difference(module, found.comparison, row) is None:
                break
    return register(stock)


_PARENTS: dict[type, type[Recognised]] = {
    Norm: RecognisedNorm,
    CentredNorm: RecognisedCentredNorm,
    GatedNorm: RecognisedGatedNorm,
}


def _norm_rows(module: nn.Module) -> list[Any]:
    """Returns the settings that a module may have as a norm; [] if it is none."""
    given = {name: p for name, p in module._parameters.items() if p is not None}
    weight = given.get("weight")
    alone = set(given) <= {"weight", "bias"} and not module._modules and not module._buffers
    shaped = "Norm" in stock_class(module).__name__ if weight is None else weight.dim() == 1
    if not alone or not shaped:
        return []
    names = [name for name in _EPS if isinstance(getattr(module, name, None), float)]
    if not names and hasattr(module, "normalized_shape"):  # eps is in its forward, as in OLMo
        return [CentredNorm(1e-5, 0.0)]
    if len(names) != 1:
        return []
    if weight is not None and "gate" in arguments.of(stock_class(module)).names[1:]:
        return [GatedNorm(names[0], first) for first in (False, True)]
    offsets = (0.0,) if weight is None else (0.0, 1.0)
    centred = [CentredNorm(names[0], offset) for offset in offsets]
    if "bias" in given:
        return centred
    rms = [Norm(names[0], offset) for offset in offsets]
    return [*rms, *centred, rms[-1]]  # a refusal has the last one as its reason
