"""Compares a module with the fused one that its structure suggests.

A replica of the module has its class and attributes, small random weights, and no hooks. The
replica computes results and gradients of random inputs twice: with the fused and the stock forward.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchweld.integrations.fusion.layers.fused_module import stock_class, stock_forward
from torchweld.integrations.fusion.report import summary

WIDTH = 16  # of a replica's input
MAGNITUDES = (1e-3, 0.1, 1.0, 30.0)  # of the inputs, one for each row of a batch
# Tolerances for other rounding, relative to the largest value (above 2-D: per index of dim 0).
_STRICT, _LOOSE = 2e-5, 5e-2
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
)


class Random:
    """Draws float32 values on the CPU and moves them to a device and a dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.device, self.dtype = device, dtype

    def __call__(self, *shape: int) -> Tensor:
        values = torch.randn(shape, generator=self.generator, device="cpu", dtype=torch.float32)
        return values.to(self.device, self.dtype)

    def inputs(self) -> Tensor:
        """Returns ``(4, 3, WIDTH)`` of several magnitudes, a leaf that needs a gradient."""
        scale = torch.tensor(MAGNITUDES, device=self.device, dtype=self.dtype)
        return (self(4, 3, WIDTH) * scale[:, None, None]).requires_grad_()

    def linear(self, columns: int, rows: int, like: nn.Module) -> nn.Linear:
        """Makes a linear layer of ``columns`` inputs, with a bias if ``like`` has one."""
        bias = getattr(like, "bias", None) is not None
        layer = nn.Linear(columns, rows, bias, self.device, self.dtype)
        for parameter in layer.parameters():
            parameter.data = self(*parameter.shape) / 4
        return layer


Forward = Callable[..., Any]


class Kind(NamedTuple):
    """Says how a kind of module is copied and run for a comparison."""

    name: str  # with its article, as "an MLP", for reasons
    replica: Callable[[nn.Module, Random], nn.Module]
    # Calls a forward of a replica; returns tensors to compare, and a value that must be equal.
    run: Callable[[nn.Module, Forward, Random], tuple[list[Tensor], Any]]


_strict: dict[tuple[Any, ...], str | None] = {}


def difference(module: nn.Module, kind: Kind, row: Any, weight: Tensor) -> str | None:
    """Returns why a module computes something else than its fused version, or None.

    The two are compared in float32 on the CPU, and on the device and in the dtype of ``weight``.
    The module's class is registered with ``row``.
    """
    reason = strict_difference(module, kind, row)
    return reason or _differs(module, kind, weight.device, weight.dtype, _LOOSE, (True,))


def strict_difference(module: nn.Module, kind: Kind, row: Any) -> str | None:
    """Like :func:`difference`, in float32 on the CPU alone."""
    key = kind.name, row, *key_of(module)  # settings of two kinds may be equal tuples
    if key not in _strict:
        _strict[key] = _differs(module, kind, torch.device("cpu"), torch.float32, _STRICT)
    return _strict[key]


def _differs(
    module: nn.Module,
    kind: Kind,
    device: torch.device,
    dtype: torch.dtype,
    tolerance: float,
    modes: Sequence[bool] = (False, True),
) -> str | None:
    stock = stock_class(module)
    name = f"{stock.__module__}.{stock.__qualname__}"
    try:
        with isolated(device):
            for training in modes:
                replica, runs = kind.replica(module, Random(device, dtype)).train(training), []
                for forward in (type(replica).forward, stock_forward):
                    with _same_draws(device):
                        runs.append(kind.run(replica, forward, Random(device, dtype)))
                (ours, facts), (theirs, stock_facts) = runs
                worst = max(map(_apart, ours, theirs))
                if not worst <= tolerance or facts != stock_facts:
                    return f"{name} has the parts of {kind.name} and computes something else"
    except Exception as error:
        why = summary(error)
        return f"{name} has the parts of {kind.name} and can't be compared with one ({why})"
    return None


def _apart(ours: Tensor, stock: Tensor) -> float:
    """Returns the largest difference over the largest value; above 2-D, by index of dim 0."""
    if ours.shape != stock.shape or ours.dtype != stock.dtype:
        raise TypeError(f"its result is {tuple(stock.shape)} of {stock.dtype}")
    first = 1 if stock.dim() > 2 else 0
    ours, stock = (t.detach().double().cpu().flatten(first) for t in (ours, stock))
    size = stock.abs().amax(-1).clamp_min(1e-30)
    return float(((ours - stock).abs().amax(-1) / size).max())


def with_gradients(module: nn.Module, y: Any, x: Tensor, random: Random) -> list[Tensor]:
    """Returns the result of a module, and the gradients of its input and its parameters."""
    if type(y) is not Tensor:
        raise TypeError(f"its result is {type(y).__name__}, not a tensor")
    return [y, *torch.autograd.grad(y, [x, *module.parameters()], random(*y.shape).to(y.dtype))]


def run_of_one_input(
    module: nn.Module, forward: Forward, random: Random
) -> tuple[list[Tensor], None]:
    """Runs a module with one input and one result, as :class:`Kind`'s ``run``."""
    x = random.inputs()
    return with_gradients(module, forward(module, x), x, random), None


def _same_draws(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Restores the random state after a block; dropouts of the next block draw the same."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


@contextlib.contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Runs a block with gradients, without autocast, and restores the random state after it.

    One thread computes, because starting others takes longer than a replica does.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with (
            _same_draws(device),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False),
        ):
            yield
    finally:
        torch.set_num_threads(threads)


def bare_replica(module: nn.Module, cls: type[nn.Module]) -> nn.Module:
    """Makes a module of ``cls`` with ``module``'s attributes; no hooks, parameters or children."""
    replica = cls.__new__(cls)
    hooks = {name: OrderedDict() for name in _HOOKS}
    replica.__dict__ = {**vars(module), **hooks, "_parameters": {}, "_modules": {}, "_buffers": {}}
    return replica


def key_of(module: nn.Module) -> tuple[Any, ...]:
    """Returns the values that a module's forward may depend on, besides its weights."""
    stock = stock_class(module)
    children = [(name, *_values(child)) for name, child in module._modules.items()]
    return stock, stock.forward, tuple(_values(module)), *children


def _values(module: nn.Module) -> list[tuple[str, str]]:
    """Returns a module's class, parameter names and attributes as texts, without its children."""
    given = [name for name, parameter in module._parameters.items() if parameter is not None]
    found = [("class", repr(type(module))), ("parameters", repr(given))]
    for name, value in vars(module).items():
        if name.startswith("_") or name == "training":
            continue
        text = value.to_dict() if hasattr(value, "to_dict") else value
        found.append((name, repr(text)))
    return found
