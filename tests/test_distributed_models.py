"""Modules and models sharded over 2 and 4 processes: the answers of one process.

The cases are in sharded_models.py (tensor parallel), fully_sharded.py (FSDP2 alone or with tensor
parallel) and sharded_experts.py; the processes are started once and run all of a file.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

pytest.importorskip("transformers")
pytest.importorskip("accelerate")  # which from_pretrained needs for a plan

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this torch has no gloo", allow_module_level=True)

import fully_sharded
import sharded_experts
import sharded_models
from meshes import MESHES


@pytest.mark.parametrize(
    ("mesh", "case"), [(mesh, case) for mesh in ("2", "4") for case in sharded_models.cases(mesh)]
)
def test_tensor_parallel_equals_one_process(check_case, mesh, case):
    check_case("sharded_models", mesh, case)


@pytest.mark.parametrize(
    ("mesh", "case"), [(mesh, case) for mesh in MESHES for case in fully_sharded.cases(mesh)]
)
def test_fully_sharded_equals_one_process(check_case, mesh, case):
    check_case("fully_sharded", mesh, case)


@pytest.mark.parametrize("case", sharded_experts.cases("2"))
def test_sharded_experts_equal_one_process(check_case, case):
    if " all_" in case and not sharded_experts.HAS_EXPERT_PARALLEL:
        pytest.skip("this transformers has no ep_size")
    check_case("sharded_experts", "2", case)


def test_the_example_asks_for_torchrun():
    path = Path(__file__).resolve().parent.parent / "examples" / "train_parallel.py"
    env = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "use torchrun --nproc-per-node 2" in done.stderr
