"""Lets packages import their names when they are used."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any


def lazy(package: str, homes: dict[str, str]) -> tuple[Any, Any]:
    """Returns `__getattr__` and `__dir__` of a package that imports its names on first use.

    Args:
        package: The package's `__name__`.
        homes: The module of each name, relative to the package; a module that is a name itself maps
            to itself.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = import_module(f".{homes[name]}", package)
        return home if homes[name] == name else getattr(home, name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return get, names
