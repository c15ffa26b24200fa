"""The twelve Triton puzzles, each solved by an op: `torchweld puzzles`.

    from torchweld import puzzles

    for result in puzzles.solve():
        print(result)
    puzzles.draw(puzzles.PUZZLES[4], (64, 64), "puzzle5.png")

Source: S. Rush and others, "Triton Puzzles" (the numbering, the functions and the sizes).
"""

from torchweld.puzzles.access import Access, accesses
from torchweld.puzzles.cases import PUZZLES, Puzzle
from torchweld.puzzles.picture import draw
from torchweld.puzzles.solve import Result, solve

__all__ = ["PUZZLES", "Access", "Puzzle", "Result", "accesses", "draw", "solve"]
