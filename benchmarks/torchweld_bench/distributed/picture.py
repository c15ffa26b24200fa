"""Tokens per second over the number of GPUs: ours, stock and ideal."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

from torchweld_bench.results import Report

_COLOURS = {"ours": "#4c72b0", "stock": "#dd8452", "ideal": "grey"}


def speeds(reports: list[dict[str, Any]]) -> dict[str, dict[str, dict[int, float]]]:
    """Tokens per second: {training step: {"ours", "stock" or "ideal": {GPUs: speed}}}."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for report in sorted(reports, key=lambda each: each["gpus"]):
        gpus = report["gpus"]
        for row in report["rows"]:
            if row.get("tokens") is None or row["ratio"] is None:
                continue
            lines = found.setdefault(re.sub(r" on \d+ \w+$", "", row["case"]), {})
            times = {**row["peers_us"], "ours": row["ours_us"]}
            for name in ("ours", "stock", "ideal"):
                if name in times:
                    lines.setdefault(name, {})[gpus] = row["tokens"] / times[name] * 1e6
            one = lines["ideal"][gpus] / gpus
            lines["ideal"].setdefault(1, one)
            lines["ours"].setdefault(1, one)
    return found


def draw(report: Report, path: Path) -> None:
    """Draws each training step, with the other results of the same GPU next to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    one = re.sub(r"-x\d+$", "", path.parent.name)
    files = path.parent.parent.glob(f"{one}*/{report.family}.json")
    same = [f for f in files if re.fullmatch(rf"{re.escape(one)}(-x\d+)?", f.parent.name)]
    reports = [json.loads(f.read_text()) for f in same if f.parent != path.parent]
    steps = speeds([*reports, report.to_dict()])
    count = max(1, len(steps))
    figure, grid = plt.subplots(
        1, count, figsize=(4.6 * count, 4), layout="constrained", squeeze=False
    )
    for axes, (step, lines) in zip(grid[0], steps.items(), strict=False):
        for name, line in lines.items():
            points = sorted(line.items())
            style = {"ls": ":"} if name == "ideal" else {"marker": "o"}
            label = "torchweld" if name == "ours" else name
            axes.plot(*zip(*points, strict=True), label=label, color=_COLOURS[name], **style)
        axes.set_title(textwrap.fill(step, 48), fontsize=8)
        axes.set_xticks(sorted(lines["ideal"]))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("GPUs")
        axes.legend(fontsize=8)
    grid[0][0].set_ylabel("tokens a second")
    figure.suptitle(f"{report.family} on {report.device}", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)
