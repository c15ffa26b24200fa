"""A number added to every element."""

from __future__ import annotations

from torch import Tensor

from torchweld._library import ops
from torchweld._refusals import readable_errors


@readable_errors
def add_scalar(x: Tensor, value: float) -> Tensor:
    """`x + value`.

    The sum is made in fp32 (fp64 for fp64) and rounded once.

    Args:
        x: any shape, float32, float16 or bfloat16 (float64 on CPU), any strides.
        value: a number; inf and NaN spread as in torch.

    Returns:
        The shape and dtype of `x`, contiguous.

    Raises:
        RuntimeError: `x` is no floating tensor.

    Limits: on CUDA, an `x` whose last dimension is not contiguous is copied first. Under
        autocast the input's dtype is kept.

    Example::

        x = torch.randn(4, 8)
        assert torch.equal(torchweld.add_scalar(x, 1.5), x + 1.5)
    """
    return ops.add_scalar(x, value)
