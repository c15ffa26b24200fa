"""Rows times a number each, negative products replaced by 0."""

from __future__ import annotations

from torch import Tensor

from torchweld._library import ops
from torchweld._refusals import readable_errors


@readable_errors
def mul_relu(x: Tensor, y: Tensor) -> Tensor:
    """`torch.relu(x * y[:, None])`.

    Products and sums are in fp32 (fp64 for fp64). The gradient recomputes the products and
    reads `dz` and `x` once; its slope is 1 where the fp32 product is above 0.

    Args:
        x: `(rows, cols)`, float32, float16 or bfloat16 (float64 on CPU), any strides.
        y: `(rows,)`, dtype and device of `x`.

    Returns:
        `(rows, cols)` contiguous, dtype of `x`. A product of NaN stays NaN, as in torch.

    Raises:
        RuntimeError: a wrong shape, dtype or device.

    Limits: differentiable once. On CUDA, tensors whose columns are not contiguous are
        copied first. Under autocast the inputs' dtype is kept.

    Example::

        x, y = torch.randn(4, 8), torch.randn(4)
        assert torch.equal(torchweld.mul_relu(x, y), torch.relu(x * y[:, None]))
    """
    return ops.mul_relu(x, y)
