"""Context parallelism on 2 and on 4 processes: the answers of one process.

The cases are in sequence_shards.py and, with models of transformers, in sequence_models.py.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this torch has no gloo", allow_module_level=True)

import sequence_shards
from meshes import MESHES
from torchweld.distributed import context_parallel, context_parallel_attention

try:
    import sequence_models
except ImportError:  # no transformers
    sequence_models = None


@pytest.mark.parametrize(
    ("mesh", "case"), [(mesh, case) for mesh in MESHES for case in sequence_shards.cases(mesh)]
)
def test_attention_equals_one_process(check_case, mesh, case):
    check_case("sequence_shards", mesh, case)


@pytest.mark.parametrize("case", sequence_models.cases("2") if sequence_models else [])
def test_models_equal_one_process(check_case, case):
    check_case("sequence_models", "2", case)


def test_it_needs_a_process_group():
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(RuntimeError, match="torch.distributed must be initialised, but it is not"):
        context_parallel_attention(q, q, q)
    with pytest.raises(RuntimeError, match="^context_parallel: torch"), context_parallel():
        pass


def test_torchweld_alone_imports_nothing_of_it():
    code = (
        "import sys, torchweld; torchweld.nn.CausalSelfAttention(4, 1); "
        "assert 'torchweld.distributed.context' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
