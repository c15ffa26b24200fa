"""Softmax of attention scores times the values, in one op."""

from __future__ import annotations

from torch import Tensor

from torchweld._library import ops
from torchweld._refusals import readable_errors
from torchweld.ops.key_start import check_key_start


@readable_errors
def softmax_matmul(
    scores: Tensor,
    value: Tensor,
    leftpad: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float = 1.0,
    key_start: Tensor | None = None,
    key_end: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Computes `torch.softmax(scale * scores + mask, -1) @ value`; never stores all probabilities.

    Args:
        scores: `(batch, nheads, seqlen_q, seqlen_k)`, float32, float16 or bfloat16 (float64 on
            CPU).
        value: `(batch, nheads, seqlen_k, head_dim_v)`, dtype and device of `scores`.
        leftpad: int32 `(batch,)` on the same device: padding positions at the start of each
            sequence; scores and values there are never used.
        causal: whether row i sees keys only up to `i + seqlen_k - seqlen_q`.
        scale: finite factor on the scores.
        key_start, key_end, window, softcap, sink: as in `attention`, but key_end is `(batch,)`.

    Returns:
        `(batch, nheads, seqlen_q, head_dim_v)`, dtype of `scores`. A row that sees no key is 0 and
        has gradient 0.

    Raises:
        RuntimeError: a wrong shape, dtype or device, or a number that is out of range; a key_start
            that differs between rows without causal (a device assertion on CUDA).

    Limits: differentiable once, with respect to `scores`, `value` and `sink`.

    Example::

        scores, value = torch.randn(2, 4, 8, 8), torch.randn(2, 4, 8, 32)
        out = torchweld.softmax_matmul(scores, value, causal=True, scale=32**-0.5)
        assert out.shape == (2, 4, 8, 32)
    """
    check_key_start("softmax_matmul", key_start, causal)
    return ops.softmax_matmul(
        scores,
        value,
        leftpad,
        causal=causal,
        scale=scale,
        key_start=key_start,
        key_end=key_end,
        window=window,
        softcap=softcap,
        sink=sink,
    )
