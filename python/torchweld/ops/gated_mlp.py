"""The MLP with a gate, the one of Llama and its like, as one op."""

from __future__ import annotations

from torch import Tensor

from torchweld._library import ops
from torchweld._refusals import readable_errors
from torchweld._types import Gate


@readable_errors
def gated_mlp(
    x: Tensor,
    left: Tensor,
    right: Tensor,
    down: Tensor,
    left_bias: Tensor | None = None,
    right_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    gate: Gate = "swiglu",
) -> Tensor:
    """`F.linear(gate(F.linear(x, left, left_bias), F.linear(x, right, right_bias)), down,
    down_bias)`.

    Llama's `down_proj(silu(gate_proj(x)) * up_proj(x))` has `left = gate_proj.weight`, `right =
    up_proj.weight` and `down = down_proj.weight`. It is `gated_linear_pair` followed by `linear`;
    as one op its gradient needs less memory traffic: on Hopper the matmul of the gradient with
    `down` also computes the gradients of both branches.

    Args:
        x: `(..., K)`.
        left: `(N, K)`.
        right: `(N, K)`.
        down: `(P, N)`.
        left_bias: `(N,)`.
        right_bias: `(N,)`.
        down_bias: `(P,)`.
        gate: a gate of `gated_linear`.

    Returns:
        `(..., P)` contiguous, dtype of `x`; sums in fp32. The gated values are rounded to that
        dtype.

    Raises:
        RuntimeError: a wrong shape, dtype, device or gate.

    Limits: differentiable once.

    Example::

        gate_proj, up_proj, down_proj = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)
        weights = gate_proj.weight, up_proj.weight, down_proj.weight
        biases = gate_proj.bias, up_proj.bias, down_proj.bias
        y = torchweld.gated_mlp(torch.randn(4, 32), *weights, *biases, gate="swiglu")
        assert y.shape == (4, 32)
    """
    return ops.gated_mlp(x, left, right, down, left_bias, right_bias, down_bias, gate=gate)
