"""Calls of a command line, and the C++ programs of tests/cpp."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

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
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return build
