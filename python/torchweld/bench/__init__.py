"""`torchweld bench FAMILY`: the table and the picture of a family of kernels."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

FAMILIES = {
    "rows": "cuda",
    "conv2d": "cuda",
    "matmul": "cuda",
    "attention": "cuda",
    "int4": "cuda",
    "scalar_attention": "cuda",
    "gpt2": "cuda",
    "pointwise": "cuda",
    "cpu": "cpu",
}


def _default_targets() -> Path | None:
    """The checkout's targets; an installed package, which has the benchmarks too, has none."""
    path = Path(__file__).resolve().parents[3] / "benchmarks" / "targets.toml"
    return path if path.is_file() else None


def main(argv: list[str] | None = None) -> int:
    """Runs a family and prints its table. Returns 1 where --check finds a row that falls short."""
    parser = argparse.ArgumentParser(prog="torchweld bench", description=__doc__)
    parser.add_argument(
        "family", choices=FAMILIES, help="cpu: every op there; all others need a GPU"
    )
    parser.add_argument("--check", action="store_true", help="exit 1 where a row falls short")
    parser.add_argument("--targets", type=Path, default=None, help="a targets.toml")
    parser.add_argument("--out", type=Path, help="folder for <device>/<family>.json and .png")
    parser.add_argument("--tests", help='counts to record, as "passed,failed,skipped"')
    args = parser.parse_args(argv)

    import torch

    from torchweld._library import require
    from torchweld.bench import results

    require()
    device = FAMILIES[args.family]
    if device == "cuda" and not torch.cuda.is_available():
        print(
            f"torchweld bench: {args.family} needs a CUDA GPU, but there is none", file=sys.stderr
        )
        return 2
    targets = results.load_targets(args.targets or _default_targets(), args.family)
    report = results.new_report(args.family, device)
    if args.tests:
        counts = [int(c) for c in args.tests.split(",")]
        report.tests = dict(zip(("passed", "failed", "skipped"), counts, strict=True))
    source = importlib.import_module(f"torchweld.bench.{args.family}").rows
    try:
        for row in source(targets):
            report.rows.append(row)
            ratio = "wrong answer" if row.ratio is None else f"{row.ratio:.3f}x {row.against}"
            print(f"{row.case}: {ratio}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("interrupted; the rows so far:", file=sys.stderr)
    print(results.text_table(report))
    if args.out:
        path = results.save(report, args.out)
        results.draw(report, path.with_suffix(".png"))
        print(f"written: {path} and {path.with_suffix('.png').name}")
    short = [row.case for row in report.rows if row.falls_short]
    if args.check and short:
        print(f"{len(short)} rows fall short: " + "; ".join(short), file=sys.stderr)
        return 1
    return 0
