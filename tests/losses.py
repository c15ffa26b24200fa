"""Calls of the losses, and their leaves and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from numerics import assert_same_bits
from samples import Maker, call, forward_backward, loss_call, trained

OPTIONS = {
    "plain": {},
    "label_smoothing": {"label_smoothing": 0.1},
    "all_smooth": {"label_smoothing": 1.0},
    "softcap": {"softcap": 3.0},
    "z_loss": {"z_loss": 0.05},
    "shift": {"shift": 1},
    "temperature": {"temperature": 0.7},
    "ignore_index": {"ignore_index": 3},
    "together": {
        "label_smoothing": 0.2, "softcap": 5.0, "z_loss": 0.1, "shift": 1, "temperature": 1.3,
    },
}  # fmt: skip


def made(device, dtype, lead, n, k, seed=0, **kwargs):
    return loss_call(lead, n, k, **kwargs)(Maker(device, dtype, seed))[0]


def leaves_of(args) -> list[Tensor]:
    """The arguments, the floating ones as leaves."""
    return [
        a.detach().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a
        for a in args
    ]


def grads_of(out: Tensor, args) -> list[Tensor]:
    return list(torch.autograd.grad(out, trained(args), torch.ones_like(out), retain_graph=True))


def assert_ignored_rows_may_hold(value: float, args, kwargs) -> None:
    """The results with `value` in x's first two rows, which are ignored, are those without it."""
    x, *others = args
    dirty = x.clone()
    dirty[:2] = value
    out, grads = forward_backward("linear_cross_entropy", [dirty, *others], kwargs)
    want, want_grads = forward_backward("linear_cross_entropy", [x, *others], kwargs)
    assert_same_bits(out, want)
    assert (grads[0][:2] == 0).all()
    assert_same_bits(grads, want_grads)


def assert_refused(op: str, device: str, given: dict[str, Any], sentence: str) -> None:
    """The op refuses the arguments, which are on the device unless they are on meta."""
    given = {
        n: v.to(device) if isinstance(v, Tensor) and v.device.type != "meta" else v
        for n, v in given.items()
    }
    with pytest.raises(RuntimeError, match=f"^torchweld::{op}: .*{sentence}"):
        call(op)(**given)
