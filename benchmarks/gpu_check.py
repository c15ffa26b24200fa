"""Everything that needs a GPU: the whole test suite there, then every benchmark, results written.

    python benchmarks/gpu_check.py [--out benchmarks/results] [--families rows,attention]

Exits 1 where a test fails. The results carry the test counts and the commit that was built.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--families", help="benchmarks to run; default: all that need a GPU")
    parser.add_argument("--workers", default="8", help="processes of the test suite")
    args = parser.parse_args(argv)

    import torch

    if not torch.cuda.is_available():
        print("gpu-check: there is no CUDA GPU here", file=sys.stderr)
        return 2
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", args.workers, str(ROOT / "tests")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    print(tests.stdout)
    last = tests.stdout.strip().splitlines()[-1] if tests.stdout.strip() else ""
    counts = [
        int(found[1]) if (found := re.search(rf"(\d+) {kind}", last)) else 0
        for kind in ("passed", "failed", "skipped")
    ]
    if tests.returncode:
        print("gpu-check: the test suite is not green, nothing is measured", file=sys.stderr)
        return 1
    from torchweld.bench import FAMILIES
    from torchweld.bench import main as bench

    flags = ["--check", "--out", str(args.out), "--tests", ",".join(map(str, counts))]
    on_gpu = [family for family, device in FAMILIES.items() if device == "cuda"]
    families = args.families.split(",") if args.families else on_gpu
    return max(bench([family, *flags]) for family in families)


if __name__ == "__main__":
    sys.exit(main())
