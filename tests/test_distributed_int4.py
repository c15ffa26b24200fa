"""4-bit models over 2 processes: the answers of one process. The cases are in quantised_shards.py,
and the processes are started once for all of them.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist

pytest.importorskip("transformers")

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this torch has no gloo", allow_module_level=True)

import quantised_shards
from meshes import said_by


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    return said_by("quantised_shards", tmp_path_factory)


@pytest.mark.parametrize("case", quantised_shards.cases("2"))
def test_4_bits_equal_one_process(said, case):
    complaint = said("2")[case]
    assert not complaint, complaint
