"""From packed sequences to the key_start that the ops take."""

from __future__ import annotations

import torch
from torch import Tensor


def key_start_from_positions(position_ids: Tensor) -> Tensor:
    """The first key of each token's document, for rows of packed documents whose positions count
    up within each document.

    Args:
        position_ids: `(batch, seqlen)`, any integer dtype. A document begins at a row's first token
            and wherever a position is not the one before plus 1: `[0, 1, 2, 0, 1]` holds two.

    Returns:
        int32 `(batch, seqlen)` on the same device, for `attention(..., causal=True, key_start=)`
        with as many keys as queries. Nothing is read back to the host.

    Raises:
        TypeError: position_ids is no tensor.
        ValueError: it is not two-dimensional.
    """
    _check("key_start_from_positions", "position_ids", position_ids)
    return _starts(position_ids, position_ids[:, 1:] != position_ids[:, :-1] + 1)


def key_start_from_documents(ids: Tensor) -> Tensor:
    """The first key of each token's document, given the document number of each token.

    Args:
        ids: `(batch, seqlen)`, any dtype. A document is a run of equal numbers; padding is a run
            of its own.

    Returns:
        int32 `(batch, seqlen)` on the same device, for `attention(..., causal=True, key_start=)`
        with as many keys as queries. Nothing is read back to the host.

    Raises:
        TypeError: ids is no tensor.
        ValueError: it is not two-dimensional.
    """
    _check("key_start_from_documents", "ids", ids)
    return _starts(ids, ids[:, 1:] != ids[:, :-1])


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
    """The starts, given whether a document begins at each token of a row but the first."""
    at = torch.arange(ids.shape[1], dtype=torch.int32, device=ids.device)
    starts = torch.zeros(ids.shape, dtype=torch.int32, device=ids.device)
    starts[:, 1:] = torch.where(begins, at[1:], 0)
    return starts.cummax(1).values


def check_key_start(
    op: str, key_start: Tensor | None, causal: bool, key_end: Tensor | None = None
) -> None:
    """Refuses starts that differ from row to row without a causal mask or an end per row.

    Such starts belong to packed documents, where a row would see all later documents.
    """
    if key_start is None or causal or (key_end is not None and key_end.dim() == 2):
        return
    rows = key_start.dim() == 2 and key_start.dtype == torch.int32 and key_start.size(1) > 1
    if rows and key_start.stride(1) != 0:
        raise ValueError(
            f"torchweld::{op}: key_start must come with causal=True, because without it a row also "
            "sees the documents behind its own, but got causal=False; for one start a sequence use "
            "starts[:, None].expand(-1, seqlen_q)"
        )
