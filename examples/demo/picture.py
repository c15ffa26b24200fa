"""demo.png: loss curves, speed and memory bars, the op table as bars."""

from __future__ import annotations

import io
from typing import Any

from demo.report import Results, device_name
from demo.train import Training

_STOCK, _FUSED, _COMPILE = "#8a8f98", "#e4572e", "#2e86ab"
# The longest op bar, as a multiple of eager time; a longer one is cut and labelled at its side.
_HIGHEST = 2.5
_TEXT, _GRID = "#2b2d33", "#e4e6ea"


def draw(results: Results) -> bytes:
    """The picture as PNG bytes, with the results so far."""
    import matplotlib
    from matplotlib.figure import Figure

    style = {
        "font.size": 10,
        "axes.edgecolor": _TEXT,
        "axes.labelcolor": _TEXT,
        "axes.titlecolor": _TEXT,
        "text.color": _TEXT,
        "xtick.color": _TEXT,
        "ytick.color": _TEXT,
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "grid.color": _GRID,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(12, 9.2), dpi=120, facecolor="white")
        grid = figure.add_gridspec(
            3,
            3,
            height_ratios=(2.2, 1.1, 2.6),
            left=0.075,
            right=0.975,
            top=0.885,
            bottom=0.085,
            hspace=0.42,
            wspace=0.28,
        )
        _title(figure, results)
        losses = figure.add_subplot(grid[0, :2])
        apart = figure.add_subplot(grid[1, :2], sharex=losses)
        speed = figure.add_subplot(grid[0, 2])
        memory = figure.add_subplot(grid[1, 2])
        ops = figure.add_subplot(grid[2, :])
        training = results.training
        if training is not None and training.steps:
            _losses(losses, training)
            _differences(apart, training)
            _speed(speed, training)
            _memory(memory, training)
        else:
            for axes in (losses, apart, speed, memory):
                _empty(axes, "no training step was done")
        _ops(ops, results)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _title(figure: Any, results: Results) -> None:
    model, options = results.model, results.options
    title = f"torchweld demo: {model.get('title', options.model)}, fused against stock"
    figure.text(0.075, 0.958, title, fontsize=15, weight="bold")
    facts = [
        device_name(options.device),
        f"{model.get('parameters', 0) / 1e6:.1f} M parameters",
        f"batch {options.batch} x {options.context} tokens",
        options.dtype,
    ]
    if results.interrupted:
        facts.append("interrupted")
    figure.text(0.075, 0.93, "   |   ".join(facts), fontsize=9.5, alpha=0.8)


def _losses(axes: Any, training: Training) -> None:
    steps = range(1, training.steps + 1)
    stock, fused = (training.variants[name].losses[: training.steps] for name in ("stock", "fused"))
    marker = "o" if training.steps < 3 else None
    axes.plot(steps, stock, color=_STOCK, linewidth=5, alpha=0.55, label="stock", marker=marker)
    axes.plot(steps, fused, color=_FUSED, linewidth=1.6, label="fused", marker=marker)
    axes.set_title("Training loss")
    axes.set_ylabel("cross entropy")
    axes.grid(True)
    axes.legend(frameon=False)
    axes.tick_params(labelbottom=False)


def _differences(axes: Any, training: Training) -> None:
    differences = training.differences()
    floor = 1e-9
    values = [max(value, floor) for value in differences]
    axes.semilogy(range(1, len(values) + 1), values, color=_FUSED, linewidth=1.2)
    checked = training.checked()
    axes.hlines(training.loss_rtol, 1, checked, color=_TEXT, linewidth=1.4, linestyle="--")
    axes.annotate(
        f"allowed in the first {checked} steps",
        (1, training.loss_rtol),
        xytext=(3, -3),
        textcoords="offset points",
        va="top",
        fontsize=8.5,
    )
    axes.set_ylim(floor / 2, max(*values, training.loss_rtol) * 8)
    axes.set_title("Relative difference of the losses (equal ones at the bottom)")
    axes.set_xlabel("step")
    axes.grid(True)


def _pair(axes: Any, values: list[float | None], title: str, form: str) -> None:
    shown = [value or 0.0 for value in values]
    bars = axes.barh(["stock", "fused"], shown, color=[_STOCK, _FUSED], height=0.62)
    labels = [format(value, form) if value else "not measured" for value in values]
    axes.bar_label(bars, labels=labels, padding=4)
    axes.set_xlim(0, (max(shown) or 1.0) * 1.32)
    axes.invert_yaxis()
    axes.set_title(title)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(length=0)


def _speed(axes: Any, training: Training) -> None:
    values = [training.tokens_per_second(name) for name in ("stock", "fused")]
    title = "Tokens per second (more is better)"
    _pair(axes, values, title, ",.0f")


def _memory(axes: Any, training: Training) -> None:
    peaks = [training.variants[name].peak_bytes for name in ("stock", "fused")]
    values = [None if peak is None else peak / 2**20 for peak in peaks]
    _pair(axes, values, "Peak memory, MiB (less is better)", ",.0f")


def _ops(axes: Any, results: Results) -> None:
    rows = [row for row in (results.ops.rows if results.ops else []) if row.eager_us]
    if not rows:
        _empty(axes, "the ops were not measured")
        return
    kinds = (
        ("eager torch", _STOCK, "eager_us"),
        ("torch.compile", _COMPILE, "compile_us"),
        ("torchweld", _FUSED, "ours_us"),
    )
    width = 0.27
    top = 1.0
    for offset, (label, color, name) in enumerate(kinds):
        places, heights = [], []
        for index, row in enumerate(rows):
            value = getattr(row, name)
            if value is not None:
                places.append(index + (offset - 1) * width)
                heights.append(value / row.eager_us)
        if not places:
            continue
        top = max(top, *heights)
        bars = axes.bar(places, heights, width * 0.92, color=color, label=label)
        if name == "ours_us":
            labels = [f"{height:.2f}" if height <= _HIGHEST else "" for height in heights]
            axes.bar_label(bars, labels=labels, padding=2, fontsize=8.5)
            for place, height in zip(places, heights, strict=True):
                if height > _HIGHEST:
                    axes.text(
                        place - width * 0.6, _HIGHEST * 0.98, f"{height:.1f}", ha="right", va="top"
                    )
    axes.axhline(1.0, color=_TEXT, linewidth=0.8)
    axes.set_xticks(range(len(rows)), [row.op.replace("_", "\n", 2) for row in rows], fontsize=9)
    axes.set_xlim(-0.6, len(rows) - 0.4)
    # One slow outlier must not flatten the rest.
    axes.set_ylim(0, min(top * 1.15, _HIGHEST))
    axes.set_ylabel("time / eager time")
    axes.set_title("Ops, forward pass (less is better)")
    axes.grid(True, axis="y")
    axes.tick_params(axis="x", length=0)
    axes.legend(frameon=False, ncols=3, loc="upper right", bbox_to_anchor=(1.0, 1.16))


def _empty(axes: Any, text: str) -> None:
    axes.axis("off")
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, alpha=0.7)
