"""The MLP of encoders and older decoders, without a gate or with one, on torchweld's ops."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from torchweld._library import ops
from torchweld.integrations import recorder
from torchweld.integrations.fusion.probes import Probes

from .fused_module import ROW, FusedModule, instance_refusal, stock_forward
from .linears import Operands, copied, operands, own, why_called
from .mlp import GATES, halves
from .stock_modules import activation_name, hooked

# On a CPU torch's layer and activation take as long as the op.
_DEVICES = ("cuda",)


class PlainMLP(NamedTuple):
    """The modules of an MLP, by name.

    Attributes:
        first: Its first layer, or the two whose results a gate multiplies.
        activation: None if the forward itself computes gelu.
        second: None if nothing follows.
        activated: The result, "left" or "right", whose activation the gate multiplies by the other;
            they are halves if the first layer packs them. None if it has no gate.
    """

    first: tuple[str, ...]
    activation: str | None
    second: str | None
    activated: str | None = None


class FusedPlainMLP(FusedModule):
    """An MLP whose first layer and activation are :func:`torchweld.linear`.

    With a gate they are :func:`torchweld.gated_linear`, or :func:`torchweld.gated_linear_pair` if
    two layers have the weights or one has them in the other order. The second layer is called.
    Where a dropout in the MLP is on, the stock forward runs.
    """

    kind = "mlp"

    @staticmethod
    def label(module: nn.Module, row: PlainMLP) -> str:
        return f"{_op(module, row)} ({', '.join(row.first)} -> {row.activation or 'gelu'})"

    @staticmethod
    def probe(module: nn.Module, row: PlainMLP, weight: Tensor, probes: Probes) -> str | None:
        activation, op = activation_of(module, row), _op(module, row)
        if op != "linear":
            return probes.refusal("gated_linear", weight, activation, op == "gated_linear")
        reason = probes.refusal("linear", weight, activation)
        if reason is None and weight.device.type not in _DEVICES:
            reason = f"torch's linear layer and activation are as fast on {weight.device.type}"
        return reason

    @staticmethod
    def refusal(module: nn.Module, row: PlainMLP) -> str | None:
        if activation_of(module, row) is None:
            act = type(module._modules[row.activation]).__name__
            return f"no fused form of the activation {act}"
        if any(map(hooked, _between(module, row))):
            return "a module in it has hooks, which would see other values"
        if _is_mixed(module, row):
            return "its layers have different dtypes"
        return why_called(_layers(module, row)) or instance_refusal(module)

    @staticmethod
    def op_parameters(module: nn.Module, row: PlainMLP) -> dict[str, Tensor | None]:
        return {
            f"{name}.{key}": own(layer, key)
            for name, layer in _layers(module, row).items()
            for key in ("weight", "bias")
        }

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        row = getattr(self, ROW, None)
        activation = None if row is None else activation_of(self, row)
        found = None
        if activation is not None and len(args) == 1 and not kwargs:
            found = _operands(self, row, args[0])
        # Each process would have columns of one half of a packed layer alone.
        packed = row.activated is not None and len(row.first) == 1
        if found is None or (packed and found.mesh is not None):
            if recorder.calls is not None and (len(args) != 1 or kwargs):
                recorder.record(self, "the stock forward runs: it was called with more than x")
            return stock_forward(self, *args, **kwargs)
        if recorder.calls is not None:
            recorder.record(self)
        weights, biases, mesh = found
        (x,) = copied(mesh, args[0])
        op = _op(self, row)
        if op == "linear":
            y = ops.linear(x, *weights, *biases, activation=activation)
        elif op == "gated_linear":
            y = ops.gated_linear(x, *weights, *biases, gate=activation)
        else:
            if packed:
                weights, biases = halves(*weights), halves(*biases)
            if _is_swapped(self, row):
                weights.reverse(), biases.reverse()
            y = ops.gated_linear_pair(x, *weights, *biases, gate=activation)
        return y if row.second is None else self._modules[row.second](y)


def _name_of(mlp: nn.Module, row: PlainMLP) -> str | None:
    if row.activation is None:
        return "gelu_tanh" if getattr(mlp, "approximate", "none") == "tanh" else "gelu"
    return activation_name(mlp._modules.get(row.activation))


def activation_of(mlp: nn.Module, row: PlainMLP) -> str | None:
    """torchweld's name of the activation or the gate of an MLP, None if it has no fused form."""
    name = _name_of(mlp, row)
    if row.activated is not None:
        return GATES.get(name, (None,))[0]
    return None if name == "none" else name


def _is_swapped(mlp: nn.Module, row: PlainMLP) -> bool:
    """Whether the activated result is the gate's other argument."""
    return GATES[_name_of(mlp, row)][1] != (row.activated == "left")


def _op(mlp: nn.Module, row: PlainMLP) -> str:
    """The op that runs the first layers and the activation."""
    if row.activated is None:
        return "linear"
    pair = len(row.first) == 2 or _is_swapped(mlp, row)
    return "gated_linear_pair" if pair else "gated_linear"


def _layers(mlp: nn.Module, row: PlainMLP) -> dict[str, nn.Module]:
    return {name: mlp._modules[name] for name in row.first}


def _between(mlp: nn.Module, row: PlainMLP) -> list[nn.Module]:
    """The modules that the fused forward does not call: the activation and dropouts."""
    return [m for name, m in mlp._modules.items() if name not in (*row.first, row.second)]


def _is_mixed(mlp: nn.Module, row: PlainMLP) -> bool:
    """Whether the weights have several dtypes, between which T5 casts."""
    names = *row.first, row.second
    weights = [getattr(mlp._modules.get(name), "weight", None) for name in names]
    return len({w.dtype for w in weights if isinstance(w, Tensor) and w.is_floating_point()}) > 1


def _operands(mlp: nn.Module, row: PlainMLP, x: Any) -> Operands | None:
    """The operands of the first layers, or None if the stock forward must run."""
    between = _between(mlp, row)
    if not isinstance(x, Tensor) or any(map(hooked, between)) or _is_mixed(mlp, row):
        return None
    for module in between:
        p = getattr(module, "p", 0)
        if p and (module.training or mlp.training):
            if recorder.calls is not None:
                recorder.record(mlp, f"the stock forward runs: Dropout({p}) is on")
            return None
    return operands(list(_layers(mlp, row).values()), x)
