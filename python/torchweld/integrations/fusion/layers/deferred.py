"""Tensors of a decoder layer's stock forward that an op computes together with others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from torchweld.integrations import recorder
from torchweld.ops.stock import plain_tensors

from .linears import Operands

_FACTS = {"shape", "size", "dtype", "device", "ndim", "dim"}


class Deferred:
    """A tensor of a stock forward that an op computes together with another.

    Any other use than by this op computes it first, with a gradient where stock has one.

    Attributes:
        x: A tensor of its shape and dtype.
        mode: Whether gradients are recorded and autocast is on where stock computes the value.
    """

    __slots__ = ("mode", "x")

    def __add__(self, other: Any) -> Any:
        return self.tensor() + computed(other)

    def is_in_mode(self) -> bool:
        """Whether an op may compute it with what comes now."""
        return self.mode == _mode()

    def tensor(self) -> Tensor:
        """The value."""
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


def _mode() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch._C._is_any_autocast_enabled()


def _operator(name: str) -> Callable:
    return lambda self, *args: getattr(self.tensor(), name)(*map(computed, args))


for _name in ("radd", "sub", "rsub", "mul", "rmul", "truediv", "matmul", "neg", "getitem"):
    setattr(Deferred, f"__{_name}__", _operator(f"__{_name}__"))


def computed(value: Any) -> Any:
    """The tensor of a deferred value; other values as they are."""
    return value.tensor() if isinstance(value, Deferred) else value


class Residual(Deferred):
    """A tensor to which a decoder layer adds results: a norm computes the sum with its own result.

    Attributes:
        norms: The norms of the layer that run an op of x, with their parameters.
        sums: How many sums, one of the other, a norm may compute.
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
        projections: The layers that are computed with one of the norms.
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
    """``h + x``, which one of ``norms`` computes with its result."""

    __slots__ = ("h",)

    def __init__(
        self,
        h: Tensor,
        x: Tensor,
        norms: Mapping[nn.Module, Sequence[Tensor | None]],
        sums: int,
    ) -> None:
        self.x, self.mode = x, _mode()
        self.h, self.norms, self.sums = h, norms, sums

    def tensor(self) -> Tensor:
        if self.h is not None:
            with torch.set_grad_enabled(self.mode[0]):
                self.h, self.x = None, self.x + self.h
        return self.x


class Normed(Deferred):
    """``norm(x)``, which an op computes with the layers behind it.

    Attributes:
        source: The norm.
        norm: The norm, None if the value is computed.
        parameters: Of the norm.
        projections: The layers.
        results: Theirs, or None.
    """

    __slots__ = ("norm", "parameters", "projections", "results", "source")

    def __init__(self, norm: nn.Module, given: LayerInput) -> None:
        self.x, self.mode = given.x, _mode()
        self.norm = self.source = norm
        self.parameters = given.norms[norm]
        self.projections, self.results = given.projections[norm], None

    def tensor(self) -> Tensor:
        if self.norm is not None:
            with torch.set_grad_enabled(self.mode[0]):
                self.norm, self.x = None, self.norm(self.x)
        return self.x

    def linears(self) -> list[Tensor]:
        """The results of all layers."""
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
        if func is F.linear and isinstance(x, Normed) and x.norm is not None and x.is_in_mode():
            # EVA calls F.linear with the weight of a layer and another bias.
            weight, bias, *_ = (None, None) if kwargs else (*args[1:], None)
            layers = zip(x.projections.weights, x.projections.biases, strict=True)
            for i, layer in enumerate(layers):
                if layer[0] is weight and layer[1] is bias:
                    return x.linears()[i]
        return super().__torch_function__(func, types, args, kwargs)
