"""Modules and models sharded over 2 processes: the answers of one process.

The cases are in sharded_models.py; the processes are started once and run all of them.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist

pytest.importorskip("transformers")
pytest.importorskip("accelerate")  # which from_pretrained needs for a plan

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this torch has no gloo", allow_module_level=True)

from meshes import said_by
from sharded_models import cases


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    return said_by("sharded_models", tmp_path_factory)


@pytest.mark.parametrize("case", cases("2"))
def test_equals_one_process(said, case):
    complaint = said("2")[case]
    assert not complaint, complaint
