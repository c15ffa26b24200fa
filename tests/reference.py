"""The formulas of the ops, in float64, differentiable, each straight from its definition.

This file does not follow the kernels. Masks are an explicit boolean table; masked values are
replaced before they are used, so that they may be NaN. `eager_*` are the same functions as
a user of plain torch would write them, at the tensors' own dtype: the yardstick of numerics.check.

running.py calls these formulas with numbers that carry their rounding errors. `rounded` marks where
an op may round to the tensors' dtype, `saved` what it keeps for its gradient; a `@primitive` has an
error analysis of its own.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", "relu_squared")
GATES = ("sigmoid_tanh", "geglu", "geglu_tanh", "swiglu", "reglu")


def up(t: Any) -> Any:
    """A tensor off the autograd graph, on the default device, in float64 if it is floating.

    Anything else as it is.
    """
    if isinstance(t, Tensor):
        t = here(t.detach())
        return t.double() if t.is_floating_point() else t
    return t


def here(t: Tensor) -> Tensor:
    return t.to(torch.get_default_device())


def primitive(function: Callable[..., Any]) -> Callable[..., Any]:
    """The method of this name, if the first argument is no tensor."""

    @functools.wraps(function)
    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        own = function if isinstance(x, Tensor) else getattr(type(x), function.__name__)
        return own(x, *args, **kwargs)

    return call


@primitive
def rounded(t: Tensor, gradient: bool = True) -> Tensor:
    """t, which an op may round to the tensors' dtype, as it may its gradient."""
    return t


@primitive
def saved(t: Tensor, name: str) -> Tensor:
    """t, a result of the op's `_forward` of this name, which the backward may read."""
    return t


# Masks


def clamped_pads(leftpad: Tensor | None, batch: int, seqlen_k: int) -> list[int]:
    if leftpad is None:
        return [0] * batch
    return [min(max(int(pad), 0), seqlen_k) for pad in leftpad.tolist()]


def positions(batch: int, seqlen_q: int, seqlen_k: int, key_end: Tensor | None) -> Tensor:
    """(batch or 1, seqlen_q, 1): the positions of the query rows among the keys."""
    if key_end is not None and key_end.dim() == 2:
        return here(key_end).long().clamp(0, seqlen_k)[:, :, None] - 1
    end = torch.full((1, 1, 1), seqlen_k)
    if key_end is not None:
        end = here(key_end).long().clamp(0, seqlen_k).view(batch, 1, 1)
    # A key_end below seqlen_q is the length of a sequence that is padded on the right.
    offset = (end - seqlen_q).clamp(min=min(seqlen_k - seqlen_q, 0))
    return torch.arange(seqlen_q)[None, :, None] + offset


def alibi(slopes: Tensor, pos: Tensor, seqlen_k: int) -> Tensor:
    """(batch or 1, nheads, seqlen_q, seqlen_k): what ALiBi adds to the scaled scores."""
    distance = (pos - torch.arange(seqlen_k)).abs()[:, None]
    return -(slopes[:, None, None] * distance.double())


def visible(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    leftpad: Tensor | None,
    causal: bool,
    *,
    key_start: Tensor | None = None,
    key_end: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """(batch, seqlen_q, seqlen_k): does row i of sequence b see key j?"""
    pads = torch.tensor(clamped_pads(leftpad, batch, seqlen_k), dtype=torch.int64)[:, None, None]
    end = torch.full((batch, 1, 1), seqlen_k)
    if key_end is not None:
        end = here(key_end).long().clamp(0, seqlen_k).view(batch, -1, 1)
    pos = positions(batch, seqlen_q, seqlen_k, key_end)
    j = torch.arange(seqlen_k)[None, None, :]
    seen = (j >= pads) & (j < end) & torch.ones_like(pos, dtype=torch.bool)
    if causal:
        seen = seen & (j <= pos)
    if leftpad is not None:
        seen = seen & (pos >= pads)
    if key_start is not None:
        seen = seen & (j >= here(key_start)[:, :, None])
    if window is not None:
        seen = seen & (j > pos - window) & (j < pos + window)
    return seen


def padding_keys(batch: int, seqlen_k: int, leftpad: Tensor | None) -> Tensor:
    """(batch, seqlen_k): is key j padding?"""
    pads = torch.tensor(clamped_pads(leftpad, batch, seqlen_k), dtype=torch.int64)
    return torch.arange(seqlen_k)[None, :] < pads[:, None]


def padding_rows(batch: int, seqlen_q: int, seqlen_k: int, leftpad: Tensor | None) -> Tensor:
    """(batch, seqlen_q): is query row i padding?"""
    if leftpad is None:
        return torch.zeros(batch, seqlen_q, dtype=torch.bool)
    pads = torch.tensor(clamped_pads(leftpad, batch, seqlen_k), dtype=torch.int64)
    return torch.arange(seqlen_q)[None, :] + seqlen_k - seqlen_q < pads[:, None]


# Softmax and attention


@primitive
def softmax(x: Tensor, recomputed: bool = False) -> Tensor:
    """`recomputed`: the backward evaluates it again, else it reads the rounded result."""
    if x.numel() == 0:
        return x * 1.0
    e = torch.exp(x - x.detach().amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def softmax_and_lse(
    scores: Tensor,
    seen: Tensor,
    scale: float,
    softcap: float | None = None,
    sink: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax of scale * scores + bias over the keys seen; scores and seen broadcast to one shape.

    scores are (batch, ..., seqlen_q, seqlen_k), and sink has one logit for all dims between. A row
    that sees scores of -inf alone gives NaN.
    """
    seen = seen.expand(scores.shape)
    logits = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    if sink is not None:
        between = scores.shape[1:-2] if scores.dim() > 3 else ()
        logits = sink.to(scores.dtype).view(*between, 1, 1).expand(logits.shape)
    if scores.numel() == 0:
        return scores * 1.0, logits.squeeze(-1)
    z = cap(torch.where(seen, scores, 0.0) * scale, softcap)
    z = z if bias is None else z + bias
    z = torch.cat([torch.where(seen, z, -torch.inf), logits], -1)
    m = z.detach().amax(-1, keepdim=True)
    m = torch.where(m.isneginf() & ~seen.any(-1, keepdim=True), 0.0, m)
    e = torch.exp(z - m)
    total = e.sum(-1, keepdim=True)
    blind = total == 0
    p = torch.where(seen, e[..., :-1] / torch.where(blind, 1.0, total), 0.0)
    lse = m + torch.log(torch.where(blind, 1.0, total))
    return p, torch.where(blind, -torch.inf, lse).squeeze(-1)


@primitive
def attend(
    scores: Tensor,
    seen: Tensor,
    value: Tensor,
    scale: float,
    softcap: float | None,
    sink: Tensor | None,
    factors: Tensor | float = 1.0,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`factors`: those of dropout."""
    p, lse = softmax_and_lse(scores, seen, scale, softcap, sink, bias)
    return (p * factors) @ value, lse


def philox(counter: Sequence[Tensor | int], key: Sequence[int], rounds: int) -> list[Tensor]:
    """Philox 4x32 of Salmon et al., "Parallel random numbers", 2011, on int64 tensors."""
    low = 2**32 - 1
    a, b, c, d = counter
    k0, k1 = key

    def product(x: Tensor | int, factor: int) -> tuple[Tensor | int, Tensor | int]:
        """The high and the low word of a product, whose 64 bits int64 does not hold."""
        first, second = (x & 0xFFFF) * factor, (x >> 16) * factor
        middle = (first >> 16) + (second & 0xFFFF)
        high = (second >> 16) + (middle >> 16)
        return high & low, ((middle & 0xFFFF) << 16) | (first & 0xFFFF)

    for _ in range(rounds):
        (high_a, low_a), (high_c, low_c) = product(a, 0xD2511F53), product(c, 0xCD9E8D57)
        a, b, c, d = high_c ^ b ^ k0, low_c, high_a ^ d ^ k1, low_a
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return [a, b, c, d]


def dropout_factors(shape: Sequence[int], dropout_p: float, seed: Tensor | None) -> Tensor | float:
    """The factors of dropout of probabilities (batch, nheads, seqlen_q, seqlen_k)."""
    threshold = round(dropout_p * 2**16)
    if threshold == 0:
        return 1.0
    batch, nheads, seqlen_q, seqlen_k = shape
    heads = torch.arange(batch * nheads)[:, None, None]
    rows, keys = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)
    # A call has eight places: rows r and r + 8, keys k, k + 1, k + 8 and k + 9 of a square of 16.
    counter = (keys // 16 * 4 + keys % 8 // 2, rows // 16 * 8 + rows % 8, heads, 0)
    number = int(seed)
    words = philox(counter, (number & 2**32 - 1, number >> 32 & 2**32 - 1), 7)
    words = torch.stack([w.expand(batch * nheads, seqlen_q, seqlen_k) for w in words])
    place = rows // 8 % 2 * 2 + keys // 8 % 2
    word = words.gather(0, place.expand_as(words[0])[None])[0]
    bits = word >> keys % 2 * 16 & 0xFFFF
    kept = (bits >= threshold).view(batch, nheads, seqlen_q, seqlen_k)
    return kept.to(torch.float64) * (2**16 / max(1, 2**16 - threshold))


@primitive
def cap(z: Tensor, softcap: float | None) -> Tensor:
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def scores_mask(
    scores: Tensor, leftpad: Tensor | None = None, causal: bool = True, **mask: Any
) -> Tensor:
    """The table of `visible`, shaped to broadcast over (batch, ..., seqlen_q, seqlen_k)."""
    batch = scores.shape[0] if scores.dim() > 2 else 1
    seen = visible(batch, scores.shape[-2], scores.shape[-1], leftpad, causal, **mask)
    if scores.dim() == 2:
        return seen[0]
    return seen.view(batch, *[1] * (scores.dim() - 3), *scores.shape[-2:])


def causal_softmax(
    scores: Tensor,
    leftpad: Tensor | None = None,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    sink: Tensor | None = None,
    **mask: Any,
) -> Tensor:
    seen = scores_mask(scores, leftpad, **mask)
    return masked_softmax(scores, seen, scale, softcap, sink)


@primitive
def masked_softmax(scores, seen, scale, softcap, sink):
    return softmax_and_lse(scores, seen, scale, softcap, sink)[0]


def softmax_matmul_forward(
    scores, value, leftpad=None, *, causal=False, scale=1.0, softcap=None, sink=None, **mask
):
    seen = scores_mask(scores, leftpad, causal, **mask)
    value = torch.where(seen.any(2)[..., None], value, 0.0)
    return attend(scores, seen, value, scale, softcap, sink)


def default_scale(query: Tensor, scale: float | None) -> float:
    if scale is not None:
        return scale
    return query.shape[-1] ** -0.5 if query.shape[-1] else 1.0


def attention_forward(
    query, key, value, leftpad=None, *, causal=False, scale=None, softcap=None, sink=None,
    dropout_p=0.0, dropout_seed=None, bias=None, alibi_slopes=None, **mask,
):  # fmt: skip
    batch, nheads, seqlen_q, _ = query.shape
    nheads_k, seqlen_k = key.shape[1:3]
    heads = (nheads_k, nheads // nheads_k if nheads_k else 1)
    seen = visible(batch, seqlen_q, seqlen_k, leftpad, causal, **mask)[:, None]
    q, k, v = used(query, key, value, seen)
    scores = q.unflatten(1, heads) @ k[:, :, None].mT
    factors = dropout_factors((batch, nheads, seqlen_q, seqlen_k), dropout_p, dropout_seed)
    if isinstance(factors, Tensor):
        factors = factors.unflatten(1, heads)
    if alibi_slopes is not None:
        pos = positions(batch, seqlen_q, seqlen_k, mask.get("key_end"))
        bias = alibi(alibi_slopes, pos, seqlen_k)
    if bias is not None:
        bias = bias[:, :, None] if bias.shape[1] == 1 else bias.unflatten(1, heads)
    scale = default_scale(query, scale)
    out, lse = attend(scores, seen[:, None], v[:, :, None], scale, softcap, sink, factors, bias)
    return out.flatten(1, 2), lse.flatten(1, 2)


def used(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> list[Tensor]:
    """Zeros in place of rows that see nothing and of keys that no row sees."""
    rows, keys = seen.any(3)[..., None], seen.any(2)[..., None]
    return [torch.where(where, t, 0.0) for where, t in ((rows, query), (keys, key), (keys, value))]


# Linear layers


@primitive
def activate(z: Tensor, activation: str) -> Tensor:
    if activation == "relu":
        return torch.where(z > 0, z, torch.where(z.isnan(), z, 0.0))
    if activation == "relu_squared":
        return torch.where(z > 0, z * z, torch.where(z.isnan(), z, 0.0))
    if activation == "gelu":
        return 0.5 * z * (1 + torch.erf(z * 2**-0.5))
    if activation == "gelu_tanh":
        return 0.5 * z * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3)))
    if activation == "silu":
        return z * torch.sigmoid(z)
    if activation in ("sigmoid", "tanh"):
        return getattr(torch, activation)(z)
    assert activation == "none"
    return z


@primitive
def affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    z = x @ weight.T
    return z if bias is None else z + bias


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str = "none"
) -> Tensor:
    return activated(affine(x, weight, bias), activation)


def activated(z: Tensor, activation: str) -> Tensor:
    if activation == "none":
        return z
    if activation == "relu":  # its gradient is dy or 0, which is not rounded again
        return activate(saved(rounded(z, gradient=False), "relu"), activation)
    return activate(rounded(saved(z, "preact")), activation)


@primitive
def normalise(x: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mean) * rstd, mean and rstd (..., 1); the mean is 0 for RMSNorm."""
    mean = x.mean(-1, keepdim=True) if centred else torch.zeros_like(x[..., :1])
    rstd = ((x - mean).square().mean(-1, keepdim=True) + eps) ** -0.5
    return (x - mean) * rstd, mean, rstd


@primitive
def scale_shift(n: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
    n = n if weight is None else n * weight
    return n if bias is None else n + bias


def layer_norm_linear(
    x, weight, bias=None, ln_weight=None, ln_bias=None, *, eps=1e-5, activation="none"
):
    n = norm(x, ln_weight, ln_bias, eps=eps, centred=True)
    return linear(n, weight, bias, activation=activation)


def rms_norm_linear(
    x, weight, bias=None, norm_weight=None, *, eps=1e-6, weight_offset=0, activation="none"
):
    n = norm(x, norm_weight, eps=eps, centred=False, weight_offset=weight_offset)
    return linear(n, weight, bias, activation=activation)


def norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    centred: bool,
    weight_offset: float = 0,
) -> Tensor:
    scale = None if weight is None else weight + weight_offset
    return rounded(scale_shift(normalise(x, eps, centred)[0], scale, bias))


def rms_norm(x, weight=None, *, eps=1e-6, weight_offset=0):
    return norm(x, weight, eps=eps, centred=False, weight_offset=weight_offset)


def rms_norm_gated(x, gate, weight=None, *, eps=1e-6, gate_first=False):
    factor = activate(gate, "silu")
    rows = x * factor if gate_first else x
    y = scale_shift(normalise(rows, eps, False)[0], weight, None)
    return rounded(y if gate_first else y * factor)


def layer_norm(x, weight=None, bias=None, *, eps=1e-5):
    return norm(x, weight, bias, eps=eps, centred=True)


def add_rms_norm(x, residual, weight=None, *, eps=1e-6, weight_offset=0):
    total = saved(x + residual, "sum")
    return rms_norm(total, weight, eps=eps, weight_offset=weight_offset), total


def add_layer_norm(x, residual, weight=None, bias=None, *, eps=1e-5):
    total = saved(x + residual, "sum")
    return layer_norm(total, weight, bias, eps=eps), total


def fold_layer_norm(
    weight: Tensor,
    bias: Tensor | None = None,
    ln_weight: Tensor | None = None,
    ln_bias: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """`dtype` is the weight's own: the sum is taken over the rounded folded weight."""
    folded = scale_shift(weight, ln_weight).to(dtype).double()
    shift = torch.zeros(weight.shape[0], dtype=torch.float64)
    shift = shift if ln_bias is None else shift + weight @ ln_bias
    return folded, folded.sum(1), shift if bias is None else shift + bias


def folded_layer_norm_linear(
    x, folded_weight, weight_sum, folded_bias=None, *, eps=1e-5, activation="none"
):
    z = rounded(folded(x, folded_weight, weight_sum, eps), gradient=False)
    return activated(z if folded_bias is None else z + folded_bias, activation)


@primitive
def folded(x: Tensor, weight: Tensor, weight_sum: Tensor, eps: float) -> Tensor:
    _, mean, rstd = normalise(x, eps, centred=True)
    return rstd * (x @ weight.T - mean * weight_sum)


def halves(z: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return z[..., 0::2], z[..., 1::2]
    n = z.shape[-1] // 2
    return z[..., :n], z[..., n:]


# The activations of the left and of the right half.
GATE_FUNCTIONS = {
    "sigmoid_tanh": ("sigmoid", "tanh"),
    "geglu": ("none", "gelu"),
    "geglu_tanh": ("none", "gelu_tanh"),
    "swiglu": ("silu", "none"),
    "reglu": ("none", "relu"),
}


def gated_activation(left, right, *, gate="swiglu"):
    return gated(rounded(left), rounded(right), gate)


def gated(left, right, gate):
    factors = map(activate, (left, right), GATE_FUNCTIONS[gate])
    left, right = (rounded(factor, gradient=False) for factor in factors)  # as eager rounds
    return left * right


def gated_linear(x, weight, bias=None, *, gate="geglu", interleaved=False):
    z = rounded(saved(affine(x, weight, bias), "z"))
    return gated(*halves(z, interleaved), gate)


def packed_pair(left, right, left_bias=None, right_bias=None):
    """Weight and bias of gated_linear; a bias that is not given is zeros."""
    zeros = torch.zeros(left.shape[0], dtype=torch.float64)
    biases = [zeros if b is None else b for b in (left_bias, right_bias)]
    return torch.cat([left, right]), torch.cat(biases)


def gated_linear_pair(x, left, right, left_bias=None, right_bias=None, *, gate="swiglu"):
    return gated_linear(x, *packed_pair(left, right, left_bias, right_bias), gate=gate)


def gated_mlp(
    x, left, right, down, left_bias=None, right_bias=None, down_bias=None, *, gate="swiglu"
):
    act = gated_linear_pair(x, left, right, left_bias, right_bias, gate=gate)
    return affine(rounded(act), down, down_bias)


@primitive
def mapped(t: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    """f(t), where f is linear with the coefficients 0 and 1."""
    return f(t)


@primitive
def clamped(t: Tensor, low: float, high: float) -> Tensor:
    return t.clamp(low, high)


# The activation of each gate of experts.
EXPERT_GATES = {
    "swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu", "relu": "relu",
    "relu_squared": "relu", "silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_tanh",
}  # fmt: skip


def expert_act(z, gate, limit=None, alpha=None, interleaved=False):
    if "glu" not in gate:
        act = activate(z, EXPERT_GATES[gate])
        return act * act if gate == "relu_squared" else act
    g, u = halves(z, interleaved)
    if limit is not None:
        g, u = clamped(g, -float("inf"), limit), clamped(u, -limit, limit)
    if alpha is None:
        return activate(g, EXPERT_GATES[gate]) * u
    return g * activate(g * alpha, "sigmoid") * (u + 1.0)


def expert_routes(index: Tensor, experts: int) -> list[Tensor]:
    """The routes, t * k + j, of each expert."""
    return [(index.flatten() == e).nonzero()[:, 0] for e in range(experts)]


@primitive
def grouped(rows: Tensor, weights: Tensor, ends: Sequence[int]) -> Tensor:
    """The rows of group e, which end before ends[e], times weights[e].T."""
    groups = enumerate(itertools.pairwise([0, *ends]))
    return torch.cat([rows[first:end] @ weights[e].T for e, (first, end) in groups])


def with_zeros(t: Tensor, rows: int) -> Tensor:
    """t with rows of zeros behind it."""
    return mapped(t, lambda t: torch.cat([t, t.new_zeros(rows, t.shape[1])]))


def each_group(rows, weights, biases, sizes):
    """The product of each group with its rows."""
    z = grouped(rows, weights, list(itertools.accumulate(sizes)))
    if biases is None:
        return z
    return z + biases[torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))]


def group_sizes(offsets: Tensor, rows: int) -> list[int]:
    ends = [0, *itertools.accumulate(offsets.clamp(0, rows).tolist(), max)]
    return [end - first for first, end in itertools.pairwise(ends)]


def grouped_z(x, weight, offsets, bias=None):
    rows = x.shape[0]
    sizes = group_sizes(offsets, rows)
    z = each_group(x[torch.arange(sum(sizes))], weight, bias, sizes)
    return with_zeros(z, rows - sum(sizes))


def grouped_linear(x, weight, offsets, bias=None, *, activation="none"):
    return activated(grouped_z(x, weight, offsets, bias), activation)


def grouped_gated_linear(x, weight, offsets, bias=None, *, gate="swiglu", interleaved=False):
    z = rounded(saved(grouped_z(x, weight, offsets, bias), "z"))
    return gated(*halves(z, interleaved), gate)


def expert_z(x, gate_up, index, gate_up_bias=None, transposed=False):
    """The first products, one expert after the other; at the end zeros for routes without one."""
    gate_up = gate_up.mT if transposed else gate_up
    routes = expert_routes(index, gate_up.shape[0])
    order = torch.cat(routes)
    left = index.numel() - len(order)
    sizes = list(map(len, routes))
    z = each_group(x[order // index.shape[1]], gate_up, gate_up_bias, sizes)
    return with_zeros(z, left)


def experts(
    x, gate_up, down, index, weight, gate_up_bias=None, down_bias=None, *, gate="swiglu",
    limit=None, alpha=None, interleaved=False, transposed=False,
):  # fmt: skip
    routes = expert_routes(index, gate_up.shape[0])
    order, (tokens, k) = torch.cat(routes), index.shape
    z = saved(expert_z(x, gate_up, index, gate_up_bias, transposed), "z")
    act = expert_act(rounded(z)[: len(order)], gate, limit, alpha, interleaved)
    down = down.mT if transposed else down
    results = rounded(each_group(rounded(act), down, down_bias, list(map(len, routes))))

    def to_routes(t):
        return t.new_zeros(tokens * k, t.shape[1]).index_copy(0, order, t)

    terms = mapped(results, to_routes) * weight.reshape(tokens * k, 1)
    return mapped(terms, lambda t: t.unflatten(0, (tokens, k)).sum(1))


def bmm(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a, b)


def scalar_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return saved(softmax(q[:, None] * k, recomputed=True) @ v, "mean")


@primitive
def row_sum(x: Tensor) -> Tensor:
    return x.sum(-1)


@primitive
def conv2d(x: Tensor, weight: Tensor) -> Tensor:
    """x is 0 beyond the bottom and the right edge."""
    (_, height, width), (kh, kw) = x.shape, weight.shape
    padded = F.pad(x, (0, max(kw - 1, 0), 0, max(kh - 1, 0)))
    z = torch.zeros_like(x)
    for p in range(kh):
        for q in range(kw):
            z = z + weight[p, q] * padded[:, p : p + height, q : q + width]
    return z


# 4-bit weights, from the words of int4_pack and of int4_repack


def int4_codes(packed: Tensor, cols: int) -> Tensor:
    """int64 `(..., cols)`: eight codes a word, lowest nibble first."""
    nibbles = (here(packed).long()[..., None] >> (4 * torch.arange(8))) & 15
    return nibbles.flatten(-2)[..., :cols]


def int4_words(codes: Tensor) -> Tensor:
    """The way back, as int64 values of int32 words."""
    cols = codes.shape[-1]
    full = F.pad(here(codes).long() & 15, (0, -cols % 8)).unflatten(-1, (-1, 8))
    words = (full << (4 * torch.arange(8))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words)


def int4_weight(qweight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """`(N, K)`, every group's codes less its zero, times its scale."""
    k, groups = qweight.shape[1] * 8, scale.shape[1]
    group = k // groups if groups else 1
    q, z = int4_codes(qweight, k), int4_codes(zero, groups)
    return scale.repeat_interleave(group, 1) * (q - z.repeat_interleave(group, 1))


def int4_linear(
    x: Tensor, qweight: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None = None
) -> Tensor:
    return affine(x, rounded(int4_weight(qweight, scale, zero)), bias)


def int4_linear_repacked(x, packed, packed_scale, packed_zero, bias=None, *, out_features):
    weight = int4_portable(packed, packed_scale, packed_zero, out_features, x.shape[-1])
    return int4_linear(x, *weight, bias)


def int4_places() -> tuple[Tensor, Tensor]:
    """Row and column, in a tile of 16 rows and 64 columns, of nibble i of word s of lane l."""
    lane, word, i = torch.meshgrid(*map(torch.arange, (32, 4, 8)), indexing="ij")
    register = i % 4
    row = lane // 4 + 8 * (register % 2)
    return row, 16 * word + 8 * (register // 2) + 2 * (lane % 4) + i // 4


def int4_repack(qweight: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The definition of the repacked layout; rows and columns that are not there hold 0."""
    n, k, groups = qweight.shape[0], qweight.shape[1] * 8, scale.shape[1]
    rows, cols = -n % 16, -k % 64
    row, column = int4_places()
    codes = F.pad(int4_codes(qweight, k), (0, cols, 0, rows))
    tiles = codes.unflatten(1, (-1, 64)).unflatten(0, (-1, 16)).transpose(1, 2)
    packed = int4_words(tiles[:, :, row, column]).reshape(*tiles.shape[:2], 128)
    pairs = F.pad(up(scale), (0, 0, 0, rows)).unflatten(0, (-1, 2, 8)).permute(0, 3, 2, 1)
    zeros = F.pad(int4_codes(zero, groups), (0, 0, 0, rows)).unflatten(0, (-1, 2, 8))
    return packed, pairs.flatten(2), int4_words(zeros.permute(0, 3, 1, 2))[..., 0]


def int4_portable(
    packed: Tensor, packed_scale: Tensor, packed_zero: Tensor, n: int, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors that int4_repack was given."""
    tiles, chunks = packed.shape[:2]
    row, column = int4_places()
    codes = torch.zeros(tiles, chunks, 16, 64, dtype=torch.int64)
    codes[:, :, row, column] = int4_codes(packed, 1024).view(tiles, chunks, 32, 4, 8)
    codes = codes.transpose(1, 2).reshape(tiles * 16, chunks * 64)[:n, :k]
    scale = here(packed_scale).unflatten(2, (8, 2)).permute(0, 3, 2, 1).flatten(0, 2)[:n]
    zeros = int4_codes(packed_zero.unsqueeze(-1), 8).permute(0, 2, 3, 1).flatten(0, 2)[:n]
    return int4_words(codes), scale, int4_words(zeros)


def add_scalar(x: Tensor, value: float) -> Tensor:
    return x + value


def scaled_logits(logits: Tensor, softcap: float | None, temperature: float) -> Tensor:
    return cap(logits, softcap) / temperature


def target_values(z: Tensor, target: Tensor) -> Tensor:
    """z at each target; at 0 for a target that is no class."""
    classes = z.shape[-1]
    index = torch.where((target >= 0) & (target < classes), target, 0).long()
    return z.gather(-1, index[..., None])[..., 0]


@primitive
def logits_of(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Without a weight, x are the logits."""
    return x if weight is None else affine(x, weight, bias)


@primitive
def spread(t: Tensor, live: Tensor) -> Tensor:
    """The values of the live rows, and 0 for the others."""
    return t.new_zeros(live.shape).masked_scatter(live, t)


def live_rows(x: Tensor, target: Tensor, ignore_index: int = -100, shift: int = 0):
    """The rows that have a loss and their targets, and where they are."""
    if shift:
        x, target = x[..., :-1, :], target[..., 1:]
    live = target != ignore_index
    return x[live], target[live], live


def row_losses(
    logits: Tensor,
    target: Tensor,
    *,
    label_smoothing: float = 0,
    softcap: float | None = None,
    z_loss: float = 0,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and lse of each row, and the scaled logits."""
    z = scaled_logits(logits, softcap, temperature)
    lse = z.logsumexp(-1)
    loss = (1 - label_smoothing) * (lse - target_values(z, target)) + z_loss * lse.square()
    if label_smoothing:
        loss = loss + label_smoothing * (lse - z.mean(-1))
    return loss, lse, z


def reduced(loss: Tensor, live: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return spread(loss, live)
    return loss.sum() if reduction == "sum" else loss.sum() / live.sum()


def linear_cross_entropy_forward(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    shift: int = 0,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The loss, and each row's lse."""
    x, target, live = live_rows(x, target, ignore_index, shift)
    loss, lse, z = row_losses(logits_of(x, weight, bias), target, **options)
    saved(spread(z.mean(-1), live), "mean")
    return reduced(loss, live, reduction), spread(lse, live)


def cross_entropy_forward(
    logits: Tensor,
    target: Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    shift: int = 0,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and each row's max and lse - max."""
    logits, target, live = live_rows(logits, target, ignore_index, shift)
    loss, lse, z = row_losses(logits_of(logits), target, **options)
    largest = z.amax(-1)
    log_sum = lse - largest.detach()  # an error of the max is also one of lse
    return reduced(loss, live, reduction), spread(largest, live), spread(log_sum, live)


def rows_dloss(
    dloss: Tensor, target: Tensor, reduction: str = "mean", ignore_index: int = -100, shift: int = 0
) -> Tensor:
    """The gradient of every row's loss, 0 for a row that has none."""
    if shift:
        target = torch.cat([target[..., 1:], torch.full_like(target[..., :1], ignore_index)], -1)
    live = target.flatten() != ignore_index
    if reduction == "none":
        pad = dloss.new_zeros((*dloss.shape[:-1], 1)) if shift else dloss.new_zeros(0)
        each = torch.cat([dloss, pad], -1) if shift else dloss
        return torch.where(live, each.flatten(), 0.0)
    each = dloss / live.sum() if reduction == "mean" else dloss
    return torch.where(live, each, 0.0)


def linear_token_logprobs_forward(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probability, entropy and lse of each row."""
    z = scaled_logits(logits_of(x, weight, bias), softcap, temperature)
    lse = z.logsumexp(-1)
    nothing = torch.zeros(0, dtype=torch.float64)
    return target_values(z, target) - lse, entropy_of(z) if entropy else nothing, lse


@primitive
def entropy_of(z: Tensor) -> Tensor:
    p = z.softmax(-1)
    return z.logsumexp(-1) - (p * torch.where(p > 0, z, 0.0)).sum(-1)


def outer_add(x: Tensor, y: Tensor) -> Tensor:
    return x[None, :] + y[:, None]


def mul_relu(x: Tensor, y: Tensor) -> Tensor:
    return activate(x * y[:, None], "relu")


def outer_mul_relu(x: Tensor, y: Tensor) -> Tensor:
    return activate(x[None, :] * y[:, None], "relu")


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    *,
    activation: str = "none",
    key_start: Tensor | None = None,
) -> Tensor:
    """Sums over each position and the width - 1 before it; those before key_start are 0."""
    seqlen, width = x.shape[-1], weight.shape[-1]
    if initial_state is None:
        initial_state = torch.zeros(*x.shape[:2], width - 1, dtype=torch.float64)
    rows = torch.cat([initial_state, x], -1)
    seen = torch.stack([rows[..., j : j + seqlen] for j in range(width)], -1)
    if key_start is not None:
        positions = torch.arange(seqlen)[:, None] + torch.arange(1 - width, 1)
        seen = torch.where((positions >= here(key_start)[..., None])[:, None], seen, 0.0)
    z = (seen * weight[:, None]).sum(-1)
    return rounded(activate(z if bias is None else z + bias[:, None], activation))


def rotate(x: Tensor, interleaved: bool = False) -> Tensor:
    """Each pair (a, b) becomes (-b, a)."""
    a, b = halves(x, interleaved)
    return torch.stack([-b, a], -1).flatten(-2) if interleaved else torch.cat([-b, a], -1)


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """cos and sin are given for each position, or for each sequence and position."""
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)

    def rotated(x: Tensor) -> Tensor:
        front, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        return torch.cat([front * cos + rotate(front, interleaved) * sin, rest], -1)

    return rotated(q), rotated(k)


def formula(op: str) -> Callable[..., Any]:
    """The formula of an op, with all results of its `_forward` that its gradient may read."""
    op = op.removesuffix("_forward").removesuffix("_with_lse")
    return globals().get(op + "_forward") or globals()[op]


def gradients(
    function: Callable[..., Tensor], dout: Tensor, wanted: Sequence[bool], *args: Any, **kwargs: Any
) -> list[Tensor | None]:
    """Gradients of sum(dout * function(*args)) to the positional tensors that are wanted."""
    leaves = [
        a.clone().requires_grad_() if i < len(wanted) and wanted[i] and a is not None else a
        for i, a in enumerate(args)
    ]
    inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    out = function(*leaves, **kwargs)
    grads = iter(torch.autograd.grad(out, inputs, dout.to(out.dtype)))
    return [
        next(grads) if isinstance(leaf, Tensor) and leaf.requires_grad else None for leaf in leaves
    ]


# The functions in eager torch


def eager_masked_softmax(
    scores: Tensor,
    seen: Tensor,
    scale: float,
    softcap: float | None = None,
    sink: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    seen = seen.to(scores.device)
    z = cap(scores * scale, softcap)
    z = (z if bias is None else z + bias).masked_fill(~seen, -torch.inf)
    if sink is not None:
        logits = sink.to(z.dtype).view(-1, 1, 1).expand(*z.shape[:-1], 1)
        z = torch.cat([z, logits], -1)
    p = torch.softmax(z, -1)[..., : scores.shape[-1]]
    return p.masked_fill(~seen.any(-1, keepdim=True), 0.0)


def eager_causal_softmax(scores, leftpad=None, *, scale=1.0, softcap=None, sink=None, **mask):
    seen = scores_mask(scores, up(leftpad), **mask)
    return eager_masked_softmax(scores, seen, scale, softcap, sink)


def eager_attention(
    query, key, value, leftpad=None, *, causal=False, scale=None, softcap=None, sink=None,
    dropout_p=0.0, dropout_seed=None, bias=None, alibi_slopes=None, **mask,
):  # fmt: skip
    group = query.shape[1] // key.shape[1]
    size = (query.shape[0], query.shape[2], key.shape[2])
    seen = visible(*size, up(leftpad), causal, **mask)[:, None]
    if alibi_slopes is not None:
        pos = positions(*size, up(mask.get("key_end")))
        bias = alibi(up(alibi_slopes), pos, key.shape[2]).to(query)
    scores = query @ key.repeat_interleave(group, 1).mT
    p = eager_masked_softmax(scores, seen, default_scale(query, scale), softcap, sink, bias)
    factors = dropout_factors(p.shape, dropout_p, dropout_seed)
    if isinstance(factors, Tensor):
        factors = factors.to(p)
    return (p * factors) @ value.repeat_interleave(group, 1)


def eager_activate(z: Tensor, activation: str) -> Tensor:
    functions = {
        "none": lambda t: t,
        "relu": F.relu,
        "gelu": F.gelu,
        "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
        "silu": F.silu,
        "relu_squared": lambda t: F.relu(t).square(),
    }
    return functions[activation](z)


def eager_bmm(a: Tensor, b: Tensor) -> Tensor:
    """Uses bmm, because torch.matmul's arithmetic on a CPU depends on requires_grad."""
    batch = max(a.shape[0], b.shape[0]) if 0 not in (a.shape[0], b.shape[0]) else 0
    return torch.bmm(a.expand(batch, -1, -1), b.expand(batch, -1, -1))


def eager_gated_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gate: str, interleaved: bool = False
) -> Tensor:
    return eager_gate(*halves(F.linear(x, weight, bias), interleaved), gate)


def eager_gated_linear_pair(x, left, right, left_bias=None, right_bias=None, *, gate) -> Tensor:
    return eager_gate(F.linear(x, left, left_bias), F.linear(x, right, right_bias), gate)


def eager_gated_mlp(
    x, left, right, down, left_bias=None, right_bias=None, down_bias=None, *, gate
) -> Tensor:
    act = eager_gated_linear_pair(x, left, right, left_bias, right_bias, gate=gate)
    return F.linear(act, down, down_bias)


def eager_grouped_linear(x, weight, offsets, bias=None, *, activation) -> Tensor:
    rows = x.split([*(sizes := group_sizes(offsets, len(x))), len(x) - sum(sizes)])
    biases = [None] * len(sizes) if bias is None else bias
    groups = zip(rows, weight, biases, strict=False)
    z = [eager_activate(F.linear(*group), activation) for group in groups]
    return torch.cat([*z, x.new_zeros(len(rows[-1]), weight.shape[1])])


def eager_grouped_gated_linear(
    x, weight, offsets, bias=None, *, gate, interleaved
) -> Tensor:  # fmt: skip
    z = eager_grouped_linear(x, weight, offsets, bias, activation="none")
    return eager_gate(*halves(z, interleaved), gate)


def eager_experts(
    x, gate_up, down, index, weight, gate_up_bias=None, down_bias=None, *, gate, limit, alpha,
    interleaved, transposed,
) -> Tensor:  # fmt: skip
    """transformers' loop over the experts."""
    if transposed:
        gate_up, down = gate_up.mT, down.mT
    y = torch.zeros_like(x)
    for e, routes in enumerate(expert_routes(index, gate_up.shape[0])):
        tokens = routes // index.shape[1]
        z = F.linear(x[tokens], gate_up[e], None if gate_up_bias is None else gate_up_bias[e])
        act = expert_act(z, gate, limit, alpha, interleaved)
        rows = F.linear(act, down[e], None if down_bias is None else down_bias[e])
        rows = rows * weight.flatten()[routes, None]
        y = y.index_add(0, tokens, rows.to(y.dtype))
    return y


def eager_gate(left: Tensor, right: Tensor, gate: str) -> Tensor:
    return {
        "sigmoid_tanh": lambda: left.sigmoid() * right.tanh(),
        "geglu": lambda: left * F.gelu(right),
        "geglu_tanh": lambda: left * F.gelu(right, approximate="tanh"),
        "swiglu": lambda: F.silu(left) * right,
        "reglu": lambda: left * F.relu(right),
    }[gate]()


def eager_layer_norm_linear(x, weight, bias=None, ln_weight=None, ln_bias=None, *, eps, activation):
    n = F.layer_norm(x, x.shape[-1:], ln_weight, ln_bias, eps)
    return eager_activate(F.linear(n, weight, bias), activation)


def eager_rms_norm_linear(
    x, weight, bias=None, norm_weight=None, *, eps, activation, weight_offset=0
):
    n = eager_rms_norm(x, norm_weight, eps=eps, weight_offset=weight_offset)
    return eager_activate(F.linear(n, weight, bias), activation)


def eager_rms_norm(x, weight=None, *, eps, weight_offset=0):
    scale = None if weight is None else weight + weight_offset
    return F.rms_norm(x, x.shape[-1:], scale, eps)


def eager_rms_norm_gated(x, gate, weight=None, *, eps, gate_first):
    if gate_first:
        return eager_rms_norm(x * F.silu(gate), weight, eps=eps)
    return eager_rms_norm(x, weight, eps=eps) * F.silu(gate)


def eager_causal_conv1d(
    x, weight, bias=None, initial_state=None, *, activation="none", key_start=None
):
    """torch's convolution knows no documents."""
    assert key_start is None
    width = weight.shape[-1]
    rows = F.pad(x, (width - 1, 0)) if initial_state is None else torch.cat([initial_state, x], -1)
    z = F.conv1d(rows, weight[:, None], bias, groups=x.shape[1])
    return F.silu(z) if activation == "silu" else z


def eager_layer_norm(x, weight=None, bias=None, *, eps):
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def eager_folded_layer_norm_linear(
    x, folded_weight, weight_sum, folded_bias=None, *, eps, activation
):
    """Layer norm without parameters, then the folded weight, as without the fold."""
    n = F.layer_norm(x, x.shape[-1:], eps=eps)
    bias = None if folded_bias is None else folded_bias.to(x.dtype)
    return eager_activate(F.linear(n, folded_weight, bias), activation)


def eager_softmax_matmul(
    scores, value, leftpad=None, *, causal=False, scale=1.0, softcap=None, sink=None, **mask
):
    seen = scores_mask(scores, up(leftpad), causal, **mask)
    return eager_masked_softmax(scores, seen, scale, softcap, sink) @ value


def eager_conv2d(x: Tensor, weight: Tensor) -> Tensor:
    kh, kw = weight.shape
    return F.conv2d(F.pad(x, (0, kw - 1, 0, kh - 1))[:, None], weight[None, None])[:, 0]


def eager_int4_linear(x, qweight, scale, zero, bias=None):
    """The weight dequantised at its own dtype, then a linear layer."""
    return F.linear(x, int4_weight(qweight, scale.cpu(), zero).to(x.device), bias)


def eager_int4_linear_repacked(x, packed, packed_scale, packed_zero, bias=None, *, out_features):
    return eager_int4_linear(
        x, *int4_portable(packed, packed_scale, packed_zero, out_features, x.shape[-1]), bias
    )


def eager_cross_entropy(logits: Tensor, target: Tensor, **kwargs: Any) -> Tensor:
    loss = cross_entropy_forward(logits, target, **kwargs)[0]
    return loss if loss.dtype == torch.float64 else loss.float()


def eager_linear_cross_entropy(*args, keep="auto", **kwargs) -> Tensor:
    loss, _ = linear_cross_entropy_forward(*args, **kwargs)
    return loss if loss.dtype == torch.float64 else loss.float()


EAGER: dict[str, Callable[..., Tensor]] = {
    "int4_linear": eager_int4_linear,
    "int4_linear_repacked": eager_int4_linear_repacked,
    "softmax": lambda x: torch.softmax(x, -1),
    "causal_softmax": eager_causal_softmax,
    "softmax_matmul": eager_softmax_matmul,
    "attention": eager_attention,
    "scalar_attention": lambda q, k, v: torch.softmax(q[:, None] * k, -1) @ v,
    "linear": lambda x, weight, bias=None, *, activation="none": eager_activate(
        F.linear(x, weight, bias), activation
    ),
    "layer_norm_linear": eager_layer_norm_linear,
    "rms_norm_linear": eager_rms_norm_linear,
    "rms_norm": eager_rms_norm,
    "rms_norm_gated": eager_rms_norm_gated,
    "layer_norm": eager_layer_norm,
    "causal_conv1d": eager_causal_conv1d,
    "add_rms_norm": lambda x, residual, *args, **kwargs: eager_rms_norm(
        x + residual, *args, **kwargs
    ),
    "add_layer_norm": lambda x, residual, *args, **kwargs: eager_layer_norm(
        x + residual, *args, **kwargs
    ),
    "folded_layer_norm_linear": eager_folded_layer_norm_linear,
    "cross_entropy": eager_cross_entropy,
    "linear_cross_entropy": eager_linear_cross_entropy,
    "linear_token_logprobs": lambda *args, **kwargs: linear_token_logprobs_forward(*args, **kwargs)[
        0
    ].float(),
    "gated_activation": lambda left, right, *, gate: eager_gate(left, right, gate),
    "gated_linear": eager_gated_linear,
    "gated_linear_pair": eager_gated_linear_pair,
    "gated_mlp": eager_gated_mlp,
    "experts": eager_experts,
    "grouped_linear": eager_grouped_linear,
    "grouped_gated_linear": eager_grouped_gated_linear,
    "rotary": lambda *args, **kwargs: rotary(*args, **kwargs)[0],
    "row_sum": lambda x: x.sum(-1),
    "conv2d": eager_conv2d,
    "add_scalar": add_scalar,
    "outer_add": outer_add,
    "outer_mul_relu": lambda x, y: torch.relu(x[None, :] * y[:, None]),
    "mul_relu": lambda x, y: torch.relu(x * y[:, None]),
    "bmm": eager_bmm,
}
