"""Loads the operator library; a library that can't be loaded never breaks the import."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch

_HERE = Path(__file__).resolve().parent
_MEND = "pip install --no-build-isolation --force-reinstall --no-deps torchweld"


def build_facts() -> dict[str, Any]:
    """What the libraries were built for (torchweld/_build.json), {} where that is unknown."""
    try:
        facts = json.loads((_HERE / "_build.json").read_text())
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _release(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])


def _load() -> str | None:
    """Load the operators. Returns None, or the reason why they are not there."""
    found = sorted(_HERE.glob("_ops*.so")) + sorted(_HERE.glob("_ops*.pyd"))
    if not found:
        return (
            f"torchweld's operator library is missing from {_HERE}; build it with: "
            f"pip install --no-build-isolation -e . (in the source folder), or: {_MEND}"
        )
    built_for = build_facts().get("torch")
    # libtorch's C++ interface changes with every minor release.
    if built_for and _release(built_for) != _release(torch.__version__):
        return (
            f"torchweld was built for torch {built_for}, but torch {torch.__version__} is "
            f"installed; rebuild it with: {_MEND}"
        )
    try:
        torch.ops.load_library(str(found[0]))
    except OSError as error:
        return (
            f"torchweld's operator library, built for torch {built_for or 'unknown'}, can't load "
            f"under torch {torch.__version__} ({error}); rebuild it with: {_MEND}"
        )
    return None


class _Missing:
    """Stands in for torch.ops.torchweld where the library is not there: the first use raises."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(self._reason)


_reason = _load()
ops: Any = torch.ops.torchweld if _reason is None else _Missing(_reason)


def is_available() -> bool:
    """True when the operators can be called."""
    return _reason is None


def unavailable_reason() -> str | None:
    """Why the operators can't be called: both versions and the command that mends it, or None."""
    return _reason


def require() -> None:
    """Raise RuntimeError with the reason where the operators can't be called."""
    if _reason is not None:
        raise RuntimeError(_reason)


def introspection(asker: str = "torchweld.explain") -> Any:
    """torchweld._C, or RuntimeError in the name of who needs it."""
    try:
        return importlib.import_module("torchweld._C")
    except ImportError as error:
        raise RuntimeError(
            f"{asker}: torchweld._C, which knows the kernels' tiles, can't be imported "
            f"({error}); reinstall torchweld"
        ) from error
