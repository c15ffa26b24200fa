"""Which parts of a model ``fuse`` gives a fused class, and how it takes them back."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Any, NamedTuple

from torch import nn

from . import decoder
from .causal_lm import OP, FusedHead
from .decoder import FusedAttention, FusedLayer, FusedMLP, FusedNorm
from .families import fused_class, part_of, stock_class
from .probes import Probes
from .report import FuseReport

KINDS = {FusedNorm: "norm", FusedLayer: "norm", FusedMLP: "mlp", FusedAttention: "rotary"}


class Place(NamedTuple):
    """One place of a model that will run an op.

    Attributes:
        where: Its path in the report.
        key: What :func:`.measure.note` is given there.
        modules: The modules that get a fused class.
    """

    where: str
    key: Hashable
    modules: tuple[nn.Module, ...]


def plan(
    model: nn.Module, kinds: Collection[str], probes: Probes, report: FuseReport
) -> list[Place]:
    """What to fuse; what must stay stock goes to the report with the reason."""
    places: dict[nn.Module, Place] = {}
    for path, module in model.named_modules():
        part = part_of(module)
        if part is None or KINDS.get(part[0]) not in kinds or module in places:
            continue
        parent, row = part
        place = _place(path, module, parent, row)
        reason = "fused already" if decoder.is_fused(module) else None
        reason = reason or _other_norm(module, parent, row) or parent.refusal(module, row)
        reason = reason or _probe(module, parent, row, probes)
        if reason is not None:
            report.skipped.append((place.where, reason))
            continue
        report.ops[place.where] = _label(parent, row)
        # A layer comes before the norm that it adds to.
        places |= dict.fromkeys(place.modules, place)
    return list(dict.fromkeys(places.values()))


def _place(path: str, module: nn.Module, parent: Any, row: Any) -> Place:
    prefix = f"{path}." if path else ""
    if parent is FusedLayer:
        norm = getattr(module, row.before_mlp)
        return Place(prefix + row.before_mlp, (norm, "add"), (module, norm))
    if parent is FusedAttention:
        return Place(f"{prefix}rotary", (module, "rotary"), (module,))
    return Place(path, module, (module,))


def _other_norm(module: nn.Module, parent: Any, row: Any) -> str | None:
    """Why a layer can't add and normalise at once: its norm is of a class that is not known."""
    norm = getattr(module, row.before_mlp) if parent is FusedLayer else None
    if norm is None or (part_of(norm) or (None,))[0] is FusedNorm:
        return None
    return f"it is {type(norm).__module__}.{type(norm).__qualname__}, not transformers' norm"


def _label(parent: Any, row: Any) -> str:
    if parent is FusedLayer:
        return f"add_rms_norm (residual + self_attn -> {row.before_mlp})"
    if parent is FusedNorm:
        return "rms_norm"
    if parent is FusedAttention:
        return "rotary"
    if row.packed:
        return f"gated_linear (gate_up_proj -> {row.activation})"
    return f"gated_linear_pair (gate_proj, up_proj -> {row.activation})"


def _probe(module: nn.Module, parent: Any, row: Any, probes: Probes) -> str | None:
    weight = next((p for p in module.parameters() if p.is_floating_point()), None)
    if weight is None:
        return "it has no floating-point parameters"
    if parent is FusedNorm:
        return probes.rms_norm(weight)
    if parent is FusedLayer:
        return probes.add_rms_norm(weight)
    if parent is FusedAttention:
        return probes.rotary(weight)
    gate, _ = decoder.gate_of(module, row)
    return probes.gated_linear(weight, gate, row.packed)


def plan_losses(model: nn.Module, probes: Probes, report: FuseReport) -> list[Place]:
    """The heads whose loss is to be fused. The sample batch has no labels to run them with."""
    places, found = [], False
    for path, module in model.named_modules():
        part = part_of(module)
        if part is None or not issubclass(part[0], FusedHead):
            continue
        found, where = True, f"{path}.lm_head" if path else "lm_head"
        reason = "fused already" if decoder.is_fused(module) else part[0].refusal(module, part[1])
        reason = reason or probes.loss(module.lm_head.weight)
        if reason is not None:
            report.skipped.append((where, reason))
            continue
        places.append(Place(where, module.lm_head, (module,)))
        report.ops[where] = f"{OP} (lm_head -> loss)"
    text = "in training mode with labels the model returns a loss and no logits"
    known = "loss=True: the model contains no language model whose head and loss are known"
    report.notes.append(text if found else known)
    return places


def fuse(place: Place) -> None:
    """Gives the modules of a place their fused classes, from their next calls on."""
    for module in place.modules:
        module.__class__ = fused_class(stock_class(module))


def unfuse_place(place: Place) -> None:
    """Undoes :func:`fuse`."""
    for module in place.modules:
        module.__class__ = stock_class(module)


def unfuse(model: nn.Module) -> list[str]:
    """Gives the parts of a model their stock classes back; returns their paths in the report.

    NOTE: fully_shard makes a class of its own from the fused one. It stays, and so does the fusion.
    """
    restored = {}
    for path, module in list(model.named_modules()):
        if decoder.STOCK not in vars(type(module)):
            continue
        parent, row = part_of(module)
        head = issubclass(parent, FusedHead)
        where = f"{path}.lm_head".lstrip(".") if head else _place(path, module, parent, row).where
        restored[where] = None
        module.__class__ = stock_class(module)
    return list(restored)
