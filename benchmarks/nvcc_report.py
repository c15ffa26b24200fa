#!/usr/bin/env python3
"""nvcc, which also keeps the assembler's report of every object for benchmarks/kernel_check.py.

torch's build calls it in nvcc's place if PYTORCH_NVCC names it. A report lies beside its object, as
JSON: the source, nvcc's arguments, its messages and the processor seconds.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from kernel_check import REPORT_SUFFIX, compiler_seconds, find_nvcc  # noqa: E402

# The lines that -Xptxas=-v adds: they go into the report, but not to the output of a build.
VERBOSE = re.compile(
    r"ptxas info +: (Compil|Function properties|Used \d|\d+ bytes gmem)| +\d+ bytes stack frame"
)


def main(args: list[str]) -> int:
    nvcc = find_nvcc()
    if nvcc is None:
        print("nvcc_report: nvcc was not found", file=sys.stderr)
        return 1
    start = compiler_seconds()
    done = subprocess.run([nvcc, "-Xptxas=-v", *args], stderr=subprocess.PIPE, text=True)
    sources = [arg for arg in args if arg.endswith(".cu")]
    if done.returncode == 0 and len(sources) == 1 and "-o" in args:
        report = {
            "source": sources[0],
            "args": args,
            "messages": done.stderr,
            "seconds": compiler_seconds() - start,
        }
        Path(args[args.index("-o") + 1] + REPORT_SUFFIX).write_text(json.dumps(report))
    for line in done.stderr.splitlines():
        if not VERBOSE.match(line):
            print(line, file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
