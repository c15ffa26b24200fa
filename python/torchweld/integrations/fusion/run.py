"""Changes a model, runs the sample batch, and lists in the report the ops that its layers run."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

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


class Changes(NamedTuple):
    """The changes to a model, and the batch that measures them.

    Attributes:
        replacements: The modules to fuse.
        switches: The models whose attention to switch.
        targets: The models that the default sample batch runs.
        batch_of: Makes that batch for one of them.
        attention_first: Whether the report lists attention first.
    """

    replacements: list[Replacement]
    switches: list[Switch]
    targets: list[nn.Module]
    batch_of: Callable[[Any], dict[str, Any] | None]
    attention_first: bool


def fuse(
    model: nn.Module, sample: Any, check: bool, kinds: Collection[str], report: FuseReport
) -> None:
    """Fuses the attention and the layers of a model.

    Raises:
        TypeError: it contains no model of transformers, timm or diffusers.
    """
    changes = _changes_of_gpt2 if gpt2.bases(model) else _changes
    replacements, switches, targets, batch_of, attention_first = changes(model, kinds, report)
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
        gpt2.unfuse(model)  # the replacements of an earlier call too
        for switch in switches:
            switch.restore()
        for replacement in replacements:
            plan.undo(replacement)
        raise
    if attention_first:
        _list_attention(switches, calls, report)
    list_places([(each.where, each.key) for each in replacements], calls, report)
    if not attention_first:
        _list_attention(switches, calls, report)
    for each in replacements:
        # Inside of such a layer torch's functions take longer.
        if isinstance(each.key, FusedSdpaLayer) and each.where not in report.replaced:
            plan.undo(each)
    if not report.replaced:
        report.max_abs_diff = report.compared = None


def _changes(model: nn.Module, kinds: Collection[str], report: FuseReport) -> Changes:
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
    return Changes(replacements, switches, targets, _sample_of, True)


def _is_root(module: nn.Module) -> bool:
    return attention_switch.of_transformers(module) or sdpa_layers.of_library(module)


def _sample_of(root: nn.Module) -> dict[str, Any] | None:
    known = attention_switch if attention_switch.of_transformers(root) else sdpa_layers
    return known.sample_of(root)


def _changes_of_gpt2(model: nn.Module, kinds: Collection[str], report: FuseReport) -> Changes:
    """The changes of a model that contains a GPT-2. Nothing else in such a model is fused."""
    replacements, switches = gpt2.plan(model, kinds, report)
    targets = [base for _, base in gpt2.bases(model)]
    return Changes(replacements, switches, targets, gpt2.sample_of, False)


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
