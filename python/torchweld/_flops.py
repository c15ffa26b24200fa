"""The formulas by which torch.utils.flop_counter.FlopCounterMode counts the FLOPs of the ops.

As for torch's own ops, only matmuls and convolutions count, with two operations per product. Masked
products count too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from torchweld.info import public_op

_Shape = Sequence[int]


# torch calls each formula with the shapes of the op's tensors. out_shape is the result's shape.
def _linear(x: _Shape, weight: _Shape, *args: Any, **kwargs: Any) -> int:
    return 2 * prod(x) * weight[0]


def _linear_backward(
    dy: _Shape, x: _Shape, weight: _Shape, *args: Any, output_mask: Sequence[bool], **kwargs: Any
) -> int:
    # output_mask[3:] requests the gradients of the norm's parameters. They need the same product as
    # dx: the gradient with respect to the norm's result.
    wants_x, wants_weight = output_mask[0] or any(output_mask[3:]), output_mask[1]
    return (wants_x + wants_weight) * _linear(x, weight)


def _linears(x: _Shape, weights: Sequence[_Shape], *args: Any, **kwargs: Any) -> int:
    return sum(_linear(x, weight) for weight in weights)


def _linears_backward(
    dys: Sequence[_Shape],
    x: _Shape,
    weights: Sequence[_Shape],
    *args: Any,
    output_mask: Sequence[bool] | None = None,
    **kwargs: Any,
) -> int:
    mask = args[-1] if output_mask is None else output_mask
    return sum(_linear_backward((), x, weight, output_mask=mask) for weight in weights)


def _gated_pair(x: _Shape, left: _Shape, *args: Any, **kwargs: Any) -> int:
    return 2 * _linear(x, left)


def _gated_pair_backward(
    dy: _Shape, x: _Shape, left: _Shape, *args: Any, output_mask: Sequence[bool], **kwargs: Any
) -> int:
    return (2 * output_mask[0] + output_mask[1] + output_mask[2]) * _linear(x, left)


def _gated_mlp(
    x: _Shape, left: _Shape, right: _Shape, down: _Shape, *args: Any, **kwargs: Any
) -> int:
    return 2 * _linear(x, left) + 2 * prod(x[:-1]) * prod(down)


def _gated_mlp_backward(
    dy: _Shape,
    x: _Shape,
    left: _Shape,
    right: _Shape,
    down: _Shape,
    *args: Any,
    output_mask: Sequence[bool],
    **kwargs: Any,
) -> int:
    wants_dact = any((*output_mask[:3], *output_mask[4:6]))
    branches = 2 * output_mask[0] + output_mask[1] + output_mask[2]
    return branches * _linear(x, left) + (wants_dact + output_mask[3]) * 2 * prod(dy) * down[1]


def _experts(
    x: _Shape, gate_up: _Shape, down: _Shape, index: _Shape, *args: Any, **kwargs: Any
) -> int:
    return 2 * prod(index) * (prod(gate_up[1:]) + prod(down[1:]))


def _experts_backward(
    dy: _Shape,
    x: _Shape,
    gate_up: _Shape,
    down: _Shape,
    index: _Shape,
    *args: Any,
    output_mask: Sequence[bool],
    **kwargs: Any,
) -> int:
    wants_dact = any((*output_mask[:2], *output_mask[3:5]))
    of_gate_up = (output_mask[0] + output_mask[1]) * prod(gate_up[1:])
    return 2 * prod(index) * (of_gate_up + (wants_dact + output_mask[2]) * prod(down[1:]))


def _grouped(x: _Shape, weight: _Shape, *args: Any, **kwargs: Any) -> int:
    return _linear(x, weight[1:])


def _grouped_backward(dy: _Shape, x: _Shape, weight: _Shape, *args: Any, **kwargs: Any) -> int:
    return _linear_backward(dy, x, weight[1:], *args, **kwargs)


def _folded_backward(
    dy: _Shape, x: _Shape, weight: _Shape, *args: Any, activation: str = "none", **kwargs: Any
) -> int:
    recomputed = activation != "none"
    return (1 + recomputed) * _linear(x, weight)


def _bmm(a: _Shape, b: _Shape, *, out_shape: _Shape, **kwargs: Any) -> int:
    return 2 * prod(out_shape) * a[-1]


def _bmm_backward(
    dy: _Shape, a: _Shape, b: _Shape, *, output_mask: Sequence[bool], **kwargs: Any
) -> int:
    return sum(output_mask) * 2 * prod(dy) * a[-1]


def _softmax_matmul(scores: _Shape, value: _Shape, *args: Any, **kwargs: Any) -> int:
    return 2 * prod(scores) * value[-1]


def _softmax_matmul_backward(
    dout: _Shape, scores: _Shape, value: _Shape, *args: Any, **kwargs: Any
) -> int:
    return 2 * _softmax_matmul(scores, value)


def _attention(query: _Shape, key: _Shape, value: _Shape, *args: Any, **kwargs: Any) -> int:
    return 2 * prod(query[:-1]) * key[2] * (query[-1] + value[-1])


def _attention_backward(
    dout: _Shape, query: _Shape, key: _Shape, value: _Shape, *args: Any, **kwargs: Any
) -> int:
    # The backward recomputes the scores.
    return 2 * prod(query[:-1]) * key[2] * (3 * query[-1] + 2 * value[-1])


def _int4_linear(x: _Shape, *args: Any, out_shape: _Shape, **kwargs: Any) -> int:
    return 2 * prod(x) * out_shape[-1]


def _conv2d(x: _Shape, weight: _Shape, *, out_shape: _Shape, **kwargs: Any) -> int:
    return 2 * prod(out_shape) * prod(weight[-2:])


def _conv2d_backward(
    dz: _Shape, x: _Shape, weight: _Shape, *, output_mask: Sequence[bool], **kwargs: Any
) -> int:
    return sum(output_mask) * 2 * prod(dz) * prod(weight[-2:])


def _loss_backward(
    dloss: _Shape, x: _Shape, weight: _Shape, *args: Any, output_mask: Sequence[bool], **kwargs: Any
) -> int:
    # The backward recomputes the logits.
    return (any(output_mask) + output_mask[0] + output_mask[1]) * _linear(x, weight)


def _loss_gradients(
    x: _Shape, weight: _Shape, *args: Any, output_mask: Sequence[bool], **kwargs: Any
) -> int:
    return (1 + output_mask[0] + output_mask[1]) * _linear(x, weight)


def _exponentials_backward(
    dloss: _Shape, x: _Shape, weight: _Shape, *args: Any, output_mask: Sequence[bool], **kwargs: Any
) -> int:
    return (output_mask[0] + output_mask[1]) * _linear(x, weight)


_Formulas = tuple[Callable[..., int], Callable[..., int] | None]
# For each linear layer: the formula of <op> and <op>_forward, and that of <op>_backward.
LAYERS: dict[str, _Formulas] = {
    **dict.fromkeys(
        ("linear", "layer_norm_linear", "rms_norm_linear", "gated_linear"),
        (_linear, _linear_backward),
    ),
    "folded_layer_norm_linear": (_linear, _folded_backward),
    "gated_linear_pair": (_gated_pair, _gated_pair_backward),
    "gated_mlp": (_gated_mlp, _gated_mlp_backward),
}
# For each op with a list of weights: the layer with one weight.
LISTS = {"layer_norm_linears": "layer_norm_linear", "rms_norm_linears": "rms_norm_linear"}
_FORMULAS: dict[str, _Formulas] = {
    **LAYERS,
    **dict.fromkeys(LISTS, (_linears, _linears_backward)),
    "linear_cross_entropy": (_linear, _loss_backward),
    "linear_cross_entropy_gradients": (_loss_gradients, None),
    "linear_cross_entropy_exponentials": (_linear, _exponentials_backward),
    "linear_token_logprobs": (_linear, _loss_backward),
    "experts": (_experts, _experts_backward),
    **dict.fromkeys(("grouped_linear", "grouped_gated_linear"), (_grouped, _grouped_backward)),
    "bmm": (_bmm, _bmm_backward),
    "softmax_matmul": (_softmax_matmul, _softmax_matmul_backward),
    "attention": (_attention, _attention_backward),
    "attention_with_lse": (_attention, None),
    "int4_linear": (_int4_linear, _int4_linear),
    "int4_linear_repacked": (_int4_linear, _int4_linear),
    "conv2d": (_conv2d, _conv2d_backward),
}


def formula(op: str) -> Callable[..., int] | None:
    """Returns the formula of an op, or None if the op multiplies no matrices."""
    forward, backward = _FORMULAS.get(public_op(op), (None, None))
    return backward if op.endswith("_backward") else forward


def install(ops: Sequence[str]) -> None:
    """Registers the formulas of the ops with FlopCounterMode."""
    from torch.utils import flop_counter

    for name in filter(formula, ops):
        op = getattr(torch.ops.torchweld, name)
        # torch keeps the formula of an earlier import of torchweld unless that formula is removed.
        flop_counter.flop_registry.pop(op, None)
        flop_counter.register_flop_formula(op)(formula(name))
