"""The comparer itself: each kind of wrong result must fail, a right one must pass."""

from __future__ import annotations

import math

import pytest
import torch

from numerics import Bound, assert_equal, assert_same_bits, check
from running import Running

N = 1_000_000
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def exact_bound(dtype: torch.dtype, n: int = N) -> Bound:
    """One rounding of a known tensor: no sums, no inner roundings."""
    ref = torch.randn(n, dtype=torch.float64)
    return Bound(ref, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_accepts_the_rounded_reference(dtype):
    bound = exact_bound(dtype)
    ratios = check(bound.ref.to(dtype), bound, label="copy", eager=bound.ref.to(dtype))
    assert ratios["worst"] <= 1.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("at", [0, 123_457, N - 1])
def test_one_wrong_element_in_a_million_fails(dtype, at):
    bound = exact_bound(dtype)
    out = bound.ref.to(dtype, copy=True)
    out[at] *= 1.02
    with pytest.raises(AssertionError, match="worst rule"):
        check(out, bound, label="copy")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (math.nan, 1.0),
        (1.0, math.nan),
        (math.inf, 1.0),
        (1.0, math.inf),
        (-math.inf, math.inf),
        (math.nan, math.inf),
        (math.inf, math.nan),
        (0.0, -math.inf),
    ],
)
def test_nonfinite_positions_must_agree(dtype, got, expected):
    bound = exact_bound(dtype, 64)
    bound.ref[17] = expected
    out = bound.ref.to(dtype, copy=True)
    check(out, bound, label="copy")
    out[17] = got
    with pytest.raises(AssertionError, match="positions differ"):
        check(out, bound, label="copy")
    with pytest.raises(AssertionError, match="values differ"):
        assert_equal(out, bound.ref.to(dtype))


def test_a_nan_everywhere_on_both_sides_is_no_licence():
    bound = exact_bound(torch.float32, 8)
    bound.ref.fill_(math.nan)
    check(bound.ref.float(), bound, label="copy")
    with pytest.raises(AssertionError, match="positions differ"):
        check(torch.zeros(8), bound, label="copy")


def test_overflow_of_the_dtype_is_expected_as_inf():
    bound = Bound(torch.tensor([1e6, 1.0], dtype=torch.float64), torch.float16)
    check(torch.tensor([math.inf, 1.0], dtype=torch.float16), bound, label="copy")
    with pytest.raises(AssertionError, match="inf"):
        check(torch.tensor([65504.0, 1.0], dtype=torch.float16), bound, label="copy")


def test_of_sequences_every_tensor_is_compared():
    first, second = torch.zeros(3), torch.ones(3)
    assert_same_bits((first, None, second), [first, None, second])
    for other in ([first, None, -second], [first, second, None], [first, None]):
        for compare in (assert_equal, assert_same_bits):
            with pytest.raises((AssertionError, ValueError)):
                compare([first, None, second], other)


@pytest.mark.parametrize(
    ("what", "out"),
    [("shape", torch.zeros(s)) for s in ((8, 2), (16, 1), (4, 4), (15,), (0,), ())]
    + [("dtype", torch.zeros(16, dtype=d)) for d in (*DTYPES[1:], torch.int32)],
)
def test_shape_and_dtype_must_agree(what, out):
    bound = exact_bound(torch.float32, 16)
    with pytest.raises(AssertionError, match=what):
        check(out, bound, label="copy")
    with pytest.raises(AssertionError, match=what):
        assert_equal(out, bound.ref.float())


def test_device_must_agree():
    bound = exact_bound(torch.float32, 16)
    with pytest.raises(AssertionError, match="on cpu"):
        check(bound.ref.float(), bound, label="copy", device="meta")


def test_accuracy_lost_all_over_fails_the_rms_rule():
    """Every element inside the worst bound of a sum of 4096, and each 20 sqrt(K) units off."""
    k = 4096
    ref = torch.ones(1000, dtype=torch.float64)
    bound = Running(ref, torch.float32).plus(k, ref).bound()
    out = (ref + 2 * 20 * math.sqrt(k) * 2.0**-24).float()
    with pytest.raises(AssertionError, match="the rms rule"):
        check(out, bound, label="sum")


def test_twice_as_far_as_eager_fails_the_eager_rule():
    """Inside both bounds, but well off where eager torch is exact."""
    ref = torch.linspace(1, 2, 1000, dtype=torch.float64).bfloat16().double()
    bound = Running(ref, torch.bfloat16).rounded(size=20 * ref).bound()
    out = (ref * (1 + 6 * 2.0**-8)).bfloat16()
    check(out, bound, label="sum")
    with pytest.raises(AssertionError, match="the eager rule"):
        check(out, bound, label="sum", eager=ref.bfloat16())


def test_bits_tell_zeros_apart():
    zeros = torch.zeros(4)
    assert_equal(zeros, -zeros)
    with pytest.raises(AssertionError, match="bits"):
        assert_same_bits(zeros, -zeros)
    assert_same_bits(torch.full((2,), math.nan), torch.full((2,), math.nan))
