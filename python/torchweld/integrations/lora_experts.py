"""PEFT's LoRA on the weights of a mixture's experts: ``x A B`` beside the products of the experts.

PEFT's ``ParamWrapper`` puts ``W + A B`` of all experts in place of a weight W for each call, and
backward computes the whole gradient of W. Here W stays as it is: each product of the experts gets
the two small products of its factors, and backward computes the gradients of x, A and B.

Importing this module does not import peft.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from transformers.integrations.moe import use_experts_implementation

from torchweld._autograd import once_differentiable
from torchweld.integrations.attention.fallback import NAME
from torchweld.integrations.fusion.layers.experts import (
    FusedExperts,
    Gate,
    call_refusal,
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
from torchweld.integrations.fusion.layers.mlp import GATES
from torchweld.integrations.fusion.probes import Probes
from torchweld.ops.gated_linear import gated_activation
from torchweld.ops.grouped_linear import grouped_linear
from torchweld.ops.stock import plain_tensors, untouched

from . import recorder

_APPLIES_TO_LEFT = dict(GATES.values())
_DECORATED = use_experts_implementation(
    type("Experts", (nn.Module,), {"forward": lambda self: None})
).forward.__code__


class Factors(NamedTuple):
    """An adapter of one weight: ``scaling * second[e] @ first[e]`` is added to that of expert e."""

    first: Tensor  # (E, r, K)
    second: Tensor  # (E, N, r)
    scaling: float


class _Gather(torch.autograd.Function):
    """Copies every token to the rows of its k experts; backward adds up these rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x.index_select(0, order // k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        dx = drows.index_select(0, inverse).unflatten(0, (-1, ctx.k)).sum(1)
        return dx, None, None, None


class _Combine(torch.autograd.Function):
    """Computes ``y[t] = sum(weight[t, j] * rows[inverse[t * k + j]] for j in range(k))``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, order, inverse)
        k, dtype = weight.shape[1], torch.promote_types(rows.dtype, torch.float32)
        y = rows.new_zeros(weight.shape[0], rows.shape[1], dtype=dtype)
        for j in range(k):
            z = rows.index_select(0, inverse[j::k]).to(dtype)
            y = torch.addcmul(y, z, weight[:, j, None].to(dtype))
        # NOTE: torch.compile loses the gradient of a result that is written in place, or that `to`
        # returns as it is.
        return y if y.dtype == rows.dtype else y.to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, order, inverse = ctx.saved_tensors
        drows, dweight = dy.index_select(0, order // weight.shape[1]), None
        if ctx.needs_input_grad[1]:
            products = (rows * drows).sum(-1, dtype=torch.promote_types(rows.dtype, torch.float32))
            dweight = products.index_select(0, inverse).view(weight.shape).to(weight.dtype)
        return drows.mul_(weight.flatten()[order, None]), dweight, None, None


def lora_experts(
    module: nn.Module,
    gate: Gate,
    factors: dict[str, list[Factors]],
    x: Tensor,
    index: Tensor,
    weight: Tensor,
) -> Tensor:
    """Computes a module's experts with adapters of its weights, by the names of the weights."""
    (first, w), (second, v), *biases = parameters_of(module).items()
    w_bias, v_bias = [bias for _, bias in biases] or (None, None)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    experts, k = w.shape[0], index.shape[1]
    ids = index.flatten()
    ids = ids.masked_fill((ids < 0) | (ids >= experts), experts)
    ids, order = ids.sort(stable=True)
    inverse = order.argsort()
    numbers = torch.arange(experts, device=ids.device, dtype=ids.dtype)
    offsets = torch.searchsorted(ids, numbers, right=True, out_int32=True)
    rows = _Gather.apply(x, order, inverse, k)
    z = _linear(rows, w, w_bias, factors.get(first, ()), offsets, module.is_transposed)
    act = _activated(module, gate, z)
    rows = _linear(act, v, v_bias, factors.get(second, ()), offsets, module.is_transposed)
    return _Combine.apply(rows, weight, order, inverse)


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    factors: Any,
    offsets: Tensor,
    transposed: bool,
) -> Tensor:
    y = grouped_linear(x, weight.mT if transposed else weight, offsets, bias)
    for each in factors:
        hidden = grouped_linear(x, each.first, offsets) * each.scaling
        y += grouped_linear(hidden, each.second, offsets)
    return y


def _activated(module: nn.Module, gate: Gate, z: Tensor) -> Tensor:
    if not module.has_gate:
        return module.act_fn(z)
    if gate != Gate(gate.gate):
        return module._apply_gate(z)
    g, u = z.chunk(2, -1)
    return gated_activation(*((g, u) if _APPLIES_TO_LEFT[gate.gate] else (u, g)), gate=gate.gate)


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
        factors: Any = _refusal(wrappers, experts)
        if len(args) != 2 or kwargs or not is_fused(self):
            factors = "it was called with other arguments than its experts have"
        elif torch._C._are_functorch_transforms_active():
            factors = "torch.func transforms the call"
        elif factors is None and not _runs_op(experts):
            factors = "its experts are not fused"
        factors = factors or call_refusal(parameters_of(experts), x, *args)
        factors = factors or _factors(wrappers, experts.is_transposed)
        if isinstance(factors, str):
            if recorder.calls is not None:
                recorder.record(self, f"PEFT's forward runs: {factors}")
            return stock_forward(self, x, *args, **kwargs)
        for wrapper in wrappers if recorder.calls is not None else ():
            recorder.record(wrapper)
        return lora_experts(experts, gate_of(experts), factors, x, *args)
