"""The text that the demo prints, and demo.json."""

from __future__ import annotations

import json
import math
import os
import platform
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from demo.generate import Generation
from demo.optable import OpTable, Row
from demo.options import Options
from demo.train import Training

# Lines of a completion that are printed; demo.json has them all.
_LINES = 6


@dataclass
class Results:
    """All that a run has measured so far."""

    options: Options
    started: str
    text: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    fuse: dict[str, Any] = field(default_factory=dict)
    training: Training | None = None
    generation: Generation | None = None
    ops: OpTable | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    interrupted: bool = False

    def checks(self) -> dict[str, bool | None]:
        """The conditions to check: True, False, or None if not reached."""
        return {
            "losses agree": self.training.converged() if self.training else None,
            "tokens equal": self.generation.passed() if self.generation else None,
        }

    def to_dict(self) -> dict[str, Any]:
        """The content of demo.json."""
        import torchweld

        return {
            "torchweld": torchweld.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": device_name(self.options.device),
            "threads": torch.get_num_threads(),
            "started": self.started,
            "interrupted": self.interrupted,
            "options": self.options.to_dict(),
            "text": self.text,
            "model": self.model,
            "fuse": self.fuse,
            "training": self.training.to_dict() if self.training else None,
            "generation": self.generation.to_dict() if self.generation else None,
            "ops": self.ops.to_dict() if self.ops else None,
            "checks": self.checks(),
            "seconds": {name: round(value, 2) for name, value in self.seconds.items()},
        }


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's and how many threads torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return f"{name}, {torch.get_num_threads()} threads"


def write(results: Results, png: bytes) -> list[Path]:
    """Writes demo.json and demo.png, each whole or not at all.

    Raises:
        OSError: The directory can't be written (any more).
    """
    out = results.options.out
    content = json.dumps(_finite(results.to_dict()), indent=1, allow_nan=False) + "\n"
    out.mkdir(parents=True, exist_ok=True)
    staged: list[tuple[str, Path]] = []
    try:
        for name, data in (("demo.json", content.encode()), ("demo.png", png)):
            handle, temporary = tempfile.mkstemp(dir=out, prefix=f".{name}-")
            staged.append((temporary, out / name))
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(temporary, 0o666 & ~_umask())
        for temporary, path in staged:
            os.replace(temporary, path)
    finally:
        for temporary, _ in staged:
            if os.path.exists(temporary):
                os.unlink(temporary)
    return [path for _, path in staged]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def mark(answer: bool | None) -> str:
    """A check's outcome as rich markup."""
    if answer is None:
        return "[yellow]not reached[/]"
    return "[green]PASS[/]" if answer else "[bold red]FAIL[/]"


def print_training(console: Any, training: Training) -> None:
    """Speed, memory and losses of both models, and the convergence check."""
    from rich.table import Table

    table = Table(title="Training")
    for name in ("model", "tokens/s", "step ms", "peak MiB", "first loss", "last loss"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for name, variant in training.variants.items():
        row = training.to_dict()[name]
        losses = row["losses"] or [math.nan]
        seconds = row["median_step_seconds"]
        table.add_row(
            name,
            _number(row["tokens_per_second"], ",.0f"),
            _number(None if seconds is None else seconds * 1e3, ".1f"),
            _number(None if variant.peak_bytes is None else variant.peak_bytes / 2**20, ",.0f"),
            f"{losses[0]:.4f}",
            f"{losses[-1]:.4f}",
        )
    console.print(table)
    console.print(f"Peak memory: {training.memory_is}.", highlight=False)
    differences = training.differences()
    if not differences:
        return
    checked = training.checked()
    console.print(
        f"Losses over the first {checked} steps: max relative difference "
        f"{max(differences[:checked]):.2g} (allowed {training.loss_rtol:.0e}); "
        f"over all {len(differences)} steps: {max(differences):.2g}.",
        highlight=False,
    )
    if training.weight_diff is not None:
        allowed = f" (allowed {5e-3:.0e})" if training.weights_match is not None else ""
        console.print(
            f"Weights after {checked} steps: max difference {training.weight_diff:.2g}{allowed}.",
            highlight=False,
        )
    console.print(f"Losses agree: {mark(training.converged())}")


def print_generation(console: Any, generation: Generation) -> None:
    """The completions, and whether batch, single prompts and stock agree."""
    from rich.text import Text

    console.print("\n[bold]Greedy completions[/] (one left-padded batch, fused model)")
    for index, completion in enumerate(generation.completions, 1):
        head = f"{completion.prompt_tokens} tokens, {completion.pads} pads"
        console.print(f"[cyan]{index}[/] [dim]({head})[/]", highlight=False)
        text = Text(completion.prompt, style="bold")
        text.append(completion.completion.rstrip(), style="green")
        lines = text.split("\n", allow_blank=True)
        for line in lines[:_LINES]:
            console.print(Text("    ") + line)
        if len(lines) > _LINES:
            console.print(f"    [dim]... {len(lines) - _LINES} more lines[/]", highlight=False)
        if completion.difference:
            console.print(f"    [red]{completion.difference}[/]", highlight=False)
    console.print(f"Tokens equal to each prompt alone and to stock: {mark(generation.passed())}")


def print_ops(console: Any, table: OpTable) -> None:
    """The op table."""
    from rich.table import Table

    out = Table(title=f"Ops, forward pass, {table.dtype}", box=None, padding=(0, 1, 0, 0))
    out.add_column("op", no_wrap=True)
    for name in ("ours", "eager", "compile", "speed-up", "err ours", "err eager"):
        out.add_column(name, justify="right", no_wrap=True)
    notes: dict[str, list[str]] = {}
    for row in table.rows:
        out.add_row(
            row.op,
            _number(row.ours_us, ",.0f"),
            _number(row.eager_us, ",.0f"),
            _number(row.compile_us, ",.0f"),
            _ratio(row),
            _number(row.error, ".1e"),
            _number(row.eager_error, ".1e"),
        )
        for note in (row.note, row.compile_note):
            if note:
                notes.setdefault(note, []).append(row.op)
    console.print(out)
    console.print("Times in microseconds; speed-up = eager / ours; err: max, against fp64. Sizes:")
    sizes: dict[str, list[str]] = {}
    for row in table.rows:
        sizes.setdefault(row.shape, []).append(row.op)
    for shape, ops in sizes.items():
        console.print(f"- {shape}: {', '.join(ops)}", highlight=False, markup=False)
    for note, ops in notes.items():
        console.print(f"- for {', '.join(ops)}: {note}.", highlight=False, markup=False)
    if table.compile_note:
        console.print(f"- for all: {table.compile_note}.", highlight=False)


def _ratio(row: Row) -> str:
    if not row.ours_us or not row.eager_us:
        return "-"
    ratio = row.eager_us / row.ours_us
    color = "green" if ratio >= 1.05 else "red" if ratio < 0.95 else "default"
    return f"[{color}]{ratio:.2f}x[/]"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
