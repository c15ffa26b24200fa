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


@pytest.mark.parametrize("case", quantised_shards.cases("2"))
def test_4_bits_equal_one_process(check_case, case):
    check_case("quantised_shards", "2", case)
