"""Searches scales and zeros of 4-bit groups with a smaller error than the range of the extremes.

Neither search needs calibration data. Each returns a scale and a zero for every group, starting
from those of the extremes. A zero is a code, 0 to 15, so that 0 stays exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

_RATIOS = [1 - i / 40 for i in range(21)]  # clipped range / whole range, from 1 to 0.5
_ROUNDS = 3  # the number of least-squares rounds
_STEPS = 12  # the number of steps of the half-quadratic iteration
_P, _BETA, _GROWTH = 0.7, 10.0, 1.01  # HQQ's norm, penalty and its growth


def search_clip(groups: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """Tries 21 clip ratios of the range, each with three zeros, then fits the scale.

    Args:
        groups: `(..., columns)`, magnitudes up to 1.
        scale, zero: `(..., 1)`, those of the range between the extremes.
    """
    best = _Best(groups, scale, zero)
    for ratio in _RATIOS:
        for shift in (-1, 0, 1):
            best.offer(scale * ratio, (zero + shift).clamp(0, 15))
    for _ in range(_ROUNDS):
        best.offer(_least_squares(groups, _levels(groups, best.scale, best.zero)), best.zero)
    return best.scale, best.zero


def half_quadratic(groups: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """Half-quadratic iterations: outliers of the rounding error are split off before a fit.

    HQQ fits a fractional zero to `groups - outliers`. Here the zero is a code, so the scale is
    fitted too. The iterate with the smallest squared error counts.

    Args:
        groups: `(..., columns)`, magnitudes up to 1.
        scale, zero: `(..., 1)`, those of the range between the extremes.

    Source: Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023.
    """
    best, beta = _Best(groups, scale, zero), _BETA
    unit = groups.square().mean(-1, keepdim=True).sqrt()  # a power norm depends on the scale
    unit = torch.where(unit > 0, unit, 1.0)
    for _ in range(_STEPS):
        levels = _levels(groups, scale, zero)
        error = (groups - scale * levels) / unit
        # The proximal operator of the p-norm sets small errors to 0 and nearly keeps large ones.
        size = error.abs()
        outliers = error.sign() * (size - size.clamp(min=1e-8).pow(_P - 1) / beta).clamp(min=0)
        target = groups - outliers * unit
        step = torch.where(scale > 0, scale, 1.0)
        zero = (levels + zero - target / step).mean(-1, keepdim=True).round().clamp(0, 15)
        scale = _least_squares(target, _levels(groups, scale, zero))
        best.offer(scale, zero)
        beta *= _GROWTH
    return best.scale, best.zero


class _Best:
    """Keeps the scale and zero with the smallest squared error in each group."""

    def __init__(self, groups: Tensor, scale: Tensor, zero: Tensor) -> None:
        self.groups, self.scale, self.zero = groups, scale, zero
        self.error = self._error_of(scale, zero)

    def offer(self, scale: Tensor, zero: Tensor) -> None:
        error = self._error_of(scale, zero)
        better = error < self.error
        self.error = torch.where(better, error, self.error)
        self.scale = torch.where(better, scale, self.scale)
        self.zero = torch.where(better, zero, self.zero)

    def _error_of(self, scale: Tensor, zero: Tensor) -> Tensor:
        lost = _levels(self.groups, scale, zero).mul_(scale).sub_(self.groups)
        return lost.square_().sum(-1, keepdim=True)


def _levels(groups: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Returns `code - zero` of the nearest levels; a new tensor."""
    inverse = torch.where(scale > 0, 1 / scale, 1.0)
    return (groups * inverse).round_().clamp_(-zero, 15 - zero)


def _least_squares(groups: Tensor, levels: Tensor) -> Tensor:
    """Fits the scale to given levels, at least 0."""
    weight = levels.square().sum(-1, keepdim=True)
    scale = (groups * levels).sum(-1, keepdim=True) / weight
    return torch.where(weight > 0, scale, 0.0).clamp(min=0)
