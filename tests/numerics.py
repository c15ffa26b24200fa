"""The comparer: when is a result right?

A result is judged against a float64 reference by three rules at once:

1. every element lies inside a worst-case bound made of the roundings that the op documents,
2. the errors measured in units of the statistical bound (sqrt(K) for K) have an rms below 1,
3. the largest error is at most twice that of the same formula in eager torch at the same dtype,
   plus a floor of two roundings of the largest result for cases where eager is exact by luck.

The first fails on structural bugs, the second on accuracy lost all over the tensor, the third
keeps the ops at eager quality. NaN and inf must sit at the same positions; shape, dtype and device
must be equal. Bounds grow with condition magnitudes (|A| @ |B|), never with |reference| alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Half the distance from 1 to the next number: the relative error of one rounding.
UNIT = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
# Half the smallest subnormal: the absolute error of one rounding near 0.
TINY = {
    torch.float64: 2.0**-1074,
    torch.float32: 2.0**-150,
    torch.float16: 2.0**-25,
    torch.bfloat16: 2.0**-134,
}
TRUNCATING = 2.0  # an accumulator may truncate instead of round
SMALL_RESULT = 0.3  # results below this are allowed the roundings of this one
FEW_ELEMENTS = 32  # without zeros; the largest of fewer eager errors is a matter of luck

Ratios = dict[str, float]
observed: list[tuple[str, str, Ratios]] = []  # drained by conftest for the summary


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and statistics."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass
class Bound:
    """A float64 reference, and how far a result of `dtype` may be from it before its last rounding.

    `errors` are the largest error in the worst case and by statistics, and that part of the first
    which eager does not have: probabilities recomputed from a float32 lse, and jumps of relu's
    slope where rounding may change the sign of its argument.
    """

    ref: Tensor
    dtype: torch.dtype
    errors: Sequence[Tensor | float] = (0.0, 0.0, 0.0)

    def allowed(self) -> tuple[Tensor, Tensor]:
        """The allowed error of each element: in the worst case, and by statistics."""
        last = UNIT[self.dtype] * self.ref.abs() + TINY[self.dtype]
        return last + self.errors[0], last + self.errors[1]

    def beyond_eager(self) -> float:
        """The largest error that is allowed for any error of eager."""
        extra = torch.as_tensor(self.errors[2])
        return eager_floor(self.ref, self.dtype) + (extra.max().item() if extra.numel() else 0.0)


def eager_floor(ref: Tensor, dtype: torch.dtype) -> float:
    """The largest error that is allowed if eager has none: two roundings of the largest result, or
    of 0.3 if all are smaller.
    """
    r = ref.to(dtype)
    r = r[torch.isfinite(r)]
    if r.numel() == 0:
        return 0.0
    return 2.0 * UNIT[dtype] * max(r.abs().max().item(), SMALL_RESULT)


def assert_same_kind(out: Tensor, shape: Sequence[int], dtype: torch.dtype, label: str) -> None:
    """Shape and dtype, before any value is looked at."""
    assert tuple(out.shape) == tuple(shape), f"{label}: shape {tuple(out.shape)}, not {shape}"
    assert out.dtype == dtype, f"{label}: dtype {out.dtype}, not {dtype}"


def assert_same_nonfinite(out: Tensor, ref: Tensor, label: str = "result") -> None:
    """NaN, +inf and -inf at the same positions."""
    for name, where in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = where(out) != where(ref)
        if wrong.any():
            at = tuple(wrong.nonzero()[0].tolist())
            raise AssertionError(
                f"{label}: {int(wrong.sum())} positions differ in {name}, first at {at}: "
                f"got {out[at].item()}, expected {ref[at].item()}"
            )


def check(
    out: Tensor,
    bound: Bound,
    *,
    label: str,
    eager: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Ratios:
    """Judge `out`; raises AssertionError with the worst place, returns the observed ratios.

    Args:
        out: The result of the op.
        bound: Reference and allowed errors.
        label: Names the result in messages and in the summary.
        eager: The same formula in eager torch at the same dtype. Without it, for float64 (where
            the reference is no better than eager) and for fewer than FEW_ELEMENTS results beside 0,
            rule 3 is left out.
        device: Where the result must be; not looked at when None.
    """
    assert_same_kind(out, bound.ref.shape, bound.dtype, label)
    if device is not None:
        assert out.device.type == torch.device(device).type, f"{label}: on {out.device}"
    got = out.detach().cpu().double()
    ref = bound.ref.detach().cpu().double()
    rounded = ref.to(bound.dtype).double()  # an overflow of the dtype must be inf in the result
    finite = torch.isfinite(rounded)
    all_finite = bool(finite.all()) and bool(torch.isfinite(got).all())
    if not all_finite:
        assert_same_nonfinite(got, rounded, label)
    if not finite.any():
        return {}

    def judged(t: Tensor) -> Tensor:
        return t if all_finite else t[finite]

    error = (got - ref).abs()
    relative, statistical = (error / allowed.cpu() for allowed in bound.allowed())
    rms = judged(statistical).square().mean().sqrt().item()
    ratios = {"worst": judged(relative).max().item(), "rms": rms}
    largest = judged(error).max().item()
    comparable = eager is not None and bound.dtype != torch.float64
    if comparable and judged(ref).count_nonzero() >= FEW_ELEMENTS:
        reference_error = judged((eager.detach().cpu().double() - ref).abs())
        allowed = 2 * reference_error.max().item() + bound.beyond_eager()
        ratios["eager"] = largest / allowed if allowed > 0 else (math.inf if largest else 0.0)
    observed.append((label, str(bound.dtype).removeprefix("torch."), ratios))
    text = ", ".join(f"{name} {value:.3f}" for name, value in ratios.items())
    print(f"{label} {tuple(out.shape)} {bound.dtype}: {text}")
    for name, value in ratios.items():
        if not value <= 1.0:  # a NaN fails too
            shown = torch.where(finite, relative if name == "worst" else error, -1.0)
            flat = int(shown.flatten().argmax())
            at = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), error.shape))
            raise AssertionError(
                f"{label} {tuple(out.shape)} {bound.dtype}: the {name} rule is broken, observed / "
                f"allowed: {text}; largest error {largest:.3g}; at {at} got {got[at].item()!r}, "
                f"expected {ref[at].item()!r}"
            )
    return ratios


Tensors = Tensor | Iterable[Tensor | None]


def pairs_of(out: Tensors, expected: Tensors) -> list[tuple[Tensor, Tensor]]:
    """The pairs of two tensors, or of as many in two iterables, which have None at one place."""
    if isinstance(out, Tensor):
        return [(out, expected)]
    pairs = list(zip(out, expected, strict=True))
    assert all((a is None) == (b is None) for a, b in pairs), "None at other places"
    return [pair for pair in pairs if pair[0] is not None]


def assert_equal(out: Tensors, expected: Tensors, label: str = "result") -> None:
    """Equal in shape, dtype, device and every value; NaN equals NaN, -0 equals 0."""
    for got, ref in pairs_of(out, expected):
        assert_same_kind(got, ref.shape, ref.dtype, label)
        assert got.device == ref.device, f"{label}: on {got.device}, not {ref.device}"
        same = (got == ref) | (got.isnan() & ref.isnan())
        if not same.all():
            at = tuple((~same).nonzero()[0].tolist())
            raise AssertionError(
                f"{label}: {int((~same).sum())} of {same.numel()} values differ, first at {at}: "
                f"got {got[at].item()!r}, expected {ref[at].item()!r}"
            )


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_promise(out: Tensor, eager: Tensor, exact: Tensor) -> None:
    """README's bound in float32: twice the error of torch's ops, plus two roundings."""
    error, allowed = ((t.double() - exact).abs().max() for t in (out, eager))
    assert error <= 2 * allowed + 2 * 2**-24 * exact.abs().max()


def assert_same_bits(out: Tensors, expected: Tensors, label: str = "result") -> None:
    """Equal bit for bit, NaN payloads and signs of zero included."""
    for got, ref in pairs_of(out, expected):
        assert_same_kind(got, ref.shape, ref.dtype, label)
        bits = _BITS[got.element_size()]
        assert_equal(got.contiguous().view(bits), ref.contiguous().view(bits), label + " (bits)")
