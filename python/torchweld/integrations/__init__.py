"""Doors into other libraries: Hugging Face attention and ``fuse`` for existing models.

Nothing here imports transformers until one of these names is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._fuse import fuse as fuse
    from ._fuse import unfuse as unfuse
    from .hf_attention import register_attention as register_attention
    from .report import FuseReport as FuseReport

_HOMES = {
    "fuse": "_fuse",
    "unfuse": "_fuse",
    "FuseReport": "report",
    "register_attention": "hf_attention",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
