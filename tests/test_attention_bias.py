"""A bias on the scores of attention: results, gradients, what a mask hides, layouts, refusals."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import attention_engines as engines
import reference as R
import torchweld
from choices_helpers import DEVICES, legal_engines
from numerics import assert_equal, assert_same_bits, check
from running import GRADIENTS, REFERENCES
from samples import BF16, F16, F32, F64, call, dtypes
from tensors import pads, permuted, randn
from test_attention_backward_sm90 import dout_of, each
from test_attention_dropout import seeded
from test_mask_numbers import compare, ints, moved, qkv

attention = torch.ops.torchweld.attention
attention_with_lse = torch.ops.torchweld.attention_with_lse
GIVEN = list(itertools.product((0, 1), repeat=3))  # which dims before the last a bias has


def bias_of(q: Tensor, k: Tensor, given=(1, 1, 1), scale: float = 1.0) -> Tensor:
    """A random bias, of size 1 in the dims that are not given."""
    sizes = [n if g else 1 for n, g in zip(q.shape[:3], given, strict=True)]
    return randn(q.device.type, q.dtype, *sizes, k.shape[2], scale=scale)


def mask_of(name: str, q: Tensor, k: Tensor) -> tuple[Tensor | None, dict]:
    """leftpad, and the other numbers of a mask of two sequences."""
    device, (batch, nheads, sq, _), sk = q.device.type, q.shape, k.shape[2]
    ends = torch.randint(1, sk + 1, (batch, sq), dtype=torch.int32)
    start = ((torch.arange(sq) + sk - sq) // 7 * 7).int().repeat(batch, 1)
    numbers = {
        "none": {}, "causal": {"causal": True}, "leftpad": {"causal": True},
        "documents": {"causal": True, "key_start": start},
        "key_end": {"key_end": ints(sk, sk // 2)},
        "row_ends": {"key_start": ends // 3, "key_end": ends},
        "window": {"window": 9, "causal": True}, "both sides": {"window": 5},
        "sink": {"sink": randn(device, q.dtype, nheads)},
        "dropout": {"causal": True, **seeded(device, 0.3)},
        "negative scale": {"scale": -0.7}, "scale of 0": {"scale": 0.0},
    }[name]  # fmt: skip
    return (pads(device, 0, sk // 3) if name == "leftpad" else None), moved(device, numbers)


HIDING = ["causal", "leftpad", "documents", "key_end", "row_ends", "window", "both sides"]
MASKS = [*HIDING, "none", "sink", "dropout", "negative scale", "scale of 0"]


@pytest.mark.parametrize("sq", [7, 40])
@pytest.mark.parametrize("i", range(len(MASKS)), ids=lambda i: MASKS[i])
def test_masks_and_broadcast_dims(device, i, sq):
    for j, dtype in enumerate(dtypes(device)):
        args = qkv(dtype, b=2, h=4, hkv=2, sq=sq, sk=75, d=6, dv=33, device=device)
        leftpad, numbers = mask_of(MASKS[i], *args[:2])
        for given in (GIVEN[(i + j) % 8], GIVEN[(i + j + 3) % 8]):
            compare("attention", args, leftpad, {**numbers, "bias": bias_of(*args[:2], given)})


SIZES = [
    # batch, nheads, nheads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v
    (1, 2, 2, 130, 257, 64, 64), (2, 2, 1, 65, 127, 128, 128), (1, 1, 1, 128, 128, 80, 80),
    (2, 4, 2, 7, 300, 64, 64), (2, 4, 1, 1, 515, 128, 128), (1, 2, 1, 8, 64, 96, 96),
    (2, 1, 1, 129, 63, 40, 64), (1, 2, 1, 70, 90, 192, 192), (1, 2, 2, 97, 200, 16, 16),
    (1, 2, 1, 100, 61, 72, 33),
]  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(device, sizes):
    for dtype, given, scale in zip(dtypes(device)[:3], GIVEN[::-3], (1, 1, 30), strict=True):
        args = qkv(dtype, *sizes, device)
        bias = bias_of(*args[:2], given, scale=scale)
        compare("attention", args, None, {"bias": bias, "causal": given[1] == 1})


@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (2, 0, 3, 4)], ids=str)
def test_sizes_of_0(device, sizes):
    batch, nheads, sq, sk = sizes
    args = qkv(F32, batch, nheads, nheads, sq, sk, device=device)
    for given in GIVEN:
        leaves = [t.requires_grad_() for t in (*args, bias_of(*args[:2], given))]
        out = attention(*leaves[:3], bias=leaves[3])
        assert_equal(out.detach(), args[0].new_zeros(batch, nheads, sq, 4))
        zeros = [torch.zeros_like(t) for t in leaves]
        assert_equal(torch.autograd.grad(out.sum(), leaves), zeros)


def test_head_dim_of_0(device):
    """The scores are the bias alone."""
    for dtype, sq in itertools.product(dtypes(device), (3, 40)):
        args = qkv(dtype, 2, 2, 2, sq, 50, 0, 16, device)
        compare("attention", args, None, {"bias": bias_of(*args[:2]), "scale": 1.0})


def compare_with_lse(args: list[Tensor], **tensors: Tensor) -> None:
    """Results and gradients, without eager torch beside them."""
    leaves = [t.clone().requires_grad_() for t in (*args, *tensors.values())]
    results = attention_with_lse(*leaves[:3], **dict(zip(tensors, leaves[3:], strict=True)))
    douts = [torch.randn_like(t) for t in results]
    bounds = REFERENCES["attention_forward"](*args, **tensors)
    bounds += GRADIENTS["attention"](douts[0], *args, dlse=douts[1], **tensors)
    grads = torch.autograd.grad(results, leaves, douts)
    for i, (got, bound) in enumerate(zip((*results, *grads), bounds, strict=True)):
        check(got, bound, label=f"bias and lse, {i}")


@pytest.mark.parametrize("given", GIVEN[1::2], ids=str)
def test_lse_and_its_gradient(device, given):
    for dtype in dtypes(device):
        args = qkv(dtype, 2, 4, 2, 40, 60, 16, 16, device)
        compare_with_lse(args, sink=randn(device, dtype, 4), bias=bias_of(*args[:2], given))


@pytest.mark.parametrize("sq", [3, 70])
@pytest.mark.parametrize("name", HIDING)
def test_hidden_values_are_not_used(device, name, sq):
    """They may be NaN, and have a gradient of 0."""
    for dtype in dtypes(device):
        args = qkv(dtype, 2, 4, 2, sq, 130, 16, 16, device)
        leftpad, numbers = mask_of(name, *args[:2])
        seen = R.visible(2, sq, 130, leftpad, **{"causal": False, **numbers})[:, None].to(device)
        bias, found = bias_of(*args[:2]), []
        for hole in (0.0, math.nan, math.inf):
            leaves = [t.detach().requires_grad_() for t in (*args, torch.where(seen, bias, hole))]
            out, lse = attention_with_lse(*leaves[:3], leftpad, bias=leaves[3], **numbers)
            grads = torch.autograd.grad((out, lse), leaves, (out.cos(), lse.cos().nan_to_num()))
            found.append([out.detach(), lse.detach(), *grads])
            assert grads[3].isfinite().all() and (grads[3][~seen.expand_as(bias)] == 0).all()
        for got in found[1:]:
            assert_same_bits(got, found[0])


@pytest.mark.parametrize("sq", [3, 70])
def test_minus_infinity_is_a_mask(device, sq):
    for dtype in dtypes(device):
        args = qkv(dtype, 2, 2, 2, sq, 90, 16, 16, device)
        seen = torch.rand(2, 1, sq, 90, device=device) < 0.5
        seen[..., 0] = True
        bias = torch.where(seen, 0.0, -math.inf).to(dtype)
        compare("attention", args, None, {"bias": bias})
        bias[1, :, 1] = -math.inf  # a row of NaN, as in torch
        compare_with_lse(args, bias=bias)
        sink = randn(device, dtype, 2)
        out, lse = attention_with_lse(*args, bias=bias, sink=sink)
        assert (out[1, :, 1] == 0).all() and not out.isnan().any()
        torch.testing.assert_close(lse[1, :, 1], sink.to(lse.dtype))


def test_layouts(device):
    """Expanded, permuted as T5's, with an offset, with rows that begin anywhere."""
    for dtype, sq in itertools.product(dtypes(device), (3, 40)):
        q, k, v = qkv(dtype, 2, 4, 2, sq, 75, 16, 16, device)
        table, wide = randn(device, dtype, sq, 75, 4), randn(device, dtype, 2, 4, sq + 2, 153)
        for bias in (
            table.permute(2, 0, 1)[None],
            table.permute(2, 0, 1)[None].expand(2, -1, -1, -1),
            wide[:1, :1, :1, 3:78].expand(2, 4, sq, -1),
            wide[:, :, 1:-1, 3:78],
            wide[:, :1, :1, 1:151:2],
            permuted(bias_of(q, k), [3, 0, 2, 1]),
        ):
            found = []
            for t in (bias, bias.contiguous()):
                leaves = [x.detach().requires_grad_() for x in (q, k, v, t)]
                out = attention(*leaves[:3], bias=leaves[3], causal=True)
                found.append([out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)])
            assert_same_bits(*found)


def test_gradients_that_are_not_wanted_and_runs_with_the_same_bits(device):
    for dtype, given in itertools.product(dtypes(device), GIVEN):
        q, k, v = (t.requires_grad_() for t in qkv(dtype, 2, 4, 2, 70, 150, 64, 64, device))
        bias = bias_of(q, k, given).requires_grad_()
        out, lse = torch.ops.torchweld.attention_forward(q, k, v, bias=bias)
        every = torch.autograd.grad(out.sum(), (q, k, v, bias), retain_graph=True)
        for _ in range(2 if device == "cpu" else 20):
            again = torch.autograd.grad(out.sum(), (q, k, v, bias), retain_graph=True)
            assert_same_bits(again, every)
        still = attention(q, k, v, bias=bias.detach())
        assert_same_bits(torch.autograd.grad(still.sum(), (q, k, v)), every[:3])
        alone = attention(q.detach(), k.detach(), v.detach(), bias=bias)
        assert_same_bits(torch.autograd.grad(alone.sum(), [bias]), every[3:])
        saved = [t.detach() for t in (torch.ones_like(out), q, k, v, out, lse)]
        *three, dsink, dbias = torch.ops.torchweld.attention_backward(
            *saved, bias=bias.detach(), bias_requires_grad=False
        )
        assert_same_bits(three, every[:3])
        assert dsink.shape == dbias.shape == (0,)


def test_a_sequence_alone_has_the_bits_of_the_batch(device):
    with torchweld.batch_invariant():
        for dtype, sq in itertools.product(dtypes(device)[:3], (1, 3, 70)):
            q, k, v = qkv(dtype, 3, 4, 2, sq, 130, 64, 64, device)
            bias = bias_of(q, k)
            out = attention(q, k, v, causal=True, bias=bias)
            for b in range(3):
                alone = [t[b : b + 1] for t in (q, k, v, bias)]
                assert_same_bits(attention(*alone[:3], causal=True, bias=alone[3])[0], out[b])


class Layer(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return torch.ops.torchweld.attention(q, k, v, causal=True, bias=bias)


def leaves_of(device: str, sq: int) -> list[Tensor]:
    args = qkv(F32, sq=sq, sk=sq, device=device)
    return [t.requires_grad_() for t in (*args, bias_of(*args[:2], (0, 1, 1)))]


def test_checkpoint_autocast_and_other_derivatives(device):
    leaves, layer = leaves_of(device, 20), Layer()
    grads = torch.autograd.grad(layer(*leaves).square().sum(), leaves, create_graph=True)
    out = checkpoint(layer, *leaves, use_reentrant=False)
    again = torch.autograd.grad(out.square().sum(), leaves)
    assert_same_bits(again, [t.detach() for t in grads])
    with pytest.raises(RuntimeError, match="torchweld::attention"):
        torch.autograd.grad(grads[3].sum(), leaves)
    half = [t.detach().to(BF16).requires_grad_() for t in leaves]
    with torch.autocast(device, BF16):
        out = layer(*leaves)
    want = layer(*half)
    assert_same_bits(out.detach(), want.detach())
    grads = [g.to(F32) for g in torch.autograd.grad(want.sum(), half)]
    assert_same_bits(torch.autograd.grad(out.sum(), leaves), grads)
    still = [t.detach() for t in leaves]
    with fwAD.dual_level(), pytest.raises(NotImplementedError, match="torchweld::attention: "):
        layer(*still[:3], fwAD.make_dual(still[3], torch.ones_like(still[3])))


def test_compiled_exported_and_scripted(device):
    leaves, layer, graphs = leaves_of(device, 20), Layer(), []
    still, want = tuple(t.detach() for t in leaves), layer(*leaves)
    for run in (torch.jit.script(layer), torch.export.export(layer, still).module()):
        assert_same_bits(run(*still), want.detach())
    aot = torch.compile(layer, backend="aot_eager", fullgraph=True)
    grads = torch.autograd.grad(aot(*leaves).sum(), leaves)
    assert_same_bits(grads, torch.autograd.grad(want.sum(), leaves))
    torch.library.opcheck(attention.default, tuple(leaves[:3]), {"bias": leaves[3]})
    dynamic = torch.compile(
        layer, fullgraph=True, dynamic=True, backend=lambda g, _: graphs.append(g) or g
    )
    for sq in (20, 33, 7):
        leaves = leaves_of(device, sq)
        assert_same_bits(dynamic(*leaves).detach(), layer(*leaves).detach())
    assert len(graphs) == 1


@pytest.mark.parametrize("given", [(0, 1, 1), (1, 0, 0), (1, 1, 1)], ids=str)
def test_torch_func(given):
    q, k, v = (randn("cpu", F64, 3, 2, 2, 5, 4) for _ in range(3))
    biases = torch.stack([bias_of(q[0], k[0], given) for _ in range(3)])

    def loss(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        out, lse = attention_with_lse(q, k, v, causal=True, bias=bias)
        return out.square().sum() + lse.sin().sum()

    every = (0, 1, 2, 3)
    for tensors in ((q, k, v, biases), (q, k, v, biases[0]), (q[0], k[0], v[0], biases)):
        dims = tuple(0 if t.dim() == 5 else None for t in tensors)
        values = torch.vmap(loss, dims)(*tensors)
        grads = torch.vmap(torch.func.grad(loss, every), dims)(*tensors)
        for i in range(3):
            leaves = [(t[i] if t.dim() == 5 else t).clone().requires_grad_() for t in tensors]
            want = loss(*leaves)
            torch.testing.assert_close(values[i], want)
            want = torch.autograd.grad(want, leaves)
            torch.testing.assert_close(tuple(g[i] for g in grads), want)


@pytest.mark.parametrize("device_facts", DEVICES, ids=str)
@pytest.mark.parametrize("family", ["attention", "attention_backward"])
def test_which_kernels_add_a_bias(family, device_facts):
    """Hopper's in 16 bits for head dims up to 128; else the general kernels."""
    for dim, math_of, rows in itertools.product((32, 64, 128, 192, 256), range(3), (1, 512)):
        for bits in itertools.product((0, 1), repeat=3):
            fields = dict(zip(("invariant", "causal", "dropout"), bits, strict=True), bias=1)
            fields |= dict(head_dim=dim, head_dim_v=dim, math=math_of, seqlen_q=rows)
            legal, chosen = legal_engines(family, device_facts, **fields)
            fast = device_facts["wgmma"] and device_facts["tma"] and math_of == 0 and dim <= 128
            engine = "sm90" if fast else "general"
            assert legal <= {engine, "general"} and chosen == engine, fields


HOPPER_MASKS = [
    {}, {"causal": True}, {"window": 70, "causal": True}, {"key_end": True}, {"leftpad": True},
    {"key_start": True, "causal": True}, {"sink": True, "dlse": True},
    {"dropout_p": 0.2, "dropout_seed": True},
]  # fmt: skip
HOPPER_SIZES = [
    ((3, 4, 2, 300, 300, 64, 64), F16, (0, 1, 1)), ((3, 2, 1, 130, 450, 128, 72), BF16, (1, 1, 1)),
    ((3, 2, 2, 65, 777, 40, 40), BF16, (0, 1, 0)), ((3, 8, 1, 200, 203, 128, 128), F16, (1, 0, 1)),
    ((3, 2, 2, 5, 300, 96, 96), BF16, (0, 0, 0)), ((3, 2, 2, 1100, 1100, 64, 64), BF16, (0, 1, 1)),
]  # fmt: skip


@engines.on_hopper
@pytest.mark.parametrize("numbers", HOPPER_MASKS, ids=str)
@pytest.mark.parametrize(("sizes", "dtype", "given"), HOPPER_SIZES, ids=str)
def test_every_configuration_on_hopper(sizes, dtype, given, numbers):
    q, k, v = engines.inputs(dtype, *sizes)
    data = {**engines.mask_data(*sizes[:2], *sizes[3:5]), **seeded("cuda", 0.2)}
    more = {name: data.get(name, value) for name, value in numbers.items()}
    args, dout = (q, k, v, more.pop("leftpad", None)), dout_of(q, v)
    more["bias"] = bias_of(q, k, given)
    forward = {name: value for name, value in more.items() if name != "dlse"}
    bounds, names = engines.attention_bounds(*args, **forward), []
    for name in engines.each_configuration("", *args, **forward):
        results = torch.ops.torchweld.attention_forward(*args, **forward)
        engines.check(name, results, bounds)
        names.append(name.split()[0])
    assert set(names) == {"sm90", "general"}
    bounds, names = GRADIENTS["attention"](dout, *args, **more), []
    for name, grads in each("", dout, *args, **more):
        engines.check(name, [g for g in grads if g.shape != (0,)], bounds)
        names.append(name.split()[0])
    assert set(names) == {"sm90", "general"}


SHAPE = "bias must be (1 or batch, 1 or nheads, 1 or seqlen_q, seqlen_k)"
SHAPES = [(7,), (5, 7), (2, 5, 7), (1, 1, 1, 1), (1, 1, 1, 6), (1, 1, 4, 7), (1, 3, 1, 7)]
SHAPES += [(3, 1, 1, 7), (0, 1, 1, 7), (1, 1, 1, 1, 7)]
REFUSED = [
    *[({"dtype": dtype}, "bias must be float32 like query, but got")
      for dtype in (BF16, F64, torch.bool)],
    ({"device": "meta"}, "bias must be on cpu like query, but got"),
    *[({"size": size}, SHAPE) for size in SHAPES],
    ({"softcap": 2.0}, "softcap must not be given with bias"),
]  # fmt: skip


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(("changes", "sentence"), REFUSED, ids=str)
def test_refusals(changes, sentence, recorded):
    args = [t.requires_grad_(recorded) for t in qkv(F32, sq=5, sk=7)]
    sample = {"size": (1, 1, 1, 7), **changes}
    given = {"softcap": sample.pop("softcap", None), "bias": torch.zeros(**sample)}
    forward = torch.ops.torchweld.attention_forward(*args)
    saved = [t.detach() for t in (forward[0], *args, *forward)]
    for op in ("attention", "attention_with_lse", "attention_forward", "attention_backward"):
        with pytest.raises(RuntimeError, match=re.escape(f"torchweld::{op}: {sentence}")):
            call(op)(*(saved if op == "attention_backward" else args), **given)
