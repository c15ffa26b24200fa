"""outer_add and its gradient against float64; exact on integer grids."""

from __future__ import annotations

import pytest
import torch

from matrices import matrix_args
from numerics import assert_equal
from samples import BF16

OP = "outer_add"
OPS = (OP, OP + "_backward")
outer_add = torch.ops.torchweld.outer_add
outer_add_backward = torch.ops.torchweld.outer_add_backward


def test_more_than_2_31_elements(device):
    if device == "cpu":
        pytest.skip("takes 4 GiB and long on a CPU")
    rows, cols = 65537, 32801
    x, y = matrix_args(OP, device, BF16, rows, cols)
    z = outer_add(x, y)
    for i in (0, 65472, 65473, rows - 1):  # offset 2^31 is in row 65472
        assert_equal(z[i], x + y[i])
    z.zero_()
    z[-1], z[:, -1] = 1.0, 2.0
    dx, dy = outer_add_backward(z)
    expected_x, expected_y = torch.ones_like(x), torch.full_like(y, 2.0)
    expected_x[-1], expected_y[-1] = 2.0 * rows, cols + 1.0
    assert_equal(dx, expected_x)
    assert_equal(dy, expected_y)
