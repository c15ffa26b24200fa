"""Rounds the weight of Int4Linear to 4 bits, and stands in for the weight afterwards."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class RoundedWeight(NamedTuple):
    """A weight as 4-bit codes: `scale * (code - zero)`.

    Attributes:
        codes: uint8 `(N, K)`, values 0 to 15.
        scale: `(N, K / group)` in the dtype of the weight.
        zero: uint8 `(N, K / group)`, values 0 to 15.
        quantisation_error, largest_error: as `Int4Linear` has them; 0 of an empty weight.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    quantisation_error: float
    largest_error: float


def round_weight(weight: Tensor, group: int) -> RoundedWeight:
    """Rounds a weight to the nearest of 16 levels between each group's smallest and largest value.

    Args:
        weight: floating point `(N, K)`.
        group: columns that share a scale and a zero; divides K.
    """
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    groups = weight.to(wide).unflatten(1, (-1, group))
    low = groups.amin(-1, keepdim=True).clamp(max=0)
    high = groups.amax(-1, keepdim=True).clamp(min=0)
    span = high - low
    kept = torch.where(span.isinf(), high / 15 - low / 15, span / 15).to(weight.dtype)
    step = torch.where(kept > 0, kept, 1.0).to(wide)
    zero = (-low / step).round().clamp(0, 15)
    # The outermost level of a group may exceed the range of the dtype. If a slightly smaller scale
    # brings the level back into the range, that scale is used. Otherwise no code uses the level.
    largest = torch.finfo(weight.dtype).max
    reach = torch.maximum(zero, (high / step).round()).clamp(min=1)
    lower = _rounded_down(largest / reach, weight.dtype)
    kept = torch.where((lower < step) & (lower > step * (31 / 32)), lower.to(kept.dtype), kept)
    scale = kept.to(wide)
    step = torch.where(scale > 0, scale, 1.0)
    limit = (largest / step).floor()
    codes = ((groups / step).round().clamp(-limit, limit) + zero).clamp(0, 15)
    relative = maximum = 0.0
    if weight.numel():
        error = scale * (codes - zero) - groups
        # so that squares of the quotients stay in range
        unit = groups.abs().max().clamp(min=torch.finfo(wide).tiny)
        size = (groups / unit).square().mean().sqrt().item()
        lost = (error / unit).square().mean().sqrt().item()
        relative, maximum = lost / size if size else 0.0, error.abs().max().item()
    return RoundedWeight(
        codes.flatten(1).to(torch.uint8),
        kept.squeeze(-1),
        zero.squeeze(-1).to(torch.uint8),
        relative,
        maximum,
    )


def _rounded_down(positive: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest numbers of a dtype that are not above positive ones, in their own dtype."""
    near = positive.to(dtype)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[near.element_size()]
    below = (near.view(integers) - 1).view(dtype)
    return torch.where(near.to(positive.dtype) > positive, below, near).to(positive.dtype)


class NoValues(Tensor):
    """Shape, dtype and device of a weight that is not kept. It has no memory; ops refuse it."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, shape: tuple[int, int], like: Tensor) -> NoValues:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> None:
        raise RuntimeError(
            "Int4Linear: weight must be asked for its shape, dtype and device only, but got "
            f"{func}; use dequantise() for its values, and from_linear to quantise others"
        )

    def __repr__(self) -> str:
        return f"Int4Linear.weight(shape={tuple(self.shape)}, dtype={self.dtype}, no values)"
