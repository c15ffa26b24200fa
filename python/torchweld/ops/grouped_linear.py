"""Linear layers of groups of rows, all groups in one product."""

from __future__ import annotations

from torch import Tensor

from torchweld._library import ops
from torchweld._refusals import readable_errors
from torchweld._types import Activation, Gate


@readable_errors
def grouped_linear(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = "none",
) -> Tensor:
    """Computes `activation(F.linear(x[r], weight[e], bias[e]))` for every row r of group e.

    The rows of a group are adjacent: group e ends before row `offsets[e]`, the first one of the
    next group, as in `F.grouped_mm`. The offsets stay on the device: the host waits for nothing,
    and a CUDA graph can hold the call.

    Args:
        x: `(R, K)`, the rows sorted by group; float32, float16 or bfloat16 (float64 on CPU).
        weight: `(E, N, K)`, dtype of `x`, any strides: `F.grouped_mm` takes `weight.mT`.
        offsets: `(E,)`, int32 or int64. Each is clamped to 0..R, and one that is below an earlier
            one counts as the earlier one.
        bias: `(E, N)`, dtype of `x`.
        activation: "none", "relu", "gelu" (erf), "gelu_tanh", "silu" or "relu_squared".

    Returns:
        `(R, N)` contiguous, dtype of `x`; sums in fp32. Rows behind the last group are 0, and so
        are their gradients. A call has the same bits in every run.

    Raises:
        RuntimeError: a wrong shape, dtype, device or activation; on a GPU, more than 8192 groups.

    Limits: differentiable once.

    Example::

        x, weight = torch.randn(10, 32), torch.randn(3, 64, 32)
        offsets = torch.tensor([4, 4, 9], dtype=torch.int32)  # the second group has no rows
        y = torchweld.grouped_linear(x, weight, offsets)
        torch.testing.assert_close(y[4:9], F.linear(x[4:9], weight[2]), rtol=1e-4, atol=1e-4)
        assert (y[9:] == 0).all()
    """
    return ops.grouped_linear(x, weight, offsets, bias, activation=activation)


@readable_errors
def grouped_gated_linear(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    *,
    gate: Gate = "swiglu",
    interleaved: bool = False,
) -> Tensor:
    """Computes `gated_linear(x[r], weight[e], bias[e])` for every row r of group e.

    Args:
        x: `(R, K)`, the rows sorted by group; float32, float16 or bfloat16 (float64 on CPU).
        weight: `(E, 2N, K)`, dtype of `x`: in each group the left branch's rows, then the right
            branch's (interleaved: even rows left, odd rows right).
        offsets: `(E,)`, the ends of the groups as in `grouped_linear`.
        bias: `(E, 2N)`, dtype of `x`, in the weight's order.
        gate: a gate of `gated_linear`.
        interleaved: whether weight and bias have the interleaved layout.

    Returns:
        `(R, N)` contiguous, dtype of `x`; sums in fp32. Rows behind the last group are 0, and so
        are their gradients.

    Raises:
        RuntimeError: a wrong shape, dtype, device or gate; on a GPU, more than 8192 groups.

    Limits: differentiable once. Keeps `x` and the products `(R, 2N)` for its gradient.

    Example::

        x, weight = torch.randn(10, 32), torch.randn(3, 2 * 24, 32)
        offsets = torch.tensor([4, 4, 10], dtype=torch.int32)
        y = torchweld.grouped_gated_linear(x, weight, offsets)
        left, right = F.linear(x[:4], weight[0]).chunk(2, -1)
        torch.testing.assert_close(y[:4], F.silu(left) * right, rtol=1e-4, atol=1e-4)
    """
    return ops.grouped_gated_linear(x, weight, offsets, bias, gate=gate, interleaved=interleaved)
