"""Attention with a head dim of 1."""

from __future__ import annotations

from torch import Tensor

from torchweld._library import ops
from torchweld._refusals import readable_errors


@readable_errors
def scalar_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`torch.softmax(q[:, None] * k, -1) @ v`; the `(n, n)` scores are never in memory.

    Args:
        q: `(n,)`, float32, float16 or bfloat16 (float64 on CPU), any stride, any `n`.
        k: `(n,)`, dtype and device of `q`.
        v: `(n,)`, dtype and device of `q`.

    Returns:
        `(n,)` contiguous, dtype of `q`; scores, probabilities and sums in fp32 (fp64 for fp64).

    Raises:
        RuntimeError: a wrong shape, dtype or device.

    Limits: differentiable once. Under autocast the inputs' dtype is kept. On a GPU a probability
    below 2^-126 of its row's largest counts as 0.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, for the
    shifted sums; the shift itself is known from the largest and the smallest key.

    Example::

        q, k, v = torch.randn(3, 100)
        out = torchweld.scalar_attention(q, k, v)
        torch.testing.assert_close(out, torch.softmax(q[:, None] * k, -1) @ v)
    """
    return ops.scalar_attention(q, k, v)
