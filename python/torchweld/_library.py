"""Loads the operator library; a library that can't be loaded never breaks the import."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import re
import shlex
import sys
import warnings
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import torch

_HERE = Path(__file__).resolve().parent


def build_facts() -> dict[str, Any]:
    """Returns the build's facts (torchweld/_build.json), {} if unknown."""
    try:
        facts = json.loads((_HERE / "_build.json").read_text())
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _source() -> tuple[Path | None, bool]:
    """Returns the source folder of this package, or None, and whether Python runs from it."""
    here = _HERE.parent.parent
    if (here / "setup.py").is_file():
        return here, True
    try:
        installed = importlib.metadata.distribution("torchweld")
        if Path(str(installed.locate_file("torchweld"))).resolve() != _HERE:
            return None, False  # the installed package is another copy of torchweld
        url = urlsplit(json.loads(installed.read_text("direct_url.json") or "{}").get("url", ""))
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None, False
    folder = Path(unquote(url.path))
    there = url.scheme == "file" and (folder / "setup.py").is_file()
    return (folder, False) if there else (None, False)


def _reinstall_command() -> str:
    """Returns the command that fixes a library that does not load."""
    folder, in_use = _source()
    flags = "--no-build-isolation --no-deps --force-reinstall"
    command = f"{shlex.quote(sys.executable)} -m pip install {flags}"
    if folder is None:
        return f"in torchweld's source folder, {command} ."
    return f"{command} {'-e ' if in_use else ''}{shlex.quote(str(folder))}"


def _release(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])


def called_ops() -> set[str]:
    """Returns the ops that the functions of torchweld/ops call."""
    sources = (path.read_text(encoding="utf-8") for path in _HERE.glob("ops/*.py"))
    return {op for text in sources for op in re.findall(r"\bops\.(\w+)\(", text)}


def _load() -> str | None:
    """Loads the operators. Returns None, or the reason why they can't be loaded."""
    found = sorted(_HERE.glob("_ops*.so")) + sorted(_HERE.glob("_ops*.pyd"))
    if not found:
        return (
            f"torchweld's operator library is missing from {_HERE}; build it with: "
            f"{_reinstall_command()}"
        )
    built_for = build_facts().get("torch")
    # libtorch's C++ interface changes in every minor release, so the library must match.
    if built_for and _release(built_for) != _release(torch.__version__):
        return (
            f"torchweld was built for torch {built_for}, but torch {torch.__version__} is "
            f"installed; rebuild it with: {_reinstall_command()}"
        )
    try:
        # A kernel of `make hub` may have registered the same ops; registering them twice aborts.
        if not torch._C._dispatch_has_kernel("torchweld::gated_mlp"):
            torch.ops.load_library(str(found[0]))
    except OSError as error:
        # torch's message only names the file. The exception's cause has the dynamic linker's
        # message.
        said = " ".join(str(error.__cause__ or error).split())
        return (
            f"torchweld's operator library, built for torch {built_for or 'unknown'}, can't load "
            f"under torch {torch.__version__} ({said}); rebuild it with: {_reinstall_command()}"
        )
    # In an editable install the built library may be of another commit than the Python code.
    lacking = sorted(
        op for op in called_ops() if not torch._C._dispatch_has_kernel(f"torchweld::{op}")
    )
    if lacking:
        return (
            f"torchweld's operator library is of another version than its Python code and lacks "
            f"{', '.join(lacking[:3])}{', ...' if len(lacking) > 3 else ''}; "
            f"rebuild it with: {_reinstall_command()}"
        )
    return None


def _warn(reason: str) -> None:
    """Warns at the line that imports the package."""
    frame: Any = sys._getframe()
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name.partition(".")[0] not in ("torchweld", "importlib", "runpy"):
            registry = frame.f_globals.setdefault("__warningregistry__", {})
            where = (frame.f_code.co_filename, frame.f_lineno, name)
            warnings.warn_explicit(reason, UserWarning, *where, registry)
            return
        frame = frame.f_back
    warnings.warn(reason, stacklevel=2)


class _Missing:
    """Replaces torch.ops.torchweld if the library can't be loaded: every use raises."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(self._reason)


_reason = _load()
if _reason is not None and "is missing" not in _reason:
    # If a library was built but does not load, warn at import, because the user's job would
    # otherwise fail only at its first call of an op.
    _warn(_reason)
ops: Any = torch.ops.torchweld if _reason is None else _Missing(_reason)


def is_available() -> bool:
    """Whether the operators can be called.

    Example::

        softmax = torchweld.softmax if torchweld.is_available() else torch.softmax
    """
    return _reason is None


def unavailable_reason() -> str | None:
    """Returns why the operators can't be called and the command that fixes it, or None.

    Example::

        if not torchweld.is_available():
            print(torchweld.unavailable_reason())
    """
    return _reason


def require() -> None:
    """Raises RuntimeError with the reason if the operators can't be called."""
    if _reason is not None:
        raise RuntimeError(_reason)


def introspection(caller: str = "torchweld.explain") -> Any:
    """Returns torchweld._C, or raises RuntimeError in the caller's name."""
    try:
        return importlib.import_module("torchweld._C")
    except ImportError as error:
        raise RuntimeError(
            f"{caller}: torchweld._C, which knows the kernels' tiles, can't be imported "
            f"({error}); reinstall torchweld"
        ) from error
