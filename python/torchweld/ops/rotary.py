"""Rotary position embedding of queries and keys."""

from __future__ import annotations

from torch import Tensor

from torchweld._library import ops
from torchweld._refusals import readable_errors


@readable_errors
def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotates q and k by position, as Hugging Face's `apply_rotary_pos_emb(q, k, cos, sin)` does.

    The first `rotary_dim` values of each head become `x * cos + rotate(x) * sin`, where `rotate`
    maps each pair `(a, b)` to `(-b, a)`; the values behind them are copied. A pair is
    `(x[i], x[i + rotary_dim / 2])`, as in Llama, or `(x[2 * i], x[2 * i + 1])` with `interleaved`,
    as in Cohere, GLM and GPT-J. Each value has its own entry of `cos` and `sin`; the entries of a
    pair may differ.

    The math is float32 (float64 for float64) with one rounding, where the function of Hugging Face
    rounds each product. q and k are read and written with their strides, so transposed views of a
    projection's result, and slices of a packed one, are not copied.

    Args:
        q: `(batch, nheads, seqlen, head_dim)`, float32, float16 or bfloat16 (float64 on CPU).
        k: `(batch, nheads_k, seqlen, head_dim)`, dtype of `q`; `nheads_k` may differ from `nheads`.
        cos: `(batch, seqlen, rotary_dim)`, `(1, seqlen, rotary_dim)` or `(seqlen, rotary_dim)`,
            dtype of `q` or float32; `rotary_dim` is even, from 2 to `head_dim`.
        sin: shape and dtype of `cos`.
        interleaved: whether a pair is two neighbours. `cos` and `sin` then hold each angle twice in
            a row, as Cohere's do. Convert Llama's and GLM's layout by
            `cos[..., :rotary_dim // 2].repeat_interleave(2, -1)`, GPT-J's tables of half the width
            by `cos.repeat_interleave(2, -1)`.

    Returns:
        The rotated q and k, in the dtypes of q and k. The result of a dense input whose head_dim is
        innermost has the input's strides. The result of any other input, such as a slice of a
        packed projection, and all gradients have the memory order `(batch, seqlen, nheads,
        head_dim)`.

    Raises:
        RuntimeError: shapes, dtypes or devices do not fit, or cos or sin requires a gradient.

    Limits: differentiable once, with respect to q and k. Under autocast the dtype of q is kept.

    Source: Su et al., "RoFormer: Enhanced transformer with rotary position embedding", 2021.

    Example::

        q, k = torch.randn(2, 8, 16, 64), torch.randn(2, 2, 16, 64)
        frequencies = 10000 ** (-torch.arange(0, 64, 2) / 64)
        angles = torch.arange(16)[:, None] * frequencies.repeat(2)  # (seqlen, head_dim)
        q, k = torchweld.rotary(q, k, angles.cos(), angles.sin())
    """
    return ops.rotary(q, k, cos, sin, interleaved=interleaved)
