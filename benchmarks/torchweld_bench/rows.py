"""The row kernels on a GPU, against a copy of the same tensor and torch's own ops."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torchweld._library import ops
from torchweld.tuning.work import two_roundings
from torchweld_bench.cases import CHECKED_ROWS, Call, checked, drawn, judged, measured
from torchweld_bench.common import dtype_text
from torchweld_bench.results import Row

_BYTES = 256 << 20
_COMPILED = "torch.compile"
_LONG = 65536  # torch.softmax reads rows of at least this length more than once
_SUMS = (
    (1 << 20, 64),
    (65536, 1024),
    (4096, 65536),
    (64, 1 << 22),
    (8, 1 << 22),
    (1, 1 << 22),
    (4, 1 << 28),
)


def _softmax(rows: int, n: int, dtype: torch.dtype, *others: str) -> Iterator[Row]:
    """A row against a copy, and one against each other peer."""
    x = drawn(rows, n, dtype=dtype, std=2.0)
    y = torch.empty_like(x)
    calls: dict[str, Call] = {
        "ours": lambda: ops.softmax(x),
        "copy": lambda: y.copy_(x),
        "torch": lambda: _eager_softmax(x),
    }
    if _COMPILED in others:
        compiled = torch.compile(_eager_softmax)
        calls[_COMPILED] = lambda: compiled(x)
    errors = checked(ops.softmax(x)[:CHECKED_ROWS], _eager_softmax, [x[:CHECKED_ROWS]])
    return measured(f"softmax ({rows}, {n}) {dtype_text(dtype)}", calls, errors, "copy", others)


def _eager_softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def _softmax_gradient(dy: Tensor, y: Tensor) -> Tensor:
    return y * (dy - (y * dy).sum(-1, keepdim=True))


def _softmax_backward(n: int, dtype: torch.dtype) -> Iterator[Row]:
    rows = _BYTES // (n * dtype.itemsize)
    y, dy = drawn(rows, n, dtype=dtype).softmax(-1), drawn(rows, n, dtype=dtype)
    out = torch.empty_like(y)
    calls: dict[str, Call] = {
        "ours": lambda: ops.softmax_backward(dy, y),
        "move 3": lambda: torch.add(y, dy, out=out),
        "torch": lambda: torch._softmax_backward_data(dy, y, -1, dtype),
    }
    few = dy[:CHECKED_ROWS], y[:CHECKED_ROWS]
    exact = _softmax_gradient(*(t.double() for t in few))
    eager = torch._softmax_backward_data(*few, -1, dtype)
    errors = judged(ops.softmax_backward(dy, y)[:CHECKED_ROWS], eager, exact)
    return measured(f"softmax_backward ({rows}, {n}) {dtype_text(dtype)}", calls, errors, "move 3")


def _causal_softmax(batch: int, seqlen: int, padded: bool, dtype: torch.dtype) -> Iterator[Row]:
    x = drawn(batch, seqlen, seqlen, dtype=dtype)
    y = torch.empty_like(x)
    pad = seqlen // 2 if padded else 0
    leftpad = torch.full((batch,), pad, device="cuda", dtype=torch.int32)
    hidden = torch.ones(seqlen, seqlen, device="cuda", dtype=torch.bool).triu(1)
    hidden[:, :pad] = True

    def eager(x: Tensor) -> Tensor:
        return x.masked_fill(hidden, float("-inf")).softmax(-1)

    calls: dict[str, Call] = {
        "ours": lambda: ops.causal_softmax(x, leftpad),
        "copy": lambda: y.copy_(x),
        "eager": lambda: eager(x),
    }
    errors = checked(
        ops.causal_softmax(x[:1], leftpad[:1]),
        lambda x: eager(x).nan_to_num(0.0),
        [x[:1]],
        plus=two_roundings(dtype, 1.0),
    )
    case = f"causal_softmax ({batch}, {seqlen}, {seqlen}) {dtype_text(dtype)}"
    case += " half padded" if padded else ""
    return measured(case, calls, errors, "copy", rounds=11)


def _row_sum(rows: int, n: int, dtype: torch.dtype) -> Iterator[Row]:
    x = drawn(rows, n, dtype=dtype)
    ours, eager = ops.row_sum(x), x.sum(-1)
    # A sum of n standard normals is about sqrt(n), and never six times that here.
    most = two_roundings(dtype, 6 * n**0.5)
    errors = judged(ours, eager, x.sum(-1, dtype=torch.float64), plus=most)
    calls: dict[str, Call] = {"ours": lambda: ops.row_sum(x), "torch": lambda: x.sum(-1)}
    return measured(f"row_sum ({rows}, {n}) {dtype_text(dtype)}", calls, errors, "torch")


def rows() -> Iterator[Row]:
    """Measures every case of the family, one per iteration."""
    dtypes = (torch.float32, torch.bfloat16)
    for dtype in dtypes:
        for n in (256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 262144, 1023, 4097, 32769):
            row_count = _BYTES // (n * dtype.itemsize)
            yield from _softmax(row_count, n, dtype, *(["torch"] if n >= _LONG else []))
    yield from _softmax(1823, 781, torch.float32, "torch", _COMPILED)
    for dtype in dtypes:
        for n in (1024, 4096, 16384, 32768, 65536, 262144):
            yield from _softmax_backward(n, dtype)
    for dtype in dtypes:
        for batch, seqlen in ((96, 1024), (32, 4096)):
            for padded in (False, True):
                yield from _causal_softmax(batch, seqlen, padded, dtype)
    for dtype in dtypes:
        for row_count, n in _SUMS:
            yield from _row_sum(row_count, n, dtype)
