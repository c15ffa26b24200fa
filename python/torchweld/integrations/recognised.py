"""Parts of models that the table of families lacks: RMSNorms and gated MLPs by their structure.

A module with the parts of an RMSNorm or of a gated MLP is compared with the fused part: a twin of
its class, with small random weights, computes results and gradients of random inputs of several
magnitudes. Where the two differ, the module stays stock.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .decoder import FusedNorm, Norm
from .decoder_mlp import MLP, FusedMLP
from .modules import activation_name
from .part import ROW, STOCK, stock_class, stock_forward
from .probes import Probes

_EPS = ("variance_epsilon", "eps", "epsilon")
_ACTIVATIONS = ("act_fn", "activation_fn", "act")
_LAYERS = ("gate_proj", "up_proj", "down_proj")
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
)
_WIDTH, _HIDDEN = 16, 24  # of the twins
# Relative to the largest value of a result. The fused part rounds at other places.
_STRICT, _LOOSE = 2e-5, 2e-2

Found = tuple[type[nn.Module], Any]
_found: dict[type[nn.Module], Found] = {}


def new_fused(stock: type[nn.Module], parent: type[nn.Module], row: Any) -> nn.Module:
    """A fused module without state, for copies and pickles of a part that is in no table."""
    from .families import fused_class

    cls = fused_class(stock, (parent, row))
    return cls.__new__(cls)


class _Recognised:
    """What is added to a part: any way to call it, pickles, and the comparison with its class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            return super().forward(args[0])
        return stock_forward(self, *args, **kwargs)

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        cls = type(self)
        _, _, *state = super().__reduce_ex__(protocol)
        parent = next(base for base in cls.__mro__ if base in (RecognisedNorm, RecognisedMLP))
        return new_fused, (getattr(cls, STOCK), parent, getattr(cls, ROW)), *state


class RecognisedNorm(_Recognised, FusedNorm):
    """An RMSNorm of another class, which multiplies by the weight or by 1 + the weight."""

    @staticmethod
    def probe(module: nn.Module, row: Norm, weight: Tensor, probes: Probes) -> str | None:
        reason = FusedNorm.probe(module, row, weight, probes)
        return reason or probes.once(_key(module), lambda: _difference(module, _norm_twin, weight))


class RecognisedMLP(_Recognised, FusedMLP):
    """A gated MLP of another class."""

    @staticmethod
    def probe(module: nn.Module, row: MLP, weight: Tensor, probes: Probes) -> str | None:
        reason = FusedMLP.probe(module, row, weight, probes)
        return reason or probes.once(_key(module), lambda: _difference(module, _mlp_twin, weight))


def part_of(stock: type[nn.Module]) -> Found | None:
    """The fused parent and the row of a class that :func:`find` has seen."""
    return _found.get(stock)


def find(module: nn.Module) -> Found | None:
    """The fused parent and the row for a module by its structure, None where it has another.

    It is only a candidate: ``probe`` of the parent compares the two.
    """
    stock = stock_class(module)
    if stock.__module__.partition(".")[0] in ("torch", "torchweld"):
        return None
    rows = _norm_rows(module) or _mlp_rows(module)
    if not rows:
        return None
    if stock not in _found:
        parent, twin = (
            (RecognisedNorm, _norm_twin)
            if isinstance(rows[0], Norm)
            else (RecognisedMLP, _mlp_twin)
        )
        for row in reversed(rows):
            _found[stock] = parent, row
            if _differs(module, twin, torch.device("cpu"), torch.float32, _STRICT) is None:
                break
    return _found[stock]


def _norm_rows(module: nn.Module) -> list[Norm]:
    """The rows that a module may have if it is an RMSNorm."""
    weight = module._parameters.get("weight")
    names = [name for name in _EPS if isinstance(getattr(module, name, None), float)]
    alone = set(module._parameters) == {"weight"} and not module._modules and not module._buffers
    if not alone or weight is None or weight.dim() != 1 or len(names) != 1:
        return []
    return [Norm(names[0], offset) for offset in (0.0, 1.0)]


def _mlp_rows(module: nn.Module) -> list[MLP]:
    """The row that a module may have if it is a gated MLP."""
    names = [name for name in _ACTIVATIONS if name in module._modules]
    parts = {*_LAYERS, *names}
    if len(names) != 1 or set(module._modules) != parts or module._parameters or module._buffers:
        return []
    known = activation_name(module._modules[names[0]]) is not None
    return [MLP(packed=False, activation=names[0])] if known else []


def _key(module: nn.Module) -> tuple[Any, ...]:
    """What the forward of a module may depend on, beside its weights."""
    simple = (bool, int, float, str, type(None))
    values = {k: v for k, v in vars(module).items() if isinstance(v, simple) and k != "training"}
    children = {name: type(child) for name, child in module._modules.items()}
    weight = next(module.parameters())
    return stock_class(module), weight.device, weight.dtype, *values.items(), *children.items()


Twin = Callable[[nn.Module, torch.Generator], nn.Module]


def _difference(module: nn.Module, twin: Twin, weight: Tensor) -> str | None:
    """Why a module is not the fused part that its structure suggests, or None."""
    cpu = torch.device("cpu")
    return _differs(module, twin, cpu, torch.float32, _STRICT) or _differs(
        module, twin, weight.device, weight.dtype, _LOOSE
    )


def _differs(
    module: nn.Module, twin: Twin, device: torch.device, dtype: torch.dtype, tolerance: float
) -> str | None:
    stock = stock_class(module)
    name = f"{stock.__module__}.{stock.__qualname__}"
    kind = "an RMSNorm" if twin is _norm_twin else "a gated MLP"
    try:
        with _quietly(device):
            for training in (False, True):
                generator = torch.Generator().manual_seed(0)
                ours = twin(module, generator).to(device, dtype).train(training)
                magnitudes = torch.tensor([1e-3, 0.1, 1.0, 30.0], device="cpu")[:, None, None]
                x = (_random(generator, 4, 3, _WIDTH) * magnitudes).to(device, dtype)
                dy = _random(generator, 4, 3, _WIDTH).to(device, dtype)
                results = [_run(ours, forward, x, dy) for forward in (ours, _stock_call(ours))]
                worst = max(map(_apart, *results))
                if not worst <= tolerance:
                    return f"{name} has the parts of {kind} and computes something else"
    except Exception as error:
        text = (str(error).strip().splitlines() or [""])[0]
        why = f"{type(error).__name__}: {text}"
        return f"{name} has the parts of {kind} and can't be compared with one ({why})"
    return None


def _random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


def _stock_call(part: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: stock_forward(part, x)


def _run(part: nn.Module, forward: Callable[[Tensor], Any], x: Tensor, dy: Tensor) -> list[Tensor]:
    """The result of a part, and the gradients of x and of the part's parameters."""
    x = x.clone().requires_grad_()
    y = forward(x)
    if type(y) is not Tensor or y.shape != dy.shape or y.dtype != dy.dtype:
        raise TypeError(f"its result is {type(y).__name__}, not a tensor like its input")
    return [y, *torch.autograd.grad(y, [x, *part.parameters()], dy)]


def _apart(ours: Tensor, stock: Tensor) -> float:
    """The largest difference along the first dim, relative to the largest value there."""
    ours, stock = (
        t.detach().double().cpu().flatten(1 if t.dim() > 2 else 0) for t in (ours, stock)
    )
    size = stock.abs().amax(-1).clamp_min(1e-30)
    return float(((ours - stock).abs().amax(-1) / size).max())


@contextlib.contextmanager
def _quietly(device: torch.device) -> Iterator[None]:
    """Gradients are on, autocast is off, and the state of random numbers comes back."""
    devices = [device] if device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        yield


def _twin(module: nn.Module) -> nn.Module:
    """A fused module with the attributes of another, without hooks, parameters and children."""
    from .families import fused_class

    cls = fused_class(stock_class(module))
    twin = cls.__new__(cls)
    hooks = {name: OrderedDict() for name in _HOOKS}
    twin.__dict__ = {**vars(module), **hooks, "_parameters": {}, "_modules": {}, "_buffers": {}}
    return twin


def _norm_twin(module: nn.Module, generator: torch.Generator) -> nn.Module:
    twin = _twin(module)
    twin.weight = nn.Parameter(_random(generator, _WIDTH))
    return twin


def _mlp_twin(module: nn.Module, generator: torch.Generator) -> nn.Module:
    twin = _twin(module)
    for name, child in module._modules.items():
        if name not in _LAYERS:
            twin.add_module(name, child)
            continue
        sizes = (_HIDDEN, _WIDTH) if name == "down_proj" else (_WIDTH, _HIDDEN)
        layer = nn.Linear(*sizes, bias=getattr(child, "bias", None) is not None)
        for parameter in layer.parameters():
            parameter.data = _random(generator, *parameter.shape) / 4
        twin.add_module(name, layer)
    return twin
