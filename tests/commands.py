"""Calls of the command line."""

from __future__ import annotations

from torchweld import cli


def run_command(capsys, *argv: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of `torchweld <argv>`."""
    try:
        code = cli.main(list(argv))
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()
