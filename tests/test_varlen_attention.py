"""Packed sequences: key_start from cumulative lengths, and varlen_attention."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

import reference as R
import torchweld
from cuda_graphs import cuda_graph
from numerics import acc_dtype, assert_equal, assert_same_bits
from samples import BF16, F16, F32, F64, dtypes
from tensors import randn

# Two ways of one computation, whose sums are cut differently.
TOLERANCE = {
    F64: {"rtol": 1e-10, "atol": 1e-10},
    F32: {"rtol": 1e-4, "atol": 1e-4},
    F16: {"rtol": 1e-2, "atol": 1e-2},
    BF16: {"rtol": 5e-2, "atol": 5e-2},
}


def ints(*rows) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def best(device: str) -> torch.dtype:
    """The dtype with the most digits there."""
    return F64 if device == "cpu" else F32


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_starts_from_cumulative_lengths(device, dtype):
    """Documents of 3, 0, 1 and 2 tokens, then padding, which sees nothing."""
    ends = torch.tensor([0, 3, 3, 4, 6], dtype=dtype, device=device)
    starts = torchweld.key_start_from_cu_seqlens(ends, 8)
    assert_equal(starts.cpu(), ints([0, 0, 0, 3, 4, 4, 8, 8]))
    assert_equal(torchweld.key_start_from_cu_seqlens(ends, 6), starts[:, :6])
    assert_equal(torchweld.key_start_from_cu_seqlens(ends[:1], 2).cpu(), ints([2, 2]))
    assert torchweld.key_start_from_cu_seqlens(ends, 0).shape == (1, 0)
    strided = torch.stack([ends, ends + 1], 1)[:, 0]
    assert_equal(torchweld.key_start_from_cu_seqlens(strided, 8), starts)


def test_starts_from_cumulative_lengths_compile_once():
    compiles = CompileCounter()
    compiled = torch.compile(
        torchweld.key_start_from_cu_seqlens, backend=compiles, fullgraph=True, dynamic=False
    )
    for lengths in ([0, 4, 8], [0, 1, 8], [0, 0, 5]):
        ends = torch.tensor(lengths, dtype=torch.int32)
        assert_equal(compiled(ends, 8), torchweld.key_start_from_cu_seqlens(ends, 8))
    assert compiles.frame_count == 1


def test_a_graph_made_for_one_document_serves_others():
    """The number of documents is dynamic, though some sizes of one document would be 1."""
    compiles = CompileCounter()

    @torch.compile(backend=compiles, fullgraph=True)
    def run(q, k, v, ends_q, ends_k):
        return (
            torchweld.key_start_from_cu_seqlens(ends_q, 12),
            torchweld.varlen_attention(q, k, v, ends_q, ends_k),
        )

    q, k, v = packed("cpu", F32, 12, 12)
    for lengths in ([12], [3, 9], [2, 4, 6]):
        ends = offsets(lengths), offsets(lengths)
        for t in ends:
            torch._dynamo.mark_dynamic(t, 0)
        starts, out = run(q, k, v, *ends)
        assert_equal(starts, torchweld.key_start_from_cu_seqlens(ends[0], 12))
        assert_close(out, torchweld.varlen_attention(q, k, v, *ends))
    assert compiles.frame_count == 1


def test_refused_cumulative_lengths():
    for value, error, sentence in (
        ([0, 3], TypeError, "cu_seqlens must be a Tensor, but got list; use torch.tensor(cu_seq"),
        (
            torch.zeros(3),
            TypeError,
            "cu_seqlens must be int32, but got float32; use cu_seqlens.int",
        ),
        (ints([0, 3]), ValueError, "cu_seqlens must be (documents + 1,), 0 and then the end of"),
        (ints(0)[:0], ValueError, "cu_seqlens must be (documents + 1,), 0 and then the end of"),
    ):
        with pytest.raises(error, match=re.escape(f"key_start_from_cu_seqlens: {sentence}")):
            torchweld.key_start_from_cu_seqlens(value, 4)


def offsets(lengths: list[int], device: str = "cpu", dtype=torch.int32) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(dtype)


def packed(device, dtype, tokens_q, tokens_k, nheads=4, nheads_kv=2, dim=16, dim_v=8):
    shapes = ((tokens_q, nheads, dim), (tokens_k, nheads_kv, dim), (tokens_k, nheads_kv, dim_v))
    return [randn(device, dtype, *shape) for shape in shapes]


def one_by_one(q, k, v, lengths_q, lengths_k, **options) -> tuple[Tensor, Tensor]:
    """out (tokens_q, nheads, head_dim_v) and lse (nheads, tokens_q), each sequence on its own."""
    tokens = sum(lengths_q), sum(lengths_k)
    parts = zip(
        q[: tokens[0]].split(lengths_q),
        k[: tokens[1]].split(lengths_k),
        v[: tokens[1]].split(lengths_k),
        strict=True,
    )
    outs, lses = [], []
    for part in parts:
        out, lse = torchweld.attention_with_lse(*(t.transpose(0, 1)[None] for t in part), **options)
        outs.append(out[0].transpose(0, 1)), lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


# Lengths of the sequences of q and of k: one token, none, as many, fewer and more keys.
SELF = [1, 30, 0, 64, 5]
CROSS = [[1, 30, 0, 64, 5, 0, 7], [3, 30, 4, 20, 0, 0, 70]]
MASKS = [
    {},
    {"causal": True},
    {"causal": True, "window": 7},
    {"window": 7},
    {"window": 1, "softcap": 3.0},
    {"causal": True, "window": 2**40, "scale": 0.3},
    {"window": 2**40},
]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("kind", ["self", "equal", "cross"])
def test_sequences_are_calls_of_their_own(device, kind, mask):
    """Results, lse and gradients; the tokens behind the last sequence give 0."""
    lengths = CROSS if kind == "cross" else [SELF, SELF]
    tokens = [sum(part) for part in lengths]
    for dtype in dtypes(device):
        q, k, v = packed(device, dtype, tokens[0] + 9, tokens[1] + 5)
        if kind != "cross":
            k, v = (t[: tokens[1]] for t in (k, v))
            q = q[: tokens[0]]
        offsets_q = offsets(lengths[0], device)
        offsets_k = offsets_q if kind == "self" else offsets(lengths[1], device)
        sink = randn(device, acc_dtype(dtype), 4)
        leaves = [t.requires_grad_() for t in (q, k, v, sink)]
        out, lse = torchweld.varlen_attention(
            *leaves[:3], offsets_q, offsets_k, **mask, sink=sink, return_lse=True
        )
        assert out.shape == (q.shape[0], 4, 8) and lse.shape == (4, q.shape[0])
        want, want_lse = one_by_one(*leaves[:3], *lengths, **mask, sink=sink)
        tolerance = TOLERANCE[dtype]
        assert_close(out[: tokens[0]], want, **tolerance)
        assert_close(lse[:, : tokens[0]], want_lse)
        assert (out[tokens[0] :] == 0).all()
        dout, dlse = torch.randn_like(out), torch.randn_like(lse) * lse.isfinite()
        grads = torch.autograd.grad((out, lse), leaves, (dout, dlse))
        part = dout[: tokens[0]], dlse[:, : tokens[0]]
        wanted = list(torch.autograd.grad((want, want_lse), leaves, part))
        # The lse of a token that sees nothing is the sink.
        wanted[3] = wanted[3] + dlse[:, tokens[0] :].sum(1)
        assert_close(grads, wanted, **tolerance)


def test_against_the_formula(device):
    """Against float64 with the mask written out."""
    lengths_q, lengths_k = CROSS
    rows = torch.repeat_interleave(torch.arange(7), torch.tensor(lengths_q))
    keys = torch.repeat_interleave(torch.arange(7), torch.tensor(lengths_k))
    same = rows[:, None] == keys
    ends = [torch.tensor(part).cumsum(0) for part in (lengths_q, lengths_k)]
    position = torch.arange(len(rows)) - ends[0][rows] + ends[1][rows]
    distance = torch.arange(len(keys)) - position[:, None]
    for causal in (False, True):
        seen = same & (distance <= 0) & (distance > -9) if causal else same
        for dtype in dtypes(device):
            q, k, v = packed(device, dtype, len(rows), len(keys))
            out = torchweld.varlen_attention(
                q,
                k,
                v,
                offsets(lengths_q, device),
                offsets(lengths_k, device),
                causal=causal,
                window=9 if causal else None,
            )
            scores = torch.einsum("ihd,jhd->hij", R.up(q), R.up(k).repeat_interleave(2, 1)) / 4
            p = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
            want = torch.einsum("hij,jhd->ihd", p, R.up(v).repeat_interleave(2, 1))
            assert_close(R.up(out), want, **TOLERANCE[dtype])


@pytest.mark.parametrize("causal", [False, True])
def test_padding_may_be_nan(device, causal):
    """Tokens behind the last sequence are never used, and get gradients of 0."""
    lengths = offsets([40, 0, 30], device)
    q, k, v = packed(device, best(device), 90, 90)
    used = [t[:70].clone().requires_grad_() for t in (q, k, v)]
    want = torchweld.varlen_attention(*used, lengths, lengths, causal=causal)
    wanted = torch.autograd.grad(want, used, torch.ones_like(want))
    for t in (q, k, v):
        t[70:] = torch.nan
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = torchweld.varlen_attention(*leaves, lengths, lengths, causal=causal)
    assert_close(out[:70], want)
    assert (out[70:] == 0).all()
    dout = torch.ones_like(out)
    dout[70:] = torch.nan
    for got, expected in zip(torch.autograd.grad(out, leaves, dout), wanted, strict=True):
        assert_close(got[:70], expected)
        assert (got[70:] == 0).all()


@pytest.mark.parametrize("kind", ["self", "equal"])
@pytest.mark.parametrize("causal", [False, True])
def test_tokens_before_the_first_sequence(device, kind, causal):
    """They count to it, at positions before its first; a causal mask hides all keys there."""
    lengths = offsets([40, 30], device) + 5
    q, k, v = packed(device, best(device), 75, 75)
    lengths_k = lengths if kind == "self" else lengths.clone()
    out = torchweld.varlen_attention(q, k, v, lengths, lengths_k, causal=causal)
    tokens = [t[5:] for t in (q, k, v)]
    want = torchweld.varlen_attention(*tokens, lengths - 5, lengths - 5, causal=causal)
    assert_close(out[5:], want)
    first = [t.transpose(0, 1)[None] for t in (q[:5], k[5:45], v[5:45])]
    before = torch.zeros_like(out[:5]) if causal else torchweld.attention(*first)[0].transpose(0, 1)
    assert_close(out[:5], before)


def test_views_of_a_fused_projection(device):
    """q, k and v of one (tokens, 3, nheads, head_dim) tensor, and heads before tokens."""
    lengths = offsets([40, 30], device)
    qkv = randn(device, best(device), 70, 3, 4, 16)
    out = torchweld.varlen_attention(*qkv.unbind(1), lengths, lengths, causal=True)
    want = torchweld.varlen_attention(
        *(t.contiguous() for t in qkv.unbind(1)), lengths, lengths, causal=True
    )
    assert_same_bits(out, want)
    heads_first = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in qkv.unbind(1)]
    assert_same_bits(torchweld.varlen_attention(*heads_first, lengths, lengths, causal=True), want)


def test_no_sequences_and_no_tokens(device):
    none = offsets([], device)
    q, k, v = packed(device, F32, 3, 4)
    assert (torchweld.varlen_attention(q, k, v, none, none) == 0).all()
    empty = offsets([0, 0], device)
    q, k, v = (t.requires_grad_() for t in packed(device, F32, 0, 0))
    for causal in (False, True):
        out = torchweld.varlen_attention(q, k, v, empty, empty.clone(), causal=causal)
        assert out.shape == (0, 4, 8)
        out.sum().backward()
    assert q.grad.shape == q.shape


@pytest.mark.parametrize("causal", [False, True])
def test_symbolic_trace_keeps_the_call(causal):
    def run(q, k, v, lengths):
        options = {"causal": causal, "softcap": 5.0, "return_lse": True}
        out, lse = torchweld.varlen_attention(q, k, v, lengths, lengths, **options)
        return out, lse.exp()

    traced = torch.fx.symbolic_trace(run)
    for lengths in (offsets([7, 5]), offsets([2, 3, 4])):
        tensors = packed("cpu", F32, int(lengths[-1]), int(lengths[-1]))
        assert_same_bits(traced(*tensors, lengths), run(*tensors, lengths))


def test_float64_passes_gradcheck():
    q, k, v = (t.requires_grad_() for t in packed("cpu", F64, 5, 6, 2, 1, 3, 2))
    lengths = offsets([2, 3]), offsets([4, 2])
    torch.autograd.gradcheck(
        lambda *t: torchweld.varlen_attention(*t, *lengths, window=2, return_lse=True), (q, k, v)
    )


@pytest.mark.parametrize("same", [True, False])
def test_compiles_once_for_all_lengths(same):
    compiles = CompileCounter()

    @torch.compile(backend=compiles, fullgraph=True, dynamic=False)
    def run(q, k, v, lengths_q, lengths_k):
        out = torchweld.varlen_attention(q, k, v, lengths_q, lengths_k, 8, 8, causal=True)
        return out.square().sum()

    q, k, v = (t.requires_grad_() for t in packed("cpu", F32, 12, 12))
    for lengths in ([4, 8], [1, 11], [0, 5], [12, 0]):
        lengths_q = offsets(lengths)
        lengths_k = lengths_q if same else offsets(lengths[::-1])
        loss = run(q, k, v, lengths_q, lengths_k)
        eager = torchweld.varlen_attention(q, k, v, lengths_q, lengths_k, causal=True)
        assert_close(loss, eager.square().sum())
        grads = torch.autograd.grad(loss, (q, k, v))
        wanted = torch.autograd.grad(eager.square().sum(), (q, k, v))
        assert_close(grads, wanted)
    assert compiles.frame_count == 1


def test_dynamic_numbers_of_tokens_and_sequences_compile_once():
    compiles = CompileCounter()
    run = torch.compile(torchweld.varlen_attention, backend=compiles, fullgraph=True, dynamic=True)
    for lengths in ([4, 8], [3, 5, 9], [7, 2, 4, 6]):
        q, k, v = packed("cpu", F32, sum(lengths), sum(lengths))
        ends = offsets(lengths)
        got = run(q, k, v, ends, ends, causal=True)
        assert_close(got, torchweld.varlen_attention(q, k, v, ends, ends, causal=True))
    assert compiles.frame_count == 1


def test_meta_autocast_and_flops():
    q, k, v = packed("meta", BF16, 12, 20)
    lengths = torch.zeros(3, dtype=torch.int32, device="meta")
    out, lse = torchweld.varlen_attention(q, k, v, lengths, lengths.clone(), return_lse=True)
    assert (out.shape, out.dtype) == ((12, 4, 8), BF16)
    assert (lse.shape, lse.dtype) == ((4, 12), F32)
    q, k, v = packed("cpu", F32, 12, 20)
    ends = offsets([5, 7]), offsets([8, 12])
    with torch.autocast("cpu", BF16):
        assert torchweld.varlen_attention(q, k, v, *ends).dtype == BF16
    with FlopCounterMode(display=False) as counter:
        torchweld.varlen_attention(q, k, v, *ends)
    assert counter.get_total_flops() == 2 * 12 * 4 * 20 * (16 + 8)


@pytest.fixture
def mesh():
    import torch.distributed as dist
    from torch.distributed.tensor import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("causal", [False, True])
def test_heads_of_a_dtensor(mesh, causal):
    """Sharded heads, with cumulative lengths as a plain tensor and as a DTensor."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    plain = packed("cpu", F32, 12, 12)
    ends = offsets([5, 7])
    want = torchweld.varlen_attention(*plain, ends, ends, causal=causal)
    for lengths in (ends, distribute_tensor(ends, mesh, [Replicate()])):
        sharded = [distribute_tensor(t, mesh, [Shard(1)]).requires_grad_() for t in plain]
        out = torchweld.varlen_attention(*sharded, lengths, lengths, causal=causal)
        assert out.placements == (Shard(1),)
        assert_equal(out.full_tensor(), want)
        out.full_tensor().sum().backward()
        assert sharded[0].grad.placements == (Shard(1),)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("causal", [False, True])
def test_one_graph_serves_all_lengths(causal):
    """Forward and backward in a CUDA graph, replayed with other lengths: bit-equal to eager."""
    lengths = offsets([100, 200, 212], "cuda")
    q, k, v = (t.requires_grad_() for t in packed("cuda", BF16, 512, 512, 4, 2, 64, 64))
    dout = randn("cuda", BF16, 512, 4, 64)

    def run():
        out = torchweld.varlen_attention(q, k, v, lengths, lengths, causal=causal)
        return [out, *torch.autograd.grad(out, (q, k, v), dout)]

    graph, results = cuda_graph(run)
    for other in ([512, 0, 0], [1, 1, 400], [128, 256, 128]):
        lengths.copy_(offsets(other))
        graph.replay()
        assert_same_bits(results, run())


ENDS = offsets([3, 5])
NAMES = (
    "arguments must be q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, "
    "scale, window, softcap, sink, dropout_p, dropout_seed, return_lse, but got"
)
REFUSED = [
    (
        {"q": torch.zeros(2, 3, 4, 5)},
        "q must be (tokens_q, nheads, head_dim), but got (2, 3, 4, 5)",
    ),
    (
        {"k": torch.zeros(8, 3, 16)},
        "q, k and v must be (tokens, nheads, head_dim) with the heads of k a divisor of those of "
        "q, but got 4 heads of q and 3 of k; if the heads come before the tokens use "
        ".transpose(0, 1)",
    ),
    ({"k": torch.zeros(8, 2, 8)}, "k must have the head_dim of q, 16, but got (8, 2, 8)"),
    ({"v": torch.zeros(7, 2, 8)}, "v must be (8, 2, head_dim_v) like k, but got (7, 2, 8)"),
    ({"cu_seqlens_k": offsets([1])}, "cu_seqlens_k must be of the shape and dtype of cu_seqlens_q"),
    ({"cu_seqlens_q": torch.zeros(3)}, "cu_seqlens_q must be int32, but got float32"),
    (
        {"cu_seqlens_q": torch.zeros(3, dtype=torch.int32, device="meta")},
        "cu_seqlens_q must be on cpu like q, but got meta",
    ),
    ({"window": 0}, "window must be at least 1, but got 0; leave it out for no window"),
    ({"is_causal": True}, f"{NAMES} is_causal; use causal=, which is aligned at the bottom right"),
    ({"max_q": 8}, f"{NAMES} max_q; use max_seqlen_q="),
    ({"cu_seq_k": ENDS}, f"{NAMES} cu_seq_k; use cu_seqlens_k="),
    ({"window_size": (3, 0)}, f"{NAMES} window_size; use window=left + 1, or torchweld.compat"),
    ({"return_attn_probs": True}, f"{NAMES} return_attn_probs; use return_lse="),
    ({"dropout": 0.1}, f"{NAMES} dropout; use dropout_p="),
    (
        {"alibi_slopes": torch.zeros(4)},
        f"{NAMES} alibi_slopes; torchweld.attention has alibi_slopes=",
    ),
    ({"block_table": ENDS}, f"{NAMES} block_table; attention reads no paged cache, pass"),
    ({"deterministic": True}, f"{NAMES} deterministic; leave it out, gradients are always determ"),
    ({"cu_seqlens_q": [0, 3, 8]}, "cu_seqlens_q must be a Tensor, but got list"),
]


@pytest.mark.parametrize(("wrong", "sentence"), REFUSED, ids=lambda v: str(v)[:30])
def test_refusals(wrong, sentence):
    q, k, v = packed("cpu", F32, 8, 8)
    arguments = {"q": q, "k": k, "v": v, "cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS, **wrong}
    sentence = f"torchweld::varlen_attention: {sentence}"
    with pytest.raises((ValueError, TypeError), match=re.escape(sentence)):
        torchweld.varlen_attention(**arguments)
