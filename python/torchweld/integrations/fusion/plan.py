"""Finds the parts of a model, and swaps their classes for fused ones and back."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from torchweld.integrations.fusion.layers import arguments, fsdp
from torchweld.integrations.fusion.layers.decoder import FusedLayer, projection_layers
from torchweld.integrations.fusion.layers.families import fused_class, part_of, register
from torchweld.integrations.fusion.layers.linears import why_called
from torchweld.integrations.fusion.layers.modules import hooked
from torchweld.integrations.fusion.layers.part import (
    FUSED_SITES,
    KEEP,
    Place,
    below,
    is_fused,
    parameter_refusal,
    set_class,
    stock_class,
)
from torchweld.integrations.fusion.recognise import decoder_layers, heads
from torchweld.integrations.fusion.recognise.find import find_part

from .probes import Probes
from .report import FuseReport

# What modules without a known part are, going by their classes' names.
_NAMED = (
    ("norm", "norms", r"^[^_].*Norm$"),
    ("mlp", "MLPs", r"(MLP|Mlp|FFN|FeedForward|Intermediate|Dense|Experts)$"),
)


def plan(
    model: nn.Module, kinds: Collection[str], probes: Probes, report: FuseReport
) -> list[Place]:
    """Returns the places to fuse. Lists the places that must stay stock in the report."""
    places: dict[nn.Module, Place] = {}
    gathered = fsdp.gathered(model)
    projecting: dict[nn.Module, str] = {}
    for path, module in model.named_modules():
        part = find_part(module)
        if part is None:
            _list_others(path, module, kinds, report)
            continue
        if part[0].kind not in kinds or module in places:
            continue
        parent, row = part
        place = parent.place(path, module, row)
        reason = "fused already" if is_fused(module) else _unknown(place)
        reason = reason or arguments.difference(stock_class(module), parent.needs)
        reason = reason or parent.refusal(module, row)
        reason = reason or parameter_refusal(parent.op_parameters(module, row), gathered)
        if reason is None:
            weight = _weight(module)
            reason = "it has no floating-point parameters"
            if weight is not None:
                reason = _probe_of(place, weight, probes)
        if reason is not None:
            report.skipped.append((place.where, reason))
            continue
        report.ops[place.where] = projecting.get(module) or parent.label(module, row)
        if issubclass(parent, FusedLayer) and "rotary" in kinds:
            projecting |= _projecting_norm(module, row, probes)
        # A layer comes before the norm that it adds to.
        places |= dict.fromkeys(place.modules, place)
    stock = {stock_class(module) for module in places if register(stock_class(module))}
    if stock:
        names = ", ".join(sorted(f"{cls.__module__}.{cls.__qualname__}" for cls in stock))
        report.notes.append(f"recognised by their parts, and compared on random inputs: {names}")
    return list(dict.fromkeys(places.values()))


def _weight(module: nn.Module) -> Tensor | None:
    return next((p for p in module.parameters() if p.is_floating_point()), None)


def _list_others(path: str, module: nn.Module, kinds: Collection[str], report: FuseReport) -> None:
    """Lists a module that has the parts of a known one and other arguments, or only its name."""
    for kind, what, name in _NAMED:
        if kind in kinds and re.search(name, type(module).__name__):
            reason = f"{type(module).__name__} is none of the {what} that fuse knows"
            report.skipped.append((path, reason))
    for kind, name, find in (
        ("rotary", "rotary", decoder_layers.difference),
        ("loss", "lm_head", heads.difference),
    ):
        reason = find(module) if kind in kinds else None
        if reason is not None:
            report.skipped.append((below(path, name), reason))


def _projecting_norm(layer: nn.Module, row: Any, probes: Probes) -> dict[nn.Module, str]:
    """The norm in front of the projections, and the op in which it runs; {} if there is none."""
    attn, norm = layer.self_attn, getattr(layer, row.before_attention)
    part = find_part(attn)
    if part is None or part[0].kind != "rotary" or hooked(norm) or hooked(attn):
        return {}
    layers = projection_layers(attn, part[1])
    if part[0].refusal(attn, part[1]) is not None:
        return {}
    called = why_called(layers)
    if called:
        return {norm: f"rms_norm ({row.before_attention}; {called})"}
    weight = _weight(attn)
    if weight is None or part[0].probe(attn, part[1], weight, probes) is not None:
        return {}
    return {norm: f"rms_norm_linears ({row.before_attention} -> {', '.join(layers)})"}


def _probe_of(place: Place, weight: Tensor, probes: Probes) -> str | None:
    """Why the op of one of a place's modules does not run, or computes something else, or None."""
    for module in place.modules:
        parent, row = find_part(module)
        reason = parent.probe(module, row, weight, probes)
        if reason is not None:
            return reason
    return None


def _unknown(place: Place) -> str | None:
    """Why a place can't be fused if one of its modules is of a class that is not known."""
    for module in place.modules:
        if find_part(module) is None:
            kind = f"{type(module).__module__}.{type(module).__qualname__}"
            return f"it is {kind}, not transformers' norm"
    return None


def plan_losses(model: nn.Module, probes: Probes, report: FuseReport) -> list[Place]:
    """The heads whose loss is to be fused. The sample batch has no labels to run them with."""
    places = plan(model, ("loss",), probes, report)
    parts = map(part_of, model.modules())
    text = (
        "in training mode with labels the model returns a loss and no logits; trainers that "
        "compute the loss themselves, as those of TRL, do not run it"
    )
    if not any(part is not None and part[0].kind == "loss" for part in parts):
        text = "loss=True: the model contains no language model whose head and loss are known"
    report.notes.append(text)
    return places


def fuse(place: Place) -> None:
    """Gives the modules of a place their fused classes, from their next calls on."""
    for module in place.modules:
        if place.site is not None:
            sites = vars(module).get(FUSED_SITES, ())
            vars(module)[FUSED_SITES] = tuple(dict.fromkeys((*sites, place.site)))
        set_class(module, fused_class(stock_class(module)))


def unfuse_place(place: Place) -> None:
    """Undoes :func:`fuse`."""
    for module in place.modules:
        vars(module).pop(FUSED_SITES, None)
        set_class(module, stock_class(module))


def unfuse(model: nn.Module) -> list[str]:
    """Gives the parts of a model their stock classes back; returns their paths in the report."""
    restored = {}
    for path, module in list(model.named_modules()):
        if not is_fused(module):
            continue
        parent, row = part_of(module)
        restored[parent.place(path, module, row).where] = None
        set_class(module, stock_class(module))
        vars(module).pop(KEEP, None)
    return list(restored)
