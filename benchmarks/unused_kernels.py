"""Lists the kernels of the built library that no choice takes; needs a CUDA build, but no GPU.

    python benchmarks/unused_kernels.py               kernels that neither a call nor tune launches
    python benchmarks/unused_kernels.py --heuristic   kernels that only tune or a test can choose

Every call of kernel_sweep.py runs dry on an assumed H100 and an assumed A100: the host code makes
its choices and launches nothing. Then every legal configuration of the call's kernel families is
forced, because tune may remember it. A kernel that no dry run launches is printed: delete it, or
add a call that launches it to the sweep. The exit status is 1 if there is such a kernel.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from kernel_check import readable
from kernel_sweep import Call, calls

H100, A100 = -1, -2


def kernels_of(library: Path) -> dict[int, str]:
    """The kernels of a library: the offsets of their host functions, and their names."""
    listed = subprocess.run(["nm", library], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listed.splitlines()]
    # nvcc makes a local host function (t) for each kernel; .cold marks a part that gcc split off.
    symbols = {int(row[0], 16): row[2] for row in rows if row[1:2] == ["t"] and len(row) == 3}
    symbols = {
        offset: symbol
        for offset, symbol in symbols.items()
        if symbol.startswith("_ZN9torchweld") and not symbol.endswith(".cold")
    }
    names = readable(list(symbols.values()))
    # No call launches target_probe_kernel: device/facts.cu only reads its attributes.
    kernel = re.compile(r"(?!launch_|autocast_|no_cuda_|target_probe_)\w+_kernel(<.*)?")
    return {
        offset: names[symbol]
        for offset, symbol in symbols.items()
        if kernel.fullmatch(names[symbol])
    }


class Sweep:
    """Dry runs of calls; `reached` has the offsets of the kernels that they would launch."""

    def __init__(self) -> None:
        from torchweld import _library, batch_invariant, explain

        self.ops, self.tables, self.mode = _library.ops, _library.introspection(), batch_invariant
        self.dry_run = sys.modules[explain.__module__]._dry_run
        self.reached: set[int] = set()
        self.refused: Counter[str] = Counter()

    def records(self, call: Call, device: int) -> list[dict[str, Any]]:
        try:
            with self.mode(call.invariant):
                seen = self.dry_run(call.op, call.args, call.kwargs, device)
        except (RuntimeError, ValueError) as error:
            self.refused[f"{call.op}: {str(error).splitlines()[0][:160]}"] += 1
            return []
        self.reached.update(kernel[4] for record in seen for kernel in record["kernels"])
        return seen

    def run(self, call: Call, force: bool) -> None:
        self.records(call, A100)
        for record in self.records(call, H100):
            if force and record["family"]:
                self.force_each(call, record)

    def force_each(self, call: Call, record: dict[str, Any]) -> None:
        """Runs a call with every legal configuration of one of its kernels."""
        family, problem, forced = record["family"], record["problem"], set()
        for row in self.tables.candidates(family, problem):
            # Configurations that differ in the number of splits above 1 run the same kernels.
            kind = re.sub(r" /\d+", " /n", row["choice"])
            if row["refusal"] or kind in forced:
                continue
            forced.add(kind)
            self.ops._force_choice(family, problem, row["choice"])
            try:
                self.records(call, H100)
            finally:
                self.ops._force_choice(family, problem, "")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heuristic", action="store_true", help="force no configurations")
    parser.add_argument("--refused", action="store_true", help="print the calls that ops refuse")
    args = parser.parse_args(argv)
    from torchweld import _library

    library = Path(_library.__file__).parent / "_ops.abi3.so"
    kernels = kernels_of(library)
    sweep = Sweep()
    for tf32 in (False, True):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        for call in calls():
            sweep.run(call, force=not args.heuristic)
    unused = sorted(name for offset, name in kernels.items() if offset not in sweep.reached)
    for name in unused:
        print(name)
    if args.refused:
        print(json.dumps(sweep.refused, indent=1))
    print(f"unused-kernels: {len(unused)} of {len(kernels)} kernels are never launched")
    return 1 if unused else 0


if __name__ == "__main__":
    sys.exit(main())
