"""Calls of a command line, and the C++ programs of tests/cpp."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchweld
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


def captured(
    *command: str | Path, cwd: Path | None = None, check: bool = False, **env: str
) -> subprocess.CompletedProcess[str]:
    """A command that ran, its output as text, with more variables in its environment."""
    environment = {**os.environ, **env}
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=check, env=environment
    )


def python(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """`captured` of this Python with arguments."""
    return captured(sys.executable, *arguments, **options)


def build_cpp_programs(folder: Path, *programs: str) -> Path:
    """Builds programs of tests/cpp by find_package(torchweld). Returns their folder."""
    if shutil.which("cmake") is None:
        pytest.skip("cmake was not found")
    roots = [
        f"-DTORCH_ROOT={Path(torch.__file__).parent}",
        f"-Dtorchweld_DIR={Path(torchweld.__file__).parent / 'cmake'}",
    ]
    build = folder / "build"
    for command in (
        ["cmake", "-S", Path(__file__).parent / "cpp", "-B", build, *roots],
        ["cmake", "--build", build, "--target", *programs],
    ):
        done = captured(*command)
        assert done.returncode == 0, done.stdout + done.stderr
    return build
