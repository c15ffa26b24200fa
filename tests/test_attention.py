"""attention, its forward and backward ops, against float64 and hand-written masks."""

from __future__ import annotations

import math
import textwrap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import masks
import reference as R
from commands import python
from numerics import acc_dtype, assert_equal, assert_same_bits, check
from running import REFERENCES
from samples import BF16, F16, F32, check_op, dtypes, forward_backward
from strategies import dtype_names, kinds, layouts, seeds, sizes, strided, values
from tensors import pads, randn

attention = torch.ops.torchweld.attention
attention_forward = torch.ops.torchweld.attention_forward
attention_backward = torch.ops.torchweld.attention_backward

OP = "attention"
OPS = (OP, OP + "_forward", OP + "_backward")


def qkv(device, dtype, b, h, hkv, sq, sk, d, dv):
    return [
        randn(device, dtype, b, h, sq, d),
        randn(device, dtype, b, hkv, sk, d),
        randn(device, dtype, b, hkv, sk, dv),
    ]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", masks.SHAPES, ids=str)
def test_truth_table(device, shape, causal):
    """Equal visible logits, the identity as value: the result is the table, divided by its rows."""
    seqlen_q, seqlen_k = shape
    leftpad = masks.leftpad_of(shape, causal, device)
    seen = masks.tables_of(shape, causal)
    lse = torch.log(seen.sum(-1).double())
    for dtype in dtypes(device):
        query = torch.zeros(len(seen), 1, seqlen_q, 3, dtype=dtype, device=device)
        key = randn(device, dtype, len(seen), 1, seqlen_k, 3)
        value = torch.eye(seqlen_k, dtype=dtype, device=device).expand(len(seen), 1, -1, -1)
        out, got_lse = attention_forward(query, key, value, leftpad, causal=causal)
        assert_equal(out[:, 0], masks.uniform(seen).to(dtype).to(device))
        expected = lse.to(acc_dtype(dtype)).to(device)
        torch.testing.assert_close(got_lse[:, 0], expected, rtol=1e-6, atol=1e-7)
        assert_equal(got_lse[:, 0].isneginf(), expected.isneginf())
        grads = attention_backward(
            torch.ones_like(out), query, key, value, out, got_lse, leftpad, causal=causal
        )
        blind_keys, blind_rows = ~seen.any(1).to(device), ~seen.any(2).to(device)
        assert (grads[0][:, 0][blind_rows] == 0).all()
        assert (grads[1][:, 0][blind_keys] == 0).all()
        assert (grads[2][:, 0][blind_keys] == 0).all()
        assert (grads[2][:, 0][~blind_keys] > 0).all()
        plain = masks.table(shape, causal, None)
        out = attention(query[:1], key[:1], value[:1], causal=causal)
        assert_equal(out[0, 0], masks.uniform(plain).to(dtype).to(device))


# seqlen_q, seqlen_k, head_dim, head_dim_v
SIZES = [
    (1, 1, 1, 1), (1, 33, 7, 5), (31, 31, 16, 32), (32, 32, 33, 31), (33, 65, 64, 64),
    (63, 127, 17, 65), (64, 64, 128, 64), (65, 128, 59, 127), (127, 129, 8, 1), (129, 33, 129, 13),
    (7, 251, 13, 111), (2, 1025, 3, 2),
]  # fmt: skip


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(device, dtype, size):
    args = qkv(device, dtype, 2, 2, 2, *size)
    sk = size[1]
    check_op(OP, args)
    check_op(OP, args, {"causal": True, "scale": 0.37})
    check_op(OP, [*args, pads(device, sk // 3, sk // 2)], {"causal": True})
    check_op(OP, [*args, pads(device, sk // 3, sk // 2)], {"causal": False})
    # So few elements are left that eager's largest error is a matter of luck.
    leftpad = pads(device, sk - 1, sk)
    check_op(OP, [*args, leftpad], {"causal": True}, eager=False)
    for out, bound in zip(
        attention_forward(*args, leftpad, causal=True),
        REFERENCES["attention_forward"](*args, leftpad, causal=True),
        strict=True,
    ):
        check(out, bound, label="attention_forward", device=device)


@pytest.mark.parametrize("head_dim", [*range(1, 18), 31, 33, 59, 111, 127, 129, 255, 256, 257])
def test_head_dims(device, head_dim):
    for dtype in (F32, BF16):
        args = qkv(device, dtype, 1, 2, 1, 5, 9, head_dim, 258 - head_dim)
        check_op(OP, args, {"causal": True})


@pytest.mark.parametrize("head_dim", [16, 64, 300])
@pytest.mark.parametrize("scale", [0.5, -0.5])
def test_softcap_of_each_size_and_sign(device, head_dim, scale):
    for dtype in (F32, BF16):
        args = qkv(device, dtype, 1, 2, 1, 40, 50, head_dim, head_dim)
        check_op(OP, args, {"causal": True, "softcap": 2.0, "scale": scale})


@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (6, 2), (6, 3), (6, 6), (8, 1)], ids=str)
def test_grouped_heads(device, heads):
    """Query heads [h * group, (h + 1) * group) share key and value head h."""
    for dtype in dtypes(device):
        args = qkv(device, dtype, 2, *heads, 17, 19, 8, 6)
        check_op(OP, [*args, pads(device, 0, 7)], {"causal": True})
        group = heads[0] // heads[1]
        out = attention(*args)
        for h in range(heads[0]):
            alone = [args[0][:, h : h + 1], *(t[:, h // group :][:, :1] for t in args[1:])]
            (bound, _) = REFERENCES["attention_forward"](*alone)
            check(out[:, h : h + 1], bound, label="attention of one head")


@pytest.mark.parametrize("batch", [65535, 65537])
def test_many_sequences(device, batch):
    leftpad = torch.arange(batch, dtype=torch.int32, device=device) % 4 - 1
    check_op(OP, [*qkv(device, F32, batch, 1, 1, 1, 2, 1, 1), leftpad], {"causal": True})
    check_op(OP, qkv(device, F32, 1, batch, batch, 1, 2, 1, 1))


@pytest.mark.parametrize("zero", ["b", "h", "sq", "sk", "d", "dv"])
def test_empty(device, zero):
    """Without keys the result is 0; without head_dim every logit is 0."""
    dims = {"b": 2, "h": 2, "hkv": 2, "sq": 3, "sk": 4, "d": 5, "dv": 6, zero: 0}
    if zero == "h":
        dims["hkv"] = 0
    for dtype in dtypes(device):
        args = qkv(device, dtype, *dims.values())
        leftpad = torch.ones(dims["b"], dtype=torch.int32, device=device)
        kwargs = {"scale": 1.0} if zero == "d" else {}
        for causal in (False, True):
            check_op(OP, args, {"causal": causal, **kwargs}, eager=False)
            check_op(OP, [*args, leftpad], {"causal": causal, **kwargs}, eager=False)
        if zero == "sk":
            out, lse = attention_forward(*args)
            assert (out == 0).all() and lse.isneginf().all()


@pytest.mark.parametrize("dims", [(5, 6), (512, 264)])
def test_no_query_heads(device, dims):
    """0 heads of 2: nothing to compute, and no gradient for the keys."""
    for dtype in dtypes(device):
        args = [a.requires_grad_() for a in qkv(device, dtype, 2, 0, 2, 3, 4, *dims)]
        out = attention(*args, causal=True)
        assert out.shape == (2, 0, 3, dims[1])
        out.sum().backward()
        for a in args:
            assert_equal(a.grad, torch.zeros_like(a))


def one_hot(device, dtype, seqlen):
    """query, key and value of `seqlen` sequences: the logits of sequence j are 0 at key j alone.

    Another logit is so low that its probability beside a logit of 0 is exactly 0.
    """
    low = 32.0 if dtype == torch.float64 else 16.0
    query = torch.full((seqlen, 1, seqlen, 1), low, dtype=dtype, device=device)
    key = -query
    j = torch.arange(seqlen, device=device)
    key[j, 0, j] = 0
    return [query, key, randn(device, dtype, seqlen, 1, seqlen, 3)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen", [1, 2, 5, 33, 64])
def test_one_hot_at_every_visible_position(device, seqlen, causal):
    for dtype in dtypes(device):
        masks.check_one_hot(OP, one_hot(device, dtype, seqlen), causal, scale=1.0)


def test_one_hot_beside_left_padding(device):
    """A padding key with the highest logit of all is not seen; its neighbours are."""
    seqlen = 33
    j = torch.arange(seqlen, device=device)
    for dtype in dtypes(device):
        query, key, value = one_hot(device, dtype, seqlen)
        # Sequence j has j padding positions: its 0 is the first key that is visible.
        out = attention(query, key, value, j.int(), causal=True, scale=1.0)
        rows = j[None, :] >= j[:, None]
        expected = value[j, 0, j][:, None].expand(seqlen, seqlen, 3)
        assert_equal(out[:, 0][rows], expected[rows])
        assert (out[:, 0][~rows] == 0).all()
        # With one more, the highest key is padding and the result must not be its value.
        out = attention(query, key, value, j.int() + 1, causal=True, scale=1.0)
        later = j[None, :] > j[:, None]
        assert (out[:, 0][~later] == 0).all()
        assert (out[:, 0][later] != expected[later]).any(-1).all()


@pytest.mark.parametrize("power", range(8))
def test_uniform(device, power):
    """Equal logits over 2^k keys and small integer values: the exact mean, rounded once."""
    n = 2**power
    for dtype in dtypes(device):
        value = torch.randint(-8, 9, (2, 1, n, 5), device=device)
        mean = (value.sum(2, keepdim=True).double() / n).to(dtype)
        for entry, scale in ((0.0, None), (16.0, -2.0), (3.0, 0.0)):
            query = torch.full((2, 1, 3, 4), entry, dtype=dtype, device=device)
            key = torch.full((2, 1, n, 4), 2.0, dtype=dtype, device=device)
            out = attention(query, key, value.to(dtype), scale=scale)
            assert_equal(out, mean.expand_as(out))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("hole", [math.nan, math.inf])
@pytest.mark.parametrize("shape", [(5, 5), (2, 5), (5, 2), (33, 70)], ids=str)
def test_padding_is_not_read(device, shape, hole, causal):
    """Padding keys and values, padding query rows, and dout there."""
    sq, sk = shape
    leftpad = pads(device, 0, 1, sk // 2, sk)
    keys = R.padding_keys(4, sk, leftpad.cpu())[:, None, :, None].to(device)
    rows = R.padding_rows(4, sq, sk, leftpad.cpu())[:, None, :, None].to(device)
    for dtype in dtypes(device):
        q, k, v = qkv(device, dtype, 4, 2, 1, sq, sk, 3, 4)
        dout = randn(device, dtype, 4, 2, sq, 4)

        def filled(by, q=q, k=k, v=v, dout=dout):
            masked = [torch.where(m, by, t) for m, t in ((rows, q), (keys, k), (keys, v))]
            return forward_backward(
                OP, [*masked, leftpad], {"causal": causal}, torch.where(rows, by, dout)
            )

        clean, dirty = filled(0.0), filled(hole)
        assert_same_bits(dirty[0], clean[0])
        assert_same_bits(dirty[1][:3], clean[1][:3])
        for grad, where in zip(clean[1][:3], (rows, keys, keys), strict=True):
            assert (grad[where.expand_as(grad)] == 0).all()


@pytest.mark.parametrize("scale", [0.0, -1.0, -0.37, 1e-30, 30.0])
def test_scale(device, scale):
    for dtype in dtypes(device):
        args = [*qkv(device, dtype, 2, 2, 2, 65, 65, 4, 4), pads(device, 0, 14)]
        check_op(OP, args, {"scale": scale, "causal": True})


def test_default_scale(device):
    for dtype in dtypes(device):
        for head_dim in (1, 4, 5, 64):
            args = qkv(device, dtype, 1, 1, 1, 3, 4, head_dim, 2)
            assert_same_bits(attention(*args), attention(*args, scale=head_dim**-0.5))


def test_large_magnitudes(device):
    """Entries of 133120 (bfloat16) in query, key and value: logits near 1e10, no NaN."""
    for dtype in (BF16, F32):
        big = torch.full((1, 1, 5, 8), 133120.0, dtype=dtype, device=device)
        out, lse = attention_forward(big, big, big, causal=True)
        assert_equal(out, big)
        assert lse.isfinite().all()
    big = torch.full((1, 1, 5, 4), 200.0, dtype=F16, device=device)
    assert_equal(attention(big, big, big * 300, causal=True), big * 300)  # near 65504


@pytest.mark.parametrize("offset", [1e2, 1e3, 1e4])
def test_large_lse(device, offset):
    """All logits of a row far from 0: the forward does not care, the backward by |lse| u.

    The rows of a head have the same scores, so it takes many heads to compare the largest error.
    """
    heads = 64
    query = torch.ones(2, heads, 9, 2, dtype=F32)
    key = torch.stack([torch.full((2, heads, 37), offset), torch.randn(2, heads, 37)], -1)
    value = torch.randn(2, heads, 37, 4)
    args = [t.to(device) for t in (query, key, value)]
    # A tensor core truncates where eager rounds: of a score of 1e4 that is 1e-3, not twice eager's.
    eager = offset < 1e4
    check_op(OP, args, {"scale": 1.0}, eager=eager)
    check_op(OP, [*args, pads(device, 3, 30)], {"scale": -1.0, "causal": True}, eager=eager)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_visible_inf_and_nan_spread_as_in_torch(device, value):
    for dtype in dtypes(device):
        args = qkv(device, dtype, 2, 1, 1, 6, 7, 4, 4)
        for which in range(3):
            bad = [a.clone() for a in args]
            bad[which][1, 0, 2, 1] = value
            expected = torch.softmax(bad[0] @ bad[1].mT * 0.5, -1) @ bad[2]
            got = attention(*bad)
            assert_equal(got.isnan(), expected.isnan())
            assert_equal(got.isinf(), expected.isinf())
            check_op(OP, bad, backward=False, eager=False)


def test_agrees_with_scaled_dot_product_attention(device):
    """A second author's mask: is_causal for equal lengths."""
    for dtype in dtypes(device):
        args = qkv(device, dtype, 2, 3, 3, 37, 37, 16, 16)
        for causal in (False, True):
            sdpa = torch.nn.functional.scaled_dot_product_attention(*args, is_causal=causal)
            (bound, _) = REFERENCES["attention_forward"](*args, causal=causal)
            check(attention(*args, causal=causal), bound, label=OP, eager=sdpa, device=device)


def test_memory_is_linear_in_seqlen():
    """8192 x 8192 float32 scores would take 256 MiB; forward and backward stay far below."""
    code = """
        import resource, torch, torchweld
        torch.set_num_threads(2)

        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

        def step(seqlen):
            q, k, v = (torch.randn(1, 1, seqlen, 8, requires_grad=True) for _ in range(3))
            pad = torch.tensor([17], dtype=torch.int32)
            torch.ops.torchweld.attention(q, k, v, pad, causal=True).sum().backward()
            torch.ops.torchweld.attention(q, k, v).sum().backward()

        step(512)
        before = peak()
        step(8192)
        print(peak() - before)
    """
    done = python("-c", textwrap.dedent(code), check=True)
    grown = float(done.stdout)
    assert grown < 64, f"the peak grew by {grown:.0f} MiB"


@given(
    seqlen_q=sizes(33),
    seqlen_k=sizes(65),
    head_dim=sizes(33, 1),
    head_dim_v=sizes(33),
    batch=st.integers(1, 3),
    heads=st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]),
    leftpad=st.one_of(st.none(), st.lists(st.integers(-4, 70), min_size=3, max_size=3)),
    causal=st.booleans(),
    scale=st.sampled_from([None, 0.25, -0.6]),
    layout=layouts(4),
    kind=kinds,
    dtype=dtype_names,
    seed=seeds,
)
def test_any_layout_and_pads(
    seqlen_q,
    seqlen_k,
    head_dim,
    head_dim_v,
    batch,
    heads,
    leftpad,
    causal,
    scale,
    layout,
    kind,
    dtype,
    seed,
):
    dtype = getattr(torch, dtype)
    kind = "integers" if kind == "huge" else kind  # the logits are a product of two
    query = values((batch, heads[0], seqlen_q, head_dim), kind, seed).to(dtype)
    key = values((batch, heads[1], seqlen_k, head_dim), kind, seed + 1).to(dtype)
    value = values((batch, heads[1], seqlen_k, head_dim_v), "normal", seed + 2).to(dtype)
    dout = values((batch, heads[0], seqlen_q, head_dim_v), "normal", seed + 3).to(dtype)
    args = [strided(t, layout) for t in (query, key, value)]
    if leftpad is not None:
        args.append(torch.tensor(leftpad[:batch], dtype=torch.int32))
    kwargs = {"causal": causal, "scale": scale}
    check_op(OP, args, kwargs, dout=strided(dout, layout), eager=False)
