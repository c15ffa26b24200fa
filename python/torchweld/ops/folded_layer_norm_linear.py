"""LayerNorm + linear with the LayerNorm's weights folded into the matmul, for inference."""

from __future__ import annotations

import torch
from torch import Tensor

from torchweld._library import ops
from torchweld._refusals import readable_errors
from torchweld._types import Activation


@readable_errors
def fold_layer_norm(
    weight: Tensor,
    bias: Tensor | None = None,
    ln_weight: Tensor | None = None,
    ln_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Folds a LayerNorm's weights into the linear layer after it.

    Args:
        weight: `(N, K)`.
        bias: `(N,)`.
        ln_weight: `(K,)`.
        ln_bias: `(K,)`.

    Returns:
        `folded_weight = weight * ln_weight` in the weight's dtype, `weight_sum` = its row sums and
        `folded_bias = bias + weight @ ln_bias`, both fp32 `(N,)`. The sums are taken from the
        rounded folded weight: from unrounded ones the row mean would not cancel.

    Raises:
        RuntimeError: a wrong shape, dtype or device.

    Limits: no gradient; the fold is a frozen form for inference.

    Example::

        norm, fc = nn.LayerNorm(32), nn.Linear(32, 64)
        parameters = (p.detach() for p in (fc.weight, fc.bias, norm.weight, norm.bias))
        weight, weight_sum, bias = torchweld.fold_layer_norm(*parameters)
        assert weight.shape == (64, 32) and weight_sum.shape == (64,)
    """
    return ops.fold_layer_norm(weight, bias, ln_weight, ln_bias)


@readable_errors
def folded_layer_norm_linear(
    x: Tensor,
    folded_weight: Tensor,
    weight_sum: Tensor,
    folded_bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    activation: Activation = "none",
) -> Tensor:
    """`activation(rstd * (x @ folded_weight.T - mean * weight_sum) + folded_bias)`.

    Args:
        x: `(..., K)`.
        folded_weight: `(N, K)` of `fold_layer_norm` (or a plain weight of a LayerNorm without
            parameters).
        weight_sum: fp32 `(N,)`: the row sums of `folded_weight`; other values are not supported.
        folded_bias: fp32 `(N,)`.
        eps: added to the variance; finite and at least 0.
        activation: "none", "relu", "gelu" (erf), "gelu_tanh" or "silu".

    Returns:
        `(..., N)` contiguous, dtype of `x`.

    Raises:
        RuntimeError: a wrong shape, dtype, device, eps or activation, or a folded tensor that
            requires a gradient.

    Limits: gradient to `x` only.

    Example::

        x, weight, ln_weight = torch.randn(4, 32), torch.randn(64, 32), torch.randn(32)
        folded = torchweld.fold_layer_norm(weight, None, ln_weight)
        y = torchweld.folded_layer_norm_linear(x, *folded, activation="relu")
        assert y.shape == (4, 64)
    """
    return ops.folded_layer_norm_linear(
        x, folded_weight, weight_sum, folded_bias, eps=eps, activation=activation
    )


def row_sums(weight: Tensor) -> Tensor:
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return weight.sum(1, dtype=torch.float64).to(wide)
