"""PEFT's LoRA on the weights of a mixture's experts: ``x A B`` beside the products of the experts.

PEFT's ``ParamWrapper`` puts ``W + A B`` of all experts in place of a weight W for each call, and
backward computes the whole gradient of W. Here W stays as it is: each product of the experts gets
the two small products of its factors, and backward computes the gradients of x, A and B.

Importing this module does not import peft.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from transformers.integrations.moe import use_experts_implementation

from torchweld.integrations.attention.fallback import NAME
from torchweld.integrations.fusion.layers.composed_experts import Factors
from torchweld.integrations.fusion.layers.experts import (
    FusedExperts,
    call_refusal,
    composed,
    gate_of,
    is_experts,
    parameters_of,
)
from torchweld.integrations.fusion.layers.fused_module import (
    FusedModule,
    instance_refusal,
    is_fused,
    stock_class,
    stock_forward,
)
from torchweld.integrations.fusion.probes import Probes
from torchweld.ops.stock import plain_tensors, untouched

from . import recorder

_DECORATED = use_experts_implementation(
    type("Experts", (nn.Module,), {"forward": lambda self: None})
).forward.__code__


def _nested(wrapper: nn.Module) -> tuple[list[nn.Module], nn.Module]:
    """Returns a wrapper with those inside of it, and the module in the innermost one."""
    wrappers, layer = [wrapper], wrapper.base_layer
    while stock_class(layer) is stock_class(wrapper):
        wrappers.append(layer)
        layer = layer.base_layer
    return wrappers, layer


def _refusal(wrappers: list[nn.Module], experts: nn.Module) -> str | None:
    """Returns why the experts in wrappers can't be computed with factors, or None."""
    cls = stock_class(experts)
    if not is_experts(experts) or cls.forward.__code__ is not _DECORATED:
        return f"{cls.__qualname__} is none of the experts that fuse knows"
    gate = gate_of(experts)
    if isinstance(gate, str):
        return gate
    if is_parametrized(experts):
        return "the weights of its experts are parametrised"
    reason = next(filter(None, map(instance_refusal, (*wrappers, experts))), None)
    if reason is not None or not untouched(*wrappers[1:], experts):
        return reason or "a module inside has hooks"
    for each in wrappers:
        if each.parameter_name not in list(parameters_of(experts))[:2] or each.num_experts == 1:
            return f"{each.parameter_name} is no weight of several experts"
        if not hasattr(each, "get_delta_factors"):
            return "this version of peft does not give the factors of an adapter"
    return None


def _runs_op(experts: nn.Module) -> bool:
    """Whether experts run torchweld's op, in a fused class or by name."""
    return isinstance(experts, FusedExperts) or experts.config._experts_implementation == NAME


def _factors(wrappers: list[nn.Module], transposed: bool) -> dict[str, list[Factors]] | str:
    """Returns the factors of the active adapters by parameter, or why there are none."""
    factors: dict[str, list[Factors]] = {}
    for wrapper in wrappers:
        if wrapper.disable_adapters or wrapper.merged:
            return "its adapters are disabled or merged"
        for name in wrapper.active_adapters:
            if name not in wrapper.lora_A:
                continue
            if not plain_tensors(wrapper.lora_A[name].weight, wrapper.lora_B[name].weight):
                return f"the adapter {name} has no plain tensors of one dtype"
            # PEFT adds scaling * left @ right to the weight, in the weight's layout.
            left, right, scaling = wrapper.get_delta_factors(name)
            first, second = (left.mT, right.mT) if transposed else (right, left)
            adapter = Factors(first.contiguous(), second.contiguous(), scaling)
            factors.setdefault(wrapper.parameter_name, []).append(adapter)
    return factors or "it has no active adapter"


class FusedParamWrapper(FusedModule):
    """PEFT's LoRA on a weight of experts; the outermost wrapper computes them with all factors."""

    kind = "lora"

    @staticmethod
    def label(module: nn.Module, row: None) -> str:
        return f"grouped_linear ({module.parameter_name} + lora_A -> lora_B)"

    @staticmethod
    def probe(module: nn.Module, row: None, weight: Tensor, probes: Probes) -> str | None:
        return probes.refusal("grouped_linear", weight)

    @staticmethod
    def refusal(module: nn.Module, row: None) -> str | None:
        wrappers, experts = _nested(module)
        reason = _refusal(wrappers, experts)
        if reason is None and not _runs_op(experts):
            reason = FusedExperts.refusal(experts, row)
        return reason

    @staticmethod
    def op_parameters(module: nn.Module, row: None) -> dict[str, Tensor | None]:
        return parameters_of(module.get_base_layer())

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        wrappers, experts = _nested(self)
        reason = _refusal(wrappers, experts)
        if len(args) != 2 or kwargs or not is_fused(self):
            reason = "it was called with other arguments than its experts have"
        elif torch._C._are_functorch_transforms_active():
            reason = "torch.func transforms the call"
        elif reason is None and not _runs_op(experts):
            reason = "its experts are not fused"
        reason = reason or call_refusal(parameters_of(experts), x, *args)
        factors = reason or _factors(wrappers, experts.is_transposed)
        if isinstance(factors, str):
            if recorder.calls is not None:
                recorder.record(self, f"PEFT's forward runs: {factors}")
            return stock_forward(self, x, *args, **kwargs)
        for wrapper in wrappers if recorder.calls is not None else ():
            recorder.record(wrapper)
        return composed(experts, gate_of(experts), x, *args, factors=factors)
