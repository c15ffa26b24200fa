"""compute-sanitizer over the sample calls of every op: memcheck, racecheck, initcheck, synccheck.

    python benchmarks/sanitize.py [--tools memcheck,racecheck] [--ops attention,linear]

Exits 1 where a tool reports anything. The calls are those of tests/samples.py, in every dtype.
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


def run_calls(only: list[str]) -> None:
    """Every sample call on the GPU; what compute-sanitizer watches."""
    sys.path.insert(0, str(ROOT / "tests"))
    import torch

    from samples import SAMPLES, call, dtypes

    calls = 0
    for op, samples in SAMPLES.items():
        if only and op not in only:
            continue
        for sample in samples:
            for dtype in dtypes("cuda"):
                args, kwargs = sample.make("cuda", dtype)
                call(op)(*args, **kwargs)
                calls += 1
    torch.cuda.synchronize()
    print(f"{calls} calls")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", default=",".join(TOOLS), help="default: all four")
    parser.add_argument("--ops", default="", help="default: every op")
    parser.add_argument("--calls", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    only = [op for op in args.ops.split(",") if op]
    if args.calls:
        run_calls(only)
        return 0
    if shutil.which("compute-sanitizer") is None:
        print("sanitize: compute-sanitizer was not found; it comes with CUDA", file=sys.stderr)
        return 2
    # Every tensor gets an allocation of its own, so that a step outside of one is seen.
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    reports = 0
    for tool in args.tools.split(","):
        start = time.monotonic()
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable]
        done = subprocess.run(
            [*command, __file__, "--calls", "--ops", args.ops],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        lines = done.stdout.strip().splitlines()
        if done.returncode or any("SUMMARY" in line and " 0 " not in line for line in lines):
            reports += 1
            told = [line for line in lines if "at " in line and "Host Frame" not in line]
            print("\n".join(list(dict.fromkeys(told))[:30]))
        seconds = time.monotonic() - start
        print(f"{tool}: {lines[-1] if lines else 'no output'} ({seconds:.0f} s)", flush=True)
    return 1 if reports else 0


if __name__ == "__main__":
    sys.exit(main())
