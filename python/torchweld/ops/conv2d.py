"""Convolution of single-channel images."""

from __future__ import annotations

from torch import Tensor

from torchweld._library import ops
from torchweld._refusals import readable_errors


@readable_errors
def conv2d(x: Tensor, weight: Tensor) -> Tensor:
    """`z[b, i, j] = sum_pq weight[p, q] * x[b, i + p, j + q]`, x 0 beyond bottom and right edge.

    In torch: `F.conv2d(F.pad(x, (0, KW - 1, 0, KH - 1))[:, None], weight[None, None])[:, 0]`.

    Args:
        x: `(batch, H, W)`, float32, float16 or bfloat16 (float64 on CPU), any strides and sizes.
        weight: `(KH, KW)` of any size, dtype and device of `x`.

    Returns:
        `(batch, H, W)` contiguous, dtype of `x`; sums in fp32 (fp64 for fp64).

    Raises:
        RuntimeError: a wrong shape, dtype or device.

    Limits: differentiable once. The zeros beyond the edges are multiplied like any other value, so
    that a weight which is inf or NaN gives NaN there. The gradient to `x` sees zeros beyond the top
    and left edge in the same way.

    Example::

        x, weight = torch.randn(2, 8, 8), torch.randn(3, 3)
        z = torchweld.conv2d(x, weight)
        assert z.shape == (2, 8, 8)
    """
    return ops.conv2d(x, weight)
