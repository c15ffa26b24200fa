"""`memory_efficient_attention` of xformers.ops, on torchweld's ops.

The mask is recognised by the name of its class in `xformers.ops.fmha.attn_bias`; xformers need not
be installed. Paged masks are refused.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from torchweld.compat._windows import Window, check_dropout, check_padded, padded_attention
from torchweld.integrations.sdpa.gpus import BIAS, no_kernel_with
from torchweld.ops.varlen import packed_attention, packed_mask, row_ranges

__all__ = ["memory_efficient_attention"]


class _Kind(NamedTuple):
    """Describes a class of masks: causal, aligned at the top left, with a window of `_window_size`
    keys, or with a window from `window_left` to `window_right`.
    """

    causal: bool = False
    top_left: bool = False
    window: bool = False
    two_sided: bool = False


_PADDED = {
    "NoneType": _Kind(),
    "LowerTriangularMask": _Kind(causal=True, top_left=True),
    "LowerTriangularFromBottomRightMask": _Kind(causal=True),
    "LowerTriangularFromBottomRightLocalAttentionMask": _Kind(causal=True, window=True),
    "LocalAttentionFromBottomRightMask": _Kind(two_sided=True),
}
_PACKED = {
    "BlockDiagonalMask": _Kind(),
    "BlockDiagonalCausalMask": _Kind(causal=True, top_left=True),
    "BlockDiagonalCausalFromBottomRightMask": _Kind(causal=True),
    "BlockDiagonalCausalLocalAttentionMask": _Kind(causal=True, top_left=True, window=True),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": _Kind(causal=True, window=True),
    "BlockDiagonalPaddedKeysMask": _Kind(),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": _Kind(causal=True),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": _Kind(causal=True, window=True),
    "BlockDiagonalLocalAttentionPaddedKeysMask": _Kind(two_sided=True),
    "BlockDiagonalGappyKeysMask": _Kind(),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": _Kind(causal=True),
    "BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask": _Kind(two_sided=True),
}


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: Any = None,
) -> Tensor:
    """Computes `xformers.ops.memory_efficient_attention`.

    Args:
        query: `(batch, seqlen_q, nheads, head_dim)`, `(batch, seqlen_q, head_dim)`, or `(batch,
            seqlen_q, groups, nheads, head_dim)`, whose key and value may be expanded over nheads.
        key, value: the same layout with seqlen_k.
        attn_bias: None; a tensor that is added to the scores, `(batch, nheads, seqlen_q,
            seqlen_k)`, without nheads for a query of 3 dims, with groups for one of 5; or a mask of
            xformers: LowerTriangular* without a tensor bias, LocalAttentionFromBottomRightMask, or
            BlockDiagonal* without pages, which needs a batch of 1. The mask's values stay on the
            device.
        p: the dropout of the probabilities, as in :func:`torchweld.attention`. The random numbers
            are not xformers'.
        scale: `head_dim ** -0.5` when None.
        op: accepted and not used; `torchweld.explain` tells which kernel runs.
        output_dtype: None or the dtype of query.

    Returns:
        The shape of query, with the last size of value.

    Raises:
        ValueError: a mask of another class, another layout or output_dtype; dropout or a tensor
            attn_bias on a GPU where `flash_attn_func` refuses dropout.
        RuntimeError: a wrong dtype or device, as `torchweld.attention`.

    Example::

        q, k, v = torch.randn(3, 2, 16, 8, 64)
        out = xformers.memory_efficient_attention(q, k, v)
    """
    name = "memory_efficient_attention"
    if output_dtype not in (None, query.dtype):
        raise ValueError(
            f"{name}: output_dtype must be {query.dtype} like query, but got {output_dtype}; use "
            ".to(dtype) on the result"
        )
    kind, biased = _kind(name, attn_bias), isinstance(attn_bias, Tensor)
    if query.dim() == 5:
        attn_bias = attn_bias.flatten(1, 2) if biased else attn_bias
        groups = query.shape[2:4]
        out = memory_efficient_attention(
            query.flatten(2, 3), *map(_merged, (key, value)), attn_bias, p, scale
        )
        return out.unflatten(2, groups)
    if query.dim() == 3:
        attn_bias = attn_bias.unsqueeze(1) if biased else attn_bias
        tensors = [t.unsqueeze(2) for t in (query, key, value)]
        return memory_efficient_attention(*tensors, attn_bias, p, scale).squeeze(2)
    check_padded(name, query, key, value, "query key value")
    check_dropout(name, "p", p, query, value)
    window, options = _window(attn_bias, kind), {"scale": scale, "dropout_p": p}
    if biased:
        reason = no_kernel_with(BIAS, query, query.shape[-1], value.shape[-1])
        if reason is not None:
            raise ValueError(f"{name}: attn_bias must be no tensor: {reason}; use SDPA's attn_mask")
        options["bias"] = attn_bias
    if biased or type(attn_bias).__name__ in _PADDED:
        return padded_attention(query, key, value, window, top_left=kind.top_left, **options)
    return _packed(name, query, key, value, attn_bias, kind, window, options)


def _kind(name: str, attn_bias: Any) -> _Kind:
    if isinstance(attn_bias, Tensor):
        return _Kind()
    kind = {**_PADDED, **_PACKED}.get(type(attn_bias).__name__)
    if kind is None:
        raise ValueError(
            f"{name}: attn_bias must be one of {', '.join([*_PADDED, *_PACKED][1:])}, but got "
            f"{type(attn_bias).__name__}; use torch.nn.attention.flex_attention"
        )
    return kind


def _window(attn_bias: Any, kind: _Kind) -> Window:
    if kind.two_sided:
        return Window.of((attn_bias.window_left, attn_bias.window_right), causal=False)
    before = attn_bias._window_size - 1 if kind.window else -1
    return Window.of((before, -1), kind.causal)


def _merged(t: Tensor) -> Tensor:
    """(batch, seqlen, heads, head_dim) of (batch, seqlen, groups, nheads, head_dim)."""
    expanded = t.shape[3] > 1 and t.stride(3) == 0
    return t[:, :, :, 0] if expanded else t.flatten(2, 3)


def _packed(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any,
    kind: _Kind,
    window: Window,
    options: dict[str, Any],
) -> Tensor:
    if query.shape[0] != 1:
        raise ValueError(
            f"{name}: query must be (1, tokens, nheads, head_dim) with {type(attn_bias).__name__}, "
            f"but got {tuple(query.shape)}; use BlockDiagonalMask.from_tensor_list"
        )
    q, k, v = (t.squeeze(0) for t in (query, key, value))
    info_q, info_k = attn_bias.q_seqinfo, attn_bias.k_seqinfo
    starts = info_q.seqstart.to(q.device)
    if info_k is info_q:
        mask = packed_mask(q, k, starts, starts, *window)
    else:
        starts_k, lengths = info_k.seqstart.to(q.device), getattr(info_k, "seqlen", None)
        begin = starts_k[:-1]
        end = starts_k[1:] if lengths is None else begin + lengths.to(q.device, begin.dtype)
        mask = row_ranges(starts, begin, end, q.shape[0], *window, top_left=kind.top_left)
    result = packed_attention(q, k, v, {**mask, **options}, return_lse=False)
    assert isinstance(result, Tensor)
    return result.unsqueeze(0)
