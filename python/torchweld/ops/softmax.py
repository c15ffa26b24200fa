"""softmax over the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchweld._library import ops, require
from torchweld._refusals import readable_errors
from torchweld.ops.stock import refuse_other


@readable_errors
def softmax(x: Tensor) -> Tensor:
    """Softmax over the last dimension: `torch.softmax(x, -1)`.

    Statistics are kept in fp32 (fp64 for fp64), whatever the dtype of `x`.

    Args:
        x: `(..., n)`, float32, float16 or bfloat16 (float64 on CPU), any strides, any `n`.

    Returns:
        `(..., n)` contiguous, dtype of `x`. A row whose values are all -inf is NaN, as in torch.

    Raises:
        RuntimeError: `x` is not floating point or has no dimension.

    Limits: differentiable once. Under autocast the input's dtype is kept.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.

    Example::

        x = torch.randn(4, 1000)
        torch.testing.assert_close(torchweld.softmax(x), torch.softmax(x, -1))
    """
    return ops.softmax(x)


class Softmax(nn.Module):
    """Applies softmax over one dimension; replaces `torch.nn.Softmax`.

    Args:
        dim: the dimension that sums to 1; None raises ValueError.

    Example::

        softmax = torchweld.nn.Softmax(dim=1)
        x = torch.randn(4, 10, 8)
        torch.testing.assert_close(softmax(x), x.softmax(1))
    """

    __constants__ = ["dim"]
    dim: int

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        require()
        if dim is None:  # torch would guess a dim
            raise ValueError("Softmax: dim must be an int, but got None")
        self.dim = dim

    @classmethod
    def from_torch(cls, module: nn.Softmax) -> Softmax:
        """Converts an `nn.Softmax`.

        Raises:
            ValueError: another module, one of a subclass or with hooks, or no dim.
        """
        refuse_other("Softmax.from_torch", "module", "nn.Softmax", module, nn.Softmax)
        return cls(module.dim).train(module.training)

    def to_torch(self) -> nn.Softmax:
        """Returns the softmax in plain torch.

        Raises:
            ValueError: the module is of a subclass or has hooks.
        """
        refuse_other("Softmax.to_torch", "module", "Softmax", self, Softmax)
        return nn.Softmax(dim=self.dim).train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        """Keeps `x`'s shape and dtype."""
        if self.dim == -1 or self.dim == x.dim() - 1:
            return torch.ops.torchweld.softmax(x)
        return torch.ops.torchweld.softmax(x.movedim(self.dim, -1)).movedim(-1, self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"
