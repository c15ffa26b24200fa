"""Runs compute-sanitizer over sample calls of every op: memcheck, racecheck, initcheck, synccheck.

    python benchmarks/sanitize.py [--tools memcheck,racecheck] [--ops attention,linear]

Exits 1 if a tool reports anything. The calls are the samples of tests/samples.py in every dtype,
and 16-bit attention over several tiles, which the samples are too small for. Racecheck skips the
latter, because it reports TMA pipelines as races.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def sample_calls(only: list[str], small: bool) -> list[tuple]:
    """The sample and dtype of each call; with `small`, only the samples of tests/samples.py."""
    sys.path.insert(0, str(ROOT / "tests"))
    import reference as R
    import samples as S

    # (batch, heads, kv heads, rows, keys, head dims). In the second shape a kv head has several
    # query heads.
    shapes = (
        S.attention_call(2, 2, 2, 150, 300, 64, 64, pads=(0, 70), causal=True),
        S.attention_call(1, 8, 2, 300, 300, 128, 128, causal=True),
        S.attention_call(1, 2, 1, 200, 200, 128, 128),
        S.attention_call(1, 2, 1, 130, 140, 192, 128, causal=True),
        S.attention_call(1, 1, 1, 140, 130, 256, 256, softcap=20.0),
    )
    large = {
        "attention": shapes,
        "attention_backward": [S.with_saved(shape, 3, R.attention_forward) for shape in shapes],
    }
    calls = []
    for op, samples in S.SAMPLES.items():
        if only and op not in only:
            continue
        calls += [(sample, dtype) for sample in samples for dtype in S.dtypes("cuda")]
        if small:
            continue
        for i, build in enumerate(large.get(op, ())):
            calls += [(S.Sample(op, f"large_{i}", build), dtype) for dtype in (S.BF16, S.F16)]
    return calls


def run_calls(only: list[str], small: bool) -> None:
    """Runs every sample call on the GPU, under compute-sanitizer."""
    calls = sample_calls(only, small)
    import torch

    from samples import call

    for sample, dtype in calls:
        args, kwargs = sample.make("cuda", dtype)
        call(sample.op)(*args, **kwargs)
    torch.cuda.synchronize()
    print(f"{len(calls)} calls")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", default=",".join(TOOLS), help="default: all four")
    parser.add_argument("--ops", default="", help="default: every op")
    parser.add_argument("--calls", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    only = [op for op in args.ops.split(",") if op]
    if args.calls:
        run_calls(only, args.small)
        return 0
    if shutil.which("compute-sanitizer") is None:
        print("sanitize: compute-sanitizer was not found; it comes with CUDA", file=sys.stderr)
        return 2
    # Every tensor gets its own allocation, so that an access outside of it is found.
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    reports = 0
    for tool in args.tools.split(","):
        start = time.monotonic()
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable]
        # racecheck misreads pipelines: it misses that a stage is released after the warp's reads.
        small = ["--small"] if tool == "racecheck" else []
        done = subprocess.run(
            [*command, __file__, "--calls", "--ops", args.ops, *small],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        lines = done.stdout.strip().splitlines()
        if done.returncode or any("SUMMARY" in line and " 0 " not in line for line in lines):
            reports += 1
            reports = [line for line in lines if "at " in line and "Host Frame" not in line]
            print("\n".join(list(dict.fromkeys(reports))[:30]))
        seconds = time.monotonic() - start
        print(f"{tool}: {lines[-1] if lines else 'no output'} ({seconds:.0f} s)", flush=True)
    return 1 if reports else 0


if __name__ == "__main__":
    sys.exit(main())
