"""What is imported when: `torchweld --help` answers without torch, which takes seconds to import,
and packages import their names when they are used.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any


def _arguments() -> Sequence[str] | None:
    """What the `torchweld` command was given, None where this is another program."""
    program = Path(sys.argv[0]) if sys.argv else Path()
    if program.stem == "torchweld" and program.parent == Path(sys.executable).parent:
        return sys.argv[1:]
    if sys.argv[:1] == ["-m"]:  # so it is while Python looks for the module of -m
        given = sys.orig_argv[sys.orig_argv.index("-m") + 1 :] if "-m" in sys.orig_argv else []
        return given[1:] if given[:1] == ["torchweld"] else None
    return None


def only_prints_help() -> bool:
    """Whether this process is the `torchweld` command, asked for help or its version."""
    given = _arguments()
    if given is None:
        return False
    return not given or given[0] == "--version" or not {"-h", "--help"}.isdisjoint(given)


def _exit(*_: Any) -> None:
    raise SystemExit(130)


def exits_on_interrupt() -> None:
    """Until `interruptible`, Ctrl-C ends the `torchweld` command without a traceback.

    torch is imported before the command can catch anything.
    """
    default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if default and _arguments() is not None:
        signal.signal(signal.SIGINT, _exit)


def interruptible() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def lazy(package: str, homes: dict[str, str]) -> tuple[Any, Any]:
    """`__getattr__` and `__dir__` of a package that imports its names when they are used.

    Args:
        package: its `__name__`.
        homes: by name, the module that has it; a module's own name where it is a module.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = f"{package}.{homes[name]}"
        return import_module(home) if homes[name] == name else getattr(import_module(home), name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return get, names
