"""The ops of the Triton puzzles (csrc/puzzles): one function each, without a module."""

from __future__ import annotations

from torch import Tensor

from torchweld._library import ops
from torchweld._refusals import readable_errors


@readable_errors
def add_scalar(x: Tensor, value: float) -> Tensor:
    """Computes `x + value`.

    The sum is made in fp32 (fp64 for fp64) and rounded once.

    Args:
        x: any shape, float32, float16 or bfloat16 (float64 on CPU), any strides.
        value: a number; inf and NaN propagate as in torch.

    Returns:
        The shape and dtype of `x`, contiguous.

    Raises:
        RuntimeError: `x` is not floating point.

    Limits: on CUDA, an `x` whose last dimension is not contiguous is copied first. Under
        autocast the input's dtype is kept.

    Example::

        x = torch.randn(4, 8)
        assert torch.equal(torchweld.add_scalar(x, 1.5), x + 1.5)
    """
    return ops.add_scalar(x, value)


@readable_errors
def outer_add(x: Tensor, y: Tensor) -> Tensor:
    """Computes `x[None, :] + y[:, None]`.

    Sums are made in fp32 (fp64 for fp64), in the gradient too; on a GPU one read of the result's
    gradient `dz` gives both gradients.

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


@readable_errors
def outer_mul_relu(x: Tensor, y: Tensor) -> Tensor:
    """Computes `torch.relu(x[None, :] * y[:, None])`.

    Products and sums are in fp32 (fp64 for fp64). Backward recomputes the products, so nothing of
    size `(rows, cols)` is saved for it, and reads the result's gradient once on a GPU; relu's slope
    is 1 where the fp32 product is above 0.

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


@readable_errors
def mul_relu(x: Tensor, y: Tensor) -> Tensor:
    """Computes `torch.relu(x * y[:, None])`.

    Products and sums are in fp32 (fp64 for fp64). Backward recomputes the products and reads `x`
    and the result's gradient once; relu's slope is 1 where the fp32 product is above 0.

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


@readable_errors
def row_sum(x: Tensor) -> Tensor:
    """Sums over the last dimension: `torch.sum(x, -1)`.

    Sums are kept in fp32 (fp64 for fp64) and added pairwise, in the same order in every run: on
    CUDA the error is at most `(80 + n / 65536) * 2**-24 * sum(|x|)`, plus the rounding of the
    result.

    Args:
        x: `(..., n)`, float32, float16 or bfloat16 (float64 on CPU), any strides, any `n`.

    Returns:
        `(...)` contiguous, dtype of `x`; zeros if `n` is 0.

    Raises:
        RuntimeError: `x` is not floating point or has no dimension.

    The gradient is an expanded view of the result's gradient, as for `torch.sum`.

    Limits: under autocast the input's dtype is kept.

    Example::

        x = torch.randn(4, 1000)
        torch.testing.assert_close(torchweld.row_sum(x), x.sum(-1), rtol=1e-5, atol=1e-4)
    """
    return ops.row_sum(x)


@readable_errors
def conv2d(x: Tensor, weight: Tensor) -> Tensor:
    """Convolves images with one kernel; x is 0 beyond its bottom and right edges.

    `z[b, i, j] = sum_pq weight[p, q] * x[b, i + p, j + q]`, which in torch is
    `F.conv2d(F.pad(x, (0, KW - 1, 0, KH - 1))[:, None], weight[None, None])[:, 0]`.

    Args:
        x: `(batch, H, W)`, float32, float16 or bfloat16 (float64 on CPU), any strides and sizes.
        weight: `(KH, KW)` of any size, dtype and device of `x`.

    Returns:
        `(batch, H, W)` contiguous, dtype of `x`; sums in fp32 (fp64 for fp64).

    Raises:
        RuntimeError: a wrong shape, dtype or device.

    Limits: differentiable once. The zeros beyond the edges are multiplied like any other value: a
    weight of inf or NaN gives NaN at those edges. The gradient to `x` has such zeros beyond its top
    and left edges.

    Example::

        x, weight = torch.randn(2, 8, 8), torch.randn(3, 3)
        z = torchweld.conv2d(x, weight)
        assert z.shape == (2, 8, 8)
    """
    return ops.conv2d(x, weight)


@readable_errors
def scalar_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Computes `torch.softmax(q[:, None] * k, -1) @ v`, without `(n, n)` scores in memory.

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
    shifted sums; the largest and the smallest key give the shift.

    Example::

        q, k, v = torch.randn(3, 100)
        out = torchweld.scalar_attention(q, k, v)
        torch.testing.assert_close(out, torch.softmax(q[:, None] * k, -1) @ v)
    """
    return ops.scalar_attention(q, k, v)
