"""Rewrites the speed table of README.md from benchmarks/results.

    python benchmarks/readme_table.py [--check]

With --check nothing is written; exits 1 where the README is not what the results say.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "nvidia-h200"
FAMILIES = ("attention", "matmul", "gpt2", "rows", "scalar_attention", "pointwise")
BEGIN = "<!-- made by benchmarks/readme_table.py from benchmarks/results/nvidia-h200 -->"
END = "<!-- end of the table -->"
NAMES = {"move 3": "moving three tensors", "cublas bare": "cuBLAS, the bare product"}


def table() -> str:
    """The rows as Markdown."""
    measured = []
    lines = ["| case | time over | ratio | eager over the same |", "| --- | --- | --- | --- |"]
    for family in FAMILIES:
        report = json.loads((RESULTS / f"{family}.json").read_text())
        measured.append(f"{family} at {report['commit'][:7]}")
        for row in report["rows"]:
            peers, against = row["peers_us"], row["against"]
            eager = peers.get("torch", peers.get("eager"))
            other = "" if eager is None else f"{eager / peers[against]:.2f}"
            ratio = "wrong" if row["ratio"] is None else f"{row['ratio']:.2f}"
            lines.append(f"| {row['case']} | {NAMES.get(against, against)} | {ratio} | {other} |")
    where = f"{report['device']}, torch {report['torch']}, {report['date']}: {', '.join(measured)}."
    return "\n".join([*lines, "", where])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if stale")
    args = parser.parse_args(argv)
    readme = ROOT / "README.md"
    text = readme.read_text()
    fresh = re.sub(
        f"{re.escape(BEGIN)}.*?{re.escape(END)}",
        lambda _: f"{BEGIN}\n{table()}\n{END}",
        text,
        flags=re.S,
    )
    if args.check:
        return int(fresh != text)
    readme.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
