"""`python benchmarks/bench.py FAMILY`: the table of a family of kernels, or with --shape that of
one call of an op.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FAMILIES = {
    "rows": "cuda",
    "conv2d": "cuda",
    "matmul": "cuda",
    "matmul_training": "cuda",
    "losses": "cuda",
    "rotary": "cuda",
    "gated_pair": "cuda",
    "experts": "cuda",
    "projections": "cuda",
    "norms": "cuda",
    "hybrids": "cuda",
    "attention": "cuda",
    "attention_masks": "cuda",
    "attention_bias": "cuda",
    "attention_wide": "cuda",
    "varlen": "cuda",
    "int4": "cuda",
    "scalar_attention": "cuda",
    "gpt2": "cuda",
    "models": "cuda",
    "encoders": "cuda",
    "generate": "cuda",
    "invariance": "cuda",
    "curves": "cuda",
    "pointwise": "cuda",
    "cpu": "cpu",
    "quantise": "any",
    "distributed": "torchrun",
}


_TARGETS = Path(__file__).resolve().parent.parent / "targets.toml"


def _peers(text: str) -> list[str]:
    peers = text.split(",")
    if not set(peers) <= {"eager", "compile"}:
        raise argparse.ArgumentTypeError(f"must be eager, compile or both, but got {text!r}")
    return peers


def _parser() -> argparse.ArgumentParser:
    from torchweld_cli import Parser, add_sizes, sizes_by_op

    parser = Parser(
        prog="bench",
        description="Times a family of ops, or with --shape one call of an op, against peers.",
        epilog=f"families: {', '.join(FAMILIES)}\n{sizes_by_op()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "what",
        metavar="FAMILY|OP",
        help="cpu: every op on the CPU; quantise: on the CPU, more on a GPU; distributed: several "
        "GPUs, under torchrun; all other families need a GPU",
    )
    add_sizes(parser)
    parser.add_argument(
        "--against",
        type=_peers,
        default=["eager"],
        metavar="PEERS",
        help="for OP: eager, compile or both, separated by a comma; default: eager",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="for OP; default: cuda if there is a GPU"
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if a row misses its target"
    )
    parser.add_argument("--targets", type=Path, default=_TARGETS, help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="folder for <device>/<family>.json")
    parser.add_argument("--tests", help='counts to record, as "passed,failed,skipped"')
    return parser


def _rows_of_call(args: argparse.Namespace, device: str) -> Iterator[Any]:
    import torch

    from torchweld._refusals import unknown_op
    from torchweld.tuning.main import filled
    from torchweld_bench import one
    from torchweld_cli import tensors

    if args.what not in one.EAGER:
        raise ValueError(unknown_op("OP", args.what, sorted(one.EAGER)))
    shapes = tensors(args.what, args.shape, getattr(torch, args.dtype), device)
    torch.manual_seed(0)
    return one.rows(args.what, filled(shapes, args.what, device), args.against)


def main(argv: list[str] | None = None) -> int:
    """Runs a family and prints its table.

    Returns:
        0; 1 where a row fails, or falls short under --check; 2 for bad arguments; 130 after Ctrl-C.
    """
    from torchweld_cli import guarded

    return guarded("bench", lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.shape is None and args.what not in FAMILIES:
        parser.error(
            f"FAMILY must be one of {', '.join(FAMILIES)}, but got {args.what!r}; an op needs "
            "--shape"
        )
    if not args.targets.is_file():
        parser.error(f"--targets must be a file, but got {args.targets}")

    import torch

    from torchweld._library import unavailable_reason

    if reason := unavailable_reason():
        print(f"bench: {reason}", file=sys.stderr)
        return 1
    there = "cuda" if torch.cuda.is_available() else "cpu"
    device = FAMILIES[args.what] if args.shape is None else args.device or there
    device = there if device == "any" else device
    if device == "cuda" and there == "cpu":
        parser.error(
            f"{args.what} needs a CUDA GPU, but there is none; use the family cpu, or an op with "
            "--shape on --device cpu"
        )
    if device != "torchrun":
        return _measure(args, parser, device)
    from torchweld_bench.distributed import processes

    if reason := processes.refusal():
        parser.error(reason)
    with processes.started() as (rank, size):
        status = _measure(args, parser, there, size, rank == 0)
    sys.stdout.flush()
    os._exit(status)  # NOTE: gloo's threads abort one sys.exit in ten (torch 2.11)


def _unwritable(out: Path, error: OSError) -> str:
    return f"--out {out} can't be written: {error.strerror}"


def _measure(
    args: argparse.Namespace,
    parser: argparse.ArgumentParser,
    device: str,
    gpus: int = 1,
    tells: bool = True,
) -> int:
    """Measures and returns the exit status; with several processes, only one prints."""
    from torchweld_bench import results

    report = results.new_report(args.what, device)
    report.gpus = gpus
    if args.tests:
        counts = [int(c) for c in args.tests.split(",")]
        report.tests = dict(zip(("passed", "failed", "skipped"), counts, strict=True))
    draw = None
    try:
        if args.out:  # an unwritable path must fail before the measurement
            args.out.mkdir(parents=True, exist_ok=True)
        if args.shape is None:
            targets = results.load_targets(args.targets, args.what)
            family = importlib.import_module(f"torchweld_bench.{args.what}")
            rows, draw = family.rows(), getattr(family, "draw", None)
        else:
            targets, rows = {}, _rows_of_call(args, device)
    except OSError as error:
        parser.error(_unwritable(args.out, error))
    except (ValueError, RuntimeError) as error:
        parser.error(str(error).splitlines()[0])
    failed, interrupted = 0, False
    try:
        for row in rows:
            if isinstance(row, results.Failure):
                failed += 1
                text = f"failed: {row.reason}"
            else:
                row.target = results.target_of(row, targets)
                report.rows.append(row)
                text = "wrong answer" if row.ratio is None else f"{row.ratio:.3f}x {row.against}"
            if tells:
                print(f"{row.case}: {text}", file=sys.stderr, flush=True)
                # save after every row, because a collective that hangs ends the process
                if args.out and gpus > 1:
                    results.save(report, args.out)
    except KeyboardInterrupt:
        interrupted = True
        print("interrupted; the rows so far:", file=sys.stderr)
    if not tells:
        return 130 if interrupted else 0
    print(results.text_table(report))
    if args.out:
        try:
            path = results.save(report, args.out)
            if draw:
                draw(report, path.with_suffix(".png"))
        except OSError as error:
            parser.error(_unwritable(args.out, error))
        print(f"written: {path}")
    short = [row.case for row in report.rows if row.falls_short]
    if args.check and short:
        print(f"{len(short)} rows miss their targets: " + "; ".join(short), file=sys.stderr)
    return 130 if interrupted else int(bool(failed or (args.check and short)))
