"""A progress bar in plain text, with the remaining time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

_WIDTH = 30
_SECONDS_BETWEEN = 0.1


def _duration(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


class Progress:
    """Counts steps, and draws them on a terminal.

    Args:
        title: the text before the bar.
        shown: whether to draw; by default if `stream` is a terminal.
        stream: stderr by default.
        clock: returns seconds.
    """

    def __init__(
        self,
        title: str,
        shown: bool | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title = title
        self._stream = sys.stderr if stream is None else stream
        self._shown = self._stream.isatty() if shown is None else shown
        self._clock = clock
        self._start = self._drawn = clock()
        self._done = 0.0
        self._total = 0.0

    def plan(self, steps: float) -> None:
        """Adds this many steps to the total."""
        self._total += steps

    def step(self, steps: float = 1) -> None:
        """Counts steps as done."""
        self._done += steps
        now = self._clock()
        if self._shown and (now - self._drawn >= _SECONDS_BETWEEN or self._done >= self._total):
            self._drawn = now
            self._stream.write("\r" + self.text())
            self._stream.flush()

    def text(self) -> str:
        """Returns the bar as text."""
        part = min(1.0, self._done / self._total) if self._total else 0.0
        full = int(part * _WIDTH)
        left = ""
        if part > 0:
            seconds = (self._clock() - self._start) * (1 - part) / part
            left = f"  {_duration(seconds)} left"
        bar = "#" * full + "." * (_WIDTH - full)
        return f"{self._title} [{bar}] {part:4.0%}{left}".ljust(79)

    def close(self) -> None:
        """Erases the bar from the terminal."""
        if self._shown:
            self._stream.write("\r" + " " * 79 + "\r")
            self._stream.flush()
