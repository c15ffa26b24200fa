"""Rewrites the speed tables of README.md from benchmarks/results.

    python benchmarks/readme_table.py [--check]

With --check nothing is written; exits 1 where the README is not what the results say.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "nvidia-h200"
FAMILIES = {
    "attention": "Attention",
    "matmul": "Linear layers",
    "gpt2": "GPT-2 124M training",
    "int4": "4-bit weights",
    "rows": "Softmax and sums over rows",
    "pointwise": "Pointwise ops",
    "conv2d": "Convolution",
    "scalar_attention": "Attention of scalars",
}
BEGIN = "<!-- made by benchmarks/readme_table.py from benchmarks/results/nvidia-h200 -->"
END = "<!-- end of the table -->"
NAMES = {"move 3": "moving three tensors", "cublas bare": "cuBLAS, the bare product"}


def _family(title: str, report: dict[str, Any]) -> str:
    """The rows of one family, folded away behind how many are within their target."""
    rows = report["rows"]
    judged = [row for row in rows if row["target"] is not None]
    within = sum(row["ratio"] is not None and row["ratio"] <= row["target"] for row in judged)
    lines = [
        f"<details><summary>{title}: {within} of {len(judged)} targets met</summary>",
        "",
        "| case | time over | ratio | target | eager over the same |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        peers, against = row["peers_us"], row["against"]
        eager = peers.get("torch", peers.get("eager"))
        other = "" if eager is None else f"{eager / peers[against]:.2f}"
        ratio = "wrong" if row["ratio"] is None else f"{row['ratio']:.2f}"
        target = "" if row["target"] is None else f"{row['target']:.2f}"
        over = NAMES.get(against, against)
        lines.append(f"| {row['case']} | {over} | {ratio} | {target} | {other} |")
    return "\n".join([*lines, "", "</details>"])


def tables() -> str:
    """Every family as Markdown, and where it was measured."""
    reports = {f: json.loads((RESULTS / f"{f}.json").read_text()) for f in FAMILIES}
    commits = {report["commit"][:7] for report in reports.values()}
    any_report = reports["attention"]
    where = f"{any_report['device']}, torch {any_report['torch']}, {any_report['date']}"
    if len(commits) == 1:
        where += f", commit {commits.pop()}."
    else:
        measured = ", ".join(f"{f} at {r['commit'][:7]}" for f, r in reports.items())
        where += f": {measured}."
    return "\n".join([*(_family(FAMILIES[f], reports[f]) for f in FAMILIES), "", where])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if stale")
    args = parser.parse_args(argv)
    readme = ROOT / "README.md"
    text = readme.read_text()
    fresh = re.sub(
        f"{re.escape(BEGIN)}.*?{re.escape(END)}",
        lambda _: f"{BEGIN}\n{tables()}\n{END}",
        text,
        flags=re.S,
    )
    if args.check:
        return int(fresh != text)
    readme.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
