"""Calls of the losses of a linear layer's logits, and their leaves and gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from samples import Maker, loss_call


def made(device, dtype, lead, n, k, seed=0, **kwargs):
    return loss_call(lead, n, k, **kwargs)(Maker(device, dtype, seed))[0]


def leaves_of(args) -> list[Tensor]:
    """The arguments, the floating ones as leaves."""
    return [
        a.detach().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a
        for a in args
    ]


def grads_of(out: Tensor, args) -> list[Tensor]:
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    return list(torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True))
