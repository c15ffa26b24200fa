"""A layer of experts as grouped products, if :func:`torchweld.experts` can't compute it."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweld._autograd import once_differentiable
from torchweld.ops.grouped_linear import grouped_linear


class Factors(NamedTuple):
    """An adapter of one weight: ``scaling * second[e] @ first[e]`` is added to that of expert e."""

    first: Tensor  # (E, r, K)
    second: Tensor  # (E, N, r)
    scaling: float


class _Gather(torch.autograd.Function):
    """Copies every token to the rows of its k experts; backward adds up these rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x.index_select(0, order // k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        dx = drows.index_select(0, inverse).unflatten(0, (-1, ctx.k)).sum(1)
        return dx, None, None, None


class _Combine(torch.autograd.Function):
    """Computes ``y[t] = sum(weight[t, j] * rows[inverse[t * k + j]] for j in range(k))``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, order, inverse)
        k, dtype = weight.shape[1], torch.promote_types(rows.dtype, torch.float32)
        y = rows.new_zeros(weight.shape[0], rows.shape[1], dtype=dtype)
        for j in range(k):
            z = rows.index_select(0, inverse[j::k]).to(dtype)
            y = torch.addcmul(y, z, weight[:, j, None].to(dtype))
        # NOTE: torch.compile loses the gradient of a result that is written in place, or that `to`
        # returns as it is.
        return y if y.dtype == rows.dtype else y.to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, order, inverse = ctx.saved_tensors
        drows, dweight = dy.index_select(0, order // weight.shape[1]), None
        if ctx.needs_input_grad[1]:
            products = (rows * drows).sum(-1, dtype=torch.promote_types(rows.dtype, torch.float32))
            dweight = products.index_select(0, inverse).view(weight.shape).to(weight.dtype)
        return drows.mul_(weight.flatten()[order, None]), dweight, None, None


def composed_experts(
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    parameters: dict[str, Tensor | None],
    act: Callable[[Tensor], Tensor],
    *,
    transposed: bool,
    norm: Callable[[Tensor], Tensor] | None = None,
    factors: Mapping[str, Sequence[Factors]] = types.MappingProxyType({}),
) -> Tensor:
    """Computes the experts of tokens x (T, H) with index and weight (T, k).

    Args:
        parameters: the weights and biases by name, in the order of :func:`torchweld.experts`.
        act: the gate or activation between the products.
        transposed: whether the weights are (E, K, N).
        norm: the norm of the rows of the second product.
        factors: adapters of the weights, by name.
    """
    (first, w), (second, v), *biases = parameters.items()
    w_bias, v_bias = [bias for _, bias in biases] or (None, None)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    experts, k = w.shape[0], index.shape[1]
    sentinels = (index < 0) | (index >= experts)
    weight = weight.masked_fill(sentinels, 0)  # the weights of sentinels may be NaN
    ids, order = index.masked_fill(sentinels, experts).flatten().sort(stable=True)
    inverse = order.argsort()
    numbers = torch.arange(experts, device=ids.device, dtype=ids.dtype)
    offsets = torch.searchsorted(ids, numbers, right=True, out_int32=True)
    rows = _Gather.apply(x, order, inverse, k)
    z = _linear(rows, w, w_bias, factors.get(first, ()), offsets, transposed)
    rows = _linear(act(z), v, v_bias, factors.get(second, ()), offsets, transposed)
    return _Combine.apply(rows if norm is None else norm(rows), weight, order, inverse)


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    factors: Any,
    offsets: Tensor,
    transposed: bool,
) -> Tensor:
    y = grouped_linear(x, weight.mT if transposed else weight, offsets, bias)
    for each in factors:
        hidden = grouped_linear(x, each.first, offsets) * each.scaling
        y += grouped_linear(hidden, each.second, offsets)
    return y
