"""Windows with a left and a right size, as in flash-attn and xformers, on torchweld's ops."""

from __future__ import annotations

from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweld.integrations.sdpa.gpus import ALIBI, DROPOUT, no_kernel_with
from torchweld.ops.attention import attention, attention_with_lse
from torchweld.ops.varlen import check_sizes

_MAX_WINDOW = 1 << 30  # larger windows hide no key; positions are int32


class Window(NamedTuple):
    """How many keys a row sees before and behind its own position; None for all of them."""

    before: int | None
    after: int | None

    @classmethod
    def of(cls, sizes: Any, causal: bool) -> Window:
        """Makes the window of flash-attn's `window_size` and `causal`.

        Sizes that are None (as in flash-attn 4) or negative are no limit. They may be a Tensor or
        an array.
        """
        sizes = (None, None) if sizes is None else sizes
        before, after = (
            None if size is None or not 0 <= size < _MAX_WINDOW else index(size) for size in sizes
        )
        return cls(before, 0 if causal else after)

    def as_numbers(self) -> dict[str, Any] | None:
        """Returns causal= and window= of attention; None if they can't express the window."""
        if self.before is None and self.after in (None, 0):
            return {"causal": self.after == 0}
        if self.before is not None and self.after in (0, self.before):
            return {"causal": self.after == 0, "window": self.before + 1}
        return None


def check_padded(name: str, q: Tensor, k: Tensor, v: Tensor, names: str = "q k v") -> None:
    """Raises ValueError unless tensors fit attention in the layout of padded sequences."""
    layout = "(batch, seqlen, nheads, head_dim)"
    for argument, t in zip(names.split(), (q, k, v), strict=True):
        if t.dim() != 4:
            raise ValueError(f"{name}: {argument} must be {layout}, but got {tuple(t.shape)}")
    check_sizes(name, layout, q, k, v, names)


def check_dropout(
    name: str, argument: str, p: float, query: Tensor, value: Tensor, softcap: float | None = None
) -> None:
    """Raises ValueError if dropout with probability p would run a slow kernel on a GPU."""
    if not 0 <= p <= 1:
        raise ValueError(f"{name}: {argument} must be from 0 to 1, but got {p}")
    dims = query.shape[-1], value.shape[-1]
    reason = no_kernel_with(DROPOUT, query, *dims, softcap=softcap) if p else None
    if reason is not None:
        raise ValueError(
            f"{name}: {argument} must be 0, but got {p}: {reason}; set the model's attention "
            "dropout to 0"
        )


def check_alibi_slopes(name: str, slopes: Tensor | None, query: Tensor, value: Tensor) -> None:
    """Raises ValueError if ALiBi would run a slow kernel on a GPU."""
    if slopes is None:
        return
    reason = no_kernel_with(ALIBI, query, query.shape[-1], value.shape[-1])
    if reason is not None:
        raise ValueError(f"{name}: alibi_slopes must be None: {reason}; use flex_attention")


def padded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: Window,
    *,
    top_left: bool = False,
    lengths: Tensor | None = None,
    key_start: Tensor | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Calls attention on views of `(batch, seqlen, heads, head_dim)`.

    Args:
        query, key, value: the tensors, in this layout.
        window: the window of each row.
        top_left: True: row i is at key i. False: the last row is at the last key.
        lengths: int32 `(batch,)`: how many keys each sequence has; all if None.
        key_start: int32 `(batch, seqlen_q)`.
        return_lse: whether to return lse `(batch, heads, seqlen_q)` too.
        options: scale, softcap, sink, dropout_p, bias and alibi_slopes of attention.
    """
    batch, seqlen_q, seqlen_k = query.shape[0], query.shape[1], key.shape[1]
    numbers = window.as_numbers()
    plain = window == (None, None)
    if seqlen_q == seqlen_k and lengths is None:
        top_left = False
    # A key_end per row: attention takes one per sequence below seqlen_q for right padding.
    if numbers is None or (not plain and (top_left or (lengths is not None and seqlen_q > 1))):
        ends = lengths if lengths is not None else query.new_full((1,), seqlen_k, dtype=torch.int32)
        position = torch.arange(seqlen_q, dtype=torch.int32, device=query.device).unsqueeze(0)
        if not top_left:
            position = position + (ends.unsqueeze(1) - seqlen_q)
        row_ends = ends.unsqueeze(1).expand(-1, seqlen_q)
        if window.after is not None:
            row_ends = row_ends.minimum(position + (window.after + 1))
        numbers = {"key_end": row_ends.expand(batch, seqlen_q)}
        if window.before is not None:
            starts = (position - window.before).expand(batch, seqlen_q)
            key_start = starts if key_start is None else key_start.maximum(starts)
    else:
        numbers["key_end"] = lengths
    options |= {**numbers, "key_start": key_start}
    tensors = [t.transpose(1, 2) for t in (query, key, value)]
    if not return_lse:
        return attention(*tensors, **options).transpose(1, 2)
    out, lse = attention_with_lse(*tensors, **options)
    return out.transpose(1, 2), lse
