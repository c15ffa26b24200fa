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
RESULTS = ROOT / "benchmarks" / "results" / "nvidia-h200" / "rows.json"
BEGIN = "<!-- made by benchmarks/readme_table.py from benchmarks/results/nvidia-h200/rows.json -->"
END = "<!-- end of the table -->"


def table() -> str:
    """The rows as Markdown."""
    report = json.loads(RESULTS.read_text())
    lines = ["| case | time over | ratio | torch over the same |", "| --- | --- | --- | --- |"]
    for row in report["rows"]:
        torch_us = row["peers_us"].get("torch", row["peers_us"].get("eager"))
        against_us = row["peers_us"][row["against"]]
        against = {"move 3": "moving three tensors"}.get(row["against"], row["against"])
        lines.append(
            f"| {row['case']} | {against} | {row['ratio']:.2f} | {torch_us / against_us:.2f} |"
        )
    where = f"{report['device']}, torch {report['torch']}, {report['date']}."
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
