"""The work of a call in FLOPs and bytes, and the check of its results."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from torchweld.explain import tensors_of

# For calls up to these sizes, the reference is computed in float64 on the CPU, which takes seconds.
_REFERENCE_FLOPS = 4e10
_REFERENCE_ELEMENTS = 1 << 26
_CHUNK = 1 << 26  # the number of elements that are compared at a time


def _attention_pairs(p: dict[str, int]) -> float:
    rows, keys = p["seqlen_q"], p["seqlen_k"]
    if not p["causal"]:
        return float(rows) * keys
    side = min(rows, keys)
    return float(rows) * keys - side * (side - 1) / 2


def flops(family: str, p: dict[str, int]) -> float | None:
    """Counts the FLOPs of one kernel's problem; None if memory limits it."""
    if family == "matmul":
        return 2.0 * p["m"] * p["n"] * p["k"] * p["batch"] * (2 if p["gated"] else 1)
    if family == "int4":
        return 2.0 * p["m"] * p["n"] * p["k"]
    if family == "attention":
        return 2.0 * p["heads"] * _attention_pairs(p) * (p["head_dim"] + p["head_dim_v"])
    if family == "attention_backward":
        # The products for the scores, dQ and dK sum over or produce head_dim columns, those for dP
        # and dV head_dim_v columns.
        dims = 3 * p["head_dim"] + 2 * p["head_dim_v"]
        return 2.0 * p["heads"] * _attention_pairs(p) * dims
    return None


def sum_length(family: str, p: dict[str, int]) -> int:
    """Returns the number of terms in the longest sums of a kernel."""
    if family in ("matmul", "int4"):
        return p["k"]
    if family.startswith("attention"):
        return max(p["seqlen_q"], p["seqlen_k"]) + p["head_dim"] + p["head_dim_v"]
    return p["kernel_height"] * p["kernel_width"] if family == "conv2d" else p["n"]


def two_roundings(dtype: torch.dtype, largest: float) -> float:
    """Bounds two roundings of the largest result, and fp32 sums."""
    return largest * (2 * torch.finfo(dtype).eps + 1e-6)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _in_float64(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    t = value.detach().cpu()
    return t.double() if t.is_floating_point() else t


def _largest(t: Tensor) -> float:
    finite = [c[c.isfinite()] for c in t.detach().flatten().split(_CHUNK)]
    return max((c.abs().max().item() for c in finite if c.numel()), default=0.0)


def difference(out: Tensor, reference: Tensor) -> float:
    """Returns the largest difference; inf if NaN or inf are at different positions.

    Args:
        out: the result.
        reference: the same shape, on any device; inf for values that overflow `out`'s dtype.
    """
    worst = 0.0
    for a, b in zip(out.flatten().split(_CHUNK), reference.flatten().split(_CHUNK), strict=True):
        if not a.numel():
            continue
        rounded = b.to(a.dtype).to(a.device).double()
        got, expected = a.double(), b.to(a.device).double()
        same = (got == rounded) | (got.isnan() & rounded.isnan())
        error = torch.where(same & ~rounded.isfinite(), 0.0, (got - expected).abs())
        worst = max(worst, error.nan_to_num(nan=math.inf, posinf=math.inf).max().item())
    return worst


class Answers:
    """Holds the right answer of a call, and how far a configuration may be from it.

    Up to a size the right answer is the op in float64 on the CPU; a configuration may then have
    twice the error of the default one, plus two roundings of the largest result. For larger calls
    it is the default configuration's answer; the allowance is that for sums in another order.

    Args:
        function: the op.
        args: its arguments.
        kwargs: its keyword arguments.
        default: the result of the default configuration.
        work: flops of the call.
        longest: terms of its longest sum.
    """

    def __init__(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        default: list[Tensor],
        work: float,
        longest: int,
    ) -> None:
        elements = sum(t.numel() for t in [*tensors_of(args), *default])
        floors = [two_roundings(t.dtype, _largest(t)) for t in default]
        if work <= _REFERENCE_FLOPS and elements <= _REFERENCE_ELEMENTS:
            self.against = "the op in float64"
            args, kwargs = tree_map(_in_float64, (args, kwargs))
            self.right = tensors_of(function(*args, **kwargs))
            errors = [difference(t, r) for t, r in zip(default, self.right, strict=True)]
            self.allowed = [2 * e + floor for e, floor in zip(errors, floors, strict=True)]
        else:
            self.against = "the default configuration"
            self.right = default
            order = longest * 2.0**-24
            self.allowed = [
                floor + order * _largest(t) for t, floor in zip(default, floors, strict=True)
            ]

    def judge(self, outputs: list[Tensor]) -> tuple[float, str]:
        """Returns the largest error of any result, and why the answer is wrong ("" if right)."""
        reason, worst = "", 0.0
        for out, right, allowed in zip(outputs, self.right, self.allowed, strict=True):
            error = difference(out, right)
            worst = max(worst, error)
            if not error <= allowed:
                reason = f"wrong answer: error {error:.1e}, at most {allowed:.1e} is allowed"
        return worst, reason
