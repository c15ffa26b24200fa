"""layer_norm_linear and rms_norm_linear, their forward and backward ops, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference as R
from cuda_graphs import cuda_graph
from numerics import assert_same_bits, check
from running import Running
from samples import BF16, F16, F32, F64, call, check_op, dtypes, forward_backward
from strategies import linear_cases, strided, values
from tensors import check_output_mask, permuted, randn

OP = LAYER_NORM = "layer_norm_linear"
RMS_NORM = "rms_norm_linear"
NORMS = (LAYER_NORM, RMS_NORM)
OPS = tuple(op + part for op in NORMS for part in ("", "_forward", "_backward"))
EPS = {LAYER_NORM: 1e-5, RMS_NORM: 1e-6}  # the ops' own
VECTORS = {LAYER_NORM: ("bias", "scale", "shift"), RMS_NORM: ("bias", "scale")}

both_norms = pytest.mark.parametrize("op", NORMS)


def call_args(op, device, dtype, m, n, k, *, mean=0.0, bias=True, scale=True, shift=True):
    args = [
        randn(device, dtype, m, k, mean=mean),
        randn(device, dtype, n, k, scale=max(k, 1) ** -0.5),
        randn(device, dtype, n) if bias else None,
        randn(device, dtype, k, scale=0.2, mean=1.0) if scale else None,
    ]
    if op == LAYER_NORM:
        args.append(randn(device, dtype, k, scale=0.2) if shift else None)
    return args


SIZES = [(1, 33, 31), (31, 1, 33), (33, 65, 64), (64, 31, 127), (127, 32, 128)]
SIZES += [(65, 127, 129), (11, 5, 1021), (2, 3, 4099)]
# Few rows, whose norm runs in the matmul on a GPU, and the first number of rows where it does not.
SIZES += [(1, 40, 8), (9, 24, 200), (16, 24, 768), (7, 33, 1536), (17, 24, 768), (5, 33, 1544)]


@both_norms
@pytest.mark.parametrize("size", [(1, 1, 1), *SIZES], ids=str)
def test_sizes(op, device, dtype, size):
    if op == LAYER_NORM and size[2] == 1:  # its rows are all 0
        size = (*size[:2], 2)
    for activation in R.ACTIVATIONS:
        # Few rows or columns leave eager's largest error to luck.
        args = call_args(op, device, dtype, *size)
        check_op(op, args, {"activation": activation}, eager=min(size[:2]) > 4)


@both_norms
@pytest.mark.parametrize("size", [(256, 40, 768), (300, 200, 64), (700, 384, 1600)], ids=str)
def test_more_than_a_few_rows(op, device, size):
    if device == "cpu" and size[1] > 200:  # the bounds would take 5 s
        size = (350, 96, size[2])
    for dtype in (F16, BF16):
        args = call_args(op, device, dtype, *size, mean=3.0)
        check_op(op, args, {"activation": "gelu_tanh"})
        args[1] = args[1].t().contiguous().t()
        args[0] = randn(device, dtype, size[0], size[2] + 8)[:, 8:]
        check_op(op, args)


@both_norms
def test_calls_of_many_sizes_have_the_same_bits(op, device):
    """A call reuses the scratch memory of the call before it."""
    calls = [call_args(op, device, BF16, m, 136, 256) for m in (256, 1500, 300, 4000, 129)]
    first = [call(op)(*args) for args in calls]
    for _ in range(5):
        assert_same_bits([call(op)(*args) for args in calls], first)
    if device == "cuda":
        graph, captured = cuda_graph(lambda: [call(op)(*args) for args in calls])
        for _ in range(3):
            graph.replay()
            assert_same_bits(captured, first)


@pytest.mark.parametrize(
    "op, given_parameters", [(op, i) for op in NORMS for i in range(2 ** len(VECTORS[op]))]
)
def test_optional_parameters(op, device, given_parameters):
    chosen = {name: bool(given_parameters >> i & 1) for i, name in enumerate(VECTORS[op])}
    for dtype in dtypes(device):
        check_op(op, call_args(op, device, dtype, 33, 17, 40, **chosen), {"eps": 1e-3})


@both_norms
@pytest.mark.parametrize("rows", [1023, 4096, 65537])
def test_many_rows(op, device, rows):
    """The parameters' gradients are sums over all rows, kept in float32."""
    for dtype in dtypes(device):
        check_op(op, call_args(op, device, dtype, rows, 3, 8), {"activation": "none"})


@both_norms
@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (2, 1, 4)], ids=str)
def test_leading_dims(op, device, lead):
    for dtype in dtypes(device):
        args = call_args(op, device, dtype, 1, 9, 17)
        args[0] = randn(device, dtype, *lead, 17)
        check_op(op, args, {"activation": "gelu"}, eager=False)
        _, _, *statistics = call(op + "_forward")(*args)
        assert all(s.shape == lead for s in statistics)


@both_norms
@pytest.mark.parametrize("size", [(0, 3, 4), (3, 0, 4), (0, 0, 4)], ids=str)
def test_empty(op, device, size):
    for dtype in dtypes(device):
        for activation in R.ACTIVATIONS:
            args = call_args(op, device, dtype, *size)
            check_op(op, args, {"activation": activation}, eager=False)
            _, grads = forward_backward(op, args, {"activation": activation})
            assert all((g == 0).all() for g in grads)


@both_norms
def test_no_features(op, device):
    """K = 0: the normalised row is empty, the result is the bias, as in torch."""
    for dtype in dtypes(device):
        args = call_args(op, device, dtype, 3, 4, 0)
        out, grads = forward_backward(op, args, {})
        assert_same_bits(out, args[2].expand(3, -1).contiguous())
        assert [g.shape for g in grads] == [a.shape for a in args]
        assert (grads[2] == 3).all()


RATIOS = (0, 1, 16, 256, 1024)


@both_norms
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_mean_far_from_zero(op, device, dtype, ratio):
    """At |mean| / std = ratio: at most twice the error of norm and linear in eager torch."""
    args = [
        randn(device, dtype, 8, 1024, mean=ratio),
        randn(device, dtype, 256, 1024, scale=1 / 32),
        None,
        randn(device, dtype, 1024, scale=0.2, mean=1.0),
    ]
    check_op(op, args)
    expected = getattr(R, op)(*map(R.up, args))
    ours = (call(op)(*args).cpu().double() - expected).abs().max()
    eager = R.EAGER[op](*args, eps=EPS[op], activation="none").cpu().double()
    assert ours <= 2 * (eager - expected).abs().max()


@both_norms
def test_parameter_gradients_are_float32_sums(op, device):
    """Rows of +1 and -1 are their own normalised rows, so every sum over the rows is of integers.

    An accumulator of the tensors' own dtype loses units long before 4096 rows.
    """
    signs = torch.where(torch.rand(4096, 16) < 0.5, -1, 1)
    x = torch.cat([signs, -signs], 1)
    weight, dy = torch.randint(-2, 3, (4, 32)), torch.randint(-4, 5, (4096, 4))
    dn = dy @ weight
    expected = [dy.T @ x, dy.sum(0), (dn * x).sum(0), dn.sum(0)]
    ones = torch.ones_like(x)
    sums = [dy.abs().T @ ones, dy.abs().sum(0), dn.abs().sum(0), dn.abs().sum(0)]
    vectors = (torch.zeros(4), torch.ones(32), torch.zeros(32))[: len(VECTORS[op])]
    for dtype in dtypes(device):
        args = [t.to(dtype).to(device) for t in (x, weight, *vectors)]
        _, grads = forward_backward(op, args, {"eps": 0.0}, dy.to(args[0]))
        for grad, ref, size in zip(grads[1:], expected, sums, strict=False):
            # One rounding of the sum, and a few units of float32 in each of its terms.
            bound = Running(ref.double(), dtype).plus(8, size.double()).bound()
            check(grad, bound, label=f"{op} sum over rows")


@pytest.mark.parametrize("mean", [0.0, 100.0, 1e4, 1e6])
@pytest.mark.parametrize("std", [1e-3, 1.0])
def test_statistics_are_not_a_difference_of_squares(device, mean, std):
    """E[x^2] - E[x]^2 is worthless here; a two-pass variance is right to rounding."""
    x = (torch.randn(4, 256, dtype=F64) * std + mean).float().to(device)
    eye = torch.eye(256, device=device)
    _, _, got_mean, rstd = call("layer_norm_linear_forward")(x, eye, eps=1e-12)
    wide = x.cpu().double()
    # One factor of |mean| / std is the loss of a two-pass or Welford variance in float32; a
    # difference of squares loses its square.
    torch.testing.assert_close(got_mean.cpu().double(), wide.mean(-1), rtol=1e-6, atol=0.0)
    var = wide.var(-1, unbiased=False) + 1e-12
    allowed = var.rsqrt() * (1e-5 + 2 * 2.0**-24 * wide.abs().amax(-1) / var.sqrt())
    assert ((rstd.cpu().double() - var.rsqrt()).abs() <= allowed).all()


@pytest.mark.parametrize("size", [1e-4, 1.0, 100.0, 1e4])
def test_size_of_the_rows(device, size):
    """float16 squares of 300 overflow and those of 1e-4 vanish, so statistics are float32."""
    for dtype in dtypes(device):
        args = call_args(RMS_NORM, device, dtype, 9, 5, 64)
        args[0] = randn(device, dtype, 9, 64, scale=size)
        check_op(RMS_NORM, args, {"eps": 1e-12}, eager=False)


@pytest.mark.parametrize("large_eps", [True, False])
@pytest.mark.parametrize(
    "op, value", [(RMS_NORM, 0.0), *((LAYER_NORM, v) for v in (0.0, 1.0, -3.0, 1000.5))]
)
def test_rows_that_a_norm_makes_zero(op, device, value, large_eps):
    """eps^-0.5 scales exact zeros, so only the vectors contribute, for any eps."""
    eps = EPS[op] if large_eps else 1e-12
    for dtype in dtypes(device):
        value = torch.tensor(value, dtype=dtype).item()  # rounded to the dtype
        args = call_args(op, device, dtype, 3, 5, 64)
        args[0] = torch.full((3, 64), value, dtype=dtype, device=device)
        check_op(op, args, {"eps": eps}, backward=False)
        out, grads = forward_backward(op, args, {"eps": eps})
        assert out.isfinite().all()
        if op == RMS_NORM:
            assert_same_bits(out, args[2].expand_as(out).contiguous())
        if large_eps:
            assert all(g.isfinite().all() for g in grads)


@both_norms
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_inf_and_nan_spread_as_in_torch(op, device, value):
    for dtype in dtypes(device):
        for which in range(2 + len(VECTORS[op])):
            args = call_args(op, device, dtype, 4, 3, 6)
            args[which].view(-1)[1] = value
            expected = R.EAGER[op](*args, eps=EPS[op], activation="none")
            assert_same_bits(call(op)(*args).isnan(), expected.isnan())


@both_norms
def test_weight_of_a_conv1d_goes_in_as_a_view(op, device):
    for dtype in dtypes(device):
        args = call_args(op, device, dtype, 33, 48, 16)
        args[1] = args[1].t().contiguous().t()
        check_op(op, args, {"activation": "gelu_tanh"})


@both_norms
@pytest.mark.parametrize("perm", [(1, 0, 2), (2, 1, 0), (0, 2, 1)], ids=str)
def test_permuted_x_gets_its_whole_gradient(op, device, perm):
    for dtype in dtypes(device):
        args = call_args(op, device, dtype, 1, 3, 5)
        args[0] = permuted(randn(device, dtype, 4, 6, 5), perm)
        check_op(op, args, {"activation": "gelu"})


@pytest.mark.parametrize(
    "op, mask", [(op, mask) for op in NORMS for mask in range(4 * 2 ** len(VECTORS[op]))]
)
def test_output_mask(op, device, mask):
    x, weight, *vectors = call_args(op, device, F32, 4, 3, 5)
    _, _, *statistics = call(op + "_forward")(x, weight, *vectors)
    args = [randn(device, F32, 4, 3), x, weight, *vectors[1:], *statistics]
    check_output_mask(op + "_backward", args, mask, 2 + len(vectors))


@both_norms
@given(
    **linear_cases(smallest_k=2),
    activation=st.sampled_from(R.ACTIVATIONS),
    mean=st.sampled_from([0.0, 3.0]),
)
def test_any_layout(op, m, n, k, activation, matrix, vector, mean, dtype, seed):
    dtype = getattr(torch, dtype)
    x = (values((m, k), "normal", seed) + mean).to(dtype)
    weight = (values((n, k), "normal", seed + 1) * k**-0.5).to(dtype)
    vectors = [
        values((size,), "normal", seed + 2 + i).to(dtype)
        for i, size in enumerate((n, k, k)[: len(VECTORS[op])])
    ]
    dy = values((m, n), "normal", seed + 9).to(dtype)
    args = [strided(x, matrix), strided(weight, matrix), *(strided(v, vector) for v in vectors)]
    check_op(op, args, {"activation": activation}, dout=strided(dy, matrix), eager=False)
