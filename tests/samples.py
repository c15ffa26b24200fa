"""Sample calls of every op, and the helpers that run an op through the numeric rules.

SAMPLES[op] is a list of calls, each made anew for a device and dtype from a fixed seed. The
contract tests run all of them; an op of the dispatcher that is missing here fails the suite.
"""

from __future__ import annotations

import functools
import inspect
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import numerics
import reference as R
from numerics import acc_dtype
from running import REFERENCES, RESULT_AND_GRADIENTS
from torchweld._flops import LISTS
from torchweld._library import build_facts
from torchweld.info import ops_of_library, public_op

Call = tuple[list[Any], dict[str, Any]]

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
# Ops whose helper <op>_forward records no gradient.
FORWARD_WITHOUT_GRADIENT = (
    "cross_entropy", "cross_entropy_gradients", "linear_cross_entropy",
    "linear_cross_entropy_gradients", "linear_cross_entropy_exponentials", "linear_token_logprobs",
    "add_rms_norm", "add_layer_norm",
)  # fmt: skip
# Ops without a backward op: torch's own ops compute their gradients.
TWICE_DIFFERENTIABLE = ("row_sum", "add_scalar")
# Ops that autocast does not cast.
KEEPS_DTYPE = (
    "softmax", "cross_entropy", "causal_softmax", "scalar_attention", "rotary", "rms_norm",
    "layer_norm", "add_rms_norm", "add_layer_norm", "rms_norm_gated", "gated_activation",
    "row_sum", "add_scalar", "outer_add", "outer_mul_relu", "mul_relu",
)  # fmt: skip
# Ops whose results have the dtype of sums.
FLOAT32_RESULTS = ("cross_entropy", "linear_cross_entropy", "linear_token_logprobs")
# Ops whose second result has a gradient too.
TWO_GRADIENTS = ("attention_with_lse", "linear_token_logprobs", "add_rms_norm", "add_layer_norm")


def dtypes(device: str) -> list[torch.dtype]:
    return [F32, F16, BF16] + ([F64] if device == "cpu" else [])


def call(op: str) -> Callable[..., Any]:
    return getattr(torch.ops.torchweld, op)


def as_tuple(out: Any) -> tuple[Tensor, ...]:
    return (out,) if isinstance(out, Tensor) else tuple(out)


class Maker:
    """Makes the tensors of one call: seeded on the CPU, then moved, so devices agree."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(seed)

    def randn(self, *shape: int, mean: float = 0.0, std: float = 1.0) -> Tensor:
        t = torch.randn(shape, generator=self.generator, dtype=F64) * std + mean
        return t.to(self.dtype).to(self.device)

    def integers(self, *shape: int, low: int = -8, high: int = 8) -> Tensor:
        t = torch.randint(low, high + 1, shape, generator=self.generator)
        return t.to(self.dtype).to(self.device)

    def pads(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def saved(self, t: Tensor, stat: bool = False) -> Tensor:
        """A float64 tensor as a forward op would have saved it."""
        return t.to(acc_dtype(self.dtype) if stat else self.dtype).to(self.device)


Builder = Callable[[Maker], Call]


@dataclass(frozen=True)
class Sample:
    op: str
    name: str
    build: Builder

    def make(self, device: str = "cpu", dtype: torch.dtype = F32, seed: int = 0) -> Call:
        seed += zlib.crc32(f"{self.op}/{self.name}".encode())
        args, kwargs = self.build(Maker(device, dtype, seed))
        return args, dict(kwargs)

    @property
    def id(self) -> str:
        return f"{self.op}-{self.name}"


def builder(make: Callable[..., Call]) -> Callable[..., Builder]:
    """make(m, ...) as a function of the other arguments, whose result makes the call with m."""
    return lambda *args, **kwargs: lambda m: make(m, *args, **kwargs)


# Builders. The shapes are tiny: gradcheck perturbs every element.


@builder
def softmax_call(m: Maker, *shape: int) -> Call:
    return [m.randn(*shape)], {}


@builder
def softmax_backward_call(m: Maker, *shape: int) -> Call:
    y = R.softmax(R.up(m.randn(*shape)))
    return [m.randn(*shape), m.saved(y)], {}


@builder
def causal_call(m: Maker, shape: Sequence[int], pads=None, **kwargs) -> Call:
    return [m.randn(*shape), *([m.pads(*pads)] if pads else [])], kwargs


@builder
def causal_backward_call(m: Maker, shape: Sequence[int], pads=None, **kwargs) -> Call:
    (scores, *leftpad), _ = causal_call(shape, pads)(m)
    y = R.causal_softmax(R.up(scores), *map(R.up, leftpad), **kwargs)
    return [m.randn(*shape), m.saved(y), *leftpad], kwargs


@builder
def softmax_matmul_call(m: Maker, b, h, sq, sk, dv, pads=None, **kwargs) -> Call:
    leftpad = [m.pads(*pads)] if pads else []
    return [m.randn(b, h, sq, sk), m.randn(b, h, sk, dv), *leftpad], kwargs


@builder
def attention_call(
    m: Maker, b, h, hkv, sq, sk, d, dv, pads=None, bias=None, alibi=False, **kwargs
) -> Call:
    """`bias`: its sizes before seqlen_k."""
    q, k, v = m.randn(b, h, sq, d), m.randn(b, hkv, sk, d), m.randn(b, hkv, sk, dv)
    if bias is not None:
        kwargs["bias"] = m.randn(*bias, sk)
    if alibi:
        kwargs["alibi_slopes"] = m.randn(h).abs()
    if "dropout_p" in kwargs:
        kwargs["dropout_seed"] = torch.tensor([7 << 40 | 5], device=m.device)
    return [q, k, v, *([m.pads(*pads)] if pads else [])], kwargs


@builder
def with_saved(m: Maker, forward, inputs: int, reference) -> Call:
    """The backward call that follows a forward call: dout, its inputs, out, lse, leftpad."""
    args, kwargs = forward(m)
    out, lse = reference(*map(R.up, args), **{n: R.up(value) for n, value in kwargs.items()})
    saved = [m.saved(out), m.saved(lse, stat=True)]
    return [m.randn(*out.shape), *args[:inputs], *saved, *args[inputs:]], kwargs


@builder
def layer_call(m: Maker, lead, n, k, *norm: bool, bias=True, **kwargs) -> Call:
    x, weight = m.randn(*lead, k), m.randn(n, k, std=max(k, 1) ** -0.5)
    args: list[Any] = [x, weight, m.randn(n) if bias else None]
    mean = 1.0 - kwargs.get("weight_offset", 0)
    for i, given in enumerate(norm):
        args.append(m.randn(k, mean=mean - i, std=0.2) if given else None)
    return args, kwargs


@builder
def layer_backward_call(m: Maker, kind: str, forward, mask: Sequence[bool]) -> Call:
    (x, weight, bias, *norm), kwargs = forward(m)
    activation = kwargs.get("activation", "none")
    offset = {name: kwargs[name] for name in ("weight_offset",) if name in kwargs}
    up_norm = [t if t is None else R.up(t) + offset.get("weight_offset", 0) for t in norm]
    rows, stats = R.up(x), []
    if kind != "linear":
        centred = kind == "layer_norm_linear"
        rows, mean, rstd = R.normalise(rows, kwargs.get("eps", 1e-5), centred)
        rows = R.scale_shift(rows, *up_norm)
        stats = [m.saved(t[..., 0], stat=True) for t in ([mean, rstd] if centred else [rstd])]
    z = R.affine(rows, R.up(weight), R.up(bias))
    saved = R.activate(z, activation) if activation == "relu" else z
    preact = [] if activation == "none" else [m.saved(saved)]
    args = [m.randn(*z.shape), x, weight, *norm, *stats, *preact]
    return args, {**offset, "activation": activation, "output_mask": list(mask)}


@builder
def norm_call(m: Maker, op: str, lead, n, *given: bool, **kwargs) -> Call:
    """A call of a norm; `given` says which of weight and bias there are."""
    args: list[Any] = [m.randn(*lead, n) for _ in range(1 + op.startswith("add_"))]
    offset = kwargs.get("weight_offset", 0)
    for i, there in enumerate(given):
        args.append(m.randn(n, mean=1.0 - i - offset, std=0.2) if there else None)
    return args, kwargs


@builder
def gated_norm_call(m: Maker, lead, n, weight=True, mask=None, **kwargs) -> Call:
    """A call of rms_norm_gated; with a mask that of the backward op."""
    x, gate = m.randn(*lead, n), m.randn(*lead, n)
    scale = m.randn(n, mean=1.0, std=0.2) if weight else None
    if mask is None:
        return [x, gate, scale], kwargs
    rows = R.up(x)
    if kwargs.get("gate_first"):
        rows = rows * R.activate(R.up(gate), "silu")
    rstd = m.saved(R.normalise(rows, kwargs.get("eps", 1e-6), False)[2][..., 0], stat=True)
    rest = {k: v for k, v in kwargs.items() if k != "eps"}
    return [m.randn(*lead, n), x, gate, scale, rstd], {**rest, "output_mask": list(mask)}


@builder
def norm_backward_call(m: Maker, op: str, forward, mask: Sequence[bool], dsum: bool = True) -> Call:
    args, kwargs = forward(m)
    adds, centred = op.startswith("add_"), op.endswith("layer_norm")
    x = args[0] + args[1] if adds else args[0]
    weight = args[1 + adds] if len(args) > 1 + adds else None
    eps = kwargs.get("eps", 1e-5 if centred else 1e-6)
    stats = R.normalise(R.up(x), eps, centred)[1 if centred else 2 :]
    saved = [m.saved(t[..., 0], stat=True) for t in stats]
    last = [m.randn(*x.shape)] if adds and dsum else []
    rest = {k: v for k, v in kwargs.items() if k != "eps"}
    given = [m.randn(*x.shape), x, weight, *saved, *last]
    return given, {**rest, "output_mask": list(mask)}


@builder
def loss_call(m: Maker, lead, n, k, bias=True, ignored=0, **kwargs) -> Call:
    """A call of a loss; the first `ignored` targets are ignored."""
    target = torch.randint(0, n, lead, generator=m.generator)
    target.view(-1)[:ignored] = kwargs.get("ignore_index", -100)
    x, weight = m.randn(*lead, k), m.randn(n, k, std=2 * max(k, 1) ** -0.5)
    return [x, weight, target.to(m.device), m.randn(n) if bias else None], kwargs


@builder
def logits_call(m: Maker, lead, n, ignored=0, **kwargs) -> Call:
    """A call of cross_entropy; the first `ignored` targets are ignored."""
    target = torch.randint(0, n, lead, generator=m.generator)
    target.view(-1)[:ignored] = kwargs.get("ignore_index", -100)
    return [m.randn(*lead, n, std=2.0), target.to(m.device)], kwargs


@builder
def logits_backward_call(m: Maker, forward) -> Call:
    (logits, target), kwargs = forward(m)
    loss, *statistics = R.cross_entropy_forward(R.up(logits), R.up(target), **kwargs)
    dloss = m.saved(R.up(m.randn(*loss.shape)), stat=True)
    return [dloss, logits, target, *[m.saved(t, stat=True) for t in statistics]], kwargs


@builder
def scaled_logits_call(m: Maker, *shape: int) -> Call:
    return [m.saved(R.up(m.randn()), stat=True), m.randn(*shape)], {}


@builder
def without(m: Maker, call: Builder, *names: str, **more: Any) -> Call:
    """The call without these keywords, and with others."""
    args, kwargs = call(m)
    return args, {**{k: v for k, v in kwargs.items() if k not in names}, **more}


@builder
def cross_entropy_backward_call(
    m: Maker, forward, mask: Sequence[bool], others: Sequence[str] = ()
) -> Call:
    """others: of "dlse" and "dmean", the gradients that are given beside dloss."""
    (x, weight, target, bias), kwargs = without(forward, "keep")(m)
    loss, lse = R.linear_cross_entropy_forward(*map(R.up, (x, weight, target, bias)), **kwargs)
    saved = [m.saved(R.up(m.randn(*loss.shape)), stat=True), m.saved(lse, stat=True)]
    args = [saved[0], x, weight, target, saved[1], bias]
    for name in others:
        kwargs = {**kwargs, name: m.saved(R.up(m.randn(*lse.shape)), stat=True)}
    return args, {**kwargs, "output_mask": list(mask)}


@builder
def exponentials_backward_call(m: Maker, forward, mask: Sequence[bool]) -> Call:
    """y and factor are drawn; y is 0 behind N, and factor where a row is ignored."""
    (x, weight, target, bias), kwargs = without(forward, "keep")(m)
    loss, _ = R.linear_cross_entropy_forward(*map(R.up, (x, weight, target, bias)), **kwargs)
    n = weight.shape[0]
    y = m.randn(*target.shape, -(-n // 64) * 64)
    y[..., n:] = 0
    names = ("reduction", "ignore_index", "label_smoothing", "shift", "temperature")
    kept = {k: v for k, v in kwargs.items() if k in names}
    ones = torch.ones((), dtype=torch.float64)
    live = R.rows_dloss(
        ones.expand(loss.shape) if loss.dim() else ones,
        R.up(target),
        "none" if loss.dim() else "sum",
        kwargs.get("ignore_index", -100),
        kwargs.get("shift", 0),
    )
    factor = R.up(m.randn(*target.shape)).abs() * live.view(target.shape)
    factor = m.saved(factor, stat=True)
    dloss = m.saved(R.up(m.randn(*loss.shape)), stat=True)
    return [dloss, x, weight, target, y, factor], {**kept, "output_mask": list(mask)}


@builder
def scaled_gradients_call(m: Maker, lead, n, k, wanted: Sequence[bool]) -> Call:
    shapes = zip(((*lead, k), (n, k), (n,)), wanted, strict=True)
    stored = [m.randn(*shape) if w else m.randn(0) for shape, w in shapes]
    return [m.saved(R.up(m.randn()), stat=True), *stored], {}


@builder
def logprobs_backward_call(m: Maker, forward, mask: Sequence[bool]) -> Call:
    (x, weight, target, bias), kwargs = forward(m)
    given = list(map(R.up, (x, weight, target, bias)))
    logprob, uncertainty, lse = R.linear_token_logprobs_forward(*given, **kwargs)

    def per_token(t: Tensor) -> Tensor:
        return m.saved(t, stat=True)

    grads = [per_token(R.up(m.randn(*logprob.shape))) for _ in range(2)]
    args = [grads[0], x, weight, target, per_token(lse), bias]
    if kwargs.get("entropy"):
        args += [per_token(uncertainty), grads[1]]
    rest = {k: v for k, v in kwargs.items() if k != "entropy"}
    return args, {**rest, "output_mask": list(mask)}


@builder
def fold_call(m: Maker, n, k, bias, scale, shift) -> Call:
    return [
        m.randn(n, k),
        m.randn(n) if bias else None,
        m.randn(k, mean=1.0, std=0.2) if scale else None,
        m.randn(k, std=0.2) if shift else None,
    ], {}


@builder
def folded_call(m: Maker, lead, n, k, bias=True, backward=False, **kwargs) -> Call:
    x, weight = m.randn(*lead, k), m.randn(n, k, std=max(k, 1) ** -0.5)
    total = m.saved(R.up(weight).sum(1), stat=True)
    shift = [m.saved(R.up(m.randn(n)), stat=True)] if bias else []
    dy = [m.randn(*lead, n)] if backward else []
    return [*dy, x, weight, total, *shift], kwargs


@builder
def gated_backward_call(m: Maker, lead, n, k, mask, **kwargs) -> Call:
    (x, weight, bias), _ = layer_call(lead, 2 * n, k)(m)
    z = m.saved(R.affine(R.up(x), R.up(weight), R.up(bias)))
    return [m.randn(*lead, n), x, weight, z], {**kwargs, "output_mask": list(mask)}


@builder
def gate_call(m: Maker, *shape: int, mask=None, **kwargs) -> Call:
    """A call of gated_activation; with a mask the call of the backward op."""
    operands = [m.randn(*shape), m.randn(*shape)]
    if mask is None:
        return operands, kwargs
    return [m.randn(*shape), *operands], {**kwargs, "output_mask": list(mask)}


@builder
def pair_call(m: Maker, lead, n, k, biases=(True, True), mask=None, **kwargs) -> Call:
    """A call of gated_linear_pair; with a mask the call of the backward op."""
    x, *weights = m.randn(*lead, k), *(m.randn(n, k, std=max(k, 1) ** -0.5) for _ in range(2))
    vectors = [m.randn(n) if given else None for given in biases]
    if mask is None:
        return [x, *weights, *vectors], kwargs
    branches = [R.affine(R.up(x), R.up(w), R.up(b)) for w, b in zip(weights, vectors, strict=True)]
    z = m.saved(torch.cat(branches, -1))
    return [m.randn(*lead, n), x, *weights, z], {**kwargs, "output_mask": list(mask)}


@builder
def experts_call(m: Maker, tokens, h, n, experts, k, biases=False, mask=None, **kwargs) -> Call:
    """A call of experts; with a mask the call of the backward op."""
    width = 2 * n if "glu" in kwargs.get("gate", "swiglu") else n
    x, weight = m.randn(tokens, h), m.randn(tokens, k)
    gate_up, down = m.randn(experts, width, h, std=h**-0.5), m.randn(experts, h, n)
    if kwargs.get("transposed"):
        gate_up, down = gate_up.mT.contiguous(), down.mT.contiguous()
    scores = torch.rand(tokens, experts, generator=m.generator)
    index = scores.topk(k).indices.to(m.device)
    vectors = [m.randn(experts, width), m.randn(experts, h)] if biases else []
    args = [x, gate_up, down, index, weight]
    if mask is None:
        return [*args, *vectors], kwargs
    given = map(R.up, (x, gate_up, index, vectors[0] if vectors else None))
    z = R.expert_z(*given, kwargs.get("transposed", False))
    return [m.randn(tokens, h), *args, m.saved(z), *vectors[1:]], {**kwargs, "output_mask": mask}


@builder
def grouped_call(m: Maker, rows, n, k, ends, bias=True, mask=None, **kwargs) -> Call:
    """A call of grouped_linear or grouped_gated_linear; with a mask that of the backward op."""
    width = 2 * n if "gate" in kwargs else n
    x, weight = m.randn(rows, k), m.randn(len(ends), width, k, std=max(k, 1) ** -0.5)
    offsets = torch.tensor(ends, dtype=torch.int32, device=m.device)
    vectors = [m.randn(len(ends), width)] if bias else []
    if mask is None:
        return [x, weight, offsets, *vectors], kwargs
    z = R.grouped_z(*map(R.up, (x, weight, offsets, *vectors)))
    activation = kwargs.get("activation", "")
    saved = R.activate(z, "relu") if activation == "relu" else z
    args = [m.randn(rows, n), x, weight, offsets]
    preact = [] if activation == "none" else [m.saved(saved)]
    return [*args, *preact], {**kwargs, "output_mask": mask}


@builder
def mlp_call(m: Maker, lead, n, k, p, biases=(True, True, True), mask=None, **kwargs) -> Call:
    """A call of gated_mlp; with a mask the call of the backward op."""
    (x, *weights), _ = pair_call(lead, n, k, (False, False))(m)
    weights = [*weights[:2], m.randn(p, n, std=max(n, 1) ** -0.5)]
    sizes = zip((n, n, p), biases, strict=True)
    vectors = [m.randn(size) if given else None for size, given in sizes]
    if mask is None:
        return [x, *weights, *vectors], kwargs
    given = [R.up(t) for t in (x, *weights[:2], *vectors[:2])]
    branches = [R.affine(given[0], w, b) for w, b in zip(given[1:3], given[3:], strict=True)]
    z = m.saved(torch.cat(branches, -1))
    return [m.randn(*lead, p), x, *weights, z], {**kwargs, "output_mask": list(mask)}


@builder
def rotary_call(
    m: Maker, b, h, hk, s, d, rotary_dim, *lead: int, wide=False, mask=None, **kwargs
) -> Call:
    """q and k, and tables (*lead, s, rotary_dim) of independent values, in fp32 if wide; with a
    mask the call of the backward op.
    """
    tables = [R.up(m.randn(*lead, s, rotary_dim)) for _ in range(2)]
    args = [m.randn(b, h, s, d), m.randn(b, hk, s, d), *(m.saved(t, wide) for t in tables)]
    return args, kwargs if mask is None else {**kwargs, "output_mask": list(mask)}


@builder
def conv1d_call(m: Maker, batch, channels, seqlen, width, *given: str, mask=None, **kwargs) -> Call:
    """The optional tensors that are `given`; with a mask the call of the backward op."""
    dy = [m.randn(batch, channels, seqlen)] * (mask is not None)
    args = [m.randn(batch, channels, seqlen), m.randn(channels, width)]
    args.append(m.randn(channels) if "bias" in given else None)
    args.append(m.randn(batch, channels, width - 1) if "state" in given else None)
    return [*dy, *args], kwargs if mask is None else {**kwargs, "output_mask": list(mask)}


@builder
def bmm_call(m: Maker, batches, m_size, n, k, mask=None) -> Call:
    """`batches` of a and b; with a mask the call of the backward op."""
    a, b = m.randn(batches[0], m_size, k), m.randn(batches[1], k, n)
    if mask is None:
        return [a, b], {}
    batch = batches[1] if batches[0] == 1 else batches[0]
    return [m.randn(batch, m_size, n), a, b], {"output_mask": list(mask)}


@builder
def scalar_attention_call(m: Maker, n: int) -> Call:
    return [m.randn(n), m.randn(n), m.randn(n)], {}


@builder
def scalar_attention_backward_call(m: Maker, n: int, mask: Sequence[bool]) -> Call:
    qkv, _ = scalar_attention_call(n)(m)
    q, k, v = map(R.up, qkv)
    scores = q[:, None] * k
    largest = scores.amax(-1, keepdim=True) if n else scores
    total = torch.exp(scores - largest).sum(-1)
    saved = [m.saved(t, stat=True) for t in (R.scalar_attention(q, k, v), total)]
    return [m.randn(n), *qkv, *saved], {"output_mask": list(mask)}


@builder
def conv2d_call(m: Maker, shape, kernel, mask=None) -> Call:
    """With a mask the call of the backward op."""
    args = [m.randn(*shape), m.randn(*kernel)]
    if mask is None:
        return args, {}
    return [m.randn(*shape), *args], {"output_mask": list(mask)}


def int4_weight(m: Maker, n: int, k: int, groups: int) -> list[Tensor]:
    """qweight and zero of any bits, scale near the size that keeps results near 1."""

    def words(rows: int, count: int) -> Tensor:
        w = torch.randint(-(2**31), 2**31, (rows, count), generator=m.generator)
        return w.to(torch.int32).to(m.device)

    scale = m.randn(n, groups, mean=0.3, std=0.05) * max(k, 1) ** -0.5
    return [words(n, k // 8), scale, words(n, (groups + 7) // 8)]


@builder
def int4_call(m: Maker, lead, n, k, groups, bias=True) -> Call:
    return [m.randn(*lead, k), *int4_weight(m, n, k, groups), m.randn(n) if bias else None], {}


@builder
def int4_backward_call(m: Maker, lead, n, k, groups, bias=True) -> Call:
    return [m.randn(*lead, n), *int4_weight(m, n, k, groups)], {}


@builder
def int4_repack_call(m: Maker, lead, n, k, groups, bias=True) -> Call:
    return int4_weight(m, n, k, groups), {}


def int4_repacked(m: Maker, *weight: Tensor) -> list[Tensor]:
    packed, scale, zero = R.int4_repack(*weight)
    words = [t.to(torch.int32).to(m.device) for t in (packed, zero)]
    return [words[0], m.saved(scale), words[1]]


@builder
def int4_repacked_call(m: Maker, lead, n, k, groups, bias=True) -> Call:
    (x, *weight, shift), _ = int4_call(lead, n, k, groups, bias)(m)
    return [x, *int4_repacked(m, *weight), shift], {"out_features": n}


@builder
def int4_repacked_backward_call(m: Maker, lead, n, k, groups, bias=True) -> Call:
    (dy, *weight), _ = int4_backward_call(lead, n, k, groups)(m)
    return [dy, *int4_repacked(m, *weight)], {"in_features": k}


# The calls that take a weight of 4 bits, by op.
INT4_CALLS = (
    ("int4_linear", int4_call),
    ("int4_linear_backward", int4_backward_call),
    ("int4_repack", int4_repack_call),
    ("int4_linear_repacked", int4_repacked_call),
    ("int4_linear_repacked_backward", int4_repacked_backward_call),
)


@builder
def int4_codes_call(m: Maker, *shape: int) -> Call:
    codes = torch.randint(0, 16, shape, generator=m.generator, dtype=torch.uint8)
    return [codes.to(m.device)], {}


@builder
def int4_unpack_call(m: Maker, *shape: int) -> Call:
    (codes,), _ = int4_codes_call(*shape)(m)
    return [R.int4_words(codes).to(torch.int32).to(m.device), shape[-1]], {}


@builder
def add_scalar_call(m: Maker, value: float, *shape: int) -> Call:
    return [m.randn(*shape), value], {}


@builder
def outer_call(m: Maker, rows: int, cols: int) -> Call:
    return [m.randn(cols), m.randn(rows)], {}


@builder
def mul_relu_call(m: Maker, rows: int, cols: int) -> Call:
    return [m.randn(rows, cols), m.randn(rows)], {}


@builder
def with_dz(m: Maker, forward: Builder, rows: int, cols: int, inputs: int = 2) -> Call:
    """The call of the backward op: dz, then as many of the forward op's arguments."""
    return [m.randn(rows, cols), *forward(m)[0][:inputs]], {}


Masked = tuple[Builder, Sequence[bool]]
Case = tuple[tuple[Any, ...], dict[str, Any], Sequence[bool]]  # sizes, options, output_mask


def bits(text: str) -> list[bool]:
    return [c == "1" for c in text]


class Calls(dict[str, dict[str, Builder]]):
    """The builders of calls by op and name."""

    def add(self, op: str, **named: Builder) -> None:
        self.setdefault(op, {}).update(named)

    def add_both(self, op: str, **named: Builder) -> None:
        """An op and its _forward."""
        for end in ("", "_forward"):
            self.add(op + end, **named)

    def add_three(self, op: str, calls: dict[str, Masked], backward: Callable[..., Builder]):
        """An op, its _forward, and its _backward: that of a call and an output_mask."""
        self.add_both(op, **{n: call for n, (call, _) in calls.items()})
        self.add(op + "_backward", **{n: backward(*masked) for n, masked in calls.items()})

    def add_masked(
        self, build: Callable[..., Builder], cases: dict[str, Case], op: str, *ends: str
    ):
        """An op of each end, and its _backward, from a builder with a mask."""
        for name, (sizes, options, mask) in cases.items():
            for end in ends:
                self.add(op + end, **{name: build(*sizes, **options)})
            self.add(op + "_backward", **{name: build(*sizes, **options, mask=mask)})

    def add_matrices(self, name: str, rows: int, cols: int):
        """The ops of a matrix and vectors, and their _backward."""
        outer, scaled = outer_call(rows, cols), mul_relu_call(rows, cols)
        for op, call, inputs in (
            ("outer_add", outer, 0),
            ("outer_mul_relu", outer, 2),
            ("mul_relu", scaled, 2),
        ):
            self.add(op, **{name: call})
            self.add(op + "_backward", **{name: with_dz(call, rows, cols, inputs)})


def every_gradient(count: int, cases: dict[str, tuple[Any, dict[str, Any]]]) -> dict[str, Case]:
    """The cases with an output_mask of so many gradients."""
    return {name: (*case, [True] * count) for name, case in cases.items()}


def _listed() -> Calls:
    calls = Calls()
    add, add_both = calls.add, calls.add_both
    shapes = {"vector": (7,), "matrix": (3, 5), "rank4": (2, 1, 3, 4), "one": (2, 1)}
    shapes |= {"empty": (0, 4), "long": (2, 33)}
    add("softmax", **{n: softmax_call(*s) for n, s in shapes.items()})
    add("softmax_backward", **{n: softmax_backward_call(*s) for n, s in shapes.items()})

    causal: dict[str, tuple[Sequence[int], dict[str, Any]]] = {
        "plain": ((4, 4), {}),
        "padded": ((3, 2, 4, 4), {"pads": (0, 1, 4)}),
        "scaled": ((2, 3, 5), {"scale": -0.3}),
        "tall": ((2, 2, 5, 2), {"pads": (1, 0)}),
        "rank5": ((2, 1, 2, 3, 4), {"pads": (2, -1), "scale": 0.5}),
        "empty": ((2, 2, 0, 3), {"pads": (1, 0)}),
    }
    add("causal_softmax", **{n: causal_call(s, **k) for n, (s, k) in causal.items()})
    add(
        "causal_softmax_backward",
        **{n: causal_backward_call(s, **k) for n, (s, k) in causal.items()},
    )

    matmul = {
        "plain": softmax_matmul_call(2, 2, 3, 4, 5),
        "causal": softmax_matmul_call(1, 2, 4, 4, 3, causal=True),
        "padded": softmax_matmul_call(3, 1, 3, 5, 2, pads=(0, 2, 5), scale=0.7),
        "causal_padded": softmax_matmul_call(2, 1, 3, 5, 2, pads=(3, 7), causal=True, scale=0.5),
        "tall": softmax_matmul_call(2, 1, 5, 2, 3, pads=(1, -3), causal=True),
        "empty": softmax_matmul_call(2, 1, 3, 0, 2),
    }
    attention = {
        "plain": attention_call(1, 2, 2, 3, 4, 5, 2),
        "causal": attention_call(2, 2, 2, 4, 4, 2, 2, causal=True),
        "padded": attention_call(3, 1, 1, 3, 5, 2, 3, pads=(0, 2, 5), scale=0.7),
        "causal_padded": attention_call(2, 2, 1, 3, 5, 2, 3, pads=(3, 7), causal=True, scale=0.5),
        "grouped": attention_call(1, 4, 2, 2, 3, 2, 2, causal=True),
        "tall": attention_call(2, 1, 1, 5, 2, 3, 2, pads=(1, -3), causal=True),
        "empty": attention_call(2, 1, 1, 3, 0, 2, 2),
        "dropout": attention_call(2, 4, 2, 3, 11, 2, 3, causal=True, dropout_p=0.4),
        "bias": attention_call(2, 4, 2, 3, 5, 2, 3, causal=True, bias=(1, 4, 1)),
        "alibi": attention_call(2, 4, 2, 3, 5, 2, 3, causal=True, alibi=True),
        "bias_of_rows": attention_call(2, 2, 1, 3, 5, 2, 3, bias=(2, 1, 3)),
    }
    for op, given, inputs, ref in (
        ("softmax_matmul", matmul, 2, R.softmax_matmul_forward),
        ("attention", attention, 3, R.attention_forward),
    ):
        add_both(op, **given)
        add(op + "_backward", **{n: with_saved(c, inputs, ref) for n, c in given.items()})
    add("attention_with_lse", **attention)

    masks = tuple(map(bits, ("111", "101", "010", "000")))
    layers: dict[str, dict[str, Masked]] = {}
    layers["linear"] = {
        "plain": (layer_call((3,), 4, 5), masks[0]),
        "no_bias": (layer_call((2, 3), 4, 2, bias=False), masks[1]),
        "vector": (layer_call((), 3, 4, activation="gelu"), masks[0]),
        "relu": (layer_call((4,), 3, 2, activation="relu"), masks[0]),
        "gelu_tanh": (layer_call((2, 2), 3, 5, activation="gelu_tanh"), masks[2]),
        "silu": (layer_call((3,), 1, 4, activation="silu"), masks[0]),
        "empty": (layer_call((0,), 3, 4, activation="gelu"), masks[3]),
    }

    every = {"label_smoothing": 0.1, "softcap": 3.0, "z_loss": 0.1, "temperature": 0.7}
    losses: dict[str, Masked] = {
        "plain": (loss_call((4,), 7, 5, reduction="none", ignored=1), masks[0]),
        "mean": (loss_call((2, 3), 5, 4, ignored=2), masks[0]),
        "sum": (loss_call((3,), 6, 3, bias=False, reduction="sum", softcap=2.0), masks[1]),
        "shift": (loss_call((2, 4), 5, 3, shift=1, ignored=3, z_loss=0.2), masks[0]),
        "options": (loss_call((2, 2, 2), 5, 4, reduction="none", shift=1, **every), masks[2]),
        "nothing": (loss_call((4,), 9, 3, keep="nothing", **every), masks[0]),
        "vector": (loss_call((), 5, 4, label_smoothing=0.3), masks[0]),
        "one_class": (loss_call((3,), 1, 4, ignore_index=-1), masks[0]),
        "empty": (loss_call((0,), 5, 4, reduction="sum"), masks[3]),
    }
    name = "linear_cross_entropy"
    add(name, **{n: c for n, (c, _) in losses.items()})
    add(name + "_forward", **{n: without(c, "keep") for n, (c, _) in losses.items()})
    add(
        name + "_backward",
        **{n: cross_entropy_backward_call(c, mask) for n, (c, mask) in losses.items()},
    )
    add(
        name + "_gradients_forward",
        **{
            n: without(c, "keep", "reduction", reduction="sum", output_mask=list(mask))
            for n, (c, mask) in losses.items()
        },
    )
    add(
        name + "_gradients_backward",
        plain=scaled_gradients_call((3,), 4, 5, masks[0]),
        rows=scaled_gradients_call((2, 3), 4, 2, masks[1]),
        weight=scaled_gradients_call((2,), 3, 4, masks[2]),
        vector=scaled_gradients_call((), 3, 4, masks[0]),
        empty=scaled_gradients_call((0,), 3, 4, masks[0]),
    )
    refused = {n: "label_smoothing" if n == "options" else "softcap" for n in losses}
    add(
        name + "_exponentials_forward",
        **{n: without(c, "keep", refused[n]) for n, (c, _) in losses.items()},
        auto=without(losses["plain"][0], keep="auto"),
        mean_of_z=without(losses["options"][0], "softcap", mean=True),
        mean_alone=without(losses["options"][0], keep="nothing", mean=True),
    )
    add(
        name + "_exponentials_backward",
        **{n: exponentials_backward_call(c, mask) for n, (c, mask) in losses.items()},
    )
    logits = {
        "plain": logits_call((4,), 7, reduction="none", ignored=1),
        "mean": logits_call((2, 3), 5, ignored=2),
        "sum": logits_call((3,), 6, reduction="sum", softcap=2.0),
        "shift": logits_call((2, 4), 5, shift=1, ignored=3, z_loss=0.2),
        "options": logits_call((2, 2, 2), 5, reduction="none", shift=1, **every),
        "vector": logits_call((), 5, label_smoothing=0.3),
        "one_class": logits_call((3,), 1, ignore_index=-1),
        "empty": logits_call((0,), 5, reduction="sum"),
    }
    name = "cross_entropy"
    add_both(name, **logits)
    add(name + "_backward", **{n: logits_backward_call(c) for n, c in logits.items()})
    add(
        name + "_gradients_forward",
        **{n: without(c, "reduction", reduction="sum") for n, c in logits.items()},
    )
    add(
        name + "_gradients_backward",
        plain=scaled_logits_call(3, 5),
        rows=scaled_logits_call(2, 3, 4),
        vector=scaled_logits_call(5),
        one_class=scaled_logits_call(3, 1),
        empty=scaled_logits_call(0, 4),
    )
    logprobs: dict[str, Masked] = {
        "plain": (loss_call((4,), 7, 5), masks[0]),
        "entropy": (loss_call((2, 3), 5, 4, entropy=True), masks[0]),
        "options": (loss_call((3,), 6, 3, temperature=0.7, softcap=2.0, entropy=True), masks[2]),
        "no_bias": (loss_call((2, 2), 4, 3, bias=False, temperature=1.5), masks[1]),
        "vector": (loss_call((), 5, 4, entropy=True), masks[0]),
        "one_class": (loss_call((3,), 1, 4), masks[0]),
        "empty": (loss_call((0, 2), 5, 4, entropy=True), masks[3]),
    }
    calls.add_three("linear_token_logprobs", logprobs, logprobs_backward_call)

    def wide(short: Sequence[bool], extra: int) -> list[bool]:
        return [*short, *([True, False, True][:extra] if short[0] else [False] * extra)]

    for kind, extra in (("layer_norm_linear", 2), ("rms_norm_linear", 1)):
        full = [True] * extra
        last = [False, True][-extra:]
        layers[kind] = {
            "plain": (layer_call((3,), 4, 5, *full), [True] * (3 + extra)),
            "bare": (layer_call((2, 2), 3, 4, *[False] * extra, bias=False), wide(masks[1], extra)),
            "one_parameter": (layer_call((3,), 2, 4, *last, eps=0.1), [True] * (3 + extra)),
            "relu": (layer_call((4,), 3, 5, *full, activation="relu"), wide(masks[0], extra)),
            "vector": (layer_call((), 3, 6, *full, activation="gelu"), [True] * (3 + extra)),
            "gelu_tanh": (
                layer_call((2, 1, 2), 3, 4, *full, activation="gelu_tanh"),
                wide(masks[2], extra),
            ),
            "silu": (layer_call((3,), 3, 4, *full, activation="silu"), [True] * (3 + extra)),
            "empty": (layer_call((0, 2), 3, 4, *full), wide(masks[3], extra)),
        }
    layers["rms_norm_linear"]["offset"] = (
        layer_call((5,), 3, 6, True, activation="silu", weight_offset=1.0),
        [True] * 4,
    )
    first = {"gate_first": True}
    gated_norms: dict[str, Case] = {
        "plain": (((3,), 5), {}, bits("111")),
        "first": (((2, 2), 6), first | {"eps": 0.1}, bits("111")),
        "bare": (((2,), 4, False), {}, bits("110")),
        "vector": (((), 6), first, bits("011")),
        "empty": (((0, 2), 4), first, bits("101")),
    }
    calls.add_masked(gated_norm_call, gated_norms, "rms_norm_gated", "", "_forward")
    for op in ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"):
        centred = op.endswith("layer_norm")
        full, none = [True] * (1 + centred), [False] * (1 + centred)
        offset = {} if centred else {"weight_offset": 1.0}
        norms: dict[str, Masked] = {
            "plain": (norm_call(op, (3,), 5, *full), [True, *full]),
            "bare": (norm_call(op, (2, 2), 4), [True, *none]),
            "offset": (norm_call(op, (2,), 6, *full, eps=0.1, **offset), [True, *none]),
            "vector": (norm_call(op, (), 6, *full), [False, *full]),
            "empty": (norm_call(op, (0, 2), 4, *full), [True, *full]),
        }
        if centred:
            norms["bias"] = (norm_call(op, (3,), 4, False, True), [True, False, True])
        add_both(op, **{n: c for n, (c, _) in norms.items()})
        add(
            op + "_backward",
            **{n: norm_backward_call(op, c, mask, n != "bare") for n, (c, mask) in norms.items()},
        )
    for kind, given in layers.items():
        calls.add_three(kind, given, functools.partial(layer_backward_call, kind))

    add(
        "fold_layer_norm",
        full=fold_call(3, 4, True, True, True),
        bare=fold_call(3, 4, False, False, False),
        scale=fold_call(2, 5, False, True, False),
        shift=fold_call(2, 5, False, False, True),
        bias=fold_call(1, 3, True, False, False),
        empty=fold_call(3, 0, True, True, True),
    )
    for op, backward in (
        ("folded_layer_norm_linear", False),
        ("folded_layer_norm_linear_backward", True),
    ):
        add(
            op,
            plain=folded_call((3,), 4, 5, backward=backward),
            no_bias=folded_call((2, 2), 3, 4, bias=False, backward=backward, eps=0.1),
            relu=folded_call((4,), 3, 5, backward=backward, activation="relu"),
            gelu=folded_call((), 3, 6, backward=backward, activation="gelu"),
            gelu_tanh=folded_call((3,), 2, 4, backward=backward, activation="gelu_tanh"),
            silu=folded_call((2, 1, 2), 2, 4, backward=backward, activation="silu"),
            empty=folded_call((0,), 3, 4, backward=backward),
        )

    for i, gate in enumerate(R.GATES):
        interleaved, bias = i % 2 == 1, i != 2
        lead = [(3,), (), (2, 2), (4,), (1, 3)][i]
        forward = layer_call(lead, 4, 5, bias=bias, gate=gate, interleaved=interleaved)
        add_both("gated_linear", **{gate: forward})
        mask = masks[min(i, 2)]
        build = gated_backward_call(lead, 2, 5, mask, gate=gate, interleaved=interleaved)
        add("gated_linear_backward", **{gate: build})
    lengths = {"plain": 7, "one": 1, "two": 2, "some": 33, "empty": 0}
    add_both("scalar_attention", **{n: scalar_attention_call(s) for n, s in lengths.items()})
    wanted = ([True] * 3, masks[1], [False, True, True], [False, False, True], masks[3])
    builds = map(scalar_attention_backward_call, lengths.values(), wanted)
    add("scalar_attention_backward", **dict(zip(lengths, builds, strict=True)))

    products: dict[str, Case] = {
        "plain": (((3, 3), 4, 5, 2), {}, bits("11")),
        "one_a": (((1, 3), 2, 3, 4), {}, bits("11")),
        "one_b": (((3, 1), 2, 3, 4), {}, bits("11")),
        "one": (((1, 1), 3, 1, 5), {}, bits("10")),
        "only_b": (((2, 2), 1, 3, 2), {}, bits("01")),
        "no_k": (((2, 1), 2, 3, 0), {}, bits("11")),
        "empty": (((0, 1), 2, 3, 4), {}, bits("00")),
    }
    calls.add_masked(bmm_call, products, "bmm", "")

    rotaries: dict[str, Case] = {
        "plain": ((2, 4, 2, 5, 6, 6), {}, bits("11")),
        "batch": ((3, 2, 1, 4, 4, 4, 3), {}, bits("10")),
        "partial": ((2, 1, 3, 3, 7, 4, 1), {"wide": True}, bits("01")),
        "interleaved": ((2, 2, 2, 3, 8, 6), {"interleaved": True}, bits("11")),
        "one": ((1, 1, 1, 1, 2, 2, 1), {}, bits("11")),
        "chunks": ((1, 5, 1, 2, 40, 32), {}, bits("11")),
        "empty": ((2, 2, 1, 0, 4, 4), {}, bits("00")),
    }
    calls.add_masked(rotary_call, rotaries, "rotary", "")

    convolutions: dict[str, Case] = {
        "plain": ((2, 5, 7, 4, "bias"), {}, bits("1110")),
        "silu": ((2, 8, 5, 3, "bias"), {"activation": "silu"}, bits("1110")),
        "state": ((3, 4, 2, 4, "bias", "state"), {"activation": "silu"}, bits("1111")),
        "bare": ((2, 4, 6, 2), {}, bits("1100")),
        "one": ((1, 4, 1, 4, "state"), {}, bits("0101")),
        "empty": ((2, 4, 0, 3, "bias", "state"), {}, bits("1111")),
    }
    calls.add_masked(conv1d_call, convolutions, "causal_conv1d", "")

    sums = {"matrix": (3, 5), "vector": (7,), "rank4": (2, 1, 3, 4), "one": (2, 1), "empty": (0, 4)}
    sums["no_columns"] = (2, 0)
    add("row_sum", **{n: softmax_call(*s) for n, s in sums.items()})

    add("add_scalar", **{n: add_scalar_call(0.75 - i, *s) for i, (n, s) in enumerate(sums.items())})
    matrices = {"plain": (3, 5), "tall": (9, 2), "one": (1, 1), "wide": (2, 17)}
    matrices |= {"no_rows": (0, 4), "no_columns": (3, 0)}
    for name, shape in matrices.items():
        calls.add_matrices(name, *shape)

    images: dict[str, Case] = {
        "plain": (((2, 4, 5), (3, 2)), {}, bits("11")),
        "square": (((1, 8, 4), (3, 3)), {}, bits("10")),
        "wide": (((2, 2, 3), (4, 5)), {}, bits("01")),
        "one": (((3, 2, 2), (1, 1)), {}, bits("00")),
        "empty": (((0, 3, 4), (2, 2)), {}, bits("11")),
    }
    calls.add_masked(conv2d_call, images, "conv2d", "")

    int4 = {
        "plain": ((3,), 4, 16, 2),
        "no_bias": ((2, 3), 3, 8, 1, False),
        "vector": ((), 17, 72, 3),
        "whole_chunks": ((2,), 5, 128, 2),
        "many_groups": ((1, 2), 2, 72, 9),
        "no_k": ((2,), 3, 0, 0),
        "empty": ((0,), 3, 16, 1),
    }
    for op, build in INT4_CALLS:
        add(op, **{n: build(*sizes) for n, sizes in int4.items()})
    codes = {"plain": (3, 16), "vector": (5,), "rank3": (2, 1, 9), "one": (1, 1), "empty": (0, 7)}
    add("int4_pack", **{n: int4_codes_call(*s) for n, s in codes.items()})
    add("int4_unpack", **{n: int4_unpack_call(*s) for n, s in codes.items()})

    add_both("gated_linear", empty=layer_call((0,), 4, 3))
    add("gated_linear_backward", empty=gated_backward_call((0,), 2, 3, masks[0]))
    gates: dict[str, Case] = {
        "plain": ((3, 5), {}, bits("11")),
        "vector": ((4,), {"gate": "geglu"}, bits("10")),
        "rank3": ((2, 1, 9), {"gate": "geglu_tanh"}, bits("01")),
        "reglu": ((2, 8), {"gate": "reglu"}, bits("11")),
        "sigmoid_tanh": ((3, 16), {"gate": "sigmoid_tanh"}, bits("11")),
        "empty": ((0, 3), {}, bits("11")),
    }
    calls.add_masked(gate_call, gates, "gated_activation", "")
    pairs: dict[str, Case] = {
        "plain": (((3,), 4, 5), {}, bits("11111")),
        "bare": (((2, 2), 3, 4, (False, False)), {"gate": "geglu"}, bits("10101")),
        "left_bias": (((4,), 2, 3, (True, False)), {"gate": "reglu"}, bits("01110")),
        "right_bias": (((), 3, 6, (False, True)), {"gate": "geglu_tanh"}, bits("11111")),
        "sigmoid_tanh": (((1, 3), 4, 2), {"gate": "sigmoid_tanh"}, bits("11000")),
        "empty": (((0, 2), 3, 4), {}, bits("11111")),
    }
    calls.add_masked(pair_call, pairs, "gated_linear_pair", "", "_forward")
    mlps: dict[str, Case] = {
        "plain": (((3,), 4, 5, 6), {}, bits("1111111")),
        "bare": (((2, 2), 3, 4, 2, bits("000")), {"gate": "geglu"}, bits("1010101")),
        "left_bias": (((4,), 2, 3, 5, bits("100")), {"gate": "reglu"}, bits("0111100")),
        "down_bias": (((), 3, 6, 1, bits("011")), {"gate": "geglu_tanh"}, bits("0001001")),
        "sigmoid_tanh": (((1, 3), 4, 2, 3), {"gate": "sigmoid_tanh"}, bits("1100000")),
        "empty": (((0, 2), 3, 4, 2), {}, bits("1111111")),
    }
    calls.add_masked(mlp_call, mlps, "gated_mlp", "", "_forward")
    woven = {"interleaved": True, "transposed": True, "biases": True, "gate": "geglu"}
    limited = {"biases": True, "alpha": 1.7, "limit": 1.5}
    expert_calls: dict[str, Case] = {
        "plain": ((5, 3, 2, 3, 2), {}, bits("111111")),
        "bias": ((5, 2, 3, 2, 1), limited, bits("111111")),
        "interleaved": ((3, 2, 2, 4, 2), woven, bits("101101")),
        "bare": ((3, 4, 1, 2, 2), {"gate": "relu_squared"}, bits("010010")),
        "one_token": ((1, 3, 2, 5, 3), {"gate": "geglu_tanh"}, bits("100100")),
        "empty": ((0, 3, 2, 2, 2), {}, bits("111111")),
    }
    calls.add_masked(experts_call, expert_calls, "experts", "", "_forward")
    groups = {
        "plain": ((7, 3, 5, (2, 2, 6)), {}),
        "beyond": ((7, 4, 8, (-1, 4, 3, 9)), {}),  # the offsets are clamped
        "no_bias": ((5, 2, 3, (5, 5)), {"bias": False}),
        "bias": ((4, 2, 4, (1, 3)), {}),
        "empty": ((0, 3, 2, (0, 0)), {}),
    }
    kinds = (
        ("grouped_linear", "activation", ("none", "silu", "gelu", "relu_squared", "gelu_tanh")),
        ("grouped_gated_linear", "gate", R.GATES),
    )
    for op, option, values in kinds:
        cases: dict[str, Case] = {}
        for (name, (sizes, options)), value, mask in zip(
            groups.items(), values, (*masks, bits("111")), strict=True
        ):
            cases[name] = sizes, {**options, option: value}, mask
            if option == "gate":
                cases[name][1]["interleaved"] = name != "plain"
        calls.add_masked(grouped_call, cases, op, "", "_forward")
    return calls


SAMPLES = {op: [Sample(op, *item) for item in named.items()] for op, named in _listed().items()}
# Ops with lists of tensors: test_norm_linears.py has their samples and checks their contract.
OPS_OF_LISTS = tuple(op for op in ops_of_library() if public_op(op) in LISTS)
PUBLIC = tuple(op for op in SAMPLES if public_op(op) == op)


def _differentiable(op: str) -> tuple[int, ...]:
    """Positions of the arguments that receive a gradient of the first result."""
    if op in TWICE_DIFFERENTIABLE or op == "rotary":  # test_rotary.py has the gradient of k
        return (0,)
    backward = public_op(op).removesuffix("_with_lse") + "_backward"
    forward_alone = op.endswith("_forward") and public_op(op) in FORWARD_WITHOUT_GRADIENT
    if op == backward or backward not in SAMPLES or forward_alone:
        return ()
    names = [a.name for a in call(op).default._schema.arguments if not a.kwarg_only]
    gradients = {
        r.name.removeprefix("d") or names[0] for r in call(backward).default._schema.returns
    }
    if "residual" in names:  # its gradient is that of x
        gradients.add("residual")
    return tuple(i for i, name in enumerate(names) if name in gradients)


DIFFERENTIABLE = {op: positions for op in SAMPLES if (positions := _differentiable(op))}
AUTOCAST = tuple(op for op in DIFFERENTIABLE if public_op(op) not in KEEPS_DTYPE)


def sample(op: str, name: str) -> Sample:
    return next(s for s in SAMPLES[op] if s.name == name)


def has_kernel(device: str) -> bool:
    """False on a GPU where the build has no CUDA kernels; otherwise every op has one."""
    return device == "cpu" or build_facts()["cuda"] is not None


def need_kernel(op: str, device: str) -> None:
    """Skip with a reason if a CPU-only build lacks the kernel."""
    if not has_kernel(device):
        pytest.skip(f"torchweld::{op} has no {device} kernel in this build")


def each_call(
    calls: Iterable[Any], op_of: Callable[[Any], str] = lambda s: s.op
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs a test `(call, ...)` with each call, such as a Sample: those of an op in one case.

    A case of pytest takes 5 ms beside its body. The call that fails is printed last.
    """
    of_ops: dict[str, list[Any]] = {}
    for each in calls:
        of_ops.setdefault(op_of(each), []).append(each)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def run(op: str, **fixtures: Any) -> None:
            for each in of_ops[op]:
                print(getattr(each, "id", each))
                test(each, **fixtures)

        op, *fixtures = inspect.signature(test).parameters.values()
        functools.update_wrapper(run, test)
        run.__signature__ = inspect.Signature([op.replace(name="op"), *fixtures])
        return pytest.mark.parametrize("op", of_ops)(run)

    return decorate


# Running an op through the rules of numerics


def trained(leaves: Sequence[Any]) -> list[Tensor]:
    """The tensors that require a gradient."""
    return [a for a in leaves if isinstance(a, Tensor) and a.requires_grad]


def requiring(op: str, args: Sequence[Any], wanted: Sequence[int] | None = None) -> list[Any]:
    """Fresh leaves: the differentiable arguments require a gradient, the strides stay."""
    wanted = DIFFERENTIABLE.get(op, ()) if wanted is None else wanted
    return [
        a.detach().requires_grad_() if i in wanted and isinstance(a, Tensor) else a
        for i, a in enumerate(args)
    ]


def forward_backward(op, args, kwargs, dout: Tensor | None = None):
    """The first output and the gradients of the arguments (None if not differentiable)."""
    leaves = requiring(op, args)
    out = as_tuple(call(op)(*leaves, **kwargs))[0]
    dout = torch.ones_like(out) if dout is None else dout
    grads = iter(torch.autograd.grad(out, trained(leaves), dout))
    return out.detach(), [
        next(grads) if isinstance(a, Tensor) and a.requires_grad else None for a in leaves
    ]


def with_defaults(op: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a call, with the op's defaults of those that are not given."""
    arguments = call(op).default._schema.arguments
    return {a.name: a.default_value for a in arguments if a.kwarg_only} | kwargs


def check_op(
    op: str,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    dout: Tensor | None = None,
    backward: bool = True,
    eager: bool = True,
) -> None:
    """Judge result and gradients of a public op against float64, with eager as the yardstick."""
    kwargs = kwargs or {}
    device = next(a for a in args if isinstance(a, Tensor)).device.type
    eager_kwargs = with_defaults(op, kwargs)
    eager_leaves = requiring(op, args)
    yardstick = R.EAGER[op](*eager_leaves, **eager_kwargs) if eager else None
    if not backward:
        reference = REFERENCES[op](*args, **kwargs)[0]
        out = call(op)(*args, **kwargs)
        numerics.check(out, reference, label=op, eager=yardstick, device=device)
        return

    def drawn(result: numerics.Bound) -> Tensor:
        nonlocal dout
        if dout is None:
            shape = tuple(result.ref.shape)
            dout = torch.randn(shape, dtype=F64).to(result.dtype).to(device)
        return dout

    reference, *bounds = RESULT_AND_GRADIENTS[op](drawn, *args, **kwargs)
    out, grads = forward_backward(op, args, kwargs, dout)
    numerics.check(out, reference, label=op, eager=yardstick, device=device)
    inputs = trained(eager_leaves)
    eager_grads = iter(torch.autograd.grad(yardstick, inputs, dout) if eager else [None] * 9)
    names = [a.name for a in getattr(torch.ops.torchweld, op).default._schema.arguments]
    for i, grad in enumerate(grads):
        if grad is not None:
            label = f"{op} d{names[i]}"
            numerics.check(grad, bounds[i], label=label, eager=next(eager_grads), device=device)
