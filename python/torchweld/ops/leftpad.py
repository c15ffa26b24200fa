"""From a Hugging Face attention mask to the leftpad that the ops take."""

from __future__ import annotations

import torch
from torch import Tensor


def leftpad_from_mask(attention_mask: Tensor) -> Tensor:
    """How many positions at the start of each sequence are padding.

    Args:
        attention_mask: `(batch, seqlen)` of 0 (padding) and 1 (token), any integer, bool or
            floating dtype, with every row's zeros before its ones.

    Returns:
        int32 `(batch,)` on the mask's device, computed there: no host synchronisation. A row
        without a token gives seqlen.

    Raises:
        ValueError: the mask is not two-dimensional.

    Limits: only the first token of a row is looked for; zeros after it are not seen.
    """
    if attention_mask.dim() != 2:
        raise ValueError(
            "leftpad_from_mask: attention_mask must be (batch, seqlen), but got "
            f"{tuple(attention_mask.shape)}"
        )
    tokens_so_far = (attention_mask != 0).cumsum(1)
    return (tokens_so_far == 0).sum(1, dtype=torch.int32)
