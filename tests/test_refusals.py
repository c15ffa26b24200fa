"""Every bad call of every op is refused in one sentence that names the op and the argument."""

from __future__ import annotations

import pytest

from refusals import SPECS, case_params, cases
from samples import DIFFERENTIABLE, need_kernel


@pytest.mark.parametrize("case", case_params(*SPECS))
def test_bad_call(case, device):
    need_kernel(case.op, device)
    case.check(device)


@pytest.mark.parametrize("op", [op for op in SPECS if op in DIFFERENTIABLE])
def test_bad_call_while_recording(op, device):
    """The refusal names the op that was called, not the one that autograd calls for it."""
    need_kernel(op, device)
    for case in cases(op):
        case.check(device, recorded=True)


@pytest.mark.parametrize("op", SPECS)
def test_number_of_bad_calls(op):
    few = {"int4_pack": 10, "int4_unpack": 15, "add_scalar": 18, "outer_add_backward": 21}
    assert len(cases(op)) >= few.get(op, 25)
