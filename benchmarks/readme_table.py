"""Writes the tables and the pictures of the results.

    python benchmarks/readme_table.py [--check]

benchmarks/results/README.md has every case and a picture of each family, README.md has one row a
kind of case, and docs/images/speed.svg draws most of these rows. All are made from
benchmarks/results/*/*.json. With --check nothing is written, and the exit status is 1 where a page
differs from the results.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from statistics import median
from typing import Any

from readme_picture import Bar, svg
from readme_rows import SUMMARY, SUMMARY_FOLDER, Summary

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path("benchmarks") / "results"
FAMILIES = {
    "models": "Training of Llama and Qwen3",
    "encoders": "Training of encoders and of Qwen3.5",
    "generate": "Generation with Llama 1.2B and GPT-2 124M",
    "invariance": "Cost of equal bits in every batch",
    "attention": "Attention",
    "attention_masks": "Attention under masks",
    "attention_bias": "Attention with a bias or ALiBi",
    "attention_wide": "Attention with head dims above 256",
    "varlen": "Attention of packed sequences",
    "matmul": "Linear layers",
    "matmul_training": "Linear layers, forward and backward",
    "losses": "The head of a language model and its loss",
    "rotary": "Rotary position embedding",
    "gated_pair": "Two weights and their gate",
    "experts": "Layers of experts",
    "projections": "Several weights of one norm",
    "gpt2": "GPT-2 124M training",
    "curves": "Shares of the roofline",
    "int4": "4-bit weights",
    "norms": "Norms of rows",
    "hybrids": "Ops of hybrid models",
    "rows": "Softmax and sums over rows",
    "pointwise": "Pointwise ops",
    "conv2d": "Convolution",
    "scalar_attention": "Attention of scalars",
    "cpu": "Every op on a CPU",
    "quantise": "Quantising a model",
    "distributed": "Several GPUs",
}
# Peers that users may choose in torchweld's place; the other PEERS are yardsticks.
RIVALS = {
    "liger": "Liger",
    "Liger": "Liger",
    "FlashAttention 4": "FlashAttention 4",
    "quack": "quack",
    "CCE": "Apple's CCE",
    "sdpa cudnn": "SDPA cuDNN",
    "sdpa flash": "SDPA flash",
    "sdpa efficient": "SDPA efficient",
    "sdpa": "SDPA",
    "flex": "FlexAttention",
    "torch varlen": "torch's varlen_attn",
    "torch's own, flash": "torch's context parallel, flash",
    "torch's own, cudnn": "torch's context parallel, cuDNN",
    "cublas": "cuBLAS",
    "cublas bare": "cuBLAS, matmul alone",
    "int4pack_mm": "torch's int4pack_mm",
    "batch_invariant_ops": "Thinking Machines' batch_invariant_ops",
    "F.conv2d": "F.conv2d",
    "torch": "torch's op",
    "eager": "torch's ops",
    "torch.compile": "torch.compile",
    "HF eager": "Hugging Face's module",
    "stock sdpa": "the Hugging Face model with SDPA",
    "compiled blocks": "the same model with compiled blocks",
    "stock": "the same in torch's modules",
    "grouped_mm": "transformers' grouped_mm experts",
    "alone": "one GPU",
}
PEERS = {
    **RIVALS,
    "move": "a pass with the same traffic",
    "move 3": "moving three tensors",
    "plan": "`make plan`",
    "product": "FSDP2's cost times tensor parallel's",
    "matmul alone": "the matmul alone",
    "balanced": "balanced routing",
    "default choice": "the same outside of the mode",
}
DRAWN_BY_BENCH = ("curves", "distributed")  # bench.py draws their charts

BEGIN = "<!-- made by benchmarks/readme_table.py -->"
END = "<!-- end of the table -->"

RESULTS_HEAD = """# Results

Made by `benchmarks/readme_table.py` from the files in this folder; do not edit.

A ratio is torchweld's time divided by a peer's time in the same run: below 1, torchweld is
faster. Above each table are the median of the ratios and, in brackets, the lowest and the highest,
for everything that can be used in torchweld's place. Times are medians over rounds in which every
variant runs once, with the L2 cache flushed before each call. A row with a wrong answer has no
ratio.

"copy", "fill", "sum" and "moving three tensors" move the same bytes without computing. "read
floor" and "exp2 floor" are computed from the rates of memory and of the exponential unit.
"unpadded" is the same attention without left padding. With up to 16 tokens, 4-bit weights are
timed as in generation: several weights in turn, in one CUDA graph. GPT-2's peak memory is in MiB,
not in microseconds.

With several GPUs, a time is that of the slowest GPU. Training steps there, and generation, are
timed one model after the other. The single GPU gets the whole problem, or its own share if every
GPU has a batch. `make plan` predicts from the speed of one GPU and the measured bandwidth of an
all-gather."""

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


def _measured_case(row: dict[str, Any]) -> str:
    """The case of a row, without the peer: a row for each further peer is "case over peer"."""
    return row["case"].replace(f" over {row['against']}", "")


def _ratios(report: Report) -> dict[tuple[str, str, str], list[float]]:
    """The ratios to the other libraries.

    Returns:
        {(its name, "time" or "memory", kind of case): the ratio of every case}
    """
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in report["rows"]:
        case = _measured_case(row)
        measure = "memory" if "peak memory" in case else "time"
        for peer, us in row["peers_us"].items():
            if peer in RIVALS and row["ratio"] is not None:
                key = RIVALS[peer], measure, case.partition(" (")[0]
                found.setdefault(key, {})[case] = row["ours_us"] / us
    return {key: list(ratios.values()) for key, ratios in found.items()}


def _gains(report: Report) -> list[str]:
    """The gains of a user: a line for each name in RIVALS."""
    found: dict[str, dict[str, list[float]]] = {}
    for (name, measure, _), ratios in _ratios(report).items():
        found.setdefault(name, {}).setdefault(measure, []).extend(ratios)
    lines = []
    for name in dict.fromkeys(name for name in RIVALS.values() if name in found):
        texts = []
        for measure, ratios in found[name].items():
            ends = f" ({_range_text(ratios)})" if len(ratios) > 1 else ""
            texts.append(f"{median(ratios):.2f} of its {measure}{ends}")
        lines.append(f"- {name[0].upper()}{name[1:]}: {', '.join(texts)}")
    return lines


def _family(folder: str, family: str, report: Report) -> list[str]:
    """The gain and the picture of one family, and its rows, folded."""
    commit = (report["commit"] or "unknown")[:7]
    where = f"torch {report['torch']}, {report['date']}, commit {commit}"
    if tests := report["tests"]:
        where += ", tests there: " + ", ".join(f"{count} {kind}" for kind, count in tests.items())
    title = FAMILIES.get(family, family)
    lines = [f"### {title}", ""]
    if gains := _gains(report):
        lines += [*gains, ""]
    if picture := _picture_of(family, report):
        lines += [f"![{title}]({folder}/{picture})", ""]
    lines += [
        f"<details><summary>{len(report['rows'])} rows; {where}</summary>",
        "",
        "| case | torchweld, us | time over | ratio | torch's ops over the same |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in report["rows"]:
        peers, against = row["peers_us"], row["against"]
        eager = peers.get("torch", peers.get("eager"))
        other = None if eager is None or against in ("torch", "eager") else eager / peers[against]
        ratio = "wrong" if row["ratio"] is None else _number(row["ratio"])
        lines.append(
            f"| {row['case']} | {row['ours_us']:.1f} | {PEERS.get(against, against)} | {ratio} "
            f"| {_number(other)} |"
        )
    return [*lines, "", "</details>", ""]


def _picture_of(family: str, report: Report) -> str | None:
    """The name of a family's picture, or None if nothing can be used in torchweld's place."""
    if family in DRAWN_BY_BENCH:
        return f"{family}.png"
    return f"{family}.svg" if _ratios(report) else None


def family_picture(family: str, report: Report) -> str:
    """A bar for each kind of case and peer."""
    bars = [
        Bar(kind + ", peak memory" * (measure == "memory"), name, ratios)
        for (name, measure, kind), ratios in sorted(_ratios(report).items(), key=_kind_first)
    ]
    title = FAMILIES.get(family, family)
    return svg(f"{title}: relative to others on {report['device']} (lower is better)", bars)


def _kind_first(item: tuple[tuple[str, str, str], list[float]]) -> tuple[str, bool, int]:
    name, measure, kind = item[0]
    return kind, measure != "time", list(RIVALS.values()).index(name)


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


def matching_ratios(summary: Summary, rows: list[dict[str, Any]]) -> list[float] | None:
    """The ratios to the peer of the cases that match, or None if an answer is wrong.

    Raises:
        ValueError: No case matches.
    """
    ratios = {}
    for row in rows:
        case = _measured_case(row)
        peers = [name for name in row["peers_us"] if re.fullmatch(summary.peer, name)]
        if not peers or not re.fullmatch(summary.cases, case):
            continue
        if row["ratio"] is None:
            return None
        ratios[case] = row["ours_us"] / row["peers_us"][peers[0]]
    if not ratios:
        raise ValueError(f"no case matches the README's row {summary.what!r} over {summary.name}")
    return list(ratios.values())


def _range_text(ratios: list[float] | None) -> str:
    if ratios is None:
        return "wrong"
    low, high = (f"{ratio:.2f}" for ratio in (min(ratios), max(ratios)))
    return low if low == high else f"{low} to {high}"


def _summary_ratios() -> list[tuple[Summary, list[float] | None]]:
    reports = read_reports()
    rows = [reports[summary.folder][summary.family]["rows"] for summary in SUMMARY]
    return [(each, matching_ratios(each, found)) for each, found in zip(SUMMARY, rows, strict=True)]


def summary_table() -> str:
    """The README's table."""
    lines = ["| what | X | time relative to X |", "| --- | --- | --- |"]
    for summary, ratios in _summary_ratios():
        lines.append(f"| {summary.what} | {summary.name} | {_range_text(ratios)} |")
    return "\n".join(lines)


def picture() -> str:
    """The README's picture; a row with a wrong answer is left out."""
    bars = [
        Bar(summary.what, summary.name, ratios)
        for summary, ratios in _summary_ratios()
        if summary.pictured and ratios is not None
    ]
    return svg("Time relative to the alternative on an H200 (lower is better)", bars)


def pages() -> dict[Path, str]:
    """The expected text of the pages, by path.

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
    pictures = {
        ROOT / RESULTS / folder / f"{family}.svg": family_picture(family, report)
        for folder, families in read_reports().items()
        for family, report in families.items()
        if _picture_of(family, report) == f"{family}.svg"
    }
    return {
        readme: fresh,
        ROOT / RESULTS / "README.md": results_page(),
        ROOT / "docs" / "images" / "speed.svg": picture(),
        **pictures,
    }


def stale_pages() -> dict[Path, str]:
    """The pages that differ from the results, and their expected text."""
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
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(fresh, encoding="utf-8")
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
