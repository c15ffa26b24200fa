"""Rounds the weight of Int4Linear to 4 bits, and stands in for the weight afterwards."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweld._library import ops
from torchweld.ops.int4_search import half_quadratic, search_clip

METHODS = {"rtn": None, "mse": search_clip, "hqq": half_quadratic}

# Values rounded at a time: temporaries stay in the caches of a CPU, and small on a GPU.
_BLOCK = {"cpu": 1 << 18, "cuda": 1 << 24}


class RoundedWeight(NamedTuple):
    """A weight as 4-bit codes: `scale * (code - zero)`."""

    codes: Tensor  # uint8 (N, K), values 0 to 15
    scale: Tensor  # (N, K / group) in the dtype of the weight
    zero: Tensor  # uint8 (N, K / group), values 0 to 15
    quantisation_error: float  # both errors are those of `Int4Linear`; 0 if empty
    largest_error: float


def round_weight(weight: Tensor, group: int, method: str = "rtn") -> RoundedWeight:
    """Rounds a weight to 4 bits, group by group.

    Args:
        weight: floating point `(N, K)`.
        group: columns that share a scale and a zero; divides K.
        method: a key of METHODS; `Int4Linear.from_linear` describes them.
    """
    n, k = weight.shape
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    codes = torch.empty(n, k, dtype=torch.uint8, device=weight.device)
    scale = weight.new_empty(n, k // group)
    zero = codes.new_empty(n, k // group)
    if not weight.numel():
        return RoundedWeight(codes, scale, zero, 0.0, 0.0)
    # Errors are divided by `unit`, so that their squares stay in range.
    unit = weight.abs().amax().to(wide).clamp(min=torch.finfo(wide).tiny)
    size, lost = torch.zeros(2, dtype=torch.float64, device=weight.device)
    largest = unit.new_zeros(())
    rows = max(1, _BLOCK.get(weight.device.type, 1 << 18) // k)
    for first in range(0, n, rows):
        block = slice(first, first + rows)
        groups = weight[block].to(wide).unflatten(1, (-1, group))
        found = _round_groups(groups, weight.dtype, method)
        codes[block] = found[0].flatten(1)
        scale[block], zero[block] = found[1].squeeze(-1), found[2].squeeze(-1)
        error = found[1] * (found[0] - found[2]) - groups
        largest = torch.maximum(largest, error.abs().amax())
        size += (groups / unit).square().sum(dtype=torch.float64)
        lost += (error / unit).square().sum(dtype=torch.float64)
    relative = (lost / size).sqrt().item() if size > 0 else 0.0
    return RoundedWeight(codes, scale, zero, relative, largest.item())


def _round_groups(groups: Tensor, dtype: torch.dtype, method: str) -> tuple[Tensor, ...]:
    """Returns codes, scale (rounded to `dtype`) and zero of groups `(rows, groups, columns)`."""
    low = groups.amin(-1, keepdim=True).clamp(max=0)
    high = groups.amax(-1, keepdim=True).clamp(min=0)
    span = high - low
    # NOTE: a tensor, because a GPU would multiply by a Python number's reciprocal: other scales.
    steps = torch.full_like(span, 15.0)
    kept = torch.where(span.isinf(), high / steps - low / steps, span / steps).to(dtype)
    scale = kept.to(groups.dtype)
    zero = (-low / torch.where(scale > 0, scale, 1.0)).round().clamp(0, 15)
    scale, codes = _codes(groups, scale, zero, high, dtype)
    search = METHODS[method]
    if search is None:
        return codes, scale, zero
    # The search squares values, so it gets groups scaled to a largest magnitude of 1.
    unit = torch.maximum(-low, high)
    unit = torch.where(unit > 0, unit, 1.0)
    found, found_zero = search(groups / unit, scale / unit, zero)
    found, found_codes = _codes(groups, (found * unit).to(dtype).to(unit), found_zero, high, dtype)
    # Rounding the scale to `dtype` may lose the gain of the search.
    before, after = (
        ((s * (c - z) - groups) / unit).square().sum(-1, keepdim=True)
        for s, c, z in ((scale, codes, zero), (found, found_codes, found_zero))
    )
    better = after < before
    pairs = ((found_codes, codes), (found, scale), (found_zero, zero))
    return tuple(torch.where(better, new, old) for new, old in pairs)


def _codes(
    groups: Tensor, scale: Tensor, zero: Tensor, high: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns the scale to keep and the codes; no level that is used leaves the range of `dtype`.

    The outermost level may exceed the range. If a slightly smaller scale brings the level back,
    that scale is used; otherwise the level is left unused.
    """
    largest = torch.finfo(dtype).max
    step = torch.where(scale > 0, scale, 1.0)
    reach = torch.maximum(zero, (high / step).round()).clamp(min=1)
    lower = _rounded_down(largest / reach, dtype)
    scale = torch.where((lower < step) & (lower > step * (31 / 32)), lower, scale)
    step = torch.where(scale > 0, scale, 1.0)
    limit = (largest / step).floor()
    return scale, ((groups / step).round().clamp(-limit, limit) + zero).clamp(0, 15)


def _rounded_down(positive: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds positive numbers down to those of a dtype; returns the numbers' own dtype."""
    near = positive.to(dtype)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[near.element_size()]
    below = (near.view(integers) - 1).view(dtype)
    return torch.where(near.to(positive.dtype) > positive, below, near).to(positive.dtype)


class NoValues(Tensor):
    """Has the shape, dtype and device of a weight, but no memory; ops on it raise RuntimeError."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    _is_hf_initialized = True  # transformers' initialisers then leave it alone

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


def is_repacked_on(device: torch.device) -> bool:
    """Whether `Int4Linear` keeps its weight in the layout of `int4_repack` on a device."""
    return device.type == "cuda"


def portable_from_repacked(
    packed: Tensor, packed_scale: Tensor, packed_zero: Tensor, n: int, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Undoes `int4_repack`, on any device; csrc/int4/layout.h describes the repacked layout.

    Args:
        packed: int32 `(ceil(N/16), ceil(K/64), 128)`.
        packed_scale: `(ceil(N/16), K/group, 16)`.
        packed_zero: int32 `(ceil(N/16), K/group, 2)`.
        n, k: N and K.

    Returns:
        `qweight` `(N, K/8)`, `scale` `(N, K/group)` and `zero` `(N, ceil(K/group/8))`.
    """
    tiles, chunks, _ = packed.shape
    # Dims: tile, chunk, g and t of a lane, slice of 16 columns, odd column, unit of the slice, half
    # of the 16 rows.
    codes = ops.int4_unpack(packed, 1024).view(tiles, chunks, 8, 4, 4, 2, 2, 2)
    codes = codes.permute(0, 7, 2, 1, 4, 6, 3, 5).reshape(tiles * 16, chunks * 64)
    scale = packed_scale.unflatten(2, (8, 2)).permute(0, 3, 2, 1).flatten(0, 2)
    zeros = ops.int4_unpack(packed_zero, 16).transpose(1, 2).flatten(0, 1)
    return (ops.int4_pack(codes[:n, :k]), scale[:n].contiguous(), ops.int4_pack(zeros[:n]))
