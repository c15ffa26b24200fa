"""Doors into other libraries: Hugging Face attention, ``fuse`` for existing models, torch's SDPA.

Nothing here imports transformers until one of these names is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchweld._start import lazy

if TYPE_CHECKING:
    from ._fuse import fuse as fuse
    from ._fuse import unfuse as unfuse
    from .hf_attention import register_attention as register_attention
    from .report import FuseReport as FuseReport
    from .sdpa import use_in_sdpa as use_in_sdpa

__all__ = ["FuseReport", "fuse", "register_attention", "unfuse", "use_in_sdpa"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "fuse": "_fuse",
        "unfuse": "_fuse",
        "FuseReport": "report",
        "register_attention": "hf_attention",
        "use_in_sdpa": "sdpa",
    },
)
