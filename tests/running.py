"""How far each result may be from its float64 reference: REFERENCES[op](*args) -> Bounds.

A running error analysis (Higham, Accuracy and Stability of Numerical Algorithms, chapter 3): the
formulas of reference.py are evaluated with numbers that carry their first-order errors. u is half
the distance from 1 to the next number, U that of the sums' dtype (float32; float64 for float64),
doubled because an accumulator may truncate:

    one rounding                  fl(a) = a (1 + d), |d| <= u             error u |a|
    a sum of k terms              s = sum of a_i                          error k U sum of |a_i|
    a product                     a b                                     error |a| e_b + |b| e_a
    a linear map                  y = W x                                 error |W| e_x
    a function                    y = f(z)                                error |f'(z)| e_z
    exp, erf, tanh, a division    evaluated once                          error FUNCTION U |size|

The statistical error has sqrt(k) in place of k. A `Running` also records the way of its gradient,
in the same arithmetic, so that `gradients` gives the gradient of a formula with its errors. Errors
that the formula alone does not show, such as those of an exponential that is computed again from a
rounded lse, are in the methods that have the name of a `@primitive` of reference.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import reference as R
from numerics import TINY, TRUNCATING, UNIT, Bound, acc_dtype
from reference import up

LARGE = 2**17  # elements of a call whose bounds a GPU evaluates sooner
FUNCTION = 4.0  # units of error of one exp, erf, tanh or division
# The worst error, the statistical one, the part of the first that eager does not have, and, of
# dlogits, the term that all of a row share; each is a tensor or 0.
EXACT = (0.0, 0.0, 0.0, 0.0)


def exact_product(scale: float) -> bool:
    return scale == 0 or math.frexp(abs(scale))[0] == 0.5


def roundable(t: Tensor, dtype: torch.dtype) -> Tensor:
    """|t|, raised to the smallest normal unless 0: subnormals share its absolute error."""
    return torch.where(t == 0, 0.0, t.abs().clamp(min=torch.finfo(dtype).tiny))


def value_of(t: Any) -> Any:
    return t.value if isinstance(t, Running) else t


def same(t: Any) -> Any:
    return t


def row_sum(t: Tensor) -> Tensor:
    return t.sum(-1, keepdim=True)


def row_mean(t: Tensor) -> Tensor:
    return t.mean(-1, keepdim=True)


def transposed(f: Callable[[Tensor], Tensor], like: Tensor) -> Callable[[Tensor], Tensor]:
    """The transposed of a linear map of tensors like this one."""
    x = torch.zeros_like(like).requires_grad_()
    y = f(x)
    return lambda t: torch.autograd.grad(y, x, t, retain_graph=True)[0]


def derivatives(f: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Tensor, Tensor]:
    """f'(z) and f''(z)."""
    z = z.detach().requires_grad_()
    (first,) = torch.autograd.grad(f(z).sum(), z, create_graph=True)
    if not first.requires_grad:
        return first, torch.zeros_like(z)
    return first.detach(), torch.autograd.grad(first.sum(), z)[0]


class Running:
    """A value in float64 and its errors at `dtype`.

    `ways` are tuples of a parent (other types are constants), of the map from its errors to those
    of this value, and of the map from this value's gradient to the parent's.
    """

    numbers = itertools.count()
    made: list[Running] | None = None  # those of the call whose bounds are evaluated

    def __init__(self, value: Tensor, dtype: torch.dtype, *ways: Any, leaf: bool = False) -> None:
        if Running.made is not None:
            Running.made.append(self)
        self.value, self.dtype, self.shape = value, dtype, value.shape
        ways = [w for w in ways if isinstance(w[0], Running)]
        self.parents = [(parent, back) for parent, _, back in ways if parent.tracked]
        self.number, self.tracked = next(self.numbers), leaf or bool(self.parents)
        self.errors: list[Any] = list(EXACT)
        self.again, self.is_saved, self.first = self, leaf, 0
        for parent, carry, _ in ways:
            if carry:
                self.erring(*(carry(e) if isinstance(e, Tensor) else e for e in parent.errors))

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return getattr(cls, func.__name__)(*args, **(kwargs or {}))

    def bound(self, dtype: torch.dtype | None = None) -> Bound:
        errors = self.errors[:3]
        errors = [e.nan_to_num(0.0) if isinstance(e, Tensor) else e for e in errors]
        return Bound(self.value, dtype or self.dtype, errors)

    def erring(self, *more: Any) -> Running:
        for i, error in enumerate(more):
            if isinstance(error, Tensor) or error:
                self._err(i, torch.as_tensor(error))
        return self

    def _err(self, i: int, size: Tensor, units: float = 1.0) -> None:
        """One pass over the tensors, which may be large."""
        total = self.errors[i]
        if isinstance(total, Tensor):
            self.errors[i] = torch.add(total, size, alpha=units)
        else:
            self.errors[i] = (size if units == 1 else size * units).expand(self.shape)

    def plus(self, k: float | Tensor, size: Any) -> Running:
        """Adds the error of a sum of k terms of this size in total."""
        unit = TRUNCATING * UNIT[acc_dtype(self.dtype)]
        if self.dtype == torch.float64:
            unit *= 4  # the reference is computed in float64 too, with errors of its own
        size = torch.as_tensor(size, dtype=torch.float64)
        if isinstance(k, Tensor):
            size, k = size * unit, k.double()
            return self.erring(k * size, k.sqrt() * size)
        if k:
            k = max(float(k), 1.0)
            self._err(0, size, k * unit)
            self._err(1, size, math.sqrt(k) * unit)
        return self

    def rounded(self, gradient: bool = True, size: Tensor | None = None) -> Running:
        """Rounded to the dtype, unless it was saved so; with its gradient."""
        out = Running(self.value, self.dtype, (self, same, Running.rounded if gradient else same))
        error = UNIT[self.dtype] * roundable(self.value if size is None else size, self.dtype)
        return out if self.is_saved else out.erring(error, error)

    def saved(self, name: str) -> Running:
        """This result, or the value that the call is given in its place."""
        CALL.results[name], given = self, CALL.saved.get(name)
        if name == "sum":  # torch rounds the sum of 16-bit values in float32 once, as the op does
            self.errors = list(EXACT)
            rounded = self.value.to(acc_dtype(self.dtype)).to(self.dtype).double()
            given = rounded if given is None else given
        if given is None or name == "mean":
            return self
        out = Running(given, self.dtype, (self, None, same))
        out.is_saved = True
        return out

    def detach(self) -> Running:
        return Running(self.value, self.dtype)

    def dim(self) -> int:
        return self.value.dim()

    # Sums and products

    def linear(self, f: Callable[[Tensor], Tensor], k: float | Tensor = 0) -> Running:
        """A map with the coefficients 0 and 1; each result is a sum of k values unless k is 0."""

        def back(g: Running) -> Running:
            to_input = transposed(f, self.value)
            additions = (to_input(torch.ones_like(g.value)) - 1).clamp(min=0)  # f may repeat values
            return g.linear(to_input, additions if additions.any() else 0)

        out = Running(f(self.value), self.dtype, (self, f, back))
        moves_alone = not isinstance(k, Tensor) and k == 0
        return out if moves_alone else out.plus(k, f(self.value.abs()))

    def sum(self, *dims: int, keepdim: bool = False) -> Running:
        dims = dims or tuple(range(self.dim()))
        k = math.prod(self.shape[d] for d in dims)
        return self.linear(lambda t: t.sum(dims, keepdim=keepdim) if dims else t * 1.0, k)

    def summed_to(self, shape: Sequence[int]) -> Running:
        k = self.value.numel() / max(math.prod(shape), 1)
        return self if self.shape == shape else self.linear(lambda t: t.sum_to_size(shape), k)

    def mean(self, dim: int) -> Running:
        n = max(self.shape[dim], 1)

        def back(g: Running) -> Running:
            each = Running(g.value.unsqueeze(dim).expand(self.shape) / n, self.dtype)
            return each.plus(2, each.value.abs()).erring(0.0, 0.0, 0.0, each.value.abs())

        out = self.sum(dim) / n
        return Running(out.value, self.dtype, (self, None, back)).erring(*out.errors)

    def amax(self, dim: int) -> Running:
        """A kernel may keep it in units of log 2."""
        out = Running(self.value.amax(dim), self.dtype, (self, lambda e: e.amax(dim), None))
        return out.plus(2, out.value.abs())

    def __neg__(self) -> Running:
        return Running(-self.value, self.dtype, (self, same, Running.__neg__))

    def __add__(self, other: Any) -> Running:
        a, b = self.value, torch.as_tensor(value_of(other), dtype=torch.float64)
        ways = [(t, same, lambda g, t=t: g.summed_to(t.shape)) for t in (self, other)]
        out = Running(a + b, self.dtype, *ways).plus(1, (a + b).abs() * ((a != 0) & (b != 0)))
        rounding = UNIT[acc_dtype(self.dtype)] * abs(other) if isinstance(other, float) else 0.0
        return out.erring(rounding, rounding)

    def __sub__(self, other: Any) -> Running:
        return self + -other

    def times(self, other: Any, shape: Sequence[int] | None = None, k: float = 1) -> Running:
        """The product, or its sums of this shape, with the error of k roundings for each term.

        A product with 0 or 1 is exact.
        """

        def total(t: Tensor) -> Tensor:
            return t if shape is None or t.shape == shape else t.sum_to_size(shape)

        a, b = self.value, torch.as_tensor(value_of(other), dtype=torch.float64)
        ways = [
            (self, lambda e: total(e * b.abs()), lambda g: g.times(other, self.shape)),
            (other, lambda e: total(e * a.abs()), lambda g: g.times(self, other.shape)),
        ]
        out = Running(total(a * b), self.dtype, *ways)
        n = (a * b).numel() / max(out.value.numel(), 1)
        inexact = torch.ones(()) if n > 1 else (a.abs() != 1) & (b.abs() != 1)
        return out.plus(k * n, total((a * b).abs() * inexact))

    def __mul__(self, other: Any) -> Running:
        exact = isinstance(other, float | int) and exact_product(other)
        exact = exact or isinstance(other, Tensor) and not other.is_floating_point()  # of 4 bits
        return self.times(other, k=1 - exact)

    def __truediv__(self, by: Any) -> Running:
        """A kernel may multiply by the rounded inverse."""
        by = torch.as_tensor(by, dtype=torch.float64)
        k = 2 * (not exact_product(by.item()))
        return self.times(1 / by, k=k)

    __radd__, __rmul__ = __add__, __mul__

    def __matmul__(self, other: Any) -> Running:
        return product(self, other)

    matmul = __matmul__

    @staticmethod
    def where(condition: Tensor, a: Running, b: float) -> Running:
        way = (a, lambda e: torch.where(condition, e, 0.0),
               lambda g: Running.where(condition, g, 0.0).summed_to(a.shape))  # fmt: skip
        return Running(torch.where(condition, a.value, b), a.dtype, way)

    @staticmethod
    def cat(parts: Sequence[Any], dim: int = 0, join: Callable = torch.cat) -> Running:
        def among_zeros(i: int, t: Tensor) -> Tensor:
            others = [torch.zeros_like(value_of(p)) for p in parts]
            return join([*others[:i], t, *others[i + 1 :]], dim)

        wide = [p.linear(lambda t, i=i: among_zeros(i, t))
                for i, p in enumerate(parts) if isinstance(p, Running)]  # fmt: skip
        out = Running(join([value_of(p) for p in parts], dim), wide[0].dtype,
                      *((w, same, same) for w in wide))  # fmt: skip
        out.first = parts[0].shape[0]
        return out

    @staticmethod
    def stack(parts: Sequence[Any], dim: int = 0) -> Running:
        return Running.cat(parts, dim, torch.stack)

    # Linear layers

    def affine(self, weight: Any, bias: Any = None) -> Running:
        """One sum, which may begin with the bias."""
        rows = self.reshape(math.prod(self.shape[:-1]), self.shape[-1])

        def back(g: Running) -> Running:
            first = slice(0, weight.first)
            return g.rounded(size=z.gradient.value[:, first] @ weight.value[first])

        if weight.first and CALL.device == "cpu" and self.dtype in (torch.float16, torch.bfloat16):
            # The gradient's product with the first weight is rounded before the second one.
            rows = Running(rows.value, self.dtype, (rows, same, back))
        z = product(rows, weight.T)
        if bias is not None:
            z = (z + bias).plus(self.shape[-1], value_of(bias).abs())
        return z.reshape(*self.shape[:-1], weight.shape[0])

    def logits_of(self, weight: Any = None, bias: Any = None) -> Running:
        """The logits are float32; dlogits are rounded to the dtype.

        Hopper's engine for bfloat16 multiplies y by x times a factor of the row, both rounded, and
        adds the products of the term that a row's dlogits share afterwards. A gradient that the
        forward stored is multiplied by dloss and rounded again.
        """
        twice = weight is not None and self.dtype == torch.bfloat16

        def size(g: Running) -> Tensor:
            return g.value.abs() + g.errors[3] * twice

        def again(g: Running) -> Running:
            is_rounded = CALL.is_stored or twice
            return g.rounded(size=size(g)).plus(1, size(g)) if is_rounded else g

        def to_logits(g: Running) -> Running:
            for _ in range((weight is not None) + twice):
                g = g.rounded(size=size(g))
            return g

        given = (t and Running(t.value, self.dtype, (t, same, again)) for t in (self, weight, bias))
        x, weight, bias = given
        z = x if weight is None else x.affine(weight, bias)
        return Running(z.value, self.dtype, (z, same, to_logits))

    def row_sum(self) -> Running:
        n = self.shape[-1]  # a value enters so many additions of partial sums
        return self.linear(lambda t: t.sum(-1), min(n, 80 + n / 65536))

    def conv2d(self, weight: Running) -> Running:
        """Linear in each argument, so that absolute values give the magnitudes."""
        x, w = self.value, weight.value

        def gradient(g: Running, i: int, k: int) -> Running:
            def back(*t: Tensor) -> Tensor:
                return R.gradients(R.conv2d, t[0], [i == 0, i == 1], *t[1:])[i]

            out = Running(back(g.value, x, w), self.dtype)
            return out.plus(k, back(g.value.abs(), x.abs(), w.abs()))

        ways = [
            (self, None, lambda g: gradient(g, 0, w.numel())),
            (weight, None, lambda g: gradient(g, 1, g.value.numel())),
        ]
        out = Running(R.conv2d(x, w), self.dtype, *ways)
        return out.plus(w.numel(), R.conv2d(x.abs(), w.abs()))

    # Functions

    def function(self, value: Tensor, slope: Running, reach: Any = None) -> Running:
        """f(self) from its value and slope, whose error includes that of a product with it.

        Errors are multiplied by `reach`.
        """
        reach = slope.value.abs() if reach is None else reach
        way = (self, lambda e: e * reach, lambda g: g.times(slope, k=0))
        return Running(value, self.dtype, way)

    def square(self) -> Running:
        return self * self

    def cap(self, softcap: float | None) -> Running:
        if softcap is None:
            return self
        t = torch.tanh(self.value / softcap)
        slope = Running(1 - t.square(), self.dtype, (self, lambda e: 2 * e / softcap, None))
        out = self.function(softcap * t, slope.plus(2 * FUNCTION, 1.0))
        return out.plus(2, slope.value * self.value.abs()).plus(FUNCTION, softcap * t.abs())

    def near(self, *limits: float) -> Tensor:
        """1 where an error, or an underflow, may move a value to the other side of a limit."""
        z, worst = self.value, torch.as_tensor(self.errors[0])
        reach = worst + UNIT[self.dtype] * z.abs() + TINY[self.dtype]
        reach = reach.clamp(min=torch.finfo(acc_dtype(self.dtype)).tiny)
        found = [(z - limit).abs() <= reach for limit in limits]
        return (torch.stack(found).any(0) & (worst > 0)).double()

    def clamped(self, low: float, high: float) -> Running:
        inside = ((self.value >= low) & (self.value <= high)).double()
        jump = self.near(low, high)
        slope = Running(inside, self.dtype).erring(jump, jump, jump)
        return self.function(self.value.clamp(low, high), slope, inside + jump * (1 - inside))

    def grouped(self, weights: Any, ends: Sequence[int]) -> Running:
        """The sum of each row is over the columns."""
        x, w = self.value, value_of(weights)
        ways = [
            (self, lambda e: R.grouped(e, w.abs(), ends), lambda g: g.grouped(weights.mT, ends)),
            (weights, lambda e: R.grouped(x.abs(), e, ends), lambda g: outer(g, self, ends)),
        ]
        out = Running(R.grouped(x, w, ends), self.dtype, *ways)
        return out.plus(x.shape[-1], R.grouped(x.abs(), w.abs(), ends))

    def mapped(self, f: Callable[[Tensor], Tensor]) -> Running:
        return self.linear(f)

    def activate(self, activation: str) -> Running:
        if activation == "none":
            return self
        z, unit = self.value, UNIT[self.dtype]
        value = R.activate(z, activation)
        first, second = derivatives(lambda t: R.activate(t, activation), z)
        if activation == "relu":
            jump = self.near(0.0)
            slope = Running(first, self.dtype).erring(jump, jump, jump)
            return self.function(value, slope, first + jump * (1 - first))
        bend, reach = (
            second.abs() + unit * z.abs(),
            first.abs() + 1.2 * unit * z.abs(),
        )  # |f''| <= 1.2
        # The slope 1 - tanh(t)^2 cancels in the tails of gelu_tanh; its argument t is a cubic of z.
        of_slope = 1 + (activation == "gelu_tanh") * z.abs() * (0.4 + 0.11 * z.square())
        of_value = z.abs()
        if activation == "relu_squared":
            worst = torch.as_tensor(self.errors[0])
            live = (z >= -worst).double()  # an error may lift a value above 0
            bend, reach = 2 * live, first.abs() + live * (worst + 2 * unit * z.abs())
            of_slope, of_value = first.abs(), value
        slope = Running(first, self.dtype, (self, lambda e: e * bend, None)).plus(
            FUNCTION, of_slope
        )
        if activation in ("sigmoid", "tanh"):  # eager derives the slope from the rounded result
            error = unit * (value if activation == "sigmoid" else 2 * value.square())
            slope.erring(error, error)
        return self.function(value, slope, reach).plus(FUNCTION, of_value)

    # Norms

    def normalise(self, eps: Any, centred: bool) -> tuple[Running, Running, Running]:
        x, k = self.value, max(self.shape[-1], 1)
        if (given := CALL.saved.get("rstd")) is not None:  # the eps with which a row has this rstd
            eps = given[..., None] ** -2 - row_mean((x - row_mean(x) * centred).square())
        hat, mean, rstd = R.normalise(x, eps, centred)
        size = hat.abs(), row_mean(x.abs()) * centred

        def to_x(t: Tensor, hat: Tensor, sign: int) -> Tensor:
            return rstd * (t + sign * (hat * row_mean(t * hat) + row_mean(t) * centred))

        def back(g: Running) -> Running:
            def of_hat(t: Tensor) -> Tensor:
                one, other = row_mean((g.value * hat).abs()), row_mean(g.value.abs() * t)
                return rstd * (t * one + size[0] * other)

            ways = [(g, lambda e: to_x(e, size[0], 1), None), (normed, of_hat, None)]
            dx = Running(to_x(g.value, hat, -1), self.dtype, *ways)
            return dx.plus(k, to_x(g.value.abs(), size[0], 1))

        # The error of rstd; a centred norm adds that of the mean.
        normed = Running(hat, self.dtype, (self, None, back)).plus(k, size[0] + rstd * size[1])
        statistics = Running(mean, self.dtype).plus(k, size[1]), Running(rstd, self.dtype)
        statistics[1].plus(k + FUNCTION, rstd)
        CALL.results.update(mean=statistics[0][..., 0], rstd=statistics[1][..., 0])
        return normed, *statistics

    def scale_shift(self, weight: Any, bias: Any = None) -> Running:
        w, b = (v if t is None else value_of(t) for t, v in ((weight, 1.0), (bias, 0.0)))
        ways = [
            (self, lambda e: e * abs(w), lambda g: g if weight is None else g.times(weight, k=0)),
            (weight, lambda e: e * self.value.abs(), lambda g: g.times(self, weight.shape)),
            (bias, same, lambda g: g.summed_to(bias.shape)),
        ]
        out = Running(self.value * w + b, self.dtype, *ways)
        return out.plus(FUNCTION, out.value.abs() + abs(b))

    def folded(self, weight: Running, weight_sum: Running, eps: float) -> Running:
        """The normalised rows may be rounded, as may their gradient, as in layer_norm."""
        normed, mean, rstd = self.normalise(eps, True)
        given = weight.value, weight_sum.value, eps

        def back(g: Running) -> Running:
            like = normed.parents[0][1](product(g, weight).rounded())
            dx = R.gradients(R.folded, g.value, [True], self.value, *given)[0]
            return Running(dx, self.dtype, (like, same, None))

        w, z = weight.value.abs().T, R.folded(self.value, *given)
        size = self.value.abs() @ w + mean.value.abs() * weight_sum.value.abs()
        out = Running(z, self.dtype, (self, None, back))
        out.plus(self.shape[-1] + FUNCTION, rstd.value * size + z.abs())
        return out.rounded(False, normed.value.abs() @ w)

    # Softmax and attention

    def probabilities(
        self, seen, scale, softcap, sink, bias: Running | None = None
    ) -> tuple[Running, Running, Running]:
        """p = exp(z - m) / sum with the errors of the sum and of the exponent, its lse, and z."""
        z = R.cap(Running.where(seen, self, 0.0) * scale, softcap)
        if bias is not None:  # a kernel may multiply both terms by log2(e) before it adds them
            b = Running.where(seen, bias, 0.0)
            z = (z + b).plus(1, z.value.abs() + b.value.abs())
        sink_and_bias = value_of(sink), value_of(bias)
        values, lse = R.softmax_and_lse(self.value, seen, scale, softcap, *sink_and_bias)
        m = torch.where(lse.isinf(), 0.0, lse)[..., None]
        live = torch.where(values > 0, z.value, 0.0)
        exponent = FUNCTION + (live - m).abs()
        if isinstance(z.errors[0], Tensor):  # then m is inexact too
            exponent = exponent + m.abs()
        # A subnormal p has the absolute error of the smallest normal; a masked p is exactly 0.
        raised, cols = roundable(values, acc_dtype(self.dtype)), values.shape[-1]

        def carry(e: Tensor) -> Tensor:
            return torch.where(values > 0, values * e, 0.0)  # a score may be -inf

        p = Running(values, self.dtype, (z, carry, None))
        p.plus(cols, raised).plus(1, raised * exponent)
        p.lost = values * (live.abs() + m.abs())  # by exp(z - lse), if lse is rounded
        total = Running(lse, self.dtype, (z, lambda e: carry(e).sum(-1), None))
        size = m[..., 0].abs() + (live.abs().amax(-1) if cols else 0.0)
        total.plus(cols, 1.0).plus(FUNCTION, torch.where(lse.isinf(), 0.0, size))
        return p, total, z

    def renormalised(self) -> Running:
        """A row of probabilities, whose sum has errors too."""
        way = (self, lambda e: e + self.value * row_sum(e), None)
        return Running(self.value, self.dtype, way)

    def flushed(self) -> Running:
        """A matmul may flush a subnormal to 0."""
        tiny = torch.where(self.value < torch.finfo(acc_dtype(self.dtype)).tiny, self.value, 0.0)
        return self.erring(2 * tiny, 2 * tiny)

    def softmax(self, recomputed: bool = False) -> Running:
        y = self.masked_softmax(torch.ones((), dtype=torch.bool), 1.0, None, None)
        y.value = R.softmax(self.value)
        if recomputed:
            y.errors = y.flushed().renormalised().errors
            # Where p is nearly 1, eager's errors of p and of the result cancel, the op's do not.
            y.again = Running(y.value, y.dtype).erring(*y.errors)
            y.again.erring(0.0, 0.0, 2 * FUNCTION * UNIT[acc_dtype(self.dtype)] * y.value)
            s = self.value
            total = (s - s.amax(-1, keepdim=True)).exp().sum(-1) if s.numel() else s.sum(-1)
            way = (y, lambda e: total * e.sum(-1) / 2, None)
            CALL.results["sum"] = Running(total, self.dtype, way)
        return y

    def masked_softmax(self, seen, scale, softcap, sink) -> Running:
        seen, given = seen.expand(self.shape), CALL.saved.get("y")
        p, lse, z = self.probabilities(seen, scale, softcap, sink)

        def clean(dy: Running) -> Running:
            return Running.where(seen, dy, 0.0)

        def to_sink(dy: Running) -> Running:
            return sink_gradient(lse, sink, self.shape, (clean(dy) * y.again).sum(-1))

        to_scores = (z, None, lambda dy: softmax_gradient(y.again, clean(dy)))
        ways = [(p, same, None), to_scores, (sink, None, to_sink)]
        y = Running(p.value, self.dtype, *ways)
        y.again = p.rounded() if given is None else Running(given, self.dtype)
        return y

    def attend(
        self, seen, value, scale, softcap, sink, factors: Tensor | float = 1.0, bias=None
    ) -> tuple[Running, Running]:
        """The backward computes p from lse again."""
        p, lse, z = self.probabilities(seen, scale, softcap, sink, bias)
        p, lost = p.renormalised(), p.lost

        def kept(p: Running) -> Running:
            return p * factors if isinstance(factors, Tensor) else p

        out = product(kept(p).rounded(), value)
        p = p.flushed().plus(1, lost).erring(0.0, 0.0, UNIT[acc_dtype(self.dtype)] * lost)
        live, v = seen.any(-1, keepdim=True), value.value

        def clean(dout: Running) -> Running:
            return Running.where(live, dout, 0.0)

        def dscores(factor: Tensor, size: Tensor) -> Running:
            ds = difference(p, factor, size, v.shape[-1] + p.shape[-1])
            for _ in range(2 + bool(self.parents)):  # out, dout, and ds where a matmul reads it
                ds = ds.rounded(size=p.value * size)
            return ds

        def to_scores(dout: Running) -> Running:
            d = clean(dout).value
            mean = kept(p).value @ v.abs()
            size = d.abs() @ v.abs().mT * factors + row_sum(d.abs() * mean)
            return dscores(d @ v.mT * factors - row_sum(d * out.value), size)

        def lse_to_scores(dlse: Running) -> Running:
            d = clean(dlse[..., None]).value
            return dscores(d, d.abs())

        def to_sink(delta: Running) -> Running:
            return sink_gradient(lse, sink, self.shape, delta)

        ways = [
            (out, same, None),
            (z, None, to_scores),
            (value, None, lambda dout: product(kept(p).rounded().mT, clean(dout), value.shape)),
            (sink, None, lambda dout: to_sink((clean(dout) * out).sum(-1))),
        ]
        finite = ~lse.value.isneginf()
        of_lse = [
            (lse, same, None),
            (z, None, lse_to_scores),
            (sink, None, lambda dlse: to_sink(-Running.where(finite, dlse, 0.0))),
        ]
        return Running(out.value, self.dtype, *ways), Running(lse.value, self.dtype, *of_lse)

    def logsumexp(self, dim: int) -> Running:
        z, lse = self.value, self.value.logsumexp(-1)
        v, cols = torch.exp(z - lse[..., None]), z.shape[-1]
        way = (self, lambda e: (v * e).sum(-1), lambda g: g[..., None] * p)
        out = Running(lse, self.dtype, way)
        out.plus(cols, 1.0).plus(FUNCTION, lse.abs() + (z.abs().amax(-1) if cols else 0.0))
        lost = v * (z.abs() + lse.abs()[..., None])
        ways = [(self, lambda e: v * e, None), (out, lambda e: v * e[..., None], None)]
        p = Running(v, self.dtype, *ways).plus(1, lost).plus(FUNCTION, v)
        out.p = p.erring(0.0, 0.0, UNIT[acc_dtype(self.dtype)] * lost)
        return out

    def entropy_of(self) -> Running:
        lse, z = self.logsumexp(-1), self.value
        p, mean = lse.p.value, (lse.p * self).sum(-1, keepdim=True)
        lowered = p * (z.amax(-1, keepdim=True) - z)
        exponent = FUNCTION + z.abs() + lse.value.abs()[..., None]
        way = (self, lambda e: (e * p * (z - mean.value).abs()).sum(-1),
               lambda g: -(lse.p * (self - mean)) * g[..., None])  # fmt: skip
        out = Running(lse.value - mean.value[..., 0], self.dtype, way)
        out.plus(z.shape[-1] + FUNCTION, lowered.sum(-1) + lse.value.abs())
        return out.plus(1, (lowered * exponent).sum(-1))

    def spread(self, live: Tensor) -> Running:
        return self.linear(lambda t: t.new_zeros(live.shape).masked_scatter(live, t))


def _move(name: str) -> Callable[..., Running]:
    return lambda self, *args: self.linear(lambda t: getattr(t, name)(*args))


for _name in ("__getitem__", "reshape", "flatten", "unflatten", "unsqueeze", "gather", "permute",
              "repeat_interleave", "to"):  # fmt: skip
    setattr(Running, _name, _move(_name))
Running.mT = property(lambda self: self.linear(lambda t: t.mT))
Running.T = property(lambda self: self.linear(lambda t: t.T))


def product(a: Any, b: Any, shape: Sequence[int] | None = None) -> Running:
    """a @ b, as one sum over the dims in which `shape` is narrower."""
    x, y = value_of(a), value_of(b)

    def times(t: Tensor, u: Tensor) -> Tensor:
        return t @ u if shape is None else (t @ u).sum_to_size(shape)

    def to_a(g: Running) -> Running:
        return product(g, b.mT, x.shape) if y.dim() > 1 else g[..., None] * b

    def to_b(g: Running) -> Running:
        read = a.again if isinstance(a, Running) else a  # a as the backward recomputes it
        return product(read.mT, g, y.shape)

    ways = [(a, lambda e: times(e, y.abs()), to_a),
            (b, lambda e: times(x.abs(), e), to_b)]  # fmt: skip
    out = Running(times(x, y), (a if isinstance(a, Running) else b).dtype, *ways)
    size = x.abs() @ y.abs()
    k = x.shape[-1] * size.numel() / max(out.value.numel(), 1)
    return out.plus(k, size if shape is None else size.sum_to_size(shape))


def outer(g: Running, x: Running, ends: Sequence[int]) -> Running:
    """g.T @ x of each group, a sum over its rows."""

    def of(t: Tensor, u: Tensor) -> Tensor:
        pairs = itertools.pairwise([0, *ends])
        return torch.stack([t[first:end].T @ u[first:end] for first, end in pairs])

    a, b = g.value, x.value
    ways = [(g, lambda e: of(e, b.abs()), None), (x, lambda e: of(a.abs(), e), None)]
    rows = torch.tensor([end - first for first, end in itertools.pairwise([0, *ends])])
    return Running(of(a, b), g.dtype, *ways).plus(rows[:, None, None], of(a.abs(), b.abs()))


def difference(p: Running, factor: Tensor, size: Tensor, k: float) -> Running:
    """p * factor, which is a sum of k terms and of this size before they cancel."""
    out = Running(p.value * factor, p.dtype, (p, lambda e: e * size, None))
    return out.plus(k, roundable(p.value, acc_dtype(p.dtype)) * size)


def softmax_gradient(y: Running, dy: Running) -> Running:
    """y * (dy - rowsum(dy * y))."""
    v, d = y.value, dy.value
    factor = d - row_sum(d * v)
    dx = difference(y, factor, d.abs() + row_sum((d * v).abs()), y.shape[-1] + FUNCTION)
    dx.errors[2] = y.errors[2] * factor.abs()  # those of y and of the sum cancel
    halved = Running(v, y.dtype).erring(*y.errors[:2], y.errors[2] / 2)
    of_sum = Running(dx.value, y.dtype, (halved, lambda e: v.abs() * row_sum(d.abs() * e), None),
                     (dy, lambda e: v.abs() * (e + row_sum(v.abs() * e)), None))  # fmt: skip
    return dx.erring(*of_sum.errors)


def sink_gradient(lse: Running, sink: Running, shape: Sequence[int], delta: Running) -> Running:
    """dsink = -sum of exp(sink - lse) * delta, over batch and rows, for scores of this shape."""
    between = (*(shape[1:-2] if len(shape) > 3 else ()), 1)
    logit, finite = sink.value.view(between), torch.where(lse.value.isinf(), 0.0, lse.value)
    share = torch.exp(logit - torch.where(lse.value.isneginf(), torch.inf, lse.value))
    factor = Running(share, lse.dtype, (lse, lambda e: share * e, None))
    factor.plus(1, share * (FUNCTION + finite.abs() + logit.abs()))
    return -(delta * factor).summed_to(between).reshape(sink.shape)


def gradients(outputs: Sequence[Any], leaves: Sequence[Any]) -> list[Running | None]:
    """Gradients of sum(output * dout) for pairs of an output and its dout, with their errors."""
    grads: dict[Running, Running] = {}
    found: dict[Any, Running] = {}
    for node, dout in outputs:
        if dout is not None:
            g = dout if isinstance(dout, Running) else Running(up(dout), node.dtype)
            grads[node] = grads[node] + g if node in grads else g
    while grads:
        node = max(grads, key=lambda n: n.number)
        found[node] = node.gradient = grads.pop(node)
        for parent, back in node.parents if node.parents else ():
            if back is not None:
                g = back(found[node])
                grads[parent] = grads[parent] + g if parent in grads else g
    return [found.get(leaf) for leaf in leaves]


# The ops: the formulas are called by the names that the dispatcher's schemas give to arguments and
# results.


class Call:
    """The values in place of the results that the forward saved, and the results by name."""

    def __init__(self, saved: dict[str, Tensor], is_stored: bool = False, device: str = "") -> None:
        self.saved, self.is_stored, self.device, self.results = saved, is_stored, device, {}


CALL = Call({})
# Results in the dtype of sums. The sum is that of scalar_attention.
WIDE = ("lse", "mean", "rstd", "loss", "max", "log_sum", "logprob", "entropy", "sum")


def schema_of(op: str) -> Any:
    return getattr(torch.ops.torchweld, op).default._schema


def names_of(op: str) -> list[str]:
    """The names of the results of the op's `_forward`."""
    op = op.removesuffix("_forward")
    full = op + "_forward" if hasattr(torch.ops.torchweld, op + "_forward") else op
    return [r.name.removeprefix("row_") for r in schema_of(full).returns]


def by_name(op: str, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip((a.name for a in schema_of(op).arguments), args, strict=False)), **kwargs}


def is_float(t: Any) -> bool:
    return isinstance(t, Tensor) and t.is_floating_point()


def evaluate(op: str, named: dict[str, Any], saved: dict[str, Tensor], is_stored: bool = False):
    """The results of an op's formula, and its inputs, by name."""
    global CALL
    first = next(t for t in named.values() if is_float(t))
    CALL = Call(saved, is_stored, first.device.type)
    given = {n: Running(up(t), first.dtype, leaf=True) if is_float(t) else up(t)
             for n, t in named.items() if n != "keep"}  # fmt: skip
    arguments = schema_of(op).arguments
    args = [given.get(a.name) for a in arguments if not a.kwarg_only]
    while args[-1] is None:
        args.pop()
    kwargs = {a.name: given[a.name] for a in arguments if a.kwarg_only and a.name in given}
    found = R.formula(op)(*args, **kwargs)
    found = found if isinstance(found, tuple) else (found,)
    return {**dict(zip(names_of(op), found, strict=False)), **CALL.results}, given


def empty(dtype: torch.dtype) -> Bound:
    return Bound(torch.zeros(0, dtype=torch.float64), dtype)


def result_bound(op: str, name: str, found: dict[str, Any], given: dict[str, Any]) -> Bound:
    """The bound of a result; it is empty if the formula has no such result."""
    dtype = next(t.dtype for t in given.values() if isinstance(t, Running))
    if name in WIDE and not (name == "sum" and op.startswith("add_")):
        dtype = acc_dtype(dtype)
    result = found.get(name)
    return result.bound(dtype) if isinstance(result, Running) else empty(dtype)


def results(op: str) -> Callable[..., list[Bound]]:
    """The bounds of the results of an op."""

    def of(*args: Any, **kwargs: Any) -> list[Bound]:
        evaluated = evaluate(op, by_name(op, args, kwargs), {})
        names = names_of(op)[: len(schema_of(op).returns)]
        return [result_bound(op, n, *evaluated) for n in names]

    return of


def autograd(op: str, with_result: bool = False) -> Callable[..., list[Bound | None]]:
    """The bounds of the gradients of the positional inputs, of a sink and of attention's bias.

    `dlse` and `dentropy` are the gradients of other results than the first. `with_result`: the
    bound of the first result stands before the others, and `dout` is a function of it.
    """

    def of(dout: Any, *args: Any, **kwargs: Any) -> list[Bound | None]:
        douts = {n: kwargs.pop("d" + n, None) for n in ("lse", "entropy")}
        named = by_name(op, args, kwargs)
        if douts["entropy"] is not None:
            named["entropy"] = True
        is_stored = op.endswith("cross_entropy") and args[0].dtype != torch.float16
        is_stored &= named.get("reduction") != "none" and named.get("keep") != "nothing"
        found, given = evaluate(op, named, {}, is_stored)
        first = [result_bound(op, names_of(op)[0], found, given)] if with_result else []
        names = [a.name for a in schema_of(op).arguments][: len(args)]
        while not is_float(named[names[-1]]):
            names.pop()
        alone = [a.name for a in schema_of(op).arguments if a.kwarg_only]
        names += [n for n in ("sink", "bias") if n in alone and named.get(n) is not None]
        dout = dout(*first) if with_result else dout
        outputs = [(found[names_of(op)[0]], dout), *((found.get(n), d) for n, d in douts.items())]
        pairs = zip(gradients(outputs, [given.get(n) for n in names]), names, strict=True)
        return first + [None if g is None else g.bound(named[n].dtype) for g, n in pairs]

    return of


def zeros_for(name: str, inputs: dict[str, Any], dout: Tensor) -> Tensor:
    """An input that the backward op does not get, because its gradient does not depend on it."""
    if not name.endswith("bias"):
        return torch.zeros_like(dout)
    weight = inputs[name.removesuffix("bias").rstrip("_") or "weight"]
    if weight is not None and weight.dim() == 3:  # of experts
        source = {"bias": weight, "gate_up_bias": inputs.get("z")}.get(name, dout)
        return weight.new_zeros(weight.shape[0], source.shape[1])
    is_matrix = weight is not None and weight.dim() == 2
    return weight.new_zeros(weight.shape[0]) if is_matrix else dout.new_zeros(dout.shape[-1])


def backward(op: str) -> Callable[..., list[Bound]]:
    """The bounds of the results of the backward op, each empty if it was not asked for."""

    def of(*args: Any, output_mask: Sequence[bool] | None = None, **kwargs: Any) -> list[Bound]:
        arguments = schema_of(op).arguments
        named = by_name(op + "_backward", args, kwargs)
        inputs = {a.name: named.pop(a.name) for a in arguments if a.name in named}
        (first, dout), *_ = named.items()
        wanted = [r.name.removeprefix("d") for r in schema_of(op + "_backward").returns]
        wanted = wanted if wanted[0] else [arguments[0].name]
        if "int4" in op:
            k = named.get("in_features", 8 * next(iter(inputs.values())).shape[1])
            inputs.update(x=dout.new_zeros(*dout.shape[:-1], k), out_features=dout.shape[-1])
        for a in arguments:
            missing = a.name == "bias" or (a.name.endswith("_bias") and a.name not in inputs)
            missing &= not a.kwarg_only  # attention's bias is optional
            needed = missing and a.name in wanted or not a.has_default_value()
            if inputs.get(a.name) is None and needed:
                inputs[a.name] = zeros_for(
                    a.name, {**named, **inputs}, named.get(f"d{a.name}_out", dout)
                )
        inputs = {a.name: inputs[a.name] for a in arguments if a.name in inputs}
        if named.get("dentropy") is not None:
            inputs["entropy"] = True
        saved = {n: up(t) for n, t in named.items()}
        found, given = evaluate(op, inputs, {**saved, "relu": saved.get("preact")})
        outputs = [(found[n], named.get("d" + n)) for n in found if "d" + n != first]
        outputs.append((found[names_of(op)[0]], dout))
        mask = output_mask or [n != "bias" or named.get("bias_requires_grad", True) for n in wanted]
        names = [n if m else None for n, m in zip(wanted, mask, strict=True)]
        grads = gradients(outputs, [given.get(n) for n in names])
        dtype = next(t.dtype for t in inputs.values() if is_float(t))
        return [empty(dtype) if g is None else g.bound(inputs[n].dtype)
                for g, n in zip(grads, names, strict=True)]  # fmt: skip

    return of


def unit_gradients(op: str) -> Callable[..., list[Bound]]:
    """The loss, and the gradients for dloss = 1."""

    def of(*args: Any, output_mask: Sequence[bool] = (True,), **kwargs: Any) -> list[Bound]:
        loss = results(op)(*args, **kwargs)[0]
        given = {**by_name(op, args, kwargs), "max": None, "log_sum": None, "lse": None}
        return [loss, *backward(op)(torch.ones(loss.ref.shape), output_mask=output_mask, **given)]

    return of


def exponentials(x, weight, target, bias=None, *, keep="exponentials", mean=False, **options):
    """y = (p - (1 - eps) hit / factor) dz / dlogit, 0 behind N and for ignored rows.

    Torch's ops compute it. With keep="auto" the CPU stores nothing.
    """
    named = {"x": x, "weight": weight, "target": target, "bias": bias, **options}
    found, given = evaluate("linear_cross_entropy", named, {})
    wide, n = acc_dtype(x.dtype), weight.shape[0]
    first = [found["loss"].bound(wide), found["lse"].bound(wide)]
    last = found["mean"].bound(wide) if mean else empty(wide)
    if keep != "exponentials":
        return [*first, empty(x.dtype), empty(wide), last]
    where = {n: options.pop(n) for n in ("ignore_index", "shift") if n in options}
    options.pop("reduction", None)
    rows, target, live = R.live_rows(given["x"], up(target), **where)
    logits = R.affine(rows, given["weight"], given["bias"])
    _, lse, z = R.row_losses(logits, target, **options)
    factor = lse * (2 * options.get("z_loss", 0.0)) + 1.0
    v = factor.value
    hit = Running(1 / v, x.dtype, (factor, lambda e: e / v.square(), None)).plus(FUNCTION, 1 / v)
    hit = hit * (options.get("label_smoothing", 0.0) - 1)
    outputs = [(lse, torch.ones(lse.shape)), (R.target_values(z, target), hit)]
    (y,) = gradients(outputs, [logits])
    live = torch.nn.functional.pad(live, (0, 1)) if where.get("shift") else live

    def filled(t: Tensor) -> Tensor:
        whole = t.new_zeros(live.numel(), -(-n // 64) * 64)
        whole[live.flatten(), :n] = t
        return whole.view(*live.shape, whole.shape[-1])

    return [*first, y.linear(filled).bound(), R.spread(factor, live).bound(wide), last]


def exponentials_backward(
    dloss,
    x,
    weight,
    target,
    y,
    factor,
    *,
    label_smoothing=0.0,
    temperature=1.0,
    output_mask,
    **rows,
) -> list[Bound]:
    n, twice = weight.shape[0], x.dtype == torch.bfloat16
    named = (x, weight, weight.new_zeros(n))
    given = [Running(up(t), x.dtype, leaf=True) for t in named]
    logits = R.affine(given[0].reshape(target.numel(), weight.shape[1]), *given[1:])
    y, factor = up(y).reshape(target.numel(), y.shape[-1])[:, :n], up(factor).flatten()
    dloss = R.rows_dloss(up(dloss), up(target), **rows)
    uniform = (dloss * (factor != 0) * (label_smoothing / (temperature * n)))[:, None]
    part = (dloss * factor)[:, None] * y
    size = part.abs() + uniform.abs()
    dlogits = Running(part - uniform, x.dtype).plus(4, size)
    dlogits = dlogits.rounded(size=size) if twice else dlogits
    grads = gradients([(logits, dlogits.erring(0.0, 0.0, 0.0, uniform.abs()))], given)
    grads = [g.rounded(size=g.value.abs() + g.errors[3]) if twice else g for g in grads]
    return [g.bound() if m else empty(x.dtype) for g, m in zip(grads, output_mask, strict=True)]


def scaled(dloss: Tensor, *stored: Tensor) -> list[Bound]:
    return [(Running(up(t), t.dtype) * up(dloss)).bound() for t in stored]


def fold_layer_norm(weight, bias=None, ln_weight=None, ln_bias=None) -> list[Bound]:
    w, b, gamma, beta = map(up, (weight, bias, ln_weight, ln_bias))
    folded, *sums = R.fold_layer_norm(w, b, gamma, beta, dtype=weight.dtype)
    size = (0.0 if beta is None else w.abs() @ beta.abs()) + (0.0 if b is None else b.abs())
    total, shift = (Running(t, weight.dtype) for t in sums)
    found = total.plus(w.shape[1], folded.abs().sum(1)), shift.plus(w.shape[1] + 1, size)
    return [Bound(folded, weight.dtype), *(t.bound(acc_dtype(weight.dtype)) for t in found)]


class Exact(Bound):
    """A bound that only the reference itself meets."""

    def allowed(self) -> tuple[Tensor, Tensor]:
        return (torch.full_like(self.ref, 1e-300),) * 2


def exact(refs: Sequence[Tensor], *dtypes: torch.dtype) -> list[Exact]:
    return [Exact(ref.double(), dtype) for ref, dtype in zip(refs, dtypes, strict=True)]


@contextlib.contextmanager
def freed_at_once() -> Iterator[None]:
    """The values of a call, gigabytes at times, refer to each other; none waits for a collector."""
    Running.made = []
    try:
        yield
    finally:
        for each in Running.made:
            vars(each).clear()
        Running.made = None


def where_it_is_fast(bounds: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Evaluates large tensors of a GPU there, one process at a time, for it may take 10 GB."""

    @functools.wraps(bounds)
    def call(*args: Any, **kwargs: Any) -> list[Any]:
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        # Vectors are the queries and keys of an outer product.
        size = sum(t.numel() ** (2 if t.dim() == 1 else 1) for t in tensors)
        if not tensors or not tensors[0].is_cuda or size < LARGE:
            with freed_at_once():
                return bounds(*args, **kwargs)
        with open(Path(tempfile.gettempdir()) / "torchweld-bounds", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with tensors[0].device, freed_at_once():
                found = bounds(*args, **kwargs)
            torch.cuda.empty_cache()
        return found

    return call


class Table(dict):
    """The bounds of the ops by name, derived from the formula for ops that are not listed."""

    def __init__(self, listed: dict[str, Any], derived: Callable[[str], Any]) -> None:
        super().__init__(listed)
        self.derived = derived

    def __missing__(self, op: str) -> Callable[..., list[Any]]:
        return self.derived(op)

    def __getitem__(self, op: str) -> Callable[..., list[Any]]:
        return where_it_is_fast(super().__getitem__(op))


REFERENCES = Table(
    {
        "int4_pack": lambda codes: exact([R.int4_words(codes)], torch.int32),
        "int4_unpack": lambda packed, cols: exact([R.int4_codes(packed, cols)], torch.uint8),
        "int4_repack": lambda qweight, scale, zero: exact(
            R.int4_repack(qweight, scale, zero), torch.int32, scale.dtype, torch.int32
        ),
        "fold_layer_norm": fold_layer_norm,
        "outer_add_backward": lambda dz: [Running(up(dz), dz.dtype).sum(d).bound() for d in (0, 1)],
        "cross_entropy_gradients_forward": unit_gradients("cross_entropy"),
        "cross_entropy_gradients_backward": scaled,
        "linear_cross_entropy_gradients_forward": unit_gradients("linear_cross_entropy"),
        "linear_cross_entropy_gradients_backward": scaled,
        "linear_cross_entropy_exponentials_forward": exponentials,
        "linear_cross_entropy_exponentials_backward": exponentials_backward,
    },
    lambda op: backward(op[:-9]) if op.endswith("_backward") else results(op),
)
# Gradients of a public op to its positional arguments, through autograd.
GRADIENTS = Table({}, autograd)
RESULT_AND_GRADIENTS = Table({}, functools.partial(autograd, with_result=True))
