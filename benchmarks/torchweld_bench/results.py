"""Benchmark rows: the table, the file, and the check against the targets."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from torchweld._library import build_facts
from torchweld.tuning.timer import Timing


@dataclass
class Row:
    """One case: our time, the times of the peers, and the criteria.

    Attributes:
        case: shape, dtype and variant, as text.
        ours_us: median, microseconds.
        spread_us: its quartiles.
        peers_us: medians of the peers.
        against: the peer by whose time ours is divided.
        ratio: ours over that peer; None if the answer is wrong.
        target: the largest ratio allowed, None without a target.
        error: our largest error against fp64.
        eager_error: the same error of torch's eager composition.
        tokens: tokens of a training step in all processes together; None for other rows.
    """

    case: str
    ours_us: float
    spread_us: tuple[float, float]
    peers_us: dict[str, float]
    against: str
    ratio: float | None
    target: float | None
    error: float
    eager_error: float
    tokens: int | None = None

    @property
    def falls_short(self) -> bool:
        return self.ratio is None or (self.target is not None and self.ratio > self.target)


@dataclass
class Failure:
    """A case that could not be measured, and why."""

    case: str
    reason: str


@dataclass
class Report:
    """The rows of one family and where they were measured.

    Attributes:
        gpus: the number of GPUs, or of processes on a CPU.
    """

    family: str
    device: str
    driver: str
    torch: str
    cuda: str
    commit: str | None
    date: str
    tests: dict[str, int] | None = None
    rows: list[Row] = field(default_factory=list)
    gpus: int = 1

    @property
    def where(self) -> str:
        return self.device if self.gpus == 1 else f"{self.gpus} x {self.device}"

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self)
        for row in found["rows"]:
            if row["tokens"] is None:
                del row["tokens"]
        return found


def make_row(
    case: str,
    times: dict[str, Timing],
    *,
    against: str,
    error: float,
    eager_error: float,
    allowed_error: float,
    target: float | None = None,
) -> Row:
    """Makes a row from the timings of "ours" and the peers. A wrong answer has no ratio."""
    ours = times["ours"]
    peers = {name: round(t.us, 2) for name, t in times.items() if name != "ours"}
    right = error <= allowed_error
    return Row(
        case=case,
        ours_us=round(ours.us, 2),
        spread_us=(round(ours.low, 2), round(ours.high, 2)),
        peers_us=peers,
        against=against,
        ratio=round(ours.us / times[against].us, 3) if right else None,
        target=target,
        error=error,
        eager_error=eager_error,
    )


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()}, {torch.get_num_threads()} threads"
    except OSError:
        pass
    return f"CPU, {torch.get_num_threads()} threads"


def _driver() -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
        )
        return done.stdout.split("\n")[0].strip()
    except OSError:
        return "unknown"


def new_report(family: str, device: str) -> Report:
    on_gpu = device == "cuda"
    return Report(
        family=family,
        device=torch.cuda.get_device_name() if on_gpu else _cpu_name(),
        driver=_driver() if on_gpu else "none",
        torch=torch.__version__,
        cuda=(torch.version.cuda or "none") if on_gpu else "none",
        commit=os.environ.get("TORCHWELD_COMMIT") or build_facts().get("commit"),
        date=datetime.date.today().isoformat(),
    )


def load_targets(path: Path | None, family: str) -> dict[str, float]:
    """Reads a family's targets by case, or by a pattern of cases. Empty if there is no file."""
    if path is None or not path.is_file():
        return {}
    try:
        import tomllib
    except ImportError:  # Python 3.10
        import tomli as tomllib
    return tomllib.loads(path.read_text()).get(family, {})


def target_of(row: Row, targets: dict[str, float]) -> float | None:
    """Returns the target of the longest matching name (`*` is any text), or the row's own."""
    names = [name for name in targets if fnmatchcase(row.case, name)]
    return targets[max(names, key=len)] if names else row.target


def text_table(report: Report) -> str:
    """Formats the rows, one line per case."""
    width = max([len(r.case) for r in report.rows] + [4])
    peers = list(dict.fromkeys(name for r in report.rows for name in r.peers_us))
    head = f"{'case':<{width}} {'ours us':>10}" + "".join(f" {p + ' us':>14}" for p in peers)
    lines = [
        f"{report.family} on {report.where}, torch {report.torch}, commit {report.commit}",
        head + f" {'ratio to':>16} {'target':>7} {'error':>9} {'eager':>9}",
    ]
    for r in report.rows:
        times = "".join(
            f" {r.peers_us[p]:>14.1f}" if p in r.peers_us else f" {'-':>14}" for p in peers
        )
        ratio = "wrong" if r.ratio is None else f"{r.ratio:.3f}"
        target = "-" if r.target is None else f"{r.target:.2f}"
        mark = "  short" if r.falls_short else ""
        lines.append(
            f"{r.case:<{width}} {r.ours_us:>10.1f}{times} {ratio + ' ' + r.against:>16} "
            f"{target:>7} {r.error:>9.1e} {r.eager_error:>9.1e}{mark}"
        )
    return "\n".join(lines)


def save(report: Report, folder: Path) -> Path:
    """Writes <folder>/<device>/<family>.json, replacing it in one step. Of n GPUs it is
    <device>-x<n>.
    """
    gpu = report.device.lower().split(",")[0].strip().replace(" ", "-")
    gpu += f"-x{report.gpus}" if report.gpus > 1 else ""
    path = folder / gpu / f"{report.family}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".json.tmp")
    scratch.write_text(json.dumps(report.to_dict(), indent=1) + "\n")
    scratch.replace(path)
    return path
