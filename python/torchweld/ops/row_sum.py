"""Sums over the last dimension."""

from __future__ import annotations

from torch import Tensor

from torchweld._library import ops
from torchweld._refusals import readable_errors


@readable_errors
def row_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension: `torch.sum(x, -1)`.

    Sums are kept in fp32 (fp64 for fp64) and added in pairs, in the same order in every run: on
    CUDA the error is at most `(80 + n / 65536) * 2**-24 * sum(|x|)`, plus the rounding of the
    result.

    Args:
        x: `(..., n)`, float32, float16 or bfloat16 (float64 on CPU), any strides, any `n`.

    Returns:
        `(...)` contiguous, dtype of `x`; zeros where `n` is 0.

    Raises:
        RuntimeError: `x` is no floating tensor or has no dimension.

    The gradient is an expanded view of the result's gradient, as for `torch.sum`.

    Limits: under autocast the input's dtype is kept.

    Example::

        x = torch.randn(4, 1000)
        torch.testing.assert_close(torchweld.row_sum(x), x.sum(-1), rtol=1e-5, atol=1e-4)
    """
    return ops.row_sum(x)
