"""causal_conv1d: the short filter of each channel in front of linear attention and Mamba."""

from __future__ import annotations

from torch import Tensor

from torchweld._library import ops
from torchweld._refusals import readable_errors
from torchweld._types import ConvActivation


@readable_errors
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    *,
    activation: ConvActivation = "none",
    key_start: Tensor | None = None,
) -> Tensor:
    """Convolves each channel with its own filter: position t sees positions t - width + 1 to t.

    The op replaces a padded `F.conv1d`, a slice and activation. All arithmetic is fp32 (fp64 for
    fp64) with one rounding of the result.

    Args:
        x: `(batch, channels, seqlen)`, float32, float16 or bfloat16 (float64 on CPU), any strides.
            The transpose of a projection `(batch, seqlen, channels)` is read as it is; another
            memory order is copied first.
        weight: `(channels, width)` with a width of 2 to 4, dtype of `x`; its last column multiplies
            position t.
        bias: `(channels,)`, dtype of `x`.
        initial_state: `(batch, channels, width - 1)`, dtype of `x`: the values in front of position
            0; None for zeros.
        activation: "none" or "silu".
        key_start: int32 `(batch, seqlen)`: position t sees no position before `key_start[b, t]`,
            for packed documents; see `key_start_from_documents`. Not with an `initial_state`.

    Returns:
        `(batch, channels, seqlen)`, dtype of `x`: a transposed view of `(batch, seqlen, channels)`.

    Raises:
        RuntimeError: a wrong shape, dtype, device or activation.

    Limits: differentiable once.

    Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023.

    Example::

        x, weight = torch.randn(2, 16, 8).transpose(1, 2), torch.randn(8, 4)
        y = torchweld.causal_conv1d(x, weight, activation="silu")
        padded = F.conv1d(F.pad(x, (3, 0)), weight[:, None], groups=8)
        torch.testing.assert_close(y, F.silu(padded))
    """
    return ops.causal_conv1d(
        x, weight, bias, initial_state, activation=activation, key_start=key_start
    )
