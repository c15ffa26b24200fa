"""Draws the README's picture from the rows of its table, as SVG text: the same bytes every time."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

_ROW, _TOP, _LEFT, _WIDTH, _RIGHT = 28, 62, 350, 380, 100
_MAX = 1.6  # the relative time at the end of the axis
_FASTER, _SLOWER, _TEXT, _GRID = "#2a9d63", "#d9822b", "#24292f", "#d0d7de"


class Bar(NamedTuple):
    """A range of relative times.

    Attributes:
        name: What is timed.
        peer: What it is compared with.
        low: The lowest relative time.
        high: The highest.
    """

    name: str
    peer: str
    low: float
    high: float


def _x(value: float) -> float:
    return round(_LEFT + _WIDTH * min(value, _MAX) / _MAX, 1)


def _text(x: float, y: float, text: str, extra: str = "") -> str:
    return f'<text x="{x}" y="{y}" {extra}>{escape(text)}</text>'


def _segment(low: float, high: float, y: float, colour: str) -> str:
    # A range that consists of one case still needs a visible width.
    width = max(round(_x(high) - _x(low), 1), 4)
    return f'<rect x="{_x(low)}" y="{y}" width="{width}" height="12" rx="2" fill="{colour}"/>'


def svg(title: str, bars: Sequence[Bar]) -> str:
    """The picture: a horizontal range a bar, green below a relative time of 1, orange above."""
    height = _TOP + _ROW * len(bars) + 30
    width = _LEFT + _WIDTH + _RIGHT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12" fill="{_TEXT}">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(16, 24, title, 'font-size="15" font-weight="bold"'),
        _text(16, 42, "Each bar spans the best and the worst measured case.", 'fill="#57606a"'),
    ]
    bottom = _TOP + _ROW * len(bars)
    for tick in (0.0, 0.5, 1.0, 1.5):
        x, colour = _x(tick), _TEXT if tick == 1 else _GRID
        lines.append(f'<path d="M{x} {_TOP - 6}V{bottom}" stroke="{colour}"/>')
        label = "1 = same time" if tick == 1 else f"{tick:g}"
        lines.append(_text(x, bottom + 18, label, 'text-anchor="middle"'))
    for i, bar in enumerate(bars):
        y = _TOP + _ROW * i
        lines.append(_text(16, y + 10, bar.name))
        lines.append(_text(16, y + 21, f"against {bar.peer}", 'font-size="9" fill="#57606a"'))
        if bar.low < 1:
            lines.append(_segment(bar.low, min(bar.high, 1.0), y + 3, _FASTER))
        if bar.high > 1:
            lines.append(_segment(max(bar.low, 1.0), bar.high, y + 3, _SLOWER))
        ends = f"{bar.low:.2f}"
        if f"{bar.high:.2f}" != ends:
            ends += f" to {bar.high:.2f}"
        lines.append(_text(_LEFT + _WIDTH + 8, y + 13, ends))
    return "\n".join([*lines, "</svg>"]) + "\n"
