"""fold_layer_norm, folded_layer_norm_linear and its backward op against float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference as R
from numerics import acc_dtype, assert_equal, assert_same_bits, check
from running import REFERENCES
from samples import BF16, F16, F32, check_op, dtypes, forward_backward
from strategies import linear_cases, strided, values
from tensors import permuted, randn

fold_layer_norm = torch.ops.torchweld.fold_layer_norm
folded_layer_norm_linear = torch.ops.torchweld.folded_layer_norm_linear

OP = "folded_layer_norm_linear"
OPS = ("fold_layer_norm", OP, OP + "_backward")


def parameters(device, dtype, n, k):
    """weight, bias, ln_weight, ln_bias of fold_layer_norm."""
    return [
        randn(device, dtype, n, k, scale=max(k, 1) ** -0.5),
        randn(device, dtype, n),
        randn(device, dtype, k, scale=0.2, mean=1.0),
        randn(device, dtype, k, scale=0.2),
    ]


def call_args(device, dtype, m, n, k, mean=0.0):
    return [
        randn(device, dtype, m, k, mean=mean),
        *fold_layer_norm(*parameters(device, dtype, n, k)),
    ]


SIZES = [(1, 1), (1, 33), (31, 1), (33, 64), (65, 127), (128, 129), (5, 4099)]


@pytest.mark.parametrize("given_parameters", range(8))
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_fold(device, size, given_parameters):
    for dtype in dtypes(device):
        weight, *rest = parameters(device, dtype, *size)
        chosen = [t if given_parameters >> i & 1 else None for i, t in enumerate(rest)]
        outputs = fold_layer_norm(weight, *chosen)
        bounds = REFERENCES["fold_layer_norm"](weight, *chosen)
        names = ("folded_weight", "weight_sum", "folded_bias")
        for out, bound, name in zip(outputs, bounds, names, strict=True):
            check(out, bound, label=f"fold_layer_norm {name}", device=device)
        if chosen[1] is None:
            assert_same_bits(outputs[0], weight)


def test_sum_is_that_of_the_rounded_weight(device):
    """The sum is that of the rounded weight, because the mean must cancel in the matmul."""
    for dtype in (F16, BF16):
        weight, bias, scale, shift = parameters(device, dtype, 64, 1024)
        folded, total, _ = fold_layer_norm(weight, bias, scale, shift)
        rounded = folded.double().sum(1)
        exact = (weight.double() * scale.double()).sum(1)
        assert total.dtype == torch.float32
        error = (total.double() - rounded).abs().max()
        assert error <= 1e-5 < (rounded - exact).abs().max() / 10


@pytest.mark.parametrize("size", [(0, 3), (3, 0), (0, 0)], ids=str)
def test_fold_empty(device, size):
    for dtype in dtypes(device):
        args = parameters(device, dtype, *size)
        folded, total, shift = fold_layer_norm(*args)
        assert_equal(folded, args[0])
        assert_equal(total, torch.zeros(size[0], dtype=acc_dtype(dtype), device=device))
        assert_equal(shift, args[1].to(acc_dtype(dtype)))


@pytest.mark.parametrize(
    "size", [(1, 1, 2), (31, 33, 31), (64, 65, 127), (129, 128, 64), (3, 5, 1021)]
)
def test_sizes(device, dtype, size):
    for activation in R.ACTIVATIONS:
        args = call_args(device, dtype, *size)
        check_op(OP, args, {"activation": activation}, eager=min(size) > 4)
    check_op(OP, call_args(device, dtype, *size)[:3], {"eps": 1e-3}, eager=False)


@pytest.mark.parametrize("rows", [65535, 65537])
def test_many_rows(device, rows):
    check_op(OP, call_args(device, F32, rows, 3, 8), {"activation": "gelu"})


@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (2, 1, 4)], ids=str)
def test_leading_dims(device, lead):
    for dtype in dtypes(device):
        args = call_args(device, dtype, 1, 9, 17)
        args[0] = randn(device, dtype, *lead, 17)
        check_op(OP, args, {"activation": "gelu"}, eager=False)


@pytest.mark.parametrize("size", [(0, 3, 4), (3, 0, 4), (0, 0, 4), (3, 4, 0)], ids=str)
def test_empty(device, size):
    for dtype in dtypes(device):
        args = call_args(device, dtype, *size)
        out, grads = forward_backward(OP, args, {})
        expected = (
            args[3].to(dtype).expand(size[0], -1) if size[2] == 0 else out.new_empty(size[:2])
        )
        assert_equal(out, expected.contiguous())
        assert_equal(grads[0], torch.zeros_like(args[0]))


# Largest error over largest result against float64 at |mean| / std, K = 1024, N = 256, simulated
# with truncating accumulators. float32 shifts the rows first, and stays flat.
SIMULATED = {
    F32: {0: 1.5e-6, 1: 1.5e-6, 16: 1.9e-6, 256: 1.7e-6, 1024: 1.9e-6},
    BF16: {0: 1.5e-3, 1: 1.5e-3, 16: 1.9e-3, 256: 1.5e-3, 1024: 1.8e-3},
    F16: {0: 1.8e-4, 1: 1.8e-4, 16: 2.2e-4, 256: 4.2e-4, 1024: 1.4e-3},
}


@pytest.mark.parametrize("ratio", SIMULATED[F32])
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_mean_far_from_zero(device, dtype, ratio):
    """The mean cancels: the error is at most twice the simulated one, or twice eager's.

    Eager is layer_norm and linear; a fold that sums exact products instead of rounded weights is
    off by 10 to 1000 times that in half precision, a float32 one that does not shift first by 10
    to 1000 times too. Eager itself drifts in float32, so there only the simulation counts.
    """
    weight, _, scale, _ = parameters(device, dtype, 256, 1024)
    x = randn(device, dtype, 8, 1024, mean=ratio)
    expected = R.layer_norm_linear(*map(R.up, (x, weight, None, scale)))

    def error(out) -> float:
        return ((out.cpu().double() - expected).abs().max() / expected.abs().max()).item()

    eager = R.EAGER["layer_norm_linear"](x, weight, None, scale, eps=1e-5, activation="none")
    got = error(folded_layer_norm_linear(x, *fold_layer_norm(weight, None, scale)))
    print(f"|mean|/std {ratio} {dtype}: {got:.2e}, eager {error(eager):.2e}")
    allowed = SIMULATED[dtype][ratio]
    assert got <= 2 * (allowed if dtype == F32 else max(allowed, error(eager)))


@pytest.mark.parametrize("eps", [1e-5, 1e-12])
@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1000.5])
def test_constant_rows(device, value, eps):
    for dtype in dtypes(device):
        args = call_args(device, dtype, 3, 5, 64)
        args[0] = torch.full((3, 64), value, dtype=dtype, device=device)
        out = folded_layer_norm_linear(*args, eps=eps)
        assert_equal(out, args[3].to(dtype).expand(3, -1).contiguous())


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_inf_and_nan_spread_as_in_torch(device, value):
    for dtype in dtypes(device):
        args = call_args(device, dtype, 4, 3, 6)
        args[0][1, 2] = value
        out = folded_layer_norm_linear(*args)
        assert out[1].isnan().all() and out[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("perm", [(1, 0, 2), (2, 1, 0), (0, 2, 1)], ids=str)
def test_permuted_x_gets_its_whole_gradient(device, perm):
    for dtype in dtypes(device):
        args = call_args(device, dtype, 1, 3, 5)
        args[0] = permuted(randn(device, dtype, 4, 6, 5), perm)
        check_op(OP, args, {"activation": "gelu"}, eager=False)


@pytest.mark.parametrize("i", [1, 2, 3])
def test_frozen_arguments_may_not_require_a_gradient(device, i):
    args = call_args(device, F32, 3, 4, 5)
    name = ("x", "folded_weight", "weight_sum", "folded_bias")[i]
    bad = [a.clone().requires_grad_() if j == i else a for j, a in enumerate(args)]
    for x in (args[0], args[0].clone().requires_grad_()):
        bad[0] = x
        with pytest.raises(RuntimeError, match=f"torchweld::{OP}: {name} must be"):
            folded_layer_norm_linear(*bad)
    with torch.no_grad():
        assert_same_bits(folded_layer_norm_linear(*bad), folded_layer_norm_linear(*args))


def test_conv1d_weight_folds_as_a_view(device):
    for dtype in dtypes(device):
        weight, *rest = parameters(device, dtype, 48, 16)
        view = weight.t().contiguous().t()
        bounds = REFERENCES["fold_layer_norm"](weight, *rest)
        for got, bound in zip(fold_layer_norm(view, *rest), bounds, strict=True):
            check(got, bound, label="fold_layer_norm of a view", device=device)
        x = randn(device, dtype, 33, 16)
        check_op(OP, [x, *fold_layer_norm(view, *rest)], {"activation": "gelu_tanh"})


@given(
    **linear_cases(smallest_k=2),
    activation=st.sampled_from(R.ACTIVATIONS),
    mean=st.sampled_from([0.0, 3.0]),
)
def test_any_layout(m, n, k, activation, matrix, vector, mean, dtype, seed):
    dtype = getattr(torch, dtype)
    x = (values((m, k), "normal", seed) + mean).to(dtype)
    weight = (values((n, k), "normal", seed + 1) * k**-0.5).to(dtype)
    folded, total, shift = fold_layer_norm(weight, values((n,), "normal", seed + 2).to(dtype))
    dy = values((m, n), "normal", seed + 3).to(dtype)
    args = [
        strided(x, matrix),
        strided(folded, matrix),
        strided(total, vector),
        strided(shift, vector),
    ]
    check_op(OP, args, {"activation": activation}, dout=strided(dy, matrix), eager=False)
