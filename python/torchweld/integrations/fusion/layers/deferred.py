"""Defers tensors of a decoder layer's stock forward, so one op computes several of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, is_grad_enabled, nn
from torch._C import _is_any_autocast_enabled
from torch.utils._pytree import tree_map

from torchweld.integrations import recorder
from torchweld.ops.stock import plain_tensors

from .linears import Operands

_FACTS = {"shape", "size", "dtype", "device", "ndim", "dim"}


class Deferred:
    """A tensor of a stock forward that an op will compute together with another.

    Any other use computes the tensor first, with a gradient if the stock forward records one.

    Attributes:
        x: A tensor of the same shape and dtype.
        mode: The :func:`modes` when the tensor was deferred; an op may compute it in these alone.
    """

    __slots__ = ("mode", "x")

    def __add__(self, other: Any) -> Any:
        return self.tensor() + computed(other)

    def tensor(self) -> Tensor:
        """Computes the tensor."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        return getattr(self.x if name in _FACTS else self.tensor(), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.add and not kwargs:  # x + self
            return args[1] + args[0]
        args, kwargs = tree_map(computed, (args, kwargs or {}))
        return func(*args, **kwargs)


def modes() -> tuple[bool, bool]:
    """Returns whether gradients are recorded and whether autocast is on."""
    return is_grad_enabled(), _is_any_autocast_enabled()


def operator(name: str) -> Callable:
    return lambda self, *args: getattr(self.tensor(), name)(*map(computed, args))


_OPERATORS = "radd sub rsub mul rmul truediv rtruediv pow rpow matmul rmatmul neg getitem setitem"
for _name in f"{_OPERATORS} lt le gt ge eq ne len iter".split():
    setattr(Deferred, f"__{_name}__", operator(f"__{_name}__"))


def computed(value: Any) -> Any:
    """Returns the tensor of a deferred value, and other values as they are."""
    return value.tensor() if isinstance(value, Deferred) else value


class Residual(Deferred):
    """A tensor to which a decoder layer adds results; the sum is deferred to the next norm's op.

    Attributes:
        norms: The norms of the layer that can run an op on x, with their parameters.
        sums: How many further sums may be deferred.
    """

    __slots__ = ("norms", "sums")

    def __add__(self, h: Any) -> Any:
        x = self.tensor()
        same = self.sums and plain_tensors(x, h) and h.shape == x.shape
        return Sum(h, x, self.norms, self.sums - 1) if same else x + computed(h)

    __radd__ = __add__


class LayerInput(Residual):
    """The input of a decoder layer.

    Attributes:
        projections: For a norm of the input, the layers that one op computes with it.
    """

    __slots__ = ("projections",)

    def __init__(
        self,
        x: Tensor,
        norms: Mapping[nn.Module, Sequence[Tensor | None]],
        projections: Mapping[nn.Module, Operands],
        sums: int,
    ) -> None:
        self.x, self.norms, self.projections, self.sums = x, norms, projections, sums

    def tensor(self) -> Tensor:
        return self.x


class Sum(Residual):
    """The deferred ``h + x``; one of ``norms`` computes it with its own result."""

    __slots__ = ("h",)

    def __init__(
        self,
        h: Tensor,
        x: Tensor,
        norms: Mapping[nn.Module, Sequence[Tensor | None]],
        sums: int,
    ) -> None:
        self.x, self.mode = x, modes()
        self.h, self.norms, self.sums = h, norms, sums

    def tensor(self) -> Tensor:
        if self.h is not None:
            with torch.set_grad_enabled(self.mode[0]):
                self.h, self.x = None, self.x + self.h
        return self.x


class Normed(Deferred):
    """The deferred ``norm(x)``; one op computes it with the layers that project it.

    Attributes:
        source: The norm.
        norm: The norm, None if ``norm(x)`` is computed.
        parameters: The parameters of the norm.
        projections: The layers that project ``norm(x)``.
        results: The results of these layers, None if they are not computed.
    """

    __slots__ = ("norm", "parameters", "projections", "results", "source")

    def __init__(self, norm: nn.Module, given: LayerInput) -> None:
        self.x, self.mode = given.x, modes()
        self.norm = self.source = norm
        self.parameters = given.norms[norm]
        self.projections, self.results = given.projections[norm], None

    def tensor(self) -> Tensor:
        if self.norm is not None:
            with torch.set_grad_enabled(self.mode[0]):
                self.norm, self.x = None, self.norm(self.x)
        return self.x

    def linears(self) -> list[Tensor]:
        """Returns the results of all projections; the first call computes them."""
        if self.results is None:
            if recorder.calls is not None:
                recorder.record(self.norm)
                recorder.record((self.norm, "projections"))
            self.results = self.norm.linears(self.x, self.parameters, self.projections)
        return self.results

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        x = args[0] if args else None
        if func is F.linear and type(x) is Normed and x.norm is not None and x.mode == modes():
            # Only a positional call with the layer's own weight and bias gets the deferred result.
            # timm's EVA adds another bias than the layer's: F.linear(x, weight=..., bias=...).
            weight, bias, *_ = (None, None) if kwargs else (*args[1:], None)
            for i, own in enumerate(x.projections.weights):
                if own is weight and x.projections.biases[i] is bias:
                    return (x.results or x.linears())[i]
        return super().__torch_function__(func, types, args, kwargs)
