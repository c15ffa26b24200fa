"""Helpers for tests of kernels."""

from __future__ import annotations

from torch import Tensor


def mad(a: Tensor, b: Tensor) -> float:
    """Returns the maximum absolute difference `(a - b).abs().max()` of two tensors in float64.

    Args:
        a: any shape, dtype and device.
        b: the shape of `a`; any dtype and device.

    Returns:
        The difference; 0 for empty tensors and for equal infinities, NaN where either has NaN, so
        that no comparison with a limit passes.

    Raises:
        ValueError: the shapes differ. Nothing is broadcast: a kernel's result of the wrong shape
            must not look right.

    Example::

        x = torch.randn(4, 100)
        assert torchweld.testing.mad(torchweld.softmax(x), x.softmax(-1)) < 1e-6
    """
    if a.shape != b.shape:
        raise ValueError(
            f"torchweld.testing.mad: b must be {tuple(a.shape)} like a, but got {tuple(b.shape)}"
        )
    if a.numel() == 0:
        return 0.0
    x, y = (t.detach().cpu().double() for t in (a, b))
    return (x - y).abs().masked_fill(x == y, 0.0).max().item()
