"""Converts a Hugging Face attention mask to the leftpad that the ops take."""

from __future__ import annotations

import torch
from torch import Tensor


def leftpad_from_mask(attention_mask: Tensor, *, check: bool = True) -> Tensor:
    """Counts the padding positions at the start of each sequence.

    Args:
        attention_mask: `(batch, seqlen)` of 0 (padding) and 1 (token), bool or any integer dtype,
            with every row's zeros before its ones.
        check: True: the host reads the mask and raises ValueError unless it is as above; on CUDA
            the host waits for the mask. False: the host never waits.

    Returns:
        int32 `(batch,)` on the mask's device. A row without a token gives seqlen.

        Without a check on the host (`check=False`, torch.compile, export, tracing, CUDA graph
        capture), a row with zeros after a one, or with another value, gives seqlen too: the whole
        sequence then counts as padding, its results and gradients are 0, and the other sequences
        stay right.

    Raises:
        TypeError: the mask is not a tensor.
        ValueError: the mask is not two-dimensional, has a floating dtype (an additive mask has
            zeros where this mask has ones), a value that is neither 0 nor 1, or a row with zeros
            after a one.

    Example::

        attention_mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
        leftpad = torchweld.leftpad_from_mask(attention_mask)
        assert leftpad.tolist() == [0, 2]
        q = torch.randn(2, 4, 4, 32)
        out = torchweld.attention(q, q, q, leftpad, causal=True)
    """
    if not isinstance(attention_mask, Tensor):
        raise TypeError(
            "leftpad_from_mask: attention_mask must be a Tensor, but got "
            f"{type(attention_mask).__name__}; use torch.as_tensor(attention_mask)"
        )
    if attention_mask.dim() != 2:
        raise ValueError(
            "leftpad_from_mask: attention_mask must be (batch, seqlen), but got "
            f"{tuple(attention_mask.shape)}"
        )
    if attention_mask.is_floating_point() or attention_mask.is_complex():
        raise ValueError(
            "leftpad_from_mask: attention_mask must be bool or integers, but got "
            f"{str(attention_mask.dtype).removeprefix('torch.')}; use attention_mask.bool() for "
            "ones and zeros, attention_mask == 0 for an additive mask"
        )
    tokens = attention_mask != 0
    strange = (tokens & (attention_mask != 1)).any(1)
    wrong = (tokens[:, :-1] & ~tokens[:, 1:]).any(1) | strange
    if check and is_readable(tokens):
        rows = wrong.nonzero().flatten().tolist()
        odd = strange.nonzero().flatten().tolist() if rows else []
        if odd:
            raise ValueError(
                "leftpad_from_mask: attention_mask must be 1 at tokens and 0 at padding, but got "
                f"other values in {_rows(odd)}; use attention_mask != 0 where they are tokens"
            )
        if rows:
            raise ValueError(
                "leftpad_from_mask: attention_mask must have every row's zeros before its ones, "
                f"but got zeros behind a one in {_rows(rows)}; pad on the left"
            )
    return before_first_token(tokens).masked_fill(wrong, tokens.shape[1])


def before_first_token(tokens: Tensor) -> Tensor:
    """Counts the positions before each row's first True, int32 `(batch,)`; seqlen without one."""
    return (tokens.cumsum(1) == 0).sum(1, dtype=torch.int32)


def is_readable(t: Tensor) -> bool:
    """Whether the host can read a tensor's values here. On CUDA it waits for them."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if type(t) is not Tensor or t.device.type == "meta":  # fake tensors are subclasses
        return False
    return not (t.device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def _rows(rows: list[int]) -> str:
    shown = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
    return f"row{'s' if len(rows) > 1 else ''} {shown}"
