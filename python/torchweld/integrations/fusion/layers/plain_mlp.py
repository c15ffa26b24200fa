"""The MLP without a gate of encoders and older decoders on torchweld's ops."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from torchweld._library import ops
from torchweld.integrations import recorder
from torchweld.integrations.fusion.probes import Probes

from .fused_module import ROW, FusedModule, instance_refusal, stock_forward
from .linears import Operands, copied, operands, own, why_called
from .stock_modules import activation_name, hooked

# On a CPU torch's layer and activation take as long as the op.
_DEVICES = ("cuda",)


class PlainMLP(NamedTuple):
    """The modules of an MLP without a gate, by name; ``second`` is None if it has one layer."""

    first: str
    activation: str
    second: str | None


class FusedPlainMLP(FusedModule):
    """An MLP whose first layer and activation are :func:`torchweld.linear`.

    The second layer is called. Where a dropout in the MLP is on, the stock forward runs.
    """

    kind = "mlp"

    @staticmethod
    def label(module: nn.Module, row: PlainMLP) -> str:
        return f"linear ({row.first} -> {row.activation})"

    @staticmethod
    def probe(module: nn.Module, row: PlainMLP, weight: Tensor, probes: Probes) -> str | None:
        reason = probes.refusal("linear", weight, activation_of(module, row))
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
        if found is None:
            return stock_forward(self, *args, **kwargs)
        if recorder.calls is not None:
            recorder.record(self)
        (weight,), (bias,), mesh = found
        (x,) = copied(mesh, args[0])
        y = ops.linear(x, weight, bias, activation=activation)
        return y if row.second is None else self._modules[row.second](y)


def activation_of(mlp: nn.Module, row: PlainMLP) -> str | None:
    """torchweld's name of the activation of an MLP, None if it has no fused form."""
    name = activation_name(mlp._modules.get(row.activation))
    return None if name == "none" else name


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
