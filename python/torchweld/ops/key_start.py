"""Computes the key_start that the ops take for packed sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from torchweld._library import ops


def key_start_from_position_ids(position_ids: Tensor) -> Tensor:
    """Finds the first key of each token's document, from positions that count up within each
    document.

    Args:
        position_ids: `(batch, seqlen)`, any integer dtype. A document begins at a row's first token
            and wherever a position is not the one before plus 1: `[0, 1, 2, 0, 1]` holds two.

    Returns:
        int32 `(batch, seqlen)` on the same device, for `attention(..., causal=True, key_start=)`
        with as many keys as queries. Nothing is read back to the host.

    Raises:
        TypeError: position_ids is no tensor.
        ValueError: position_ids is not two-dimensional.

    Example::

        position_ids = torch.tensor([[0, 1, 2, 0, 1]])  # documents of 3 and of 2 tokens
        key_start = torchweld.key_start_from_position_ids(position_ids)
        assert key_start.tolist() == [[0, 0, 0, 3, 3]]
        q = torch.randn(1, 4, 5, 32)
        out = torchweld.attention(q, q, q, causal=True, key_start=key_start)
    """
    _check("key_start_from_position_ids", "position_ids", position_ids)
    return _starts(position_ids, position_ids[:, 1:] != position_ids[:, :-1] + 1)


def key_start_from_documents(ids: Tensor) -> Tensor:
    """Finds the first key of each token's document, given the document number of each token.

    Args:
        ids: `(batch, seqlen)`, any dtype. A document is a run of equal numbers; give padding
            another number.

    Returns:
        int32 `(batch, seqlen)` on the same device, for `attention(..., causal=True, key_start=)`
        with as many keys as queries. Nothing is read back to the host.

    Raises:
        TypeError: ids is no tensor.
        ValueError: ids is not two-dimensional.

    Example::

        documents = torch.tensor([[7, 7, 7, 9, 9]])
        key_start = torchweld.key_start_from_documents(documents)
        assert key_start.tolist() == [[0, 0, 0, 3, 3]]
    """
    _check("key_start_from_documents", "ids", ids)
    return _starts(ids, ids[:, 1:] != ids[:, :-1])


def key_start_from_cu_seqlens(cu_seqlens: Tensor, seqlen: int) -> Tensor:
    """Finds the first key of each token's document, given the documents' cumulative lengths.

    Args:
        cu_seqlens: `(documents + 1,)`, int32 or int64: 0, then the end of each document, as
            flash-attn and torch.nn.attention.varlen take it. Documents may be empty.
        seqlen: the number of tokens, documents and padding. Tokens from `cu_seqlens[-1]` on are
            padding: their key_start is `seqlen`, with which they see nothing.

    Returns:
        int32 `(1, seqlen)` on the same device, for `attention(..., causal=True, key_start=)` with
        as many keys as queries. Nothing is read back to the host, so one CUDA graph and one
        compiled graph serve all documents of one `seqlen`.

    Raises:
        TypeError: cu_seqlens is no tensor of int32 or int64.
        ValueError: cu_seqlens is not one-dimensional, or it is empty.

    Example::

        key_start = torchweld.key_start_from_cu_seqlens(torch.tensor([0, 3, 5]), seqlen=6)
        assert key_start.tolist() == [[0, 0, 0, 3, 3, 6]]  # the last token is padding
    """
    check_cu_seqlens("key_start_from_cu_seqlens", "cu_seqlens", cu_seqlens)
    lengths = cu_seqlens.to(torch.int32)
    key_start: Tensor = ops._key_ranges(lengths, lengths, None, seqlen)[0]
    return key_start


def check_cu_seqlens(function: str, name: str, value: Tensor) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{function}: {name} must be a Tensor, but got {type(value).__name__}; use "
            f"torch.tensor({name}, dtype=torch.int32, device=...)"
        )
    if value.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"{function}: {name} must be int32, but got {str(value.dtype).removeprefix('torch.')}; "
            f"use {name}.int()"
        )
    if value.dim() != 1 or value.shape[0] == 0:
        raise ValueError(
            f"{function}: {name} must be (documents + 1,), 0 and then the end of each document, "
            f"but got {tuple(value.shape)}"
        )


def _check(function: str, name: str, value: Tensor) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{function}: {name} must be a Tensor, but got {type(value).__name__}; use "
            f"torch.as_tensor({name})"
        )
    if value.dim() != 2:
        raise ValueError(
            f"{function}: {name} must be (batch, seqlen), but got {tuple(value.shape)}"
        )


def _starts(ids: Tensor, begins: Tensor) -> Tensor:
    """Computes key_start; `begins` says of each token but a row's first if a document begins."""
    at = torch.arange(ids.shape[1], dtype=torch.int32, device=ids.device)
    starts = torch.zeros(ids.shape, dtype=torch.int32, device=ids.device)
    starts[:, 1:] = torch.where(begins, at[1:], 0)
    return starts.cummax(1).values


def check_key_start(
    op: str, key_start: Tensor | None, causal: bool, key_end: Tensor | None = None
) -> None:
    """Raises RuntimeError if key_start differs between the rows of a sequence without a causal mask
    or a key_end per row: rows of packed documents would see all later documents.

    The host reads no value: on CUDA the error is a device assertion.
    """
    if key_start is None or causal or (key_end is not None and key_end.dim() == 2):
        return
    rows = key_start.dim() == 2 and key_start.dtype == torch.int32 and key_start.size(1) > 1
    if rows and key_start.stride(1) != 0:  # an expanded start needs no comparison
        torch._assert_async(
            (key_start == key_start[:, :1]).all(),
            f"torchweld::{op}: key_start must be one start a sequence without causal=True, where a "
            "row also sees the documents behind its own, but got starts that differ; use "
            "causal=True, or in attention a key_end per row",
        )
