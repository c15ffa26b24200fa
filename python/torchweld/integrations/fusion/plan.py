"""Finds the modules of a model to fuse, and swaps their classes for fused ones and back."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from torchweld.integrations.fusion.layers import arguments, fsdp
from torchweld.integrations.fusion.layers.decoder import FusedLayer, projection_layers
from torchweld.integrations.fusion.layers.families import fused_class, fusion_of
from torchweld.integrations.fusion.layers.fused_module import (
    FUSED_SITES,
    KEEP,
    Replacement,
    below,
    is_fused,
    parameter_refusal,
    set_class,
    stock_class,
)
from torchweld.integrations.fusion.layers.layer_norm import FusedLayerNorm
from torchweld.integrations.fusion.layers.linears import why_called
from torchweld.integrations.fusion.layers.rms_norm import FusedNorm
from torchweld.integrations.fusion.layers.stock_modules import hooked
from torchweld.integrations.fusion.recognise import decoder_layers, heads
from torchweld.integrations.fusion.recognise.find import find_fusion
from torchweld.integrations.fusion.recognise.norms_mlps import Recognised
from torchweld.integrations.fusion.recognise.sdpa_layers import of_library

from .probes import Probes
from .report import FuseReport

# The kinds of unknown modules, by their classes' names.
_NAMED = (
    ("norm", "norms", r"^[^_].*Norm$"),
    ("mlp", "MLPs", r"(MLP|Mlp|FFN|GLU|FeedForward|Intermediate|Dense)$"),
    ("experts", "experts", r"Experts$"),
    ("norm", "decoder layers", r"DecoderLayer$"),
)


def plan(
    model: nn.Module, kinds: Collection[str], probes: Probes, report: FuseReport
) -> list[Replacement]:
    """Returns the replacements in a model; the report lists the modules that must stay stock."""
    replacements: dict[nn.Module, Replacement] = {}
    gathered = fsdp.gathered(model)
    projecting: dict[nn.Module, str] = {}
    for path, module in model.named_modules():
        parent, row = find_fusion(module) or (None, None)
        if parent is None:
            _list_unknown(path, module, kinds, report)
            continue
        if parent.kind not in kinds or module in replacements:
            continue
        replacement = parent.replacement(path, module, row)
        reason = "fused already" if is_fused(module) else _unknown(parent, replacement)
        reason = reason or arguments.difference(stock_class(module), parent.needs)
        reason = reason or parent.refusal(module, row)
        reason = reason or parameter_refusal(parent.op_parameters(module, row), gathered)
        if reason is None:
            bare = not module._modules and getattr(module, "weight", None) is None  # a norm
            weight = _weight(model if bare else module)
            reason = "it has no floating-point parameters"
            if weight is not None:
                reason = _probe_of(replacement, weight, probes)
        if reason is not None:
            report.skipped.append((replacement.where, reason))
            continue
        report.ops[replacement.where] = projecting.get(module) or parent.label(module, row)
        if issubclass(parent, FusedLayer) and "rotary" in kinds:
            projecting |= _projecting_norm(module, row, probes)
        # A layer comes before the norm that it adds to.
        replacements |= dict.fromkeys(replacement.modules, replacement)
    found = ((stock_class(module), find_fusion(module)[0]) for module in replacements)
    stock = {cls for cls, parent in found if issubclass(parent, Recognised)}
    if stock:
        names = ", ".join(sorted(f"{cls.__module__}.{cls.__qualname__}" for cls in stock))
        report.notes.append(f"recognised by their parts, and compared on random inputs: {names}")
    return list(dict.fromkeys(replacements.values()))


def _weight(module: nn.Module) -> Tensor | None:
    return next((p for p in module.parameters() if p.is_floating_point()), None)


def _list_unknown(path: str, module: nn.Module, kinds: Collection[str], report: FuseReport) -> None:
    """Lists a module that has the parts of a known one and other arguments, or only its name."""
    cls = type(module).__name__
    if "attention" in kinds and cls.endswith("Attention") and of_library(module):
        report.skipped.append((path, f"{cls} does not call scaled_dot_product_attention"))
    for kind, what, name in _NAMED:
        if kind in kinds and re.search(name, cls):
            # An activation has such a name too, and a part of an MLP is listed for itself.
            if kind == "mlp" and (_weight(module) is None or any(map(_is_mlp, module.modules()))):
                continue
            reason = f"{cls} is none of the {what} that fuse knows"
            report.skipped.append((path, reason))
    for kind, name, find in (
        ("rotary", "rotary", decoder_layers.difference),
        ("loss", "lm_head", heads.difference),
    ):
        reason = find(module) if kind in kinds else None
        if reason is not None:
            report.skipped.append((below(path, name), reason))


def _is_mlp(module: nn.Module) -> bool:
    parent, _ = find_fusion(module) or (FusedLayer, None)
    return parent.kind == "mlp"


def _projecting_norm(layer: nn.Module, row: Any, probes: Probes) -> dict[nn.Module, str]:
    """The norm in front of the projections, and the op in which it runs; {} if there is none."""
    attn, norm = layer._modules.get("self_attn"), getattr(layer, row.before_attention)
    parent, attn_row = attn is not None and find_fusion(attn) or (None, None)
    if parent is None or parent.kind != "rotary" or hooked(norm) or hooked(attn):
        return {}
    layers = projection_layers(attn, attn_row)
    if not layers or parent.refusal(attn, attn_row) is not None:
        return {}
    called = why_called(layers)
    if called:
        return {norm: f"rms_norm ({row.before_attention}; {called})"}
    weight = _weight(attn)
    if weight is None or parent.probe(attn, attn_row, weight, probes) is not None:
        return {}
    return {norm: f"rms_norm_linears ({row.before_attention} -> {', '.join(layers)})"}


def _probe_of(replacement: Replacement, weight: Tensor, probes: Probes) -> str | None:
    """Why the op of one of the modules does not run, or computes something else, or None."""
    for module in replacement.modules:
        parent, row = find_fusion(module)
        reason = parent.probe(module, row, weight, probes)
        if reason is not None:
            return reason
    return None


def _unknown(owner: type[nn.Module], replacement: Replacement) -> str | None:
    """Why a replacement can't be made if the norm of a layer is of a class that is not known."""
    norm = FusedNorm if issubclass(owner, FusedLayer) else FusedLayerNorm
    for module in replacement.modules[1:]:
        parent, _ = find_fusion(module) or (nn.Module, None)
        if not issubclass(parent, norm):
            kind = f"{type(module).__module__}.{type(module).__qualname__}"
            return f"it is {kind}, not transformers' norm"
    return None


def plan_losses(model: nn.Module, probes: Probes, report: FuseReport) -> list[Replacement]:
    """The heads whose loss is to be fused. The sample batch has no labels to run them with."""
    replacements = plan(model, ("loss",), probes, report)
    fusions = filter(None, map(fusion_of, model.modules()))
    text = (
        "in training mode with labels the model returns a loss and no logits; trainers that "
        "compute the loss themselves, as those of TRL, do not run it"
    )
    if not any(parent.kind == "loss" for parent, _ in fusions):
        text = "loss=True: the model contains no language model whose head and loss are known"
    report.notes.append(text)
    return replacements


def apply(replacement: Replacement) -> None:
    """Gives the modules of a replacement their fused classes, from their next calls on."""
    for module in replacement.modules:
        if replacement.site is not None:
            sites = vars(module).get(FUSED_SITES, ())
            vars(module)[FUSED_SITES] = tuple(dict.fromkeys((*sites, replacement.site)))
        set_class(module, fused_class(stock_class(module)))


def undo(replacement: Replacement) -> None:
    """Undoes :func:`apply`."""
    for module in replacement.modules:
        vars(module).pop(FUSED_SITES, None)
        set_class(module, stock_class(module))


def unfuse(model: nn.Module) -> list[str]:
    """Gives the modules of a model their stock classes back; returns their paths in the report."""
    restored = {}
    for path, module in list(model.named_modules()):
        if not is_fused(module):
            continue
        parent, row = fusion_of(module)
        restored[parent.replacement(path, module, row).where] = None
        set_class(module, stock_class(module))
        vars(module).pop(KEEP, None)
    return list(restored)
