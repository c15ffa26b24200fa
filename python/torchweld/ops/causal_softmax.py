"""Softmax of attention scores under the causal and left-padding mask."""

from __future__ import annotations

from torch import Tensor

from torchweld._library import ops
from torchweld._refusals import readable_errors


@readable_errors
def causal_softmax(
    scores: Tensor,
    leftpad: Tensor | None = None,
    *,
    scale: float = 1.0,
    key_start: Tensor | None = None,
    key_end: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Computes the softmax of `scale * scores` over the keys that a row sees; other keys get 0.

    Row i sees key j when `j <= i + seqlen_k - seqlen_q` (bottom-right aligned) and no other
    argument hides it. Hidden scores are not read, so they may be NaN.

    Args:
        scores: `(batch, ..., seqlen_q, seqlen_k)` or `(seqlen_q, seqlen_k)`; float32, float16 or
            bfloat16 (float64 on CPU).
        leftpad: int32 `(batch,)` on the same device: how many positions at the start of each
            sequence are padding. Values out of range count as the nearest end.
        scale: finite factor on the scores; negative and 0 are allowed.
        key_start, key_end, window, softcap: as in `torchweld.attention`, but key_end is `(batch,)`.
        sink: a logit per head in the softmax sum alone, dtype of `scores` or float32, `(nheads,)`:
            nheads is the product of the dims between batch and seqlen_q, 1 without such a dim.

    Returns:
        Probabilities, same shape and dtype, contiguous. A row that sees nothing is 0.

    Raises:
        RuntimeError: a wrong shape, dtype or device, or a number that is out of range.

    Limits: differentiable once, with respect to `scores` and `sink`. On CUDA softcap and sink make
    the gradient read its rows twice.

    Example::

        scores = torch.randn(2, 4, 8, 8)
        probabilities = torchweld.causal_softmax(scores, scale=0.125)
        assert probabilities[..., 0, 1:].eq(0).all()  # the first row sees the first key alone
    """
    return ops.causal_softmax(
        scores,
        leftpad,
        scale=scale,
        key_start=key_start,
        key_end=key_end,
        window=window,
        softcap=softcap,
        sink=sink,
    )
