"""Calls back once a module is imported, for packages that torchweld serves but does not import."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as the finders behind it do; the callback follows its execution."""

    def __init__(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        self.name = name
        self._callback = callback

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self.name or self not in sys.meta_path:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(name, path, target) for finder in behind)
        spec = next((each for each in found if each is not None), None)
        if spec is None or spec.loader is None:
            return spec
        loader, execute = spec.loader, spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            # Not before: an import that failed is tried again.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            self._callback(module)

        loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


def when_imported(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Calls `callback(module)` now where the module is imported, else right after it is.

    Args:
        name: the module's full name, "package.module".
        callback: what it raises, the import raises.
    """
    if name in sys.modules:
        callback(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, callback))
