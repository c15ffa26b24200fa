"""Calls a function right after a module is imported.

This is for modules of torch that torchweld extends, but whose import takes longer than its own.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Loader(Loader):
    """Loads a module as its own loader does, then calls the function that waits for it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _finder.call(module.__name__)


class _Finder(MetaPathFinder):
    """Finds the modules that a function waits for as the other finders do, and no others.

    It stays on sys.meta_path, because an import in another thread may be going through that list.
    """

    def __init__(self) -> None:
        # A function waits until its module has been executed, because a module that is found need
        # not be imported, and an import that fails may be tried again.
        self.waiting: dict[str, Callable[[], None]] = {}
        self._asking = threading.local()

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name not in self.waiting or getattr(self._asking, "others", False):
            return None
        self._asking.others = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking.others = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec

    def call(self, name: str) -> None:
        function = self.waiting.pop(name, None)
        if function is not None:
            function()


_finder = _Finder()


def when_imported(name: str, function: Callable[[], None]) -> None:
    """Calls a function now if a module is imported already, else right after its first import.

    Args:
        name: the module's full name.
        function: the import raises the errors of this function.
    """
    _finder.waiting[name] = function
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    if name in sys.modules:
        _finder.call(name)
