"""The formulas by which torch.utils.flop_counter.FlopCounterMode counts the FLOPs of the ops.

As for torch's own ops, only matmuls and convolutions count, with two operations per product. Masked
products count too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

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


_LOSSES = ("linear_cross_entropy", "linear_token_logprobs")
_NORM_LINEAR = ("layer_norm_linear", "rms_norm_linear")
_LINEAR = ("linear", *_NORM_LINEAR, "gated_linear")
FORMULAS: dict[str, Callable[..., int]] = {
    **{op + suffix: _linear for op in _LINEAR for suffix in ("", "_forward")},
    **{op + "_backward": _linear_backward for op in _LINEAR},
    **{op + "s" + suffix: _linears for op in _NORM_LINEAR for suffix in ("", "_forward")},
    **{op + "s_backward": _linears_backward for op in _NORM_LINEAR},
    **{op + suffix: _linear for op in _LOSSES for suffix in ("", "_forward")},
    **{op + "_backward": _loss_backward for op in _LOSSES},
    "linear_cross_entropy_gradients_forward": _loss_gradients,
    "linear_cross_entropy_exponentials_forward": _linear,
    "linear_cross_entropy_exponentials_backward": _exponentials_backward,
    "gated_linear_pair": _gated_pair,
    "gated_linear_pair_forward": _gated_pair,
    "gated_linear_pair_backward": _gated_pair_backward,
    "gated_mlp": _gated_mlp,
    "gated_mlp_forward": _gated_mlp,
    "gated_mlp_backward": _gated_mlp_backward,
    "folded_layer_norm_linear": _linear,
    "folded_layer_norm_linear_backward": _folded_backward,
    "bmm": _bmm,
    "bmm_backward": _bmm_backward,
    "softmax_matmul": _softmax_matmul,
    "softmax_matmul_forward": _softmax_matmul,
    "softmax_matmul_backward": _softmax_matmul_backward,
    "attention": _attention,
    "attention_forward": _attention,
    "attention_with_lse": _attention,
    "attention_backward": _attention_backward,
    "int4_linear": _int4_linear,
    "int4_linear_backward": _int4_linear,
    "int4_linear_repacked": _int4_linear,
    "int4_linear_repacked_backward": _int4_linear,
    "conv2d": _conv2d,
    "conv2d_backward": _conv2d_backward,
}


def install() -> None:
    """Registers the formulas with FlopCounterMode."""
    from torch.utils import flop_counter

    for name, formula in FORMULAS.items():
        op = getattr(torch.ops.torchweld, name)
        # torch keeps the formula of an earlier import of torchweld unless that formula is removed.
        flop_counter.flop_registry.pop(op, None)
        flop_counter.register_flop_formula(op)(formula)
