"""layer_norm_linear, its forward and backward ops, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference as R
from numerics import Bound, Terms, assert_same_bits, check
from samples import BF16, F16, F32, F64, check_op, dtypes, forward_backward, need_kernel
from strategies import dtype_names, layouts, seeds, sizes, strided, values

layer_norm_linear = torch.ops.torchweld.layer_norm_linear
layer_norm_linear_forward = torch.ops.torchweld.layer_norm_linear_forward
layer_norm_linear_backward = torch.ops.torchweld.layer_norm_linear_backward

OP = "layer_norm_linear"
OPS = (OP, OP + "_forward", OP + "_backward")


@pytest.fixture(autouse=True)
def _kernel(request):
    if "device" in request.fixturenames:
        need_kernel(OP, request.getfixturevalue("device"))


def randn(device, dtype, *shape, scale=1.0, mean=0.0):
    return (torch.randn(*shape, dtype=F64) * scale + mean).to(dtype).to(device)


def call_args(device, dtype, m, n, k, *, mean=0.0, bias=True, scale=True, shift=True):
    return [
        randn(device, dtype, m, k, mean=mean),
        randn(device, dtype, n, k, scale=max(k, 1) ** -0.5),
        randn(device, dtype, n) if bias else None,
        randn(device, dtype, k, scale=0.2, mean=1.0) if scale else None,
        randn(device, dtype, k, scale=0.2) if shift else None,
    ]


SIZES = [(1, 1, 2), (1, 33, 31), (31, 1, 33), (33, 65, 64), (64, 31, 127), (127, 32, 128)]
SIZES += [(65, 127, 129), (11, 5, 1021), (2, 3, 4099)]


@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(device, dtype, size):
    if dtype not in dtypes(device):
        pytest.skip(f"{dtype} is CPU only")
    for activation in R.ACTIVATIONS:
        # Few rows or columns leave eager's largest error to luck.
        args = call_args(device, dtype, *size)
        check_op(OP, args, {"activation": activation}, eager=min(size[:2]) > 4)


@pytest.mark.parametrize("given_parameters", range(8))
def test_optional_parameters(device, given_parameters):
    names = ("bias", "scale", "shift")
    chosen = {name: bool(given_parameters >> i & 1) for i, name in enumerate(names)}
    for dtype in dtypes(device):
        check_op(OP, call_args(device, dtype, 33, 17, 40, **chosen), {"eps": 1e-3})


@pytest.mark.parametrize("rows", [1023, 4096, 65537])
def test_many_rows(device, rows):
    """The parameters' gradients are sums over all rows, kept in float32."""
    for dtype in dtypes(device):
        check_op(OP, call_args(device, dtype, rows, 3, 8), {"activation": "none"})


@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (2, 1, 4)], ids=str)
def test_leading_dims(device, lead):
    for dtype in dtypes(device):
        args = call_args(device, dtype, 1, 9, 17)
        args[0] = randn(device, dtype, *lead, 17)
        check_op(OP, args, {"activation": "gelu"}, eager=False)
        _, _, mean, rstd = layer_norm_linear_forward(*args)
        assert mean.shape == rstd.shape == lead


@pytest.mark.parametrize("size", [(0, 3, 4), (3, 0, 4), (0, 0, 4)], ids=str)
def test_empty(device, size):
    for dtype in dtypes(device):
        for activation in R.ACTIVATIONS:
            args = call_args(device, dtype, *size)
            check_op(OP, args, {"activation": activation}, eager=False)
            _, grads = forward_backward(OP, args, {"activation": activation})
            assert all((g == 0).all() for g in grads)


def test_no_features(device):
    """K = 0: the normalised row is empty, the result is the bias, as in torch."""
    for dtype in dtypes(device):
        args = call_args(device, dtype, 3, 4, 0)
        out, grads = forward_backward(OP, args, {})
        assert_same_bits(out, args[2].expand(3, -1).contiguous())
        assert [g.shape for g in grads] == [a.shape for a in args]
        assert (grads[2] == 3).all()


RATIOS = (0, 1, 16, 256, 1024)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_mean_far_from_zero(device, dtype, ratio):
    """At |mean| / std = ratio: at most twice the error of layer_norm, linear in eager torch."""
    args = [
        randn(device, dtype, 8, 1024, mean=ratio),
        randn(device, dtype, 256, 1024, scale=1 / 32),
        None,
        randn(device, dtype, 1024, scale=0.2, mean=1.0),
    ]
    check_op(OP, args)
    expected = R.layer_norm_linear(*map(R.up, args))
    ours = (layer_norm_linear(*args).cpu().double() - expected).abs().max()
    eager = R.EAGER[OP](*args, eps=1e-5, activation="none").cpu().double()
    assert ours <= 2 * (eager - expected).abs().max()


def test_parameter_gradients_are_float32_sums(device):
    """Rows of +1 and -1 are their own normalised rows, so every sum over the rows is of integers.

    An accumulator of the tensors' own dtype loses units long before 4096 rows.
    """
    signs = torch.where(torch.rand(4096, 16) < 0.5, -1, 1)
    x = torch.cat([signs, -signs], 1)
    weight, dy = torch.randint(-2, 3, (4, 32)), torch.randint(-4, 5, (4096, 4))
    dn = dy @ weight
    expected = {1: dy.T @ x, 2: dy.sum(0), 3: (dn * x).sum(0), 4: dn.sum(0)}
    ones = torch.ones_like(x)
    sizes = {1: dy.abs().T @ ones, 2: dy.abs().sum(0), 3: dn.abs().sum(0), 4: dn.abs().sum(0)}
    for dtype in dtypes(device):
        vectors = torch.zeros(4), torch.ones(32), torch.zeros(32)
        args = [t.to(dtype).to(device) for t in (x, weight, *vectors)]
        _, grads = forward_backward(OP, args, {"eps": 0.0}, dy.to(args[0]))
        for i, ref in expected.items():
            # One rounding of the sum, and a few units of float32 in each of its terms.
            terms = Terms([(8, sizes[i].double())])
            check(grads[i], Bound(ref.double(), terms, dtype), label=f"{OP} sum over rows")


@pytest.mark.parametrize("mean", [0.0, 100.0, 1e4, 1e6])
@pytest.mark.parametrize("std", [1e-3, 1.0])
def test_statistics_are_not_a_difference_of_squares(device, mean, std):
    """E[x^2] - E[x]^2 is worthless here; a two-pass variance is right to rounding."""
    x = (torch.randn(4, 256, dtype=F64) * std + mean).float().to(device)
    eye = torch.eye(256, device=device)
    _, _, got_mean, rstd = layer_norm_linear_forward(x, eye, eps=1e-12)
    wide = x.cpu().double()
    # One factor of |mean| / std is what a two-pass or Welford variance in float32 may lose; a
    # difference of squares loses its square.
    torch.testing.assert_close(got_mean.cpu().double(), wide.mean(-1), rtol=1e-6, atol=0.0)
    var = wide.var(-1, unbiased=False) + 1e-12
    allowed = var.rsqrt() * (1e-5 + 2 * 2.0**-24 * wide.abs().amax(-1) / var.sqrt())
    assert ((rstd.cpu().double() - var.rsqrt()).abs() <= allowed).all()


@pytest.mark.parametrize("eps", [1e-5, 1e-12])
@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1000.5])
def test_constant_rows(device, value, eps):
    """No deviation at all: the result is that of the shift, whatever eps."""
    for dtype in dtypes(device):
        value = torch.tensor(value, dtype=dtype).item()  # what the dtype can hold
        args = call_args(device, dtype, 3, 5, 64)
        args[0] = torch.full((3, 64), value, dtype=dtype, device=device)
        kwargs = {"eps": eps}
        check_op(OP, args, kwargs, backward=False)
        out, grads = forward_backward(OP, args, kwargs)
        assert out.isfinite().all()
        if eps == 1e-5:
            assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_inf_and_nan_spread_as_in_torch(device, value):
    for dtype in dtypes(device):
        for which in range(5):
            args = call_args(device, dtype, 4, 3, 6)
            args[which].view(-1)[1] = value
            expected = R.EAGER[OP](*args, eps=1e-5, activation="none")
            assert_same_bits(layer_norm_linear(*args).isnan(), expected.isnan())


def test_weight_of_a_conv1d_goes_in_as_a_view(device):
    for dtype in dtypes(device):
        args = call_args(device, dtype, 33, 48, 16)
        args[1] = args[1].t().contiguous().t()
        check_op(OP, args, {"activation": "gelu_tanh"})


@pytest.mark.parametrize("perm", [(1, 0, 2), (2, 1, 0), (0, 2, 1)], ids=str)
def test_permuted_x_gets_its_whole_gradient(device, perm):
    back = [perm.index(d) for d in range(3)]
    for dtype in dtypes(device):
        args = call_args(device, dtype, 1, 3, 5)
        args[0] = randn(device, dtype, 4, 6, 5).permute(back).contiguous().permute(perm)
        check_op(OP, args, {"activation": "gelu"})


@pytest.mark.parametrize("mask", range(32))
def test_output_mask(device, mask):
    """What was not asked for has shape (0,); the rest does not change."""
    wanted = [bool(mask >> i & 1) for i in range(5)]
    x, weight, bias, scale, shift = call_args(device, F32, 4, 3, 5)
    _, _, mean, rstd = layer_norm_linear_forward(x, weight, bias, scale, shift)
    args = [randn(device, F32, 4, 3), x, weight, scale, shift, mean, rstd]
    full = layer_norm_linear_backward(*args, output_mask=[True] * 5)
    got = layer_norm_linear_backward(*args, output_mask=wanted)
    for grad, ref, want in zip(got, full, wanted, strict=True):
        assert_same_bits(grad, ref if want else ref.new_empty(0))


@given(
    m=sizes(33),
    n=sizes(33),
    k=sizes(65, 2),
    activation=st.sampled_from(R.ACTIVATIONS),
    matrix=layouts(2),
    vector=layouts(1),
    mean=st.sampled_from([0.0, 3.0]),
    dtype=dtype_names,
    seed=seeds,
)
def test_any_layout(m, n, k, activation, matrix, vector, mean, dtype, seed):
    dtype = getattr(torch, dtype)
    x = (values((m, k), "normal", seed) + mean).to(dtype)
    weight = (values((n, k), "normal", seed + 1) * k**-0.5).to(dtype)
    vectors = [
        values((size,), "normal", seed + 2 + i).to(dtype) for i, size in enumerate((n, k, k))
    ]
    dy = values((m, n), "normal", seed + 9).to(dtype)
    args = [strided(x, matrix), strided(weight, matrix), *(strided(v, vector) for v in vectors)]
    check_op(OP, args, {"activation": activation}, dout=strided(dy, matrix), eager=False)
