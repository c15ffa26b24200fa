"""Changes a model, runs the sample batch, and lists in the report the ops that its layers run."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from torchweld.integrations.attention.fallback import Unserved

from . import attention_switch, gpt2, plan
from .attention_switch import Switch
from .layers.fused_module import Replacement
from .layers.sdpa_layer import FusedSdpaLayer
from .probes import Probes
from .recognise import sdpa_layers
from .report import UNCHECKED, WAS_EAGER, FuseReport, list_places
from .sample import Sample


def fuse(
    model: nn.Module, sample: Any, check: bool, kinds: Collection[str], report: FuseReport
) -> None:
    """Fuses the attention and the layers of a model.

    Raises:
        TypeError: model contains no model of transformers, timm or diffusers.
    """
    targets, batch_of = [base for _, base in gpt2.bases(model)], gpt2.sample_of
    is_gpt2 = bool(targets)
    if is_gpt2:  # nothing else in such a model is fused
        replacements, switches = gpt2.plan(model, kinds, report)
    else:
        replacements, switches, targets = _plan(model, kinds, report)
        batch_of = _sample_of
    stock = calls = None
    if check and (replacements or switches):
        runner = Sample(model, targets, sample, batch_of)
        stock = runner.try_run(report)
    elif replacements or switches:
        report.notes.append(UNCHECKED)
    try:
        for replacement in replacements:
            plan.apply(replacement)
        for switch in switches:
            switch.apply(report)
        if stock:
            try:
                calls = runner.compare(stock, report)
            except Unserved as error:
                _restore_attention(switches, str(error).partition(";")[0], report)
                switches = []
                calls = runner.compare(stock, report) if replacements else None
    except BaseException:
        gpt2.unfuse(model)  # also undoes the replacements of an earlier call
        for switch in switches:
            switch.restore()
        for replacement in replacements:
            plan.undo(replacement)
        raise
    if not is_gpt2:
        _list_attention(switches, calls, report)
    list_places([(each.where, each.key) for each in replacements], calls, report)
    if is_gpt2:
        _list_attention(switches, calls, report)
    for each in replacements:
        # A layer that never ran the op only loses: its _Calls mode slows torch's functions.
        if isinstance(each.key, FusedSdpaLayer) and each.where not in report.replaced:
            plan.undo(each)
    if not report.replaced:
        report.max_abs_diff = report.compared = None


def _plan(
    model: nn.Module, kinds: Collection[str], report: FuseReport
) -> tuple[list[Replacement], list[Switch], list[nn.Module]]:
    """Returns the replacements, the attention switches, and the models to run the batch on."""
    roots = attention_switch.roots(model, _is_root)
    if not roots:
        raise TypeError(
            "torchweld.fuse: model must be or contain a model of transformers, timm or diffusers, "
            f"but got {type(model).__name__}; torchweld.integrations.use_in_sdpa() runs the "
            'attention of other models (on the CPU: use_in_sdpa("cpu")), torchweld.nn replaces '
            "their layers"
        )
    switches = attention_switch.plan(model, report) if "attention" in kinds else []
    replacements = plan.plan(model, kinds, Probes(), report)
    targets = [root for _, root in roots] if replacements else [switch.root for switch in switches]
    return replacements, switches, targets


def _is_root(module: nn.Module) -> bool:
    return attention_switch.of_transformers(module) or sdpa_layers.of_library(module)


def _sample_of(root: nn.Module) -> dict[str, Any] | None:
    known = attention_switch if attention_switch.of_transformers(root) else sdpa_layers
    return known.sample_of(root)


def _restore_attention(switches: list[Switch], reason: str, report: FuseReport) -> None:
    for switch in switches:
        switch.restore()
        for where, _ in switch.layers:
            del report.ops[where]
            report.skipped.append((where, reason))


def _list_attention(switches: list[Switch], calls: Any, report: FuseReport) -> None:
    """Lists attention layers in the report; undoes a switch if none of its layers runs the op."""
    for switch in switches:
        if not list_places(switch.known_to_run(calls, report), calls, report):
            switch.restore()
        elif switch.was_eager():
            report.notes.append(WAS_EAGER)
