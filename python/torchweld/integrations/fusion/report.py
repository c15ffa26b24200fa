"""Defines the report of :func:`torchweld.fuse`, as an object and as text."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class FuseReport:
    """Reports what one :func:`torchweld.fuse` call replaced, left stock and measured.

    Attributes:
        model: Class name of the model.
        replaced: Paths of the modules that now run torchweld ops. Each module ran one on the
            sample batch, unless its text in ``ops`` says that the batch did not run it, or names
            the calls that run it, or a note says that nothing was measured.
        skipped: ``(path, reason)`` of every module that was left stock or runs no op.
        max_abs_diff: Largest absolute difference of the outputs, fused against stock, on a sample
            batch; None when it was not measured.
        compared: The compared outputs, for example
            ``"logits (2, 16, 50257) float32, whole and over a cache"``.
        ops: Maps every replaced path to the fusion that runs there.
        calls: Maps each op, and each text on code that ran instead of an op, to the number of times
            that the whole sample batch ran it.
        notes: Sentences on things that a user should know, such as dropout.

    Example::

        report = torchweld.fuse(model)
        assert report.max_abs_diff < 1e-4 and not report.skipped
        assert report.ops["model.norm"] == "rms_norm"
    """

    model: str = ""
    replaced: list[str] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    max_abs_diff: float | None = None
    compared: str | None = None
    ops: dict[str, str] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether anything was replaced."""
        return bool(self.replaced)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as data that JSON can hold."""
        return {**asdict(self), "skipped": [list(entry) for entry in self.skipped]}

    def _summary(self) -> list[tuple[str, str, str]]:
        """Returns rows ``(what, where, outcome)``; modules of equal outcome share one row."""
        rows: dict[tuple[str, str], list[str]] = {}
        for path in self.replaced:
            rows.setdefault((self.ops.get(path, "torchweld"), "replaced"), []).append(path)
        for path, reason in self.skipped:
            rows.setdefault(("stock", reason), []).append(path)
        return [(what, fold_paths(paths), outcome) for (what, outcome), paths in rows.items()]

    def _measured(self) -> list[str]:
        measured = "not measured"
        if self.max_abs_diff is not None:
            measured = f"{self.max_abs_diff:.3g} over {self.compared}"
        lines = [f"max |fused - stock|: {measured}"] if self.replaced else []
        if self.calls:
            counts = ", ".join(f"{count} x {what}" for what, count in self.calls.items())
            lines.append(f"calls on the sample batch: {counts}")
        return lines

    def __str__(self) -> str:
        if self.replaced:
            places = f"{len(self.replaced)} places replaced, {len(self.skipped)} left stock"
        else:
            places = f"nothing replaced, {len(self.skipped)} places left stock"
        lines = [f"torchweld.fuse({self.model}): {places}"]
        rows = self._summary()
        width = max((len(what) for what, _, outcome in rows if outcome == "replaced"), default=0)
        for what, where, outcome in rows:
            if outcome == "replaced":
                lines.append(f"  {what:<{width}}  {where}")
            else:
                lines.append(f"  left stock: {where}: {outcome}")
        lines.extend(f"  {line}" for line in self._measured())
        lines.extend(f"  note: {note}" for note in self.notes)
        return "\n".join(lines)

    def __rich__(self) -> Any:
        """Returns the table that ``rich.print(report)`` shows."""
        from rich.table import Table

        caption = "\n".join(self._measured() + self.notes)
        table = Table(title=f"torchweld.fuse({self.model})", caption=caption)
        table.add_column("runs")
        table.add_column("where", overflow="fold")
        table.add_column("outcome", overflow="fold")
        for what, where, outcome in self._summary():
            style = "green" if outcome == "replaced" else "yellow"
            table.add_row(what, where, outcome, style=style)
        return table


def summary(error: Exception) -> str:
    """Returns the class name of an exception and the first line of its text."""
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"


NOT_RUN = ", not run by the sample batch"
WITH_LABELS = ", run by training steps that give the model labels"
WAS_EAGER = "the attention was eager; calls that ask for attention weights still run it"
UNCHECKED = "check=False: no sample batch ran, so what the layers run was not measured"


def list_places(places: list[tuple[str, Any]], calls: Any, report: FuseReport) -> bool:
    """Lists modules in the report as replaced, or as skipped if they ran no op.

    Returns whether any is replaced. A module that the batch did not run counts as replaced.

    Args:
        places: ``(path, key of recorder.record)``.
        calls: The recorded calls, or None if no batch ran.
        report: Its ``ops`` have the paths already.
    """
    found, counted = False, set()
    for where, key in places:
        ran = (calls or {}).get(key)
        if ran is None and calls is not None:
            report.ops[where] += NOT_RUN
        elif ran and (key, "projections") not in calls:
            report.ops[where] = re.sub("_linears.*", "", report.ops[where])
        if ran and (key, "add") in calls and (key, "projections") not in calls:
            name = where.rpartition(".")[2]
            report.ops[where] = f"add_{report.ops[where]} (residual -> {name})"
        for instead in ran or () if key not in counted else ():
            op = report.ops[where].split(" ")[0]
            name = instead or (op if "::" in op else f"torchweld::{op}")
            report.calls[name] = report.calls.get(name, 0) + 1
        counted.add(key)
        if ran is None or None in ran:
            report.replaced.append(where)
            found = True
        else:
            del report.ops[where]
            report.skipped.append((where, ran[0]))
    return found


def fold_paths(paths: list[str]) -> str:
    """Folds ``h.0.mlp, h.1.mlp, h.2.mlp`` into ``h.{0-2}.mlp``, and lists other paths."""
    groups: dict[tuple[str, str], list[int]] = {}
    plain: list[str] = []
    for path in paths:
        parts = path.split(".")
        numbers = [i for i, part in enumerate(parts) if part.isdigit()]
        if not numbers:
            plain.append(path)
            continue
        at = numbers[0]
        edges = (".".join([*parts[:at], ""]), ".".join(["", *parts[at + 1 :]]))
        groups.setdefault(edges, []).append(int(parts[at]))
    out = plain
    for (head, tail), indices in groups.items():
        text = _ranges(indices)
        out.append(head + (text if text.isdigit() else "{" + text + "}") + tail)
    return ", ".join(out)


def _ranges(indices: list[int]) -> str:
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
