"""Solving the puzzles: every op against its spec."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from puzzles.cases import PUZZLES, Puzzle
from torchweld._library import require
from torchweld.testing import mad

# Relative to the largest result: the sums have at most 200 terms in float32.
_ALLOWED = 200 * 2.0**-23


@dataclass(frozen=True)
class Result:
    """How one puzzle went; `str()` is the text of the command.

    Attributes:
        number: The puzzle's.
        device: Where the op ran.
        error: The maximum absolute difference from the spec in float64.
        match: True if that is within float32's roundings.
    """

    number: int
    device: str
    error: float
    match: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        puzzle = PUZZLES[self.number - 1]
        sizes = ", ".join(f"{name} {shape}" for name, shape in puzzle.sizes.items())
        outcome = "match" if self.match else "NO MATCH"
        return "\n".join(
            [
                f"{puzzle.number:>2}  {puzzle.title:<30} max error {self.error:.1e}  {outcome}",
                f"      {puzzle.formula}",
                f"      sizes  {sizes}, result {puzzle.result}",
                f"      spec   {puzzle.spec_text}",
                f"      op     {puzzle.op_text}",
            ]
        )


def _solve(puzzle: Puzzle, device: torch.device | str) -> Result:
    inputs = puzzle.inputs(device)
    exact = puzzle.spec(
        *(t.cpu().double() if t.is_floating_point() else t.cpu() for t in inputs.values())
    )
    out = puzzle.op(*inputs.values())
    error = mad(out, exact)
    largest = max(exact.abs().max().item(), 1.0)
    return Result(puzzle.number, str(device), error, error <= _ALLOWED * largest)


def solve(
    numbers: Sequence[int] | None = None, device: torch.device | str = "cpu"
) -> Iterator[Result]:
    """Runs puzzles at the notebook's sizes, one result after the other.

    Args:
        numbers: which, 1 to 12; all by default.
        device: where the ops run.

    Raises:
        ValueError: there is no puzzle with this number.
        RuntimeError: the operator library can't be loaded.
    """
    numbers = [p.number for p in PUZZLES] if numbers is None else list(numbers)
    wrong = [n for n in numbers if not 1 <= n <= len(PUZZLES)]
    if wrong:
        raise ValueError(f"a puzzle's number must be 1 to {len(PUZZLES)}, but got {wrong[0]}")
    require()
    return (_solve(PUZZLES[n - 1], device) for n in numbers)
