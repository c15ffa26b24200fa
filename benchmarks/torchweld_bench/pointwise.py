"""Ops of a matrix with a vector or a number, against a fill, a copy or a sum of the matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from torchweld._library import ops
from torchweld_bench.cases import CHECKED_ROWS, Call, checked, drawn, judged, measured
from torchweld_bench.common import dtype_text
from torchweld_bench.results import Row


def _forward(
    op: str,
    eager: Callable[..., Tensor],
    args: list[Tensor | float],
    shape: tuple[int, int],
    against: str,
) -> Iterator[Row]:
    """The last of `args` that is as long as the matrix has rows is cut for the check."""
    first = args[0]
    assert isinstance(first, Tensor)
    z = torch.empty(shape, device="cuda", dtype=first.dtype)
    source = first if first.shape == shape else z
    peers = {"fill": lambda: z.fill_(1.0), "copy": lambda: z.copy_(source)}
    few = [a[:CHECKED_ROWS] if isinstance(a, Tensor) and len(a) == shape[0] else a for a in args]
    if first.dim() == 1:
        few[0] = first
    ours = getattr(ops, op)
    calls = {"ours": lambda: ours(*args), against: peers[against], "eager": lambda: eager(*args)}
    case = f"{op} {shape} {dtype_text(first.dtype)}"
    return measured(case, calls, checked(ours(*few), eager, few), against)


def _add_gradients(dz: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return dz, dz


def _mul_gradients(dz: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    g = torch.where(x * y[:, None] <= 0, 0.0, dz)
    return g * y[:, None], g * x


def _outer_backward(op: str, shape: tuple[int, int], dtype: torch.dtype) -> Iterator[Row]:
    """A row against the sum of dz, and one against the compiled eager gradient."""
    dz, x, y = (drawn(*sizes, dtype=dtype) for sizes in (shape, shape[1:], shape[:1]))
    summands = _add_gradients if op == "outer_add" else _mul_gradients

    def eager(dz: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        to_dx, to_dy = summands(dz, x, y)
        return to_dx.sum(0), to_dy.sum(1)

    compiled = torch.compile(eager)
    backward = getattr(ops, f"{op}_backward")
    args = (dz,) if op == "outer_add" else (dz, x, y)
    # Only the first n values of each gradient are checked: sums over n columns, and over n rows.
    n = CHECKED_ROWS
    exact = (
        summands(dz[:, :n].double(), x[:n].double(), y.double())[0].sum(0),
        summands(dz[:n].double(), x.double(), y[:n].double())[1].sum(1),
    )
    ours, theirs = ([t[:n] for t in found] for found in (backward(*args), eager(dz, x, y)))
    calls: dict[str, Call] = {
        "ours": lambda: backward(*args),
        "sum": lambda: torch.sum(dz),
        "torch.compile": lambda: compiled(dz, x, y),
        "eager": lambda: eager(dz, x, y),
    }
    case, errors = f"{op}_backward {shape} {dtype_text(dtype)}", judged(ours, theirs, exact)
    return measured(case, calls, errors, "sum", ["torch.compile"], rounds=11)


def _mul_relu_backward(shape: tuple[int, int], dtype: torch.dtype) -> Iterator[Row]:
    dz, x, y = (drawn(*sizes, dtype=dtype) for sizes in (shape, shape, shape[:1]))
    out = torch.empty_like(x)

    def eager(dz: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        to_dx, to_dy = _mul_gradients(dz, x, y)
        return to_dx, to_dy.sum(1)

    calls: dict[str, Call] = {
        "ours": lambda: ops.mul_relu_backward(dz, x, y),
        "move 3": lambda: torch.add(dz, x, out=out),
        "eager": lambda: eager(dz, x, y),
    }
    few = [t[:CHECKED_ROWS] for t in (dz, x, y)]
    errors = checked(ops.mul_relu_backward(*few), eager, few)
    case = f"mul_relu_backward {shape} {dtype_text(dtype)}"
    return measured(case, calls, errors, "move 3", rounds=11)


def _relu_product(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x * y[:, None])


def rows() -> Iterator[Row]:
    """Measures every case of the family, one per iteration."""
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((16384, 16384), (16384, 16383)):
            matrix, x, y = (drawn(*sizes, dtype=dtype) for sizes in (shape, shape[1:], shape[:1]))
            yield from _forward("add_scalar", lambda x, c: x + c, [matrix, 0.5], shape, "copy")
            yield from _forward("outer_add", lambda x, y: x + y[:, None], [x, y], shape, "fill")
            yield from _forward("outer_mul_relu", _relu_product, [x, y], shape, "fill")
            yield from _forward("mul_relu", _relu_product, [matrix, y], shape, "copy")
            del matrix
            yield from _outer_backward("outer_add", shape, dtype)
            yield from _outer_backward("outer_mul_relu", shape, dtype)
            yield from _mul_relu_backward(shape, dtype)
    for shape in ((4, 1 << 26), (1 << 23, 32)):
        yield from _mul_relu_backward(shape, torch.float32)
