"""Helpers for the tests of ops on a (rows, cols) matrix: sizes, and tensors on integer grids."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tensors import randn

# Around the widths of the kernels' tiles (powers of two to 2048), with rows that start anywhere.
SIZES = [
    (1, 1), (2, 7), (31, 1), (1, 33), (33, 8), (257, 3), (7, 64), (32, 65), (129, 127), (65, 256),
    (40, 257), (9, 511), (17, 512), (3, 1023), (5, 1024), (33, 1025), (19, 2048), (130, 2051),
    (1, 5003), (4099, 5), (1021, 67),
]  # fmt: skip
EMPTY = [(0, 5), (5, 0), (0, 0)]
MATRIX_OPS = ["outer_add", "outer_mul_relu", "mul_relu"]


def matrix_args(op: str, device: str, dtype: torch.dtype, rows: int, cols: int) -> list[Tensor]:
    """x, the columns' values or the matrix, and y, the rows' values."""
    x_shape = (rows, cols) if op == "mul_relu" else (cols,)
    return [randn(device, dtype, *x_shape), randn(device, dtype, rows)]


def grid(*shape: int) -> Tensor:
    """Integers that are exact in every dtype."""
    return torch.randint(-8, 9, shape)


def in_nan(t: Tensor, offset: int) -> Tensor:
    """t's values behind another offset and, for matrices, with gaps between rows, NaN all round."""
    gap = 3 if t.dim() > 1 else 0
    wide = (*t.shape[:-1], t.shape[-1] + gap)
    size = offset + math.prod(wide) + 8
    buffer = torch.full((size,), math.nan, dtype=t.dtype, device=t.device)
    view = buffer[offset : offset + math.prod(wide)].view(wide)[..., : t.shape[-1]]
    return view.copy_(t)


def special_places(device: str, dtype: torch.dtype, size: int, special: float) -> Tensor:
    """Ordinary values, zeros of both signs, and `special` at both ends and in the middle."""
    t = torch.randn(size, dtype=torch.float64)
    t[1::7], t[2::11] = 0.0, -0.0
    for i in {0, size // 2, size - 1}:
        t[i] = special
    return t.to(dtype).to(device)


def eager_gradients(
    function: Callable[..., Tensor], dz: Tensor, args: Sequence[Tensor]
) -> list[Tensor]:
    """torch's own gradients of a plain function."""
    leaves = [a.detach().requires_grad_() for a in args]
    return list(torch.autograd.grad(function(*leaves), leaves, dz))
