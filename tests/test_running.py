"""The oracle itself: its bounds hold the errors of correct ops, and faults are outside of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import reference as R
from numerics import UNIT, check
from running import GRADIENTS, REFERENCES, Running, gradients
from samples import BF16, F32, F64


def qkv() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 2, n, 64) for n in (100, 200, 200)]


def tf32(t: Tensor) -> Tensor:
    """Ten bits of the mantissa."""
    bits = t.view(torch.int32)
    return ((bits + 0x0FFF + (bits >> 13 & 1)) & ~0x1FFF).view(F32)


FAULTS = {
    "none": lambda q, k, v: (q @ k.mT * 64**-0.5).softmax(-1) @ v,
    "TF32 in Q K^T": lambda q, k, v: (tf32(q) @ tf32(k).mT * 64**-0.5).softmax(-1) @ v,
    "P in bfloat16": lambda q, k, v: (q @ k.mT * 64**-0.5).softmax(-1).bfloat16().float() @ v,
    "V in float16": lambda q, k, v: (q @ k.mT * 64**-0.5).softmax(-1) @ v.half().float(),
    "a key of 200 is skipped": lambda q, k, v: (
        (q @ k[:, :, :-1].mT * 64**-0.5).softmax(-1) @ v[:, :, :-1]
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    args = qkv()
    out = FAULTS[fault](*args)
    (bound,) = REFERENCES["attention"](*args)
    if fault == "none":
        check(out, bound, label="attention")
        return
    with pytest.raises(AssertionError, match="the worst rule"):
        check(out, bound, label=fault)


@pytest.mark.parametrize("fault", ["none", "P in bfloat16", "a key of 200 is skipped"])
def test_a_planted_fault_is_found_in_the_gradient(fault):
    args = [t.requires_grad_() for t in qkv()]
    dout = torch.randn(1, 2, 100, 64)
    dquery, *_ = torch.autograd.grad(FAULTS[fault](*args), args, dout)
    bound, *_ = GRADIENTS["attention"](dout, *args)
    if fault == "none":
        check(dquery, bound, label="attention dquery")
        return
    with pytest.raises(AssertionError, match="rule is broken"):
        check(dquery, bound, label=fault)


def test_values_and_gradients_are_those_of_the_formula():
    torch.manual_seed(0)
    args = [torch.randn(*shape, dtype=F64) for shape in ((3, 7), (5, 7), (5,), (7,), (7,))]
    dout = torch.randn(3, 5, dtype=F64)
    leaves = [Running(t, F64, leaf=True) for t in args]
    out = R.layer_norm_linear(*leaves, activation="gelu")
    torch.testing.assert_close(out.value, R.layer_norm_linear(*args, activation="gelu"))
    want = R.gradients(R.layer_norm_linear, dout, [True] * 5, *args, activation="gelu")
    torch.testing.assert_close([got.value for got in gradients([(out, dout)], leaves)], want)


def test_errors_of_a_small_formula():
    """(x + y) z, with x + y rounded to bfloat16, in units of both dtypes."""
    x, y, z = (Running(torch.tensor(v, dtype=F64), BF16) for v in (1.0, 2.0, -5.0))
    worst = ((x + y).rounded() * z).errors[0].item()
    u, sum_unit = UNIT[BF16], 2 * UNIT[F32]
    assert worst == pytest.approx(5 * (3 * u + 3 * sum_unit) + 15 * sum_unit)


def test_a_sum_of_k_terms():
    x = Running(torch.ones(100, dtype=F64), F32)
    worst, statistical, *_ = x.sum(0).errors
    assert worst.item() == pytest.approx(100 * 100 * 2 * UNIT[F32])
    assert statistical.item() == pytest.approx(10 * 100 * 2 * UNIT[F32])


def test_relu_near_its_kink():
    """Where the sign of the argument is uncertain, the gradient may be dy or 0."""
    z = Running(torch.tensor([1e-9, 1.0], dtype=F64), F32, leaf=True)
    shifted = (z + 5.0) + -5.0  # an error of 1e-6
    (grad,) = gradients([(R.activate(shifted, "relu"), torch.ones(2))], [z])
    assert grad.errors[0][0] >= 1 and grad.errors[0][1] < 1e-5
