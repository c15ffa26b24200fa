"""Shares of the roofline: attention over seqlen, linear over size, decode over cache length."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from torchweld._library import ops
from torchweld.tuning.timer import Timing
from torchweld_bench.attention_decode import BACK_ENDS, attention_calls, drawn_caches
from torchweld_bench.cases import (
    CHECKED_ROWS,
    Call,
    Errors,
    checked,
    compared,
    drawn,
    exactly,
    rotated,
    timed,
)
from torchweld_bench.common import read_rate, sdpa
from torchweld_bench.results import Report, Row

_ROUNDS = 7
_ROOFLINE = "roofline"
_FLOPS = {(8, 0): 312e12, (9, 0): 989e12}  # peak of dense bf16 products, by compute capability
_TOKENS = 16384  # the number of tokens per batch, for every sequence length
_SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
_SIZES = (256, 512, 1024, 2048, 4096, 8192)
_CACHES = (512, 1024, 2048, 4096, 8192, 16384, 32768)
_COLOURS = {
    "ours": "#4c72b0", "sdpa cudnn": "#dd8452", "sdpa flash": "#55a868", "flex": "#8172b3",
    "eager": "#dd8452", "torch.compile": "#8172b3", "cublas bare": "#937860",
}  # fmt: skip


def _row(case: str, us: dict[str, Timing], roof_us: float, errors: Errors) -> Iterator[Row]:
    return compared(case, {**us, _ROOFLINE: exactly(roof_us)}, errors, _ROOFLINE)


def _seen(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
    return row >= key


def _attention(seqlen: int, flex: Callable[..., Tensor], flops: float) -> Iterator[Row]:
    from torch.nn.attention.flex_attention import create_block_mask

    batch, nheads, dim = _TOKENS // seqlen, 16, 128
    qkv = [drawn(batch, nheads, seqlen, dim) for _ in range(3)]
    mask = create_block_mask(_seen, None, None, seqlen, seqlen, device="cuda")
    calls: dict[str, Call] = {
        "ours": lambda: ops.attention(*qkv, causal=True),
        "flex": lambda: flex(*qkv, block_mask=mask),
    }
    for name, backend in BACK_ENDS.items():
        calls[name] = partial(sdpa, backend, *qkv, True)
    first = [t[:1, :1, :512] for t in qkv]
    out = ops.attention(*qkv, causal=True)[:1, :1, :512]
    eager = partial(sdpa, SDPBackend.MATH, causal=True)
    errors = checked(out, eager, first, times=3, plus=1e-6)
    # two products over the visible half of the (row, key) pairs
    work = 2.0 * batch * nheads * seqlen * seqlen * dim
    case = f"attention ({nheads} heads, {dim}) bfloat16 causal, {_TOKENS} tokens, over seqlen"
    return _row(f"{case}: {seqlen}", timed(calls, _ROUNDS), work / flops * 1e6, errors)


def _gelu_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def _linear(size: int, compiled: Callable[..., Tensor], flops: float, rate: float) -> Iterator[Row]:
    args = [drawn(size, size), drawn(size, size, std=size**-0.5), drawn(size)]
    calls: dict[str, Call] = {
        "ours": lambda: ops.linear(*args, activation="gelu_tanh"),
        "eager": partial(_gelu_linear, *args),
        "torch.compile": partial(compiled, *args),
        "cublas bare": partial(F.linear, *args[:2]),
    }
    few = [args[0][:CHECKED_ROWS], *args[1:]]
    errors = checked(calls["ours"]()[:CHECKED_ROWS], _gelu_linear, few, times=3, plus=1e-6)
    roof_us = max(2.0 * size**3 / flops * 1e6, 3 * 2 * size**2 / rate)
    case = f"linear (N, N, N) bfloat16 gelu_tanh, over N: {size}"
    return _row(case, timed(calls, _ROUNDS), roof_us, errors)


def _decode(seqlen: int, rate: float) -> Iterator[Row]:
    batch, nheads, nheads_kv, dim = 16, 32, 8, 128
    q = drawn(batch, nheads, 1, dim)
    caches, cache_bytes = drawn_caches(batch, nheads_kv, seqlen, dim)
    us = rotated(attention_calls(q, caches), len(caches), _ROUNDS)
    out, first = ops.attention(q, *caches[0])[:1], [t[:1] for t in (q, *caches[0])]
    errors = checked(out, partial(sdpa, SDPBackend.MATH), first, times=3, plus=1e-6)
    case = f"attention decode ({batch}, {nheads}, {nheads_kv}, S, {dim}) bfloat16, over S"
    return _row(f"{case}: {seqlen}", us, cache_bytes / rate, errors)


def rows() -> Iterator[Row]:
    """For every point, the time of ours, of the peers, and at the roofline."""
    flops = _FLOPS.get(torch.cuda.get_device_capability())
    if flops is None:
        raise SystemExit("torchweld: the rooflines of curves are those of A100, H100 and H200")
    from torch.nn.attention.flex_attention import flex_attention

    rate = read_rate()
    flex = torch.compile(flex_attention, dynamic=False)
    for seqlen in _SEQLENS:
        yield from _attention(seqlen, flex, flops)
    compiled = torch.compile(_gelu_linear, dynamic=False)
    for size in _SIZES:
        yield from _linear(size, compiled, flops, rate)
    for seqlen in _CACHES:
        yield from _decode(seqlen, rate)


def shares(report: Report) -> dict[str, dict[str, dict[int, float]]]:
    """Shares of the roofline: {picture: {ours or a peer: {size: share}}}."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for row in report.rows:
        case = re.fullmatch(r"(.+): (\d+)", row.case)
        if case is None or row.ratio is None:
            continue
        lines = found.setdefault(case[1], {})
        for name, us in {"ours": row.ours_us, **row.peers_us}.items():
            if name != _ROOFLINE:
                lines.setdefault(name, {})[int(case[2])] = row.peers_us[_ROOFLINE] / us
    return found


def draw(report: Report, path: Path) -> None:
    """Draws shares of the roofline: the tensor cores' rate, or memory's read rate."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    pictures = shares(report)
    figure, grid = plt.subplots(
        1, max(1, len(pictures)), figsize=(5.2 * max(1, len(pictures)), 4.2),
        layout="constrained", squeeze=False,
    )  # fmt: skip
    for axes, (title, lines) in zip(grid[0], pictures.items(), strict=False):
        for name, line in lines.items():
            points = sorted(line.items())
            width = 2.4 if name == "ours" else 1.4
            label = "torchweld" if name == "ours" else name
            axes.plot(*zip(*points, strict=True), "o-", lw=width, label=label, color=_COLOURS[name])
        title, _, size = title.partition(", over ")
        axes.set_xlabel(size)
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 1.15)
        axes.axhline(1.0, color="grey", lw=0.8, ls=":")
        axes.set_title(title, fontsize=8)
        axes.legend(fontsize=8)
    grid[0][0].set_ylabel("share of the roofline (higher is better)")
    figure.suptitle(f"{report.where}, torch {report.torch}, commit {report.commit}", fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)
