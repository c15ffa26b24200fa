"""TuneResult: the table that tune makes, its file and its picture."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]

# The columns that every row has, in addition to the columns of its tile.
_ABOUT = ("part", "problem", "family", "choice", "source")
_MEASURED = (
    "us",
    "low_us",
    "high_us",
    "tflop_s",
    "gb_s",
    "registers",
    "shared_bytes",
    "error",
    "reason",
)
_HEADS = {"tflop_s": "TFLOP/s", "gb_s": "GB/s", "shared_bytes": "shared B", "source": ""}
_MOST_BARS = 40


def empty_row(**known: Any) -> Row:
    """Makes the row of a configuration that has not run."""
    return {**known, **{name: None for name in _MEASURED if name != "reason"}, "reason": ""}


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name in ("us", "tflop_s", "gb_s"):
        return f"{value:.1f}"
    if name == "error":
        return f"{value:.1e}"
    if name == "source":
        return {"heuristic": "default", "tuned": "remembered"}.get(value, "")
    return str(value)


@dataclass
class TuneResult:
    """The measurements of `torchweld.tune`; `str()` is the table, best first for each kernel.

    Attributes:
        op: the op's name.
        call: its arguments, as text.
        gpu: the GPU's name, "" on the CPU.
        dtype: the dtype of the first floating-point argument.
        version: torchweld's version.
        rows: one dict for each configuration: by kernel of the call, then best first, those without
            a time last. Beside the tile's columns each has: `us` (median time in microseconds, None
            without a time; `low_us` and `high_us` are the quartiles), `tflop_s`
            (None if an op moves memory), `gb_s` (tensors read and written once), `registers` of a
            thread and `shared_bytes` of a block (None: unknown), `error` (largest, see `against`),
            `reason` (why there is no time, "" if there is one), `part` (which of the call's
            kernels it configures), `problem`, `family`, `choice` (its name) and `source`
            ("heuristic" or "tuned" in the row that runs by default, else "").
        against: the reference of `error`.
        interrupted: True if Ctrl-C, or a configuration that stopped the GPU, ended the search.
        note: one sentence, for example if there is nothing to tune; else "".

    Example::

        result = torchweld.tune("softmax", torch.randn(64, 1000))
        print(result.note or result.best)
    """

    op: str
    call: str
    gpu: str = ""
    dtype: str = ""
    version: str = ""
    rows: list[Row] = field(default_factory=list)
    against: str = ""
    interrupted: bool = False
    note: str = ""

    @property
    def best(self) -> Row | None:
        """Returns the fastest row whose answer is right, of all the call's kernels, or None."""
        timed = [row for row in self.rows if row["us"] is not None]
        return min(timed, key=lambda row: row["us"], default=None)

    def best_of_part(self, part: int) -> Row | None:
        """Returns the fastest right row of one of the call's kernels."""
        timed = [row for row in self.rows if row["us"] is not None and row["part"] == part]
        return min(timed, key=lambda row: row["us"], default=None)

    def columns(self) -> list[str]:
        """Lists the names of the tiles' columns."""
        known = {*_ABOUT, *_MEASURED}
        return list(dict.fromkeys(name for row in self.rows for name in row if name not in known))

    def sort(self) -> None:
        """Sorts best first in each part."""
        self.rows.sort(key=lambda r: (r["part"], math.inf if r["us"] is None else r["us"]))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_pandas(self) -> Any:
        """Returns a `pandas.DataFrame`, one row a configuration, in the order of `rows`.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError(
                "TuneResult.to_pandas needs pandas, which is not installed; pip install pandas, or "
                "use .rows"
            ) from error
        columns = ["part", "problem", "choice", *self.columns(), *_MEASURED, "source", "family"]
        return pandas.DataFrame(self.rows, columns=columns)

    def __str__(self) -> str:
        if not self.rows:
            return self.note
        rate = "tflop_s" if any(row["tflop_s"] is not None for row in self.rows) else "gb_s"
        names = [
            "choice",
            *self.columns(),
            "us",
            rate,
            "registers",
            "shared_bytes",
            "error",
            "source",
        ]
        lines = [f"torchweld::{self.op}({self.call}) on {self.gpu}, torchweld {self.version}"]
        for part in sorted({row["part"] for row in self.rows}):
            rows = [row for row in self.rows if row["part"] == part]
            lines.append(f"{rows[0]['problem']}: {len(rows)} configurations")
            lines += self._table(rows, names)
        lines.append(f"error: the largest against {self.against}")
        return "\n".join([*lines, self.note] if self.note else lines)

    def _table(self, rows: list[Row], names: list[str]) -> list[str]:
        names = [name for name in names if any(row.get(name) is not None for row in rows)]
        cells = [[_cell(name, row.get(name)) for name in names] for row in rows]
        heads = [_HEADS.get(name, name) for name in names]
        widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
        texts = [
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
            for line in [heads, *cells]
        ]
        reasons = ["", *(row["reason"] for row in rows)]
        return [f"  {t}  {r}".rstrip() for t, r in zip(texts, reasons, strict=True)]

    def save(self, path: str | Path) -> None:
        """Writes everything as JSON; `TuneResult.load` reads it."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> TuneResult:
        """Reads a file of `save`.

        Raises:
            ValueError: the file holds something else.
        """
        try:
            return cls(**json.loads(Path(path).read_text()))
        except (TypeError, ValueError) as error:
            raise ValueError(f"TuneResult.load: {path} is no saved TuneResult ({error})") from error

    def plot(self, path: str | Path) -> None:
        """Draws a picture: bars of the 40 fastest timed configurations, the fastest on top.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: nothing was timed.
        """
        rows = [row for row in self.rows if row["us"] is not None]
        if not rows:
            raise ValueError("TuneResult.plot: there is no timed configuration to draw")
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                "TuneResult.plot needs matplotlib, which is not installed; pip install matplotlib"
            ) from error
        rows = sorted(rows, key=lambda row: row["us"])[:_MOST_BARS]
        figure = Figure(figsize=(9, 1.4 + 0.26 * len(rows)), dpi=130, layout="constrained")
        axes = figure.subplots()
        places = range(len(rows))
        colours = ["#dd8452" if row["source"] else "#4c72b0" for row in rows]
        axes.barh(places, [row["us"] for row in rows], color=colours, height=0.75)
        labels = []
        for place, row in zip(places, rows, strict=True):
            axes.plot([row["low_us"], row["high_us"]], [place] * 2, color="black", lw=1.5)
            axes.text(row["us"], place, f"  {row['us']:.1f}", va="center", fontsize=7)
            tile = ", ".join(f"{name} {row[name]}" for name in self.columns() if name in row)
            parts = len({r["part"] for r in self.rows})
            labels.append(f"{row['problem']}: {tile}" if parts > 1 else tile)
        axes.set_yticks(places, labels, fontsize=7)
        axes.margins(x=0.1)
        axes.invert_yaxis()
        axes.set_xlabel("us, median and quartiles (orange: what a call takes by itself)")
        axes.set_title(f"torchweld::{self.op}({self.call})\n{self.gpu}", fontsize=9)
        figure.savefig(path)
