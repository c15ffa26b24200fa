"""benchmarks/unused_kernels.py, which finds kernels that no choice takes."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

from torchweld import _library

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import kernel_sweep  # noqa: E402
import unused_kernels  # noqa: E402

pytestmark = [
    pytest.mark.skipif(_library.build_facts()["cuda"] is None, reason="the build has no kernels"),
    pytest.mark.skipif(shutil.which("nm") is None, reason="nm lists the symbols of the library"),
]


@pytest.fixture(scope="module")
def kernels() -> dict[int, str]:
    return unused_kernels.kernels_of(Path(_library.__file__).parent / "_ops.abi3.so")


def launched(kernels: dict[int, str], call: kernel_sweep.Call, force: bool) -> set[str]:
    sweep = unused_kernels.Sweep()
    sweep.run(call, force=force)
    assert not sweep.refused
    return {kernels[offset] for offset in sweep.reached}


def test_a_sweep_finds_the_names_of_the_kernels_that_a_call_launches(kernels):
    x = kernel_sweep.empty(4, 1000, dtype=torch.float32)
    (name,) = launched(kernels, kernel_sweep.Call("row_sum", (x,)), force=False)
    assert name.startswith("row_sum_rows_kernel<RowSumConfig<float, ")


def test_a_forced_sweep_finds_the_kernels_that_tune_can_choose(kernels):
    call = kernel_sweep.Call("softmax", (kernel_sweep.empty(4, 1000, dtype=torch.float32),))
    chosen, all_of_tune = (launched(kernels, call, force) for force in (False, True))
    assert len(chosen) == 1 and chosen < all_of_tune
    assert {name.split("<")[0] for name in all_of_tune} == {
        "softmax_kernel", "softmax_ring_kernel", "softmax_stream_kernel"
    }  # fmt: skip


def test_every_kernel_of_a_sweep_is_in_the_symbol_table(kernels):
    sweep = unused_kernels.Sweep()
    for call in list(kernel_sweep.others())[::50]:
        sweep.run(call, force=False)
    assert sweep.reached and sweep.reached <= kernels.keys()
    assert not sweep.refused
