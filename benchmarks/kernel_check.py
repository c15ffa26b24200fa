"""Checks kernels without a GPU: spills, registers, shared memory, compile seconds.

Compiles every file that the build compiles with nvcc, for sm_90a and sm_80, with the assembler's
report on. A file is not compiled again if a build with PYTORCH_NVCC=benchmarks/nvcc_report.py has
kept its report and csrc has not changed since. Fails where a kernel spills, where the assembler
serialised a wgmma or ignored setmaxnreg, where a file takes longer than the limit, or where the
library that is built for the default architectures is too large. Prints a table.

    python benchmarks/kernel_check.py [--json FILE] [--limit SECONDS] [--all]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ARCHS = {"sm_90a": "arch=compute_90a,code=sm_90a", "sm_80": "arch=compute_80,code=sm_80"}
REPORT_SUFFIX = ".report.json"  # of the reports that nvcc_report.py keeps
# C7508: setmaxnreg ignored; C7510 to C7518: wgmma serialised, or a wait added.
BAD_WARNINGS = re.compile(r"C75(08|1[0-8])")

# The limit of _ops.abi3.so for the default architectures. A wheel's has five sixths of the size.
MAX_LIBRARY_BYTES = 45 * 10**6
DEFAULT_ARCHS = "9.0a 8.0+PTX"  # the text for the default architectures in _build.json

# A file may seem to compile for too long only because this processor is slow or shared. Its seconds
# are then scaled to a processor that compiles YARDSTICK in YARDSTICK_SECONDS.
YARDSTICK_SECONDS = 1.8
YARDSTICK = """
template <int kStep>
__global__ void yardstick(float* p) {
  float v[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) v[i] = p[i * kStep + threadIdx.x];
#pragma unroll
  for (int round = 0; round < 16; ++round) {
#pragma unroll
    for (int i = 0; i < 64; ++i) v[i] = v[i] * v[(i + kStep) % 64] + v[(i + round) % 64];
  }
#pragma unroll
  for (int i = 0; i < 64; ++i) p[i * kStep + threadIdx.x] = v[i];
}
""" + "".join(f"template __global__ void yardstick<{k}>(float*);\n" for k in range(1, 17))


@dataclass
class Kernel:
    file: str
    arch: str
    name: str
    registers: int = 0
    shared: int = 0
    spill_bytes: int = 0
    stack: int = 0


def find_nvcc() -> str | None:
    """The compiler that torch's build finds, or None."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    usual = Path("/usr/local/cuda/bin/nvcc")
    if home and (Path(home) / "bin" / "nvcc").exists():
        return str(Path(home) / "bin" / "nvcc")
    return shutil.which("nvcc") or (str(usual) if usual.exists() else None)


def readable(symbols: list[str]) -> dict[str, str]:
    """Demangled names by c++filt, cut to the tokens that distinguish kernels."""
    tool = shutil.which("c++filt")
    if tool is None or not symbols:
        return {s: s for s in symbols}
    text = subprocess.run([tool], input="\n".join(symbols), capture_output=True, text=True).stdout
    names = {}
    for symbol, name in zip(symbols, text.splitlines(), strict=True):
        for noise in ("torchweld::", "(anonymous namespace)::", "void "):
            name = name.replace(noise, "")
        names[symbol] = without_arguments(name)
    return names


def without_arguments(name: str) -> str:
    """kernel<T, (Math)1>(Params) -> kernel<T, (Math)1>"""
    depth = 0
    for i, char in enumerate(name):
        if char == "(" and depth == 0:
            return name[:i]
        depth += {"<": 1, ">": -1}.get(char, 0)
    return name


def cuda_sources(generated: Path) -> dict[str, Path]:
    """Names and paths of the files that nvcc compiles; writes the instantiations."""
    sys.path.insert(0, str(ROOT / "csrc"))
    import instantiations

    csrc = ROOT / "csrc"
    sources = {f"instantiations/{path.name}": path for path in instantiations.write(generated)}
    listed = sorted(path.relative_to(csrc).as_posix() for path in csrc.rglob("*.cu"))
    for source in instantiations.alone(listed):
        sources[f"csrc/{source}"] = csrc / source
    return dict(sorted(sources.items()))


def parse_report(report: str, file: str) -> list[Kernel]:
    """The kernels of a report by `nvcc -Xptxas=-v`, of all its architectures."""
    kernels: list[Kernel] = []
    for line in report.splitlines():
        if found := re.search(r"Compiling entry function '(\S+)' for '(\w+)'", line):
            kernels.append(Kernel(file, found[2], found[1]))
        elif not kernels:
            continue
        elif found := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            kernels[-1].stack = int(found[1])
            kernels[-1].spill_bytes = int(found[2]) + int(found[3])
        elif found := re.search(r"Used (\d+) registers", line):
            kernels[-1].registers = int(found[1])
            shared = re.search(r"(\d+) bytes smem", line)
            kernels[-1].shared = int(shared[1]) if shared else 0
    names = readable([k.name for k in kernels])
    for kernel in kernels:
        kernel.name = names[kernel.name]
    return kernels


def compiler_seconds() -> float:
    """CPU time that this process's compilers have used so far."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def slowness(nvcc: str) -> float:
    """How much slower this processor is now than the yardstick's; at least 1."""
    start = compiler_seconds()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "yardstick.cu"
        source.write_text(YARDSTICK)
        command = [nvcc, "-O3", "-std=c++17", f"-gencode={ARCHS['sm_90a']}", "-cubin", str(source)]
        subprocess.run([*command, "-o", f"{source}.cubin"], check=True)
    return max(1.0, (compiler_seconds() - start) / YARDSTICK_SECONDS)


def compiled_report(source: Path, nvcc: str) -> tuple[str, float]:
    """nvcc's messages and its CPU seconds; raises RuntimeError if the file does not compile."""
    start = compiler_seconds()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [nvcc, "-O3", "-std=c++17", "--expt-relaxed-constexpr", "-DTORCHWELD_CUDA"]
            + [f"-I{ROOT / 'csrc'}", "-Xptxas=-v", *(f"-gencode={a}" for a in ARCHS.values())]
            + ["-fatbin", str(source), "-o", str(Path(folder) / "out.fatbin")],
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return done.stderr, compiler_seconds() - start


def kept_reports(build: Path, csrc: Path) -> dict[str, dict]:
    """The reports that a build for the default architectures kept, by the names of cuda_sources.

    Reports that are older than a file of csrc are left out.
    """
    files = (path for path in csrc.rglob("*") if path.is_file() and path.suffix != ".pyc")
    changed = max(path.stat().st_mtime for path in files)
    found = {}
    for path in build.glob(f"**/*{REPORT_SUFFIX}"):
        report = json.loads(path.read_text())
        flags = " ".join(report["args"])
        built_for_all = all(arch.split(",")[0] in flags for arch in ARCHS.values())
        if path.stat().st_mtime > changed and built_for_all:
            source = Path(report["source"])
            name = f"{source.parent.name}/{source.name}"
            if source.is_relative_to(csrc):
                name = source.relative_to(csrc.parent).as_posix()
            found[name] = report
    return found


def check_file(
    file: str, source: Path, report: dict | None, nvcc: str, limit: float
) -> tuple[list[Kernel], list[str], float]:
    """The kernels of one file, its faults, and the CPU seconds of its compilers."""
    if report is not None:
        messages, took = report["messages"], report["seconds"]
    else:
        try:
            messages, took = compiled_report(source, nvcc)
        except RuntimeError as error:
            return [], [f"{file} does not compile:\n{error}"], 0.0
    lines = (line.strip() for line in messages.splitlines())
    faults = [f"{file}: {line}" for line in lines if BAD_WARNINGS.search(line)]
    return parse_report(messages, file), faults, took / slowness(nvcc) if took > limit else took


def library_fault(name: str, size: int) -> str | None:
    """A sentence if a library of `size` bytes is too large, else None."""
    if size <= MAX_LIBRARY_BYTES:
        return None
    return f"{name} must have at most {MAX_LIBRARY_BYTES} bytes, but has {size}"


def stripped_size(library: Path) -> int:
    """The bytes of a library without its symbol table, as a wheel has it."""
    with tempfile.TemporaryDirectory() as folder:
        stripped = Path(folder) / library.name
        subprocess.run(["strip", "-o", stripped, library], check=True)
        return stripped.stat().st_size


def built_library_fault(package: Path) -> str | None:
    """`library_fault` of a package's library. Libraries of other architectures have no limit."""
    facts, library = package / "_build.json", package / "_ops.abi3.so"
    if not facts.exists() or not library.exists():
        return None
    if json.loads(facts.read_text())["arch_list"] != DEFAULT_ARCHS:
        return None
    return library_fault(library.name, stripped_size(library))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write every kernel's numbers there")
    parser.add_argument(
        "--limit", type=float, default=40.0, help="processor seconds a file may take, all archs"
    )
    parser.add_argument("--all", action="store_true", help="print every kernel")
    args = parser.parse_args(argv)
    nvcc = find_nvcc()
    if nvcc is None:
        print("kernel-check: nvcc was not found, nothing to check")
        return 0

    kernels: list[Kernel] = []
    seconds: dict[str, float] = {}
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as generated, ProcessPoolExecutor() as pool:
        sources = cuda_sources(Path(generated))
        kept = kept_reports(ROOT / "build", ROOT / "csrc")
        always = map(itertools.repeat, (nvcc, args.limit))
        reports = pool.map(check_file, sources, sources.values(), map(kept.get, sources), *always)
        for file, (of_file, of_file_faults, took) in zip(sources, reports, strict=True):
            kernels += of_file
            faults += of_file_faults
            seconds[file] = took
            if took > args.limit:
                faults.append(f"{file} took {took:.1f} s, the limit is {args.limit:.0f} s")
    if fault := built_library_fault(ROOT / "python" / "torchweld"):
        faults.append(fault)
    faults += [
        f"{k.file}, {k.arch}: {k.name} spills {k.spill_bytes} bytes"
        for k in kernels
        if k.spill_bytes
    ]

    print(f"{'file':<66} {'kernels':>7} {'registers':>9} {'smem B':>7} {'spills':>6} {'s':>5}")
    for file, took in seconds.items():
        of_file = [k for k in kernels if k.file == file]
        print(
            f"{file:<66} {len(of_file):>7} {max((k.registers for k in of_file), default=0):>9} "
            f"{max((k.shared for k in of_file), default=0):>7} "
            f"{sum(k.spill_bytes > 0 for k in of_file):>6} {took:>5.1f}"
        )
    if args.all:
        for k in kernels:
            print(f"  {k.arch:<6} {k.registers:>3} registers {k.shared:>6} B  {k.name}")
    if args.json:
        args.json.write_text(
            json.dumps({"seconds": seconds, "kernels": [asdict(k) for k in kernels]}, indent=1)
            + "\n"
        )
    for fault in faults:
        print(f"kernel-check: {fault}", file=sys.stderr)
    anew = len(sources.keys() - kept.keys())
    print(f"kernel-check: {len(kernels)} kernels, {len(faults)} faults; {anew} files compiled")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
