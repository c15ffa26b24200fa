"""The gate of two tensors, where their linear layers are computed by others."""

from __future__ import annotations

from torch import Tensor

from torchweld._library import ops
from torchweld._refusals import readable_errors
from torchweld._types import Gate


@readable_errors
def gated_activation(left: Tensor, right: Tensor, *, gate: Gate = "swiglu") -> Tensor:
    """`gate(left, right)`, for example `silu(left) * right` in one pass over memory.

    `gated_linear_pair` and `gated_mlp` also compute the linear layers in front of the gate. This op
    is for layers that have to be called: with LoRA adapters, hooks or weights of another format.
    Its gradient reads `dy`, `left` and `right` and writes both gradients in one pass.

    Args:
        left: `(..., N)`.
        right: the shape and dtype of `left`.
        gate: a gate of `gated_linear`.

    Returns:
        `(..., N)` contiguous, dtype of `left`; computed in fp32 and rounded once.

    Raises:
        RuntimeError: a wrong shape, dtype, device or gate.

    Limits: differentiable once.

    Example::

        left, right = torch.randn(4, 64), torch.randn(4, 64)
        y = torchweld.gated_activation(left, right, gate="swiglu")
        torch.testing.assert_close(y, F.silu(left) * right)
    """
    return ops.gated_activation(left, right, gate=gate)
