"""Changes a model, measures on the sample batch what its layers run, and lists it in the report."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from torch import nn

from torchweld.integrations.attention.fallback import Unserved

from . import attention_switch, gpt2, plan
from .attention_switch import Switch
from .layers.part import Place
from .probes import Probes
from .report import UNCHECKED, WAS_EAGER, FuseReport, list_places
from .sample import Sample


class Changes(NamedTuple):
    """What to change in a model, and what measures it.

    Attributes:
        places: The layers to fuse.
        switches: The models whose attention to switch.
        targets: The models that the default sample batch runs.
        batch_of: Makes that batch for one of them.
        attention_first: Whether the report lists attention before the other places.
    """

    places: list[Place]
    switches: list[Switch]
    targets: list[nn.Module]
    batch_of: Callable[[Any], dict[str, Any] | None]
    attention_first: bool


def fuse(
    model: nn.Module, sample: Any, check: bool, kinds: Collection[str], report: FuseReport
) -> None:
    """Fuses the attention and the layers of a model.

    Raises:
        TypeError: it contains no model of transformers.
    """
    changes = _changes_of_gpt2 if gpt2.bases(model) else _changes
    places, switches, targets, batch_of, attention_first = changes(model, kinds, report)
    stock = seen = None
    if check and (places or switches):
        runner = Sample(model, targets, sample, batch_of)
        stock = runner.try_run(report)
    elif places or switches:
        report.notes.append(UNCHECKED)
    try:
        for place in places:
            plan.fuse(place)
        for switch in switches:
            switch.apply(report)
        if stock:
            try:
                seen = runner.compare(stock, report)
            except Unserved as error:
                _restore_attention(switches, str(error).partition(";")[0], report)
                switches = []
                seen = runner.compare(stock, report) if places else None
    except BaseException:
        for switch in switches:
            switch.restore()
        for place in places:
            plan.unfuse_place(place)
        raise
    if attention_first:
        _list_attention(switches, seen, report)
    list_places([(place.where, place.key) for place in places], seen, report)
    if not attention_first:
        _list_attention(switches, seen, report)
    if not report.replaced:
        report.max_abs_diff = report.compared = None


def _changes(model: nn.Module, kinds: Collection[str], report: FuseReport) -> Changes:
    roots = attention_switch.roots(model)
    if not roots:
        raise TypeError(
            "torchweld.fuse: model must be or contain a model of transformers, but got "
            f"{type(model).__name__}; torchweld.integrations.use_in_sdpa() runs the attention of "
            "other models, torchweld's ops and modules replace their layers"
        )
    switches = attention_switch.plan(model, report) if "attention" in kinds else []
    places = plan.plan(model, kinds, Probes(), report)
    targets = [root for _, root in roots] if places else [switch.root for switch in switches]
    return Changes(places, switches, targets, attention_switch.sample_of, True)


def _changes_of_gpt2(model: nn.Module, kinds: Collection[str], report: FuseReport) -> Changes:
    """Those of a model that contains a GPT-2, of which nothing else is fused."""
    places, switches = gpt2.plan(model, kinds, report)
    targets = [base for _, base in gpt2.bases(model)]
    return Changes(places, switches, targets, gpt2.sample_of, False)


def _restore_attention(switches: list[Switch], reason: str, report: FuseReport) -> None:
    for switch in switches:
        switch.restore()
        for where, _ in switch.layers:
            del report.ops[where]
            report.skipped.append((where, reason))


def _list_attention(switches: list[Switch], seen: Any, report: FuseReport) -> None:
    """:func:`.list_places` of attention layers; where none runs the op, the switch is undone."""
    for switch in switches:
        if not list_places(switch.known_to_run(seen, report), seen, report):
            switch.restore()
        elif switch.was_eager():
            report.notes.append(WAS_EAGER)
