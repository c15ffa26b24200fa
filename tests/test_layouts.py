"""Every tensor argument of every op in any layout: the result equals that of contiguous tensors.

One argument at a time has other strides, an offset or a stride of 0, inside a larger buffer of NaN
(of huge integers), so that a read outside the tensor is found. The gradient that autograd passes to
an op is one of its arguments here, named d(output).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

import reference as R
import samples as S
from numerics import UNIT, Bound, assert_same_bits, check
from running import GRADIENTS, REFERENCES, Exact, roundable
from samples import (
    BF16,
    DIFFERENTIABLE,
    F16,
    F32,
    F64,
    SAMPLES,
    Call,
    Maker,
    Sample,
    as_tuple,
    call,
)
from strategies import hole, strided

LAYOUTS = ("stepped", "offset", "gapped", "transposed", "permuted", "expanded")
OPS = list(SAMPLES)
# One rounding an element, or none: the layout changes no bit.
EXACT = ("add_scalar", "outer_add", "outer_mul_relu", "mul_relu")
# Ops whose sums have the bounds of another op.
GRADIENT_OF = {
    "softmax_matmul_forward": "softmax_matmul",
    "attention_forward": "attention",
    "attention_with_lse": "attention",
    "scalar_attention_forward": "scalar_attention",
    "linear_forward": "linear",
    "layer_norm_linear_forward": "layer_norm_linear",
    "rms_norm_linear_forward": "rms_norm_linear",
    "gated_linear_forward": "gated_linear",
    "gated_linear_pair_forward": "gated_linear_pair",
    "gated_mlp_forward": "gated_mlp",
    "experts_forward": "experts",
    "grouped_linear_forward": "grouped_linear",
    "grouped_gated_linear_forward": "grouped_gated_linear",
    "rms_norm_forward": "rms_norm",
    "rms_norm_gated_forward": "rms_norm_gated",
    "layer_norm_forward": "layer_norm",
}
OUT = "d(output)"
LSE = "d(lse)"


# Calls beyond the samples: masks as numbers, and sizes that reach the paths for large calls.


def masked(forward: S.Builder, *names: str, **numbers: Any) -> S.Builder:
    """The call with these mask tensors, sized by the first tensor's (batch, nheads, seqlen_q) and
    the keys of the call.
    """

    def build(m: Maker) -> Call:
        args, kwargs = forward(m)
        batch, nheads, seqlen_q, keys = args[0].shape
        if len(args) > 1 and args[1].dim() == 4:  # attention's key
            keys = args[1].shape[2]

        def data(*shape: int) -> Tensor:
            t = torch.randint(-1, keys + 2, shape, generator=m.generator, dtype=torch.int32)
            return t.to(m.device)

        made = {
            "key_start": lambda: (data(batch, seqlen_q) // 2).sort(1).values,
            "key_end": lambda: keys - data(batch) // 4,
            "row_ends": lambda: keys - data(batch, seqlen_q) // 4,
            "sink": lambda: m.randn(nheads),
            "bias": lambda: m.randn(batch, nheads, seqlen_q, keys),
            "alibi_slopes": lambda: m.randn(nheads).abs(),
        }
        given = {"key_end" if name == "row_ends" else name: made[name]() for name in names}
        return args, {**kwargs, **numbers, **given}

    return build


def of_documents(forward: S.Builder) -> S.Builder:
    """causal_conv1d's call, for documents of three positions."""

    def build(m: Maker) -> Call:
        args, kwargs = forward(m)
        batch, _, seqlen = args[0].shape
        starts = torch.arange(seqlen, dtype=torch.int32, device=m.device) // 3 * 3
        return args, {**kwargs, "key_start": starts.repeat(batch, 1)}

    return build


def host(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: R.up(value) for name, value in kwargs.items()}


def causal_backward(forward: S.Builder) -> S.Builder:
    """With a softcap or a sink the scores are an argument too."""

    def build(m: Maker) -> Call:
        (scores, *leftpad), kwargs = forward(m)
        y = R.causal_softmax(R.up(scores), *map(R.up, leftpad), **host(kwargs))
        return [m.randn(*scores.shape), m.saved(y), *leftpad], {**kwargs, "scores": scores}

    return build


def with_dlse(backward: S.Builder) -> S.Builder:
    def build(m: Maker) -> Call:
        args, kwargs = backward(m)
        dlse = m.saved(R.up(m.randn(*args[0].shape[:3])), stat=True)
        return args, {**kwargs, "dlse": dlse}

    return build


def saved_by(reference: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: reference(*args, **host(kwargs))


def _further() -> S.Calls:
    further = S.Calls()
    add, add_both = further.add, further.add_both
    scores = S.softmax_call(2, 2, 5, 9)
    causal = {
        "documents": masked(scores, "key_start", "key_end", "sink", scale=0.7),
        "capped": masked(S.causal_call((2, 2, 5, 9), (1, 3)), "key_end", "sink", softcap=3.0),
        "large": masked(S.softmax_call(2, 3, 40, 300), "key_start", "key_end", "sink", window=70),
    }
    add("causal_softmax", **causal)
    add("causal_softmax_backward", **{n: causal_backward(c) for n, c in causal.items()})

    small = S.softmax_matmul_call(2, 2, 5, 9, 3)
    large = S.softmax_matmul_call(2, 3, 70, 130, 48)
    matmul = {
        "documents": masked(small, "key_start", "key_end", "sink", causal=True),
        "padded_sink": masked(
            S.softmax_matmul_call(2, 2, 5, 9, 3, pads=(1, 3)), "key_end", "sink", softcap=3.0
        ),
        "large": masked(large, "key_start", "key_end", "sink", causal=True),
        "large_plain": large,
    }
    small = S.attention_call(2, 4, 2, 5, 9, 3, 4)
    large = S.attention_call(2, 4, 2, 70, 130, 64, 64)
    attention = {
        "documents": masked(small, "key_start", "key_end", "sink", causal=True),
        "padded_sink": masked(
            S.attention_call(2, 4, 2, 5, 9, 3, 4, pads=(1, 3)), "key_end", "sink", softcap=3.0
        ),
        "large": masked(large, "key_start", "key_end", "sink", causal=True),
        "large_plain": S.attention_call(1, 2, 2, 128, 128, 64, 64, causal=True),
        "decode": masked(S.attention_call(2, 4, 2, 1, 260, 64, 64), "key_end", "sink"),
        "row_ends": masked(small, "key_start", "row_ends", "sink"),
        "large_row_ends": masked(large, "key_start", "row_ends"),
        "bias": masked(small, "key_start", "sink", "bias", causal=True),
        "large_bias": masked(large, "key_end", "bias", causal=True),
        "decode_bias": masked(S.attention_call(2, 4, 2, 1, 260, 64, 64), "bias"),
        "alibi": masked(small, "key_start", "alibi_slopes", causal=True),
        "large_alibi": masked(large, "key_end", "alibi_slopes"),
        "decode_alibi": masked(S.attention_call(2, 4, 2, 1, 260, 64, 64), "alibi_slopes"),
    }
    for op, calls, inputs, ref in (
        ("softmax_matmul", matmul, 2, R.softmax_matmul_forward),
        ("attention", attention, 3, R.attention_forward),
    ):
        add_both(op, **calls)
        backward = {n: S.with_saved(c, inputs, saved_by(ref)) for n, c in calls.items()}
        add(op + "_backward", **backward)
    add("attention_with_lse", **attention)
    add("attention_backward", dlse=with_dlse(backward["documents"]))
    add("attention_backward", large_dlse=with_dlse(backward["large"]))

    # M * N * K of 2^20 and more, where oneDNN runs on the CPU.
    aligned, odd = ((2, 48), 128, 128), ((97,), 131, 101)
    for kind, norms in (("linear", 0), ("layer_norm_linear", 2), ("rms_norm_linear", 1)):
        full, wanted = [True] * norms, [True] * (3 + norms)
        activations = {"large": (aligned, "none"), "large_odd": (odd, "none")}
        activations["large_relu"] = (aligned, "relu")
        activations["large_gelu_tanh"] = (aligned, "gelu_tanh")
        activations["large_silu"] = (odd, "silu")
        for name, (sizes, activation) in activations.items():
            layer = S.layer_call(*sizes, *full, activation=activation)
            add_both(kind, **{name: layer})
            add(kind + "_backward", **{name: S.layer_backward_call(kind, layer, wanted)})
    add_both("rms_norm_gated", large=S.gated_norm_call((2, 37), 264))
    add("rms_norm_gated_backward", large=S.gated_norm_call((2, 37), 264, mask=[True] * 3))
    for op in ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"):
        full = [True] * (1 + op.endswith("layer_norm"))
        norm = S.norm_call(op, (2, 37), 264, *full)
        add_both(op, large=norm)
        add(op + "_backward", large=S.norm_backward_call(op, norm, [True, *full]))
    for reduction in ("none", "mean"):
        loss = S.loss_call(
            (2, 37), 300, 70, ignored=9, reduction=reduction, softcap=3.0, z_loss=0.1
        )
        name = f"large_{reduction}"
        add_both("linear_cross_entropy", **{name: loss})
        backward = S.cross_entropy_backward_call(loss, [True] * 3)
        add("linear_cross_entropy_backward", **{name: backward})
        backward = S.cross_entropy_backward_call(loss, [True] * 3, ["dlse", "dmean"])
        add("linear_cross_entropy_backward", **{f"{name}_and_lse": backward})
        logits = S.logits_call(
            (2, 37), 300, ignored=9, reduction=reduction, softcap=3.0, z_loss=0.1
        )
        add_both("cross_entropy", **{name: logits})
        add("cross_entropy_backward", **{name: S.logits_backward_call(logits)})
    loss = S.without(loss, output_mask=[True] * 3)
    add("linear_cross_entropy_gradients_forward", large=loss)
    plain = S.logits_call((74,), 5001, ignored=9)
    add("cross_entropy", large=plain)
    add("cross_entropy_gradients_forward", large=plain)
    add("cross_entropy_gradients_backward", large=S.scaled_logits_call(74, 501))
    loss = S.loss_call((2, 37), 300, 70, entropy=True, temperature=0.7)
    add_both("linear_token_logprobs", large=loss)
    add("linear_token_logprobs_backward", large=S.logprobs_backward_call(loss, [True] * 3))
    add("fold_layer_norm", large=S.fold_call(131, 260, True, True, True))
    for op, backward in (
        ("folded_layer_norm_linear", False),
        ("folded_layer_norm_linear_backward", True),
    ):
        add(op, large=S.folded_call(*aligned, backward=backward))
        add(op, large_silu=S.folded_call(*odd, backward=backward, activation="silu"))
    for name, gate, interleaved in (("large", "swiglu", False), ("large_geglu", "geglu", True)):
        layer = S.layer_call(*aligned, gate=gate, interleaved=interleaved)
        add_both("gated_linear", **{name: layer})
        sizes = (aligned[0], aligned[1] // 2, aligned[2], [True] * 3)
        build = S.gated_backward_call(*sizes, gate=gate, interleaved=interleaved)
        add("gated_linear_backward", **{name: build})
    swiglu, geglu = {"gate": "swiglu"}, {"gate": "geglu"}
    gates = {"large": ((33, 264), swiglu), "large_odd": ((3, 11, 259), geglu)}
    pairs = {"large": (aligned, swiglu), "large_geglu": (odd, geglu)}
    mlps = {"large": ((*aligned, 104), {}), "large_odd": ((*odd, 67), {})}
    products = {"large": (((2, 2), 64, 72, 128), {}), "large_odd": (((3, 1), 65, 131, 67), {})}
    for build, cases, count, op, *ends in (
        (S.gate_call, gates, 2, "gated_activation", ""),
        (S.pair_call, pairs, 5, "gated_linear_pair", "", "_forward"),
        (S.mlp_call, mlps, 7, "gated_mlp", "", "_forward"),
        (S.bmm_call, products, 2, "bmm", ""),
    ):
        further.add_masked(build, S.every_gradient(count, cases), op, *ends)

    sizes = {"large": ((3,), 96, 256, 2), "large_rows": ((40,), 96, 256, 4)}
    sizes["one_row"] = ((1,), 64, 128, 1)
    for op, build in S.INT4_CALLS:
        add(op, **{n: build(*s) for n, s in sizes.items()})
    add("int4_pack", large=S.int4_codes_call(33, 264))
    add("int4_unpack", large=S.int4_unpack_call(33, 264))

    add("softmax", large=S.softmax_call(33, 1030))
    add("softmax_backward", large=S.softmax_backward_call(33, 1030))
    rotary = S.rotary_call(2, 5, 3, 70, 128, 64, 2)
    add("rotary", large=rotary)
    add("rotary_backward", large=S.rotary_call(2, 5, 3, 70, 128, 64, 2, mask=[True, True]))
    sizes = (2, 264, 150, 4, "bias", "state")
    add("causal_conv1d", large=S.conv1d_call(*sizes))
    add("causal_conv1d_backward", large=S.conv1d_call(*sizes, mask=[True] * 4))
    sizes = (2, 5, 7, 4, "bias")
    add("causal_conv1d", documents=of_documents(S.conv1d_call(*sizes)))
    wanted = [True, True, True, False]
    packed = of_documents(S.conv1d_call(*sizes, mask=wanted))
    add("causal_conv1d_backward", documents=packed)
    add("row_sum", large=S.softmax_call(33, 1030))
    add("add_scalar", large=lambda m: ([m.randn(33, 1030), 0.5], {}))
    add_both("scalar_attention", large=S.scalar_attention_call(300))
    add("scalar_attention_backward", large=S.scalar_attention_backward_call(300, [True] * 3))
    further.add_matrices("large", 70, 300)
    add("conv2d", large=S.conv2d_call((2, 40, 70), (5, 9)))
    add("conv2d_backward", large=S.conv2d_call((2, 40, 70), (5, 9), [True, True]))
    return further


FURTHER = {op: [Sample(op, *item) for item in named.items()] for op, named in _further().items()}


def calls_of(op: str) -> list[Sample]:
    return [*SAMPLES[op], *FURTHER.get(op, ())]


# One argument in a layout


def layout_of(name: str, dims: int, pick: random.Random):
    """Returns the order of the dims in memory, the steps and the offset of a layout.

    None if a tensor of so many dims has no such layout.
    """
    order, steps, offset = list(range(dims)), [1] * dims, pick.choice([0, 1, 3, 8])
    if name == "offset":
        offset = pick.choice([1, 2, 3, 4, 5, 7])
    elif name == "stepped":
        steps[-1] = pick.choice([2, 3])
    elif name == "gapped":
        if dims < 2:
            return None
        steps[-2] = 2
    elif name == "transposed":
        if dims < 2:
            return None
        order[-2:] = order[:-3:-1]
    elif name == "permuted":
        if dims < 2:
            return None
        pick.shuffle(order)
        steps = [pick.choice([1, 1, 2]) for _ in order]
    return tuple(order), tuple(steps), offset


def in_layout(t: Tensor, name: str, pick: random.Random) -> Tensor | None:
    """t's values in a layout, or None if it has none of that name. Expanded dims repeat t's
    first element of them.
    """
    if t.dim() == 0:
        return None
    if name != "expanded":
        layout = layout_of(name, t.dim(), pick)
        return None if layout is None else strided(t, layout)
    dims = [d for d in range(t.dim()) if t.shape[d] > 1]
    if not dims:
        return None
    dims = pick.sample(dims, pick.randint(1, len(dims)))
    # As many elements in memory as t has, so that reading it as contiguous stays in memory.
    filled, first = torch.full_like(t, hole(t)), t
    for d in dims:
        first = first.narrow(d, 0, 1)
    place = layout_of("permuted" if t.dim() > 1 else "offset", t.dim(), pick)
    base = strided(filled, place)
    for d in dims:
        base = base.narrow(d, 0, 1)
    return base.copy_(first).expand(t.shape)


def gradients_of(op: str) -> list[str]:
    if op not in DIFFERENTIABLE:
        return []
    return [OUT, LSE] if op == "attention_with_lse" else [OUT]


def arguments_of(op: str) -> list[str]:
    """The tensor arguments of an op, and the gradients that autograd hands to it."""
    schema = call(op).default._schema
    names = [a.name for a in schema.arguments if str(a.type) in ("Tensor", "Optional[Tensor]")]
    return names + gradients_of(op)


def named_call(op: str, s: Sample, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments by name, followed by random gradients of the outputs."""
    args, kwargs = s.make(device, dtype)
    names = [a.name for a in call(op).default._schema.arguments]
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    if op in DIFFERENTIABLE:
        outputs = as_tuple(call(op)(*args, **kwargs))
        g = torch.Generator().manual_seed(1)
        for name, out in zip(gradients_of(op), outputs, strict=False):
            named[name] = torch.randn(out.shape, generator=g, dtype=F64).to(out)
    return named


def alone_of(op: str) -> list[str]:
    """The keyword-only arguments of an op that have a gradient."""
    arguments = call(op).default._schema.arguments
    return [a.name for a in arguments if a.kwarg_only and a.name in ("sink", "bias")]


def run(op: str, named: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs, and the gradients of all arguments that have one."""
    named = dict(named)
    given = [named.pop(n) for n in (OUT, LSE) if n in named]
    if not given:
        return list(as_tuple(call(op)(**named))), []
    names = [a.name for a in call(op).default._schema.arguments]
    wanted = [names[i] for i in DIFFERENTIABLE[op] if isinstance(named.get(names[i]), Tensor)]
    wanted += [n for n in alone_of(op) if named.get(n) is not None]
    for n in wanted:
        named[n] = named[n].detach().requires_grad_()
    outputs = as_tuple(call(op)(**named))
    grads = torch.autograd.grad(outputs[: len(given)], [named[n] for n in wanted], given)
    return [t.detach() for t in outputs], list(grads)


def bounds_of(op: str, named: dict[str, Any]) -> tuple[list[Bound], list[Bound]]:
    """The allowed errors of the results of `run`."""
    named = dict(named)
    dout, dlse = named.pop(OUT, None), named.pop(LSE, None)
    schema = [a for a in call(op).default._schema.arguments if a.name in named]
    args = [named[a.name] for a in schema if not a.kwarg_only]
    kwargs = {a.name: named[a.name] for a in schema if a.kwarg_only}
    outputs = REFERENCES[op](*args, **kwargs)
    if dout is None:
        return outputs, []
    if dlse is not None:
        kwargs["dlse"] = dlse
    grads = GRADIENTS[GRADIENT_OF.get(op, op)](dout, *args, **kwargs)
    indices = [i for i in DIFFERENTIABLE[op] if i < len(args) and isinstance(args[i], Tensor)]
    alone = sum(kwargs.get(n) is not None for n in alone_of(op))
    return outputs, [grads[i] for i in indices] + grads[len(grads) - alone :]


def alike(plain: list[Tensor], bounds: list[Bound]) -> list[Bound]:
    """The bounds of another run: twice those of the contiguous one, because the order may differ.

    Both are rounded at the end, so that they may be a whole spacing of their dtype apart.
    """

    def twice(out: Tensor, bound: Bound) -> Bound:
        if isinstance(bound, Exact):
            return bound
        ref = R.up(out).to(bound.ref.device)
        last = UNIT[bound.dtype] * roundable(ref, bound.dtype)
        worst, statistical, extra = (2 * e for e in bound.errors)
        return replace(bound, ref=ref, errors=(worst + last, statistical + last, extra))

    return [twice(*pair) for pair in zip(plain, bounds, strict=True)]


def check_alike(got: list[Tensor], plain: list[Tensor], bounds, label: str, exact: bool) -> None:
    """Each result is within its bound of `alike`."""
    for out, ref, bound in zip(got, plain, bounds, strict=True):
        if exact or isinstance(bound, Exact):
            assert_same_bits(out, ref, label)
        else:
            check(out, bound, label=label, device=ref.device)


def same_bits(got: list[Tensor], plain: list[Tensor]) -> bool:
    try:
        assert_same_bits(got, plain)
    except AssertionError:
        return False
    return all(out.device == ref.device for out, ref in zip(got, plain, strict=True))


class Plain:
    """A call of contiguous tensors, its results, and the bounds of another run if they differ."""

    def __init__(self, op: str, named: dict[str, Any]) -> None:
        self.op, self.named, self.results = op, named, run(op, named)

    @cached_property
    def bounds(self) -> list[list[Bound]]:
        found = bounds_of(self.op, self.named)
        return [alike(*pair) for pair in zip(self.results, found, strict=True)]


@lru_cache(maxsize=64)
def contiguous_call(op: str, s: Sample, device: str, dtype: torch.dtype) -> Plain:
    return Plain(op, named_call(op, s, device, dtype))


CASES = [pytest.param(op, a, id=f"{op}-{a}") for op in OPS for a in arguments_of(op)]


@pytest.mark.parametrize(("op", "argument"), CASES)
def test_layout_does_not_matter(device, op, argument):
    for layout in LAYOUTS:
        check_layout(device, op, argument, layout)


def check_layout(device, op, argument, layout):
    dims, tried = -1, 0  # a scalar has 0 dims
    for s in calls_of(op):
        for dtype in (F32, BF16) if s.name.startswith("large") else (F32, F16):
            plain = contiguous_call(op, s, device, dtype)
            named, given = plain.named, plain.named.get(argument)
            if given is None:
                continue
            dims = max(dims, given.dim())
            pick = random.Random(f"{s.id} {argument} {layout} {dtype}")
            moved = in_layout(given, layout, pick)
            if moved is None:
                continue
            tried += 1
            if layout == "expanded":  # other values than the sample's
                plain = Plain(op, {**named, argument: moved.contiguous()})
            got = run(op, {**named, argument: moved})
            if all(map(same_bits, got, plain.results)):
                continue
            label = f"{s.id} {dtype}, {argument} {layout} {moved.stride()}"
            results, grads = zip(got, plain.results, plain.bounds, strict=True)
            check_alike(*results, label, op in EXACT)
            check_alike(*grads, label + ", gradient", exact=False)
    assert dims >= 0, f"no call gives {argument}"
    assert tried or dims < 2, f"no call has {argument} {layout}"


def linear_part(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
    y = x.new_empty(x.shape[0], weight.shape[0])
    preact = torch.empty_like(y)
    torch.ops.torchweld._linear_part(x, weight, bias, y, preact, activation="silu")
    return [y, preact]


def activation_backward(dy: Tensor, preact: Tensor) -> list[Tensor]:
    op = torch.ops.torchweld._activation_backward
    return list(op(dy, preact, activation="silu", sums=True))


# The private ops with tensor arguments, their inputs, and the bounds of their results.
PRIVATE = {
    "linear_part": (
        linear_part,
        "linear",
        lambda x, *layer: REFERENCES["linear_forward"](x, *layer, activation="silu"),
    ),
    "activation_backward": (
        activation_backward,
        "linear_backward",
        lambda dy, z: REFERENCES["linear_backward"](
            dy, z, z.new_ones(z.shape[1]).diag(), z, activation="silu", output_mask=[1, 0, 1]
        )[::2],
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", PRIVATE)
def test_layout_does_not_matter_to_a_private_op(device, op, layout):
    function, kernels, bounds_of_call = PRIVATE[op]
    for dtype in (F32, BF16, F16):
        m = Maker(device, dtype, 0)
        if op == "linear_part":
            args = [m.randn(96, 128), m.randn(128, 128, std=0.1), m.randn(128)]
        else:
            args = [m.randn(96, 128), m.randn(96, 128)]
        for i, given in enumerate(args):
            moved = in_layout(given, layout, random.Random(f"{op} {i} {layout} {dtype}"))
            if moved is None:
                continue
            same = [*args[:i], moved.contiguous(), *args[i + 1 :]]
            label = f"_{op} {dtype}, argument {i} {layout} {moved.stride()}"
            got = function(*args[:i], moved, *args[i + 1 :])
            plain = function(*same)
            bounds = alike(plain, bounds_of_call(*same))
            check_alike(got, plain, bounds, label, exact=False)
