"""Finds the modules of a model to fuse, and swaps their classes for fused ones and back."""

from __future__ import annotations

import re
from collections.abc import Collection, Container
from typing import Any

from torch import Tensor, nn

from torchweld.integrations.fusion.layers import arguments, fsdp
from torchweld.integrations.fusion.layers.decoder import (
    FusedLayer,
    attention_of,
    projection_layers,
)
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
from torchweld.integrations.fusion.layers.linears import why_called
from torchweld.integrations.fusion.layers.norm import FusedNorm
from torchweld.integrations.fusion.layers.stock_modules import hooked
from torchweld.integrations.fusion.recognise import decoder_layers, heads
from torchweld.integrations.fusion.recognise.find import find_fusion
from torchweld.integrations.fusion.recognise.norms import Recognised
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
    projecting: dict[Any, str] = {}
    for path, module in model.named_modules():
        parent, row = find_fusion(module) or (None, None)
        if parent is None:
            _list_unknown(path, module, kinds, report)
            continue
        if parent.kind not in kinds or module in replacements:
            continue
        replacement = parent.replacement(path, module, row)
        reason = "fused already" if is_fused(module) else _unknown(replacement)
        reason = reason or arguments.difference(stock_class(module), parent.needs)
        for each in (module, *replacement.modules[1:]):
            reason = reason or _refusal(each, gathered)
        if reason is None:
            bare = not module._modules and getattr(module, "weight", None) is None  # a norm
            weight = _weight(model if bare else module)
            reason = "it has no floating-point parameters"
            if weight is not None:
                reason = _probe_of(replacement, weight, probes)
        if reason is not None:
            report.skipped.append((replacement.where, reason))
            continue
        if issubclass(parent, FusedLayer):
            projecting |= _projecting_norm(module, row, probes)
        label = projecting.get(replacement.key) or parent.label(module, row)
        report.ops[replacement.where] = label
        # named_modules lists a layer before its norm, which is then not replaced once more.
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
    """Lists a module as skipped if only its name or a part of its structure is of a known kind."""
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
        ("loss", heads.path_of(module), heads.difference),
    ):
        reason = find(module) if kind in kinds else None
        if reason is not None:
            report.skipped.append((below(path, name), reason))


def _is_mlp(module: nn.Module) -> bool:
    parent, _ = find_fusion(module) or (FusedLayer, None)
    return parent.kind == "mlp"


def _refusal(module: nn.Module, gathered: Container[int]) -> str | None:
    """Returns why a module must stay stock, or None."""
    parent, row = find_fusion(module)
    reason = parent.refusal(module, row)
    return reason or parameter_refusal(parent.op_parameters(module, row), gathered)


def _projecting_norm(layer: nn.Module, row: Any, probes: Probes) -> dict[nn.Module, str]:
    """Returns {norm: the report's text} for the norm in front of a layer's projections, else {}."""
    norm, attn = layer._modules.get(row.before_attention), attention_of(layer)
    if norm is None or attn is None or hooked(norm) or hooked(attn, calls_recorders=True):
        return {}
    layers = projection_layers(attn, (find_fusion(attn) or (None, None))[1])
    weight, found = _weight(attn), find_fusion(norm)
    if not layers or weight is None or found is None:
        return {}
    parent, norm_row = found
    called = why_called(layers)
    if called:
        return {norm: f"{parent.op} ({row.before_attention}; {called})"}
    if parent.probe(norm, norm_row, weight, probes) is not None:
        return {}
    return {norm: f"{parent.op}_linears ({row.before_attention} -> {', '.join(layers)})"}


def _probe_of(replacement: Replacement, weight: Tensor, probes: Probes) -> str | None:
    """Returns why the op of one of the modules fails or computes something else, or None."""
    for module in replacement.modules:
        parent, row = find_fusion(module)
        reason = parent.probe(module, row, weight, probes)
        if reason is not None:
            return reason
    return None


def _unknown(replacement: Replacement) -> str | None:
    """Returns why a replacement can't be made if its norm is of an unknown class, else None."""
    for module in replacement.modules[1:]:
        parent, _ = find_fusion(module) or (nn.Module, None)
        if not issubclass(parent, FusedNorm):
            kind = f"{type(module).__module__}.{type(module).__qualname__}"
            return f"it is {kind}, not transformers' norm"
    return None


def plan_losses(model: nn.Module, probes: Probes, report: FuseReport) -> list[Replacement]:
    """Returns the replacements of heads whose loss is to be fused; adds a note to the report."""
    replacements = plan(model, ("loss",), probes, report)
    found = ((module, fusion_of(module)) for module in model.modules())
    known = [module for module, fusion in found if fusion and fusion[0].kind == "loss"]
    if not known:
        text = "loss=True: the model contains no language model whose head and loss are known"
        report.notes.append(text)
    elif replacements or any(map(is_fused, known)):
        report.notes.append(
            "in training mode with labels the model returns a loss and no logits; trainers that "
            "compute the loss themselves, as those of TRL, do not run it"
        )
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
        for name in (KEEP, heads.HEAD):
            vars(module).pop(name, None)
    return list(restored)
