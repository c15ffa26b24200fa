"""Runs what needs a GPU: the whole test suite, then every benchmark, and writes the results.

    python benchmarks/gpu_check.py [--out benchmarks/results] [--families rows,attention]
    python benchmarks/gpu_check.py --gpus 2

Exits 1 where a test fails. The results carry the test counts and the commit that was built. The
suite uses all GPUs of the machine, a benchmark one. With --gpus: the distributed tests through
NCCL, then the family that torchrun starts.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--families", help="benchmarks to run; default: all that need a GPU")
    parser.add_argument("--workers", type=int, help="processes of the test suite; default: 8 a GPU")
    parser.add_argument("--gpus", type=int, default=1, help="more than 1: what runs on several")
    args = parser.parse_args(argv)

    import torch

    there = torch.cuda.device_count()
    if there < args.gpus:
        print(
            f"gpu-check: {args.gpus} CUDA GPUs are needed, but there are {there}", file=sys.stderr
        )
        return 2
    several = args.gpus > 1
    workers = args.workers or 8 * there
    what = ["-n", str(workers), "--dist", "worksteal", str(ROOT / "tests")]
    if several:
        what = sorted(map(str, (ROOT / "tests").glob("test_distributed_*.py")))
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *what],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **({"TORCHWELD_TEST_DISTRIBUTED": "nccl"} if several else {})},
    )
    print(tests.stdout)
    last = tests.stdout.strip().splitlines()[-1] if tests.stdout.strip() else ""
    counts = [
        int(found[1]) if (found := re.search(rf"(\d+) {kind}", last)) else 0
        for kind in ("passed", "failed", "skipped")
    ]
    if tests.returncode:
        print("gpu-check: the test suite failed, so nothing is measured", file=sys.stderr)
        return 1
    from torchweld_bench import FAMILIES
    from torchweld_bench import main as bench

    flags = ["--check", "--out", str(args.out), "--tests", ",".join(map(str, counts))]
    if several:
        torchrun = ["torch.distributed.run", "--nproc-per-node", str(args.gpus)]
        script = str(ROOT / "benchmarks" / "bench.py")
        command = [sys.executable, "-m", *torchrun, script, "distributed"]
        return subprocess.run([*command, *flags], cwd=ROOT).returncode
    on_gpu = [family for family, device in FAMILIES.items() if device in ("cuda", "any")]
    families = args.families.split(",") if args.families else on_gpu
    return max(bench([family, *flags]) for family in families)


if __name__ == "__main__":
    sys.exit(main())
