"""benchmarks/kernel_check.py and the reports that benchmarks/nvcc_report.py keeps for it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import kernel_check
import nvcc_report

GENCODES = [
    "-gencode=arch=compute_90a,code=sm_90a",
    "-gencode=arch=compute_80,code=[sm_80,compute_80]",
]
MESSAGES = """\
a.cuh(7): warning: unused variable
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1fPf' for 'sm_90a'
ptxas info    : Function properties for _Z1fPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 48 registers, used 1 barriers, 512 bytes smem
ptxas info    : Compile time = 65.864 ms
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : Compiling entry function '_Z1fPf' for 'sm_80'
ptxas info    : Function properties for _Z1fPf
    24 bytes stack frame, 8 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 60 registers, used 1 barriers
"""


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that makes no object, but prints messages; it fails if an argument is `fail`."""
    path = tmp_path / "cuda" / "bin" / "nvcc"
    path.parent.mkdir(parents=True)
    (tmp_path / "messages").write_text(MESSAGES)
    path.write_text(
        f'#!/bin/sh\n[ "$1" = -Xptxas=-v ] && cat {tmp_path}/messages >&2\n'
        'case "$*" in *fail*) exit 3;; esac\n'
    )
    path.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(path.parent.parent))
    return path


def built(folder: Path, source: Path, *flags: str) -> Path:
    """The report of an object that nvcc_report.py compiled as torch's build calls it."""
    target = folder / "build" / f"{source.name}.o"
    target.parent.mkdir(exist_ok=True)
    assert nvcc_report.main([*flags, "-c", "-c", str(source), "-o", str(target)]) == 0
    return target.with_name(target.name + kernel_check.REPORT_SUFFIX)


def test_the_compiler_keeps_its_report_and_prints_only_warnings(nvcc, tmp_path, capsys):
    report = json.loads(built(tmp_path, tmp_path / "a.cu", *GENCODES).read_text())
    assert report["messages"] == MESSAGES and report["source"] == str(tmp_path / "a.cu")
    assert report["seconds"] >= 0
    printed = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in printed] == ["a.cuh(7):", "ptxas"] and "C7510" in printed[1]
    assert nvcc_report.main(["-c", "fail.cu", "-o", str(tmp_path / "fail.o")]) == 3
    assert not list(tmp_path.glob("fail*"))


def test_the_compiler_runs_as_a_command(nvcc, tmp_path):
    command = [nvcc_report.__file__, "-c", "a.cu", "-o", str(tmp_path / "a.o")]
    subprocess.run(command, check=True, capture_output=True)
    assert (tmp_path / f"a.o{kernel_check.REPORT_SUFFIX}").exists()


def test_a_kept_report_is_read_in_place_of_a_compilation(nvcc, tmp_path):
    source = tmp_path / "csrc" / "ops" / "a.cu"
    source.parent.mkdir(parents=True)
    source.write_text("")
    os.utime(source, (1, 1))
    generated = tmp_path / "build" / "generated" / "instantiations" / "b.cu"
    for each in (source, generated):
        built(tmp_path, each, *GENCODES)
    kept = kernel_check.kept_reports(tmp_path / "build", tmp_path / "csrc")
    assert sorted(kept) == ["csrc/ops/a.cu", "instantiations/b.cu"]
    kernels, faults, took = kernel_check.check_file(
        "csrc/ops/a.cu", source, kept["csrc/ops/a.cu"], "no such compiler", limit=20
    )
    assert [(k.arch, k.registers, k.shared, k.spill_bytes) for k in kernels] == [
        ("sm_90a", 48, 512, 0),
        ("sm_80", 60, 0, 24),
    ]
    assert len(faults) == 1 and "C7510" in faults[0] and took < 20


def test_reports_of_other_sources_or_architectures_are_not_read(nvcc, tmp_path):
    source = tmp_path / "csrc" / "a.cu"
    source.parent.mkdir()
    source.write_text("")
    report = built(tmp_path, source, GENCODES[0])
    kept = (tmp_path / "build", source.parent)
    assert kernel_check.kept_reports(*kept) == {}, "it was built for sm_90a alone"
    built(tmp_path, source, *GENCODES)
    os.utime(report, (1, 1))
    assert kernel_check.kept_reports(*kept) == {}, "the source is newer"


def test_a_file_that_does_not_compile_is_a_fault(nvcc, tmp_path):
    source = tmp_path / "fail.cu"
    kernels, faults, _ = kernel_check.check_file("fail.cu", source, None, str(nvcc), limit=20)
    assert kernels == [] and faults[0].startswith("fail.cu does not compile")
