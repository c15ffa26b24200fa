"""The formulas by which torch.utils.flop_counter.FlopCounterMode counts the FLOPs of the ops.

As for torch's own ops, only matmuls and convolutions count, with two operations per product. Masked
products count too. A formula gets the arguments of a call by name, tensors as their shapes, and the
shape of the result as `result`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from types import SimpleNamespace
from typing import Any

import torch

from torchweld.info import public_op

Formula = Callable[[Any], int]


def _product(x: Sequence[int], weight: Sequence[int]) -> int:
    return 2 * prod(x) * weight[0]


def _wanted(mask: Sequence[bool]) -> int:
    """Counts the products of a linear layer's backward.

    The gradients of a norm's parameters, from the third on, need the same product as dx: the
    gradient with respect to the norm's result.
    """
    return (mask[0] or any(mask[3:])) + mask[1]


def _branches(mask: Sequence[bool]) -> int:
    """Counts the products in the backward of two layers of x."""
    return 2 * mask[0] + mask[1] + mask[2]


def _gated_mlp_backward(c: Any) -> int:
    mask = c.output_mask
    wants_dact = any((*mask[:3], *mask[4:6]))
    down = 2 * prod(c.dy) * c.down[1]
    return _branches(mask) * _product(c.x, c.left) + (wants_dact + mask[3]) * down


def _experts_backward(c: Any) -> int:
    mask = c.output_mask
    wants_dact = any((*mask[:2], *mask[3:5]))
    of_gate_up = (mask[0] + mask[1]) * prod(c.gate_up[1:])
    return 2 * prod(c.index) * (of_gate_up + (wants_dact + mask[2]) * prod(c.down[1:]))


def _softmax_matmul(c: Any) -> int:
    return 2 * prod(c.scores) * c.value[-1]


def _attention(c: Any, of_query: int = 1, of_value: int = 1) -> int:
    dims = of_query * c.query[-1] + of_value * c.value[-1]
    return 2 * prod(c.query[:-1]) * c.key[2] * dims


_LINEAR = (
    lambda c: _product(c.x, c.weight),
    lambda c: _wanted(c.output_mask) * _product(c.x, c.weight),
)
_LINEARS = (
    lambda c: sum(_product(c.x, weight) for weight in c.weights),
    lambda c: _wanted(c.output_mask) * sum(_product(c.x, weight) for weight in c.weights),
)
_GROUPED = (
    lambda c: _product(c.x, c.weight[1:]),
    lambda c: _wanted(c.output_mask) * _product(c.x, c.weight[1:]),
)
_INT4 = (lambda c: 2 * prod(c.x) * c.result[-1], lambda c: 2 * prod(c.dy) * c.result[-1])
# The backward computes the logits again.
_LOSS = (
    _LINEAR[0],
    lambda c: (any(c.output_mask) + sum(c.output_mask[:2])) * _product(c.x, c.weight),
)
# For each linear layer: the formula of <op> and <op>_forward, and that of <op>_backward.
LAYERS: dict[str, tuple[Formula, Formula]] = {
    **dict.fromkeys(("linear", "layer_norm_linear", "rms_norm_linear", "gated_linear"), _LINEAR),
    "folded_layer_norm_linear": (
        lambda c: _product(c.x, c.folded_weight),
        lambda c: (1 + (c.activation != "none")) * _product(c.x, c.folded_weight),
    ),
    "gated_linear_pair": (
        lambda c: 2 * _product(c.x, c.left),
        lambda c: _branches(c.output_mask) * _product(c.x, c.left),
    ),
    "gated_mlp": (
        lambda c: 2 * _product(c.x, c.left) + 2 * prod(c.x[:-1]) * prod(c.down),
        _gated_mlp_backward,
    ),
}
# For each op with a list of weights: the layer with one weight.
LISTS = {"layer_norm_linears": "layer_norm_linear", "rms_norm_linears": "rms_norm_linear"}
_FORMULAS: dict[str, tuple[Formula, Formula | None]] = {
    **LAYERS,
    **dict.fromkeys(LISTS, _LINEARS),
    **dict.fromkeys(("linear_cross_entropy", "linear_token_logprobs"), _LOSS),
    "linear_cross_entropy_gradients": (
        lambda c: (1 + sum(c.output_mask[:2])) * _product(c.x, c.weight),
        None,
    ),
    "linear_cross_entropy_exponentials": _LINEAR,
    "experts": (
        lambda c: 2 * prod(c.index) * (prod(c.gate_up[1:]) + prod(c.down[1:])),
        _experts_backward,
    ),
    **dict.fromkeys(("grouped_linear", "grouped_gated_linear"), _GROUPED),
    "bmm": (
        lambda c: 2 * prod(c.result) * c.a[-1],
        lambda c: sum(c.output_mask) * 2 * prod(c.dy) * c.a[-1],
    ),
    "softmax_matmul": (_softmax_matmul, lambda c: 2 * _softmax_matmul(c)),
    # The backward computes the scores again.
    "attention": (_attention, lambda c: _attention(c, of_query=3, of_value=2)),
    "attention_with_lse": (_attention, None),
    **dict.fromkeys(("int4_linear", "int4_linear_repacked"), _INT4),
    "conv2d": (
        lambda c: 2 * prod(c.result) * prod(c.weight[-2:]),
        lambda c: sum(c.output_mask) * 2 * prod(c.dz) * prod(c.weight[-2:]),
    ),
}


def formula(op: str) -> Formula | None:
    """Returns the formula of an op, or None if the op multiplies no matrices."""
    forward, backward = _FORMULAS.get(public_op(op), (None, None))
    return backward if op.endswith("_backward") else forward


def _counter(op: Any, formula: Formula) -> Callable[..., int]:
    """Wraps a formula for torch, which passes an op's arguments and the shape of its result."""
    arguments = op.default._schema.arguments
    defaults = {a.name: a.default_value for a in arguments}

    def count(*args: Any, out_shape: Any, **kwargs: Any) -> int:
        given = dict(zip(defaults, args, strict=False))
        return formula(SimpleNamespace(**{**defaults, **given, **kwargs}, result=out_shape))

    return count


def install(ops: Sequence[str]) -> None:
    """Registers the formulas of the ops with FlopCounterMode."""
    from torch.utils import flop_counter

    for name in filter(formula, ops):
        op = getattr(torch.ops.torchweld, name)
        # An earlier import of torchweld may have registered a formula, which torch would keep.
        flop_counter.flop_registry.pop(op, None)
        flop_counter.register_flop_formula(op)(_counter(op, formula(name)))
