"""How far each result may be from its float64 reference: REFERENCES[op](*args) -> Bounds.

The bounds are a first-order error analysis (Higham, Accuracy and Stability of Numerical Algorithms,
chapters 2 to 4). u is half the distance from 1 to the next number, U that of the sums' dtype
(float32; float64 for float64):

    one rounding                  fl(a) = a (1 + d), |d| <= u             error u |a|
    a sum of k products           s = sum of a_i b_i                      error k U sum of |a_i b_i|
    a linear map of an error      y = W x, x has the error e              error |W| e
    a function of an error        y = f(z), z has the error e             error |f'(z)| e
    exp, erf, tanh, a division                                            error FUNCTION U |size|

`Terms` holds such errors apart by their unit: `sums` are pairs (k, magnitude), which count k U, and
`rounds` are magnitudes, which count u. `Bound.error` doubles U: an accumulator may truncate.
`Terms.map` carries an error through a linear map, and `+` adds errors. A magnitude is a sum over
absolute values, so it does not shrink where values cancel. In the names, `p` is a value, `p_terms`
its errors, `..._size` a magnitude, and `grad_out` the incoming gradient in float64.

Three chains explain most of the file.

    layer       z = n W^T + b         z_terms  = n_terms |W|^T + (K + 1, |n| |W|^T + |b|)
                y = f(z)              y_terms  = |f'(z)| (z_terms + rounding of z) + FUNCTION |z|
                dz = dy f'(z)         dz_terms = |dy f''(z)| z_terms + rounding of dz
                dx = dz W             dx_terms = dz_terms |W| + (N, |dz| |W|)
    softmax     p = exp(z - m) / sum  p_terms  = (cols, p) + p (FUNCTION + |z - m|)
                since d exp(t) = exp(t) dt, and t = z - m is rounded
    attention   out = p V             out_terms = p_terms |V| + rowsum(p_terms) (p |V|)
                                                  + (seqlen_k, p |V|) + rounding of p
                ds = p (dout V^T - rowsum(dout out))
                                      ds_terms = p_terms dp_size
                                                 + (head_dim_v + seqlen_k, p dp_size) + roundings
                where p is recomputed from the lse, which adds to p_terms
                with dp_size = |dout| |V|^T + rowsum(|dout| p |V|), before the two cancel
                dQ = scale ds K       dq_terms = scale (ds_terms |K| + (seqlen_k, |ds| |K|))

The ops document the roundings to the tensors' own dtype that `rounds` counts: probabilities before
P V, normalised rows before the matmul, a matmul's result before its activation, saved
pre-activations and outputs, dscores and dz before their matmuls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import reference as R
from numerics import UNIT, Bound, Terms, acc_dtype
from reference import up

FUNCTION = 4.0  # units of error of one exp, erf, tanh or division


def exact_product(scale: float) -> bool:
    return scale == 0 or math.frexp(abs(scale))[0] == 0.5


# Softmax and attention


def probability_terms(p: Tensor, z: Tensor, lse: Tensor, scale: float, dtype: torch.dtype) -> Terms:
    """Errors of p = exp(z - m) / sum: those of the sum, and the rounding of the exponent."""
    z = torch.where(p > 0, z, 0.0)
    m = torch.where(lse.isinf(), 0.0, lse)[..., None]
    # A subnormal p has the absolute error of the smallest normal; a masked p is exactly 0.
    p = torch.where(p > 0, p.clamp(min=torch.finfo(acc_dtype(dtype)).tiny), 0.0)
    exponent = FUNCTION + (z - m).abs()
    if not exact_product(scale):
        exponent = exponent + z.abs() + m.abs()
    return Terms([(p.shape[-1], p), (1, p * exponent)])


def logsumexp_terms(p: Tensor, z: Tensor, lse: Tensor, scores: Terms) -> Terms:
    z = torch.where(p > 0, z, 0.0)
    highest = z.abs().amax(-1) if z.shape[-1] else torch.zeros_like(lse)
    size = torch.where(lse.isinf(), 0.0, lse.abs() + highest)
    own = Terms([(p.shape[-1], torch.ones_like(lse)), (FUNCTION, size)])
    return own + scores.map(lambda t: (t * p).sum(-1))


def softmax_bounds(x: Tensor) -> list[Bound]:
    v = up(x)
    y = R.softmax(v)
    lse = torch.logsumexp(v, -1) if v.numel() else v.new_zeros(v.shape[:-1])
    return [Bound(y, probability_terms(y, v, lse, 1.0, x.dtype), x.dtype)]


def roundable(t: Tensor, dtype: torch.dtype) -> Tensor:
    """|t|, raised to the smallest normal unless 0: subnormals share its absolute error."""
    return torch.where(t == 0, 0.0, t.abs().clamp(min=torch.finfo(dtype).tiny))


def dtype_of(unit: float) -> torch.dtype:
    return next(d for d, u in UNIT.items() if u == unit)


def softmax_backward_terms(
    dy: Tensor, y: Tensor, scale: float, dtype: torch.dtype, y_terms: Terms | None = None
) -> Terms:
    """Errors of dx. `y_terms` are those of a y that the forward rounded, None for an exact y."""
    delta = (dy * y).abs().sum(-1, keepdim=True)
    size = abs(scale) * roundable(y, acc_dtype(dtype))
    size = size * (dy.abs() + delta)
    terms = Terms([(y.shape[-1] + FUNCTION, size)])
    if y_terms is not None:
        y_rounded = roundable(y, dtype)
        own, others = (
            y_rounded * (dy.abs() + delta),
            y.abs() * (dy.abs() * y_rounded).sum(-1, keepdim=True),
        )
        terms.rounds.append(abs(scale) * (own + others))
        dy_size = dy.abs() + delta
        terms = terms + y_terms.map(
            lambda t: abs(scale) * (t * dy_size + y.abs() * (dy.abs() * t).sum(-1, keepdim=True))
        )
    return terms


def softmax_backward_bounds(dy: Tensor, y: Tensor) -> list[Bound]:
    grad_out, p = up(dy), up(y)
    dx = p * (grad_out - (grad_out * p).sum(-1, keepdim=True))
    return [Bound(dx, softmax_backward_terms(grad_out, p, 1.0, y.dtype), y.dtype)]


def causal_softmax_bounds(
    scores: Tensor,
    leftpad: Tensor | None = None,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    sink: Tensor | None = None,
    **mask: Any,
) -> list[Bound]:
    s, pads = up(scores), up(leftpad)
    seen = R.scores_mask(s, pads, **mask)
    p, lse = R.softmax_and_lse(s, seen, scale, softcap, up(sink))
    z, z_terms, _ = capped(torch.where(seen, s, 0.0) * scale, Terms(), softcap)
    terms = probability_terms(p, z, lse, scale, scores.dtype) + z_terms.map(lambda t: p * t)
    return [Bound(p, terms, scores.dtype)]


def capped(z: Tensor, terms: Terms, softcap: float | None) -> tuple[Tensor, Terms, Tensor]:
    """The capped scores, their errors given those of the scores, and the slope of the cap."""
    if softcap is None:
        return z, terms, torch.ones_like(z)
    t = torch.tanh(z / softcap)
    slope = 1 - t.square()
    own = Terms([(2, slope * z.abs()), (FUNCTION, softcap * t.abs())])
    return softcap * t, terms.map(lambda e: slope * e) + own, slope


def sloped(terms: Terms, size: Tensor, slope: Tensor, scores: Terms, softcap: float | None):
    """Errors of the gradient of the scores, given those of the capped scores (magnitude `size`)."""
    if softcap is None:
        return terms
    own = Terms([(2 * FUNCTION, size)])
    return terms.map(lambda e: e * slope) + own + scores.map(lambda e: size * 2 * e / softcap)


def sink_bound(
    dout: Tensor,
    out: Tensor,
    out_terms: Terms,
    lse: Tensor,
    lse_terms: Terms,
    sink: Tensor,
    dtype: torch.dtype,
    dlse: Tensor | float = 0.0,
) -> Bound:
    """dsink = -sum of exp(sink - lse) * (rowsum(dout * out) - dlse), over batch and rows."""
    logit = up(sink)[None, :, None]
    share = torch.exp(logit - torch.where(lse.isneginf(), torch.inf, lse))
    delta = (dout * out).sum(-1) - dlse
    size = (dout.abs() * out.abs()).sum(-1) + abs(dlse)
    exponent = FUNCTION + torch.where(lse.isinf(), 0.0, lse.abs()) + logit.abs()

    def total(t: Tensor) -> Tensor:
        return t.sum((0, 2))

    terms = Terms(
        [
            (out.shape[-1] + delta.shape[0] * delta.shape[2], total(share * size)),
            (1, total(share * exponent * size)),
        ]
    )
    terms = terms + lse_terms.map(lambda t: total(share * size * t))
    terms = terms + out_terms.map(lambda t: total(share * (dout.abs() * t).sum(-1)))
    return Bound(-total(share * delta), terms, sink.dtype, work=dtype)


def causal_softmax_backward_bounds(
    dy: Tensor,
    y: Tensor,
    leftpad: Tensor | None = None,
    *,
    scale: float = 1.0,
    scores: Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    **mask: Any,
) -> list[Bound]:
    seen = R.scores_mask(y, up(leftpad), **mask).expand(y.shape)
    grad_out, p = torch.where(seen, up(dy), 0.0), torch.where(seen, up(y), 0.0)
    dx = scale * p * (grad_out - (grad_out * p).sum(-1, keepdim=True))
    terms = softmax_backward_terms(grad_out, p, scale, y.dtype)
    if scores is None:
        return with_sink([Bound(dx, terms, y.dtype)], 1, y.dtype)
    s = torch.where(seen, up(scores), 0.0)
    _, _, slope = capped(s * scale, Terms(), softcap)
    terms = sloped(terms, dx.abs(), slope, Terms(), softcap)
    dx = Bound(dx * slope, terms, y.dtype)
    if sink is None:
        return with_sink([dx], 1, y.dtype)
    return [dx, causal_sink_bound(grad_out, p, Terms(), s, seen, scale, softcap, sink, y.dtype)]


def causal_sink_bound(grad_out, p, p_terms, s, seen, scale, softcap, sink, dtype) -> Bound:
    """The bound of dsink for scores (batch, nheads, seqlen_q, seqlen_k)."""
    _, lse = R.softmax_and_lse(s, seen, scale, softcap, up(sink))
    z, z_terms, _ = capped(s * scale, Terms(), softcap)
    return sink_bound(grad_out, p, p_terms, lse, logsumexp_terms(p, z, lse, z_terms), sink, dtype)


def attend_terms(p: Tensor, p_terms: Terms, value: Tensor) -> Terms:
    """Errors of p @ value, which the row sum of p normalises."""
    out = p @ value.abs()
    moved = p_terms.map(lambda t: t @ value.abs() + t.sum(-1, keepdim=True) * out)
    return moved + Terms([(p.shape[-1], out)], [out])


def lse_error(p: Tensor, lse: Tensor, z: Tensor) -> Tensor:
    """The error of exp(z - lse) from the roundings of z and lse, in units of the accumulator."""
    size = torch.where(lse.isinf(), 0.0, lse.abs())[..., None] + torch.where(p > 0, z.abs(), 0.0)
    return p * size


def lse_floor(t: Tensor, dtype: torch.dtype) -> float:
    return UNIT[acc_dtype(dtype)] * t.nan_to_num(0.0).max().item() if t.numel() else 0.0


def dscores_terms(
    p: Tensor,
    p_terms: Terms,
    dout: Tensor,
    value: Tensor,
    lost: Tensor,
    dtype: torch.dtype,
    dlse: Tensor | float = 0.0,
) -> tuple[Terms, Terms, Tensor]:
    """Errors of p recomputed from lse, and of ds = p * (dout @ value^T - rowsum(dout * out)).

    The matmul that reads p may flush a subnormal p to 0.

    Returns:
        p_terms, ds_terms, and dp_size = |dout| @ |value|^T + rowsum(|dout| * |out|) + |dlse|.
    """
    acc = acc_dtype(dtype)
    subnormal = torch.where(p < torch.finfo(acc).tiny, p, 0.0) / UNIT[acc]
    p_terms = p_terms.map(lambda t: t + p * t.sum(-1, keepdim=True)) + Terms(
        [(1, lost), (1, subnormal)]
    )
    delta = (dout.abs() * (p @ value.abs())).sum(-1, keepdim=True)
    dp_size = dout.abs() @ value.abs().mT + delta + abs(dlse)
    ds = p * dp_size
    rounded = roundable(ds, dtype)
    terms = p_terms.map(lambda t: t * dp_size)
    terms = terms + Terms([(value.shape[-1] + p.shape[-1], ds)], [rounded, rounded])
    return p_terms, terms, dp_size


def softmax_matmul_parts(
    scores, value, leftpad=None, *, causal=False, scale=1.0, softcap=None, sink=None, **mask
):
    s, v, pads = up(scores), up(value), up(leftpad)
    seen = R.scores_mask(s, pads, causal, **mask)
    p, lse = R.softmax_and_lse(s, seen, scale, softcap, up(sink))
    z, z_terms, slope = capped(torch.where(seen, s, 0.0) * scale, Terms(), softcap)
    p_terms = probability_terms(p, z, lse, scale, scores.dtype) + z_terms.map(lambda t: p * t)
    return (
        s,
        torch.where(seen.any(2)[..., None], v, 0.0),
        pads,
        seen,
        p,
        lse,
        z,
        z_terms,
        slope,
        p_terms,
    )


def softmax_matmul_bounds(scores, value, leftpad=None, **kwargs) -> list[Bound]:
    _, v, _, _, p, lse, z, z_terms, _, p_terms = softmax_matmul_parts(
        scores, value, leftpad, **kwargs
    )
    return [
        Bound(p @ v, attend_terms(p, p_terms, v), scores.dtype),
        Bound(lse, logsumexp_terms(p, z, lse, z_terms), acc_dtype(scores.dtype)),
    ]


def softmax_matmul_grads(
    dout, scores, value, leftpad=None, *, scale=1.0, softcap=None, sink=None, **kwargs
) -> list[Bound]:
    kwargs = {"scale": scale, "softcap": softcap, **kwargs}
    s, v, pads, seen, p, lse, z, z_terms, slope, p_terms = softmax_matmul_parts(
        scores, value, leftpad, sink=sink, **kwargs
    )
    grad_out = torch.where(seen.any(3)[..., None], up(dout), 0.0)
    grads = R.gradients(
        R.VALUES["softmax_matmul"], grad_out, [True, True], s, v, pads, sink=up(sink), **kwargs
    )
    dtype = scores.dtype
    sinks = []
    if sink is not None:
        lse_terms = logsumexp_terms(p, z, lse, z_terms)
        sinks = [
            sink_bound(grad_out, p @ v, attend_terms(p, p_terms, v), lse, lse_terms, sink, dtype)
        ]
    lost = lse_error(p, lse, z)
    p_terms, ds_terms, dp_size = dscores_terms(p, p_terms, grad_out, v, lost, dtype)
    ds_terms = sloped(ds_terms, p * dp_size, slope, z_terms, softcap)
    dvalue = p_terms.map(lambda t: t.mT @ grad_out.abs())
    size = p.mT @ grad_out.abs()
    dvalue = dvalue + Terms([(s.shape[2], size)], [size])
    floors = [
        lse_floor(abs(scale) * lost * dp_size, dtype),
        lse_floor(lost.mT @ grad_out.abs(), dtype),
    ]
    return [
        Bound(grads[0], ds_terms.map(lambda t: abs(scale) * t), dtype, floor=floors[0]),
        Bound(grads[1], dvalue, dtype, floor=floors[1]),
        *sinks,
    ]


def attention_parts(
    query,
    key,
    value,
    leftpad=None,
    *,
    causal=False,
    scale=None,
    softcap=None,
    sink=None,
    **mask,
):
    q, k, v, pads = up(query), up(key), up(value), up(leftpad)
    batch, nheads, seqlen_q, head_dim = q.shape
    seqlen_k = k.shape[2]
    group = nheads // k.shape[1] if k.shape[1] else 1
    seen = R.visible(batch, seqlen_q, seqlen_k, pads, causal, **mask)[:, None]
    q, k, v = R.used(q, k, v, seen)
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = R.default_scale(q, scale)
    p, lse = R.softmax_and_lse(q @ keys.mT, seen, scale, softcap, up(sink))
    scores = Terms([(head_dim + 1, abs(scale) * (q.abs() @ keys.abs().mT))])
    z, scores, slope = capped(scale * (q @ keys.mT), scores, softcap)
    p_terms = probability_terms(p, z, lse, scale, query.dtype) + scores.map(lambda t: p * t)
    rows = ~seen.any(3)[..., None]
    return (q, k, v, pads), (keys, values, rows, group, scale), p, lse, z, scores, slope, p_terms


def attention_bounds(query, key, value, leftpad=None, **kwargs) -> list[Bound]:
    _, (_, v, *_), p, lse, z, scores, _, p_terms = attention_parts(
        query, key, value, leftpad, **kwargs
    )
    return [
        Bound(p @ v, attend_terms(p, p_terms, v), query.dtype),
        Bound(lse, logsumexp_terms(p, z, lse, scores), acc_dtype(query.dtype)),
    ]


def attention_grads(
    dout, query, key, value, leftpad=None, *, dlse=None, scale=None, softcap=None, sink=None, **mask
) -> list[Bound]:
    """Bounds of dquery, dkey, dvalue, and of dsink if there is a sink.

    `dlse` is the gradient to the second result of attention_with_lse.
    """
    mask = {"softcap": softcap, **mask}
    clean, (keys, values, rows, group, scale), p, lse, z, scores, slope, p_terms = attention_parts(
        query, key, value, leftpad, scale=scale, sink=sink, **mask
    )
    q, pads = clean[0], clean[3]
    dtype = query.dtype
    grad_out = torch.where(rows, 0.0, up(dout))
    dlse_used = (
        torch.zeros_like(lse) if dlse is None else torch.where(lse.isneginf(), 0.0, up(dlse))
    )
    leaves = [t.clone().requires_grad_() for t in clean[:3]]
    leaves += [] if sink is None else [up(sink).requires_grad_()]
    out, ref_lse = R.attention_forward(
        *leaves[:3], pads, scale=scale, sink=None if sink is None else leaves[3], **mask
    )
    ref_lse = torch.where(lse.isneginf(), 0.0, ref_lse)
    grads = torch.autograd.grad((out * grad_out).sum() + (ref_lse * dlse_used).sum(), leaves)
    out_terms = attend_terms(p, p_terms, values)
    lse_terms = logsumexp_terms(p, z, lse, scores)
    lost = lse_error(p, lse, z)
    p_terms, ds_terms, dp_size = dscores_terms(
        p, p_terms, grad_out, values, lost, dtype, dlse_used[..., None]
    )
    ds_terms = sloped(ds_terms, p * dp_size, slope, scores, softcap)
    ds = ds_terms.rounds[0]
    ds_terms = ds_terms + Terms(rounds=[ds])  # dQ and dK read a rounded ds

    def heads(t: Tensor) -> Tensor:
        return t.unflatten(1, (t.shape[1] // group, group)).sum(2)

    scale_size, seqlen_q, seqlen_k = abs(scale), p.shape[2], p.shape[3]
    to_query = ds_terms.map(lambda t: scale_size * t @ keys.abs())
    to_key = ds_terms.map(lambda t: heads(scale_size * t.mT @ q.abs()))
    to_value = p_terms.map(lambda t: heads(t.mT @ grad_out.abs()))
    to_query = to_query + Terms([(seqlen_k, scale_size * ds @ keys.abs())])
    to_key = to_key + Terms([(seqlen_q * group, heads(scale_size * ds.mT @ q.abs()))])
    dvalue = heads(p.mT @ grad_out.abs())
    to_value = to_value + Terms([(seqlen_q * group, dvalue)], [dvalue])
    lost_ds = scale_size * lost * dp_size
    floors = [lost_ds @ keys.abs(), heads(lost_ds.mT @ q.abs()), heads(lost.mT @ grad_out.abs())]
    bounds = [
        Bound(grad, terms, dtype, floor=lse_floor(floor, dtype))
        for grad, terms, floor in zip(grads, (to_query, to_key, to_value), floors, strict=False)
    ]
    if sink is not None:
        bounds.append(
            sink_bound(grad_out, p @ values, out_terms, lse, lse_terms, sink, dtype, dlse_used)
        )
        assert torch.allclose(bounds[-1].ref, grads[3])
    return bounds


# Linear layers, on (rows, K) matrices


def derivatives(f: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Tensor, Tensor]:
    """f'(z) and f''(z)."""
    z = z.detach().requires_grad_()
    (first,) = torch.autograd.grad(f(z).sum(), z, create_graph=True)
    if not first.requires_grad:
        return first, torch.zeros_like(z)
    (second,) = torch.autograd.grad(first.sum(), z)
    return first.detach(), second


def affine_terms(n: Tensor, n_terms: Terms, weight: Tensor, bias: Tensor | None) -> Terms:
    size = n.abs() @ weight.abs().T
    size = size if bias is None else size + bias.abs()
    return n_terms.map(lambda t: t @ weight.abs().T) + Terms([(n.shape[-1] + 1, size)])


def near_kink(z: Tensor, z_terms: Terms, unit: float) -> Tensor:
    """A mask of the z whose errors may change the sign, so that relu has another slope."""
    terms = z_terms + Terms(rounds=[z.abs()])
    return z.abs() <= Bound(z, terms, dtype_of(unit)).errors[0]


def pointwise_terms(z: Tensor, z_terms: Terms, f: Callable[[Tensor], Tensor], unit: float) -> Terms:
    """Errors of f(z), where z is rounded to the dtype first."""
    if f(torch.tensor(-1.5)).item() == -1.5:
        return z_terms  # f is the identity, which does not round again
    slope = derivatives(f, z)[0].abs() + 1.2 * unit * z.abs()  # |f''| <= 1.2
    if f(torch.tensor(-50.0)).item() == f(torch.tensor(-60.0)).item() == 0:
        slope = torch.where(near_kink(z, z_terms, unit), 1.0, slope)
    return z_terms.map(lambda t: slope * t) + Terms(
        [(FUNCTION, z.abs())], [slope * roundable(z, dtype_of(unit))]
    )


def activation_of(name: str) -> Callable[[Tensor], Tensor]:
    return lambda z: R.activate(z, name)


def dz_of(dy: Tensor, z: Tensor, activation: str, z_terms: Terms | None, unit: float):
    """dz = dy * activation'(z) and its errors. `z_terms` is None for a saved, exact z."""
    if activation == "none":
        return dy, Terms()
    first, second = derivatives(activation_of(activation), z)
    dz = dy * first
    # The slope 1 - tanh(t)^2 cancels in the tails of gelu_tanh; its argument t is a cubic of z.
    tail = 1 + z.abs() * (0.4 + 0.11 * z.square()) if activation == "gelu_tanh" else 1.0
    evaluated = Terms([(FUNCTION, dy.abs() * tail)], [roundable(dz, dtype_of(unit))])
    terms = evaluated if activation != "relu" else Terms()
    if z_terms is not None and activation == "relu":
        return dz, Terms(jumps=[torch.where(near_kink(z, z_terms, unit), dy.abs(), 0.0)])
    if z_terms is not None:
        bend = dy.abs() * (second.abs() + unit * z.abs())
        terms = terms + (z_terms + Terms(rounds=[z.abs()])).map(lambda t: t * bend)
    return dz, terms


def affine_grad_terms(dz, dz_terms, n, n_terms, weight) -> tuple[Terms, Terms, Terms]:
    dz_size, n_size, weight_size = dz.abs(), n.abs(), weight.abs()
    rows, cols = dz.shape
    dn = dz_terms.map(lambda t: t @ weight_size) + Terms([(cols, dz_size @ weight_size)])
    dweight = (
        dz_terms.map(lambda t: t.T @ n_size)
        + n_terms.map(lambda t: dz_size.T @ t)
        + Terms([(rows, dz_size.T @ n_size)])
    )
    return dn, dweight, dz_terms.map(lambda t: t.sum(0)) + Terms([(rows, dz_size.sum(0))])


class Norm:
    """Normalised rows n = (x - mean) * rstd * scale + shift: their errors, and their gradients'."""

    def __init__(
        self, x: Tensor, eps: Any, centred: bool, scale=None, shift=None, *, dtype: torch.dtype
    ) -> None:
        self.hat, self.mean, self.rstd = R.normalise(x, eps, centred)
        self.centred, self.k, self.dtype = centred, max(x.shape[-1], 1), dtype
        self.scale = torch.ones(x.shape[-1], dtype=torch.float64) if scale is None else scale
        self.n = R.scale_shift(self.hat, scale, shift)
        hat_size = self.hat.abs()  # the error of rstd; a centred norm adds that of the mean
        if centred:
            hat_size = hat_size + self.rstd * x.abs().mean(-1, keepdim=True)
        self.hat_terms = Terms([(self.k, hat_size)])
        size = self.n.abs() if shift is None else self.n.abs() + shift.abs()
        self.terms = self.hat_terms.map(lambda t: t * self.scale.abs()) + Terms(
            [(FUNCTION, size)], [roundable(self.n, dtype)]
        )

    def back(self, t: Tensor) -> Tensor:
        """The magnitude of dx, given the magnitude t of dn."""
        dhat_size, hat = t * self.scale.abs(), self.hat.abs()
        out = dhat_size + hat * (dhat_size * hat).mean(-1, keepdim=True)
        return self.rstd * (out + dhat_size.mean(-1, keepdim=True) if self.centred else out)

    def grad_terms(self, dn: Tensor, dn_terms: Terms) -> tuple[Terms, Terms, Terms]:
        """Errors of dx, dscale and dshift, given magnitude and errors of dn, which is rounded."""
        dn_terms = dn_terms + Terms(rounds=[roundable(dn, self.dtype)])
        dhat_size, hat = dn * self.scale.abs(), self.hat.abs()
        dx = dn_terms.map(self.back) + Terms([(self.k, self.back(dn))])
        dx = dx + self.hat_terms.map(
            lambda t: (
                self.rstd
                * (
                    t * (dhat_size * hat).mean(-1, keepdim=True)
                    + hat * (dhat_size * t).mean(-1, keepdim=True)
                )
            )
        )
        rows = dn.shape[0]
        dscale = dn_terms.map(lambda t: (t * hat).sum(0)) + Terms([(rows, (dn * hat).sum(0))])
        dscale = dscale + self.hat_terms.map(lambda t: (dn * t).sum(0))
        return dx, dscale, dn_terms.map(lambda t: t.sum(0)) + Terms([(rows, dn.sum(0))])


def matrix(t: Tensor) -> Tensor:
    rows = math.prod(t.shape[:-1])
    return up(t).reshape(rows, t.shape[-1])


def shaped(terms: Terms, shape: Sequence[int]) -> Terms:
    return terms.map(lambda t: t.expand(t.shape).reshape(shape))


def offset_terms(norm: Norm, weight_offset: float) -> Terms:
    """Adding an offset to the norm's weight rounds once, in the dtype of sums."""
    return Terms([(1, (norm.hat * (norm.scale.abs() + abs(weight_offset))).abs())])


class Layer:
    """One of linear, layer_norm_linear, rms_norm_linear: y = activation(n @ weight.T + bias)."""

    def __init__(
        self,
        kind: str,
        x: Tensor,
        weight: Tensor,
        bias=None,
        *norm: Any,
        eps: Any = None,
        weight_offset: float = 0,
    ):
        self.x, self.dtype, self.unit = x, x.dtype, UNIT[x.dtype]
        self.weight, self.bias = up(weight), up(bias)
        self.params = [up(t) for t in norm]
        self.kind = kind
        rows = matrix(x)
        if kind == "linear":
            self.norm, self.n, self.n_terms = None, rows, Terms()
        else:
            if weight_offset:
                self.params[0] = self.params[0] + weight_offset
            self.norm = Norm(rows, eps, kind == "layer_norm_linear", *self.params, dtype=self.dtype)
            if weight_offset:
                self.norm.terms = self.norm.terms + offset_terms(self.norm, weight_offset)
            self.n, self.n_terms = self.norm.n, self.norm.terms
        self.z = R.affine(self.n, self.weight, self.bias)
        self.z_terms = affine_terms(self.n, self.n_terms, self.weight, self.bias)
        self.shape = (*x.shape[:-1], weight.shape[0])

    def forward(self, activation: str, full: bool) -> list[Bound | None]:
        f = activation_of(activation)
        y = pointwise_terms(self.z, self.z_terms, f, self.unit)
        out: list[Bound | None] = [
            Bound(f(self.z).reshape(self.shape), shaped(y, self.shape), self.dtype)
        ]
        if not full:
            return out
        if activation in ("none", "relu"):
            out.append(Bound(torch.zeros(0, dtype=torch.float64), Terms(), self.dtype))
        else:
            out.append(
                Bound(self.z.reshape(self.shape), shaped(self.z_terms, self.shape), self.dtype)
            )
        if self.norm is not None:
            lead, acc = self.x.shape[:-1], acc_dtype(self.dtype)
            rows, norm = matrix(self.x), self.norm
            if norm.centred:
                size = rows.abs().mean(-1).reshape(lead)
                out.append(Bound(norm.mean.reshape(lead), Terms([(norm.k, size)]), acc))
            rstd = norm.rstd.reshape(lead)
            out.append(Bound(rstd, Terms([(norm.k + FUNCTION, rstd)]), acc))
        return out

    def backward(self, dy: Tensor, activation: str, preact: Tensor | None, eps: Any):
        """Gradients to x, weight, bias and the norm's parameters."""
        grad_out = matrix(dy)
        if preact is None:
            dz, dz_terms = dz_of(grad_out, self.z, activation, self.z_terms, self.unit)
        else:
            dz, dz_terms = dz_of(grad_out, matrix(preact), activation, None, self.unit)
        rows = matrix(self.x)
        bias = torch.zeros(self.weight.shape[0], dtype=torch.float64)
        args = [rows, self.weight, bias, *self.params]

        def z_of(x, weight, bias, *norm):
            if self.norm is None:
                return R.affine(x, weight, bias)
            hat = R.normalise(x, eps, self.norm.centred)[0]
            return R.affine(R.scale_shift(hat, *norm), weight, bias)

        grads = R.gradients(z_of, dz, [True] * 5, *args)
        dn, dweight, dbias = affine_grad_terms(dz, dz_terms, self.n, self.n_terms, self.weight)
        terms = [dn, dweight, dbias]
        if self.norm is not None:
            terms[0], dscale, dshift = self.norm.grad_terms(dz.abs() @ self.weight.abs(), dn)
            terms += [dscale, dshift]
        shapes = [self.x.shape] + [None] * 4
        return [
            None
            if grad is None
            else Bound(
                grad.reshape(shape or grad.shape), shaped(t, shape or grad.shape), self.dtype
            )
            for grad, t, shape in zip(grads, terms, shapes, strict=False)
        ]


def with_sink(bounds: list[Bound], others: int, dtype) -> list[Bound | None]:
    """The bounds as a backward op returns its results: with dsink, empty if there is no sink."""
    return masked_out([*bounds, None][: others + 1], [True] * (others + 1), dtype)


def masked_out(bounds: list[Bound | None], wanted: Sequence[bool], dtype) -> list[Bound]:
    """A gradient that was not asked for has shape (0,)."""
    empty = Bound(torch.zeros(0, dtype=torch.float64), Terms(), dtype)
    return [b if w and b is not None else empty for b, w in zip(bounds, wanted, strict=True)]


def layer_forward(kind: str, eps_default: float | None, full: bool):
    def bounds(*args, activation: str = "none", eps: float | None = eps_default, weight_offset=0):
        return Layer(kind, *args, eps=eps, weight_offset=weight_offset).forward(activation, full)

    return bounds


def layer_grads(kind: str, eps_default: float | None):
    def grads(
        dy, *args, activation: str = "none", eps: float | None = eps_default, weight_offset=0
    ):
        layer = Layer(kind, *args, eps=eps, weight_offset=weight_offset)
        return layer.backward(dy, activation, None, eps)

    return grads


def row_eps(x: Tensor, rstd: Tensor, centred: bool) -> Tensor:
    """The eps with which each row has its saved rstd."""
    rows = matrix(x)
    mean = rows.mean(-1, keepdim=True) if centred else torch.zeros_like(rows[:, :1])
    var = (rows - mean).square().mean(-1, keepdim=True)
    return up(rstd).reshape(-1, 1) ** -2 - var


def linear_backward_bounds(dy, x, weight, preact=None, *, activation="none", output_mask):
    layer = Layer("linear", x, weight)
    given = dy if preact is None else preact
    return masked_out(layer.backward(dy, activation, given, None), output_mask, x.dtype)


def layer_norm_linear_backward_bounds(
    dy, x, weight, ln_weight, ln_bias, mean, rstd, preact=None, *, activation="none", output_mask
):
    eps = row_eps(x, rstd, centred=True)
    layer = Layer("layer_norm_linear", x, weight, None, ln_weight, ln_bias, eps=eps)
    given = dy if preact is None else preact
    return masked_out(layer.backward(dy, activation, given, eps), output_mask, x.dtype)


def rms_norm_linear_backward_bounds(
    dy,
    x,
    weight,
    norm_weight,
    rstd,
    preact=None,
    *,
    weight_offset=0,
    activation="none",
    output_mask,
):
    eps = row_eps(x, rstd, centred=False)
    layer = Layer(
        "rms_norm_linear", x, weight, None, norm_weight, eps=eps, weight_offset=weight_offset
    )
    given = dy if preact is None else preact
    return masked_out(layer.backward(dy, activation, given, eps), output_mask, x.dtype)


# Norms alone


class NormRows:
    """A norm of x, or of the rounded sum of x and a residual."""

    def __init__(self, x, weight=None, bias=None, *, eps, centred, residual=None, weight_offset=0):
        self.dtype, self.shape, self.lead = x.dtype, x.shape, x.shape[:-1]
        exact = up(x) if residual is None else up(x) + up(residual)
        # torch adds 16-bit values in float32 and rounds the sum, as the op does.
        self.sum = exact if residual is None else up(x + residual)
        self.exact, self.bias = exact, up(bias)
        scale = None if weight is None else up(weight) + weight_offset
        self.rows = matrix(self.sum)
        self.norm = Norm(self.rows, eps, centred, scale, up(bias), dtype=x.dtype)
        if weight_offset:
            self.norm.terms = self.norm.terms + offset_terms(self.norm, weight_offset)

    def results(self, full: bool) -> list[Bound]:
        norm, lead, acc = self.norm, self.lead, acc_dtype(self.dtype)
        out = [Bound(norm.n.reshape(self.shape), shaped(norm.terms, self.shape), self.dtype)]
        if not full:
            return out
        if norm.centred:
            size = self.rows.abs().mean(-1).reshape(lead)
            out.append(Bound(norm.mean.reshape(lead), Terms([(norm.k, size)]), acc))
        rstd = norm.rstd.reshape(lead)
        return [*out, Bound(rstd, Terms([(norm.k + FUNCTION, rstd)]), acc)]

    def gradients(self, dy, dsum=None) -> list[Bound | None]:
        """Gradients to the rows, weight and bias."""
        norm, dn = self.norm, matrix(dy)
        g = dn * norm.scale
        centre = g.mean(-1, keepdim=True) if norm.centred else 0.0
        dx = norm.rstd * (g - centre - norm.hat * (g * norm.hat).mean(-1, keepdim=True))
        dx_terms, dscale_terms, dshift_terms = norm.grad_terms(dn.abs(), Terms())
        dx = dx.reshape(self.shape)
        dx_terms = shaped(dx_terms, self.shape)
        if dsum is not None:
            dx = dx + up(dsum)
            dx_terms = dx_terms + Terms([(1, dx.abs() + up(dsum).abs())])
        return [
            Bound(dx, dx_terms, self.dtype),
            Bound((dn * norm.hat).sum(0), dscale_terms, self.dtype),
            Bound(dn.sum(0), dshift_terms, self.dtype),
        ]


NORM_EPS = {False: 1e-6, True: 1e-5}


def norm_bounds(centred: bool, full: bool, adds: bool = False):
    def bounds(x, *args, eps: float = NORM_EPS[centred], **kwargs):
        residual, *vectors = args if adds else (None, *args)
        rows = NormRows(x, *vectors, eps=eps, centred=centred, residual=residual, **kwargs)
        normed, *statistics = rows.results(full)
        total = [Bound(rows.exact, Terms(), x.dtype)] if adds else []
        return [normed, *total, *statistics]

    return bounds


def norm_grads(centred: bool, adds: bool = False):
    def grads(dy, x, *args, eps: float = NORM_EPS[centred], **kwargs):
        residual, *vectors = args if adds else (None, *args)
        rows = NormRows(x, *vectors, eps=eps, centred=centred, residual=residual, **kwargs)
        dx, dweight, dbias = rows.gradients(dy)
        vectors = [dweight, dbias] if centred else [dweight]
        return [dx, dx, *vectors] if adds else [dx, *vectors]

    return grads


def norm_backward_bounds(centred: bool):
    def bounds(dy, x, weight, *args, output_mask, **kwargs):
        rstd, *dsum = args[centred:]
        eps = row_eps(x, rstd, centred)
        rows = NormRows(x, weight, eps=eps, centred=centred, **kwargs)
        dx, dweight, dbias = rows.gradients(dy, *dsum)
        results = [dx, None if weight is None else dweight, dbias]
        return masked_out(results[: len(output_mask)], output_mask, x.dtype)

    return bounds


# The folded layer norm


def fold_layer_norm_bounds(weight, bias=None, ln_weight=None, ln_bias=None) -> list[Bound]:
    w, b, gamma, beta = up(weight), up(bias), up(ln_weight), up(ln_bias)
    folded, total, shift = R.fold_layer_norm(w, b, gamma, beta, dtype=weight.dtype)
    size = torch.zeros_like(shift) if beta is None else w.abs() @ beta.abs()
    size = size if b is None else size + b.abs()
    acc, k = acc_dtype(weight.dtype), w.shape[1]
    return [
        Bound(folded, Terms(), weight.dtype),
        Bound(total, Terms([(k, folded.abs().sum(1))]), acc),
        Bound(shift, Terms([(k + 1, size)]), acc),
    ]


def folded_parts(x, folded_weight, weight_sum, folded_bias, eps):
    rows, w, total, bias = matrix(x), up(folded_weight), up(weight_sum), up(folded_bias)
    norm = Norm(rows, eps, centred=True, dtype=x.dtype)
    raw = rows.abs() @ w.abs().T + norm.mean.abs() * total.abs()
    z = norm.rstd * (rows @ w.T - norm.mean * total)
    size, product = norm.rstd * raw + z.abs(), z.abs()
    if bias is not None:
        z, size = z + bias, size + bias.abs()
    normalised = norm.hat.abs() @ w.abs().T  # layer_norm rounds it too
    z_terms = Terms([(norm.k + FUNCTION, size)], [normalised, product])
    return rows, w, total, norm, z, z_terms


def folded_layer_norm_linear_bounds(
    x, folded_weight, weight_sum, folded_bias=None, *, eps=1e-5, activation="none"
) -> list[Bound]:
    *_, z, z_terms = folded_parts(x, folded_weight, weight_sum, folded_bias, eps)
    f, shape = activation_of(activation), (*x.shape[:-1], folded_weight.shape[0])
    y = pointwise_terms(z, z_terms, f, UNIT[x.dtype])
    return [Bound(f(z).reshape(shape), shaped(y, shape), x.dtype)]


def folded_layer_norm_linear_grads(
    dy, x, folded_weight, weight_sum, folded_bias=None, *, eps=1e-5, activation="none"
) -> list[Bound]:
    rows, w, total, norm, z, z_terms = folded_parts(x, folded_weight, weight_sum, folded_bias, eps)
    dz, dz_terms = dz_of(matrix(dy), z, activation, z_terms, UNIT[x.dtype])
    (dx, *_) = R.gradients(
        R.folded_layer_norm_linear, dz, [True], rows, w, total, up(folded_bias), eps=eps
    )

    def back(t: Tensor) -> Tensor:
        # dz / dx has three paths: the matmul, the mean and rstd.
        through = t @ w.abs() + (t * total.abs()).sum(-1, keepdim=True) / norm.k
        z_size = norm.rstd * (rows.abs() @ w.abs().T + norm.mean.abs() * total.abs())
        return norm.rstd * (through + norm.hat.abs() * (t * z_size).sum(-1, keepdim=True) / norm.k)

    size = back(dz.abs())
    length = norm.k + w.shape[0]
    terms = dz_terms.map(back) + Terms([(length, size)], [norm.back(dz.abs() @ w.abs())])
    terms = terms + norm.hat_terms.map(
        lambda t: norm.rstd * t * (dz.abs() @ w.abs() * norm.hat.abs()).mean(-1, keepdim=True)
    )
    return [Bound(dx.reshape(x.shape), shaped(terms, x.shape), x.dtype), None, None, None]


# The gated layer


def gate_parts(z: Tensor, gate: str, interleaved: bool):
    left, right = R.halves(z, interleaved)
    f, g = R.GATE_FUNCTIONS[gate]
    return left, right, f, g


def concatenated(left: Tensor, right: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack([left, right], -1).flatten(-2)
    return torch.cat([left, right], -1)


def gate_terms(z: Tensor, z_terms: Terms, gate: str, interleaved: bool, unit: float) -> Terms:
    """Errors of a gate's result, given those of both halves of z."""
    left, right, f, g = gate_parts(z, gate, interleaved)
    to_left = z_terms.map(lambda t: R.halves(t, interleaved)[0])
    to_right = z_terms.map(lambda t: R.halves(t, interleaved)[1])
    slope_f = derivatives(f, left)[0].abs() + 1.2 * unit * left.abs()
    slope_g = derivatives(g, right)[0].abs() + 1.2 * unit * right.abs()
    left_factor, right_factor = f(left), g(right)
    terms = to_left.map(lambda t: slope_f * t * right_factor.abs())
    terms = terms + to_right.map(lambda t: slope_g * t * left_factor.abs())
    # The op may round each factor to the dtype before the product, as eager does.
    return terms + Terms(
        [(FUNCTION, left.abs() * right_factor.abs() + left_factor.abs() * right.abs())],
        [2 * roundable(left_factor * right_factor, dtype_of(unit))],
    )


def gated_activation_bounds(left: Tensor, right: Tensor, *, gate: str = "swiglu") -> list[Bound]:
    y, z = R.gated_activation(up(left), up(right), gate=gate), torch.cat([up(left), up(right)], -1)
    return [Bound(y, gate_terms(z, Terms(), gate, False, UNIT[left.dtype]), left.dtype)]


def gated_activation_backward_bounds(
    dy: Tensor, left: Tensor, right: Tensor, *, gate: str = "swiglu", output_mask=(True, True)
) -> list[Bound]:
    z, unit = torch.cat([up(left), up(right)], -1), UNIT[left.dtype]
    dz, terms = gate_dz(up(dy), z, gate, False, None, unit)
    grads = [
        Bound(dz.chunk(2, -1)[i], terms.map(lambda t, i=i: t.chunk(2, -1)[i]), left.dtype)
        for i in range(2)
    ]
    return masked_out(grads, output_mask, left.dtype)


def gated_linear_bounds(full: bool):
    def bounds(x, weight, bias=None, *, gate="geglu", interleaved=False) -> list[Bound]:
        layer = Layer("linear", x, weight, bias)
        y = R.gated_activation(*R.halves(layer.z, interleaved), gate=gate)
        rounded = layer.z_terms + Terms(rounds=[layer.z.abs()])
        terms = gate_terms(layer.z, rounded, gate, interleaved, UNIT[x.dtype])
        shape = (*x.shape[:-1], weight.shape[0] // 2)
        out = [Bound(y.reshape(shape), shaped(terms, shape), x.dtype)]
        if full:
            z_shape = (*x.shape[:-1], weight.shape[0])
            out.append(Bound(layer.z.reshape(z_shape), shaped(layer.z_terms, z_shape), x.dtype))
        return out

    return bounds


def gate_dz(grad_out, z, gate, interleaved, z_terms, unit):
    left, right, f, g = gate_parts(z, gate, interleaved)
    (f_slope, f_bend), (g_slope, g_bend) = derivatives(f, left), derivatives(g, right)
    left_factor, right_factor = f(left), g(right)
    dleft, dright = grad_out * f_slope * right_factor, grad_out * left_factor * g_slope
    size = grad_out.abs()
    # The factors and their slopes have errors, and dz is rounded.
    evaluated = concatenated(
        size * (1 + right_factor.abs()), size * (1 + left_factor.abs()), interleaved
    )
    dz = concatenated(dleft, dright, interleaved)
    terms = Terms([(2 * FUNCTION, evaluated)], [2 * roundable(dz, dtype_of(unit))])
    if gate == "sigmoid_tanh":  # eager derives the slopes from rounded factors
        slopes = concatenated(
            size * right_factor.abs() * left_factor,
            2 * size * left_factor * right_factor.square(),
            interleaved,
        )
        terms = terms + Terms(rounds=[slopes])
    if gate == "reglu" and z_terms is not None:
        kink = near_kink(right, z_terms.map(lambda t: R.halves(t, interleaved)[1]), unit)
        flips = torch.where(kink, size * left_factor.abs(), 0.0)
        terms = terms + Terms(jumps=[concatenated(torch.zeros_like(flips), flips, interleaved)])
    if z_terms is not None:
        z_terms = z_terms + Terms(rounds=[z.abs()])

        def moved(t: Tensor) -> Tensor:
            left_error, right_error = R.halves(t, interleaved)
            left_bend = f_bend.abs() + unit * left.abs()
            right_bend = g_bend.abs() + unit * right.abs()
            return concatenated(
                size
                * (
                    left_bend * left_error * right_factor.abs()
                    + f_slope.abs() * g_slope.abs() * right_error
                ),
                size
                * (
                    right_bend * right_error * left_factor.abs()
                    + f_slope.abs() * g_slope.abs() * left_error
                ),
                interleaved,
            )

        terms = terms + z_terms.map(moved)
    return dz, terms


def gated_linear_grads(
    dy, x, weight, bias=None, *, gate="geglu", interleaved=False, z: Tensor | None = None
) -> list[Bound]:
    layer = Layer("linear", x, weight, bias)
    unit = UNIT[x.dtype]
    preact, z_terms = (layer.z, layer.z_terms) if z is None else (matrix(z), None)
    dz, dz_terms = gate_dz(matrix(dy), preact, gate, interleaved, z_terms, unit)
    return affine_grads(x, layer, dz, dz_terms)


def affine_grads(x: Tensor, layer: Layer, dz: Tensor, dz_terms: Terms) -> list[Bound]:
    """Gradients to x, weight and bias of a layer without an activation."""
    zero = torch.zeros(layer.weight.shape[0], dtype=torch.float64)
    grads = R.gradients(R.affine, dz, [True] * 3, matrix(x), layer.weight, zero)
    terms = affine_grad_terms(dz, dz_terms, layer.n, Terms(), layer.weight)
    shapes = [x.shape, layer.weight.shape, zero.shape]
    return [
        Bound(grad.reshape(shape), shaped(t, shape), x.dtype)
        for grad, t, shape in zip(grads, terms, shapes, strict=True)
    ]


def packed_pair(left, right, left_bias=None, right_bias=None) -> tuple[Tensor, Tensor]:
    """Weight and bias of gated_linear; a bias that is not given is zeros."""
    biases = [left.new_zeros(left.shape[0]) if b is None else b for b in (left_bias, right_bias)]
    return torch.cat([left, right]), torch.cat(biases)


def gated_linear_pair_bounds(full: bool):
    def bounds(x, *parameters, gate="swiglu") -> list[Bound]:
        return gated_linear_bounds(full)(x, *packed_pair(*parameters), gate=gate)

    return bounds


def gated_linear_pair_grads(dy, x, *parameters, gate="swiglu", z=None) -> list[Bound]:
    layer = Layer("linear", x, *packed_pair(*parameters))
    preact, z_terms = (layer.z, layer.z_terms) if z is None else (matrix(z), None)
    dz, dz_terms = gate_dz(matrix(dy), preact, gate, False, z_terms, UNIT[x.dtype])
    return pair_grads(x, layer, dz, dz_terms)


def pair_grads(x: Tensor, layer: Layer, dz: Tensor, dz_terms: Terms) -> list[Bound]:
    """Gradients to x, both weights and both biases."""
    n = layer.weight.shape[0] // 2
    dx, dweight, dbias = affine_grads(x, layer, dz, dz_terms)
    if x.device.type == "cpu" and x.dtype in (torch.float16, torch.bfloat16):
        # The sum of the left product is rounded before the right one is added.
        dx.terms.rounds.append((dz[:, :n] @ layer.weight[:n]).abs().reshape(x.shape))

    def half(bound: Bound, first: int) -> Bound:
        part = slice(first, first + n)
        return Bound(bound.ref[part], bound.terms.map(lambda t: t[part]), bound.dtype)

    return [dx, half(dweight, 0), half(dweight, n), half(dbias, 0), half(dbias, n)]


def gated_linear_pair_backward_bounds(
    dy, x, left, right, z, *, gate="swiglu", output_mask
) -> list[Bound]:
    grads = gated_linear_pair_grads(dy, x, left, right, gate=gate, z=z)
    return masked_out(grads, output_mask, x.dtype)


def gated_mlp_bounds(full: bool):
    def bounds(
        x, left, right, down, left_bias=None, right_bias=None, down_bias=None, *, gate="swiglu"
    ) -> list[Bound]:
        weight, bias = packed_pair(left, right, left_bias, right_bias)
        act, z = gated_linear_bounds(True)(x, weight, bias, gate=gate)
        rows = matrix(act.ref)
        act_terms = act.terms.map(lambda t: t.reshape(rows.shape)) + Terms(rounds=[rows.abs()])
        y = R.affine(rows, up(down), up(down_bias))
        terms = affine_terms(rows, act_terms, up(down), up(down_bias))
        shape = (*x.shape[:-1], down.shape[0])
        out = [Bound(y.reshape(shape), shaped(terms, shape), x.dtype)]
        return [*out, z] if full else out

    return bounds


def gated_mlp_grads(
    dy,
    x,
    left,
    right,
    down,
    left_bias=None,
    right_bias=None,
    down_bias=None,
    *,
    gate="swiglu",
    z=None,
) -> list[Bound]:
    layer = Layer("linear", x, *packed_pair(left, right, left_bias, right_bias))
    unit, grad_out, weight = UNIT[x.dtype], matrix(dy), up(down)
    preact, z_terms = (layer.z, layer.z_terms) if z is None else (matrix(z), None)
    rounded = Terms() if z_terms is None else z_terms + Terms(rounds=[preact.abs()])
    rows = R.gated_activation(*R.halves(preact, False), gate=gate)
    act_terms = gate_terms(preact, rounded, gate, False, unit) + Terms(rounds=[rows.abs()])
    dact = grad_out @ weight
    size = grad_out.abs() @ weight.abs()
    # The op may round dact, as eager does.
    dact_terms = Terms([(weight.shape[0], size)], [dact.abs()])
    dz, dz_terms = gate_dz(dact, preact, gate, False, z_terms, unit)
    slopes = gate_dz(torch.ones_like(dact), preact, gate, False, None, unit)[0].abs()
    dz_terms = dz_terms + dact_terms.map(lambda t: torch.cat([t, t], -1) * slopes)
    dx, dleft, dright, dleft_bias, dright_bias = pair_grads(x, layer, dz, dz_terms)
    _, ddown, ddown_bias = affine_grad_terms(grad_out, Terms(), rows, act_terms, weight)
    return [
        dx,
        dleft,
        dright,
        Bound(grad_out.T @ rows, ddown, x.dtype),
        dleft_bias,
        dright_bias,
        Bound(grad_out.sum(0), ddown_bias, x.dtype),
    ]


def gated_mlp_backward_bounds(
    dy, x, left, right, down, z, *, gate="swiglu", output_mask
) -> list[Bound]:
    grads = gated_mlp_grads(dy, x, left, right, down, gate=gate, z=z)
    return masked_out(grads, output_mask, x.dtype)


def gated_linear_backward_bounds(
    dy, x, weight, z, *, gate="geglu", interleaved=False, output_mask
) -> list[Bound]:
    grads = gated_linear_grads(dy, x, weight, gate=gate, interleaved=interleaved, z=z)
    return masked_out(grads, output_mask, x.dtype)


# Batched matmul


def bmm_bounds(a: Tensor, b: Tensor) -> list[Bound]:
    x, y = up(a), up(b)
    return [Bound(R.bmm(x, y), Terms([(x.shape[2], R.bmm(x.abs(), y.abs()))]), a.dtype)]


def bmm_grads(dy: Tensor, a: Tensor, b: Tensor) -> list[Bound]:
    """The gradient of an operand of batch 1 is one sum over K and the batch."""
    grad_out, x, y = up(dy), up(a), up(b)

    def bound(left: Tensor, right: Tensor, batch: int) -> Bound:
        product, size = left @ right, left.abs() @ right.abs()
        length = left.shape[2]
        if batch == 1:
            product, size = product.sum(0, keepdim=True), size.sum(0, keepdim=True)
            length *= grad_out.shape[0]
        return Bound(product, Terms([(length, size)]), a.dtype)

    return [bound(grad_out, y.mT, x.shape[0]), bound(x.mT, grad_out, y.shape[0])]


def bmm_backward_bounds(dy: Tensor, a: Tensor, b: Tensor, *, output_mask) -> list[Bound]:
    return masked_out(bmm_grads(dy, a, b), output_mask, a.dtype)


# Scalar attention


def scalar_attention_parts(q: Tensor, k: Tensor, v: Tensor):
    """q, k, v, the scores, the probabilities, and the errors of the probabilities.

    The op may flush a subnormal probability to 0.
    """
    q, k, v, dtype = up(q), up(k), up(v), q.dtype
    s = q[:, None] * k
    p = R.softmax(s)
    lse = torch.logsumexp(s, -1) if s.numel() else q * 0.0
    acc = acc_dtype(dtype)
    lost = torch.where(p < torch.finfo(acc).tiny, p, 0.0) / UNIT[acc]
    p_terms = probability_terms(p, s, lse, 0.3, dtype) + Terms([(1, lost)])  # 0.3: q * k is rounded
    return q, k, v, s, p, p_terms


def scalar_attention_bounds(q: Tensor, k: Tensor, v: Tensor) -> list[Bound]:
    """Bounds of z, of the unrounded z, and of the sums of exp(q k - max)."""
    dtype = q.dtype
    _, k, v, s, p, p_terms = scalar_attention_parts(q, k, v)
    e = torch.exp(s - s.amax(-1, keepdim=True)) if s.numel() else s
    total = e.sum(-1)
    return [
        Bound(p @ v, scalar_attention_terms(p, p_terms, v), dtype),
        Bound(p @ v, scalar_attention_terms(p, p_terms, v), acc_dtype(dtype)),
        Bound(total, p_terms.map(lambda t: total * t.sum(-1)), acc_dtype(dtype)),
    ]


def scalar_attention_terms(p: Tensor, p_terms: Terms, v: Tensor) -> Terms:
    size = p @ v.abs()
    return p_terms.map(lambda t: t @ v.abs() + t.sum(-1) * size) + Terms([(p.shape[-1], size)])


def scalar_attention_grads(dz: Tensor, q: Tensor, k: Tensor, v: Tensor) -> list[Bound]:
    dtype = q.dtype
    q, k, v, _, p, p_terms = scalar_attention_parts(q, k, v)
    grad_out = up(dz)
    grads = R.gradients(R.scalar_attention, grad_out, [True] * 3, q, k, v)
    z_terms = scalar_attention_terms(p, p_terms, v)
    p_terms = p_terms.map(lambda t: t + p * t.sum(-1, keepdim=True))
    carried = v.abs() + (p @ v.abs())[:, None]  # |v| + |z| before anything cancels
    length = p.shape[-1] + FUNCTION

    # The backward recomputes the exponentials and reads a saved z. Where p is nearly 1, eager's
    # errors of both cancel, and the op's do not.
    unit = UNIT[acc_dtype(dtype)]
    cancelling = p * (v - (p @ v)[:, None]).abs()
    saved = p * (p @ v.abs())[:, None]

    def bound(grad: Tensor, of_pairs: Callable[[Tensor], Tensor]) -> Bound:
        """`of_pairs` sums an error of p * (v - z)."""
        own = p_terms.map(lambda t: of_pairs(t * carried)) + z_terms.map(
            lambda t: of_pairs(p * t[:, None])
        )
        own = own + Terms([(length, of_pairs(p * carried))])
        again = of_pairs(2 * FUNCTION * cancelling + FUNCTION * saved)
        return Bound(grad, own, dtype, floor=unit * again.max().item() if p.numel() else 0.0)

    dv = p_terms.map(lambda t: grad_out.abs() @ t) + Terms([(length, grad_out.abs() @ p)])
    again = 2 * FUNCTION * unit * (grad_out.abs() @ p).max().item() if p.numel() else 0.0
    return [
        bound(grads[0], lambda t: grad_out.abs() * (t @ k.abs())),
        bound(grads[1], lambda t: (grad_out * q).abs() @ t),
        Bound(grads[2], dv, dtype, floor=again),
    ]


# Row sums


def row_sum_bounds(x: Tensor) -> list[Bound]:
    v = up(x)
    additions = min(x.shape[-1], 80 + x.shape[-1] / 65536)  # of partial sums that one value enters
    return [Bound(R.row_sum(v), Terms([(additions, v.abs().sum(-1))]), x.dtype)]


def row_sum_grads(dy: Tensor, x: Tensor) -> list[Bound]:
    return [Bound(up(dy)[..., None].expand(x.shape), Terms(), x.dtype)]


# Convolution


def conv2d_bounds(x: Tensor, weight: Tensor) -> list[Bound]:
    v, w = up(x), up(weight)
    return [Bound(R.conv2d(v, w), Terms([(w.numel(), R.conv2d(v.abs(), w.abs()))]), x.dtype)]


def conv2d_grads(dz: Tensor, x: Tensor, weight: Tensor) -> list[Bound]:
    """The op is linear in each argument, so absolute values give the magnitudes."""
    grad_out, v, w = up(dz), up(x), up(weight)
    dx, dweight = R.gradients(R.conv2d, grad_out, [True, True], v, w)
    size_x, size_weight = R.gradients(R.conv2d, grad_out.abs(), [True, True], v.abs(), w.abs())
    return [
        Bound(dx, Terms([(w.numel(), size_x)]), x.dtype),
        Bound(dweight, Terms([(grad_out.numel(), size_weight)]), x.dtype),
    ]


def conv2d_backward_bounds(dz, x, weight, *, output_mask) -> list[Bound]:
    return masked_out(conv2d_grads(dz, x, weight), output_mask, x.dtype)


# 4-bit weights


class Exact(Bound):
    """A bound that only the reference itself meets."""

    @cached_property
    def errors(self) -> tuple[Tensor, Tensor]:
        allowed = torch.full_like(self.ref, 1e-300)
        return allowed, allowed


def exact(ref: Tensor, dtype: torch.dtype) -> Bound:
    return Exact(ref.double(), Terms(), dtype)


def int4_repack_bounds(qweight, scale, zero) -> list[Bound]:
    packed, packed_scale, packed_zero = R.int4_repack(qweight, scale, zero)
    return [
        exact(packed, torch.int32),
        exact(packed_scale, scale.dtype),
        exact(packed_zero, torch.int32),
    ]


def int4_linear_bounds(x, qweight, scale, zero, bias=None) -> list[Bound]:
    """The op may round a weight once to the dtype; the sum over K is in float32."""
    rows, b = matrix(x), up(bias)
    weight = R.int4_weight(qweight.cpu(), up(scale), zero.cpu())
    terms = affine_terms(rows, Terms(), weight, b)
    terms = terms + Terms(rounds=[rows.abs() @ weight.abs().T])
    shape = (*x.shape[:-1], weight.shape[0])
    y = R.affine(rows, weight, b)
    return [Bound(y.reshape(shape), shaped(terms, shape), x.dtype)]


def int4_linear_grads(dy, x, qweight, scale, zero, bias=None) -> list[Bound | None]:
    return [*int4_linear_backward_bounds(dy, qweight, scale, zero), None, None, None, None]


def int4_linear_backward_bounds(dy, qweight, scale, zero) -> list[Bound]:
    rows = matrix(dy)
    weight = R.int4_weight(qweight.cpu(), up(scale), zero.cpu())
    size = rows.abs() @ weight.abs()
    shape = (*dy.shape[:-1], weight.shape[1])
    terms = shaped(Terms([(rows.shape[1], size)], [size]), shape)
    return [Bound((rows @ weight).reshape(shape), terms, dy.dtype)]


def int4_linear_repacked_bounds(x, *packed, out_features) -> list[Bound]:
    weight = R.int4_portable(*packed[:3], out_features, x.shape[-1])
    return int4_linear_bounds(x, *weight, *packed[3:])


def int4_linear_repacked_grads(dy, x, *packed, out_features) -> list[Bound | None]:
    weight = R.int4_portable(*packed[:3], out_features, x.shape[-1])
    return int4_linear_grads(dy, x, *weight)


def int4_linear_repacked_backward_bounds(dy, *packed, in_features) -> list[Bound]:
    return int4_linear_backward_bounds(dy, *R.int4_portable(*packed, dy.shape[-1], in_features))


# A vector or a scalar against a matrix


def add_scalar_bounds(x: Tensor, value: float) -> list[Bound]:
    v = up(x)
    return [Bound(R.add_scalar(v, value), Terms([(1, v.abs() + abs(value))]), x.dtype)]


def outer_add_bounds(x: Tensor, y: Tensor) -> list[Bound]:
    v, w = up(x), up(y)
    return [Bound(R.outer_add(v, w), Terms([(1, R.outer_add(v.abs(), w.abs()))]), x.dtype)]


def outer_add_backward_bounds(dz: Tensor) -> list[Bound]:
    grad_out = up(dz)
    return [
        Bound(grad_out.sum(dim), Terms([(grad_out.shape[dim], grad_out.abs().sum(dim))]), dz.dtype)
        for dim in (0, 1)
    ]


def product_relu_bounds(x: Tensor, y: Tensor) -> list[Bound]:
    """x is (cols,) or (rows, cols), y (rows,)."""
    product = up(x) * up(y)[:, None]
    return [Bound(R.activate(product, "relu"), Terms([(1, product.abs())]), x.dtype)]


def product_relu_grads(dz: Tensor, x: Tensor, y: Tensor) -> list[Bound]:
    """relu's slope follows the product in the accumulator's dtype, which may underflow to 0."""
    grad_out, v, w = up(dz), up(x), up(y)[:, None]
    grad_out = torch.where(v * w <= 0, 0.0, grad_out)
    dx, dy = grad_out * w, (grad_out * v).sum(1)
    lost = (v * w).abs() < torch.finfo(acc_dtype(x.dtype)).tiny
    jump_x, jump_y = torch.where(lost, dx.abs(), 0.0), torch.where(lost, (grad_out * v).abs(), 0.0)
    size, count = dx.abs(), 1
    if x.dim() == 1:
        dx, size, jump_x, count = dx.sum(0), size.sum(0), jump_x.sum(0), grad_out.shape[0] + 1
    return [
        Bound(dx, Terms([(count, size)], jumps=[jump_x]), x.dtype),
        Bound(
            dy,
            Terms([(grad_out.shape[1] + 1, (grad_out * v).abs().sum(1))], jumps=[jump_y.sum(1)]),
            x.dtype,
        ),
    ]


# The losses of a linear layer's logits


class LossRows:
    """The logits of a loss and their errors; rows that have no target are left out. Without a
    weight, x are the logits.

    The logits z are float32 and are not rounded to the tensors' dtype, but dlogits are.
    """

    def __init__(self, x, weight, target, bias, *, softcap=None, temperature=1.0, live=None):
        self.dtype = x.dtype
        self.shape = x.shape
        self.live = torch.ones(target.shape, dtype=torch.bool) if live is None else live
        self.x, self.weight, self.bias = up(x)[self.live], up(weight), up(bias)
        self.target = up(target).long()[self.live]
        self.softcap, self.temperature = softcap, temperature
        logits, self.logit_terms = self.x, Terms()
        if weight is not None:
            logits = R.affine(self.x, self.weight, self.bias)
            self.logit_terms = affine_terms(self.x, Terms(), self.weight, self.bias)
        z, terms, slope = capped(logits, self.logit_terms, softcap)
        self.z, self.slope = z / temperature, slope / temperature
        self.terms = terms.map(lambda t: t / temperature)
        if temperature != 1:
            # A kernel may multiply by the rounded inverse.
            self.terms = self.terms + Terms([(2 if weight is None else 1, self.z.abs())])
        self.lse = torch.logsumexp(self.z, -1)
        self.p = torch.exp(self.z - self.lse[:, None])
        self.lse_terms = logsumexp_terms(self.p, self.z, self.lse, self.terms)

    def at_target(self, t: Tensor) -> Tensor:
        return t.gather(-1, self.target[:, None])[:, 0]

    def all_rows(self, t: Tensor) -> Tensor:
        """A vector over the live rows as one over all rows, 0 elsewhere."""
        return t.new_zeros(self.live.shape).masked_scatter(self.live, t)

    def bound(self, value: Tensor, terms: Terms) -> Bound:
        return Bound(self.all_rows(value), terms.map(self.all_rows), acc_dtype(self.dtype))

    def logprob(self) -> tuple[Tensor, Terms]:
        z_target = self.at_target(self.z)
        own = Terms([(4, self.lse.abs() + z_target.abs() + self.z.abs().amax(-1))])
        return z_target - self.lse, self.lse_terms + self.terms.map(self.at_target) + own

    def entropy(self) -> tuple[Tensor, Terms]:
        mean = (self.p * self.z).sum(-1)
        spread = self.p * (self.z - mean[:, None]).abs()
        lowered = self.p * (self.z.amax(-1, keepdim=True) - self.z)
        exponent = FUNCTION + self.z.abs() + self.lse.abs()[:, None]
        own = Terms(
            [
                (self.z.shape[-1] + FUNCTION, lowered.sum(-1) + self.lse.abs()),
                (1, (lowered * exponent).sum(-1)),
            ]
        )
        return self.lse - mean, self.terms.map(lambda t: (t * spread).sum(-1)) + own

    def dlogits(self, dz: Tensor, p_size: Tensor, size: Tensor) -> tuple[Tensor, Terms]:
        """The gradient of the logits from that of z, in which p has the factor `p_size`."""
        p_error = lse_error(self.p, self.lse, self.z) + FUNCTION * self.p
        terms = Terms([(1, p_size * p_error), (FUNCTION, size)])
        terms = terms + self.terms.map(lambda t: p_size * self.p * t)
        terms = terms + self.lse_terms.map(lambda t: p_size * self.p * t[:, None])
        terms = sloped(terms, size, self.slope, self.logit_terms, self.softcap)
        if self.softcap is None:
            terms = terms.map(lambda t: t * self.slope)
        return dz * self.slope, terms

    def gradients(
        self, dz: Tensor, p_size: Tensor, size: Tensor, stored: bool, uniform: Tensor | None = None
    ) -> list[Bound]:
        """Bounds of dx, dweight, dbias of dz = dloss / dz, in which p has the factor `p_size`.

        `uniform` (rows, 1) is the magnitude of the term that all of a row's dz share.
        """
        dlogits, terms = self.dlogits(dz, p_size, size)
        shared = torch.zeros_like(dlogits) if uniform is None else uniform * self.slope.abs()

        # Hopper's engine for bfloat16 multiplies y by x times a factor of the row, both rounded,
        # and adds the products of the shared term afterwards.
        twice = self.dtype == torch.bfloat16
        rounded = roundable(dlogits.abs() + shared * twice, self.dtype)
        terms = terms + Terms(rounds=[rounded] * (1 + twice))
        dx_terms, dweight_terms, dbias_terms = affine_grad_terms(
            dlogits, terms, self.x, Terms(), self.weight
        )
        values = dlogits @ self.weight, dlogits.T @ self.x, dlogits.sum(0)
        added = shared @ self.weight, shared.T @ self.x, shared.sum(0)
        lost = p_size * lse_error(self.p, self.lse, self.z) * self.slope.abs()
        lost = lost @ self.weight.abs(), lost.T @ self.x.abs(), lost.sum(0)

        bounds = []
        every = (dx_terms, dweight_terms, dbias_terms)
        for value, of_shared, each, floor in zip(values, added, every, lost, strict=True):
            if stored or twice:  # rounded, then multiplied by dloss or a factor, and rounded again
                size = value.abs() + of_shared.abs() * twice
                each = each + Terms([(1, size)], [roundable(size, self.dtype)])
            bounds.append(Bound(value, each, self.dtype, floor=lse_floor(floor, self.dtype)))
        bounds[0] = self.whole(bounds[0])
        return bounds

    def whole(self, live: Bound) -> Bound:
        """The bound of all rows of x from that of the live rows."""

        def filled(t: Tensor) -> Tensor:
            return t.new_zeros(self.shape).masked_scatter(self.live[..., None], t)

        return Bound(filled(live.ref), live.terms.map(filled), self.dtype, floor=live.floor)

    def logit_gradient(self, dz: Tensor, p_size: Tensor, size: Tensor, stored: bool) -> Bound:
        """The bound of dlogits, which are multiplied by dloss and rounded again where stored."""
        value, terms = self.dlogits(dz, p_size, size)
        terms = terms + Terms([(1, value.abs())], [roundable(value, self.dtype)] * stored)
        lost = p_size * lse_error(self.p, self.lse, self.z) * self.slope.abs()
        return self.whole(Bound(value, terms, self.dtype, floor=lse_floor(lost, self.dtype)))


class CrossEntropy(LossRows):
    def __init__(
        self, x, weight, target, bias=None, *, reduction="mean", ignore_index=-100,
        label_smoothing=0.0, softcap=None, z_loss=0.0, shift=0, temperature=1.0, keep="auto",
    ):  # fmt: skip
        goal = up(target).long()
        if shift:
            ignored = torch.full_like(goal[..., :1], ignore_index)
            goal = torch.cat([goal[..., 1:], ignored], -1)
        live = goal != ignore_index
        super().__init__(x, weight, goal, bias, softcap=softcap, temperature=temperature, live=live)
        self.reduction, self.shift = reduction, shift
        self.eps, self.z_loss = label_smoothing, z_loss
        self.stored = reduction != "none" and x.dtype != torch.float16 and keep != "nothing"

    def results(self) -> list[Bound]:
        """The bounds of loss and lse."""
        logprob, terms = self.logprob()
        eps, lse, mean = self.eps, self.lse, self.z.mean(-1)
        loss = -(1 - eps) * logprob + eps * (lse - mean) + self.z_loss * lse.square()
        size = self.lse_terms + Terms([(4, lse.abs())])
        terms = terms.map(lambda t: (1 - eps) * t)
        terms = terms + size.map(lambda t: (eps + 2 * abs(self.z_loss) * lse.abs()) * t)
        terms = terms + self.terms.map(lambda t: eps * t.mean(-1))
        terms = terms + Terms([(self.z.shape[-1], eps * self.z.abs().mean(-1)), (4, loss.abs())])
        each = self.cut(self.bound(loss, terms))
        rows = self.cut(self.bound(lse, self.lse_terms + Terms([(2, lse.abs())])))
        if self.reduction == "none":
            return [each, rows]
        count = self.live.sum() if self.reduction == "mean" else 1
        sums = each.terms + Terms([(max(each.ref.numel(), 1), each.ref.abs())])
        total = sums.map(lambda t: t.sum() / count)
        return [Bound(each.ref.sum() / count, total, each.dtype), rows]

    def statistics(self) -> list[Bound]:
        """The bounds of loss, max and lse - max."""
        largest = self.z.amax(-1)
        of_max = self.terms.map(lambda t: t.amax(-1)) + Terms([(2, largest.abs())])
        of_sum = self.lse_terms + Terms([(2, self.lse.abs() + largest.abs())])
        rows = [self.bound(largest, of_max), self.bound(self.lse - largest, of_sum)]
        return [self.results()[0], *map(self.cut, rows)]

    def cut(self, bound: Bound) -> Bound:
        if not self.shift:
            return bound
        return Bound(bound.ref[..., :-1], bound.terms.map(lambda t: t[..., :-1]), bound.dtype)

    def mean(self) -> Bound:
        """The mean of z."""
        n = self.z.shape[-1]
        terms = self.terms.map(lambda t: t.mean(-1)) + Terms([(n, self.z.abs().mean(-1))])
        return self.cut(self.bound(self.z.mean(-1), terms))

    def dz(
        self, dloss: Tensor, dlse: Tensor | None = None, dmean: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient of z, the factor of p in it, and its magnitude."""
        if dmean is not None:
            of_mean = self.live_rows(dmean) / self.z.shape[-1]
            dz, p_size, size = self.dz(dloss, dlse)
            return dz + of_mean, p_size, size + of_mean.abs()
        if dlse is not None:
            of_lse = self.live_rows(dlse)
            dz, p_size, size = self.dz(dloss)
            p_size, size = p_size + of_lse.abs(), size + of_lse.abs() * self.p
            return dz + of_lse * self.p, p_size, size
        d = self.dloss_of_rows(dloss)
        factor = 1 + 2 * self.z_loss * self.lse[:, None]
        hit = torch.nn.functional.one_hot(self.target, self.z.shape[-1]).double()
        flat = self.eps / self.z.shape[-1]
        dz = d * (self.p * factor - flat - (1 - self.eps) * hit)
        p_size = d.abs() * (1 + 2 * abs(self.z_loss) * (2 * self.lse.abs()[:, None] + 1))
        return dz, p_size, p_size * self.p + d.abs() * (flat + (1 - self.eps) * hit)

    def dloss_of_rows(self, dloss: Tensor) -> Tensor:
        """The gradient of each live row's loss, (rows, 1)."""
        if self.reduction == "none":
            return self.live_rows(dloss)
        d = up(dloss) / (self.live.sum() if self.reduction == "mean" else 1)
        return d.expand(self.lse.shape)[:, None]

    def live_rows(self, d: Tensor) -> Tensor:
        """A value of each live row, (rows, 1)."""
        d = up(d)
        d = torch.cat([d, d.new_zeros(d[..., :1].shape)], -1) if self.shift else d
        return d[self.live][:, None]

    def backward(
        self,
        dloss: Tensor,
        stored: bool = False,
        dlse: Tensor | None = None,
        dmean: Tensor | None = None,
    ) -> list[Bound]:
        uniform = self.dloss_of_rows(dloss).abs() * self.eps
        if dmean is not None:
            uniform = uniform + self.live_rows(dmean).abs()
        return self.gradients(*self.dz(dloss, dlse, dmean), stored, uniform / self.z.shape[-1])

    def logits_backward(self, dloss: Tensor, stored: bool = False) -> Bound:
        return self.logit_gradient(*self.dz(dloss), stored)


def given_logits_grads(dloss, logits, target, **kwargs) -> list[Bound | None]:
    rows = CrossEntropy(logits, None, target, **kwargs)
    return [rows.logits_backward(dloss, rows.stored), None]


def given_logits_gradients(logits, target, **kwargs) -> list[Bound]:
    rows = CrossEntropy(logits, None, target, **kwargs)
    one = torch.ones((), dtype=torch.float64)
    return [rows.results()[0], rows.logits_backward(one)]


def cross_entropy_grads(dloss, x, weight, target, bias=None, **kwargs) -> list[Bound | None]:
    rows = CrossEntropy(x, weight, target, bias, **kwargs)
    dx, dweight, dbias = rows.backward(dloss, rows.stored)
    return [dx, dweight, None, dbias]


def cross_entropy_backward_bounds(
    dloss, x, weight, target, lse, bias=None, *, dlse=None, dmean=None, output_mask, **kwargs
):  # fmt: skip
    rows = CrossEntropy(x, weight, target, bias, **kwargs)
    return masked_out(rows.backward(dloss, dlse=dlse, dmean=dmean), output_mask, x.dtype)


def cross_entropy_gradients_bounds(x, weight, target, bias=None, *, output_mask, **kwargs):
    rows = CrossEntropy(x, weight, target, bias, **kwargs)
    one = torch.ones((), dtype=torch.float64)
    return [rows.results()[0], *masked_out(rows.backward(one), output_mask, x.dtype)]


def cross_entropy_exponentials_bounds(x, weight, target, bias=None, **kwargs) -> list[Bound]:
    """y = (p - (1 - eps) hit / factor) dz / dlogit, 0 behind N and where a row is ignored.

    Torch's ops compute it. With keep="auto" the CPU stores nothing.
    """
    keep, mean = kwargs.pop("keep", "exponentials"), kwargs.pop("mean", False)
    rows = CrossEntropy(x, weight, target, bias, **kwargs)

    def empty(dtype: torch.dtype) -> Bound:
        return Bound(torch.zeros(0, dtype=torch.float64), Terms(), dtype)

    wide = acc_dtype(x.dtype)
    mean_of_z = rows.mean() if mean else empty(wide)
    if keep != "exponentials":
        return [*rows.results(), empty(x.dtype), empty(wide), mean_of_z]
    factor = 1 + 2 * rows.z_loss * rows.lse
    factor_terms = rows.lse_terms.map(lambda t: 2 * abs(rows.z_loss) * t) + Terms([(4, factor)])
    hit = torch.nn.functional.one_hot(rows.target, rows.z.shape[-1]) / factor[:, None]
    hit = hit * (1 - rows.eps)
    y, terms = rows.dlogits(rows.p - hit, torch.ones_like(rows.p), rows.p + hit.abs())
    terms = terms + factor_terms.map(lambda t: hit.abs() * rows.slope * (t / factor)[:, None])

    def filled(t: Tensor) -> Tensor:
        whole = t.new_zeros(rows.live.numel(), -(-weight.shape[0] // 64) * 64)
        whole[rows.live.flatten(), : weight.shape[0]] = t
        return whole.view(*rows.live.shape, whole.shape[-1])

    return [
        *rows.results(),
        Bound(filled(y), terms.map(filled), x.dtype),
        rows.bound(factor, factor_terms),
        mean_of_z,
    ]


def cross_entropy_exponentials_backward_bounds(
    dloss, x, weight, target, y, factor, *, reduction="mean", ignore_index=-100,
    label_smoothing=0.0, shift=0, temperature=1.0, output_mask,
):  # fmt: skip
    rows = up(x).reshape(target.numel(), weight.shape[1])
    y = up(y).reshape(target.numel(), y.shape[-1])[:, : weight.shape[0]]
    live = up(factor).flatten() != 0
    dloss = R.rows_dloss(up(dloss), up(target), reduction, ignore_index, shift)
    uniform = dloss * live * (label_smoothing / (temperature * weight.shape[0]))
    size = (dloss * up(factor).flatten())[:, None] * y
    dlogits = size - uniform[:, None]
    size = size.abs() + uniform.abs()[:, None]
    terms = Terms([(4, size)])
    if x.dtype == torch.bfloat16:
        terms = terms + Terms(rounds=[roundable(size, x.dtype)])
    every = affine_grad_terms(dlogits, terms, rows, Terms(), up(weight))
    values = [dlogits @ up(weight), dlogits.T @ rows, dlogits.sum(0)]
    shared = uniform[:, None].expand(dlogits.shape)
    added = [shared @ up(weight), shared.T @ rows, shared.sum(0)]
    again = x.dtype == torch.bfloat16
    bounds = [
        Bound(v, t + Terms(rounds=[roundable(v.abs() + a.abs(), x.dtype)] * again), x.dtype)
        for v, a, t in zip(values, added, every, strict=True)
    ]
    bounds[0] = Bound(
        bounds[0].ref.view(x.shape), bounds[0].terms.map(lambda t: t.view(x.shape)), x.dtype
    )
    return masked_out(bounds, output_mask, x.dtype)


def logprobs_bounds(x, weight, target, bias=None, *, entropy=False, **kwargs) -> list[Bound]:
    rows = LossRows(x, weight, target, bias, **kwargs)
    asked = (
        rows.bound(*rows.entropy())
        if entropy
        else Bound(torch.zeros(0, dtype=torch.float64), Terms(), acc_dtype(x.dtype))
    )
    return [
        rows.bound(*rows.logprob()),
        asked,
        rows.bound(rows.lse, rows.lse_terms + Terms([(2, rows.lse.abs())])),
    ]


def logprobs_grads(
    dlogprob, x, weight, target, bias=None, *, dentropy=None, entropy=False, **kwargs
) -> list[Bound | None]:
    rows = LossRows(x, weight, target, bias, **kwargs)
    d, de = (
        up(t)[rows.live][:, None]
        for t in (dlogprob, 0 * dlogprob if dentropy is None else dentropy)
    )
    mean = (rows.p * rows.z).sum(-1, keepdim=True)
    hit = torch.nn.functional.one_hot(rows.target, rows.z.shape[-1]).double()
    dz = d * (hit - rows.p) - de * rows.p * (rows.z - mean)
    # The entropy's own error enters through the mean.
    spread = (rows.z - mean).abs() + FUNCTION * (rows.z.abs() + rows.lse.abs()[:, None]) + 1
    p_size = d.abs() + de.abs() * spread
    size = p_size * rows.p + d.abs() * hit
    dx, dweight, dbias = rows.gradients(dz, p_size, size, stored=False)
    return [dx, dweight, None, dbias]


def logprobs_backward_bounds(
    dlogprob, x, weight, target, lse, bias=None, row_entropy=None, dentropy=None, *,
    output_mask, **kwargs,
):  # fmt: skip
    dx, dweight, _, dbias = logprobs_grads(
        dlogprob, x, weight, target, bias, dentropy=dentropy, **kwargs
    )
    return masked_out([dx, dweight, dbias], output_mask, x.dtype)


def scaled_bounds(dloss: Tensor, *stored: Tensor) -> list[Bound]:
    return [Bound(up(dloss) * up(t), Terms([(1, up(dloss * t).abs())]), t.dtype) for t in stored]


def rotary_bound(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, transposed: bool) -> Bound:
    """x is rotated by the tables, or by the transposed rotation."""
    front, rest = up(x).split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    cos, sin = up(cos).unsqueeze(-3), up(sin).unsqueeze(-3)
    if transposed:
        rotated = -R.rotate(front * sin, interleaved)
    else:
        rotated = R.rotate(front, interleaved) * sin
    out = torch.cat([front * cos + rotated, rest], -1)
    size = torch.cat([(front * cos).abs() + rotated.abs(), torch.zeros_like(rest)], -1)
    return Bound(out, Terms([(2, size)]), x.dtype)


def rotary_bounds(q, k, cos, sin, *, interleaved=False) -> list[Bound]:
    return [rotary_bound(x, cos, sin, interleaved, transposed=False) for x in (q, k)]


def rotary_backward_bounds(
    dq_out, dk_out, cos, sin, *, interleaved=False, output_mask
) -> list[Bound]:
    grads = [rotary_bound(d, cos, sin, interleaved, transposed=True) for d in (dq_out, dk_out)]
    return masked_out(grads, output_mask, dq_out.dtype)


REFERENCES: dict[str, Callable[..., list[Bound | None]]] = {
    "int4_pack": lambda codes: [exact(R.int4_words(codes), torch.int32)],
    "int4_unpack": lambda packed, cols: [exact(R.int4_codes(packed, cols), torch.uint8)],
    "int4_repack": int4_repack_bounds,
    "int4_linear": int4_linear_bounds,
    "int4_linear_backward": int4_linear_backward_bounds,
    "int4_linear_repacked": int4_linear_repacked_bounds,
    "int4_linear_repacked_backward": int4_linear_repacked_backward_bounds,
    "softmax": softmax_bounds,
    "softmax_backward": softmax_backward_bounds,
    "causal_softmax": causal_softmax_bounds,
    "causal_softmax_backward": causal_softmax_backward_bounds,
    "softmax_matmul": lambda *a, **k: softmax_matmul_bounds(*a, **k)[:1],
    "softmax_matmul_forward": softmax_matmul_bounds,
    "softmax_matmul_backward": lambda dout, s, v, out, lse, *a, **k: with_sink(
        softmax_matmul_grads(dout, s, v, *a, **k), 2, s.dtype
    ),
    "attention": lambda *a, **k: attention_bounds(*a, **k)[:1],
    "attention_forward": attention_bounds,
    "attention_with_lse": attention_bounds,
    "attention_backward": lambda dout, q, k, v, out, lse, *a, **kw: with_sink(
        attention_grads(dout, q, k, v, *a, **kw), 3, q.dtype
    ),
    "linear": layer_forward("linear", None, full=False),
    "linear_forward": layer_forward("linear", None, full=True),
    "linear_backward": linear_backward_bounds,
    "layer_norm_linear": layer_forward("layer_norm_linear", 1e-5, full=False),
    "layer_norm_linear_forward": layer_forward("layer_norm_linear", 1e-5, full=True),
    "layer_norm_linear_backward": layer_norm_linear_backward_bounds,
    "rms_norm_linear": layer_forward("rms_norm_linear", 1e-6, full=False),
    "rms_norm_linear_forward": layer_forward("rms_norm_linear", 1e-6, full=True),
    "rms_norm_linear_backward": rms_norm_linear_backward_bounds,
    "rms_norm": norm_bounds(False, full=False),
    "rms_norm_forward": norm_bounds(False, full=True),
    "rms_norm_backward": norm_backward_bounds(False),
    "layer_norm": norm_bounds(True, full=False),
    "layer_norm_forward": norm_bounds(True, full=True),
    "layer_norm_backward": norm_backward_bounds(True),
    "add_rms_norm": norm_bounds(False, full=False, adds=True),
    "add_rms_norm_forward": norm_bounds(False, full=True, adds=True),
    "add_rms_norm_backward": norm_backward_bounds(False),
    "add_layer_norm": norm_bounds(True, full=False, adds=True),
    "add_layer_norm_forward": norm_bounds(True, full=True, adds=True),
    "add_layer_norm_backward": norm_backward_bounds(True),
    "fold_layer_norm": fold_layer_norm_bounds,
    "folded_layer_norm_linear": folded_layer_norm_linear_bounds,
    "folded_layer_norm_linear_backward": lambda *a, **k: folded_layer_norm_linear_grads(*a, **k)[
        :1
    ],
    "cross_entropy": lambda x, t, **k: CrossEntropy(x, None, t, **k).results()[:1],
    "cross_entropy_forward": lambda x, t, **k: CrossEntropy(x, None, t, **k).statistics(),
    "cross_entropy_backward": lambda dloss, x, t, largest, log_sum, **k: [
        CrossEntropy(x, None, t, **k).logits_backward(dloss)
    ],
    "cross_entropy_gradients_forward": given_logits_gradients,
    "cross_entropy_gradients_backward": scaled_bounds,
    "linear_cross_entropy": lambda *a, **k: CrossEntropy(*a, **k).results()[:1],
    "linear_cross_entropy_forward": lambda *a, **k: CrossEntropy(*a, **k).results(),
    "linear_cross_entropy_backward": cross_entropy_backward_bounds,
    "linear_cross_entropy_gradients_forward": cross_entropy_gradients_bounds,
    "linear_cross_entropy_gradients_backward": scaled_bounds,
    "linear_cross_entropy_exponentials_forward": cross_entropy_exponentials_bounds,
    "linear_cross_entropy_exponentials_backward": cross_entropy_exponentials_backward_bounds,
    "linear_token_logprobs": lambda *a, **k: logprobs_bounds(*a, **k)[:2],
    "linear_token_logprobs_forward": logprobs_bounds,
    "linear_token_logprobs_backward": logprobs_backward_bounds,
    "gated_linear": gated_linear_bounds(full=False),
    "gated_linear_forward": gated_linear_bounds(full=True),
    "gated_linear_backward": gated_linear_backward_bounds,
    "gated_activation": gated_activation_bounds,
    "gated_activation_backward": gated_activation_backward_bounds,
    "gated_linear_pair": gated_linear_pair_bounds(full=False),
    "gated_linear_pair_forward": gated_linear_pair_bounds(full=True),
    "gated_linear_pair_backward": gated_linear_pair_backward_bounds,
    "gated_mlp": gated_mlp_bounds(full=False),
    "gated_mlp_forward": gated_mlp_bounds(full=True),
    "gated_mlp_backward": gated_mlp_backward_bounds,
    "bmm": bmm_bounds,
    "bmm_backward": bmm_backward_bounds,
    "add_scalar": add_scalar_bounds,
    "outer_add": outer_add_bounds,
    "outer_add_backward": outer_add_backward_bounds,
    "outer_mul_relu": product_relu_bounds,
    "outer_mul_relu_backward": product_relu_grads,
    "mul_relu": product_relu_bounds,
    "mul_relu_backward": product_relu_grads,
    "rotary": rotary_bounds,
    "rotary_backward": rotary_backward_bounds,
    "row_sum": row_sum_bounds,
    "conv2d": conv2d_bounds,
    "conv2d_backward": conv2d_backward_bounds,
    "scalar_attention": lambda *a: scalar_attention_bounds(*a)[:1],
    "scalar_attention_forward": scalar_attention_bounds,
    "scalar_attention_backward": lambda dz, q, k, v, mean, total, *, output_mask: masked_out(
        scalar_attention_grads(dz, q, k, v), output_mask, q.dtype
    ),
}


def softmax_grads(dy: Tensor, x: Tensor) -> list[Bound]:
    v, grad_out = up(x), up(dy)
    (dx,) = R.gradients(R.softmax, grad_out, [True], v)
    (y,) = softmax_bounds(x)
    return [Bound(dx, softmax_backward_terms(grad_out, y.ref, 1.0, x.dtype, y.terms), x.dtype)]


def causal_softmax_grads(
    dy, scores, leftpad=None, *, scale=1.0, softcap=None, sink=None, **mask
) -> list[Bound]:
    s, pads = up(scores), up(leftpad)
    seen = R.scores_mask(s, pads, **mask).expand(s.shape)
    grad_out = torch.where(seen, up(dy), 0.0)
    given = {"scale": scale, "softcap": softcap, **mask}
    dx, *_ = R.gradients(R.causal_softmax, grad_out, [True], s, pads, sink=up(sink), **given)
    (y,) = causal_softmax_bounds(scores, leftpad, sink=sink, **given)
    terms = softmax_backward_terms(grad_out, y.ref, scale, scores.dtype, y.terms)
    clean = torch.where(seen, s, 0.0)
    _, z_terms, slope = capped(clean * scale, Terms(), softcap)
    delta = (grad_out * y.ref).abs().sum(-1, keepdim=True)
    terms = sloped(terms, abs(scale) * y.ref * (grad_out.abs() + delta), slope, z_terms, softcap)
    bounds = [Bound(dx, terms, scores.dtype)]
    if sink is not None:
        p_terms = y.terms + Terms(rounds=[roundable(y.ref, scores.dtype)])
        bounds.append(
            causal_sink_bound(
                grad_out, y.ref, p_terms, clean, seen, scale, softcap, sink, scores.dtype
            )
        )
    return bounds


# Gradients of a public op to its positional arguments, through autograd.
GRADIENTS: dict[str, Callable[..., list[Bound | None]]] = {
    "int4_linear": int4_linear_grads,
    "int4_linear_repacked": int4_linear_repacked_grads,
    "softmax": softmax_grads,
    "causal_softmax": causal_softmax_grads,
    "softmax_matmul": softmax_matmul_grads,
    "attention": attention_grads,
    "linear": layer_grads("linear", None),
    "layer_norm_linear": layer_grads("layer_norm_linear", 1e-5),
    "rms_norm_linear": layer_grads("rms_norm_linear", 1e-6),
    "rms_norm": norm_grads(False),
    "layer_norm": norm_grads(True),
    "add_rms_norm": norm_grads(False, adds=True),
    "add_layer_norm": norm_grads(True, adds=True),
    "folded_layer_norm_linear": folded_layer_norm_linear_grads,
    "cross_entropy": given_logits_grads,
    "linear_cross_entropy": cross_entropy_grads,
    "linear_token_logprobs": logprobs_grads,
    "gated_linear": gated_linear_grads,
    "gated_activation": gated_activation_backward_bounds,
    "gated_linear_pair": gated_linear_pair_grads,
    "gated_mlp": gated_mlp_grads,
    "bmm": bmm_grads,
    "add_scalar": lambda dz, x, value: [Bound(up(dz), Terms(), x.dtype)],
    "outer_add": lambda dz, x, y: outer_add_backward_bounds(dz),
    "outer_mul_relu": product_relu_grads,
    "mul_relu": product_relu_grads,
    "rotary": lambda dout, q, k, cos, sin, *, interleaved=False: [
        rotary_bound(dout, cos, sin, interleaved, transposed=True)
    ],
    "row_sum": row_sum_grads,
    "conv2d": conv2d_grads,
    "scalar_attention": scalar_attention_grads,
}
