"""Tensors and sizes that the ops' pages share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from numerics import assert_same_bits
from samples import call, check_op, forward_backward

# M, N, K around the edges of tiles.
MATMUL_SIZES = [(1, 1, 1), (1, 129, 31), (31, 1, 33), (33, 31, 1), (32, 32, 32), (63, 65, 64)]
MATMUL_SIZES += [(65, 33, 127), (64, 128, 129), (127, 63, 65), (129, 127, 128), (5, 7, 1021)]


def randn(
    device: str, dtype: torch.dtype, *shape: int, scale: float = 1.0, mean: float = 0.0
) -> Tensor:
    return (torch.randn(shape, dtype=torch.float64) * scale + mean).to(dtype).to(device)


def pads(device: str, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def permuted(t: Tensor, perm: Sequence[int]) -> Tensor:
    """A tensor with t's values, stored in another order of its dims."""
    back = [perm.index(d) for d in range(t.dim())]
    return t.permute(back).contiguous().permute(perm)


def check_output_mask(backward: str, args: Sequence[Tensor | None], mask: int, count: int) -> None:
    """Checks that unwanted gradients have shape (0,) and the others do not change."""
    wanted = [bool(mask >> i & 1) for i in range(count)]
    full = call(backward)(*args, output_mask=[True] * count)
    got = call(backward)(*args, output_mask=wanted)
    for grad, ref, want in zip(got, full, wanted, strict=True):
        assert_same_bits(grad, ref if want else ref.new_empty(0))


def check_empty(op: str, args: Sequence[Any], kwargs: dict[str, Any], *shape: int) -> None:
    """Checks a result with a size of 0 in its call; an empty result has gradients of 0."""
    check_op(op, args, kwargs, eager=False)
    out, grads = forward_backward(op, args, kwargs)
    assert out.shape == shape
    assert out.numel() or all((g == 0).all() for g in grads)
