"""Draws ranges of relative times as SVG text: the same bytes every time."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from statistics import median
from typing import NamedTuple

_ROW, _TOP, _LEFT, _WIDTH, _RIGHT = 28, 62, 390, 380, 100
_MAX = 1.6  # the relative time at the end of the axis
_FASTER, _SLOWER, _TEXT, _GRID = "#2a9d63", "#c44e52", "#24292f", "#d0d7de"


class Bar(NamedTuple):
    """A range of relative times.

    Attributes:
        name: The timed call.
        peer: The compared call.
        ratios: The relative times of the cases, at least one.
    """

    name: str
    peer: str
    ratios: Sequence[float]


def _x(value: float) -> float:
    return round(_LEFT + _WIDTH * min(value, _MAX) / _MAX, 1)


def _text(x: float, y: float, text: str, extra: str = "") -> str:
    return f'<text x="{x}" y="{y}" {extra}>{escape(text)}</text>'


def _segment(low: float, high: float, y: float, colour: str) -> str:
    # A range that consists of one case still needs a visible width.
    width = max(round(_x(high) - _x(low), 1), 4)
    return f'<rect x="{_x(low)}" y="{y}" width="{width}" height="12" rx="2" fill="{colour}"/>'


def svg(title: str, bars: Sequence[Bar]) -> str:
    """The picture: a horizontal range a bar, green below a relative time of 1, red above."""
    height = _TOP + _ROW * len(bars) + 30
    width = _LEFT + _WIDTH + _RIGHT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12" fill="{_TEXT}">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(16, 24, title, 'font-size="15" font-weight="bold"'),
        _text(
            16,
            42,
            "A bar spans the best and the worst measured case, its line is the median. "
            "Green: torchweld takes less.",
            'fill="#57606a"',
        ),
    ]
    bottom = _TOP + _ROW * len(bars)
    for tick in (0.0, 0.5, 1.0, 1.5):
        x, colour = _x(tick), _TEXT if tick == 1 else _GRID
        lines.append(f'<path d="M{x} {_TOP - 6}V{bottom}" stroke="{colour}"/>')
        label = "1 = the same" if tick == 1 else f"{tick:g}"
        lines.append(_text(x, bottom + 18, label, 'text-anchor="middle"'))
    for i, bar in enumerate(bars):
        y = _TOP + _ROW * i
        lines.append(_text(16, y + 10, bar.name))
        lines.append(_text(16, y + 21, f"against {bar.peer}", 'font-size="9" fill="#57606a"'))
        low, high = min(bar.ratios), max(bar.ratios)
        if low <= 1:
            lines.append(_segment(low, min(high, 1.0), y + 3, _FASTER))
        if high > 1:
            lines.append(_segment(max(low, 1.0), high, y + 3, _SLOWER))
        ends = f"{low:.2f}"
        if f"{high:.2f}" != ends:
            lines.append(f'<path d="M{_x(median(bar.ratios))} {y + 1}v16" stroke="{_TEXT}"/>')
            ends += f" to {high:.2f}"
        lines.append(_text(_LEFT + _WIDTH + 8, y + 13, ends))
    return "\n".join([*lines, "</svg>"]) + "\n"
