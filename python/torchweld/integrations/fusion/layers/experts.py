"""Runs the experts of transformers' mixtures on torchweld's op, by name or in a fused module.

A class under ``use_experts_implementation`` stacks the weights of all experts in one tensor for
each layer and has its gate in ``_apply_gate``. That function is run on numbers of all magnitudes,
and a gate of the op replaces the function only if it computes the same.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import _disable_current_modes
from transformers import activations
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from torchweld.integrations import recorder
from torchweld.integrations.attention.fallback import NAME, warn_once
from torchweld.integrations.fusion.probes import Probes
from torchweld.ops.experts import experts
from torchweld.ops.gated_linear import gated_activation
from torchweld.ops.stock import plain_tensors

from .composed_experts import composed_experts
from .fused_module import (
    FusedModule,
    instance_refusal,
    parameter_refusal,
    stock_class,
    stock_forward,
)
from .mlp import GATES
from .stock_modules import activation_name, hooked

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
_FUNCTIONS = {F.silu: "silu", F.gelu: "gelu", F.relu: "relu"}
_APPLIES_TO_LEFT = dict(GATES.values())
_OF_GATES = {gate: _ACTIVATIONS[activation] for activation, (gate, _) in GATES.items()}
# The names of the attributes that the gates of modules read.
_LIMITS, _ALPHAS = ("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")
# The inputs of a compared gate have these magnitudes, so that every clamp shows.
_MAGNITUDES = (1e-2, 1.0, 10.0, 1e3, 1e6)
_GROUPED = (torch.float32, torch.bfloat16, torch.float16)  # the dtypes of torch's grouped_mm
# The implementations that fuse replaces. The others were chosen for their kernels.
_REPLACED = (None, "eager", "grouped_mm", "batched_mm")


class Gate(NamedTuple):
    """A gate, as options of :func:`torchweld.experts`."""

    gate: str
    limit: float | None = None
    alpha: float | None = None
    interleaved: bool = False


def is_experts(module: nn.Module) -> bool:
    """Whether transformers' ``use_experts_implementation`` has decorated a module's class."""
    names = ("_apply_gate", "has_gate", "has_bias", "is_transposed")
    decorated = hasattr(stock_class(module).forward, "__wrapped__")
    return decorated and all(hasattr(module, name) for name in names)


def gate_of(module: nn.Module) -> Gate | str:
    """Returns the gate of a module's experts, or the reason why the op can't compute them."""
    act = getattr(module, "act_fn", None)
    activation = _FUNCTIONS.get(act) or activation_name(act)
    name = getattr(act, "__name__", type(act).__name__)
    if "_apply_gate" in vars(module):
        return "its gate was replaced on the instance"
    for child in module._modules.values():
        if hooked(child):
            return "a module inside has hooks"
    if module.has_gate:
        constants = [(each, _number(module, each)) for each in (*_LIMITS, *_ALPHAS)]
        return _gate(type(module)._apply_gate, activation, name, tuple(constants))
    if type(act) is activations.ReLUSquaredActivation:
        return Gate("relu_squared")
    return Gate(activation) if activation in _ACTIVATIONS else _unknown(name)


def _number(module: nn.Module, name: str) -> float | None:
    value = vars(module).get(name)
    if not isinstance(value, (int, float)):
        return None
    # NOTE: torch.compile makes a symbol of a float that has changed; this makes it a constant.
    compiling = torch.compiler.is_compiling()
    return torch.fx.experimental.symbolic_shapes.guard_scalar(value) if compiling else value


def _unknown(activation: str) -> str:
    return f"no fused form of the activation {activation}"


@torch.compiler.assume_constant_result
def _gate(
    apply_gate: Callable[..., Tensor],
    activation: str | None,
    name: str,
    constants: tuple[tuple[str, float | None], ...],
) -> Gate | str:
    return _cached_gate(apply_gate, activation, name, constants)


@functools.cache
def _cached_gate(
    apply_gate: Callable[..., Tensor],
    activation: str | None,
    name: str,
    constants: tuple[tuple[str, float | None], ...],
) -> Gate | str:
    """Returns the op's gate that computes the same as a class's ``_apply_gate``, or a reason.

    ``constants`` are the module's limit and alpha, by attribute name. A function that reads another
    attribute than these and ``act_fn`` is refused.
    """
    numbers = {key: value for key, value in constants if value is not None}
    module = types.SimpleNamespace(**numbers)
    if activation in _ACTIVATIONS:
        module.act_fn = _ACTIVATIONS[activation]
    limits = [float(numbers[key]) for key in _LIMITS if 0 < numbers.get(key, 0) < math.inf]
    alphas = [float(numbers[key]) for key in _ALPHAS if key in numbers]
    try:
        # NOTE: under the caller's modes, such as export's, tensors may have no values.
        with _disable_current_modes(), torch.no_grad():
            z = _numbers((*_MAGNITUDES, *(2 * limit for limit in limits)))
            result = apply_gate(module, z)
            for gate in _candidates(limits, alphas):
                if torch.allclose(result, _formula(gate, z), rtol=1e-5, atol=1e-12):
                    return gate
    except AttributeError as error:
        return _unknown(name) if error.name == "act_fn" else f"its gate reads {error.name}"
    except Exception as error:
        return f"its gate can't be compared ({type(error).__name__})"
    return f"{apply_gate.__qualname__} is none of the op's gates"


def _numbers(magnitudes: tuple[float, ...]) -> Tensor:
    """Returns ``(len(magnitudes), 512)`` evenly spread numbers; vmap refuses random numbers."""
    scale = torch.tensor(magnitudes, dtype=torch.float64, device="cpu")[:, None]
    steps = torch.arange(512 * len(scale), dtype=torch.float64, device="cpu").square()
    return scale * (2 * (steps * 0.6180339887).frac() - 1).view(-1, 512)


def _candidates(limits: list[float], alphas: list[float]) -> Iterator[Gate]:
    for interleaved in (False, True):
        for limit in (None, *limits):
            for gate in _OF_GATES:
                yield Gate(gate, limit, None, interleaved)
            for alpha in alphas:
                yield Gate("swiglu", limit, alpha, interleaved)


def _formula(gate: Gate, z: Tensor) -> Tensor:
    g, u = (z[..., ::2], z[..., 1::2]) if gate.interleaved else z.chunk(2, -1)
    if gate.limit is not None:
        g, u = g.clamp(max=gate.limit), u.clamp(-gate.limit, gate.limit)
    if gate.alpha is not None:
        return (u + 1) * g * torch.sigmoid(gate.alpha * g)
    return _OF_GATES[gate.gate](g) * u


def parameters_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Returns the experts' weights and biases by name, in the order of the op's arguments."""
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    weights = {name: getattr(module, name) for name in names}
    biases = {f"{name}_bias": getattr(module, f"{name}_bias") for name in names if module.has_bias}
    return weights | biases


def norm_of(module: nn.Module) -> nn.Module | None:
    """Returns the norm behind each expert, or None."""
    return module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None


def _activated(module: nn.Module, gate: Gate, z: Tensor) -> Tensor:
    if not module.has_gate:
        return module.act_fn(z)
    if gate != Gate(gate.gate):
        return module._apply_gate(z)
    g, u = z.chunk(2, -1)
    return gated_activation(*((g, u) if _APPLIES_TO_LEFT[gate.gate] else (u, g)), gate=gate.gate)


def composed(
    module: nn.Module, gate: Gate, x: Tensor, index: Tensor, weight: Tensor, **factors: Any
) -> Tensor:
    """Computes a module's experts as grouped products."""
    return composed_experts(
        x,
        index,
        weight,
        parameters_of(module),
        functools.partial(_activated, module, gate),
        transposed=module.is_transposed,
        norm=norm_of(module),
        **factors,
    )


def call_refusal(
    parameters: dict[str, Tensor | None], x: Tensor, index: Tensor, weight: Tensor
) -> str | None:
    """Returns why the op can't take the tensors of a call, or None."""
    if _has_any_global_hook():
        return "there are hooks on all modules"
    tensors = [*parameters.values()]
    casts = type(x) is Tensor and torch.is_autocast_enabled(x.device.type)
    if not plain_tensors(*tensors, *(() if casts else (x,))):
        return parameter_refusal({"hidden_states": x, **parameters})
    if type(index) is not Tensor or index.dtype not in (torch.int64, torch.int32):
        return "the ids of the experts are no plain int64 or int32 tensor"
    dtypes = (x.dtype, torch.promote_types(x.dtype, torch.float32))
    if type(weight) is not Tensor or not (casts or weight.dtype in dtypes):
        return "the router's weights are no plain tensor of the dtype of x or of its sums"
    if x.dim() != 2 or index.dim() != 2 or weight.shape != index.shape:
        return "its arguments are not (T, H), (T, k) and (T, k)"
    return None


def _run(
    module: nn.Module, stock: Callable[..., Tensor], name: str, x: Tensor, *routing: Tensor
) -> Tensor:
    """Runs the op or, if it can't serve the call, ``stock``, which reports call ``name``."""
    gate = gate_of(module)
    reason, parameters = gate, {}
    if not isinstance(gate, str):
        parameters = parameters_of(module)
        reason = call_refusal(parameters, x, *routing)
        if norm_of(module) is not None and torch._C._are_functorch_transforms_active():
            reason = "torch.func transforms the call, and a norm follows each expert"
    if reason is not None:
        if recorder.calls is not None:
            recorder.record(module, f"{name} runs: {reason}")
        warn_once(reason, name, op="torchweld::experts")
        return stock(module, x, *routing)
    if recorder.calls is not None:
        recorder.record(module)
    if norm_of(module) is not None:
        return composed(module, gate, x, *routing)
    gate_up, down, *biases = parameters.values()
    # NOTE: torch.compile can't trace `_asdict` of a constant.
    return experts(
        x,
        gate_up,
        down,
        *routing,
        *biases,
        gate=gate.gate,
        limit=gate.limit,
        alpha=gate.alpha,
        interleaved=gate.interleaved,
        transposed=module.is_transposed,
    )


def experts_forward(
    self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Computes the experts for ``experts_implementation="torchweld"``."""
    if self.down_proj.dtype in _GROUPED:
        stock, name = ALL_EXPERTS_FUNCTIONS["grouped_mm"], "transformers' grouped_mm"
    else:
        stock, name = stock_class(self).forward.__wrapped__, "the model's eager loop"
    return _run(self, stock, name, hidden_states, top_k_index, top_k_weights)


class FusedExperts(FusedModule):
    """The experts of a mixture, run by :func:`torchweld.experts`; the router stays as it is."""

    kind = "experts"

    @staticmethod
    def label(module: nn.Module, row: Any) -> str:
        first, down, *_ = parameters_of(module)
        parts = f"{first} -> {gate_of(module).gate} -> {down}"
        if norm_of(module) is not None:
            return f"grouped_linear ({parts} -> post_expert_norm)"
        return f"experts ({parts})"

    @staticmethod
    def refusal(module: nn.Module, row: Any) -> str | None:
        gate, implementation = gate_of(module), module.config._experts_implementation
        if implementation == NAME:
            return "fused already"
        if implementation not in _REPLACED:
            return (
                f'experts_implementation="{implementation}" was chosen; '
                'call model.set_experts_implementation("grouped_mm") first'
            )
        if isinstance(gate, str):
            return gate
        reason = instance_refusal(module)
        return reason and f'{reason}; use experts_implementation="{NAME}"'

    @staticmethod
    def op_parameters(module: nn.Module, row: Any) -> dict[str, Tensor | None]:
        return parameters_of(module)

    @staticmethod
    def probe(module: nn.Module, row: Any, weight: Tensor, probes: Probes) -> str | None:
        gate = gate_of(module)
        if norm_of(module) is not None:
            return probes.refusal("grouped_linear", weight)
        return probes.refusal("experts", weight, gate.gate, gate.limit, gate.alpha)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if len(args) != 3 or kwargs:
            return stock_forward(self, *args, **kwargs)
        return _run(self, stock_forward, "the stock forward", *args)
