"""Calls of a command line."""

from __future__ import annotations

from collections.abc import Callable

import torchweld_cli


def run_command(
    capsys, *argv: str, main: Callable[[list[str]], int] = torchweld_cli.main
) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command, `torchweld` by default."""
    try:
        code = main(list(argv))
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()
