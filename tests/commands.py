"""Calls of a command line, and the C++ programs of tests/cpp."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import forkserver
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


def run_offline(script: Path) -> tuple[int, str]:
    """Exit status and output of a script of Python in its folder, without a network.

    It is a fork of a process that has imported torchweld and transformers, which takes 6 s.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torchweld", "transformers.models.llama.modeling_llama"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")  # transformers reads it when it is imported
        forkserver.ensure_running()
    output = script.with_suffix(".out")
    process = context.Process(target=_run_script, args=(script, output))
    process.start()
    process.join()
    return process.exitcode, output.read_text()


def _run_script(script: Path, output: Path) -> None:
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(script.parent)
    tests = Path(__file__).resolve().parent
    hidden = {str(tests), *(str(tests.parent / name) for name in ("benchmarks", "examples"))}
    sys.path[:] = [str(script.parent), *(path for path in sys.path if path not in hidden)]
    runpy.run_path(str(script), run_name="__main__")


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
