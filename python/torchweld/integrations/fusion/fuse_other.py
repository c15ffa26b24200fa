"""``fuse`` of a model that is no GPT-2: its attention, and the parts of families that are known."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from torchweld.integrations.attention.fallback import Unserved

from . import attention_switch, plan
from .probes import Probes
from .report import UNCHECKED, WAS_EAGER, FuseReport, list_places
from .sample import Sample


def fuse(
    model: nn.Module, sample: Any, check: bool, kinds: Collection[str], report: FuseReport
) -> None:
    """Fuses the attention and the parts of a model.

    Raises:
        TypeError: it contains no model of transformers.
    """
    roots = attention_switch.roots(model)
    if not roots:
        raise TypeError(
            "torchweld.fuse: model must be or contain a model of transformers, but got "
            f"{type(model).__name__}; torchweld.integrations.use_in_sdpa() runs the attention of "
            "other models, torchweld's ops and modules replace their layers"
        )
    switches = attention_switch.plan(model, report) if "attention" in kinds else []
    layers = {path: attention_switch.layers(path, root) for path, root in switches}
    places = plan.plan(model, kinds, Probes(), report)
    runner = stock = seen = None
    if check and (switches or places):
        targets = roots if places else switches
        runner = Sample(model, [root for _, root in targets], sample, attention_switch.sample_of)
        stock = runner.try_run(report)
    elif switches or places:
        report.notes.append(UNCHECKED)
    try:
        for place in places:
            plan.fuse(place)
        for path, root in switches:
            report.ops.update((where, "attention") for where, _ in layers[path])
            attention_switch.switch(root)
        if stock:
            try:
                seen = runner.compare(stock, report)
            except Unserved as error:
                _restore_attention(switches, layers, str(error).partition(";")[0], report)
                switches = []
                seen = runner.compare(stock, report) if places else None
    except BaseException:
        for _, root in switches:
            attention_switch.restore(root)
        for place in places:
            plan.unfuse_place(place)
        raise
    for path, root in switches:
        if not _list_layers(layers[path], seen, report):
            attention_switch.restore(root)
        elif attention_switch.was_eager(root):
            report.notes.append(WAS_EAGER)
    list_places([(place.where, place.key) for place in places], seen, report)
    if not report.replaced:
        report.max_abs_diff = report.compared = None


def _restore_attention(
    switches: list, layers: dict[str, Any], reason: str, report: FuseReport
) -> None:
    for path, root in switches:
        attention_switch.restore(root)
        for where, _ in layers[path]:
            del report.ops[where]
            report.skipped.append((where, reason))


def _list_layers(layers: list[tuple[str, nn.Module]], seen: Any, report: FuseReport) -> bool:
    """:func:`.list_places` of attention layers: their sources tell of those that no sample ran."""
    unseen = [(where, layer) for where, layer in layers if layer not in (seen or {})]
    reasons = {where: attention_switch.unmeasured_refusal(layer) for where, layer in unseen}
    fatal = next((reason for reason, fails in filter(None, reasons.values()) if fails), None)
    listed = []
    for where, layer in layers:
        reason = fatal or (reasons.get(where) or (None, False))[0]
        if reason is None:
            listed.append((where, layer))
        else:
            del report.ops[where]
            report.skipped.append((where, reason))
    return list_places(listed, seen, report)
