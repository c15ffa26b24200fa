"""DTensors in every op, on a mesh of 2 and of 2 x 2 processes: the answers of one process.

The cases are in placements.py. Each mesh's processes are started once and run all of them.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch.distributed as dist

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this torch has no gloo", allow_module_level=True)

from meshes import MESHES
from placements import BUILDS, cases
from torchweld.distributed import rules
from torchweld.info import ops_of_library


@pytest.mark.parametrize(
    ("mesh", "case"), [(mesh, case) for mesh in MESHES for case in cases(mesh)]
)
def test_equals_one_process(check_case, mesh, case):
    check_case("placements", mesh, case)


def test_every_op_has_a_rule_and_cases():
    assert set(filter(rules.rule_of, ops_of_library())) == set(ops_of_library()) == set(BUILDS)


def test_the_import_registers_the_rules():
    code = (
        "import torchweld; "
        "from torch.distributed.tensor import DTensor; import torch; "
        "p = DTensor._op_dispatcher.sharding_propagator; "
        "assert torch.ops.torchweld.softmax.default in p.op_strategy_funcs"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_torch_with_other_internals_only_warns(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor._op_schema", None)
    with pytest.warns(UserWarning, match="torchweld's ops take no DTensors under torch"):
        rules.install(ops_of_library())
