"""`make puzzles ARGS=--check-memory`: a puzzle under compute-sanitizer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_TOOL = "compute-sanitizer"
_FOUND = 9  # the tool's exit status after an error
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")
_INVALID = re.compile(r"(Invalid \S+ (?:read|write|atomic).*|Misaligned .*|Program hit .*)$")


class MemoryCheckError(RuntimeError):
    """The check can't be made; the text is one sentence."""


@dataclass(frozen=True)
class MemoryCheck:
    """The tool's report on one puzzle.

    Attributes:
        number: The puzzle's.
        errors: How many errors it counted.
        accesses: The distinct invalid accesses, as it words them.
    """

    number: int
    errors: int
    accesses: tuple[str, ...]

    def __str__(self) -> str:
        if not self.errors:
            return f"{self.number:>2}  no invalid access"
        lines = [f"{self.number:>2}  {self.errors} errors"]
        return "\n".join(lines + [f"      {text}" for text in self.accesses])


def read_report(number: int, text: str) -> MemoryCheck:
    """Reads the output of compute-sanitizer.

    Raises:
        MemoryCheckError: it did not get to its summary.
    """
    summaries = _SUMMARY.findall(text)
    if not summaries:
        last = (text.strip().splitlines() or ["nothing"])[-1]
        raise MemoryCheckError(
            f"{_TOOL} gave no summary for puzzle {number}; its last line: {last}"
        )
    lines = (line.lstrip("= ").rstrip() for line in text.splitlines())
    found = (_INVALID.match(line) for line in lines)
    accesses = dict.fromkeys(match[1] for match in found if match)
    return MemoryCheck(number, sum(map(int, summaries)), tuple(accesses))


def check_memory(numbers: Sequence[int], device: str) -> list[MemoryCheck]:
    """Runs puzzles one by one under compute-sanitizer, every tensor in a separate allocation.

    Raises:
        MemoryCheckError: the tool is not installed, or the device is no GPU.
    """
    if not device.startswith("cuda"):
        raise MemoryCheckError(
            f"--check-memory watches a GPU's memory, but the device is {device}; use --device cuda"
        )
    tool = shutil.which(_TOOL)
    if tool is None:
        raise MemoryCheckError(
            f"--check-memory needs {_TOOL}, which is not installed; it comes with the CUDA toolkit"
        )
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    checks = []
    for number in numbers:
        run = [sys.executable, str(Path(__file__).parent), "--puzzle", str(number)]
        done = subprocess.run(
            [tool, "--tool", "memcheck", "--error-exitcode", str(_FOUND), *run, "--device", device],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        checks.append(read_report(number, done.stdout))
    return checks
