"""The op table: time of ours, of eager torch and of torch.compile, and errors against fp64."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from demo import llama_cases
from demo.kinds import KINDS
from demo.opcases import Case, cases
from demo.options import Options, cpp_compiler
from torchweld.tuning.timer import interleaved

_ROUNDS = 7
_ROUND_SECONDS = 0.012
# Starting torch.compile takes 20 s on two cores, each op after that 1 to 3 s.
_COMPILE_START_SECONDS = 20.0


@dataclass
class Row:
    """One op. Times are microseconds of the forward pass, None if not measured."""

    op: str
    shape: str
    ours_us: float | None = None
    eager_us: float | None = None
    compile_us: float | None = None
    error: float | None = None
    eager_error: float | None = None
    note: str | None = None
    compile_note: str | None = None


@dataclass
class OpTable:
    """The rows; grows while it is measured."""

    dtype: str = ""
    rows: list[Row] = field(default_factory=list)
    compile_note: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The table as plain JSON-able data."""
        return {
            "dtype": self.dtype,
            "what": "forward pass, microseconds, median; error = max |result - fp64 reference|",
            "compile_note": self.compile_note,
            "rows": [asdict(row) for row in self.rows],
        }


def measure(
    options: Options,
    heads: int,
    dim: int,
    table: OpTable,
    compile_seconds: float,
    tick: Callable[[str], None],
) -> None:
    """Fills the table, first ours and eager for all ops, then torch.compile while its time lasts.

    Args:
        options: For sizes, device and dtype.
        heads: Attention heads of the model.
        dim: Width of the model.
        table: Filled as far as it gets.
        compile_seconds: Time for torch.compile; it may take one op more than that.
        tick: Called with the op's name before each measurement.
    """
    table.dtype = options.dtype
    dtype = getattr(torch, options.dtype)
    if KINDS[options.model].rotary:
        todo = llama_cases.cases(options, heads, dim, dtype)
    else:
        todo = cases(options.batch, heads, options.context, dim, options.device, dtype)
    with torch.no_grad():
        calls = []
        for case in todo:
            tick(case.op)
            row = Row(case.op, case.shape)
            calls.append(_measure_one(case, row, options.device))
            # Whole rows only: an interrupt must not leave a time without its error.
            table.rows.append(row)
        _measure_compile(todo, calls, table, options.device, compile_seconds, tick)


def _measure_one(case: Case, row: Row, device: torch.device) -> dict[str, Callable]:
    """Fills in errors and times of ours and eager; returns the timed calls."""
    calls: dict[str, Callable] = {"eager": lambda: case.eager(*case.inputs)}
    try:
        ours = case.ours(*case.inputs)
        calls["ours"] = lambda: case.ours(*case.inputs)
    except NotImplementedError as error:
        ours = None
        row.note = str(error).splitlines()[0]
    reference = case.eager(*_double(case))
    row.eager_error = _error(case.eager(*case.inputs), reference)
    if ours is not None:
        row.error = _error(ours, reference)
    del reference, ours
    _keep_times(row, _time(calls, device))
    return calls


def _keep_times(row: Row, times: dict[str, float]) -> None:
    row.eager_us, row.ours_us = times["eager"], times.get("ours")
    row.compile_us = times.get("compile")


def _double(case: Case) -> list[Tensor]:
    return [t.double() if t.is_floating_point() else t for t in case.inputs]


def _error(value: Any, reference: Any) -> float:
    """Largest absolute difference; of several outputs the first counts."""
    if isinstance(value, tuple):
        value, reference = value[0], reference[0]
    return (value.double() - reference).abs().max().item()


def _measure_compile(
    todo: list[Case],
    calls: list[dict[str, Callable]],
    table: OpTable,
    device: torch.device,
    budget: float,
    tick: Callable[[str], None],
) -> None:
    if cpp_compiler() is None:
        table.compile_note = "torch.compile was left out: no C++ compiler was found"
        return
    if budget < _COMPILE_START_SECONDS:
        table.compile_note = "torch.compile was left out: the time of the run was used up"
        return
    start = time.monotonic()
    last = 0.0
    import torch._dynamo
    import torch._inductor.config as inductor

    # A header cache and worker processes pay off in larger programs; here they slow the start.
    changes = {"compile_threads": 1}
    if hasattr(inductor, "cpp_cache_precompile_headers"):
        changes["cpp_cache_precompile_headers"] = False
    with inductor.patch(changes):
        for case, row, timed in zip(todo, table.rows, calls, strict=True):
            if time.monotonic() - start + last > budget:
                row.compile_note = f"the {budget:.0f} s for torch.compile were used up"
                continue
            tick(f"{case.op} (torch.compile)")
            begin = time.monotonic()
            try:
                compiled = torch.compile(case.eager, fullgraph=True, dynamic=False)
                compiled(*case.inputs)
            except Exception as error:  # its compilers raise exceptions of any type
                text = str(error).strip().splitlines()
                row.compile_note = f"torch.compile failed: {text[0] if text else type(error)}"
                continue
            finally:
                last = min(time.monotonic() - begin, 5.0)
            # All three again: times of one row must be from the same seconds.
            timed["compile"] = lambda c=case, f=compiled: f(*c.inputs)
            _keep_times(row, _time(timed, device))
    torch._dynamo.reset()


def _time(calls: dict[str, Callable], device: torch.device) -> dict[str, float]:
    """Median microseconds of each call, the calls taking turns."""
    times = interleaved(
        calls, device=device.type, rounds=_ROUNDS, warmup=1, sample_seconds=_ROUND_SECONDS
    )
    return {name: timing.us for name, timing in times.items()}
