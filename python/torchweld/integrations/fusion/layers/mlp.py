"""The gated MLP of Llama-like decoders on torchweld's ops; the other modules are in decoder.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from torchweld._library import ops
from torchweld.integrations import recorder
from torchweld.integrations.fusion.probes import Probes
from torchweld.ops.stock import plain_tensors

from .fused_module import ROW, FusedModule, instance_refusal, stock_forward
from .linears import copied, has_rows, local, mesh_of, operands, own, why_called
from .stock_modules import activation_name, hooked, weight_and_bias

# For each activation: the gate that applies it, and whether the gate applies it to the left branch.
GATES = {
    "silu": ("swiglu", True),
    "gelu": ("geglu", False),
    "gelu_tanh": ("geglu_tanh", False),
    "relu": ("reglu", False),
}


class MLP(NamedTuple):
    """The attributes of a family's gated MLP."""

    packed: bool
    activation: str


class FusedMLP(FusedModule):
    """A gated MLP as :func:`torchweld.gated_mlp`.

    Where ``down_proj`` must be called itself, for example with LoRA, its two products and gate are
    :func:`torchweld.gated_linear_pair`; where one layer has both weights and the gate applies silu
    they are :func:`torchweld.gated_linear`. Where the layers in front of the gate must be called,
    the gate is :func:`torchweld.gated_activation`.
    """

    kind = "mlp"

    @staticmethod
    def label(module: nn.Module, row: MLP) -> str:
        layers = _gate_layers(module, row)
        names = ", ".join(layers)
        called = why_called(layers)
        if called:
            return f"gated_activation ({row.activation}; {called})"
        if _is_gated_linear(module, row):
            return f"gated_linear ({names} -> {row.activation})"
        if fuses_down(module, next(iter(layers.values()))):
            return f"gated_mlp ({names} -> {row.activation} -> down_proj)"
        return f"gated_linear_pair ({names} -> {row.activation})"

    @staticmethod
    def probe(module: nn.Module, row: MLP, weight: Tensor, probes: Probes) -> str | None:
        gate, _ = gate_of(module, row)
        if why_called(_gate_layers(module, row)):
            return probes.refusal("gated_activation", weight, gate)
        return probes.refusal("gated_linear", weight, gate, _is_gated_linear(module, row))

    @staticmethod
    def refusal(module: nn.Module, row: MLP) -> str | None:
        if gate_of(module, row) is None:
            act = type(getattr(module, row.activation)).__name__
            return f"no fused form of the activation {act}"
        return instance_refusal(module)

    @staticmethod
    def op_parameters(module: nn.Module, row: MLP) -> dict[str, Tensor | None]:
        layers = _gate_layers(module, row)
        if why_called(layers):
            return {}
        return {
            f"{name}.{key}": own(layer, key)
            for name, layer in layers.items()
            for key in ("weight", "bias")
        }

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        row = getattr(self, ROW, None)
        gate = None if row is None else gate_of(self, row)
        if gate is None or hooked(self._modules[row.activation]) or _has_any_global_hook():
            return stock_forward(self, *args, **kwargs)
        if kwargs or not args or args[1:] or not isinstance(args[0], Tensor):
            return stock_forward(self, *args, **kwargs)
        (hidden_states,) = args
        layers, down = [*_gate_layers(self, row).values()], self._modules["down_proj"]
        found = operands(layers, hidden_states)
        if found is None:
            return _call_layers(self, row, hidden_states)
        if recorder.calls is not None:
            recorder.record(self)
        (name, act_left), (weights, biases, mesh) = gate, found
        x = hidden_states if mesh is None else copied(mesh, hidden_states)[0]
        if row.packed:
            if act_left:
                return down(ops.gated_linear(x, *weights, *biases, gate=name))
            weights, biases = halves(*weights), halves(*biases)
        if not act_left:
            weights.reverse(), biases.reverse()
        if not fuses_down(self, layers[0]):
            return down(ops.gated_linear_pair(x, *weights, *biases, gate=name))
        if mesh is None:
            weight, bias = weight_and_bias(down)
            return ops.gated_mlp(x, *weights, weight, *biases, bias, gate=name)
        return down.summed(ops.gated_mlp(x, *weights, local(down), *biases, gate=name))


def fuses_down(mlp: nn.Module, gate: nn.Module) -> bool:
    """Whether down_proj is plain enough to be computed in the op of the gate's layers."""
    down, mesh = mlp._modules["down_proj"], mesh_of(gate)
    if not has_rows(down, mesh):
        return False
    if mesh is None:
        return plain_tensors(gate.weight, *weight_and_bias(down))
    return plain_tensors(own(gate, "weight"), own(down, "weight"), own(down, "bias"))


def gate_of(mlp: nn.Module, row: MLP) -> tuple[str, bool] | None:
    """The gate of an MLP: its name, and whether gate_proj is its left argument."""
    return GATES.get(activation_name(mlp._modules.get(row.activation)))


def _is_gated_linear(mlp: nn.Module, row: MLP) -> bool:
    """Whether one op takes the packed weight as it is: gate_proj is its left half."""
    return row.packed and gate_of(mlp, row)[1]


def halves(packed: Tensor | None) -> list[Tensor | None]:
    """The parts of a packed weight or bias, as views whose gradient is made in one copy."""
    return [None, None] if packed is None else list(packed.unflatten(0, (2, -1)).unbind())


def _gate_layers(mlp: nn.Module, row: MLP) -> dict[str, nn.Module]:
    names = ("gate_up_proj",) if row.packed else ("gate_proj", "up_proj")
    return {name: mlp._modules[name] for name in names}


def _call_layers(mlp: nn.Module, row: MLP, x: Tensor) -> Tensor:
    """The MLP whose layers are called; the compiler joins its gate with their last operations."""
    if torch.compiler.is_compiling():
        return stock_forward(mlp, x)
    projected = [layer(x) for layer in _gate_layers(mlp, row).values()]
    left, right = projected[0].chunk(2, -1) if row.packed else projected
    gate, act_left = gate_of(mlp, row)
    if not plain_tensors(left, right) or left.shape != right.shape:
        return mlp.down_proj(mlp._modules[row.activation](left) * right)
    if recorder.calls is not None:
        recorder.record(mlp)
    pair = (left, right) if act_left else (right, left)
    return mlp.down_proj(ops.gated_activation(*pair, gate=gate))
