"""Runs MLPs on torchweld's ops, with a gate, such as Llama's, and without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from torchweld._library import ops
from torchweld.integrations import recorder
from torchweld.integrations.fusion.probes import Probes
from torchweld.ops.stock import plain_tensors

from .fused_module import ROW, FusedModule, instance_refusal, stock_forward
from .linears import Operands, copied, has_rows, local, mesh_of, operands, own, why_called
from .stock_modules import activation_name, hooked, weight_and_bias, weight_of

# For each activation: the gate that applies it, and whether the gate applies it to the left branch.
GATES = {
    "silu": ("swiglu", True),
    "gelu": ("geglu", False),
    "gelu_tanh": ("geglu_tanh", False),
    "relu": ("reglu", False),
}
# The layers in front of the gate of Llama-like models: two, or one that packs both.
GATE_LAYERS = (("gate_proj", "up_proj"), ("gate_up_proj",))
# The op gains nothing on a CPU: torch's layer and activation take as long.
_DEVICES = ("cuda",)


class MLP(NamedTuple):
    """Names the modules of an MLP."""

    first: tuple[str, ...]  # its first layer, or the two whose results a gate multiplies
    activation: str | None  # None if the forward itself calls a function
    second: str | None  # None if nothing follows
    # The result, "left" or "right", that gets the activation before the gate multiplies both. A
    # packed first layer computes both as halves. None without a gate.
    activated: str | None = None
    called: str = "gelu"  # the function, torchweld's name of the activation

    @property
    def function(self) -> str:
        """The name of the activation's module, or of the function that the forward calls."""
        return self.activation or self.called

    @property
    def packed(self) -> bool:
        """Whether one layer has the weights of both branches of a gate."""
        return self.activated is not None and len(self.first) == 1


class FusedPlainMLP(FusedModule):
    """An MLP whose first layer and activation run as :func:`torchweld.linear`.

    An MLP with a gate runs :func:`torchweld.gated_linear`, or :func:`torchweld.gated_linear_pair`
    if two layers hold the weights or one packs them in the other order. The second layer is called.
    If a dropout in the MLP is on, the stock forward runs.
    """

    kind = "mlp"

    @staticmethod
    def label(module: nn.Module, row: MLP) -> str:
        return f"{_op(module, row)} ({', '.join(row.first)} -> {row.function})"

    @staticmethod
    def probe(module: nn.Module, row: MLP, weight: Tensor, probes: Probes) -> str | None:
        activation, op = activation_of(module, row), _op(module, row)
        if op != "linear":
            return probes.refusal("gated_linear", weight, activation, op == "gated_linear")
        reason = probes.refusal("linear", weight, activation)
        if reason is None and weight.device.type not in _DEVICES:
            reason = f"torch's linear layer and activation are as fast on {weight.device.type}"
        return reason

    @staticmethod
    def refusal(module: nn.Module, row: MLP) -> str | None:
        reason = _activation_refusal(module, row)
        if reason is not None:
            return reason
        called = *row.first, row.second
        if any(hooked(child) for name, child in module._modules.items() if name not in called):
            return "a module in it has hooks, which would see other values"
        if _is_mixed(module, row):
            return "its layers have different dtypes"
        return why_called(_layers(module, row)) or instance_refusal(module)

    @staticmethod
    def op_parameters(module: nn.Module, row: MLP) -> dict[str, Tensor | None]:
        layers = _layers(module, row)
        if why_called(layers):
            return {}
        return {
            f"{name}.{key}": own(layer, key)
            for name, layer in layers.items()
            for key in ("weight", "bias")
        }

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        row = getattr(self, ROW, None)
        activation = None if row is None else activation_of(self, row)
        found = None
        if activation is not None and len(args) == 1 and not kwargs:
            found = _operands(self, row, args[0])
        # A process's shard of a packed layer would have columns of one half alone.
        if found is None or (found.mesh is not None and row.packed):
            if recorder.calls is not None and (len(args) != 1 or kwargs):
                recorder.record(self, "the stock forward runs: it was called with more than x")
            return stock_forward(self, *args, **kwargs)
        if recorder.calls is not None:
            recorder.record(self)
        x = args[0] if found.mesh is None else copied(found.mesh, args[0])[0]
        if row.activated is None:
            y = ops.linear(x, *found.weights, *found.biases, activation=activation)
        else:
            y = _gated_linear(x, row, found, *gate_of(self, row))
        return y if row.second is None else self._modules[row.second](y)


class FusedMLP(FusedPlainMLP):
    """A gated MLP that runs :func:`torchweld.gated_mlp`.

    If the second layer must be called, for example with LoRA, :func:`torchweld.gated_linear_pair`
    computes the two products in front of it and the gate. If one layer packs both weights and the
    activation is silu, :func:`torchweld.gated_linear` does. If the layers in front of the gate must
    be called, :func:`torchweld.gated_activation` computes the gate.
    """

    @staticmethod
    def label(module: nn.Module, row: MLP) -> str:
        layers = _layers(module, row)
        called = why_called(layers)
        if called:
            return f"gated_activation ({row.function}; {called})"
        if _op(module, row) != "gated_linear" and fuses_second(module, row):
            return f"gated_mlp ({', '.join(layers)} -> {row.function} -> {row.second})"
        return FusedPlainMLP.label(module, row)

    @staticmethod
    def probe(module: nn.Module, row: MLP, weight: Tensor, probes: Probes) -> str | None:
        if why_called(_layers(module, row)):
            return probes.refusal("gated_activation", weight, activation_of(module, row))
        return FusedPlainMLP.probe(module, row, weight, probes)

    @staticmethod
    def refusal(module: nn.Module, row: MLP) -> str | None:
        return _activation_refusal(module, row) or instance_refusal(module)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        row = getattr(self, ROW, None)
        gate = None if row is None else gate_of(self, row)
        if gate is None or _has_any_global_hook():
            return stock_forward(self, *args, **kwargs)
        if row.activation is not None and hooked(self._modules[row.activation]):
            return stock_forward(self, *args, **kwargs)
        if kwargs or not args or args[1:] or not isinstance(args[0], Tensor):
            return stock_forward(self, *args, **kwargs)
        (x,) = args
        layers, down = [self._modules[name] for name in row.first], self._modules[row.second]
        found = operands(layers, x)
        if found is None:
            return _call_layers(self, row, x)
        if recorder.calls is not None:
            recorder.record(self)
        (name, swapped), (weights, biases, mesh) = gate, found
        x = x if mesh is None else copied(mesh, x)[0]
        if row.packed and not swapped or not fuses_second(self, row):
            return down(_gated_linear(x, row, found, *gate))
        weights, biases = _branches(weights, swapped), _branches(biases, swapped)
        if mesh is None:
            weight, bias = weight_and_bias(down)
            return ops.gated_mlp(x, *weights, weight, *biases, bias, gate=name)
        return down.summed(ops.gated_mlp(x, *weights, local(down), *biases, gate=name))


def fuses_second(mlp: nn.Module, row: MLP) -> bool:
    """Whether the second layer is plain enough to be computed in the op of the gate's layers."""
    gate, down = mlp._modules[row.first[0]], mlp._modules[row.second]
    mesh = mesh_of(gate)
    if not has_rows(down, mesh):
        return False
    if mesh is None:
        return plain_tensors(weight_of(gate), *weight_and_bias(down))
    return plain_tensors(own(gate, "weight"), own(down, "weight"), own(down, "bias"))


def _name_of(mlp: nn.Module, row: MLP) -> str | None:
    if row.activation is not None:
        return activation_name(mlp._modules.get(row.activation))
    tanh = getattr(mlp, "approximate", "none") == "tanh"
    return "gelu_tanh" if row.called == "gelu" and tanh else row.called


def gate_of(mlp: nn.Module, row: MLP) -> tuple[str, bool] | None:
    """Returns an MLP's gate, and whether its two arguments are swapped, or None if unknown."""
    name, acts_on_left = GATES.get(_name_of(mlp, row), (None, False))
    return None if name is None else (name, acts_on_left != (row.activated == "left"))


def activation_of(mlp: nn.Module, row: MLP) -> str | None:
    """Returns torchweld's name of an MLP's activation or gate, None if it has no fused form."""
    if row.activated is not None:
        return (gate_of(mlp, row) or (None,))[0]
    name = _name_of(mlp, row)
    return None if name == "none" else name


def _activation_refusal(mlp: nn.Module, row: MLP) -> str | None:
    if activation_of(mlp, row) is not None:
        return None
    return f"no fused form of the activation {type(mlp._modules[row.activation]).__name__}"


def _op(mlp: nn.Module, row: MLP) -> str:
    """Returns the op that runs the first layers and the activation."""
    if row.activated is None:
        return "linear"
    return "gated_linear" if row.packed and not gate_of(mlp, row)[1] else "gated_linear_pair"


def _gated_linear(x: Tensor, row: MLP, found: Operands, gate: str, swapped: bool) -> Tensor:
    if row.packed and not swapped:
        return ops.gated_linear(x, *found.weights, *found.biases, gate=gate)
    weights, biases = (_branches(t, swapped) for t in (found.weights, found.biases))
    return ops.gated_linear_pair(x, *weights, *biases, gate=gate)


def _branches(tensors: Sequence[Tensor | None], swapped: bool) -> Sequence[Tensor | None]:
    """Returns the tensors of a gate's left and right argument; one tensor may pack both."""
    if len(tensors) == 1:  # unbind's views, whose gradient is one copy
        packed = tensors[0]
        tensors = [None, None] if packed is None else packed.unflatten(0, (2, -1)).unbind()
    return tensors[::-1] if swapped else tensors


def _layers(mlp: nn.Module, row: MLP) -> dict[str, nn.Module]:
    return {name: mlp._modules[name] for name in row.first}


def _call_layers(mlp: nn.Module, row: MLP, x: Tensor) -> Tensor:
    """Runs an MLP that must call its layers; the gate is an op, except under torch.compile."""
    if torch.compiler.is_compiling():
        return stock_forward(mlp, x)
    projected = [layer(x) for layer in _layers(mlp, row).values()]
    left, right = projected[0].chunk(2, -1) if row.packed else projected
    gate, swapped = gate_of(mlp, row)
    if plain_tensors(left, right) and left.shape == right.shape:
        if recorder.calls is not None:
            recorder.record(mlp)
        gated = ops.gated_activation(*_branches((left, right), swapped), gate=gate)
    else:
        activate = (
            getattr(F, row.called) if row.activation is None else mlp._modules[row.activation]
        )
        gated = activate(left) * right
    return mlp._modules[row.second](gated)


def _is_mixed(mlp: nn.Module, row: MLP) -> bool:
    """Whether the weights have several dtypes, between which T5 casts."""
    layers = [mlp._modules[name] for name in (*row.first, row.second) if name in mlp._modules]
    weights = [weight_of(layer) for layer in layers]
    return len({w.dtype for w in weights if isinstance(w, Tensor) and w.is_floating_point()}) > 1


def _operands(mlp: nn.Module, row: MLP, x: Any) -> Operands | None:
    """Returns the operands of the first layers, or None if the stock forward must run."""
    if not isinstance(x, Tensor) or _is_mixed(mlp, row):
        return None
    for name, module in mlp._modules.items():
        if name in row.first or name == row.second:
            continue
        if hooked(module):
            return None
        p = 0 if name == row.activation else getattr(module, "p", 0)
        if p and (module.training or mlp.training):
            if recorder.calls is not None:
                recorder.record(mlp, f"the stock forward runs: Dropout({p}) is on")
            return None
    return operands([mlp._modules[name] for name in row.first], x)
