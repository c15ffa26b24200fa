"""softmax and softmax_backward against float64."""

from __future__ import annotations

import math

import pytest
import torch

import numerics
from cuda_graphs import cuda_graph
from numerics import assert_equal, assert_same_bits
from running import REFERENCES
from samples import BF16, F16, F32, F64, check_op, dtypes
from tensors import randn
from torchweld.tuning.observe import observe

softmax = torch.ops.torchweld.softmax
softmax_backward = torch.ops.torchweld.softmax_backward

OP = "softmax"
OPS = (OP, "softmax_backward")
TILES = (1, 2, 3, 7, 31, 32, 33, 63, 64, 65, 127, 128, 129, 251, 509)
LONG = (1023, 1024, 1025, 4095, 4096, 4097, 8191, 8192, 8193)
HUGE = (32769, 70000)


@pytest.mark.parametrize("n", TILES + LONG + HUGE)
def test_row_length(device, dtype, n):
    rows = 5 if n < 1000 else 2
    check_op("softmax", [randn(device, dtype, rows, n, scale=3.0)])
    if device == "cuda" and n == HUGE[-1]:
        check_op("softmax", [randn(device, dtype, 3, 300_000)])
        check_op("softmax", [randn(device, dtype, 1, 300_001)])
        check_op("softmax", [randn(device, dtype, 2, 262_144)])
        check_op("softmax", [randn(device, dtype, 3, 250_001)])


@pytest.mark.parametrize("rows", [31, 32, 33, 127, 128, 129, 65535, 65536, 65537, 131101])
def test_row_count(device, rows):
    for dtype in dtypes(device):
        check_op("softmax", [randn(device, dtype, rows, 3)])


@pytest.mark.parametrize("n", [1, 2, 5, 32, 33, 129, 1025, 8193])
def test_one_hot(device, n):
    """One logit 0, the rest so low that their exponential is 0: exactly one-hot, no gradient."""
    for dtype in dtypes(device):
        for j in {0, 1 % n, n // 2, n - 1}:
            x = torch.full((2, n), -1000.0, dtype=dtype, device=device)
            x[:, j] = 0
            expected = torch.zeros_like(x)
            expected[:, j] = 1
            y = softmax(x)
            assert_equal(y, expected)
            assert_equal(softmax_backward(randn(device, dtype, 2, n), y), torch.zeros_like(x))


@pytest.mark.parametrize("power", range(14))
def test_uniform(device, power):
    """Equal logits over 2^k entries give exactly 2^-k, whatever the logit."""
    n = 2**power
    for dtype in dtypes(device):
        for logit in (0.0, 1.5, -7.0, 60000.0, -60000.0):
            y = softmax(torch.full((2, n), logit, dtype=dtype, device=device))
            assert_equal(y, torch.full_like(y, 2.0**-power))


@pytest.mark.parametrize("offset", [0.0, 100.0, -100.0, 1e4, -1e4, -2.5e5, 133120.0])
def test_offset_of_a_row(device, offset):
    """No finite sentinel replaces -inf: a row may have any values. Powers of two keep x exact."""
    for dtype in (F32, F64) if device == "cpu" else (F32,):
        steps = torch.randint(-64, 65, (4, 37), dtype=F64) / 8 + offset
        check_op("softmax", [steps.to(dtype).to(device)])
    for dtype in (F16, BF16):
        x = torch.full((3, 9), offset, dtype=F64).clamp(-65504, 65504).to(dtype).to(device)
        assert_equal(softmax(x), torch.softmax(x, -1))


def test_largest_finite_values(device):
    for dtype in dtypes(device):
        big = torch.finfo(dtype).max
        x = torch.tensor([[big, big], [-big, -big], [big, -big], [0, -big], [big, 0]], dtype=dtype)
        expected = [[0.5, 0.5], [0.5, 0.5], [1, 0], [1, 0], [1, 0]]
        assert_equal(softmax(x.to(device)), torch.tensor(expected, dtype=dtype, device=device))


def test_subnormal_probabilities(device):
    """Logits 87 to 103 below the largest: float32 probabilities are subnormal, and not 0."""
    low = torch.arange(-103, -87, 0.25, dtype=F64)
    x = torch.cat([torch.zeros(1, dtype=F64), low]).expand(3, -1)
    y = softmax(x.to(F32).to(device))
    expected = torch.softmax(x, -1)
    # exp2's argument (x - max) * log2(e) is rounded once (2^-24) and log2(e) itself (2^-26), exp2
    # and the division add 2^-21; then one subnormal step.
    error = (y.cpu().double() - expected).abs()
    allowed = ((2.0**-24 + 2.0**-26) * x.abs() + 2.0**-21) * expected + 2.0**-149
    assert (error <= allowed).all(), f"largest error {(error / allowed).max():.3g} of the allowed"


SPECIAL = {"+inf": math.inf, "-inf": -math.inf, "nan": math.nan}


@pytest.mark.parametrize("n", [1, 2, 3, 33, 130, 4097])
@pytest.mark.parametrize("value", SPECIAL)
def test_inf_and_nan_spread_as_in_torch(device, value, n):
    for dtype in dtypes(device):
        for j in {0, n // 2, n - 1}:
            x = randn(device, dtype, 3, n)
            x[1, j] = SPECIAL[value]
            check_op("softmax", [x], backward=False)
            y, expected = softmax(x), torch.softmax(x, -1)
            assert_equal(y.isnan(), expected.isnan())
            assert_equal(y == 0, expected == 0)


def test_rows_of_only_minus_inf_are_nan_as_in_torch(device):
    for dtype in dtypes(device):
        x = torch.full((2, 40), -math.inf, dtype=dtype, device=device)
        x[1, 3] = 2.0
        expected = torch.zeros_like(x)
        expected[0], expected[1, 3] = math.nan, 1.0
        assert_equal(softmax(x), expected)


@pytest.mark.parametrize("n", [1, 33, 129, 4097])
def test_backward_op_of_any_y(device, n):
    """The formula holds for a y that is no softmax."""
    for dtype in dtypes(device):
        dy, y = randn(device, dtype, 3, n), randn(device, dtype, 3, n)
        (bound,) = REFERENCES["softmax_backward"](dy, y)
        numerics.check(softmax_backward(dy, y), bound, label="softmax_backward", device=device)


def test_backward_spreads_nan_as_torch(device):
    y = torch.softmax(torch.randn(3, 6), -1).to(device)
    dy = torch.randn(3, 6).to(device)
    for bad in SPECIAL.values():
        for which in (0, 1):
            pair = [dy.clone(), y.clone()]
            pair[which][1, 2] = bad
            # torch's CUDA kernel writes dy * y - y * sum, which is NaN in one more place.
            expected = torch.ops.aten._softmax_backward_data(*(t.cpu() for t in pair), -1, F32)
            assert_equal(softmax_backward(*pair).isnan().cpu(), expected.isnan())


@pytest.mark.parametrize("n", [5, 8, 129, 1024, 1025])
def test_rows_do_not_depend_on_their_neighbours(device, n):
    for dtype in dtypes(device):
        x = randn(device, dtype, 6, n)
        whole = softmax(x)
        # A CUDA kernel's sums depend on how far a row starts from a 16-byte boundary.
        for i in range(6) if device == "cpu" or n * x.element_size() % 16 == 0 else (0,):
            assert_same_bits(softmax(x[i]), whole[i])
        x[2] = math.nan
        assert_same_bits(softmax(x)[3:], whole[3:])


@pytest.mark.parametrize("n", [16385, 32768, 40001, 65536])
def test_more_long_rows_than_a_gpu_takes_at_a_time(device, n):
    rows = 139 if device == "cuda" else 2
    for dtype in dtypes(device):
        x, dy = randn(device, dtype, rows, n), randn(device, dtype, rows, n)
        y = softmax(x)
        dx = softmax_backward(dy, y)
        period = 16 // x.element_size()  # rows that start alike
        assert_same_bits(softmax(x[period:]), y[period:])
        assert_same_bits(softmax_backward(dy[period:], y[period:]), dx[period:])
        for part in (slice(0, 2), slice(-2, None)):
            (bound,) = REFERENCES["softmax"](x[part])
            numerics.check(y[part], bound, label="softmax", device=device)
            (bound,) = REFERENCES["softmax_backward"](dy[part], y[part])
            numerics.check(dx[part], bound, label="softmax_backward", device=device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA streams")
@pytest.mark.parametrize(("rows", "n"), [(4700, 32768), (601, 163_848), (603, 131_073)])
def test_more_turns_than_a_cluster_remembers(rows, n):
    """Rows are claimed from a counter, which must be 0 again after every call."""
    x = torch.randn(rows, n, device="cuda").to(BF16)
    y = softmax(x)
    dx = softmax_backward(x, y)
    for _ in range(2):
        assert_same_bits(softmax(x), y)
        assert_same_bits(softmax_backward(x, y), dx)
    for part in (slice(0, 3), slice(rows // 2, rows // 2 + 3), slice(-3, None)):
        (bound,) = REFERENCES["softmax"](x[part])
        numerics.check(y[part], bound, label="softmax", device="cuda")
        (bound,) = REFERENCES["softmax_backward"](x[part], y[part])
        numerics.check(dx[part], bound, label="softmax_backward", device="cuda")
    sums = y.sum(-1, dtype=F32)
    assert (sums - 1).abs().max() < 2.0**-8  # a result is rounded by at most 2^-9 of itself


# Columns in 2 bytes: 7 and 14 chunks a block of the gradient's ring of 8 blocks and 8 and 14 of its
# ring of 16, then 14 and 16 of the forward's. A ring has 14 slots: rows of 7 or 14 chunks begin in
# the same ones, and rows of 16 are copied twice in part.
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA rings")
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("n", [229_376, 458_752, 524_288, 917_504, 1_048_576])
def test_rows_that_fill_the_ring(dtype, n):
    """A group must not take a chunk of the row before for its own, which is still on its way."""
    n //= dtype.itemsize // 2
    rows = 2**27 // (n * dtype.itemsize)
    torch.manual_seed(n)
    x, dy = (torch.randn(rows, n, device="cuda").to(dtype) for _ in range(2))
    y = softmax(x)
    dx = softmax_backward(dy, y)
    for _ in range(5):
        assert_same_bits(softmax(x), y)
        assert_same_bits(softmax_backward(dy, y), dx)
    # Sums of a thousand values a thread round by less than 2^-14, a result by 2^-9 or about 2^-22.
    sums, rounding = 2.0**-14, 2.0 ** (-8 if dtype == BF16 else -20)
    for part in torch.arange(rows, device="cuda").split(8):
        expected = torch.softmax(x[part].float(), -1)
        error = (y[part].float() - expected).abs()
        assert (error <= (sums + rounding) * expected).all()
        wide_y, wide_dy = y[part].float(), dy[part].float()
        dot = (wide_y * wide_dy).sum(-1, keepdim=True)
        expected = wide_y * (wide_dy - dot)
        error = (dx[part].float() - expected).abs()
        assert (error <= rounding * expected.abs() + sums * wide_y).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA rings")
@pytest.mark.parametrize("blocks", [8, 16])
@pytest.mark.parametrize(("dtype", "n"), [(F32, 262_144), (BF16, 500_000)])
def test_gradient_of_rows_longer_than_the_ring_of_8_blocks(dtype, n, blocks):
    """Copied twice in part, or by 16 blocks where these fit; more rows than run at a time."""
    _C = pytest.importorskip("torchweld._C")
    ops = torch.ops.torchweld
    torch.manual_seed(n)
    x, dy = (torch.randn(40, n, device="cuda").to(dtype) for _ in range(2))
    y = softmax(x)
    _, (record,) = observe(lambda: softmax_backward(dy, y))
    ring = _C.candidate("softmax", record["problem"], f"ring {blocks}")
    if ring["refusal"]:
        pytest.skip(ring["refusal"])
    ops._force_choice("softmax", record["problem"], ring["choice"])
    try:
        dx = softmax_backward(dy, y)
        for _ in range(5):
            assert_same_bits(softmax_backward(dy, y), dx)
    finally:
        ops._force_choice("softmax", record["problem"], "")
    for part in (slice(0, 3), slice(18, 21), slice(-3, None)):
        (bound,) = REFERENCES["softmax_backward"](dy[part], y[part])
        numerics.check(dx[part], bound, label="softmax_backward", device="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA streams")
def test_long_rows_on_two_streams_at_once():
    xs = [torch.randn(257, 40_000 + 8 * i, device="cuda").to(F16) for i in range(2)]
    expected = [softmax(x) for x in xs]
    streams = [torch.cuda.Stream() for _ in xs]
    torch.cuda.synchronize()
    found = []
    for _ in range(10):
        for x, stream in zip(xs, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(softmax(x))
    torch.cuda.synchronize()
    for i, y in enumerate(found):
        assert_same_bits(y, expected[i % 2])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs")
def test_long_rows_in_a_replayed_graph():
    x = torch.randn(257, 50_257, device="cuda").to(F16)
    expected = softmax(x)
    expected_dx = softmax_backward(x, expected)

    def run():
        y = softmax(x)
        return y, softmax(x), softmax_backward(x, y)

    graph, results = cuda_graph(run)
    for _ in range(3):
        for out in results:
            out.zero_()
        graph.replay()
        assert_same_bits(results, (expected, expected, expected_dx))


@pytest.mark.parametrize("n", [32769, 40_003, 65_538])
@pytest.mark.parametrize("beside", [math.nan, math.inf])
def test_long_rows_do_not_depend_on_what_is_beside(device, n, beside):
    for dtype in dtypes(device):
        flat = randn(device, dtype, 3 * n + 16)
        flat[3 * n :] = beside
        x = flat[: 3 * n].view(3, n)
        assert_same_bits(softmax(x), softmax(x.clone()))
        period = 16 // x.element_size()
        wide = randn(device, dtype, 3, n + period)
        wide[:, n:] = beside
        assert_same_bits(softmax(wide[:, :n]), softmax(wide[:, :n].contiguous()))
        y = softmax(x)
        x[1] = beside
        assert_same_bits(softmax(x)[::2], y[::2])


@pytest.mark.parametrize("n", [32768, 50_257, 70_000])
@pytest.mark.parametrize("value", SPECIAL)
def test_inf_and_nan_spread_in_long_rows(device, value, n):
    for dtype in dtypes(device):
        x = randn(device, dtype, 4, n)
        for row, j in enumerate((0, n // 2, n - 1)):
            x[row, j] = SPECIAL[value]
        x[3] = -math.inf
        y = softmax(x)
        assert_equal(y.isnan(), torch.softmax(x, -1).isnan())
        if value == "-inf":
            assert y[0, 0] == y[1, n // 2] == y[2, n - 1] == 0


def test_shifted_rows_have_the_bits_of_aligned_ones(device):
    for dtype in dtypes(device):
        for n in (64, 1024, 8192):
            flat = randn(device, dtype, 3 * (n + 1) + 2)
            for x in (flat[1 : 3 * n + 1].view(3, n), flat[1:-1].view(3, -1)[:, :n]):
                y = softmax(x)
                assert_same_bits(y, softmax(x.contiguous()))
                assert_same_bits(softmax_backward(x, y), softmax_backward(x.contiguous(), y))


def test_expanded_rows(device):
    x = randn(device, F32, 1, 1, 70).expand(4, 3, 70)
    assert_same_bits(softmax(x), softmax(x.contiguous()))
    column = randn(device, F32, 5, 1).expand(5, 70)
    assert_same_bits(softmax(column), softmax(column.contiguous()))
