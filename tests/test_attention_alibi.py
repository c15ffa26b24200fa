"""ALiBi in attention: results, gradients, positions under masks, layouts, engines, refusals."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor

import attention_engines as engines
import reference as R
import torchweld
from choices_helpers import DEVICES, legal_engines
from numerics import assert_same_bits, check
from running import GRADIENTS, REFERENCES
from samples import BF16, F16, F32, F64, dtypes
from tensors import randn
from test_attention_backward_sm90 import dout_of, each
from test_attention_bias import mask_of
from test_mask_numbers import compare, ints, qkv

attention = torch.ops.torchweld.attention
attention_with_lse = torch.ops.torchweld.attention_with_lse


def slopes_of(nheads: int, device: str, dtype: torch.dtype = F32) -> Tensor:
    """One per head, from steep to flat; the second one is 0."""
    slopes = 1.3 * 2.0 ** -torch.arange(nheads, dtype=F64)
    slopes[1:2] = 0
    return slopes.to(device, F64 if dtype == F64 else F32)


MASKS = ["none", "causal", "leftpad", "documents", "key_end", "window", "both sides", "sink"]
MASKS += ["negative scale", "scale of 0"]


@pytest.mark.parametrize("sq", [1, 7, 40, 90])
@pytest.mark.parametrize("name", MASKS)
def test_masks(device, name, sq):
    """With 90 rows and 75 keys the first positions are negative."""
    for dtype in dtypes(device):
        args = qkv(dtype, b=2, h=4, hkv=2, sq=sq, sk=75, d=6, dv=33, device=device)
        leftpad, numbers = mask_of(name, *args[:2])
        compare(
            "attention", args, leftpad, {**numbers, "alibi_slopes": slopes_of(4, device, dtype)}
        )


SIZES = [
    # batch, nheads, nheads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v
    (1, 2, 2, 130, 257, 64, 64), (2, 2, 1, 65, 127, 128, 128), (1, 1, 1, 128, 128, 80, 80),
    (2, 4, 2, 7, 300, 64, 64), (2, 4, 1, 1, 515, 128, 128), (1, 2, 1, 8, 64, 96, 96),
    (2, 1, 1, 129, 63, 40, 64), (1, 2, 1, 70, 90, 192, 192), (1, 32, 2, 1, 1030, 64, 64),
    (1, 2, 1, 100, 61, 72, 33), (1, 2, 2, 400, 400, 64, 64), (2, 20, 1, 2, 77, 128, 128),
]  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(device, sizes):
    for causal, dtype in itertools.product((False, True), dtypes(device)[:3]):
        args = qkv(dtype, *sizes, device)
        slopes = slopes_of(sizes[1], device, dtype)
        compare("attention", args, None, {"alibi_slopes": slopes, "causal": causal})


@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (2, 0, 3, 4)], ids=str)
def test_sizes_of_0(device, sizes):
    batch, nheads, sq, sk = sizes
    leaves = [t.requires_grad_() for t in qkv(F32, batch, nheads, nheads, sq, sk, device=device)]
    out = attention(*leaves, alibi_slopes=slopes_of(nheads, device))
    assert out.shape == (batch, nheads, sq, 4) and (out == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), leaves))


def test_it_is_a_bias():
    """The distances times the slopes; a slope below 0 counts as 0; rows far from their keys."""
    args = qkv(F64, 2, 4, 2, 40, 60, 16, 16, "cpu")
    slopes, lengths = torch.tensor([0.5, -3.0, 0.01, 2.0], dtype=F64), ints(60, 25)
    for causal, (rows, ends) in itertools.product((False, True), ((40, lengths), (3, None))):
        given = [args[0][:, :, -rows:], *args[1:]]
        bias = R.alibi(slopes.clamp(min=0), R.positions(2, rows, 60, ends), 60)
        options = {"causal": causal, "key_end": ends}
        leaves = [t.detach().requires_grad_() for t in given]
        results = []
        for more in ({"alibi_slopes": slopes}, {"bias": bias}):
            out, lse = attention_with_lse(*leaves, **options, **more)
            grads = torch.autograd.grad((out.sin().sum(), lse.sin().sum()), leaves)
            results.append([out.detach(), lse.detach(), *grads])
        torch.testing.assert_close(*results)


def test_negative_slopes_and_slopes_of_0(device):
    for dtype, sq in itertools.product(dtypes(device), (1, 5, 70)):
        args = qkv(dtype, 2, 2, 2, sq, 130, 64, 64, device)
        below = attention(*args, alibi_slopes=torch.tensor([0.5, -2.0], device=device))
        zero = attention(*args, alibi_slopes=torch.tensor([0.5, 0.0], device=device))
        assert_same_bits(below, zero)
        tolerance = {"rtol": 0.02, "atol": 0.02} if dtype in (BF16, F16) else {}
        torch.testing.assert_close(zero[:, 1], attention(*args)[:, 1], **tolerance)


def test_lse_and_its_gradient(device):
    for dtype, sq in itertools.product(dtypes(device), (3, 40)):
        args = qkv(dtype, 2, 4, 2, sq, 60, 16, 16, device)
        slopes = slopes_of(4, device, dtype)
        leaves = [t.clone().requires_grad_() for t in args]
        results = attention_with_lse(*leaves, alibi_slopes=slopes, causal=True)
        douts = [torch.randn_like(t) for t in results]
        options = {"causal": True, "alibi_slopes": slopes}
        bounds = REFERENCES["attention_forward"](*args, **options)
        bounds += GRADIENTS["attention"](douts[0], *args, dlse=douts[1], **options)
        grads = torch.autograd.grad(results, leaves, douts)
        for i, (got, bound) in enumerate(zip((*results, *grads), bounds, strict=True)):
            check(got, bound, label=f"ALiBi and lse, {i}")


@pytest.mark.parametrize("sq", [3, 70])
@pytest.mark.parametrize("name", ["causal", "leftpad", "key_end"])
def test_hidden_keys_are_not_used(device, name, sq):
    for dtype in dtypes(device):
        q, k, v = qkv(dtype, 2, 4, 2, sq, 130, 16, 16, device)
        leftpad, numbers = mask_of(name, q, k)
        seen = R.visible(2, sq, 130, leftpad, **{"causal": False, **numbers}).any(1).to(device)
        found = []
        for hole in (0.0, math.nan):
            keys = [torch.where(seen[:, None, :, None], t, hole) for t in (k, v)]
            leaves = [t.detach().requires_grad_() for t in (q, *keys)]
            out = attention(*leaves, leftpad, alibi_slopes=slopes_of(4, device, dtype), **numbers)
            found.append([out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)])
        assert_same_bits(*found)


def test_layouts_and_dtypes_of_the_slopes(device):
    for dtype in dtypes(device):
        args = qkv(dtype, 2, 4, 2, 40, 75, 16, 16, device)
        slopes = slopes_of(4, device, dtype).to(dtype)
        want = attention(*args, alibi_slopes=slopes)
        wide = torch.full((9, 2), 7.0, device=device, dtype=dtype)
        wide[1:9:2, 1] = slopes
        assert_same_bits(attention(*args, alibi_slopes=wide[1:9:2, 1]), want)
        exact = slopes if dtype == F64 else slopes.float()
        assert_same_bits(attention(*args, alibi_slopes=exact), want)
        same = attention(*args, alibi_slopes=slopes[:1].expand(4))
        assert_same_bits(same, attention(*args, alibi_slopes=slopes[:1].repeat(4)))


def test_a_sequence_alone_has_the_bits_of_the_batch(device):
    slopes = slopes_of(4, device)
    with torchweld.batch_invariant():
        for dtype, sq in itertools.product(dtypes(device)[:3], (1, 3, 70)):
            q, k, v = qkv(dtype, 3, 4, 2, sq, 130, 64, 64, device)
            out = attention(q, k, v, causal=True, alibi_slopes=slopes)
            for b in range(3):
                alone = [t[b : b + 1] for t in (q, k, v)]
                assert_same_bits(attention(*alone, causal=True, alibi_slopes=slopes)[0], out[b])


class Layer(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        return torch.ops.torchweld.attention(q, k, v, causal=True, alibi_slopes=slopes)


def test_compiled_exported_scripted_and_autocast(device):
    layer, slopes = Layer(), slopes_of(2, device)
    leaves = [t.requires_grad_() for t in qkv(F32, sq=20, sk=20, device=device)]
    still, want = (*(t.detach() for t in leaves), slopes), layer(*leaves, slopes)
    for run in (torch.jit.script(layer), torch.export.export(layer, still).module()):
        assert_same_bits(run(*still), want.detach())
    aot = torch.compile(layer, backend="aot_eager", fullgraph=True)
    grads = torch.autograd.grad(aot(*leaves, slopes).sum(), leaves)
    assert_same_bits(grads, torch.autograd.grad(want.sum(), leaves))
    torch.library.opcheck(attention.default, tuple(leaves), {"alibi_slopes": slopes})
    with torch.autocast(device, BF16):
        out = layer(*still)
    assert_same_bits(out, layer(*(t.to(BF16) for t in still)))
    with fwAD.dual_level(), pytest.raises(NotImplementedError, match="torchweld::attention: "):
        layer(fwAD.make_dual(still[0], still[0]), *still[1:])


def test_torch_func():
    q, k, v = (randn("cpu", F64, 3, 2, 2, 5, 4) for _ in range(3))
    slopes = torch.rand(3, 2, dtype=F64)

    def loss(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        out, lse = attention_with_lse(q, k, v, causal=True, alibi_slopes=slopes)
        return out.square().sum() + lse.sin().sum()

    for tensors in ((q, k, v, slopes), (q, k, v, slopes[0]), (q[0], k[0], v[0], slopes)):
        dims = tuple(0 if t.dim() in (2, 5) else None for t in tensors)
        values = torch.vmap(loss, dims)(*tensors)
        grads = torch.vmap(torch.func.grad(loss, (0, 1, 2)), dims)(*tensors)
        for i in range(3):
            *given, of_call = (t if d is None else t[i] for t, d in zip(tensors, dims, strict=True))
            leaves = [t.clone().requires_grad_() for t in given]
            want = loss(*leaves, of_call)
            torch.testing.assert_close(values[i], want)
            want = torch.autograd.grad(want, leaves)
            torch.testing.assert_close(tuple(g[i] for g in grads), want)


@pytest.mark.parametrize("device_facts", DEVICES, ids=str)
@pytest.mark.parametrize("family", ["attention", "attention_backward"])
def test_which_kernels_have_alibi(family, device_facts):
    """Hopper's in 16 bits for head dims up to 128, those for few rows; else the general ones."""
    hopper = device_facts["wgmma"] and device_facts["tma"]
    for dim, math_of, rows in itertools.product((64, 80, 96, 128, 192, 512), range(3), (1, 512)):
        for invariant, causal in itertools.product((0, 1), repeat=2):
            fields = dict(head_dim=dim, head_dim_v=dim, math=math_of, seqlen_q=rows, alibi=1)
            fields |= dict(invariant=invariant, causal=causal)
            legal, chosen = legal_engines(family, device_facts, **fields)
            engine = "general"
            if hopper and math_of == 0 and dim <= 128:
                engine = "sm90"
            few = rows == 1 and dim <= 256 and not invariant
            if family == "attention" and few and math_of == 0:
                engine = "decode"
            assert legal <= {"decode", "sm90", "general"} and chosen == engine, fields


HOPPER_MASKS = [
    {}, {"causal": True}, {"window": 70, "causal": True}, {"window": 50}, {"key_end": True},
    {"leftpad": True}, {"key_start": True, "causal": True}, {"sink": True, "dlse": True},
    {"scale": -0.2},
]  # fmt: skip
HOPPER_SIZES = [
    ((3, 4, 2, 300, 300, 64, 64), F16), ((3, 2, 1, 130, 450, 128, 72), BF16),
    ((3, 2, 2, 65, 777, 40, 40), BF16), ((3, 8, 1, 200, 203, 128, 128), F16),
    ((3, 2, 2, 5, 300, 96, 96), BF16), ((3, 2, 2, 1100, 1100, 64, 64), BF16),
    ((3, 32, 4, 1, 700, 64, 64), BF16), ((3, 4, 4, 250, 190, 80, 80), F16),
]  # fmt: skip


@engines.on_hopper
@pytest.mark.parametrize("numbers", HOPPER_MASKS, ids=str)
@pytest.mark.parametrize(("sizes", "dtype"), HOPPER_SIZES, ids=str)
def test_every_configuration_on_hopper(sizes, dtype, numbers):
    q, k, v = engines.inputs(dtype, *sizes)
    data = engines.mask_data(*sizes[:2], *sizes[3:5])
    more = {name: data.get(name, value) for name, value in numbers.items()}
    args, dout = (q, k, v, more.pop("leftpad", None)), dout_of(q, v)
    more["alibi_slopes"] = slopes_of(sizes[1], "cuda")
    forward = {name: value for name, value in more.items() if name != "dlse"}
    bounds, names = engines.attention_bounds(*args, **forward), set()
    for name in engines.each_configuration("", *args, **forward):
        results = torch.ops.torchweld.attention_forward(*args, **forward)
        engines.check(name, results, bounds)
        names.add(name.split()[0])
    assert names == {"sm90", "general"} | ({"decode"} if sizes[3] <= 16 else set())
    bounds, names = GRADIENTS["attention"](dout, *args, **more), set()
    for name, grads in each("", dout, *args, **more):
        engines.check(name, [g for g in grads if g.shape != (0,)], bounds)
        names.add(name.split()[0])
    assert names == {"sm90", "general"}


GIVEN_BOTH = "alibi_slopes must not be given with "
REFUSED = [
    ({"dtype": F16}, {}, "alibi_slopes must be float32, or float32 like query, but got"),
    ({"dtype": torch.int32}, {}, "alibi_slopes must be float32, or float32 like query, but got"),
    ({"device": "meta"}, {}, "alibi_slopes must be on cpu like query, but got"),
    *[({"size": size}, {}, "alibi_slopes must be (nheads,)") for size in [(), (3,), (1,), (2, 4)]],
    ({"requires_grad": True}, {}, "alibi_slopes must not require gradients"),
    ({}, {"softcap": 2.0}, GIVEN_BOTH + "softcap, but got both"),
    ({}, {"bias": torch.zeros(1, 1, 1, 7)}, GIVEN_BOTH + "bias, but got both"),
    ({}, {"dropout_p": 0.1, "dropout_seed": torch.zeros(1, dtype=torch.int64)},
     GIVEN_BOTH + "dropout_p, but got both"),
    ({}, {"key_end": torch.ones(2, 5, dtype=torch.int32)}, GIVEN_BOTH + "a key_end per row"),
]  # fmt: skip


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(("changes", "more", "sentence"), REFUSED, ids=str)
def test_refusals(changes, more, sentence, recorded):
    args = [t.requires_grad_(recorded) for t in qkv(F32, b=2, h=4, hkv=2, sq=5, sk=7)]
    slopes = torch.ones(**{"size": (4,), **changes})
    for op in (attention, attention_with_lse):
        with pytest.raises(RuntimeError, match=re.escape(sentence)):
            op(*args, alibi_slopes=slopes, **more)


def test_slopes_that_require_gradients_without_autograd():
    """Slopes that are a parameter serve where nothing is recorded."""
    args = qkv(F32, b=2, h=4, hkv=2, sq=5, sk=7)
    slopes = torch.nn.Parameter(slopes_of(4, "cpu"))
    with torch.no_grad():
        out = attention(*args, alibi_slopes=slopes)
    assert_same_bits(out, attention(*args, alibi_slopes=slopes.detach()))
