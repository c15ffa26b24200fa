"""The MLP of encoders and older decoders, which has no gate or a packed one, on torchweld's ops."""

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
        first: Its first layer.
        activation: None if the forward itself computes gelu.
        second: None if it has one layer.
        activated: The half of the first layer's result, "left" or "right", whose activation gates
            the other; None if it has no gate.
    """

    first: str
    activation: str | None
    second: str | None
    activated: str | None = None


class FusedPlainMLP(FusedModule):
    """An MLP whose first layer and activation are :func:`torchweld.linear`.

    With a gate they are :func:`torchweld.gated_linear`, or :func:`torchweld.gated_linear_pair` if
    the gate has the halves in the other order. The second layer is called. Where a dropout in the
    MLP is on, the stock forward runs.
    """

    kind = "mlp"

    @staticmethod
    def label(module: nn.Module, row: PlainMLP) -> str:
        op = "linear"
        if row.activated is not None:
            op = "gated_linear_pair" if _is_swapped(module, row) else "gated_linear"
        return f"{op} ({row.first} -> {row.activation or 'gelu'})"

    @staticmethod
    def probe(module: nn.Module, row: PlainMLP, weight: Tensor, probes: Probes) -> str | None:
        activation = activation_of(module, row)
        if row.activated is not None:
            packed = not _is_swapped(module, row)
            return probes.refusal("gated_linear", weight, activation, packed)
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
        called = why_called({row.first: module._modules[row.first]})
        return called or instance_refusal(module)

    @staticmethod
    def op_parameters(module: nn.Module, row: PlainMLP) -> dict[str, Tensor | None]:
        first = module._modules[row.first]
        return {f"{row.first}.{key}": own(first, key) for key in ("weight", "bias")}

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        row = getattr(self, ROW, None)
        activation = None if row is None else activation_of(self, row)
        found = None
        if activation is not None and len(args) == 1 and not kwargs:
            found = _operands(self, row, args[0])
        # each process would have columns of one half alone
        if found is None or (row.activated is not None and found.mesh is not None):
            if recorder.calls is not None and (len(args) != 1 or kwargs):
                recorder.record(self, "the stock forward runs: it was called with more than x")
            return stock_forward(self, *args, **kwargs)
        if recorder.calls is not None:
            recorder.record(self)
        (weight,), (bias,), mesh = found
        (x,) = copied(mesh, args[0])
        if row.activated is None:
            y = ops.linear(x, weight, bias, activation=activation)
        elif _is_swapped(self, row):
            pairs = halves(weight)[::-1], halves(bias)[::-1]
            y = ops.gated_linear_pair(x, *pairs[0], *pairs[1], gate=activation)
        else:
            y = ops.gated_linear(x, weight, bias, gate=activation)
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
    """Whether the gate has the activated half at its other side."""
    return GATES[_name_of(mlp, row)][1] != (row.activated == "left")


def _between(mlp: nn.Module, row: PlainMLP) -> list[nn.Module]:
    """The modules that the fused forward does not call: the activation and dropouts."""
    return [m for name, m in mlp._modules.items() if name not in (row.first, row.second)]


def _is_mixed(mlp: nn.Module, row: PlainMLP) -> bool:
    """Whether the weights have several dtypes, between which T5 casts."""
    weights = [getattr(mlp._modules.get(name), "weight", None) for name in (row.first, row.second)]
    return len({w.dtype for w in weights if isinstance(w, Tensor) and w.is_floating_point()}) > 1


def _operands(mlp: nn.Module, row: PlainMLP, x: Any) -> Operands | None:
    """The operands of the first layer, or None if the stock forward must run."""
    between = _between(mlp, row)
    if not isinstance(x, Tensor) or any(map(hooked, between)) or _is_mixed(mlp, row):
        return None
    for module in between:
        p = getattr(module, "p", 0)
        if p and (module.training or mlp.training):
            if recorder.calls is not None:
                recorder.record(mlp, f"the stock forward runs: Dropout({p}) is on")
            return None
    return operands([mlp._modules[row.first]], x)
