"""The twelve Triton puzzles, each solved by an op: `make puzzles`.

    import puzzles

    for result in puzzles.solve():
        print(result)
    puzzles.draw(puzzles.PUZZLES[4], (64, 64), "puzzle5.png")

Source: S. Rush and others, "Triton Puzzles" (the numbering, the functions and the sizes).
"""

from __future__ import annotations

from puzzles.access import Access, accesses
from puzzles.cases import PUZZLES, Puzzle
from puzzles.picture import draw
from puzzles.solving import Result, solve

__all__ = ["PUZZLES", "Access", "Puzzle", "Result", "accesses", "draw", "solve"]
