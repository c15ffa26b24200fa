"""rms_norm_linears and layer_norm_linears: several linear layers of one normalised row."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import vjp, vmap
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

import torchweld
from cuda_graphs import cuda_graph
from numerics import assert_same_bits, assert_same_kind, check
from running import GRADIENTS, REFERENCES
from samples import BF16, F16, F32, call, dtypes, requiring
from tensors import permuted, randn

OP = "rms_norm_linears"
OPS = (OP, "layer_norm_linears")
VECTORS = {"rms_norm_linears": 1, "layer_norm_linears": 2}
each_op = pytest.mark.parametrize("op", OPS)

# Leading dims, N of each weight, K, whether there are biases and the norm's vectors, options.
CASES = {
    "plain": ((3,), (4, 2, 2), 5, True, True, {}),
    "bare": ((2, 2), (3, 5), 4, False, False, {}),
    "one": ((4,), (6,), 8, True, True, {"eps": 0.1}),
    "vector": ((), (3, 2, 4, 1), 6, False, True, {}),
    "empty": ((0, 2), (3, 2), 4, True, True, {}),
    "no_columns": ((3,), (2, 0, 3), 4, True, True, {}),
    "k_blocks": ((70,), (128, 64, 64), 72, True, True, {}),
    "few_rows": ((5,), (64, 128), 128, False, True, {}),
    "long": ((130,), (256, 64, 64), 264, False, True, {}),
}
each_case = pytest.mark.parametrize("case", CASES)


def single(op: str) -> str:
    return op.removesuffix("s")


def made(op: str, case: str, device: str, dtype=F32):
    """x, weights, biases, the norm's vectors and the options of a call."""
    lead, sizes, k, biased, affine, options = CASES[case]
    torch.manual_seed(0)
    weights = [randn(device, dtype, n, k, scale=k**-0.5) for n in sizes]
    biases = [randn(device, dtype, n) for n in sizes] if biased else []
    vectors = [
        randn(device, dtype, k, scale=0.2, mean=1.0 - i) if affine else None
        for i in range(VECTORS[op])
    ]
    return randn(device, dtype, *lead, k), weights, biases, vectors, dict(options)


def whole(tensors: list[Tensor]) -> Tensor | None:
    return torch.cat(tensors) if tensors else None


def backward(op: str, dys, x, weights, vectors, options, mask):
    """dx, dweights, dbiases and the vectors' gradients, from the statistics of <op>_forward."""
    statistics = call(op + "_forward")(x, weights, [], *vectors, **options)[len(weights) :]
    kept = {name: value for name, value in options.items() if name != "eps"}
    grads = call(op + "_backward")(dys, x, weights, *vectors, *statistics, mask, **kept)
    first, last = 1 + len(weights), 1 + 2 * len(weights)
    return [grads[0], grads[1:first], grads[first:last], *grads[last:]]


def recorded(op: str, x, weights, biases, vectors, options):
    """Results and gradients of a call that autograd records, for gradients of 1."""
    given = [x, *weights, *biases, *vectors]
    leaves = requiring(op, given, range(len(given)))
    count, used = len(weights), [t for t in leaves if t is not None]
    x, weights, leaves = leaves[0], leaves[1 : 1 + count], leaves[1 + count :]
    biases, vectors = leaves[: len(biases)], leaves[len(biases) :]
    ys = call(op)(x, weights, biases, *vectors, **options)
    return ys, torch.autograd.grad(ys, used, [torch.ones_like(y) for y in ys])


def check_call(op: str, x, weights, biases, vectors, options) -> None:
    """Results and gradients beside those of one weight with all rows, in float64."""
    ys = call(op)(x, weights, biases, *vectors, **options)
    one = [x, torch.cat(weights), whole(biases), *vectors]
    bound = REFERENCES[single(op)](*one, **options)[0]
    check(torch.cat(ys, -1), bound, label=op, device=x.device.type)
    forward = call(op + "_forward")(x, weights, biases, *vectors, **options)[: len(weights)]
    for y, other, weight in zip(ys, forward, weights, strict=True):
        assert_same_kind(y, (*x.shape[:-1], weight.shape[0]), x.dtype, op)
        assert_same_bits(y, other, op)
    dys = [randn(x.device.type, x.dtype, *y.shape) for y in ys]
    mask = [True] * (3 + len(vectors))
    dx, dweights, dbiases, *dvectors = backward(op, dys, x, weights, vectors, options, mask)
    bounds = GRADIENTS[single(op)](torch.cat(dys, -1), *one, **options)
    grads = [dx, torch.cat(dweights), torch.cat(dbiases), *dvectors]
    for i, (grad, expected) in enumerate(zip(grads, bounds, strict=False)):
        given = i < 3 or vectors[i - 3] is not None
        if not given:
            assert grad.shape == (0,)
        elif expected is not None:
            check(grad, expected, label=f"{op} gradient {i}", device=x.device.type)


@each_op
@each_case
def test_against_one_weight_in_float64(op, case, device):
    for dtype in dtypes(device):
        check_call(op, *made(op, case, device, dtype))


def test_a_weight_offset(device):
    """Gemma's scale 1 + weight, of rows that a matmul normalises on a GPU and of more rows."""
    for rows in (3, 40):
        for dtype in dtypes(device):
            x, weights, biases, _, _ = made(OP, "k_blocks", device, dtype)
            vectors = [randn(device, dtype, x.shape[-1], scale=0.2)]
            check_call(OP, x[:rows], weights, biases, vectors, {"weight_offset": 1.0})
    with pytest.raises(RuntimeError, match="weight_offset must be 0 without a norm_weight"):
        torchweld.rms_norm_linears(x, weights, [], weight_offset=1)


@each_op
@each_case
def test_a_result_has_the_bits_of_a_single_call(op, case, device):
    for dtype in dtypes(device):
        x, weights, biases, vectors, options = made(op, case, device, dtype)
        ys = call(op)(x, weights, biases, *vectors, **options)
        for y, weight, bias in zip(ys, weights, biases or [None] * len(ys), strict=True):
            one = call(single(op))(x, weight, bias, *vectors, **options)
            assert_same_bits(y, one, case)


@each_op
def test_strides_and_offsets_do_not_matter(op, device):
    for dtype in (F32, BF16):
        x, weights, biases, vectors, options = made(op, "long", device, dtype)
        wide = torch.full((x.shape[0], x.shape[1] + 9), float("nan"), dtype=dtype, device=device)
        stepped = wide[:, 9:].copy_(x)
        swapped = [weights[0].t().contiguous().t(), weights[1], permuted(weights[2], (1, 0))]
        check_call(op, stepped, swapped, biases, vectors, options)
        # Gradients as views of one matrix, of an odd address and expanded.
        ys = call(op)(x, weights, biases, *vectors, **options)
        dys = [torch.randn_like(y) for y in ys]
        mask = [True] * (3 + len(vectors))
        plain = backward(op, dys, x, weights, vectors, options, mask)
        views = list(torch.cat(dys, -1).split([y.shape[-1] for y in ys], -1))
        odd = [torch.cat([d.new_zeros(1), d.flatten()])[1:].view(d.shape) for d in dys]
        for moved in (views, odd):
            got = backward(op, moved, x, weights, vectors, options, mask)
            assert_close(got[0], plain[0], rtol=2e-2, atol=2e-2)
            assert_close([*got[1], *got[2]], [*plain[1], *plain[2]], rtol=2e-2, atol=2e-2)
        ones = [torch.ones((), dtype=dtype, device=device).expand(y.shape) for y in ys]
        got = backward(op, ones, x, weights, vectors, options, mask)
        same = backward(op, [t.contiguous() for t in ones], x, weights, vectors, options, mask)
        assert_same_bits(got[0], same[0], op)


@each_op
def test_only_what_is_asked_for(op, device):
    x, weights, biases, vectors, options = made(op, "k_blocks", device)
    dys = [torch.randn_like(y) for y in call(op)(x, weights, biases, *vectors, **options)]
    full = [True] * (3 + len(vectors))
    every = backward(op, dys, x, weights, vectors, options, full)
    for at in range(len(full)):
        mask = [i == at for i in range(len(full))]
        some = backward(op, dys, x, weights, vectors, options, mask)
        for i, (got, ref) in enumerate(zip(some, every, strict=True)):
            if i in (1, 2):
                assert_same_bits(got, [b if i == at else b.new_empty(0) for b in ref], op)
            elif i == at:
                assert_same_bits(got, ref, op)
            else:
                assert got.shape == (0,)


@each_op
def test_autograd(op, device):
    """Gradients of all results, of one result alone, and of a frozen call."""
    x, weights, biases, vectors, options = made(op, "k_blocks", device)
    ys, grads = recorded(op, x, weights, biases, vectors, options)
    ones = [torch.ones_like(y) for y in ys]
    mask = [True] * (3 + len(vectors))
    dx, dweights, _, *dvectors = backward(op, ones, x, weights, vectors, options, mask)
    expected = [dx, *dweights, *(torch.full_like(b, x.shape[0]) for b in biases), *dvectors]
    assert_close(grads, expected)
    leaf = x.clone().requires_grad_()
    first = call(op)(leaf, weights, biases, *vectors, **options)[0]
    (alone,) = torch.autograd.grad(first.sum(), leaf)
    again = x.clone().requires_grad_()
    one = call(single(op))(again, weights[0], biases[0], *vectors, **options)
    assert_close(alone, torch.autograd.grad(one.sum(), again)[0])
    assert not call(op)(x, weights, biases, *vectors, **options)[0].requires_grad


@each_op
@pytest.mark.parametrize("which", ["weights", "biases"])
@pytest.mark.parametrize("at", range(3))
def test_one_of_a_list_is_trained(op, which, at, device):
    """The others, x and the norm are frozen; the first of the list says nothing of the rest."""
    x, *lists, vectors, options = made(op, "plain", device)
    layers = dict(zip(("weights", "biases"), lists, strict=True))
    leaf = layers[which][at].requires_grad_()
    ys = call(op)(x, *layers.values(), *vectors, **options)
    assert all(y.requires_grad for y in ys)
    (got,) = torch.autograd.grad([y.square().sum() for y in ys], leaf)
    bias, weight = layers["biases"][at], layers["weights"][at]
    alone = call(single(op))(x, weight, bias, *vectors, **options)
    assert_close(got, torch.autograd.grad(alone.square().sum(), leaf)[0])


@each_op
def test_gradcheck(op):
    x, weights, biases, vectors, options = made(op, "plain", "cpu", torch.float64)
    leaves = [t.clone().requires_grad_() for t in (x, *weights, *biases, *vectors)]

    def function(x, *others):
        n = len(weights)
        return tuple(call(op)(x, others[:n], others[n : 2 * n], *others[2 * n :], **options))

    assert torch.autograd.gradcheck(function, leaves)


@each_op
def test_the_normalised_rows_are_not_kept(op, device):
    x, weights, biases, vectors, options = made(op, "long", device)
    saved: list[Tensor] = []
    leaves = [w.clone().requires_grad_() for w in weights]

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        call(op)(x, leaves, biases, *vectors, **options)
    statistics = VECTORS[op] * x.shape[0]
    inputs = {t.data_ptr() for t in (x, *leaves, *vectors) if t is not None}
    assert sum(t.numel() for t in saved if t.data_ptr() not in inputs) == statistics


@each_op
def test_refusals(op, device):
    x, weights, biases, vectors, options = made(op, "plain", device)

    def refused(match: str, *args, **kwargs) -> None:
        with pytest.raises(RuntimeError, match=f"torchweld::{op}: {match}"):
            call(op)(*args, **kwargs)

    refused(r"weights must hold at least one weight \(N, K\), but got none", x, [], [])
    refused("biases must be empty or hold one bias for each weight, but got 2 for 3 weights",
            x, weights, biases[:2])  # fmt: skip
    refused(r"weights\[1\] must be \(N, K\) with K = 5", x, [weights[0], weights[1][:, :4]], [])
    refused(r"weights\[2\]", x, [*weights[:2], weights[2].double()], [])
    refused(r"biases\[1\]", x, weights, [biases[0], biases[0], biases[2]])
    refused("eps must be finite and at least 0", x, weights, biases, eps=-1.0)
    results = call(op + "_forward")(x, weights, biases, *vectors)
    ys, statistics = results[: len(weights)], results[len(weights) :]
    mask = [True] * (3 + len(vectors))
    for dys, match in (
        (ys[:2], "dys must hold one gradient for each weight, but got 2 for 3 weights"),
        ([ys[0], ys[0], ys[2]], r"dys\[1\]"),
    ):
        with pytest.raises(RuntimeError, match=match):
            call(op + "_backward")(dys, x, weights, *vectors, *statistics, mask)
    function = getattr(torchweld, op)
    with pytest.raises(TypeError, match="weights must be a list of Tensors, but got 1"):
        function(x, 1, [])
    leaves = [w.clone().requires_grad_() for w in weights]
    y = call(op)(x.clone().requires_grad_(), leaves, biases, *vectors)[0]
    (grad,) = torch.autograd.grad(y.square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented|does not require grad"):
        grad.sum().backward()
    with fwAD.dual_level():
        dual = fwAD.make_dual(weights[0], weights[0])
        refused("its tensors must have no forward-mode tangent", x, [dual, *weights[1:]], [])


@each_op
def test_meta_fake_and_opcheck(op, device):
    for case in ("plain", "bare"):
        x, weights, biases, vectors, options = made(op, case, device)
        results = call(op + "_forward")(x, weights, biases, *vectors, **options)
        ys, statistics = results[: len(weights)], results[len(weights) :]
        mask = [True] * (3 + len(vectors))
        grads = call(op + "_backward")(ys, x, weights, *vectors, *statistics, mask)
        to_meta = [[t.to("meta") for t in tensors] for tensors in (weights, biases)]
        meta = call(op)(
            x.to("meta"), *to_meta, *[v if v is None else v.to("meta") for v in vectors]
        )
        assert [m.shape for m in meta] == [y.shape for y in ys]
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = call(op + "_backward")(
                [mode.from_tensor(y) for y in ys], x, weights, *vectors, *statistics,
                output_mask=mask,
            )  # fmt: skip
        assert [g.shape for g in fake] == [g.shape for g in grads]
        assert fake[0].shape == x.shape and fake[0].device.type == device
        leaf = x.clone().requires_grad_()
        torch.library.opcheck(call(op).default, (leaf, weights, biases, *vectors), options)
        args = (ys, x, weights, *vectors, *statistics, mask)
        torch.library.opcheck(call(op + "_backward").default, args)
        torch.library.opcheck(
            call(op + "_forward").default, (x, weights, biases, *vectors), options
        )


@each_op
def test_none_is_no_biases(op, device):
    """Packages of AOTInductor pass None for an empty list; docs/export.md makes one."""
    x, weights, _, vectors, options = made(op, "bare", device)
    with_none = call(op)(x, weights, None, *vectors, **options)
    assert_same_bits(with_none, call(op)(x, weights, [], *vectors, **options), op)


@each_op
def test_compile_export_and_script(op, device):
    x, weights, biases, vectors, options = made(op, "plain", device)
    expected, grads = recorded(op, x, weights, biases, vectors, options)

    class Projections(nn.Module):
        def forward(self, x, weights: list[Tensor], biases: list[Tensor], vectors: list[Tensor]):
            return call(op)(x, weights, biases, *vectors)

    compiled = torch.compile(Projections(), fullgraph=True, backend="aot_eager")
    leaves = [[t.clone().requires_grad_() for t in ts] for ts in ([x], weights, biases, vectors)]
    ys = compiled(leaves[0][0], *leaves[1:])
    flat = [t for ts in leaves for t in ts]
    assert_same_bits(torch.autograd.grad(ys, flat, [torch.ones_like(y) for y in ys]), grads, op)
    program = torch.export.export(Projections(), (x, weights, biases, vectors))
    for got, ref in zip(program.module()(x, weights, biases, vectors), expected, strict=True):
        assert_same_bits(got, ref.detach(), op)
    scripted = torch.jit.script(SCRIPTED[op])
    assert_same_bits(scripted(x, weights, biases, *vectors), [ref.detach() for ref in expected], op)


def rms_projections(x: Tensor, weights: list[Tensor], biases: list[Tensor], scale: Tensor):
    return torch.ops.torchweld.rms_norm_linears(x, weights, biases, scale)


def layer_projections(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], scale: Tensor, shift: Tensor
):
    return torch.ops.torchweld.layer_norm_linears(x, weights, biases, scale, shift)


SCRIPTED = {"rms_norm_linears": rms_projections, "layer_norm_linears": layer_projections}


@each_op
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_autocast(op, dtype, device):
    x, weights, biases, vectors, options = made(op, "k_blocks", device)

    def cast(tensors):
        return [t.to(dtype) for t in tensors]

    expected, grads = recorded(op, x.to(dtype), cast(weights), cast(biases), cast(vectors), options)
    with torch.autocast(device, dtype=dtype):
        ys, cast_grads = recorded(op, x, weights, biases, vectors, options)
    assert_same_bits([y.detach() for y in ys], [ref.detach() for ref in expected], op)
    assert_same_bits(cast_grads, [ref.to(F32) for ref in grads], op)


@each_op
def test_torch_func(op, device):
    x, weights, biases, vectors, options = made(op, "k_blocks", device)
    ys = call(op)(x, weights, biases, *vectors, **options)

    def function(x, weights):
        return torch.cat(call(op)(x, weights, biases, *vectors, **options), -1)

    out, pull = vjp(function, x, weights)
    assert_same_bits(out, torch.cat(ys, -1), op)
    dx, dweights = pull(torch.ones_like(out))
    mask = [True] * (3 + len(vectors))
    ones = [torch.ones_like(y) for y in ys]
    expected = backward(op, ones, x, weights, vectors, options, mask)
    assert_close(dx, expected[0])
    assert_close(dweights, expected[1])
    batch = torch.stack([x, x * 0.5], 1)
    mapped = vmap(lambda x: call(op)(x, weights, biases, *vectors, **options), 1)(batch)
    for i in range(2):
        entry = call(op)(batch[:, i], weights, biases, *vectors, **options)
        assert_close([got[i] for got in mapped], entry)


def test_flops_are_those_of_linear():
    x, weights, *_ = made(OP, "k_blocks", "cpu")

    def counted(function) -> int:
        leaves = [t.clone().requires_grad_() for t in (x, *weights)]
        with FlopCounterMode(display=False) as counter:
            torch.cat(function(leaves[0], leaves[1:]), -1).sum().backward()
        return counter.get_total_flops()

    ours = counted(lambda x, ws: torchweld.rms_norm_linears(x, ws, []))
    assert ours == counted(lambda x, ws: [F.linear(x, w) for w in ws])


def test_reruns_have_the_same_bits(device):
    for dtype in dtypes(device):
        x, weights, biases, vectors, options = made(OP, "long", device, dtype)
        first = recorded(OP, x, weights, biases, vectors, options)[1]
        assert_same_bits(recorded(OP, x, weights, biases, vectors, options)[1], first, OP)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_a_cuda_graph_replays_with_changed_inputs():
    x, *_ = args = made(OP, "long", "cuda", BF16)
    graph, (ys, grads) = cuda_graph(lambda: recorded(OP, *args))
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        expected = recorded(OP, *args)
        for got, ref in zip([*ys, *grads], [*expected[0], *expected[1]], strict=True):
            assert_same_bits(got.detach(), ref.detach(), OP)
