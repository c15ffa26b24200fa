"""The loss of a sharded vocabulary over 2 and 4 processes: the answers of one process.

The cases are in sharded_losses.py.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this torch has no gloo", allow_module_level=True)

import sharded_losses
from meshes import said_by


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    return said_by("sharded_losses", tmp_path_factory)


@pytest.mark.parametrize("mesh", ["2", "4"])
@pytest.mark.parametrize("case", sharded_losses.cases("2"))
def test_sharded_vocabulary_equals_one_process(said, mesh, case):
    complaint = said(mesh)[case]
    assert not complaint, complaint
