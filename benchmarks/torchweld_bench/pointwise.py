"""Ops of a matrix with a vector or a number, against a fill, a copy or a sum of the matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from torchweld._library import ops
from torchweld.tuning.timer import interleaved
from torchweld_bench.common import dtype_text, judged, largest_error, two_roundings
from torchweld_bench.results import Row, make_row

_CHECKED = 64  # the number of rows that are checked, or of columns if columns are summed


def _randn(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def _forward(
    op: str,
    eager: Callable[..., Tensor],
    args: list[Tensor | float],
    shape: tuple[int, int],
    against: str,
    targets: dict[str, float],
) -> Row:
    """The last of `args` that is as long as the matrix has rows is cut for the check."""
    first = args[0]
    assert isinstance(first, Tensor)
    z = torch.empty(shape, device="cuda", dtype=first.dtype)
    source = first if first.shape == shape else z
    peers = {"fill": lambda: z.fill_(1.0), "copy": lambda: z.copy_(source)}
    few = [a[:_CHECKED] if isinstance(a, Tensor) and a.shape[0] == shape[0] else a for a in args]
    if first.dim() == 1:
        few[0] = first
    reference = eager(*[a.double() if isinstance(a, Tensor) else a for a in few])
    ours = getattr(ops, op)
    case = f"{op} {shape} {dtype_text(first.dtype)}"
    return make_row(
        case,
        interleaved(
            {
                "ours": lambda: ours(*args),
                against: peers[against],
                "eager": lambda: eager(*args),
            },
            device="cuda",
        ),
        against=against,
        target=targets.get(case),
        **judged(ours(*few), eager(*few), reference),
    )


def _sums_error(dx: Tensor, dy: Tensor, to_dx: Tensor, to_dy: Tensor) -> tuple[float, float]:
    """The largest error of the first sums, and its limit. `to_dx` has the summands of the first
    columns, `to_dy` the summands of the first rows, both in float64.
    """
    error = max(
        largest_error(dx[:_CHECKED], to_dx.sum(0)), largest_error(dy[:_CHECKED], to_dy.sum(1))
    )
    largest = max(to_dx.sum(0).abs().max().item(), to_dy.sum(1).abs().max().item())
    return error, two_roundings(dx.dtype, largest)


def _outer_backward(
    op: str, shape: tuple[int, int], dtype: torch.dtype, targets: dict[str, float]
) -> Iterator[Row]:
    """A row against the sum of dz, and one against the compiled eager gradient."""
    dz, x, y = _randn(dtype, *shape), _randn(dtype, shape[1]), _randn(dtype, shape[0])

    def add_grads(dz: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return dz.sum(0), dz.sum(1)

    def mul_grads(dz: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        g = torch.where(x * y[:, None] <= 0, 0.0, dz)
        return (g * y[:, None]).sum(0), (g * x).sum(1)

    eager = add_grads if op == "outer_add" else mul_grads
    compiled = torch.compile(eager)
    backward = getattr(ops, f"{op}_backward")
    args = (dz,) if op == "outer_add" else (dz, x, y)

    def summands(rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        g, v, w = dz[rows, columns].double(), x[columns].double(), y[rows, None].double()
        if op == "outer_add":
            return g, g
        g = torch.where(v * w <= 0, 0.0, g)
        return g * w, g * v

    everything, first = slice(None), slice(_CHECKED)
    parts = summands(everything, first)[0], summands(first, everything)[1]
    error, allowed = _sums_error(*backward(*args), *parts)
    eager_error, _ = _sums_error(*eager(dz, x, y), *parts)
    times = interleaved(
        {
            "ours": lambda: backward(*args),
            "sum": lambda: torch.sum(dz),
            "torch.compile": lambda: compiled(dz, x, y),
            "eager": lambda: eager(dz, x, y),
        },
        device="cuda",
        rounds=11,
    )
    case = f"{op}_backward {shape} {dtype_text(dtype)}"
    row = make_row(
        case,
        times,
        against="sum",
        target=targets.get(case),
        error=error,
        eager_error=eager_error,
        allowed_error=allowed,
    )
    yield row
    yield row.over("torch.compile", targets)


def _mul_relu_backward(
    shape: tuple[int, int], dtype: torch.dtype, targets: dict[str, float]
) -> Row:
    dz, x, y = _randn(dtype, *shape), _randn(dtype, *shape), _randn(dtype, shape[0])
    out = torch.empty_like(x)

    def eager(dz: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        g = torch.where(x * y[:, None] <= 0, 0.0, dz)
        return g * y[:, None], (g * x).sum(1)

    few = [t[:_CHECKED] for t in (dz, x, y)]
    reference = eager(*[t.double() for t in few])
    largest = max(t.abs().max().item() for t in reference)

    def error_of(grads: tuple[Tensor, Tensor]) -> float:
        return max(largest_error(got, ref) for got, ref in zip(grads, reference, strict=True))

    case = f"mul_relu_backward {shape} {dtype_text(dtype)}"
    return make_row(
        case,
        interleaved(
            {
                "ours": lambda: ops.mul_relu_backward(dz, x, y),
                "move 3": lambda: torch.add(dz, x, out=out),
                "eager": lambda: eager(dz, x, y),
            },
            device="cuda",
            rounds=11,
        ),
        against="move 3",
        target=targets.get(case),
        error=error_of(ops.mul_relu_backward(*few)),
        eager_error=error_of(eager(*few)),
        allowed_error=two_roundings(dtype, largest),
    )


def _relu_product(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x * y[:, None])


def rows(targets: dict[str, float]) -> Iterator[Row]:
    """Measures every case of the family, one per iteration."""
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((16384, 16384), (16384, 16383)):
            matrix, x, y = _randn(dtype, *shape), _randn(dtype, shape[1]), _randn(dtype, shape[0])
            yield _forward("add_scalar", lambda x, c: x + c, [matrix, 0.5], shape, "copy", targets)
            yield _forward("outer_add", lambda x, y: x + y[:, None], [x, y], shape, "fill", targets)
            yield _forward("outer_mul_relu", _relu_product, [x, y], shape, "fill", targets)
            yield _forward("mul_relu", _relu_product, [matrix, y], shape, "copy", targets)
            del matrix
            yield from _outer_backward("outer_add", shape, dtype, targets)
            yield from _outer_backward("outer_mul_relu", shape, dtype, targets)
            yield _mul_relu_backward(shape, dtype, targets)
    for shape in ((4, 1 << 26), (1 << 23, 32)):
        yield _mul_relu_backward(shape, torch.float32, targets)
