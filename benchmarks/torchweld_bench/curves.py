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
from torchweld.tuning.timer import Timing, interleaved
from torchweld_bench.common import each_of, in_turn, judged, read_rate, sdpa
from torchweld_bench.results import Report, Row, make_row

_ROUNDS = 7
_ROOFLINE = "roofline"
_FLOPS = {(8, 0): 312e12, (9, 0): 989e12}  # peak of dense bf16 products, by compute capability
_TOKENS = 16384  # the number of tokens per batch, for every sequence length
_SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
_SIZES = (256, 512, 1024, 2048, 4096, 8192)
_CACHES = (512, 1024, 2048, 4096, 8192, 16384, 32768)
# the size of all caches that the calls rotate through; several times any L2 cache
_CACHE_BYTES = 512 << 20
_BACK_ENDS = {"sdpa cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa flash": SDPBackend.FLASH_ATTENTION}
_COLOURS = {
    "ours": "#4c72b0", "sdpa cudnn": "#dd8452", "sdpa flash": "#55a868", "flex": "#8172b3",
    "eager": "#dd8452", "torch.compile": "#8172b3", "cublas bare": "#937860",
}  # fmt: skip


def _randn(*sizes: int, std: float = 1.0) -> Tensor:
    return (torch.randn(*sizes, device="cuda") * std).bfloat16()


def _row(case: str, us: dict[str, Timing], roof_us: float, out: Tensor, *others: Tensor) -> Row:
    """Errors of a result, given torch's result and the one in fp64 as `others`."""
    eager, exact = others
    errors = judged(out, eager, exact, 3 * (eager.double() - exact).abs().max().item() + 1e-6)
    times = {**us, _ROOFLINE: Timing(roof_us, roof_us, roof_us)}
    return make_row(case, times, against=_ROOFLINE, **errors)


def _seen(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
    return row >= key


def _attention(seqlen: int, flex: Callable[..., Tensor], flops: float) -> Row:
    from torch.nn.attention.flex_attention import create_block_mask

    batch, nheads, dim = _TOKENS // seqlen, 16, 128
    qkv = [_randn(batch, nheads, seqlen, dim) for _ in range(3)]
    mask = create_block_mask(_seen, None, None, seqlen, seqlen, device="cuda")
    calls: dict[str, Callable[[], object]] = {
        "ours": lambda: ops.attention(*qkv, causal=True),
        "flex": lambda: flex(*qkv, block_mask=mask),
    }
    for name, backend in _BACK_ENDS.items():
        calls[name] = partial(sdpa, backend, *qkv, True)
    first = [t[:1, :1, :512] for t in qkv]
    exact = sdpa(SDPBackend.MATH, *(t.double() for t in first), True)
    eager = sdpa(SDPBackend.MATH, *first, True)
    out = ops.attention(*qkv, causal=True)[:1, :1, :512]
    # two products over the visible half of the (row, key) pairs
    work = 2.0 * batch * nheads * seqlen * seqlen * dim
    us = interleaved(calls, device="cuda", rounds=_ROUNDS)
    case = f"attention ({nheads} heads, {dim}) bfloat16 causal, {_TOKENS} tokens, over seqlen"
    return _row(f"{case}: {seqlen}", us, work / flops * 1e6, out, eager, exact)


def _gelu_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def _linear(size: int, compiled: Callable[..., Tensor], flops: float, rate: float) -> Row:
    args = [_randn(size, size), _randn(size, size, std=size**-0.5), _randn(size)]
    first = [args[0][:64], *args[1:]]
    calls: dict[str, Callable[[], object]] = {
        "ours": lambda: ops.linear(*args, activation="gelu_tanh"),
        "eager": partial(_gelu_linear, *args),
        "torch.compile": partial(compiled, *args),
        "cublas bare": partial(F.linear, *args[:2]),
    }
    exact = _gelu_linear(*(t.double() for t in first))
    out = ops.linear(*args, activation="gelu_tanh")[:64]
    roof_us = max(2.0 * size**3 / flops * 1e6, 3 * 2 * size**2 / rate)
    us = interleaved(calls, device="cuda", rounds=_ROUNDS)
    case = f"linear (N, N, N) bfloat16 gelu_tanh, over N: {size}"
    return _row(case, us, roof_us, out, _gelu_linear(*first), exact)


def _decode(seqlen: int, rate: float) -> Row:
    batch, nheads, nheads_kv, dim = 16, 32, 8, 128
    cache_bytes = 4 * batch * nheads_kv * seqlen * dim
    turns = -(-_CACHE_BYTES // cache_bytes)
    q = _randn(batch, nheads, 1, dim)
    caches = [[_randn(batch, nheads_kv, seqlen, dim) for _ in range(2)] for _ in range(turns)]
    calls = {"ours": [partial(ops.attention, q, *kv) for kv in caches]}
    for name, backend in _BACK_ENDS.items():
        calls[name] = [partial(sdpa, backend, q, *kv) for kv in caches]
    variants = {name: in_turn(own, turns) for name, own in calls.items()}
    us = each_of(turns, interleaved(variants, device="cuda", rounds=_ROUNDS))
    first = [t[:1] for t in (q, *caches[0])]
    exact = sdpa(SDPBackend.MATH, *(t.double() for t in first))
    case = f"attention decode ({batch}, {nheads}, {nheads_kv}, S, {dim}) bfloat16, over S"
    out = ops.attention(q, *caches[0])[:1]
    eager = sdpa(SDPBackend.MATH, *first)
    return _row(f"{case}: {seqlen}", us, cache_bytes / rate, out, eager, exact)


def rows() -> Iterator[Row]:
    """For every point, the time of ours, of the peers, and at the roofline."""
    flops = _FLOPS.get(torch.cuda.get_device_capability())
    if flops is None:
        raise SystemExit("torchweld: the rooflines of curves are those of A100, H100 and H200")
    from torch.nn.attention.flex_attention import flex_attention

    rate = read_rate()
    flex = torch.compile(flex_attention, dynamic=False)
    for seqlen in _SEQLENS:
        yield _attention(seqlen, flex, flops)
    compiled = torch.compile(_gelu_linear, dynamic=False)
    for size in _SIZES:
        yield _linear(size, compiled, flops, rate)
    for seqlen in _CACHES:
        yield _decode(seqlen, rate)


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
