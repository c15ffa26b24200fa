"""The twelve Triton puzzles, each solved by an op: `torchweld puzzles`.

    from torchweld import puzzles

    for result in puzzles.solve():
        print(result)
    puzzles.draw(puzzles.PUZZLES[4], (64, 64), "puzzle5.png")

Source: S. Rush and others, "Triton Puzzles" (the numbering, the functions and the sizes).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchweld._start import lazy

if TYPE_CHECKING:
    from torchweld.puzzles.access import Access, accesses
    from torchweld.puzzles.cases import PUZZLES, Puzzle
    from torchweld.puzzles.picture import draw
    from torchweld.puzzles.solving import Result, solve

__all__ = ["PUZZLES", "Access", "Puzzle", "Result", "accesses", "draw", "solve"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Access": "access",
        "accesses": "access",
        "PUZZLES": "cases",
        "Puzzle": "cases",
        "draw": "picture",
        "Result": "solving",
        "solve": "solving",
    },
)
