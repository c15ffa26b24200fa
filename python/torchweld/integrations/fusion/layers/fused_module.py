"""Defines the classes that ``fuse`` gives to a model's modules to run torchweld's ops.

A subclass of :class:`FusedModule` has the forward of one kind of module, and ``row`` its settings
for one class of modules. A fused class inherits from that subclass and from the module's own
(stock) class (:mod:`.families`).
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Container, Hashable
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from torchweld.integrations import recorder
from torchweld.integrations.attention.fallback import warn_once
from torchweld.integrations.fusion.probes import Probes

from . import arguments
from .fsdp import class_before

# Names of a fused class's attributes. Code that needs speed reads self._torchweld_row directly.
STOCK, ROW, ARGUMENTS = "_torchweld_stock", "_torchweld_row", "_torchweld_arguments"
FUSED_SITES = "_torchweld_sites"  # the fused sites of a module whose class has several
KEEP = "_torchweld_keep"  # the option `keep` of a model's fused loss


class Replacement(NamedTuple):
    """One replacement in a model: modules that get fused classes together."""

    where: str  # its path in the report
    key: Hashable  # the key of its calls in :func:`.recorder.record`
    modules: tuple[nn.Module, ...]  # those that get a fused class
    site: str | None = None  # the fused part of a module, if its class has several


def below(path: str, name: str) -> str:
    """Returns the path of the child ``name`` of the module at ``path``, "" for the model."""
    return f"{path}.{name}" if path else name


class FusedModule(nn.Module):
    """A module whose forward runs torchweld's ops, or the stock forward if the ops can't."""

    kind: str  # the word for it in ``fuse``'s argument ``only``; "loss" for heads
    op: ClassVar[str]  # the op that it runs
    needs: ClassVar[tuple[str, ...]] = ()  # the arguments that the stock forward must have
    knows: ClassVar[tuple[str, ...] | None] = None  # those that this forward knows; None: all

    @classmethod
    def subclass(cls, stock: type[nn.Module], row: Any, module: str) -> type[nn.Module]:
        """Makes the class that has this forward and is a subclass of ``stock`` too.

        Its ``__name__`` is the stock one, by which transformers and accelerate look classes up (in
        config.json, and for blocks that are not split). pickle finds it by ``__qualname__``.
        transformers reads the names of a forward's arguments, so its signature is the stock one.
        """
        own = cls.forward
        forward = types.FunctionType(
            own.__code__, own.__globals__, own.__name__, own.__defaults__, own.__closure__
        )
        forward.__kwdefaults__ = own.__kwdefaults__
        forward.__signature__ = inspect.signature(stock.forward)
        names = {
            "forward": forward,
            STOCK: stock,
            ROW: row,
            ARGUMENTS: arguments.of(stock, cls.knows),
            "__module__": module,
            "__qualname__": f"Fused{stock.__name__}",
        }
        return type(stock.__name__, (cls, stock), names)

    @staticmethod
    def replacement(path: str, module: nn.Module, row: Any) -> Replacement:
        """Returns the replacement for a stock or fused module at ``path``."""
        return Replacement(path, module, (module,))

    @classmethod
    def label(cls, module: nn.Module, row: Any) -> str:
        """Returns the text for the report: the op, and the modules that the op replaces."""
        return cls.op

    @staticmethod
    def refusal(module: nn.Module, row: Any) -> str | None:
        """Returns why a stock module must stay as it is, or None."""
        return instance_refusal(module)

    @staticmethod
    def op_parameters(module: nn.Module, row: Any) -> dict[str, Tensor | None]:
        """Returns the parameters that the op takes, by their names in the report."""
        return {}

    @classmethod
    def probe(cls, module: nn.Module, row: Any, weight: Tensor, probes: Probes) -> str | None:
        """Returns why the op does not run with a weight of this device and dtype, or None."""
        return probes.refusal(cls.op, weight)


Fusion = tuple[type[FusedModule], Any]
_recognised: dict[type[nn.Module], Fusion] = {}


def register(stock: type[nn.Module], found: Fusion | None = None) -> Fusion | None:
    """Returns the subclass and settings of a class in no table, or None; ``found`` sets them."""
    if found is not None:
        _recognised[stock] = found
    return _recognised.get(stock)


def stock_class(module: nn.Module) -> type[nn.Module]:
    """Returns the class that a module has without ``fuse``."""
    return getattr(type(module), STOCK, None) or class_before(module)


def set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Sets a module's class to ``cls``; keeps subclasses by fully_shard and parametrizations."""
    like = type(module)
    before = next((each for each in like.__mro__ if STOCK in vars(each)), class_before(module))
    # A parametrised module's class holds the module's tensors, so it is made for that module alone.
    # Other classes are shared, because compiled graphs are made for a class.
    replaced = _replaced if is_parametrized(module) else _replaced_once
    module.__class__ = replaced(like, before, cls)


def _replaced(
    like: type[nn.Module], before: type[nn.Module], cls: type[nn.Module]
) -> type[nn.Module]:
    """Returns the class ``like`` with ``cls`` in place of the ancestor ``before``."""
    if like is before:
        return cls
    if before not in like.__mro__:
        return like
    bases = tuple(_replaced(base, before, cls) for base in like.__bases__)
    # transformers gives each class of decoder layers a forward, which would hide that of `cls`.
    members = {name: value for name, value in vars(like).items() if name != "forward"}
    return type(like.__name__, bases, members)


_replaced_once = functools.cache(_replaced)


def stock_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Calls the forward that the module had before ``fuse``."""
    # NOTE: Dynamo of torch 2.15 traces no `cls.forward` of a class that is allowed in graphs, such
    # as diffusers' Attention, but it traces super().
    if isinstance(module, FusedModule):
        return super(FusedModule, module).forward(*args, **kwargs)
    # Code that wrapped this forward may call it after unfuse.
    return stock_class(module).forward(module, *args, **kwargs)


def call_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """Returns a fused forward's arguments by name, or None if the stock forward must run."""
    signature = getattr(module, ARGUMENTS, None)
    if signature is None:
        return None
    given = signature.by_name(args, kwargs)
    unknown = signature.unknown_in(args, kwargs) if given is None else None
    if unknown is None:
        return given
    name = stock_class(module).__qualname__
    reason = f"{name} was called with {unknown}, which torchweld does not know"
    if recorder.calls is not None:
        key = module.replacement("", module, getattr(module, ROW)).key
        recorder.record(key, f"the stock forward runs: {reason}")
    warn_once(reason, "the stock forward", op="the fused one")
    return None


def is_fused(module: nn.Module) -> bool:
    """Whether ``fuse`` has given a module its class."""
    return hasattr(type(module), STOCK)


def parameter_refusal(
    tensors: dict[str, Tensor | None], gathered: Container[int] = ()
) -> str | None:
    """Returns why an op can't take the given parameters, or None.

    ``gathered`` are the ids of parameters that FSDP2 makes plain tensors during a forward pass.
    """
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name, tensor in given.items():
        plain = type(tensor) in (Tensor, nn.Parameter) and type(tensor.data) is Tensor
        plain = plain or id(tensor) in gathered
        if not plain or not tensor.is_floating_point():
            kind = type(tensor.data if type(tensor) is nn.Parameter else tensor).__name__
            return f"{name} is {kind} of {tensor.dtype}, not a plain floating-point parameter"
        if tensor.device.type == "meta":
            return f"{name} is on the meta device"
    if len({tensor.dtype for tensor in given.values()}) > 1:
        listed = ", ".join(f"{name} {str(tensor.dtype)[6:]}" for name, tensor in given.items())
        return f"mixed dtypes: {listed}"
    return None


def instance_refusal(module: nn.Module) -> str | None:
    """Returns why a module's forward must not be replaced, or None."""
    if hasattr(module, "_hf_hook"):
        return "it has accelerate's hooks, which move its parameters"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    return None
