"""Every sum of an element of x and one of y."""

from __future__ import annotations

from torch import Tensor

from torchweld._library import ops
from torchweld._refusals import readable_errors


@readable_errors
def outer_add(x: Tensor, y: Tensor) -> Tensor:
    """`x[None, :] + y[:, None]`.

    Sums are made in fp32 (fp64 for fp64), in the gradient too; on a GPU one read of `dz` gives both
    of its sums.

    Args:
        x: `(cols,)`, float32, float16 or bfloat16 (float64 on CPU), any stride.
        y: `(rows,)`, dtype and device of `x`.

    Returns:
        `(rows, cols)` contiguous, dtype of `x`.

    Raises:
        RuntimeError: a wrong shape, dtype or device.

    Limits: differentiable once. Under autocast the inputs' dtype is kept.

    Example::

        x, y = torch.randn(8), torch.randn(4)
        assert torch.equal(torchweld.outer_add(x, y), x[None, :] + y[:, None])
    """
    return ops.outer_add(x, y)
