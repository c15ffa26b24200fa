"""Which context parallelism attention is to follow. Imports nothing of torch.distributed."""

from __future__ import annotations

from typing import Any

import torch

current: Any = None  # the ContextParallel of :func:`torchweld.distributed.context_parallel`


_STOCK = torch.nn.functional.scaled_dot_product_attention


def _inside_torchs_own() -> bool:
    # torch replaces the function while its `with` block runs; others may replace it too.
    now = torch.nn.functional.scaled_dot_product_attention
    home = "torch.distributed.tensor.experimental._context_parallel"
    return now is not _STOCK and (getattr(now, "__module__", None) or "").startswith(home)


def refuse_torchs_own(who: str) -> None:
    """Raises inside torch's context_parallel(), which attention of ours would not see.

    Raises:
        RuntimeError: queries would see the keys of their own process alone.
    """
    if _inside_torchs_own():
        raise RuntimeError(
            f"torchweld: {who} does not follow torch's context_parallel(), which replaces "
            "scaled_dot_product_attention alone; use torchweld.distributed.context_parallel"
        )
