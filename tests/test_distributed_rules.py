"""DTensors in every op, on a mesh of 2 and of 2 x 2 processes: the answers of one process.

The cases are in placements.py. Each mesh's processes are started once and run all of them.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch.distributed as dist

from samples import registered_ops

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this torch has no gloo", allow_module_level=True)

from placements import BUILDS, MESHES, cases, run_cases
from torchweld.distributed import rules

SECONDS = 240  # for all cases of a mesh on a busy machine


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> dict[str, dict[str, str]]:
    return {
        mesh: run_cases(mesh, list(cases(mesh)), tmp_path_factory.mktemp(mesh), SECONDS)
        for mesh in MESHES
    }


@pytest.mark.parametrize(
    ("mesh", "case"), [(mesh, case) for mesh in MESHES for case in cases(mesh)]
)
def test_equals_one_process(said, mesh, case):
    assert not said[mesh][case], said[mesh][case]


def test_every_op_has_a_rule_and_cases():
    assert set(rules.RULES) == set(registered_ops()) == set(BUILDS)


def test_rules_cost_nothing_until_dtensor_is_imported():
    code = (
        "import sys, torchweld; assert 'torch.distributed.tensor' not in sys.modules; "
        "from torch.distributed.tensor import DTensor; import torch; "
        "p = DTensor._op_dispatcher.sharding_propagator; "
        "assert torch.ops.torchweld.softmax.default in p.op_strategy_funcs"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
