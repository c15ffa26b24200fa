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
    from .hf_quantizer import TorchweldInt4Config as TorchweldInt4Config
    from .hf_quantizer import register_quantizer as register_quantizer
    from .peft_lora import register_lora as register_lora
    from .report import FuseReport as FuseReport
    from .sdpa import use_in_sdpa as use_in_sdpa

__all__ = [
    "FuseReport",
    "TorchweldInt4Config",
    "fuse",
    "register_attention",
    "register_lora",
    "register_quantizer",
    "unfuse",
    "use_in_sdpa",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "fuse": "_fuse",
        "unfuse": "_fuse",
        "FuseReport": "report",
        "TorchweldInt4Config": "hf_quantizer",
        "register_attention": "hf_attention",
        "register_lora": "peft_lora",
        "register_quantizer": "hf_quantizer",
        "use_in_sdpa": "sdpa",
    },
)
