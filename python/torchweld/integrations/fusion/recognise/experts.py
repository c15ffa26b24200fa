"""Recognises a mixture's experts by transformers' decorator; compares them with eager ones."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from torchweld.integrations.fusion.layers.experts import (
    FusedExperts,
    is_experts,
    norm_of,
    parameters_of,
)
from torchweld.integrations.fusion.layers.fused_module import Fusion, register, stock_class
from torchweld.integrations.fusion.probes import Probes

from . import compare
from .norms import Recognised, fused_replica

_EXPERTS, _HIDDEN, _PER_TOKEN = 4, 8, 2  # of a replica


def find(module: nn.Module) -> Fusion | None:
    """Returns the FusedModule subclass for a mixture's experts, None for other modules."""
    if not is_experts(module):
        return None
    return register(stock_class(module), (RecognisedExperts, None))


def _replica(module: nn.Module, random: compare.Random) -> nn.Module:
    replica = fused_replica(module)
    replica.config = copy.copy(module.config)
    replica.config._experts_implementation_internal = "eager"
    replica.num_experts = _EXPERTS
    for name, child in module._modules.items():
        replica.add_module(name, child)
    first = 2 * _HIDDEN if module.has_gate else _HIDDEN
    for name in parameters_of(module):
        down = name.startswith("down")
        rows, columns = (compare.WIDTH, _HIDDEN) if down else (first, compare.WIDTH)
        shape = (columns, rows) if module.is_transposed else (rows, columns)
        shape = (rows,) if name.endswith("_bias") else shape
        replica.register_parameter(name, nn.Parameter(random(_EXPERTS, *shape) / 4))
    if (norm := norm_of(module)) is not None:
        bare = compare.bare_replica(norm, stock_class(norm))
        for name in dict(norm.named_parameters()):
            bare.register_parameter(name, nn.Parameter(random(compare.WIDTH) / 4))
        replica.post_expert_norm = bare
    return replica


def _run(
    module: nn.Module, forward: compare.Forward, random: compare.Random
) -> tuple[list[Tensor], None]:
    x = random.inputs()
    rows = x.flatten(0, 1)
    # A token's experts differ from each other, as those that a router chooses.
    index = random(len(rows), _EXPERTS).argsort(-1)[:, :_PER_TOKEN]
    weight = random(*index.shape).requires_grad_()
    y = forward(module, rows, index, weight).view_as(x)
    leaves = [x, weight, *module.parameters()]
    return [y, *torch.autograd.grad(y, leaves, random(*y.shape))], None


class RecognisedExperts(Recognised, FusedExperts):
    """Experts of any class under ``use_experts_implementation``."""

    comparison = compare.Kind("a mixture's experts", _replica, _run)

    @classmethod
    def probe(cls, module: nn.Module, row: Any, weight: Tensor, probes: Probes) -> str | None:
        # NOTE: not compared in the model's dtype: whether a clamp's argument rounds to the limit
        # decides whether its gradient is zero.
        reason = FusedExperts.probe(module, row, weight, probes)
        return reason or compare.strict_difference(module, cls.comparison, row)
