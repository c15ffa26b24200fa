"""The active context_parallel block. This module imports nothing of torch.distributed."""

from __future__ import annotations

from typing import Any

import torch

# The ContextParallel of the active :func:`torchweld.distributed.context_parallel` block, or None
# outside of such a block. NOTE: a ContextVar or a thread-local would lose the block in backward:
# activation checkpointing recomputes attention in autograd's device threads, which do not inherit
# the caller's context.
current: Any = None

STOCK = torch.nn.functional.scaled_dot_product_attention


def _inside_torchs_own() -> bool:
    # torch's own context_parallel replaces scaled_dot_product_attention while its block is active.
    # Other libraries may replace it too, so compare the module of the function.
    now = torch.nn.functional.scaled_dot_product_attention
    home = "torch.distributed.tensor.experimental._context_parallel"
    return now is not STOCK and (getattr(now, "__module__", None) or "").startswith(home)


def refuse_torchs_own(who: str) -> None:
    """Raises inside torch's context_parallel(), which torchweld's attention does not follow.

    Raises:
        RuntimeError: queries would see the keys of their own process alone.
    """
    if _inside_torchs_own():
        raise RuntimeError(
            f"torchweld: {who} does not follow torch's context_parallel(), which replaces "
            "scaled_dot_product_attention alone; use torchweld.distributed.context_parallel"
        )
