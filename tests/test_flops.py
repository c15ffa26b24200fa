"""FlopCounterMode counts as many flops for an op as for its formula in torch's ops."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import samples
import torchweld
from commands import python
from running import REFERENCES
from torchweld._flops import formula


def counted(function, *args) -> tuple[int, int]:
    """The flops of a function, and of its gradients to all tensor arguments."""
    leaves = [a.detach().requires_grad_() if a.is_floating_point() else a for a in args]
    with FlopCounterMode(display=False) as forward:
        out = function(*leaves)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def attention(query, key, value):
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    return (query @ key.transpose(-1, -2)).softmax(-1) @ value


R = torch.randn
SAME = {
    "linear": (
        lambda x, w, b: torchweld.linear(x, w, b, activation="gelu"),
        lambda x, w, b: F.gelu(F.linear(x, w, b)),
        (R(2, 3, 8), R(5, 8), R(5)),
    ),
    "layer_norm_linear": (
        lambda x, w: torchweld.layer_norm_linear(x, w),
        lambda x, w: F.linear(F.layer_norm(x, (8,)), w),
        (R(6, 8), R(5, 8)),
    ),
    "rms_norm_linear": (
        lambda x, w: torchweld.rms_norm_linear(x, w),
        lambda x, w: F.linear(F.rms_norm(x, (8,)), w),
        (R(6, 8), R(5, 8)),
    ),
    "gated_linear": (
        lambda x, w: torchweld.gated_linear(x, w, gate="swiglu"),
        lambda x, w: F.linear(x, w),
        (R(6, 8), R(10, 8)),
    ),
    "gated_linear_pair": (
        torchweld.gated_linear_pair,
        lambda x, left, right: F.linear(x, left) * F.linear(x, right),
        (R(6, 8), R(5, 8), R(5, 8)),
    ),
    "gated_mlp": (
        torchweld.gated_mlp,
        lambda x, left, right, down: F.linear(F.linear(x, left) * F.linear(x, right), down),
        (R(6, 8), R(5, 8), R(5, 8), R(7, 5)),
    ),
    "bmm": (torchweld.bmm, torch.bmm, (R(4, 3, 8), R(4, 8, 5))),
    "softmax_matmul": (
        torchweld.softmax_matmul,
        lambda scores, value: scores.softmax(-1) @ value,
        (R(2, 3, 4, 5), R(2, 3, 5, 6)),
    ),
    "conv2d": (
        torchweld.conv2d,
        lambda x, w: F.conv2d(x[:, None], w[None, None], padding="same")[:, 0],
        (R(2, 9, 9), R(3, 3)),
    ),
}


@pytest.mark.parametrize("op", SAME)
def test_counts_are_torchs(op):
    ours, theirs, args = SAME[op]
    assert counted(ours, *args) == counted(theirs, *args)


@pytest.mark.parametrize("heads", [4, 2])
def test_attention_counts_the_recomputed_scores_too(heads):
    args = R(2, 4, 5, 8), R(2, heads, 7, 8), R(2, heads, 7, 6)
    forward, backward = counted(torchweld.attention, *args)
    plain_forward, plain_backward = counted(attention, *args)
    assert forward == plain_forward
    assert backward == plain_backward + 2 * (2 * 4 * 5 * 7 * 8)


def test_only_what_is_asked_for_counts():
    x, weight = R(6, 8), R(5, 8).requires_grad_()
    out = torchweld.linear(x, weight)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * 6 * 5 * 8


def test_int4_counts_as_a_dense_layer():
    layer = torchweld.nn.Int4Linear.from_linear(torch.nn.Linear(64, 16), group_size=32)
    x = R(3, 64, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        layer(x).sum().backward()
    assert counter.get_total_flops() == 2 * (2 * 3 * 64 * 16)


@pytest.mark.parametrize("op", samples.SAMPLES)
def test_an_op_whose_reference_multiplies_matrices_has_a_formula(op):
    args, kwargs = samples.SAMPLES[op][0].make()
    with FlopCounterMode(display=False) as counter:
        REFERENCES[op](*args, **kwargs)
    # The reference of conv2d multiplies shifted copies of x, one element of the kernel at a time.
    multiplies = counter.get_total_flops() > 0 or op.startswith("conv2d")
    assert (formula(op) is not None) == multiplies


@pytest.mark.parametrize("first", ["torchweld", "torch.utils.flop_counter"])
def test_the_order_of_imports_does_not_matter(first):
    second = {"torchweld": "torch.utils.flop_counter"}.get(first, "torchweld")
    code = (
        f"import torch, {first}\n"
        f"import {second}\n"
        "with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:\n"
        "    torchweld.linear(torch.ones(2, 3), torch.ones(4, 3))\n"
        "assert counter.get_total_flops() == 48\n"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
