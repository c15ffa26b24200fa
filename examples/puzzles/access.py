"""Which elements each block of a puzzle reads and writes, for a tile size.

A block is one program of a kernel in the notebook's manner: it loads whole tiles, and lanes of a
tile beyond the end of a tensor are masked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from puzzles.cases import Puzzle


@dataclass(frozen=True)
class Access:
    """A rectangle of one tensor that one block touches.

    Attributes:
        block: Which block, counted from 0.
        tensor: The tensor's name; the result is "z".
        shape: The tensor's shape.
        write: True for a store.
        ranges: First and one past the last index of every dim; what lies beyond `shape` is masked.
    """

    block: int
    tensor: str
    shape: tuple[int, ...]
    write: bool
    ranges: tuple[tuple[int, int], ...]

    @property
    def lanes(self) -> int:
        """All lanes of the tile."""
        return _product(stop - start for start, stop in self.ranges)

    @property
    def masked(self) -> int:
        """The lanes beyond the end of the tensor."""
        inside = zip(self.ranges, self.shape, strict=True)
        return self.lanes - _product(max(min(stop, n) - start, 0) for (start, stop), n in inside)


def _product(factors: Iterator[int]) -> int:
    result = 1
    for factor in factors:
        result *= factor
    return result


Range = tuple[int, int]


def _tiles(n: int, size: int) -> list[Range]:
    return [(start, start + size) for start in range(0, n, size)]


def _whole(n: int, size: int) -> Range:
    """The range that a loop over tiles of this size covers."""
    return (0, -(-n // size) * size)


# For each puzzle the blocks, each as (tensor, ranges) with the result last.
Block = list[tuple[str, tuple[Range, ...]]]


def _vector(puzzle: Puzzle, size: int) -> Iterator[Block]:
    for i in _tiles(puzzle.result[0], size):
        yield [("x", (i,)), ("z", (i,))]


def _outer(puzzle: Puzzle, cols: int, rows: int) -> Iterator[Block]:
    for i, j in itertools.product(_tiles(puzzle.result[0], rows), _tiles(puzzle.result[1], cols)):
        yield [("x", (j,)), ("y", (i,)), ("z", (i, j))]


def _outer_gradient(puzzle: Puzzle, cols: int, rows: int) -> Iterator[Block]:
    for i, j in itertools.product(_tiles(puzzle.result[0], rows), _tiles(puzzle.result[1], cols)):
        yield [("x", (i, j)), ("y", (i,)), ("dz", (i, j)), ("z", (i, j))]


def _row(puzzle: Puzzle, rows: int, lanes: int) -> Iterator[Block]:
    row = _whole(puzzle.sizes["x"][1], lanes)
    for i in _tiles(puzzle.result[0], rows):
        yield [("x", (i, row)), ("z", (i,) if len(puzzle.result) == 1 else (i, row))]


def _attention(puzzle: Puzzle, rows: int, lanes: int) -> Iterator[Block]:
    keys = _whole(puzzle.result[0], lanes)
    for i in _tiles(puzzle.result[0], rows):
        yield [("q", (i,)), ("k", (keys,)), ("v", (keys,)), ("z", (i,))]


def _convolution(puzzle: Puzzle, images: int) -> Iterator[Block]:
    batch, height, width = puzzle.result
    rows, cols = puzzle.sizes["weight"]
    halo = ((0, height + rows - 1), (0, width + cols - 1))
    for b in _tiles(batch, images):
        yield [
            ("x", (b, *halo)),
            ("weight", ((0, rows), (0, cols))),
            ("z", (b, (0, height), (0, width))),
        ]


def _matmul(puzzle: Puzzle, rows: int, cols: int, batches: int, middle: int) -> Iterator[Block]:
    batch, m, n = puzzle.result
    inner = _whole(puzzle.sizes["x"][2], middle)
    for b, i, j in itertools.product(_tiles(batch, batches), _tiles(m, rows), _tiles(n, cols)):
        yield [("x", (b, i, inner)), ("y", (b, inner, j)), ("z", (b, i, j))]


def _quantised(puzzle: Puzzle, rows: int, cols: int, middle: int) -> Iterator[Block]:
    inner = _whole(puzzle.sizes["activation"][0], middle)
    words = (0, -(-inner[1] // 8))  # eight codes a word, and eight codes a group
    for i, j in itertools.product(_tiles(puzzle.result[0], rows), _tiles(puzzle.result[1], cols)):
        yield [
            ("scale", (i, words)),
            ("offset", (i,)),
            ("weight", (i, words)),
            ("activation", (inner, j)),
            ("z", (i, j)),
        ]


_BLOCKS: tuple[Callable[..., Iterator[Block]], ...] = (
    _vector,
    _vector,
    _outer,
    _outer,
    _outer,
    _outer_gradient,
    _row,
    _row,
    _attention,
    _convolution,
    _matmul,
    _quantised,
)


def accesses(puzzle: Puzzle, tile: Sequence[int] | None = None) -> list[Access]:
    """The elements that every block of a puzzle touches.

    Args:
        puzzle: one of `PUZZLES`.
        tile: block sizes in the order of `puzzle.tile_names`; the notebook's by default.

    Raises:
        ValueError: the tile has another number of sizes, or one below 1.
    """
    tile = puzzle.tile if tile is None else tuple(tile)
    if len(tile) != len(puzzle.tile_names) or min(tile) < 1:
        names = ",".join(puzzle.tile_names)
        raise ValueError(
            f"the tile of puzzle {puzzle.number} must be {names}, each 1 or more, but got "
            f"{','.join(map(str, tile))}"
        )
    shapes = {**puzzle.sizes, "z": puzzle.result}
    return [
        Access(index, name, shapes[name], name == "z", ranges)
        for index, block in enumerate(_BLOCKS[puzzle.number - 1](puzzle, *tile))
        for name, ranges in block
    ]
