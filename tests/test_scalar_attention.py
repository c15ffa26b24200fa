"""scalar_attention and its gradient against float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given

import numerics
import reference as R
from numerics import acc_dtype, assert_equal, assert_same_bits, assert_same_nonfinite
from running import GRADIENTS, REFERENCES
from samples import BF16, F16, F32, F64, check_op, dtypes, forward_backward
from strategies import dtype_names, kinds, layouts, seeds, sizes, strided, values
from tensors import check_output_mask

scalar_attention = torch.ops.torchweld.scalar_attention
forward = torch.ops.torchweld.scalar_attention_forward
backward = torch.ops.torchweld.scalar_attention_backward

OP = "scalar_attention"
OPS = (OP, OP + "_forward", OP + "_backward")
EDGES = (1, 2, 3, 7, 31, 32, 33, 127, 128, 129, 251, 511, 512, 513)
LONG = (1023, 1024, 1025)


def vectors(device: str, dtype: torch.dtype, n: int, *scales: float) -> list[torch.Tensor]:
    """q, k, v."""
    scales = scales or (1.0, 1.0, 1.0)
    return [(torch.randn(n, dtype=F64) * s).to(dtype).to(device) for s in scales]


@pytest.mark.parametrize("n", EDGES)
def test_length(device, dtype, n):
    check_op("scalar_attention", vectors(device, dtype, n))


@pytest.mark.parametrize("n", LONG)
def test_long(device, n):
    for dtype in (F32, BF16):
        check_op("scalar_attention", vectors(device, dtype, n))
    if device == "cuda" and n == LONG[-1]:
        for longer in (4099, 8192, 12289):
            check_op("scalar_attention", vectors(device, F32, longer))


def test_nothing_square_is_in_memory():
    """The 2^17 x 2^17 scores would be 64 GiB; four rows are looked at."""
    if not torch.cuda.is_available():
        pytest.skip("2^34 exponentials are a GPU's work")
    n = 2**17
    q, k, v = vectors("cuda", F32, n)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    z = scalar_attention(q, k, v)
    assert torch.cuda.max_memory_allocated() - before < 2**30
    rows = torch.tensor([0, 1, n // 2, n - 1])
    expected = torch.softmax(q[rows].double()[:, None] * k.double(), -1) @ v.double()
    torch.testing.assert_close(z[rows].double(), expected, rtol=1e-4, atol=1e-5)


def test_empty(device):
    for dtype in dtypes(device):
        leaves = [torch.empty(0, dtype=dtype, device=device, requires_grad=True) for _ in range(3)]
        z = scalar_attention(*leaves)
        assert_equal(z.detach(), torch.empty(0, dtype=dtype, device=device))
        z.sum().backward()
        for leaf in leaves:
            assert_equal(leaf.grad, torch.empty_like(leaf))


SCALES = (1e-3, 0.3, 3.0, 12.0, 60.0)


@pytest.mark.parametrize("scale", SCALES)
def test_scores_of_any_size(device, scale):
    """Scores range from a flat softmax to rows that see one key."""
    for dtype in dtypes(device):
        check_op("scalar_attention", vectors(device, dtype, 97, scale, scale, 1.0))


@pytest.mark.parametrize("offset", [0.0, 100.0, -3e3, 2.0**17])
def test_keys_may_lie_anywhere(device, offset):
    """A shift of the keys changes no probability, and here no rounding of them either."""
    q, _, v = vectors(device, F32, 70, 0.5, 1.0, 1.0)
    k = (torch.randint(-64, 65, (70,)) / 8).to(device)
    z = scalar_attention(q, k + offset, v)
    exact = R.scalar_attention(R.up(q), R.up(k), R.up(v))
    # The product q * k is rounded where it is formed: half a unit of the largest score.
    allowed = 2.0**-23 * (q.abs().max() * (abs(offset) + 8)).item() * 4 + 1e-6
    assert (z.cpu().double() - exact).abs().max() <= allowed


def test_fast_and_careful_rows_side_by_side(device):
    """Rows of every span, in one block and one stage of a block."""
    q, k, v = vectors(device, F32, 700)
    q = q * torch.where(torch.arange(700, device=device) % 3 == 0, 200.0, 0.1)
    q[5:9] = 0.0
    check_op("scalar_attention", [q, k, v])


@pytest.mark.parametrize("n", [1, 2, 8, 64, 512, 1024])
def test_uniform(device, n):
    """Equal scores over 2^k keys give the exact mean of small integers."""
    for dtype in dtypes(device):
        v = torch.randint(-4, 5, (n,)).to(dtype).to(device)
        mean = v.double().mean().to(dtype)
        zero, k = torch.zeros(n, dtype=dtype, device=device), vectors(device, dtype, n)[1]
        assert_equal(scalar_attention(zero, k, v), mean.expand(n).clone())
        # Gradients of a flat softmax, on grids where every product and sum is exact.
        dz = torch.randint(-4, 5, (n,)).to(dtype).to(device)
        _, dv = forward_backward("scalar_attention", [zero, k, v], {}, dz)[1][1:]
        assert_equal(dv, dz.double().mean().to(dtype).expand(n).clone())


@pytest.mark.parametrize("n", [2, 3, 33, 129, 700])
def test_one_hot(device, n):
    """One key far above the rest: z is its value to the bit, and only that key has gradients."""
    for dtype in dtypes(device):
        q = torch.full((n,), 64.0, dtype=dtype, device=device)
        q[1::2] = -64.0
        v = torch.randint(-8, 9, (n,)).to(dtype).to(device)
        dz = torch.randint(-8, 9, (n,)).to(dtype).to(device)
        for top, bottom in {(0, n - 1), (n // 2, 0), (n - 1, n // 2)}:
            k = torch.zeros(n, dtype=dtype, device=device)
            k[top], k[bottom] = 16.0, -16.0
            if top == bottom:
                continue
            z, (dq, dk, dv) = forward_backward("scalar_attention", [q, k, v], {}, dz)
            expected = torch.where(q > 0, v[top], v[bottom])
            assert_equal(z, expected)
            scatter = torch.zeros(n, dtype=F64, device=device)
            scatter[top] = dz[q > 0].double().sum()
            scatter[bottom] = dz[q < 0].double().sum()
            assert_equal(dv, scatter.to(dtype))
            assert_equal(dq, torch.zeros_like(q))
            assert_equal(dk, torch.zeros_like(k))


def test_largest_finite_values(device):
    """No product or sum overflows that the result does not need."""
    for dtype in (F32, F16, BF16):
        big = torch.finfo(dtype).max / 2
        v = torch.full((40,), big, dtype=dtype, device=device)
        q, k, _ = vectors(device, dtype, 40)
        out = scalar_attention(q, k, v).double()
        # A rounding of the result, one of each of 40 products and sums.
        assert ((out / big - 1).abs() <= torch.finfo(dtype).eps + 40 * 2.0**-23).all()


def test_largest_scores(device):
    if device == "cpu":
        pytest.skip("on the CPU a score that overflows is inf, as in torch")
    big = torch.finfo(F32).max
    q = torch.tensor([big, -big, 0.0, 1.0], device=device)
    k = torch.tensor([big, -big, 1.0, 0.0], device=device)
    v = torch.tensor([1.0, 2.0, 4.0, 9.0], device=device)
    assert_equal(scalar_attention(q, k, v), torch.tensor([1.0, 2.0, 4.0, 1.0], device=device))


SPECIAL = (math.inf, -math.inf, math.nan)


@pytest.mark.parametrize("n", [1, 2, 3, 40])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("value", SPECIAL, ids=str)
def test_inf_and_nan_spread_as_in_torch(device, value, which, n):
    for dtype, sign in itertools.product(dtypes(device), (0, 1, -1)):
        args = vectors(device, dtype, n)
        args[0] = args[0].abs() * sign if sign else args[0]
        dz = torch.randn(n, dtype=F64).to(dtype).to(device)
        for j in {0, n // 2, n - 1}:
            bad = [t.clone() for t in args]
            bad[0][n // 3] = 0.0  # a row of 0 * inf
            bad[which][j] = value
            leaves = [R.up(t).requires_grad_() for t in bad]
            expected = R.scalar_attention(*leaves)
            grads = torch.autograd.grad(expected, leaves, R.up(dz))
            z, got = forward_backward("scalar_attention", bad, {}, dz)
            assert_same_nonfinite(z.cpu().double(), expected.detach(), "z")
            for name, grad, ref in zip("qkv", got, grads, strict=True):
                label = f"d{name}"
                assert_equal(grad.isfinite().cpu(), ref.isfinite(), label)


def test_saved_tensors(device):
    """mean is the unrounded z, sum is the sum of exp(score - max)."""
    for dtype in dtypes(device):
        args = vectors(device, dtype, 131, 2.0, 2.0, 1.0)
        z, mean, total = forward(*args)
        assert_same_bits(mean.to(dtype), z)
        assert_same_bits(scalar_attention(*args), z)
        assert mean.dtype == total.dtype == acc_dtype(dtype)
        names = ("z", "mean", "sum")
        bounds = REFERENCES["scalar_attention_forward"](*args)
        for name, out, bound in zip(names, (z, mean, total), bounds, strict=True):
            numerics.check(out, bound, label=f"scalar_attention_forward {name}", device=device)


@pytest.mark.parametrize("mask", range(8))
def test_only_wanted_gradients(device, mask):
    args = vectors(device, F32, 150)
    _, mean, total = forward(*args)
    dz = torch.randn(150, device=device)
    check_output_mask("scalar_attention_backward", [dz, *args, mean, total], mask, 3)


def test_rows_do_not_depend_on_their_neighbours(device):
    """A row has the same result for any other rows whose span is small too."""
    q, k, v = vectors(device, F32, 300)
    whole = scalar_attention(q, k, v)
    changed = q.clone()
    changed[100:200] = 0.25
    assert_same_bits(scalar_attention(changed, k, v)[:100], whole[:100])
    assert_same_bits(scalar_attention(changed, k, v)[200:], whole[200:])


def test_memory_around_is_neither_read_nor_written(device):
    """NaN surrounds the inputs; every stride and offset gives the same bits."""
    for dtype in dtypes(device):
        for n in (5, 33, 130):
            args = vectors(device, dtype, n)
            plain = scalar_attention(*args)
            assert not plain.isnan().any()
            for step, offset in ((1, 1), (1, 3), (2, 0), (3, 5)):
                moved = []
                for t in args:
                    memory = torch.full((n * step + 16,), math.nan, dtype=dtype, device=device)
                    moved.append(memory[offset : offset + n * step : step].copy_(t))
                assert_same_bits(scalar_attention(*moved), plain)
                dz = torch.ones((), dtype=dtype, device=device).expand(n)
                assert_same_bits(
                    forward_backward("scalar_attention", moved, {}, dz)[1],
                    forward_backward("scalar_attention", args, {}, dz.contiguous())[1],
                )


def test_expanded(device):
    one = torch.tensor(0.5, device=device).expand(90)
    q, k, v = vectors(device, F32, 90)
    for args in ([one, k, v], [q, one, v], [q, k, one]):
        plain = [t.contiguous() for t in args]
        assert_same_bits(scalar_attention(*args), scalar_attention(*plain))


@given(n=sizes(129), layout=layouts(1), kind=kinds, dtype=dtype_names, seed=seeds)
def test_any_layout(n, layout, kind, dtype, seed):
    q, k = (values((n,), "normal", seed + i).to(getattr(torch, dtype)) for i in range(2))
    v = values((n,), kind, seed + 2).clamp(-6e4, 6e4).to(getattr(torch, dtype))
    check_op("scalar_attention", [q, k, v], eager=kind != "huge")
    z = scalar_attention(q, k, v)
    assert_same_bits(scalar_attention(*(strided(t, layout) for t in (q, k, v))), z)


@pytest.mark.parametrize("n", [1, 33, 129])
def test_backward_op(device, n):
    for dtype in dtypes(device):
        args = vectors(device, dtype, n, 2.0, 2.0, 1.0)
        dz = torch.randn(n, dtype=F64).to(dtype).to(device)
        _, mean, total = forward(*args)
        grads = backward(dz, *args, mean, total, output_mask=[True] * 3)
        for grad, bound in zip(grads, GRADIENTS["scalar_attention"](dz, *args), strict=True):
            numerics.check(grad, bound, label="scalar_attention_backward", device=device)


def test_threads_do_not_change_the_bits():
    args = vectors("cpu", F32, 700)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = forward_backward("scalar_attention", args, {})
        torch.set_num_threads(4)
        together = forward_backward("scalar_attention", args, {})
    finally:
        torch.set_num_threads(threads)
    assert_same_bits(together[0], alone[0])
    assert_same_bits(together[1], alone[1])
