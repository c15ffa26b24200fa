"""gated_activation and its backward op, for matrices anywhere in memory."""

from __future__ import annotations

import pytest
import torch

import torchweld
from numerics import assert_same_bits
from reference import GATES
from samples import check_op, dtypes, forward_backward
from tensors import check_output_mask, randn

OP = "gated_activation"
ops = torch.ops.torchweld
# With 16-byte accesses and without; more rows than a block handles at a time; more columns than one
# tile.
SHAPES = [(1,), (7,), (3, 1), (33, 65), (2, 40, 264), (5, 1, 2056), (300, 520)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(device, shape):
    for dtype in dtypes(device):
        for gate in GATES:
            pair = [randn(device, dtype, *shape) for _ in range(2)]
            check_op(OP, pair, {"gate": gate})


def test_operands_anywhere_in_memory(device):
    """Halves of one tensor, columns of every second element, an offset, an expanded row."""
    for dtype in dtypes(device):
        left, right = randn(device, dtype, 6, 5, 32), randn(device, dtype, 6, 5, 32)
        y, grads = forward_backward(OP, [left, right], {})
        packed = torch.cat([left, right], -1)
        wide = torch.stack([left, right], -1)
        far = torch.cat([left.flatten()[:1], left.flatten()])[1:].view_as(left)
        for pair in (packed.chunk(2, -1), wide.unbind(-1), (far, right), (left, right.clone())):
            other, other_grads = forward_backward(OP, list(pair), {})
            assert_same_bits(other, y)
            assert_same_bits(other_grads, grads)
        row = right[:1, :1].expand_as(right)
        assert_same_bits(ops.gated_activation(left, row), ops.gated_activation(left, row.clone()))


def test_output_mask(device):
    for dtype in dtypes(device):
        args = [randn(device, dtype, 9, 24) for _ in range(3)]
        for mask in range(4):
            check_output_mask(OP + "_backward", args, mask, 2)


def test_special_values(device):
    """inf and NaN go where torch's silu and product send them."""
    left = torch.tensor([float("-inf"), float("inf"), float("nan"), -200.0, 88.0], device=device)
    right = torch.tensor([1.0, -1.0, 1.0, 2.0, 0.5], device=device)
    want = torch.nn.functional.silu(left) * right
    got = torchweld.gated_activation(left, right)
    assert torch.equal(got.isnan(), want.isnan())
    torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-5, atol=0)


def test_one_gradient(device):
    for wanted in range(2):
        pair = [randn(device, torch.float32, 4, 8).requires_grad_(i == wanted) for i in range(2)]
        torchweld.gated_activation(*pair).sum().backward()
        assert [t.grad is not None for t in pair] == [i == wanted for i in range(2)]
