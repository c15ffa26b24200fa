"""attention with one key_end per query row."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

import reference as R
import torchweld
from attention_engines import each_configuration
from numerics import assert_equal, assert_same_bits, check
from running import GRADIENTS, REFERENCES
from samples import BF16, F16, F32, F64, call, dtypes
from tensors import randn
from test_mask_numbers import LARGE, compare, moved, qkv

attention = torch.ops.torchweld.attention
attention_with_lse = torch.ops.torchweld.attention_with_lse
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def ints(*rows) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


# Written by hand: (seqlen_q, seqlen_k), the numbers of one sequence -> rows.
TABLES = [
    ((3, 5), {"key_end": ints([1, 3, 5])}, "10000 11100 11111"),
    ((3, 5), {"key_end": ints([5, -2, 9])}, "11111 00000 11111"),
    ((3, 5), {"key_end": ints([2, 4, 5]), "window": 2}, "11000 00110 00011"),
    ((3, 5), {"key_end": ints([2, 4, 9]), "window": 1}, "01000 00010 00001"),
    ((3, 5), {"key_end": ints([3, 3, 5]), "key_start": ints([0, 2, 5])}, "11100 00100 00000"),
    ((3, 5), {"key_end": ints([2, 4, 5]), "leftpad": ints(2)}, "00000 00110 00111"),
    ((4, 2), {"key_end": ints([0, 2, 1, 2])}, "00 11 10 11"),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("shape", "numbers", "rows"), TABLES, ids=str)
def test_tables(device, shape, numbers, rows, causal):
    """causal adds nothing, because the position of a row is its last key."""
    seen = torch.tensor([[digit == "1" for digit in row] for row in rows.split()])
    given = {"causal": causal, **moved(device, numbers)}
    leftpad = given.pop("leftpad", None)
    assert_equal(R.visible(1, *shape, leftpad, **given)[0], seen)
    for dtype in dtypes(device):
        query = torch.zeros(1, 1, shape[0], 8, dtype=dtype, device=device)
        key = torch.zeros(1, 1, shape[1], 8, dtype=dtype, device=device)
        value = torch.eye(shape[1], 8, dtype=dtype, device=device)[None, None]
        out, lse = attention_with_lse(query, key, value, leftpad, **given)
        torch.testing.assert_close(lse[0, 0].cpu().double(), seen.sum(-1).double().log())
        assert_equal(out[0, 0, :, : shape[1]].cpu() > 0, seen)
        assert (out[0, 0, :, shape[1] :] == 0).all()


def ranges(seed: int, batch: int, seqlen_q: int, seqlen_k: int) -> dict[str, Tensor]:
    """Packed sequences of unequal lengths for even seeds, any ranges for odd ones."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randint(-1, seqlen_k + 2, shape, generator=g, dtype=torch.int32)

    if seed % 2:
        return {"key_start": draw(batch, seqlen_q), "key_end": draw(batch, seqlen_q)}
    bounds = torch.cat([ints(*[[0]] * batch), draw(batch, 4), draw(batch, 1)], 1).sort(1).values
    sequence = torch.randint(0, 5, (batch, seqlen_q), generator=g).sort(1).values
    return {"key_start": bounds.gather(1, sequence), "key_end": bounds.gather(1, sequence + 1)}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", range(len(LARGE)), ids=lambda i: str(LARGE[i]))
def test_results_and_gradients(device, case, seed):
    shape = LARGE[case]
    b, h, _, sq, sk, _, _ = shape
    for dtype in dtypes(device)[:3]:
        torch.manual_seed(seed)
        more = [{}, {"window": 40}, {"softcap": 3.0}, {"sink": randn(device, dtype, h)}]
        numbers = {**ranges(seed, b, sq, sk), **more[(case + seed) % 4], "causal": case % 2 == 0}
        compare("attention", qkv(dtype, *shape, device), None, moved(device, numbers))


@pytest.mark.parametrize("seed", range(4))
def test_lse_and_its_gradient(device, seed):
    b, h, hkv, sq, sk = 2, 4, 2, 70, 130
    torch.manual_seed(seed)
    for dtype in dtypes(device):
        args = qkv(dtype, b, h, hkv, sq, sk, 64, 32, device)
        mask = moved(device, ranges(seed, b, sq, sk))
        leaves = [t.clone().requires_grad_() for t in args]
        out, lse = attention_with_lse(*leaves, **mask)
        bounds = REFERENCES["attention_forward"](*args, **mask)
        for got, bound in zip((out, lse), bounds, strict=True):
            check(got, bound, label="row ends")
        dout, dlse = torch.randn_like(out), torch.randn_like(lse)
        grads = torch.autograd.grad((out, lse), leaves, (dout, dlse))
        bounds = GRADIENTS["attention"](dout, *args, dlse=dlse, **mask)
        for grad, bound in zip(grads, bounds, strict=True):
            check(grad, bound, label="row ends, gradient")


def test_equal_ends_are_one_end(device):
    for dtype in dtypes(device):
        args = qkv(dtype, sq=70, sk=130, d=64, dv=64, device=device)
        end = ints(100, 41).to(device)
        torch.testing.assert_close(
            attention(*args, key_end=end[:, None].expand(-1, 70)), attention(*args, key_end=end)
        )
        rising = (torch.arange(70, device=device) + 61).int().expand(2, -1)
        torch.testing.assert_close(attention(*args, key_end=rising), attention(*args, causal=True))


def test_strided_ends(device):
    args = qkv(F32, sq=9, sk=12, d=16, dv=16, device=device)
    ends = ranges(1, 2, 9, 12)["key_end"].to(device)
    strided = ends.T.contiguous().T
    assert not strided.is_contiguous()
    assert_same_bits(attention(*args, key_end=strided), attention(*args, key_end=ends))


def test_keys_outside_of_all_ranges_may_be_nan(device):
    """Keys before the first and behind the last seen key, and rows that see nothing."""
    sq, sk = 150, 200
    start = ints([30] * 50 + [200] * 20 + [90] * 80).expand(2, -1).to(device)
    end = ints([90] * 50 + [0] * 20 + [170] * 80).expand(2, -1).to(device)
    for dtype in dtypes(device):
        tensors = qkv(dtype, 2, 4, 2, sq, sk, 64, 64, device)
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = attention(*leaves, key_start=start, key_end=end)
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
        for t in tensors[1:]:
            t[:, :, :30] = t[:, :, 170:] = math.nan
        tensors[0][:, :, 50:70] = math.nan
        leaves = [t.requires_grad_() for t in tensors]
        got = attention(*leaves, key_start=start, key_end=end)
        assert_same_bits(got, out)
        assert (got[:, :, 50:70] == 0).all()
        dout = torch.ones_like(got)
        dout[:, :, 50:70] = math.nan
        assert_same_bits(torch.autograd.grad(got, leaves, dout), grads)


def test_unseen_keys_between_ranges_may_be_nan_on_the_cpu():
    tensors = qkv(F64, 1, 1, 1, 40, 200, 16, 16)
    start = ints([0] * 20 + [150] * 20)
    end = ints([50] * 20 + [200] * 20)
    out = attention(*tensors, key_start=start, key_end=end)
    tensors[2][:, :, 50:150] = math.nan
    assert_same_bits(attention(*tensors, key_start=start, key_end=end), out)


def test_python_function_takes_starts_with_row_ends():
    """Without causal, starts per row are refused unless the row's end is known too."""
    q = torch.randn(1, 2, 4, 8)
    start, end = ints([0, 0, 2, 2]), ints([2, 2, 4, 4])
    with pytest.raises(RuntimeError, match="key_start must be one start a sequence without causal"):
        torchweld.attention(q, q, q, key_start=start)
    out = torchweld.attention(q, q, q, key_start=start, key_end=end)
    alone = torchweld.attention(*[q[:, :, 2:]] * 3)
    torch.testing.assert_close(out[:, :, 2:], alone)
    assert_equal(torchweld.attention_with_lse(q, q, q, key_start=start, key_end=end)[0], out)


def test_vmap():
    q, ends = torch.randn(3, 2, 2, 4, 8), torch.randint(0, 5, (3, 2, 4), dtype=torch.int32)
    got = torch.vmap(lambda q, end: attention(q, q, q, key_end=end))(q, ends)
    want = [attention(a, a, a, key_end=end) for a, end in zip(q, ends, strict=True)]
    torch.testing.assert_close(got, torch.stack(want))


def test_refusals():
    args = qkv(F32)
    ends = ints([1] * 5, [2] * 5)
    sentence = "key_end must be (batch, seqlen_q) = (2, 5), but got int32 (2, 4) on cpu"
    for op in ("attention", "attention_forward", "attention_with_lse"):
        with pytest.raises(RuntimeError, match=re.escape(f"torchweld::{op}: {sentence}")):
            call(op)(*args, key_end=ends[:, 1:])
    scores = torch.zeros(2, 2, 5, 5)
    sentence = "key_end must be (batch,) = (2,), but got int32 (2, 5) on cpu"
    for op, inputs in (("softmax_matmul", [scores, args[2]]), ("causal_softmax", [scores])):
        with pytest.raises(RuntimeError, match=re.escape(f"torchweld::{op}: {sentence}")):
            call(op)(*inputs, key_end=ends)


@on_gpu
@pytest.mark.parametrize("engine", ["sync", "general", "decode", "sm90"])
@pytest.mark.parametrize("seed", range(2))
def test_every_engine(engine, seed):
    """Every tile of the forward and the backward, against the formula."""
    for dtype in (F16, BF16, F32):
        for sq, dim in ((150, 64), (150, 128), (70, 192), (5, 64), (130, 256)):
            torch.manual_seed(seed)
            q, k, v = (randn("cuda", dtype, 2, h, n, dim) for h, n in ((4, sq), (2, 300), (2, 300)))
            mask = moved("cuda", ranges(seed, 2, sq, 300))
            bounds = REFERENCES["attention_forward"](q, k, v, **mask)
            forward = torch.ops.torchweld.attention_forward
            for name in each_configuration(engine, q, k, v, **mask):
                for got, bound in zip(forward(q, k, v, **mask), bounds, strict=True):
                    check(got, bound, label=name)
            if engine == "decode":
                continue
            out, lse = forward(q, k, v, **mask)
            dout = torch.randn_like(out)
            args = (dout, q, k, v, out, lse)
            bounds = GRADIENTS["attention"](dout, q, k, v, **mask)
            for name in each_configuration(engine, *args, op="attention_backward", **mask):
                got = torch.ops.torchweld.attention_backward(*args, **mask)
                for grad, bound in zip(got, bounds, strict=False):
                    check(grad, bound, label=name)
