"""Several linear layers of one normalised input, such as query, key and value."""

from __future__ import annotations

from torch import Tensor

from torchweld._library import ops
from torchweld._refusals import readable_errors


@readable_errors
def rms_norm_linears(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor] | None = None,
    norm_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0,
) -> list[Tensor]:
    """Normalises x once and applies several linear layers to the result n:
    `[F.linear(n, weight, bias) for weight, bias in zip(weights, biases)]` with
    `n = F.rms_norm(x, (K,), norm_weight + weight_offset, eps)`.

    The gradient to `n` is one product over the concatenated columns of all results, with fp32 sums:
    no pass over memory adds the gradients of the layers.

    Args:
        x: `(..., K)`, float32, float16 or bfloat16 (float64 on CPU), any strides.
        weights: at least one `(N_i, K)`, dtype of `x`, any strides.
        biases: one `(N_i,)`, dtype of `x`, for each weight; None or `[]` if there are none.
        norm_weight: `(K,)`, dtype of `x`; None for no scale.
        eps: added to the mean square; finite and at least 0.
        weight_offset: added to `norm_weight` in fp32; Gemma's norms scale by 1 + weight. Must be 0
            without a `norm_weight`.

    Returns:
        A list of `(..., N_i)` contiguous, dtype of `x`; statistics and sums in fp32.

    Raises:
        RuntimeError: a wrong shape, dtype, device, number of biases, eps or weight_offset.

    Limits: differentiable once. The normalised rows are not kept for the gradient. Under autocast
        `x` is rounded to the autocast dtype before it is normalised.

    Example::

        x, norm_weight = torch.randn(4, 32), torch.ones(32)
        weights = [torch.randn(32, 32), torch.randn(8, 32), torch.randn(8, 32)]
        q, k, v = torchweld.rms_norm_linears(x, weights, None, norm_weight)
    """
    return ops.rms_norm_linears(
        x, weights, biases, norm_weight, eps=eps, weight_offset=weight_offset
    )


@readable_errors
def layer_norm_linears(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor] | None = None,
    ln_weight: Tensor | None = None,
    ln_bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> list[Tensor]:
    """Computes :func:`rms_norm_linears` with `n = F.layer_norm(x, (K,), ln_weight, ln_bias, eps)`.

    Args:
        x: `(..., K)`, float32, float16 or bfloat16 (float64 on CPU), any strides.
        weights: at least one `(N_i, K)`, dtype of `x`, any strides.
        biases: one `(N_i,)`, dtype of `x`, for each weight; None or `[]` if there are none.
        ln_weight: `(K,)`, dtype of `x`; None for no scale.
        ln_bias: `(K,)`, dtype of `x`; None for no shift.
        eps: added to the variance; finite and at least 0.

    Returns:
        A list of `(..., N_i)` contiguous, dtype of `x`; statistics and sums in fp32.

    Raises:
        RuntimeError: a wrong shape, dtype, device, number of biases or eps.

    Limits: differentiable once. The normalised rows are not kept for the gradient. Under autocast
        `x` is rounded to the autocast dtype before it is normalised.

    Example::

        x, ln_weight, ln_bias = torch.randn(4, 32), torch.ones(32), torch.zeros(32)
        weights = [torch.randn(32, 32) for _ in "qkv"]
        q, k, v = torchweld.layer_norm_linears(x, weights, None, ln_weight, ln_bias)
    """
    return ops.layer_norm_linears(x, weights, biases, ln_weight, ln_bias, eps=eps)
