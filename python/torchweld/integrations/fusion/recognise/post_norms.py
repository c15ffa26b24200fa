"""Recognises and compares linear layers followed by a residual sum and a LayerNorm, as BERT's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchweld.integrations.fusion.layers import arguments
from torchweld.integrations.fusion.layers.fused_module import Fusion, stock_class
from torchweld.integrations.fusion.layers.layer_norm import FusedPostNorm, PostNorm, is_faster

from . import compare
from .norms import Recognised, choose, fused_replica, norm_replica


def find(module: nn.Module) -> Fusion | None:
    """Guesses a module's fused class and settings from its structure; None for others."""
    row = _row(module)
    return None if row is None else choose(module, lambda _: [row], RecognisedPostNorm)


def _row(module: nn.Module) -> PostNorm | None:
    """Returns the settings of a module with such children if its norm may run the op, or None."""
    if module._parameters or module._buffers or len(module._modules) != 3:
        return None
    if len(arguments.of(stock_class(module)).names) != 2:
        return None
    names = {_kind(child): name for name, child in module._modules.items()}
    if set(names) != {"linear", "dropout", "norm"}:
        return None
    weight = module._modules[names["norm"]].weight
    return PostNorm(**names) if weight is not None and is_faster(weight) else None


def _kind(module: nn.Module) -> str | None:
    if isinstance(getattr(module, "out_features", None), int):
        return "linear"
    return {nn.Dropout: "dropout", nn.LayerNorm: "norm"}.get(stock_class(module))


def _replica(module: nn.Module, random: compare.Random) -> nn.Module:
    replica = fused_replica(module)
    row = _row(module)
    norm = norm_replica(module._modules[row.norm], random, nn.LayerNorm)
    linear = random.linear(compare.WIDTH, compare.WIDTH, like=module._modules[row.linear])
    made = {row.linear: linear, row.dropout: nn.Dropout(0.25), row.norm: norm}
    for name in module._modules:
        replica.add_module(name, made[name])
    return replica


def _run(
    module: nn.Module, forward: compare.Forward, random: compare.Random
) -> tuple[list[Tensor], None]:
    x, residual = random.inputs(), random.inputs()
    y = forward(module, x, residual)
    weights = random(*y.shape).to(y.dtype)
    wanted = [x, residual, *module.parameters()]
    return [y, *torch.autograd.grad(y, wanted, weights)], None


class RecognisedPostNorm(Recognised, FusedPostNorm):
    """A linear layer followed by a residual addition and a LayerNorm."""

    comparison = compare.Kind("an addition and a norm", _replica, _run)
