"""The row kernels on a GPU, against a copy of the same tensor and torch's own ops."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from torchweld._library import ops
from torchweld.tuning.timer import interleaved
from torchweld_bench.common import dtype_text, judged, two_roundings
from torchweld_bench.results import Row, make_row

_BYTES = 256 << 20
_CHECKED_ROWS = 64
_COMPILED = "torch.compile"
_LONG = 65536  # torch reads rows of at least this length more than once
_SUMS = (
    (1 << 20, 64),
    (65536, 1024),
    (4096, 65536),
    (64, 1 << 22),
    (8, 1 << 22),
    (1, 1 << 22),
    (4, 1 << 28),
)


def _softmax(
    rows: int, n: int, dtype: torch.dtype, targets: dict[str, float], *others: str
) -> Iterator[Row]:
    """A row against a copy, and one against each other peer."""
    x = torch.randn(rows, n, device="cuda", dtype=dtype) * 2
    y = torch.empty_like(x)
    reference = x[:_CHECKED_ROWS].double().softmax(-1)
    case = f"softmax ({rows}, {n}) {dtype_text(dtype)}"
    calls = {
        "ours": lambda: ops.softmax(x),
        "copy": lambda: y.copy_(x),
        "torch": lambda: torch.softmax(x, -1),
    }
    if _COMPILED in others:
        compiled = torch.compile(lambda x: torch.softmax(x, -1))
        calls[_COMPILED] = lambda: compiled(x)
    row = make_row(
        case,
        interleaved(calls, device="cuda"),
        against="copy",
        target=targets.get(case),
        **judged(ops.softmax(x)[:_CHECKED_ROWS], torch.softmax(x[:_CHECKED_ROWS], -1), reference),
    )
    yield row
    for peer in others:
        yield row.over(peer, targets)


def _softmax_backward(n: int, dtype: torch.dtype, targets: dict[str, float]) -> Row:
    rows = _BYTES // (n * dtype.itemsize)
    y = torch.randn(rows, n, device="cuda", dtype=dtype).softmax(-1)
    dy = torch.randn_like(y)
    out = torch.empty_like(y)
    part_y, part_dy = y[:_CHECKED_ROWS].double(), dy[:_CHECKED_ROWS].double()
    reference = part_y * (part_dy - (part_y * part_dy).sum(-1, keepdim=True))
    case = f"softmax_backward ({rows}, {n}) {dtype_text(dtype)}"
    eager = torch._softmax_backward_data(dy, y, -1, dtype)[:_CHECKED_ROWS]
    return make_row(
        case,
        interleaved(
            {
                "ours": lambda: ops.softmax_backward(dy, y),
                "move 3": lambda: torch.add(y, dy, out=out),
                "torch": lambda: torch._softmax_backward_data(dy, y, -1, dtype),
            },
            device="cuda",
        ),
        against="move 3",
        target=targets.get(case),
        **judged(ops.softmax_backward(dy, y)[:_CHECKED_ROWS], eager, reference),
    )


def _causal_softmax(
    batch: int, seqlen: int, padded: bool, dtype: torch.dtype, targets: dict[str, float]
) -> Row:
    x = torch.randn(batch, seqlen, seqlen, device="cuda", dtype=dtype)
    y = torch.empty_like(x)
    pad = seqlen // 2 if padded else 0
    leftpad = torch.full((batch,), pad, device="cuda", dtype=torch.int32)
    hidden = torch.ones(seqlen, seqlen, device="cuda", dtype=torch.bool).triu(1)
    hidden[:, :pad] = True

    def eager(x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(hidden, float("-inf")).softmax(-1)

    reference = eager(x[:1].double()).nan_to_num(0.0)
    case = f"causal_softmax ({batch}, {seqlen}, {seqlen}) {dtype_text(dtype)}"
    if padded:
        case += " half padded"
    return make_row(
        case,
        interleaved(
            {
                "ours": lambda: ops.causal_softmax(x, leftpad),
                "copy": lambda: y.copy_(x),
                "eager": lambda: eager(x),
            },
            device="cuda",
            rounds=11,
        ),
        against="copy",
        target=targets.get(case),
        **judged(
            ops.causal_softmax(x[:1], leftpad[:1]),
            eager(x[:1]).nan_to_num(0.0),
            reference,
            two_roundings(dtype, 1.0),
        ),
    )


def _row_sum(rows: int, n: int, dtype: torch.dtype, targets: dict[str, float]) -> Row:
    x = torch.randn(rows, n, device="cuda", dtype=dtype)
    reference = x.sum(-1, dtype=torch.float64)
    case = f"row_sum ({rows}, {n}) {dtype_text(dtype)}"
    return make_row(
        case,
        interleaved(
            {"ours": lambda: ops.row_sum(x), "torch": lambda: torch.sum(x, -1)},
            device="cuda",
        ),
        against="torch",
        target=targets.get(case),
        # A sum of n standard normals is about sqrt(n), and never six times that here.
        **judged(ops.row_sum(x), torch.sum(x, -1), reference, two_roundings(dtype, 6 * n**0.5)),
    )


def rows(targets: dict[str, float]) -> Iterator[Row]:
    """Measures every case of the family, one per iteration."""
    dtypes = (torch.float32, torch.bfloat16)
    for dtype in dtypes:
        for n in (256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 262144, 1023, 4097, 32769):
            row_count = _BYTES // (n * dtype.itemsize)
            yield from _softmax(row_count, n, dtype, targets, *(["torch"] if n >= _LONG else []))
    yield from _softmax(1823, 781, torch.float32, targets, "torch", _COMPILED)
    for dtype in dtypes:
        for n in (1024, 4096, 16384, 32768, 65536, 262144):
            yield _softmax_backward(n, dtype, targets)
    for dtype in dtypes:
        for batch, seqlen in ((96, 1024), (32, 4096)):
            for padded in (False, True):
                yield _causal_softmax(batch, seqlen, padded, dtype, targets)
    for dtype in dtypes:
        for row_count, n in _SUMS:
            yield _row_sum(row_count, n, dtype, targets)
