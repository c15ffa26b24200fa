"""NaN in the gaps between packed documents: padding keys that no query row sees."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import reference as R
from attention_engines import each_configuration
from numerics import assert_same_bits, check
from running import GRADIENTS, REFERENCES
from samples import BF16, F16, dtypes
from tensors import randn

attention = torch.ops.torchweld.attention
attention_forward = torch.ops.torchweld.attention_forward
softmax_matmul = torch.ops.torchweld.softmax_matmul

# Tokens of a sequence -> the lengths of its documents, each with the padding behind it. Gaps lie
# inside of tiles of 64 and 128 keys, cross their edges and fill them.
PACKED = {
    12: [(5, 2), (5, 0)],
    200: [(60, 10), (50, 20), (53, 2), (5, 0)],
    700: [(100, 60), (90, 3), (130, 140), (150, 1), (19, 2), (5, 0)],
}
# seqlen_q, seqlen_k. Fewer rows than keys: a cache.
SHAPES = [(12, 12), (200, 200), (700, 700), (12, 200), (16, 700), (150, 200), (333, 700)]
WIDTHS_AND_MASKS = [(64, {}), (128, {"window": 40}), (80, {"softcap": 3.0}), (256, {})]


def gap_mask(sq: int, sk: int, device: str) -> tuple[dict, Tensor]:
    """The mask of two sequences, the second 3 keys shorter, and (2, sq, sk): row i sees key j."""
    first, start_of = 0, []
    for tokens, padding in PACKED[sk]:
        start_of += [first] * tokens + [sk] * padding
        first += tokens + padding
    end = torch.tensor([sk, sk - 3], dtype=torch.int32)
    offset = torch.maximum(end - sq, torch.tensor(0))
    start = torch.tensor(start_of, dtype=torch.int32)[torch.arange(sq) + offset[:, None]]
    seen = R.visible(2, sq, sk, None, True, key_start=start, key_end=end)
    return {"causal": True, "key_start": start.to(device), "key_end": end.to(device)}, seen


def unseen(seen: Tensor, device: str) -> list[Tensor]:
    """Where no row sees a key, and where a row sees no key: masks of (batch, heads, n, columns)."""
    return [~seen.any(dim)[:, None, :, None].to(device) for dim in (1, 2)]


# The heads of query, and of key and value. A CPU takes seconds for the bounds of a head.
HEADS = {"cpu": (2, 1), "cuda": (4, 2)}


def qkv(device, dtype, sq, sk, head_dim, heads=None) -> list[Tensor]:
    heads = heads or HEADS[device]
    rows = ((heads[0], sq), (heads[1], sk), (heads[1], sk))
    return [randn(device, dtype, 2, *shape, head_dim) for shape in rows]


def check_forward(device, label, q, k, v, mask, seen) -> None:
    """Values in the gaps change no bit; keys there, and rows of padding, reach no result."""
    keys, rows = unseen(seen, device)
    out, lse = attention_forward(q, k, v, **mask)
    for hole in (math.nan, math.inf):
        holed = torch.where(keys, hole, v)
        assert_same_bits(attention_forward(q, k, holed, **mask), (out, lse))
    filled = (torch.where(rows, math.nan, q), torch.where(keys, math.nan, k), holed)
    bounds = REFERENCES["attention_forward"](q, k, v, **mask)
    for got, bound in zip(attention_forward(*filled, **mask), bounds, strict=True):
        check(got, bound, label=label, device=device)
    assert (out[rows.expand_as(out)] == 0).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cases_have_gaps(shape):
    """In both sequences, keys between the first and the last seen key that no row sees."""
    _, seen = gap_mask(*shape, "cpu")
    for keys in seen.any(1):
        first, last = keys.nonzero()[[0, -1], 0].tolist()
        assert not keys[first:last].all()


def test_the_smallest_gap(device):
    """Documents of 5 tokens with 2 padding tokens between them."""
    starts = [[0] * 5 + [12] * 2 + [7] * 5]
    start = torch.tensor(starts, dtype=torch.int32, device=device)
    for dtype in dtypes(device):
        q, k, v = (randn(device, dtype, 1, 2, 12, 64) for _ in range(3))
        v[:, :, 5:7] = math.nan
        out = attention(q, k, v, causal=True, key_start=start)
        assert out.isfinite().all()
        assert (out[:, :, 5:7] == 0).all() and (out[:, :, [*range(5), *range(7, 12)]] != 0).any()


@pytest.mark.parametrize(("head_dim", "mask"), [*WIDTHS_AND_MASKS, (300, {})], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gaps_of_attention(device, shape, head_dim, mask):
    packed, seen = gap_mask(*shape, device)
    for dtype in dtypes(device):
        tensors = qkv(device, dtype, *shape, head_dim)
        check_forward(device, f"{dtype}", *tensors, {**packed, **mask}, seen)


@pytest.mark.parametrize("seed", range(8))
def test_gaps_of_any_starts(device, seed):
    """Starts that go up and down: a later row may see the key at the position of an empty row."""
    torch.manual_seed(seed)
    sq, sk = [(40, 40), (130, 130), (16, 50), (100, 70)][seed % 4]
    start = torch.randint(-1, sk + sk // 2, (2, sq), dtype=torch.int32)
    window = [None, 9][seed // 4]
    seen = R.visible(2, sq, sk, None, True, key_start=start, window=window)
    mask = {"causal": True, "key_start": start.to(device), "window": window}
    for dtype in dtypes(device):
        check_forward(device, f"{dtype}", *qkv(device, dtype, sq, sk, 64), mask, seen)


@pytest.mark.parametrize("heads", [(2, 2), (8, 1), (6, 2)], ids=str)
@pytest.mark.parametrize("shape", [(12, 12), (12, 200), (16, 700)], ids=str)
def test_gaps_of_grouped_heads(device, shape, heads):
    """The rows of several heads share a tile of the decode kernel."""
    mask, seen = gap_mask(*shape, device)
    for dtype in dtypes(device):
        check_forward(device, f"{dtype}", *qkv(device, dtype, *shape, 64, heads), mask, seen)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("dtype", [BF16, F16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("shape", [(12, 12), (200, 200), (16, 700), (333, 700)], ids=str)
def test_gaps_in_every_tile(shape, head_dim, dtype):
    packed, seen = gap_mask(*shape, "cuda")
    tensors = qkv("cuda", dtype, *shape, head_dim)
    for mask in (packed, {**packed, "softcap": 3.0}):
        for name in each_configuration("", *tensors, **mask):
            check_forward("cuda", name, *tensors, mask, seen)


@pytest.mark.parametrize(("head_dim", "mask"), WIDTHS_AND_MASKS, ids=str)
@pytest.mark.parametrize("shape", [(12, 12), (200, 200), (12, 200), (150, 700)], ids=str)
def test_gradients_beside_gaps(device, shape, head_dim, mask):
    """dS is 0 where a row doesn't see a key, whatever dP is there."""
    packed, seen = gap_mask(*shape, device)
    keys, rows = unseen(seen, device)
    for dtype in dtypes(device):
        q, k, v = qkv(device, dtype, *shape, head_dim)
        dout = randn(device, dtype, *q.shape)
        bounds = GRADIENTS["attention"](dout, q, k, v, **packed, **mask)
        leaves = [t.requires_grad_() for t in (q, k, torch.where(keys, math.nan, v))]
        out = attention(*leaves, **packed, **mask)
        grads = torch.autograd.grad(out, leaves, torch.where(rows, math.nan, dout))
        for grad, bound in zip(grads, bounds, strict=True):
            check(grad, bound, label=f"{dtype}", device=device)
        for grad, where in zip(grads, (rows, keys, keys), strict=True):
            assert (grad[where.expand_as(grad)] == 0).all()


@pytest.mark.parametrize(("columns", "mask"), [*WIDTHS_AND_MASKS, (5, {})], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gaps_of_softmax_matmul(device, shape, columns, mask):
    """Result and gradients, with NaN in hidden scores and in values of the gaps."""
    packed, seen = gap_mask(*shape, device)
    keys, rows = unseen(seen, device)
    seen = seen[:, None].to(device)
    for dtype in dtypes(device):
        scores = randn(device, dtype, 2, 2, *shape)
        value = randn(device, dtype, 2, 2, shape[1], columns)
        dout = randn(device, dtype, 2, 2, shape[0], columns)

        def results(by, scores=scores, value=value, dout=dout):
            leaves = torch.where(seen, scores, by), torch.where(keys, by, value)
            leaves = [t.requires_grad_() for t in leaves]
            out = softmax_matmul(*leaves, **packed, **mask)
            return [out.detach(), *torch.autograd.grad(out, leaves, torch.where(rows, by, dout))]

        for hole in (math.nan, math.inf):
            for got, want in zip(results(hole), results(0.0), strict=True):
                assert_same_bits(got, want)
                assert want.isfinite().all()
