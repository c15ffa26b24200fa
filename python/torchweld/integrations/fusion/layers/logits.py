"""Defers the logits of a language model's head, so that one op computes them with their loss.

In a training step the head returns :class:`Logits` to the model's stock forward. If that forward
calls ``cross_entropy`` with them, :func:`torchweld.linear_cross_entropy` runs on the hidden states:
the logits are never whole in memory. Any other use computes them as the stock forward does.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.utils import ModelOutput

from torchweld import _library
from torchweld.integrations import recorder
from torchweld.ops.stock import plain_tensors

from .deferred import Deferred, computed, operator
from .linears import has_classes, sharded_loss


class Operands(NamedTuple):
    """Arguments of the op for the loss of deferred logits.

    Attributes:
        hidden: ``(..., K)``; the dims in front are those of the logits.
        bias: ``(N,)`` or None.
        dtype: That of the logits.
        softcap, temperature: Options of the op.
    """

    hidden: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    softcap: float | None = None
    temperature: float = 1.0


class Step:
    """A training step of a model: its head's calls return deferred logits.

    Attributes:
        head: The head.
        is_sharded: Whether each process has some of its classes.
        keep: An option of the op.
        made: For each call of the head, all logits that the model made of its result.
        has_loss: Whether the op ran.
    """

    def __init__(self, head: nn.Linear, keep: str) -> None:
        self.head, self.keep = head, keep
        self.is_sharded = has_classes(head)
        self.made: list[list[Logits]] = []
        self.has_loss = False

    def logits(self, hidden: Tensor) -> Any:
        """Returns the head's result, deferred if the op can take its operands."""
        weight, bias = self.head.weight, self.head.bias
        mode = _mode(hidden)
        if mode.autocast is None:
            served = plain_tensors(hidden) and hidden.dtype == weight.dtype
        else:
            served = plain_tensors(hidden) and torch.float64 not in (hidden.dtype, weight.dtype)
        if not served:
            return type(self.head).forward(self.head, hidden)
        self.made.append([])
        operands = Operands(hidden, bias, mode.autocast or hidden.dtype)
        return Logits(self, self.made[-1], mode, operands)

    def run(self, forward: Callable[[], Any]) -> Any:
        """Returns a forward's result; its logits are None if ``cross_entropy`` ran on them."""
        traced = torch.compiler.is_compiling()
        try:
            with _Traced(self) if traced else _patched(self.head, self.logits):
                out = forward()
            if isinstance(out, ModelOutput):
                return type(out)(**{name: _returned(value) for name, value in out.items()})
            return type(out)(map(computed, out)) if isinstance(out, tuple) else computed(out)
        finally:
            for logits in self.made:  # they refer to each other, and would wait for gc
                logits.clear()


def _returned(value: Any) -> Any:
    return None if isinstance(value, Logits) and value.has_loss() else computed(value)


@contextlib.contextmanager
def _patched(head: nn.Linear, logits: Callable[[Tensor], Any]) -> Iterator[None]:
    """Lets a head return ``logits(hidden)`` in this thread."""
    thread = threading.get_ident()

    def forward(hidden: Tensor) -> Any:
        if threading.get_ident() == thread:
            return logits(hidden)
        return type(head).forward(head, hidden)

    vars(head)["forward"] = forward
    try:
        yield
    finally:
        vars(head).pop("forward", None)


class _Traced(TorchFunctionMode):
    """Does the same in a graph, where Dynamo can't undo a change of the head.

    Outside of a graph the mode would cost host time in every function of torch.
    """

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step

    def __torch_function__(
        self, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear and not kwargs and args[1] is self.step.head.weight:
            return self.step.logits(args[0])
        return func(*args, **(kwargs or {}))


class _Mode(NamedTuple):
    grad: bool  # whether gradients are recorded
    autocast: torch.dtype | None  # the dtype of autocast, None if it is off


def _mode(hidden: Tensor) -> _Mode:
    device, autocast = hidden.device.type, None
    if device != "meta" and torch.is_autocast_enabled(device):
        autocast = torch.get_autocast_dtype(device)
    return _Mode(torch.is_grad_enabled(), autocast)


class Logits(Deferred):
    """The deferred ``head(hidden)``, or logits of other shape, dtype or scale made of it.

    Attributes:
        x: The logits, None if they are not computed.
        step: The training step.
        made: All logits made of the same call of the head.
        operands: Arguments of the op.
        source, change: Where the logits are ``change(source)``; None for the head's own.
        loss: Whether a loss of them was computed.
    """

    def __init__(
        self,
        step: Step,
        made: list[Logits],
        mode: _Mode,
        operands: Operands,
        source: Logits | None = None,
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.x, self.mode, self.loss = None, mode, False
        self.step, self.made, self.operands = step, made, operands
        self.source, self.change = source, change
        made.append(self)

    def tensor(self) -> Tensor:
        # All are computed, in order: a change in place of one may show in others, as in stock.
        for each in (*self.made, self) if self.x is None else ():
            each.compute()
        return self.x

    def compute(self) -> None:
        """Computes the logits if they are not."""
        if self.x is not None:
            return
        grad, dtype = self.mode
        on, device = dtype is not None, self.device.type
        meta = device == "meta"  # it has no autocast
        autocast = contextlib.nullcontext() if meta else torch.autocast(device, dtype, on)
        with torch.set_grad_enabled(grad), autocast:
            if self.change is None:
                head = self.step.head
                self.x = type(head).forward(head, self.operands.hidden)
            else:
                self.source.compute()
                self.x = self.change(self.source.x)

    def has_loss(self) -> bool:
        """Whether the op has computed a loss of these logits or of others of the same call."""
        return any(each.loss for each in self.made)

    def _made(self, change: Callable[[Tensor], Tensor], **operands: Any) -> Any:
        """Returns ``change(self)``, deferred with other operands."""
        if self.x is not None or self.mode != _mode(self.operands.hidden):
            return change(self.tensor())
        operands = self.operands._replace(**operands)
        return Logits(self.step, self.made, self.mode, operands, self, change)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.operands.hidden.shape[:-1], self.step.head.weight.shape[0]))

    @property
    def ndim(self) -> int:
        return self.operands.hidden.ndim

    @property
    def dtype(self) -> torch.dtype:
        return self.operands.dtype

    @property
    def device(self) -> torch.device:
        return self.operands.hidden.device

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def view(self, *sizes: Any) -> Any:
        return self._reshaped("view", sizes)

    def reshape(self, *sizes: Any) -> Any:
        return self._reshaped("reshape", sizes)

    def _reshaped(self, name: str, sizes: Any) -> Any:
        def change(x: Tensor) -> Tensor:
            return getattr(x, name)(*sizes)

        listed = sizes[0] if len(sizes) == 1 else sizes
        if not isinstance(listed, (tuple, list)) or listed[-1] != self.shape[-1]:
            return change(self.tensor())
        hidden = self.operands.hidden
        return self._made(change, hidden=hidden.reshape(*listed[:-1], hidden.shape[-1]))

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        def change(x: Tensor) -> Tensor:
            return x.flatten(start_dim, end_dim)

        if end_dim % self.ndim == self.ndim - 1:
            return change(self.tensor())
        return self._made(change, hidden=change(self.operands.hidden))

    def __getitem__(self, index: Any) -> Any:
        def change(x: Tensor) -> Tensor:
            return x[index]

        if not _leaves_classes(index if isinstance(index, tuple) else (index,), self.ndim):
            return change(self.tensor())
        return self._made(change, hidden=change(self.operands.hidden))

    def contiguous(self) -> Any:
        return self._made(lambda x: x.contiguous())

    def float(self) -> Any:
        return self._made(lambda x: x.float(), dtype=torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        def change(x: Tensor) -> Tensor:
            return x.to(*args, **kwargs)

        dtype = self.dtype
        for given in (*args, *kwargs.values()):
            if isinstance(given, torch.dtype):
                dtype = given
            elif given != self.device:
                return change(self.tensor())
        return self._made(change, dtype=dtype) if dtype.is_floating_point else change(self.tensor())

    def __add__(self, other: Any) -> Any:
        other, (_, bias, dtype, softcap, temperature) = computed(other), self.operands
        whole = isinstance(other, Tensor) and softcap is None and temperature == 1
        if whole and other.ndim and other.shape[-1] == other.numel() == self.shape[-1]:
            same = other.dtype == self.step.head.weight.dtype or self.mode.autocast
            if same and other.ndim <= self.ndim and not self.step.is_sharded:
                vector = other.reshape(-1)
                vector = vector if bias is None else bias + vector
                dtype = torch.promote_types(dtype, other.dtype)
                return self._made(lambda x: x + other, bias=vector, dtype=dtype)
        return self.tensor() + other

    __radd__ = __add__

    def __mul__(self, other: Any) -> Any:
        if not _is_factor(other):
            return self.tensor() * computed(other)
        return self._made(lambda x: x * other, temperature=self.operands.temperature / other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        if not _is_factor(other):
            return self.tensor() / computed(other)
        return self._made(lambda x: x / other, temperature=self.operands.temperature * other)

    def tanh(self) -> Any:
        if self.operands.softcap is not None:
            return self.tensor().tanh()
        # tanh(l / c) is c tanh(l / c) / c: c is the cap, and the temperature stays.
        return self._made(torch.tanh, softcap=self.operands.temperature)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("x", "mode"):  # Dynamo reads an object without any
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is F.cross_entropy:
            loss = _cross_entropy(*args, **(kwargs or {}))
            if loss is not None:
                return loss
        if func is torch.tanh and len(args) == 1 and not kwargs:
            return args[0].tanh()
        return super().__torch_function__(func, types, args, kwargs)


for _name in ("iadd", "isub", "imul", "itruediv"):  # other logits may share their memory
    setattr(Logits, f"__{_name}__", operator(f"__{_name}__"))


def _is_factor(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < float("inf")


def _leaves_classes(index: tuple[Any, ...], ndim: int) -> bool:
    """Whether an index of logits of ``ndim`` dims takes all classes of some rows."""
    dims = 0
    for each in index:
        if isinstance(each, slice):
            dims += 1
        elif isinstance(each, Tensor) and each.dtype == torch.bool:
            dims += each.ndim
        elif each is not Ellipsis:
            return False
    last = index[-1] if index else None
    whole = isinstance(last, slice) and last == slice(None)
    return whole or dims < ndim and not any(each is Ellipsis for each in index)


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Computes a loss by the op; returns None if torch must compute it."""
    if not isinstance(input, Logits) or input.x is not None:
        return None
    if any(each is not None for each in (weight, size_average, reduce)):
        return None
    if type(target) is not Tensor or target.dtype != torch.int64 or target.device != input.device:
        return None
    step, (hidden, bias, dtype, softcap, temperature) = input.step, input.operands
    if hidden.ndim != 2 or target.shape != hidden.shape[:1] or input.mode != _mode(hidden):
        return None
    op = sharded_loss if step.is_sharded else _library.ops.linear_cross_entropy
    loss = op(
        hidden,
        step.head.weight,
        target,
        bias,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=softcap,
        temperature=temperature,
        keep=step.keep,
    )
    input.loss = step.has_loss = True
    if recorder.calls is not None:
        recorder.record(step.head)
    # Autocast computes the loss of 16-bit logits in float32, as the op does.
    return loss if input.mode.autocast else loss.to(dtype)
