"""rotary against float64 and against the functions of transformers, and its memory layouts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import reference as R
import torchweld
from numerics import assert_same_bits, check
from running import REFERENCES
from samples import BF16, F16, F32, F64, dtypes
from strategies import strided

OP = "rotary"
rotary = torchweld.rotary
rotary_backward = torch.ops.torchweld.rotary_backward

# Heads of q and k, head_dim, rotary_dim: whole 16-byte chunks, whole chunks of one dtype only, and
# none; one group of heads of a thread, several, and a partial one.
SIZES = [
    (4, 4, 128, 128), (5, 1, 64, 64), (2, 2, 256, 256), (9, 3, 96, 96), (2, 1, 80, 80),
    (3, 2, 6, 6), (33, 8, 2, 2), (4, 2, 80, 32), (4, 4, 64, 16), (2, 1, 128, 64), (3, 1, 24, 20),
    (2, 2, 13, 4), (1, 1, 40, 8),
]  # fmt: skip


def tables(device, dtype, *shape: int) -> list[Tensor]:
    """cos and sin whose halves differ."""
    return [torch.randn(shape, dtype=F64).to(dtype).to(device) for _ in range(2)]


def heads_of(device, dtype, batch, seqlen, *nheads: int, head_dim: int) -> list[Tensor]:
    """Transposed views of (batch, seqlen, nheads, head_dim), as a projection gives them."""
    made = [torch.randn(batch, seqlen, n, head_dim, dtype=F64) for n in nheads]
    return [t.to(dtype).to(device).transpose(1, 2) for t in made]


def check_call(q, k, cos, sin, *, eager=R.rotary, interleaved=False) -> None:
    """Both results and both gradients, inside their bounds and no worse than eager."""
    leaves, eager_leaves = ([t.detach().requires_grad_() for t in (q, k)] for _ in range(2))
    out = rotary(*leaves, cos, sin, interleaved=interleaved)
    theirs = [t.to(q.dtype) for t in eager(*eager_leaves, cos, sin, interleaved=interleaved)]
    douts = [torch.randn(t.shape, dtype=F64).to(t) for t in out]
    grads = torch.autograd.grad(out, leaves, douts)
    their_grads = torch.autograd.grad(theirs, eager_leaves, douts)
    bounds = REFERENCES["rotary"](q, k, cos, sin, interleaved=interleaved)
    bounds += REFERENCES["rotary_backward"](
        *douts, cos, sin, interleaved=interleaved, output_mask=[True, True]
    )
    results, yardsticks = (*out, *grads), (*theirs, *their_grads)
    for name, result, yardstick, bound in zip(
        ("q_out", "k_out", "dq", "dk"), results, yardsticks, bounds, strict=True
    ):
        check(result, bound, label=f"rotary {name}", eager=yardstick, device=q.device)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_against_float64(device, sizes, interleaved):
    nheads, nheads_k, head_dim, rotary_dim = sizes
    for dtype in dtypes(device):
        q, k = heads_of(device, dtype, 2, 7, nheads, nheads_k, head_dim=head_dim)
        for lead in ((), (1,), (2,)):
            cos, sin = tables(device, dtype, *lead, 7, rotary_dim)
            check_call(q, k, cos, sin, interleaved=interleaved)
            check_call(q.contiguous(), k, cos.float(), sin.float(), interleaved=interleaved)


@pytest.mark.parametrize("batch, seqlen", [(1, 1), (3, 1), (1, 2), (2, 300)])
def test_positions(device, batch, seqlen):
    for dtype in (F32, BF16):
        q, k = heads_of(device, dtype, batch, seqlen, 6, 2, head_dim=64)
        check_call(q, k, *tables(device, dtype, batch, seqlen, 64))


@pytest.mark.parametrize("batch, seqlen, nheads, nheads_k", [
    (0, 3, 2, 1), (2, 0, 2, 1), (2, 3, 0, 2), (2, 3, 2, 0), (2, 3, 0, 0),
])  # fmt: skip
def test_sizes_of_zero(device, batch, seqlen, nheads, nheads_k):
    q, k = heads_of(device, F32, batch, seqlen, nheads, nheads_k, head_dim=8)
    check_call(q, k, *tables(device, F32, 1, seqlen, 8))


# transformers


def angles(device, dtype, seqlen: int, rotary_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin (1, seqlen, rotary_dim) in the layout of Llama: the halves are equal."""
    inverse = 10000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=F64) / rotary_dim)
    angle = torch.arange(seqlen)[None, :, None] * inverse
    angle = torch.cat([angle, angle], -1)
    return angle.cos().to(dtype).to(device), angle.sin().to(dtype).to(device)


def of_model(name: str):
    pytest.importorskip("transformers")
    module = __import__(f"transformers.models.{name}.modeling_{name}", fromlist=["x"])
    function = module.apply_rotary_pos_emb
    return lambda q, k, cos, sin, interleaved: function(q, k, cos, sin)


def test_llama(device):
    eager = of_model("llama")
    for dtype in (F32, F16, BF16):
        q, k = heads_of(device, dtype, 2, 33, 8, 2, head_dim=64)
        check_call(q, k, *angles(device, dtype, 33, 64), eager=eager)


def test_phi(device):
    """The caller splits q and k, rotates the front of the heads and concatenates."""
    apply = of_model("phi")

    def eager(q, k, cos, sin, interleaved):
        size = cos.shape[-1]
        front = apply(q[..., :size], k[..., :size], cos, sin, interleaved)
        return [torch.cat([a, x[..., size:]], -1) for a, x in zip(front, (q, k), strict=True)]

    for dtype in (F32, F16, BF16):
        q, k = heads_of(device, dtype, 2, 33, 8, 8, head_dim=80)
        check_call(q, k, *angles(device, dtype, 33, 32), eager=eager)


@pytest.mark.parametrize("name", ["glm", "glm4"])
def test_glm(device, name):
    """The model's tables hold each angle in both halves; its function interleaves the first."""
    eager = of_model(name)
    for dtype in (F32, F16, BF16):
        q, k = heads_of(device, dtype, 2, 33, 4, 2, head_dim=128)
        cos, sin = angles(device, dtype, 33, 64)
        twice = [t[..., :32].repeat_interleave(2, -1) for t in (cos, sin)]

        def with_their_tables(q, k, *_, cos=cos, sin=sin, interleaved):
            return eager(q, k, cos, sin, interleaved)

        check_call(q, k, *twice, eager=with_their_tables, interleaved=True)


def test_cohere(device):
    eager = of_model("cohere")
    for dtype in (F32, F16, BF16):
        q, k = heads_of(device, dtype, 2, 33, 8, 2, head_dim=64)
        cos, sin = (t[..., :32].repeat_interleave(2, -1) for t in angles(device, dtype, 33, 64))
        check_call(q, k, cos, sin, eager=eager, interleaved=True)


def test_gptj(device):
    pytest.importorskip("transformers")
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb

    q, k = heads_of(device, F32, 2, 9, 4, 4, head_dim=32)
    cos, sin = (t[0, :, :16] for t in angles(device, F32, 9, 32))  # half as wide

    def eager(q, k, *_, interleaved):
        both = (apply_rotary_pos_emb(x.transpose(1, 2), sin[None], cos[None]) for x in (q, k))
        return [x.transpose(1, 2) for x in both]

    twice = [t.repeat_interleave(2, -1) for t in (cos, sin)]
    check_call(q, k, *twice, eager=eager, interleaved=True)


def test_rounds_once_from_float32_tables(device):
    """bfloat16 tables lose 16 bits of an angle; float32 tables give the nearest bfloat16."""
    q, k = heads_of(device, BF16, 1, 50, 4, 2, head_dim=64)
    cos, sin = angles(device, F32, 50, 64)
    for out, x in zip(rotary(q, k, cos, sin), (q, k), strict=True):
        exact = R.rotary(x.double(), x.double(), cos.double(), sin.double())[0]
        spacing = exact.abs().clamp(min=2.0**-20).log2().floor().exp2() * 2.0**-7
        # An fp32 error may cross a tie of two neighbours.
        assert ((out.double() - exact).abs() <= spacing * (0.5 + 2.0**-8)).all()


# Memory


def test_dense_inputs_keep_their_strides(device):
    shape = (2, 4, 5, 8)  # batch, nheads, seqlen, head_dim
    for order in ((0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (0, 2, 3, 1), (0, 1, 3, 2)):
        made = torch.randn([shape[d] for d in order], device=device)
        q = made.permute([order.index(d) for d in range(4)]).requires_grad_()
        k = q.detach()[:, :1].clone(memory_format=torch.contiguous_format)
        out, _ = rotary(q, k, *tables(device, F32, 5, 8))
        if order[-1] == 3:
            assert out.stride() == q.stride()
        else:  # head_dim is not innermost
            assert out.transpose(1, 2).is_contiguous()
        (dq,) = torch.autograd.grad(out, q, torch.empty_like(q).normal_())
        assert dq.transpose(1, 2).is_contiguous()  # as a projection's backward reads it


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_slices_of_a_packed_projection(device, dtype):
    batch, seqlen, nheads, nheads_k, head_dim = 2, 6, 4, 2, 32
    packed = torch.full((batch, seqlen, nheads + 2 * nheads_k, head_dim), torch.nan)
    packed = packed.to(dtype).to(device)
    parts = packed.split([nheads, nheads_k, nheads_k], 2)
    q, k = (part.normal_().transpose(1, 2) for part in parts[:2])
    cos, sin = tables(device, dtype, 1, seqlen, head_dim)
    out = rotary(q, k, cos, sin)
    for x, rotated in zip((q, k), out, strict=True):
        assert rotated.transpose(1, 2).is_contiguous() and rotated.shape == x.shape
    assert_same_bits(out, rotary(q.clone(), k.clone(), cos, sin))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_margins_are_not_read_or_written(device, offset, interleaved):
    """NaN lies around and between the rows of every tensor; aligned rows, then odd ones."""
    layout = ((0, 2, 1, 3), (1, 1, 2, 1), offset)
    for dtype in (F32, BF16):
        for head_dim, rotary_dim in ((64, 32), (13, 6)):
            q, k = heads_of(device, dtype, 2, 5, 6, 3, head_dim=head_dim)
            cos, sin = tables(device, dtype, 2, 5, rotary_dim)
            moved = [strided(t, layout) for t in (q, k)]
            moved += [strided(t, ((0, 1, 2), (1, 2, 1), offset)) for t in (cos, sin)]
            out = rotary(*moved, interleaved=interleaved)
            bounds = REFERENCES["rotary"](q, k, cos, sin, interleaved=interleaved)
            for result, bound in zip(out, bounds, strict=True):
                check(result, bound, label="rotary", device=device)


@pytest.mark.parametrize("head_dim, rotary_dim", [(64, 32), (72, 32), (13, 6), (40, 38)])
def test_the_rest_of_a_head_is_copied_bit_for_bit(device, head_dim, rotary_dim):
    for dtype in (F32, F16, BF16):
        q, k = heads_of(device, dtype, 1, 3, 5, 1, head_dim=head_dim)
        for x in (q, k):
            x[..., rotary_dim:] = torch.tensor(torch.nan)
            x[..., -1] = -0.0
            x[..., rotary_dim] = torch.inf
        for out, x in zip(rotary(q, k, *tables(device, dtype, 3, rotary_dim)), (q, k), strict=True):
            assert_same_bits(out[..., rotary_dim:], x[..., rotary_dim:])
            assert out[..., :rotary_dim].isfinite().all()


def test_expanded_tables(device):
    q, k = heads_of(device, F32, 3, 4, 2, 2, head_dim=16)
    cos, sin = tables(device, F32, 1, 4, 16)
    want = rotary(q, k, cos, sin)
    one_row = [t[:, :1].expand(1, 4, 16) for t in (cos, sin)]
    for given, expected in (
        ((cos[0], sin[0]), want),
        ((cos.expand(3, 4, 16), sin.expand(3, 4, 16)), want),
        (one_row, rotary(q, k, *[t.contiguous() for t in one_row])),
    ):
        assert_same_bits(rotary(q, k, *given), expected)


# Gradients


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradcheck_of_q_and_k(interleaved):
    q, k = heads_of("cpu", F64, 2, 3, 2, 1, head_dim=6)
    leaves = [t.requires_grad_() for t in (q.detach(), k.detach())]
    cos, sin = tables("cpu", F64, 2, 3, 4)
    assert torch.autograd.gradcheck(
        lambda q, k: rotary(q, k, cos, sin, interleaved=interleaved), leaves
    )


def test_q_alone_and_k_alone(device):
    q, k = heads_of(device, F32, 2, 3, 4, 2, head_dim=8)
    cos, sin = tables(device, F32, 3, 8)
    leaves = [t.detach().requires_grad_() for t in (q, k)]
    out = rotary(*leaves, cos, sin)
    full = torch.autograd.grad(out, leaves, [torch.ones_like(t) for t in out])
    for i, leaf in enumerate(leaves):
        given = [q, k]
        given[i] = leaf
        out = rotary(*given, cos, sin)
        assert [t.requires_grad for t in out] == [i == 0, i == 1]
        (grad,) = torch.autograd.grad(out[i], leaf, torch.ones_like(out[i]))
        assert_same_bits(grad, full[i])


def test_one_result_alone_is_used(device):
    """The gradient of the input of the other result is none, not zeros."""
    q, k = (t.requires_grad_() for t in heads_of(device, F32, 2, 3, 4, 2, head_dim=8))
    q_out, k_out = rotary(q, k, *tables(device, F32, 3, 8))
    for used, leaf, other in ((q_out, q, k), (k_out, k, q)):
        grads = torch.autograd.grad(used.sum(), [leaf, other], retain_graph=True, allow_unused=True)
        assert grads[0].shape == leaf.shape and grads[1] is None


def test_backward_op_computes_what_the_mask_asks_for(device):
    q, k = heads_of(device, F32, 2, 3, 4, 2, head_dim=8)
    cos, sin = tables(device, F32, 3, 8)
    full = rotary_backward(q, k, cos, sin, output_mask=[True, True])
    for mask in ([True, False], [False, True], [False, False]):
        grads = rotary_backward(q, k, cos, sin, output_mask=mask)
        for grad, wanted, ref in zip(grads, mask, full, strict=True):
            assert_same_bits(grad, ref if wanted else grad.new_empty(0))


def test_func_grad_of_one_result(device):
    q, k = heads_of(device, F32, 2, 3, 4, 2, head_dim=8)
    cos, sin = tables(device, F32, 3, 8)
    ones = [torch.ones_like(t) for t in (q, k)]
    full = rotary_backward(*ones, cos, sin, output_mask=[True, True])
    for i in range(2):
        grad = torch.func.grad(lambda *x, i=i: rotary(*x, cos, sin)[i].sum(), argnums=i)(q, k)
        torch.testing.assert_close(grad, full[i])


# Calls of Hugging Face models


def test_autocast_takes_float32_tables(device):
    """The projections are cast to bfloat16, the tables stay in the dtype of the hidden states."""
    q, k = heads_of(device, BF16, 1, 4, 2, 1, head_dim=16)
    cos, sin = angles(device, F32, 4, 16)
    want = rotary(q, k, cos, sin)
    with torch.autocast(device, dtype=BF16):
        got = rotary(q, k, cos, sin)
    for out, ref in zip(got, want, strict=True):
        assert out.dtype == BF16
        assert_same_bits(out, ref)


def test_tables_of_rank_4_and_unsqueeze_dim_are_explained():
    q, k = heads_of("cpu", F32, 2, 3, 4, 2, head_dim=8)
    cos, sin = tables("cpu", F32, 2, 3, 8)
    with pytest.raises(RuntimeError, match=r"cos must be \(seqlen, .*; use cos.squeeze\(1\)"):
        rotary(q, k, cos[:, None], sin[:, None])
    with pytest.raises(TypeError, match="got unsqueeze_dim; leave it out"):
        rotary(q, k, cos, sin, unsqueeze_dim=1)
