"""Batched matmul."""

from __future__ import annotations

from torch import Tensor

from torchweld._library import ops
from torchweld._refusals import readable_errors


@readable_errors
def bmm(a: Tensor, b: Tensor) -> Tensor:
    """`torch.matmul(a, b)` of three-dimensional tensors; a batch of 1 broadcasts.

    Args:
        a: `(batch, M, K)`, any strides: a transposed view goes in without a copy.
        b: `(batch, K, N)`, any strides, dtype and device of `a`.

    Returns:
        `(batch, M, N)` contiguous, dtype of `a`; sums in fp32.

    Raises:
        RuntimeError: a wrong shape, dtype or device.

    Limits: differentiable once.

    Example::

        a, b = torch.randn(2, 4, 8), torch.randn(2, 8, 16)
        torch.testing.assert_close(torchweld.bmm(a, b), torch.bmm(a, b))
    """
    return ops.bmm(a, b)
