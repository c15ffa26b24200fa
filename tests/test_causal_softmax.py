"""causal_softmax and causal_softmax_backward against float64 and hand-written masks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import masks
import numerics
import reference as R
from numerics import assert_equal, assert_same_bits
from running import REFERENCES
from samples import BF16, F32, F64, check_op, dtypes, forward_backward
from strategies import dtype_names, kinds, layouts, seeds, sizes, strided, values
from tensors import pads, randn

causal_softmax = torch.ops.torchweld.causal_softmax
causal_softmax_backward = torch.ops.torchweld.causal_softmax_backward

OPS = ("causal_softmax", "causal_softmax_backward")


@pytest.mark.parametrize("key", masks.TABLES, ids=str)
def test_the_reference_mask_is_the_hand_written_one(key):
    (seqlen_q, seqlen_k), causal, pad = key
    leftpad = None if pad is None else torch.tensor([pad], dtype=torch.int32)
    seen = R.visible(1, seqlen_q, seqlen_k, leftpad, causal)[0]
    assert_equal(seen, masks.table(*key))


@pytest.mark.parametrize("shape", masks.SHAPES, ids=str)
def test_truth_table(device, shape):
    """Equal visible logits, NaN everywhere else: each row is 1 / count over the keys it sees."""
    for dtype in dtypes(device):
        seen = masks.tables_of(shape, causal=True)
        expected = masks.uniform(seen).to(dtype).to(device)
        hidden = torch.where(seen, 0.75, math.nan).to(dtype).to(device)
        y = causal_softmax(hidden, masks.leftpad_of(shape, True, device), scale=-2.0)
        assert_equal(y, expected)
        # dy is not read where the mask hides it either; a row's gradient sums to 0.
        dy = torch.where(seen, 3.0, math.nan).to(dtype).to(device)
        leftpad = masks.leftpad_of(shape, True, device)
        bound, _ = REFERENCES["causal_softmax_backward"](dy, y, leftpad)
        dx, _ = causal_softmax_backward(dy, y, leftpad)
        numerics.check(dx, bound, label="causal_softmax_backward", device=device)
        assert (dx[~seen.to(device)] == 0).all()
        plain = masks.table(shape, True, None)
        x = torch.where(plain, 0.75, math.nan).to(dtype).to(device)
        assert_equal(causal_softmax(x), masks.uniform(plain).to(dtype).to(device))


LENGTHS = (1, 2, 7, 31, 32, 33, 63, 64, 65, 127, 128, 129, 251)


@pytest.mark.parametrize("seqlen", LENGTHS)
def test_square(device, dtype, seqlen):
    check_op("causal_softmax", [randn(device, dtype, 2, 2, seqlen, seqlen)], {"scale": 0.37})
    leftpad = pads(device, 0, 1, seqlen // 2, seqlen - 1, seqlen)
    args = [randn(device, dtype, 5, 2, seqlen, seqlen), leftpad]
    check_op("causal_softmax", args, {"scale": 0.125})


LONG = [(1, 1023), (2, 1025), (3, 4097), (2, 8193), (1, 32769), (130, 3), (1025, 2), (129, 127)]
LONG += [(3, 50_001), (1, 131_072)]


@pytest.mark.parametrize("shape", LONG, ids=str)
def test_unequal_lengths(device, shape):
    sizes = (2, max(1, min(16, 40000 // (shape[0] * shape[1]))), *shape)
    for dtype in dtypes(device):
        check_op("causal_softmax", [randn(device, dtype, *sizes)], {"scale": 1.0})
        leftpad = pads(device, shape[1] // 3, shape[1] // 2)
        check_op("causal_softmax", [randn(device, dtype, *sizes), leftpad])
        # So few elements are left that eager's largest error is a matter of luck.
        leftpad = pads(device, shape[1] - 1, shape[1])
        check_op("causal_softmax", [randn(device, dtype, *sizes), leftpad], eager=False)


@pytest.mark.parametrize("batch", [65535, 65536, 65537])
def test_many_sequences(device, batch):
    leftpad = torch.arange(batch, dtype=torch.int32, device=device) % 5 - 1
    check_op("causal_softmax", [randn(device, F32, batch, 2, 2), leftpad])
    check_op("causal_softmax", [randn(device, F32, 1, batch, 1, 3)])
    check_op("causal_softmax", [randn(device, F32, 1, batch, 1)])


@pytest.mark.parametrize(
    "shape", [(3, 3), (2, 3, 4), (2, 1, 3, 4), (2, 2, 1, 3, 3), (2, 1, 2, 1, 3, 2)]
)
def test_rank(device, shape):
    """Two dims are one sequence; everything between batch and the last two dims is heads."""
    for dtype in dtypes(device):
        batch = shape[0] if len(shape) > 2 else 1
        leftpad = torch.arange(batch, dtype=torch.int32, device=device)
        args = [randn(device, dtype, *shape), leftpad]
        check_op("causal_softmax", args, {"scale": 0.5}, eager=False)  # too few live elements
        x = args[0].reshape(batch, -1, *shape[-2:])
        assert_same_bits(
            causal_softmax(x, leftpad).reshape(shape), causal_softmax(args[0], leftpad)
        )


EMPTY = [(0, 2, 3, 3), (2, 0, 3, 3), (2, 2, 0, 3), (2, 2, 3, 0), (0, 0), (0, 3), (3, 0), (0, 3, 3)]


@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_empty(device, shape):
    for dtype in dtypes(device):
        x = torch.empty(shape, dtype=dtype, device=device, requires_grad=True)
        batch = shape[0] if len(shape) > 2 else 1
        leftpad = torch.ones(batch, dtype=torch.int32, device=device)
        for given_pads in (None, leftpad):
            y = causal_softmax(x, given_pads)
            assert_equal(y.detach(), torch.zeros_like(x))
            y.sum().backward()
            assert_equal(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize("seqlen", [1, 2, 5, 33, 129])
def test_one_hot_at_every_visible_position(device, seqlen):
    """One visible logit 0, the rest -1000: exactly one-hot in every row that sees it."""
    for dtype in dtypes(device):
        x = torch.full((seqlen, 1, seqlen, seqlen), -1000.0, dtype=dtype, device=device)
        j = torch.arange(seqlen, device=device)
        x[j, :, :, j] = 0  # sequence j has its 0 at key j
        y = causal_softmax(x)
        sees = torch.arange(seqlen, device=device)[None, :] >= j[:, None]  # [sequence, row]
        expected = torch.nn.functional.one_hot(j, seqlen).to(dtype)[:, None, None].expand_as(x)
        assert_equal(y[:, 0][sees], expected[:, 0][sees])


@pytest.mark.parametrize("power", range(8))
def test_uniform(device, power):
    """Row 2^k - 1 sees 2^k equal logits: exactly 2^-k, at any logit and finite scale."""
    n = 2**power
    for dtype in dtypes(device):
        for logit, scale in ((0.0, 1.0), (-7.0, 0.3), (3000.0, -2.0), (1.0, 0.0)):
            y = causal_softmax(torch.full((n, n), logit, dtype=dtype, device=device), scale=scale)
            assert_equal(y[-1], torch.full((n,), 2.0**-power, dtype=dtype, device=device))
            assert_equal(y.triu(1), torch.zeros_like(y))


@pytest.mark.parametrize("n", [500, 999, 1024, 1536, 2047, 2048, 3000, 4096, 5001, 8192, 8200])
def test_squares_of_every_tile(device, n):
    """Rows that see from one score to all; NaN where they do not. Equal scores: 1 / count."""
    if device == "cpu" and n > 1024:
        pytest.skip("long on a CPU, which has no tiles")
    leftpad = pads(device, 0, n // 3)
    position = torch.arange(n, device=device)
    count = (position + 1 - leftpad[:, None])[..., None]
    seen = (position <= position[:, None]) & (position >= leftpad[:, None, None])
    for dtype in dtypes(device):
        x = torch.full((2, n, n), math.nan, dtype=dtype, device=device)
        x[seen] = -1.25
        share = 1 / count.clamp(min=1).to(F64 if dtype == F64 else F32)
        for scale in (1.0, -0.37):
            y = causal_softmax(x, leftpad, scale=scale)
            assert_equal(y, torch.where(seen, share, 0).to(dtype))
        x = randn(device, dtype, 2, 4, 3, n)
        check_op("causal_softmax", [x, leftpad + n // 8], {"scale": -0.37})


@pytest.mark.parametrize("hole", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "shape", [(4, 4), (2, 5), (5, 2), (40, 70), (129, 129), (3, 40_003)], ids=str
)
def test_hidden_scores_and_gradients_are_not_read(device, shape, hole):
    for dtype in dtypes(device):
        leftpad = pads(device, 0, 1, shape[1] // 2, shape[1])
        seen = R.visible(4, *shape, leftpad.cpu(), True)[:, None].to(device)
        x, dy = randn(device, dtype, 4, 1, *shape), randn(device, dtype, 4, 1, *shape)
        clean = forward_backward(
            "causal_softmax", [torch.where(seen, x, 0), leftpad], {}, torch.where(seen, dy, 0)
        )
        dirty = forward_backward(
            "causal_softmax", [torch.where(seen, x, hole), leftpad], {}, torch.where(seen, dy, hole)
        )
        assert_same_bits(dirty[0], clean[0])
        assert_same_bits(dirty[1][0], clean[1][0])


@pytest.mark.parametrize("scale", [0.0, 1.0, -1.0, -0.37, 8.0**-0.5, 1e-30, 1e3])
def test_scale(device, scale):
    for dtype in dtypes(device):
        args = [randn(device, dtype, 2, 9, 9), pads(device, 0, 4)]
        check_op("causal_softmax", args, {"scale": scale})


@pytest.mark.parametrize("scale", [0.0, -0.37])
def test_scale_of_long_rows(device, scale):
    for dtype in dtypes(device):
        args = [randn(device, dtype, 2, 3, 33_001), pads(device, 0, 12_345)]
        check_op("causal_softmax", args, {"scale": scale})
        if device == "cuda" and dtype == F32:  # the gradient reads a part twice
            args = [randn(device, dtype, 2, 3, 260_001), pads(device, 0, 5)]
            check_op("causal_softmax", args, {"scale": scale})


def test_more_long_rows_than_a_gpu_takes_at_a_time(device):
    """Most of them padding, which has no live columns: clusters claim those quickly."""
    heads, shape = (97, (8, 40_003)) if device == "cuda" else (2, (2, 40_003))
    x = randn(device, BF16, 3, heads, *shape)
    leftpad = pads(device, 7, shape[1] - 2, shape[1])
    y = causal_softmax(x, leftpad, scale=0.5)
    seen = R.visible(3, *shape, leftpad.cpu(), True)[:, None].to(device)
    scores = torch.where(seen, x.float() * 0.5, -math.inf)
    expected = torch.where(seen, torch.softmax(scores, -1), 0)
    assert not y[~seen.expand_as(y)].any()
    torch.testing.assert_close(y.float(), expected, rtol=2.0**-7, atol=0)
    assert_same_bits(causal_softmax(x, leftpad, scale=0.5), y)
    dx, _ = causal_softmax_backward(x, y, leftpad, scale=0.5)
    assert not dx[~seen.expand_as(dx)].any()
    weighted = y.float() * x.float()
    expected = 0.5 * (weighted - y.float() * weighted.sum(-1, keepdim=True))
    # The rounding error of a sum is below 2^-14 of its terms, which add up to about 1.
    torch.testing.assert_close(dx.float(), expected, rtol=2.0**-7, atol=2.0**-14)
    assert_same_bits(causal_softmax_backward(x, y, leftpad, scale=0.5)[0], dx)


@pytest.mark.parametrize("offset", [0.0, 100.0, -1e4, -2.5e5, 133120.0])
def test_offset_of_a_row(device, offset):
    """No finite sentinel replaces -inf: all visible logits may be far below it.

    Rows with one large probability have the largest error, so its comparison needs many of them.
    """
    steps = torch.randint(-64, 65, (2, 24, 37, 37), dtype=F64) / 8 + offset
    for dtype in (F32, F64) if device == "cpu" else (F32,):
        check_op("causal_softmax", [steps.to(dtype).to(device), pads(device, 2, 20)])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_visible_inf_and_nan_spread_as_in_torch(device, value):
    for dtype in dtypes(device):
        for j in (0, 3, 6):
            x = randn(device, dtype, 2, 7, 7)
            x[1, 5, j] = value
            check_op("causal_softmax", [x], backward=False, eager=False)  # eager's zeros are NaN
            rows = torch.softmax(x[1, 5, :6], -1)
            y = causal_softmax(x)[1, 5]
            assert_equal(y[:6].isnan(), rows.isnan())
            assert y[6] == 0


def test_visible_minus_inf_only_is_nan_as_in_torch(device):
    for dtype in dtypes(device):
        x = torch.full((1, 1, 3, 3), -math.inf, dtype=dtype, device=device)
        y = causal_softmax(x, pads(device, 1))
        seen = R.visible(1, 3, 3, torch.tensor([1]), True)[None].to(device)
        assert_equal(y, torch.where(seen, math.nan, 0.0).to(dtype))


def test_without_mask_in_reach_it_is_softmax(device):
    """The last row sees everything."""
    for dtype in dtypes(device):
        x = randn(device, dtype, 4, 1, 257)
        (bound,) = REFERENCES["causal_softmax"](x)
        numerics.check(torch.softmax(x, -1), bound, label="torch.softmax", device=device)
        numerics.check(causal_softmax(x), bound, label="causal_softmax", device=device)


@given(
    seqlen_q=sizes(65),
    seqlen_k=sizes(65),
    batch=st.integers(1, 3),
    leftpad=st.one_of(st.none(), st.lists(st.integers(-4, 70), min_size=3, max_size=3)),
    scale=st.sampled_from([1.0, 0.25, -0.6]),
    layout=layouts(4),
    kind=kinds,
    dtype=dtype_names,
    seed=seeds,
)
def test_any_layout_and_pads(seqlen_q, seqlen_k, batch, leftpad, scale, layout, kind, dtype, seed):
    shape = (batch, 2, seqlen_q, seqlen_k)
    x = values(shape, kind, seed).to(getattr(torch, dtype))
    given_pads = None if leftpad is None else torch.tensor(leftpad[:batch], dtype=torch.int32)
    dy = values(shape, "normal", seed + 1).to(x.dtype)
    args = [x] if given_pads is None else [x, given_pads]
    check_op("causal_softmax", args, {"scale": scale}, dout=dy, eager=kind != "huge")
    y = causal_softmax(*args, scale=scale)
    moved = [strided(x, layout), *args[1:]]
    check_op("causal_softmax", moved, {"scale": scale}, dout=strided(dy, layout), eager=False)
    bound, _ = REFERENCES["causal_softmax_backward"](dy, y, *args[1:], scale=scale)
    strides = strided(dy, layout), strided(y, layout)
    dx, _ = causal_softmax_backward(*strides, *args[1:], scale=scale)
    numerics.check(dx, bound, label="causal_softmax_backward")
