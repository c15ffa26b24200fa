"""Writes the tables of results: all of them in benchmarks/results/README.md, a dozen in README.md.

    python benchmarks/readme_table.py [--check]

Both are made of benchmarks/results/*/*.json. With --check nothing is written; exits 1 where a page
is not what the results say.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path("benchmarks") / "results"
FAMILIES = {
    "attention": "Attention",
    "attention_masks": "Attention under masks",
    "matmul": "Linear layers",
    "matmul_training": "Linear layers, forward and backward",
    "gpt2": "GPT-2 124M training",
    "generate": "GPT-2 124M generation",
    "curves": "Shares of the roofline",
    "int4": "4-bit weights",
    "rows": "Softmax and sums over rows",
    "pointwise": "Pointwise ops",
    "conv2d": "Convolution",
    "scalar_attention": "Attention of scalars",
    "cpu": "Every op on a CPU",
    "distributed": "Several GPUs",
}
PEERS = {
    "move 3": "moving three tensors",
    "cublas": "cuBLAS",
    "cublas bare": "cuBLAS, the product alone",
    "sdpa flash": "SDPA flash",
    "sdpa cudnn": "SDPA cuDNN",
    "sdpa efficient": "SDPA efficient",
    "eager": "torch's ops",
    "torch": "torch's op",
    "alone": "one GPU",
    "stock": "the same in torch's modules",
    "plan": "`make plan`",
    "product": "FSDP2's cost times tensor parallel's",
    "matmul alone": "the product alone",
}


SUMMARY_FOLDER = "nvidia-h200"


class Summary(NamedTuple):
    """A row of the README's table: the least and the largest ratio of some cases to a peer.

    Attributes:
        what: the cases in words.
        family: whose results they are in.
        cases: a pattern of whole cases.
        peer: a pattern of the peer's name there.
        name: the peer in words.
        folder: where they lie in benchmarks/results.
    """

    what: str
    family: str
    cases: str
    peer: str
    name: str
    folder: str = SUMMARY_FOLDER


# 16 bits: float16 and bfloat16.
SUMMARY = [
    Summary(
        "attention, bfloat16",
        "attention",
        r"attention .*float16( causal)?",
        "sdpa cudnn",
        "SDPA, cuDNN back end",
    ),
    Summary(
        "attention's gradient, bfloat16",
        "attention",
        r"attention_backward .*float16( causal)?",
        "sdpa cudnn",
        "SDPA, cuDNN back end",
    ),
    Summary(
        "attention and its gradient, float32",
        "attention",
        r"attention\w* .*float32 causal",
        "sdpa efficient",
        "SDPA, memory-efficient back end",
    ),
    Summary(
        "attention, 1 or 4 query rows (generation), bfloat16",
        "attention",
        r"attention decode .*, \d query rows",
        "sdpa cudnn",
        "SDPA, cuDNN back end",
    ),
    Summary(
        "softmax of scores times V, bfloat16",
        "attention",
        r"softmax_matmul .*",
        "eager",
        "torch's softmax and matmul",
    ),
    Summary("softmax and its gradient", "rows", r"softmax.*", "torch", "torch's softmax"),
    Summary(
        "linear and its gradient, bmm, 16 bits",
        "matmul",
        r"(linear|linear_backward|bmm) .*float16",
        "cublas|cublas bare",
        "cuBLAS",
    ),
    Summary(
        "linear and gated linear, float32 at its accuracy",
        "matmul",
        r"linear .*float32|gated_linear .*float32 \w+",
        "cublas bare",
        "cuBLAS, float32",
    ),
    Summary("linear and gated linear, TF32", "matmul", r".* tf32", "cublas bare", "cuBLAS, TF32"),
    Summary(
        "LayerNorm + linear + GELU, 16 bits",
        "matmul",
        r"layer_norm_linear .*float16 \w+",
        "cublas bare",
        "cuBLAS, the product alone",
    ),
    Summary(
        "gated linear, 16 bits",
        "matmul",
        r"gated_linear .*float16 \w+",
        "cublas bare",
        "cuBLAS, the product alone",
    ),
    Summary(
        "gated linear, LayerNorm + linear + GELU, 16 bits",
        "matmul",
        r"(layer_norm_linear|gated_linear) .*float16 \w+",
        "eager",
        "torch's ops one by one",
    ),
    Summary(
        "linear layers, forward and backward, 16 bits",
        "matmul_training",
        r".*, forward and backward",
        "torch.compile",
        "torch.compile",
    ),
    Summary(
        "linear with 4-bit weights, 1 to 16 tokens",
        "int4",
        r"int4 \((1|4|8|16), .*float16",
        "cublas",
        "cuBLAS, 16-bit weights",
    ),
    Summary(
        "linear with 4-bit weights, 256 tokens or more",
        "int4",
        r"int4 \((256|1024|4096), .*float16",
        "cublas",
        "cuBLAS, 16-bit weights",
    ),
    Summary(
        "GPT-2 124M, a training step in bfloat16",
        "gpt2",
        r"gpt2 training step .* bfloat16",
        "stock sdpa",
        "Hugging Face's model, SDPA, eager",
    ),
    Summary(
        "peak memory of that step (not time)",
        "gpt2",
        r"gpt2 training step .* peak memory, MiB",
        "stock sdpa",
        "Hugging Face's model, SDPA, eager",
    ),
    Summary(
        "attention and its gradient, context parallel on 2 H100s",
        "distributed",
        r"attention and its gradient .*",
        "alone",
        "one GPU",
        "nvidia-h100-80gb-hbm3-x2",
    ),
    Summary(
        "GPT-2 of 48 layers, a step, tensor parallel on 2 H100s (in a CUDA graph the least)",
        "distributed",
        r"gpt2(-xl| of 48 layers,) training step .*",
        "alone",
        "one GPU",
        "nvidia-h100-80gb-hbm3-x2",
    ),
]
BEGIN = "<!-- made by benchmarks/readme_table.py -->"
END = "<!-- end of the table -->"

RESULTS_HEAD = """# Results

Made by `benchmarks/readme_table.py` from the files beside it; don't edit it.

A ratio is the time of torchweld over that of a peer in the same run: below 1 is faster. Times are
medians of rounds in which every variant runs once, with the L2 cache flushed before each. A target
is the most that a ratio may be (`benchmarks/targets.toml`). A row whose answer is wrong has no
ratio.

"copy", "fill", "sum" and "moving three tensors" are the time that the memory itself needs; "read
floor" and "exp2 floor" are computed from the rates of memory and of the exponential unit.
"unpadded" is the same attention without left padding. With up to 16 tokens, 4-bit weights are timed
as tokens are generated: weights that take turns, in one CUDA graph. GPT-2's peak memory is in MiB,
not in microseconds.

On several GPUs a time is that of the slowest one. Training steps there, and generation, are timed
model after model. One GPU is given what all share, or its own part where each has a batch.
`make plan` predicts from one GPU's speed and the measured bandwidth of a gather."""

Report = dict[str, Any]


def read_reports() -> dict[str, dict[str, Report]]:
    """The result files: {folder: {family: report}}, in the order of the pages."""
    reports: dict[str, dict[str, Report]] = {}
    for path in (ROOT / RESULTS).glob("*/*.json"):
        reports.setdefault(path.parent.name, {})[path.stem] = json.loads(path.read_text())
    folders = sorted(reports, key=lambda folder: (folder != SUMMARY_FOLDER, folder))
    order = [*FAMILIES, *sorted({f for families in reports.values() for f in families})]
    return {
        folder: {family: reports[folder][family] for family in families}
        for folder in folders
        for families in [sorted(reports[folder], key=order.index)]
    }


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _within(row: dict[str, Any]) -> bool:
    return row["ratio"] is not None and row["ratio"] <= row["target"]


def _family(folder: str, family: str, report: Report) -> list[str]:
    """The rows of one family, folded away behind how many are within their target."""
    judged = [row for row in report["rows"] if row["target"] is not None]
    met = sum(map(_within, judged))
    commit = (report["commit"] or "unknown")[:7]
    where = f"torch {report['torch']}, {report['date']}, commit {commit}"
    if tests := report["tests"]:
        where += ", tests there: " + ", ".join(f"{count} {kind}" for kind, count in tests.items())
    share = f"{met} of {len(judged)} targets met" if judged else "no targets"
    title = f"{FAMILIES.get(family, family)}: {share}"
    lines = [
        f"<details><summary>{title}</summary>",
        "",
        f"{where}. [Picture]({folder}/{family}.png)",
        "",
        "| case | torchweld, us | time over | ratio | target | torch's ops over the same |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in report["rows"]:
        peers, against = row["peers_us"], row["against"]
        eager = peers.get("torch", peers.get("eager"))
        other = None if eager is None or against in ("torch", "eager") else eager / peers[against]
        ratio = "wrong" if row["ratio"] is None else _number(row["ratio"])
        lines.append(
            f"| {row['case']} | {row['ours_us']:.1f} | {PEERS.get(against, against)} | {ratio} "
            f"| {_number(row['target'])} | {_number(other)} |"
        )
    return [*lines, "", "</details>"]


def results_page() -> str:
    """benchmarks/results/README.md."""
    lines = [RESULTS_HEAD]
    for folder, families in read_reports().items():
        first = next(iter(families.values()))
        several = f"{first['gpus']} x " if first.get("gpus", 1) > 1 else ""
        lines += ["", f"## {several}{first['device']}", ""]
        for family, report in families.items():
            lines += _family(folder, family, report)
    return "\n".join(lines) + "\n"


def ratio_range(summary: Summary, rows: list[dict[str, Any]]) -> str:
    """The least and the largest ratio to the peer over the cases that match.

    Raises:
        ValueError: No case matches.
    """
    ratios = []
    for row in rows:
        peers = [name for name in row["peers_us"] if re.fullmatch(summary.peer, name)]
        if not peers or not re.fullmatch(summary.cases, row["case"]) or " over " in row["case"]:
            continue
        if row["ratio"] is None:
            return "wrong"
        ratios.append(row["ours_us"] / row["peers_us"][peers[0]])
    if not ratios:
        raise ValueError(f"no case matches the README's row {summary.what!r} over {summary.name}")
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return low if low == high else f"{low} to {high}"


def summary_table() -> str:
    """The README's table."""
    reports = read_reports()
    lines = ["| what | X | time of torchweld / time of X |", "| --- | --- | --- |"]
    for summary in SUMMARY:
        ratios = ratio_range(summary, reports[summary.folder][summary.family]["rows"])
        lines.append(f"| {summary.what} | {summary.name} | {ratios} |")
    return "\n".join(lines)


def pages() -> dict[Path, str]:
    """What the pages should hold, by path.

    Raises:
        ValueError: README.md has not one place for the table.
    """
    readme = ROOT / "README.md"
    fresh, places = re.subn(
        f"{re.escape(BEGIN)}.*?{re.escape(END)}",
        lambda _: f"{BEGIN}\n{summary_table()}\n{END}",
        readme.read_text(encoding="utf-8"),
        flags=re.S,
    )
    if places != 1:
        raise ValueError(f"README.md must have one table between {BEGIN} and {END}")
    return {readme: fresh, ROOT / RESULTS / "README.md": results_page()}


def stale_pages() -> dict[Path, str]:
    """Those of the pages that are not what the results say, and what they should hold."""
    return {
        path: fresh
        for path, fresh in pages().items()
        if not path.is_file() or path.read_text(encoding="utf-8") != fresh
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if stale")
    args = parser.parse_args(argv)
    stale = stale_pages()
    for path, fresh in stale.items():
        if args.check:
            print(f"{path.relative_to(ROOT)} is not what the results say", file=sys.stderr)
        else:
            path.write_text(fresh, encoding="utf-8")
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
