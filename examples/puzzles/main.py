"""`make puzzles`: from the flags to the table, the memory check and the picture."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torchweld_cli import Parser, guarded


def _tile(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be sizes such as 64,64, but got {text!r}") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the puzzles."""
    parser.add_argument("--device", help="cpu, cuda or cuda:N; default: a GPU where there is one")
    parser.add_argument("--puzzle", type=int, metavar="N", help="one of them, 1 to 12")
    parser.add_argument(
        "--check-memory",
        action="store_true",
        help="also run under compute-sanitizer and report invalid accesses",
    )
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FILE.png",
        help="draw what each block of --puzzle N reads and writes",
    )
    parser.add_argument(
        "--tile",
        type=_tile,
        metavar="SIZES",
        help="block sizes of the picture, such as 64,64; default: the notebook's",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table.

    Args:
        argv: Flags; `sys.argv` by default.

    Returns:
        0; 1 where a result does not match, an access is invalid or something is missing; 2 for bad
        flags.
    """
    return guarded("puzzles", lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = Parser(prog="puzzles", description="The twelve Triton puzzles, solved by the ops.")
    add_arguments(parser)
    args = parser.parse_args(argv)
    from demo.options import UsageError, parse_device
    from puzzles.memory import MemoryCheckError, check_memory
    from puzzles.solving import solve

    if args.picture is not None and args.puzzle is None:
        return _fail("--picture draws one puzzle; add --puzzle N", 2)
    if args.tile is not None and args.picture is None:
        return _fail("--tile is the picture's; add --picture FILE.png", 2)
    try:
        device = str(parse_device(args.device))
        results = solve(None if args.puzzle is None else [args.puzzle], device)
    except (UsageError, ValueError) as error:
        return _fail(str(error), 2)
    except RuntimeError as error:
        return _fail(str(error), 1)
    done = []
    for result in results:
        print(result, flush=True)
        done.append(result)
    matches = sum(result.match for result in done)
    print(f"{matches} of {len(done)} match on {device}")
    failed = matches < len(done)
    if args.check_memory:
        try:
            checks = check_memory([result.number for result in done], device)
        except MemoryCheckError as error:
            return _fail(str(error), 1)
        print("compute-sanitizer memcheck")
        print("\n".join(map(str, checks)))
        failed = failed or any(check.errors for check in checks)
    if args.picture is not None:
        code = _picture(args)
        if code:
            return code
    return 1 if failed else 0


def _picture(args: argparse.Namespace) -> int:
    from puzzles.cases import PUZZLES
    from puzzles.picture import draw

    try:
        draw(PUZZLES[args.puzzle - 1], args.tile, args.picture)
    except ImportError:
        return _fail("--picture needs matplotlib; use pip install matplotlib", 1)
    except ValueError as error:
        return _fail(f"--tile: {error}", 2)
    except OSError as error:
        return _fail(f"--picture {args.picture} can't be written: {error.strerror}", 2)
    print(f"written: {args.picture}")
    return 0


def _fail(sentence: str, code: int) -> int:
    print(f"puzzles: {sentence}", file=sys.stderr)
    return code
