"""The access picture: a panel a tensor, a colour for the blocks that touch an element."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from puzzles.access import Access, accesses
from puzzles.cases import Puzzle

_COLOURS = "tab20"
_MASKED, _UNTOUCHED = (0.55, 0.55, 0.55), (1.0, 1.0, 1.0)
_MOST_LABELS = 16
_MOST_LANES = 1 << 20  # a picture of so many takes 5 s and 600 MiB
_MOST_LINES = 32  # more cells a side than this are drawn without lines between them


def draw(puzzle: Puzzle, tile: Sequence[int] | None, path: str | Path) -> None:
    """Writes the picture of a puzzle's accesses as PNG.

    Every tensor is a panel, drawn up to the last lane that any block holds. Elements that the same
    blocks touch share a colour and show the numbers of the blocks; hatched grey lanes are beyond
    the tensor and are masked.

    Args:
        puzzle: one of `PUZZLES`.
        tile: block sizes in the order of `puzzle.tile_names`; the notebook's by default.
        path: the file.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the tile has another number of sizes, one below 1, or too many lanes.
    """
    touched = accesses(puzzle, tile)
    lanes = sum(a.lanes for a in touched)
    if lanes > _MOST_LANES:
        raise ValueError(
            f"the tiles of puzzle {puzzle.number} must have at most {_MOST_LANES:,} lanes in all "
            f"blocks, but got {lanes:,}; use smaller sizes"
        )
    import matplotlib
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(a.tensor for a in touched))
    panels = [[a for a in touched if a.tensor == name] for name in names]
    grids = [cells(panel) for panel in panels]
    kinds = dict.fromkeys(cell for grid, _ in grids for row in grid for cell in row if cell)
    # Single blocks come first, so that the elements a block writes have their own colour.
    palette = matplotlib.colormaps[_COLOURS]
    colours = {
        kind: palette(index % palette.N)[:3] for index, kind in enumerate(sorted(kinds, key=_order))
    }
    figure = Figure(figsize=(3.4 * len(names), 4.4), dpi=120, layout="constrained")
    for axes, panel, (grid, masked) in zip(
        figure.subplots(1, len(names), squeeze=False)[0], panels, grids, strict=True
    ):
        _panel(axes, panel, grid, masked, colours)
    sizes = zip(puzzle.tile_names, puzzle.tile if tile is None else tile, strict=True)
    blocks = max(a.block for a in touched) + 1
    figure.suptitle(
        f"puzzle {puzzle.number}, {puzzle.title}: {blocks} block{'s' * (blocks > 1)}, tile "
        + ", ".join(f"{name} {size}" for name, size in sizes)
        + "\nnumbers: the blocks that touch it; hatched grey: beyond the tensor, masked",
        fontsize=10,
    )
    figure.savefig(path, format="png")


def _as_matrix(ranges: Sequence[tuple[int, int]], pages: int) -> list[tuple[range, range]]:
    """Rows and columns in the panel: a vector is one row, the pages of a batch are below each
    other, `pages` rows apart.
    """
    spans = [range(start, stop) for start, stop in ranges]
    if len(spans) == 1:
        return [(range(1), spans[0])]
    if len(spans) == 2:
        return [(spans[0], spans[1])]
    return [
        (range(page * pages + spans[1].start, page * pages + spans[1].stop), spans[2])
        for page in spans[0]
    ]


Grid = list[list[frozenset[int]]]


def cells(touched: Sequence[Access]) -> tuple[Grid, list[list[bool]]]:
    """For each cell of one tensor's panel, the blocks that touch it and whether it is masked."""
    shape = touched[0].shape
    page = max(a.ranges[-2][1] for a in touched) if len(shape) > 1 else 1
    inside = {
        (row, col)
        for rows, cols in _as_matrix([(0, n) for n in shape], page)
        for row in rows
        for col in cols
    }
    blocks: dict[tuple[int, int], set[int]] = {}
    for a in touched:
        for rows, cols in _as_matrix(a.ranges, page):
            for row in rows:
                for col in cols:
                    blocks.setdefault((row, col), set()).add(a.block)
    places = inside | set(blocks)
    height, width = (max(place[d] for place in places) + 1 for d in (0, 1))
    grid = [[frozenset(blocks.get((r, c), ())) for c in range(width)] for r in range(height)]
    masked = [[(r, c) not in inside for c in range(width)] for r in range(height)]
    return grid, masked


def _runs(flags: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """First and one past the last of every run of True."""
    place = 0
    for flag, run in itertools.groupby(flags):
        start, place = place, place + len(list(run))
        if flag:
            yield start, place


def _order(kind: frozenset[int]) -> tuple[int, list[int]]:
    return len(kind), sorted(kind)


def _label(kind: frozenset[int]) -> str:
    blocks = sorted(kind)
    return f"{len(blocks)} blocks" if len(blocks) > 4 else ", ".join(map(str, blocks))


def _panel(
    axes: Any,
    touched: Sequence[Access],
    grid: Grid,
    masked: list[list[bool]],
    colours: dict[frozenset[int], Any],
) -> None:
    from matplotlib.patches import Rectangle

    height, width = len(grid), len(grid[0])
    places: dict[frozenset[int], list[tuple[int, int]]] = {}
    image = []
    for r in range(height):
        image.append([])
        for c in range(width):
            kind = grid[r][c]
            image[r].append(_MASKED if masked[r][c] else colours.get(kind, _UNTOUCHED))
            if kind and not masked[r][c]:
                places.setdefault(kind, []).append((r, c))
    axes.imshow(image, aspect="auto", interpolation="nearest", extent=(0, width, height, 0))
    for row, flags in enumerate(masked):
        for start, stop in _runs(flags):
            run = Rectangle((start, row), stop - start, 1, fill=False, hatch="////", lw=0)
            axes.add_patch(run)
    for kind, where in places.items() if len(places) <= _MOST_LABELS else ():
        middle = [sum(place[d] for place in where) / len(where) + 0.5 for d in (1, 0)]
        axes.text(*middle, _label(kind), ha="center", va="center", fontsize=8)
    first = touched[0]
    axes.set_title(
        f"{first.tensor} {first.shape}, {'written' if first.write else 'read'}\n"
        f"{sum(a.lanes for a in touched)} lanes, {sum(a.masked for a in touched)} masked",
        fontsize=9,
    )
    if max(height, width) <= _MOST_LINES:
        axes.set_xticks(range(width + 1), minor=True)
        axes.set_yticks(range(height + 1), minor=True)
        axes.grid(which="minor", color="white", linewidth=0.4)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.set_visible(len(first.shape) == 2)
    axes.tick_params(which="both", length=0, labelsize=7)
