"""Every product of an element of x and one of y, negative ones replaced by 0."""

from __future__ import annotations

from torch import Tensor

from torchweld._library import ops
from torchweld._refusals import readable_errors


@readable_errors
def outer_mul_relu(x: Tensor, y: Tensor) -> Tensor:
    """`torch.relu(x[None, :] * y[:, None])`.

    Products and sums are in fp32 (fp64 for fp64). The gradient recomputes the products, so
    nothing of size `(rows, cols)` is saved for it, and reads `dz` once on a GPU; its slope is 1
    where the fp32 product is above 0.

    Args:
        x: `(cols,)`, float32, float16 or bfloat16 (float64 on CPU), any stride.
        y: `(rows,)`, dtype and device of `x`.

    Returns:
        `(rows, cols)` contiguous, dtype of `x`. A product of NaN stays NaN, as in torch.

    Raises:
        RuntimeError: a wrong shape, dtype or device.

    Limits: differentiable once. Under autocast the inputs' dtype is kept.

    Example::

        x, y = torch.randn(8), torch.randn(4)
        assert torch.equal(torchweld.outer_mul_relu(x, y), torch.relu(x[None, :] * y[:, None]))
    """
    return ops.outer_mul_relu(x, y)
