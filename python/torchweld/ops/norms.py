"""RMSNorm and LayerNorm of rows, alone and with a residual added first."""

from __future__ import annotations

from torch import Tensor

from torchweld._library import ops
from torchweld._refusals import sentences


@sentences
def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6, weight_offset: float = 0
) -> Tensor:
    """`F.rms_norm(x, (n,), weight + weight_offset, eps)`.

    All arithmetic is fp32 (fp64 for fp64) with one rounding of the result, as in torch. Hugging
    Face's `LlamaRMSNorm` also rounds the normalised row before it multiplies by the weight.

    Args:
        x: `(..., n)`, float32, float16 or bfloat16 (float64 on CPU), any strides.
        weight: `(n,)`, dtype of `x`.
        eps: added to the mean square; finite and at least 0.
        weight_offset: added to the weight in fp32; Gemma's norms scale by 1 + weight. 0 without a
            weight.

    Returns:
        `(..., n)` contiguous, dtype of `x`.

    Raises:
        RuntimeError: a wrong shape, dtype, device, eps or weight_offset.

    Limits: differentiable once. Under autocast the dtype of `x` is kept and the weight is cast to
        it.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    return ops.rms_norm(x, weight, eps=eps, weight_offset=weight_offset)


@sentences
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """`F.layer_norm(x, (n,), weight, bias, eps)`: over the last dimension.

    All arithmetic is fp32 (fp64 for fp64) with one rounding of the result. Its error does not grow
    with `|mean| / std`.

    Args:
        x: `(..., n)`, float32, float16 or bfloat16 (float64 on CPU), any strides.
        weight: `(n,)`, dtype of `x`.
        bias: `(n,)`, dtype of `x`.
        eps: added to the variance; finite and at least 0.

    Returns:
        `(..., n)` contiguous, dtype of `x`.

    Raises:
        RuntimeError: a wrong shape, dtype, device or eps.

    Limits: differentiable once. Under autocast the dtype of `x` is kept and weight and bias are
        cast to it; torch's `layer_norm` returns float32 there.

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016.
    """
    return ops.layer_norm(x, weight, bias, eps=eps)


@sentences
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0,
) -> tuple[Tensor, Tensor]:
    """`sum = x + residual`, and `rms_norm(sum, weight)`, in one pass.

    Args:
        x: `(..., n)`, float32, float16 or bfloat16 (float64 on CPU), any strides.
        residual: shape and dtype of `x`.
        weight: `(n,)`, dtype of `x`.
        eps: added to the mean square; finite and at least 0.
        weight_offset: added to the weight in fp32; 0 without a weight.

    Returns:
        `(normed, sum)`, each `(..., n)` contiguous in the dtype of `x`. `normed` is the norm of the
        rounded sum. Both have a gradient; that of `x` and `residual` is one tensor.

    Raises:
        RuntimeError: a wrong shape, dtype, device, eps or weight_offset.

    Limits: differentiable once. Under autocast `x` and `residual` are added in the wider of their
        dtypes, as `x + residual` is, and the weight is cast to it.
    """
    return ops.add_rms_norm(x, residual, weight, eps=eps, weight_offset=weight_offset)


@sentences
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """`sum = x + residual`, and `layer_norm(sum, weight, bias)`, in one pass.

    Args:
        x: `(..., n)`, float32, float16 or bfloat16 (float64 on CPU), any strides.
        residual: shape and dtype of `x`.
        weight: `(n,)`, dtype of `x`.
        bias: `(n,)`, dtype of `x`.
        eps: added to the variance; finite and at least 0.

    Returns:
        `(normed, sum)`, each `(..., n)` contiguous in the dtype of `x`. `normed` is the norm of the
        rounded sum. Both have a gradient; that of `x` and `residual` is one tensor.

    Raises:
        RuntimeError: a wrong shape, dtype, device or eps.

    Limits: differentiable once. Under autocast `x` and `residual` are added in the wider of their
        dtypes, as `x + residual` is, and weight and bias are cast to it.
    """
    return ops.add_layer_norm(x, residual, weight, bias, eps=eps)
