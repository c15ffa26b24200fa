"""key_start, key_end, window, softcap and sink in attention, softmax_matmul and causal_softmax."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import masks
import reference as R
import torchweld
from cuda_graphs import cuda_graph
from numerics import acc_dtype, assert_equal, assert_same_bits, check
from running import GRADIENTS, REFERENCES
from samples import BF16, F16, F32, F64, as_tuple, call, dtypes
from tensors import pads, randn

attention = torch.ops.torchweld.attention
attention_with_lse = torch.ops.torchweld.attention_with_lse
softmax_matmul = torch.ops.torchweld.softmax_matmul
ON_CPU = "cpu"
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def ints(*rows) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def qkv(dtype, b=2, h=2, hkv=2, sq=5, sk=5, d=3, dv=4, device=ON_CPU) -> list[Tensor]:
    shapes = ((b, h, sq, d), (b, hkv, sk, d), (b, hkv, sk, dv))
    return [randn(device, dtype, *shape) for shape in shapes]


def moved(device: str, numbers: dict) -> dict:
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in numbers.items()}


def best(device: str) -> torch.dtype:
    """The dtype with the most digits there."""
    return F64 if device == ON_CPU else F32


LSE = {"rtol": 1e-6, "atol": 1e-6}  # of lse in fp32

# Written by hand: (seqlen_q, seqlen_k), the numbers of one sequence -> rows.
TABLES = [
    ((5, 5), {"causal": True, "window": 1}, "10000 01000 00100 00010 00001"),
    ((5, 5), {"causal": True, "window": 2}, "10000 11000 01100 00110 00011"),
    ((5, 5), {"causal": True, "window": 2**60}, "10000 11000 11100 11110 11111"),
    ((5, 5), {"window": 1}, "10000 01000 00100 00010 00001"),
    ((5, 5), {"window": 2}, "11000 11100 01110 00111 00011"),
    ((2, 5), {"causal": True, "window": 2}, "00110 00011"),
    ((2, 5), {"window": 2}, "00111 00011"),
    ((5, 2), {"causal": True, "window": 1}, "00 00 00 10 01"),
    ((5, 2), {"window": 2}, "00 00 10 11 11"),
    ((5, 5), {"key_end": ints(3)}, "11100 11100 11100 11100 11100"),
    ((2, 5), {"causal": True, "key_end": ints(3)}, "11000 11100"),
    ((2, 5), {"causal": True, "key_end": ints(2)}, "10000 11000"),
    ((2, 5), {"causal": True, "key_end": ints(1)}, "10000 10000"),
    ((4, 4), {"causal": True, "key_end": ints(3)}, "1000 1100 1110 1110"),
    ((4, 4), {"causal": True, "key_end": ints(3), "window": 2}, "1000 1100 0110 0010"),
    ((4, 4), {"key_end": ints(2), "window": 2}, "1100 1100 0100 0000"),
    ((5, 3), {"causal": True, "key_end": ints(2)}, "000 000 100 110 110"),
    ((2, 5), {"causal": True, "key_end": ints(0)}, "00000 00000"),
    ((2, 5), {"causal": True, "key_end": ints(-4)}, "00000 00000"),
    ((2, 5), {"causal": True, "key_end": ints(9)}, "11110 11111"),
    ((2, 5), {"causal": True, "key_end": ints(4), "window": 2}, "01100 00110"),
    ((2, 5), {"causal": True, "key_end": ints(4), "leftpad": ints(1)}, "01100 01110"),
    ((2, 5), {"causal": True, "key_end": ints(4), "leftpad": ints(3)}, "00000 00010"),
    ((2, 5), {"causal": True, "key_end": ints(2), "leftpad": ints(3)}, "00000 00000"),
    ((5, 5), {"causal": True, "leftpad": ints(2), "window": 2}, "00000 00000 00100 00110 00011"),
    ((5, 5), {"causal": True, "key_start": ints([0, 0, 2, 2, 2])}, "10000 11000 00100 00110 00111"),
    ((5, 5), {"key_start": ints([0, 4, -7, 2, 9])}, "11111 00001 11111 00111 00000"),
    (
        (5, 5),
        {"causal": True, "key_start": ints([0, 0, 2, 2, 2]), "window": 2, "key_end": ints(5)},
        "10000 11000 00100 00110 00011",
    ),
    ((2, 5), {"causal": True, "key_start": ints([1, 4])}, "01110 00001"),
    (
        (5, 5),
        {"causal": True, "key_start": ints([0, 0, 0, 3, 3]), "leftpad": ints(1)},
        "00000 01000 01100 00010 00011",
    ),
    ((2, 5), {"key_start": ints([1, 4]), "leftpad": ints(2)}, "00111 00001"),
]


@pytest.mark.parametrize(("shape", "numbers", "rows"), TABLES, ids=str)
def test_truth_table(device, shape, numbers, rows):
    check_seen(device, torch.tensor([[d == "1" for d in row] for row in rows.split()]), numbers)


POSITION = "i + max(key_end[b], min(seqlen_q, seqlen_k)) - seqlen_q"  # as the documentation says it


def test_the_documentation_has_the_rule_of_positions():
    page = (Path(__file__).parents[1] / "docs" / "masks.md").read_text(encoding="utf-8")
    for text in (page, torchweld.attention.__doc__):
        assert f"{POSITION}`" in " ".join(text.split())


@pytest.mark.parametrize("more", [{"causal": True}, {"causal": True, "window": 2}, {"window": 2}])
@pytest.mark.parametrize("shape", [(2, 5), (4, 4), (4, 3), (5, 2)], ids=str)
def test_positions_with_a_key_end(device, shape, more):
    seqlen_q, seqlen_k = shape
    for end in range(seqlen_k + 1):
        names = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "key_end": [end], "b": 0}
        seen = torch.zeros(shape, dtype=torch.bool)
        for i in range(seqlen_q):
            position = eval(POSITION, {**names, "i": i})
            window = more.get("window", seqlen_q + seqlen_k)
            last = position if "causal" in more else position + window - 1
            seen[i, max(position - window + 1, 0) : max(min(last + 1, end), 0)] = True
        check_seen(device, seen, {**more, "key_end": ints(end)})


def check_seen(device: str, seen: Tensor, numbers: dict) -> None:
    """Equal visible logits, the identity as value: the result is the table, divided by its rows."""
    seqlen_q, seqlen_k = seen.shape
    numbers = moved(device, numbers)
    leftpad = numbers.pop("leftpad", None)
    causal = numbers.get("causal", False)
    given = {k: v for k, v in numbers.items() if k != "causal"}
    assert_equal(R.visible(1, seqlen_q, seqlen_k, leftpad, causal, **given)[0].cpu(), seen)
    seen = seen.to(device)
    for dtype in dtypes(device):
        expected = masks.uniform(seen).to(dtype)
        query = torch.zeros(1, 1, seqlen_q, 3, dtype=dtype, device=device)
        key = randn(device, dtype, 1, 1, seqlen_k, 3)
        value = torch.eye(seqlen_k, dtype=dtype, device=device)[None, None]
        out, lse = attention_with_lse(query, key, value, leftpad, **numbers)
        assert_equal(out[0, 0], expected)
        torch.testing.assert_close(lse[0, 0].double(), seen.sum(-1).double().log(), **LSE)
        scores = torch.where(seen, 0.5, math.nan).to(dtype)[None, None]
        if causal:
            y = torchweld.causal_softmax(scores, leftpad, scale=2.0, **given)
            assert_equal(y[0, 0], expected)
        out = softmax_matmul(scores, value, leftpad, scale=-2.0, **numbers)
        assert_equal(out[0, 0], expected)


def numbers_of(seed: int, op: str, b: int, h: int, sq: int, sk: int, dtype, device: str) -> tuple:
    """A leftpad or None, and random numbers; at least one of those beyond leftpad."""
    pick = random.Random(seed)
    g = torch.Generator().manual_seed(seed)

    def data(*shape: int) -> Tensor:
        return torch.randint(-1, sk + 2, shape, generator=g, dtype=torch.int32)

    leftpad, numbers = None, {}
    if op != "causal_softmax":
        numbers["causal"] = pick.random() < 0.5
    way = pick.choice(["leftpad", "documents", "any", "none", "both"])
    if way in ("leftpad", "both"):
        leftpad = data(b)
    if way in ("documents", "any", "both"):
        start = data(b, sq)
        numbers["key_start"] = start.sort(1).values if way == "documents" else start
    if pick.random() < 0.4:
        numbers["key_end"] = data(b)
    if pick.random() < 0.4:
        numbers["window"] = pick.choice([1, 2, 7, 64, 1000])
    if pick.random() < 0.4:
        numbers["softcap"] = pick.choice([0.5, 3.0, 50.0])
    if pick.random() < 0.4 or len(numbers) < 2:
        sink = torch.randn(h, generator=g, dtype=F64)
        numbers["sink"] = sink.to(pick.choice([dtype, acc_dtype(dtype)]))
    return None if leftpad is None else leftpad.to(device), moved(device, numbers)


def case(seed: int, op: str, device: str) -> tuple:
    pick = random.Random(seed)
    torch.manual_seed(seed)
    dtype = dtypes(device)[seed % len(dtypes(device))]
    b, hkv, group = pick.choice([1, 2, 3]), pick.choice([1, 2]), pick.choice([1, 2])
    sq = pick.choice([1, 2, 5, 9, 17, 33, 70])
    sk = pick.choice([1, 3, 17, 63, 64, 65, 130])
    h = hkv * group
    if op == "attention":
        dims = pick.choice([1, 4, 16]), pick.choice([2, 8])
        if device != ON_CPU:
            dims = pick.choice([(3, 5), (64, 64), (65, 40), (128, 128), (200, 256), (300, 8)])
        args = qkv(dtype, b, h, hkv, sq, sk, *dims, device)
    else:
        args = [randn(device, dtype, b, h, sq, sk)]
        if op == "softmax_matmul":
            args.append(randn(device, dtype, b, h, sk, 6))
    leftpad, numbers = numbers_of(seed, op, b, h, sq, sk, dtype, device)
    if pick.random() < 0.5:
        numbers["scale"] = pick.choice([0.7, -1.0])
    return args, leftpad, numbers


@pytest.mark.parametrize("op", ["attention", "softmax_matmul", "causal_softmax"])
@pytest.mark.parametrize("seed", range(48))
def test_random_masks(device, op, seed):
    """Results and all gradients against float64, beside eager torch with a dense mask."""
    compare(op, *case(seed, op, device))


# batch, nheads, nheads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v: every tile, its edges, few
# rows of many keys, and head dims that no tile holds.
LARGE = [
    (1, 2, 1, 128, 128, 64, 64), (2, 2, 2, 129, 257, 64, 40), (1, 4, 2, 200, 130, 72, 128),
    (1, 2, 1, 191, 193, 128, 128), (1, 2, 1, 130, 127, 256, 256), (2, 1, 1, 65, 300, 129, 200),
    (1, 2, 1, 70, 90, 300, 20), (2, 8, 2, 1, 700, 64, 64), (2, 8, 1, 4, 513, 128, 128),
    (1, 4, 4, 16, 300, 96, 48), (1, 2, 1, 7, 260, 256, 256), (2, 2, 2, 100, 64, 33, 65),
]  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_large_random_masks(device, shape, seed):
    b, h, _, sq, sk, _, _ = shape
    for dtype in dtypes(device)[:3]:
        seed += 3
        torch.manual_seed(seed)
        numbers = numbers_of(seed, "attention", b, h, sq, sk, dtype, device)
        compare("attention", qkv(dtype, *shape, device), *numbers)


# seqlen_q, seqlen_k, head_dim_v of softmax_matmul: edges of its tiles of 128 rows, 32 or 64 keys
# and 64 or 128 columns, and value's columns in several blocks.
TILES = [
    (128, 128, 64), (129, 257, 65), (127, 63, 128), (257, 130, 130), (1, 700, 64), (300, 33, 200),
    (33, 300, 8), (130, 512, 7),
]  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shape", TILES, ids=str)
def test_random_masks_of_tiles(device, shape, seed):
    sq, sk, dv = shape
    for dtype in dtypes(device)[:3]:
        seed += 6
        torch.manual_seed(seed)
        numbers = numbers_of(seed, "softmax_matmul", 2, 2, sq, sk, dtype, device)
        args = [randn(device, dtype, 2, 2, sq, sk), randn(device, dtype, 2, 2, sk, dv)]
        compare("softmax_matmul", args, *numbers)


# seqlen_q, seqlen_k of the kernels of causal_softmax: a row in registers of a warp and of more
# threads, in shared memory, read twice; whole accesses and rows that start anywhere.
ROWS = [
    (5, 128), (70, 129), (3, 1000), (2, 1023), (3, 2048), (2, 4097), (2, 8192), (3, 8193),
    (1, 16_384), (2, 20_000), (2, 24_577), (1, 50_001), (1, 65_536), (2, 131_072),
]  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_random_masks_of_rows(device, shape, seed):
    sq, sk = shape
    for dtype in dtypes(device)[:3]:
        seed += 6
        torch.manual_seed(seed)
        leftpad, numbers = numbers_of(seed, "causal_softmax", 2, 2, sq, sk, dtype, device)
        if "window" in numbers:
            numbers["window"] *= max(1, sk // 100)
        compare("causal_softmax", [randn(device, dtype, 2, 2, sq, sk)], leftpad, numbers)


CAPPED = [{}, {"softcap": 2.0}, {"sink": (0.5, -1.0)}, {"softcap": 0.5, "sink": (3.0, -math.inf)}]


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("sk", [65, 300, 1024, 33_000])
@pytest.mark.parametrize("capped", CAPPED, ids=str)
def test_hidden_scores_are_not_read(device, capped, sk, offset):
    """Hidden elements of scores, y and dy are not read; rows without visible keys are 0."""
    sq = 5
    start = torch.tensor([[0, 9, 9, sk, 60], [-4, 1, 2, 3, 4]], dtype=torch.int32)
    mask = moved(device, {"key_start": start, "key_end": pads(device, sk, sk - 7), "window": 50})
    shape = (2, 2, sq, sk)
    seen = R.visible(2, sq, sk, None, True, **mask)[:, None].expand(shape).to(device)
    assert not seen[0, 0, 3].any() and seen.any()
    for dtype in dtypes(device):
        # Rows that begin anywhere.
        x, y, dy = (randn(device, dtype, *shape[:3], sk + offset)[..., offset:] for _ in range(3))
        y = y.abs()
        numbers = {"scale": -0.7, **mask, **capped}
        if "sink" in capped:
            numbers["sink"] = torch.tensor(capped["sink"], dtype=acc_dtype(dtype), device=device)
        more = {"scores": x} if capped else {}
        backward = torch.ops.torchweld.causal_softmax_backward
        forward = torchweld.causal_softmax(x, **numbers)
        gradients = backward(dy, y, **numbers, **more)
        for result in (forward, gradients[0]):
            assert (result[~seen] == 0).all() and (result[seen] != 0).any()
        for hole in (math.nan, math.inf):
            for t in (x, y, dy):
                t.masked_fill_(~seen, hole)
            holed = [torchweld.causal_softmax(x, **numbers), *backward(dy, y, **numbers, **more)]
            assert_same_bits(holed, [forward, *gradients])


@pytest.mark.parametrize("sq", [3, 140])
@pytest.mark.parametrize("hole", [math.nan, math.inf])
def test_unseen_keys_are_not_read_by_softmax_matmul(device, hole, sq):
    """Hidden scores, values of keys that no row sees, dout of rows that see nothing."""
    sk, dv = 200, 72
    start = torch.full((3, sq), 5, dtype=torch.int32)
    start[1] = torch.arange(sq) % 90 + 20
    start[2, sq // 3 :: 2] = 999
    numbers = {"key_start": start, "key_end": ints(60, 200, 41)}
    seen = R.visible(3, sq, sk, None, False, **numbers)[:, None].to(device)
    numbers = {**moved(device, numbers), "softcap": 3.0}
    rows, keys = ~seen.any(3)[..., None], ~seen.any(2)[..., None]
    for dtype in dtypes(device):
        scores, value = randn(device, dtype, 3, 2, sq, sk), randn(device, dtype, 3, 2, sk, dv)
        dout, sink = randn(device, dtype, 3, 2, sq, dv), randn(device, dtype, 2)

        def filled(by, scores=scores, value=value, dout=dout, sink=sink):
            hidden = torch.where(seen, scores, by), torch.where(keys, by, value)
            leaves = [t.clone().requires_grad_() for t in (*hidden, sink)]
            out = softmax_matmul(*leaves[:2], sink=leaves[2], **numbers)
            return [out.detach(), *torch.autograd.grad(out, leaves, torch.where(rows, by, dout))]

        for got, ref in zip(filled(hole), filled(0.0), strict=True):
            assert_same_bits(got, ref)
            assert ref.isfinite().all()


def test_scores_of_minus_infinity(device):
    """A row of -inf is NaN, as in torch; a cap makes it -softcap, a sink makes it 0."""
    for sk in (65, 40_000):
        x = torch.full((1, 2, 2, sk), -math.inf, device=device)
        sink = torch.zeros(2, device=device)
        key_end = pads(device, sk)
        for scale in (2.0, 0.5):
            assert torchweld.causal_softmax(x, key_end=key_end, scale=scale)[..., :60].isnan().all()
            y = torchweld.causal_softmax(x, softcap=3.0, scale=scale)
            torch.testing.assert_close(y[:, :, 1], torch.full_like(y[:, :, 1], 1 / sk))
            assert (torchweld.causal_softmax(x, sink=sink, scale=scale) == 0).all()
        if sk < 100:
            value = torch.ones(1, 2, sk, 3, device=device)
            forward = torch.ops.torchweld.softmax_matmul_forward
            out, lse = forward(x, value, key_end=key_end)
            assert out.isnan().all() and lse.isnan().all()
            out, lse = forward(x, value, softcap=3.0)
            torch.testing.assert_close(out, torch.ones_like(out))
            torch.testing.assert_close(lse, torch.full_like(lse, math.log(sk) - 3))
            out, lse = forward(x, value, sink=sink)
            assert (out == 0).all() and (lse == 0).all()
        x[..., 7] = 1.0
        y = torchweld.causal_softmax(x, sink=sink)[..., 7]
        torch.testing.assert_close(y, torch.full_like(y, math.e / (math.e + 1)))


def compare(op: str, args: list[Tensor], leftpad: Tensor | None, numbers: dict) -> None:
    (bound,) = REFERENCES[op](*args, leftpad, **numbers)

    def run(function):
        leaves, given = [t.clone().requires_grad_() for t in args], dict(numbers)
        more = [name for name in ("sink", "bias") if name in given]
        given.update({name: given[name].detach().requires_grad_() for name in more})
        out = function(*leaves, leftpad, **given)
        inputs = leaves + [given[name] for name in more]
        return out, torch.autograd.grad(out, inputs, dout)

    dout = randn(args[0].device, bound.dtype, *bound.ref.shape)
    eager, eager_grads = run(R.EAGER[op])
    out, grads = run(call(op))
    check(out, bound, label=f"{op} with numbers", eager=eager)
    bounds = GRADIENTS[op](dout, *args, leftpad, **numbers)
    assert len(bounds) == len(grads)
    for grad, limit, yardstick, t in zip(grads, bounds, eager_grads, range(9), strict=False):
        check(grad, limit, label=f"{op} with numbers, gradient {t}", eager=yardstick)


@pytest.mark.parametrize("seed", range(24))
def test_with_lse_and_its_gradient(device, seed):
    args, leftpad, numbers = case(seed, "attention", device)
    leaves = [t.clone().requires_grad_() for t in args]
    if "sink" in numbers:
        leaves.append(numbers["sink"].clone().requires_grad_())
    given = {**numbers, **({"sink": leaves[3]} if "sink" in numbers else {})}
    out, lse = attention_with_lse(*leaves[:3], leftpad, **given)
    bounds = REFERENCES["attention_forward"](*args, leftpad, **numbers)
    for got, bound in zip((out, lse), bounds, strict=True):
        check(got, bound, label="attention_with_lse")
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    grads = torch.autograd.grad((out, lse), leaves, (dout, dlse), retain_graph=True)
    bounds = GRADIENTS["attention"](dout, *args, leftpad, dlse=dlse, **numbers)
    for t, (grad, bound) in enumerate(zip(grads, bounds, strict=True)):
        check(grad, bound, label=f"attention_with_lse, gradient {t}")
    # One of the two alone is a gradient of 0 for the other.
    none = (torch.zeros_like(out), torch.zeros_like(lse))
    for alone, grad, both in ((lse, dlse, (none[0], dlse)), (out, dout, (dout, none[1]))):
        got = torch.autograd.grad(alone, leaves, grad, retain_graph=True)
        want = torch.autograd.grad((out, lse), leaves, both, retain_graph=True)
        assert_same_bits(got, want)


def test_gradcheck_of_sink_softcap_and_lse():
    torch.manual_seed(0)
    q, k, v = (t.requires_grad_() for t in qkv(F64, 2, 4, 2, 4, 5, 3, 2))
    sink = torch.randn(4, dtype=F64, requires_grad=True)
    start = ints([0, 0, 2, 2], [0, 5, 1, 9])

    def numbers(sink: Tensor, causal: bool) -> dict:
        return {"key_start": start, "softcap": 1.5, "sink": sink, "causal": causal, "window": 3}

    for causal in (False, True):
        assert torch.autograd.gradcheck(
            lambda *t, causal=causal: attention_with_lse(*t[:3], **numbers(t[3], causal)),
            (q, k, v, sink),
        )
    scores = torch.randn(2, 4, 4, 5, dtype=F64, requires_grad=True)
    value = torch.randn(2, 4, 5, 2, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda s, v, sink: softmax_matmul(s, v, **numbers(sink, True)), (scores, value, sink)
    )
    assert torch.autograd.gradcheck(
        lambda s, sink: torchweld.causal_softmax(s, key_start=start, softcap=1.5, sink=sink),
        (scores, sink),
    )
    three = torch.randn(2, 4, 5, dtype=F64, requires_grad=True)
    one = torch.randn(1, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda s, sink: torchweld.causal_softmax(s, sink=sink), (three, one)
    )


@pytest.mark.parametrize("sq", [3, 40])
@pytest.mark.parametrize("hole", [math.nan, math.inf])
def test_unseen_keys_are_not_read(device, hole, sq):
    """Keys before the first and after the last of all rows, and dout of rows that see nothing."""
    sk = 70
    start = torch.full((3, sq), 5, dtype=torch.int32)
    start[1] = torch.arange(sq) + 20
    start[2, sq // 2 :] = 99
    numbers = {"key_start": start, "key_end": ints(60, 66, 41)}
    seen = R.visible(3, sq, sk, None, False, **numbers).to(device)
    numbers = {**moved(device, numbers), "softcap": 3.0}
    rows, keys = ~seen.any(2)[:, None, :, None], ~seen.any(1)[:, None, :, None]
    for dtype in dtypes(device):
        q, k, v = qkv(dtype, 3, 2, 1, sq, sk, device=device)
        dout = randn(device, dtype, 3, 2, sq, 4)
        sink = randn(device, dtype, 2)

        def filled(by, q=q, k=k, v=v, dout=dout, sink=sink):
            leaves = [torch.where(m, by, t) for m, t in ((rows, q), (keys, k), (keys, v))]
            leaves = [t.requires_grad_() for t in [*leaves, sink.clone()]]
            out = attention(*leaves[:3], sink=leaves[3], **numbers)
            return [out.detach(), *torch.autograd.grad(out, leaves, torch.where(rows, by, dout))]

        for got, ref in zip(filled(hole), filled(0.0), strict=True):
            assert_same_bits(got, ref)
            assert ref.isfinite().all()


def test_rows_that_see_nothing(device):
    """out is 0, lse is -inf or the sink, and only dlse reaches the sink's gradient."""
    dtype = best(device)
    q, k, v = (t.requires_grad_() for t in qkv(dtype, device=device))
    sink = torch.tensor([0.5, -2.0], dtype=dtype, device=device, requires_grad=True)
    nothing = moved(device, {"key_end": ints(0, -3)})
    out, lse = attention_with_lse(q, k, v, **nothing)
    assert (out == 0).all() and lse.isneginf().all()
    for grad in torch.autograd.grad((out.sum(), lse.exp().sum()), (q, k, v)):
        assert (grad == 0).all()
    out, lse = attention_with_lse(q, k, v, sink=sink, **nothing)
    assert (out == 0).all()
    assert_equal(lse, sink.detach()[None, :, None].expand_as(lse))
    *others, dsink = torch.autograd.grad((out.sum(), lse.sum()), (q, k, v, sink))
    assert all((grad == 0).all() for grad in others)
    assert_equal(dsink, torch.full_like(dsink, 2 * 5))
    (dsink,) = torch.autograd.grad(attention(q, k, v, sink=sink, **nothing).sum(), sink)
    assert (dsink == 0).all()


@pytest.mark.parametrize("sq", [1, 8, 40])
def test_key_end_is_a_shorter_cache(device, sq):
    """The result equals that of keys cut off at key_end, sequence by sequence."""
    q, k, v = qkv(F32, 3, 4, 2, sq, 90, 8, 8, device)
    ends = [40, 77, 90]
    out, lse = attention_with_lse(q, k, v, causal=True, key_end=ints(ends)[0].to(device))
    for b, end in enumerate(ends):
        cut = [q[b : b + 1], k[b : b + 1, :, :end], v[b : b + 1, :, :end]]
        for got, want in zip((out, lse), attention_with_lse(*cut, causal=True), strict=True):
            torch.testing.assert_close(got[b : b + 1], want)


@pytest.mark.parametrize("window", [None, 5])
def test_key_end_is_the_length_of_a_sequence_padded_on_the_right(device, window):
    """Row 0 is the first token, so tokens equal those of calls without padding."""
    n, ends = 70, [1, 33, 70, 64]
    q, k, v = (t.requires_grad_() for t in qkv(F32, 4, 4, 2, n, n, 8, 8, device))
    mask = {"causal": True, "window": window}
    out = attention(q, k, v, key_end=ints(ends)[0].to(device), **mask)
    loss = sum(out[b, :, :end].square().sum() for b, end in enumerate(ends))
    grads = torch.autograd.grad(loss, (q, k, v))
    for b, end in enumerate(ends):
        cut = [t[b : b + 1, :, :end].detach().requires_grad_() for t in (q, k, v)]
        alone = attention(*cut, **mask)
        torch.testing.assert_close(out[b : b + 1, :, :end], alone)
        for got, want in zip(grads, torch.autograd.grad(alone.square().sum(), cut), strict=True):
            torch.testing.assert_close(got[b : b + 1, :, :end], want)
            assert (got[b, :, end:] == 0).all()


@pytest.mark.parametrize("op", ["attention", "attention_with_lse", "softmax_matmul"])
def test_starts_of_rows_need_causal(op):
    """Without causal, a row would see the documents after its own."""
    tensors = [torch.randn(1, 2, 4, 4)] * (2 if op == "softmax_matmul" else 3)
    start = torch.tensor([[0, 0, 2, 2]], dtype=torch.int32)
    sentence = (
        f"torchweld::{op}: key_start must be one start a sequence without causal=True, where a row "
        "also sees the documents behind its own, but got starts that differ; use causal=True, or "
        "in attention a key_end per row"
    )
    assert len(sentence) < 255  # more does not fit into a device assertion
    with pytest.raises(RuntimeError, match=f"^{re.escape(sentence)}"):
        getattr(torchweld, op)(*tensors, key_start=start)
    getattr(torchweld, op)(*tensors, key_start=start, causal=True)
    cut = [tensors[0][..., 2:] if op == "softmax_matmul" else tensors[0]]
    cut += [t[:, :, 2:] for t in tensors[1:]]
    want = as_tuple(getattr(torchweld, op)(*cut))[0]
    expanded = start[:, 2:3].expand(-1, 4)
    for one in (expanded, expanded.contiguous(), expanded.clamp(min=0), expanded.long().int()):
        out = as_tuple(getattr(torchweld, op)(*tensors, key_start=one))[0]
        torch.testing.assert_close(out, want)


def test_packed_documents_are_calls_of_their_own(device):
    lengths = [1, 30, 64, 5]
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    start = torchweld.key_start_from_documents(ids)
    assert_equal(start, torchweld.key_start_from_position_ids(positions))
    start = start.to(device)
    q, k, v = (t.requires_grad_() for t in qkv(F32, 1, 2, 1, 100, 100, 8, 8, device))
    out = attention(q, k, v, causal=True, key_start=start)
    parts = [
        attention(*part, causal=True)
        for part in zip(*(t.split(lengths, 2) for t in (q, k, v)), strict=True)
    ]
    torch.testing.assert_close(out, torch.cat(parts, 2))
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    wanted = torch.autograd.grad(torch.cat(parts, 2), (q, k, v), dout)
    torch.testing.assert_close(grads, wanted)


def test_parts_of_the_keys_join_by_lse(device):
    q, k, v = qkv(best(device), sq=6, sk=11, device=device)
    whole = attention(q, k, v)
    parts = [attention_with_lse(q, k[:, :, s], v[:, :, s]) for s in (slice(4), slice(4, None))]
    weights = torch.softmax(torch.stack([lse for _, lse in parts]), 0)[..., None]
    combined = sum(w * out for w, (out, _) in zip(weights, parts, strict=True))
    torch.testing.assert_close(combined, whole)


def hiding_nothing(sq: int, sk: int, dtype, device: str) -> list[dict]:
    """Numbers of two sequences that hide nothing."""
    start = torch.zeros(2, sq, dtype=torch.int32) - 2**31
    sink = torch.full((2,), -math.inf, dtype=dtype)
    every = ({"window": sk}, {"key_end": ints(sk, 2**31 - 1)}, {"key_start": start}, {"sink": sink})
    return [moved(device, numbers) for numbers in every]


def test_numbers_that_hide_nothing_change_no_bit(device):
    for sq in (4, 70):
        for dtype in dtypes(device):
            args = qkv(dtype, sq=sq, sk=70, device=device)
            plain = attention_with_lse(*args, causal=True)
            for numbers in hiding_nothing(sq, 70, dtype, device):
                assert_same_bits(attention_with_lse(*args, causal=True, **numbers), plain)


def test_numbers_that_hide_nothing_change_no_bit_of_the_scores_ops(device):
    sq, sk = 140, 200
    forward = torch.ops.torchweld.softmax_matmul_forward
    for dtype in dtypes(device):
        scores, value = randn(device, dtype, 2, 2, sq, sk), randn(device, dtype, 2, 2, sk, 65)
        plain = forward(scores, value, causal=True)
        rows = torchweld.causal_softmax(scores)
        for numbers in hiding_nothing(sq, sk, dtype, device):
            assert_same_bits(forward(scores, value, causal=True, **numbers), plain)
            if "sink" not in numbers:
                assert_same_bits(torchweld.causal_softmax(scores, **numbers), rows)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_gradients_have_the_same_bits_in_every_run(device, dim):
    """Key blocks add to dQ in a fixed order; masks of other sequences change nothing."""
    b, sq = 3, 300 if device == ON_CPU else 1500
    start = torch.arange(sq, dtype=torch.int32).expand(b, sq) // 90 * 90
    start = torch.where(torch.rand(b, sq) < 0.1, 0, start).to(device)
    args = [t.requires_grad_() for t in qkv(BF16, b, 4, 2, sq, sq, dim, dim, device)]
    sink = torch.randn(4, device=device, requires_grad=True)
    leaves = [*args, sink]

    def grads(start):
        out, lse = attention_with_lse(
            *args, causal=True, key_start=start, window=500, softcap=20.0, sink=sink
        )
        return torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), torch.ones_like(lse)))

    first = grads(start)
    for _ in range(2 if device == ON_CPU else 20):
        assert_same_bits(grads(start), first)
    others = start.clone()
    others[1:] = 0
    for got, want in zip(grads(others)[:3], first, strict=False):
        assert_same_bits(got[0], want[0])


def check_replays(run, start, end, sink, all_ends) -> None:
    """A replay of a captured run() equals an eager run after the mask numbers have changed."""
    most = int(end.max())
    graph, captured = cuda_graph(run)
    for seed, ends in enumerate(all_ends):
        torch.manual_seed(seed)
        start.copy_(torch.randint(-1, most, start.shape, dtype=torch.int32))
        end.copy_(torch.tensor(ends))
        with torch.no_grad():
            sink.copy_(torch.randn(sink.shape))
        graph.replay()
        assert_same_bits([got.detach() for got in captured], [want.detach() for want in run()])


@on_gpu
@pytest.mark.parametrize("sq", [1, 300])
def test_a_graph_serves_other_numbers(sq):
    sk = 700
    args = qkv(BF16, 2, 8, 2, sq, sk, 64, 64, "cuda")
    leaves = [t.requires_grad_() for t in args]
    dout = torch.randn_like(args[0])
    start = torch.zeros(2, sq, dtype=torch.int32, device="cuda")
    end = torch.full((2,), sk, dtype=torch.int32, device="cuda")
    sink = torch.zeros(8, device="cuda", requires_grad=True)

    def run():
        out = attention(*args, causal=True, key_start=start, key_end=end, window=400, sink=sink)
        return [out, *torch.autograd.grad(out, [*leaves, sink], dout)]

    check_replays(run, start, end, sink, ([700, 3], [0, 400], [650, 900]))


@on_gpu
def test_a_graph_of_the_scores_ops_serves_other_numbers():
    sq, sk = 70, 300
    scores = randn("cuda", BF16, 2, 4, sq, sk).requires_grad_()
    value = randn("cuda", BF16, 2, 4, sk, 64).requires_grad_()
    start = torch.zeros(2, sq, dtype=torch.int32, device="cuda")
    end = torch.full((2,), sk, dtype=torch.int32, device="cuda")
    sink = torch.zeros(4, device="cuda", requires_grad=True)

    def run():
        numbers = {"key_start": start, "key_end": end, "window": 200, "sink": sink, "softcap": 9.0}
        out = softmax_matmul(scores, value, causal=True, **numbers)
        y = torchweld.causal_softmax(scores, **numbers)
        leaves = (scores, value, sink)
        return [out, y, *torch.autograd.grad((out.sum(), y.square().sum()), leaves)]

    check_replays(run, start, end, sink, ([300, 3], [0, 150], [250, 900]))


def test_helpers_of_packed_sequences():
    ids = torch.tensor([[7, 7, 7, 2, 2], [1, 2, 1, 1, 0]])
    expected = ints([0, 0, 0, 3, 3], [0, 1, 2, 2, 4])
    assert_equal(torchweld.key_start_from_documents(ids), expected)
    positions = torch.tensor([[0, 1, 2, 0, 1], [4, 5, 9, 10, 0]], dtype=torch.int16)
    expected = ints([0, 0, 0, 3, 3], [0, 0, 2, 2, 4])
    assert_equal(torchweld.key_start_from_position_ids(positions), expected)
    for helper, name in (
        (torchweld.key_start_from_documents, "ids"),
        (torchweld.key_start_from_position_ids, "position_ids"),
    ):
        assert helper(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0)
        with pytest.raises(TypeError, match=f"{name} must be a Tensor, but got list"):
            helper([[0, 1]])
        with pytest.raises(ValueError, match=re.escape(f"{name} must be (batch, seqlen), but got")):
            helper(torch.zeros(3))
    assert torchweld.key_start_from_positions is torchweld.key_start_from_position_ids
    compiled = torch.compile(
        torchweld.key_start_from_documents, fullgraph=True, backend="aot_eager"
    )
    assert_equal(compiled(ids), torchweld.key_start_from_documents(ids))


# Refused calls, and the sentence after "torchweld::attention: ".
REFUSED = [
    ({"key_start": torch.zeros(2, 5)}, "key_start must be int32, but got float32 (2, 5) on cpu"),
    ({"key_start": ints([0] * 4, [0] * 4)}, "key_start must be (batch, seqlen_q) = (2, 5), but"),
    ({"key_end": torch.zeros(2, dtype=torch.int64)}, "key_end must be int32, but got int64 (2,)"),
    ({"key_end": ints(1, 2, 3)}, "key_end must be (batch,) = (2,), but got int32 (3,) on cpu"),
    ({"window": 0}, "window must be at least 1, but got 0; leave it out for no window"),
    ({"window": -1}, "window must be at least 1, but got -1"),
    ({"softcap": 0.0}, "softcap must be finite and above 0, but got 0; leave it out for no cap"),
    ({"softcap": math.inf}, "softcap must be finite and above 0, but got inf"),
    ({"sink": torch.zeros(3)}, "sink must be (nheads,) = (2,), but got float32 (3,) on cpu"),
    ({"sink": torch.zeros(2, dtype=F16)}, "sink must be float32 like query or float32, but got"),
    ({"sink": torch.zeros(2, device="meta")}, "sink must be on cpu like query, but got float32"),
]


@pytest.mark.parametrize(("numbers", "sentence"), REFUSED, ids=lambda v: str(v)[:30])
def test_refusals(numbers, sentence):
    args = qkv(F32)
    for op in ("attention", "attention_forward", "attention_with_lse"):
        with pytest.raises(RuntimeError, match=re.escape(f"torchweld::{op}: {sentence}")):
            call(op)(*args, **numbers)
    like = sentence.replace("like query", "like scores")
    scores = torch.zeros(2, 2, 5, 5)
    for op, inputs in (("softmax_matmul", [scores, args[2]]), ("causal_softmax", [scores])):
        with pytest.raises(RuntimeError, match=re.escape(f"torchweld::{op}: {like}")):
            call(op)(*inputs, **numbers)


def test_the_gradient_of_causal_softmax_says_what_it_needs():
    y = torch.softmax(torch.zeros(2, 2, 3, 3), -1)
    for numbers in ({"softcap": 2.0}, {"sink": torch.zeros(2)}):
        with pytest.raises(RuntimeError, match="scores must be given with softcap or sink, but"):
            torch.ops.torchweld.causal_softmax_backward(y, y, **numbers)


NUMBERS = {
    "key_start": ints([0, 0, 2, 2, 2], [0, 1, 1, 1, 4]),
    "key_end": ints(5, 4),
    "window": 3,
    "softcap": 2.0,
}


@pytest.mark.parametrize("op", ["attention", "softmax_matmul", "causal_softmax"])
def test_opcheck_compile_export_and_script(op):
    torch.manual_seed(0)
    inputs = {
        "attention": qkv(F32),
        "softmax_matmul": [torch.randn(2, 2, 5, 5), torch.randn(2, 2, 5, 3)],
        "causal_softmax": [torch.randn(2, 2, 5, 5)],
    }[op]
    sink = torch.randn(2)
    leaves = [t.requires_grad_() for t in [*inputs, sink]]
    torch.library.opcheck(call(op).default, tuple(leaves[:-1]), {**NUMBERS, "sink": sink})

    def function(*tensors: Tensor) -> Tensor:
        *inputs, sink = tensors
        return call(op)(*inputs, **NUMBERS, sink=sink)

    plain = function(*leaves)
    grads = torch.autograd.grad(plain.square().sum(), leaves)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    out = compiled(*leaves)
    assert_same_bits(out.detach(), plain.detach())
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), leaves), grads)

    class Module(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            return function(*tensors)

    still = tuple(t.detach() for t in leaves)
    exported = torch.export.export(Module(), still).module()
    assert_same_bits(exported(*still), plain.detach())


def test_autocast_and_half_sinks():
    q, k, v = (t.requires_grad_() for t in qkv(F32))
    sink = torch.zeros(2, requires_grad=True)
    with torch.autocast("cpu", BF16):
        out = attention(q, k, v, causal=True, sink=sink, window=2)
    assert out.dtype == BF16
    out.sum().backward()
    assert sink.grad.dtype == F32 and sink.grad.isfinite().all()
    half = [t.detach().to(BF16) for t in (q, k, v)]
    for dtype in (BF16, F32):
        sink = torch.ones(2, dtype=dtype, requires_grad=True)
        attention(*half, sink=sink).sum().backward()
        assert sink.grad.dtype == dtype
    assert as_tuple(attention_with_lse(*half))[1].dtype == F32
