"""Whether a module computes the forward of its class, and nothing else, with plain tensors.

`from_torch`, `to_torch` and fused modules read a module's parameters instead of calling it. That
would lose the forward of a subclass, a hook or a parametrisation.

NOTE: `make hub` copies this file beside its layers, so it imports torch alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.utils import parametrize

_PLAIN = (Tensor, nn.Parameter)
_HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}


def untouched(*modules: nn.Module) -> bool:
    """Whether modules have no hooks and no forward but their class's; nearly always true."""
    # The loop avoids calls, because layers run it several times while the GPU waits.
    for module in modules:
        own = module.__dict__
        if (
            own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or "forward" in own
            and getattr(own["forward"], "__func__", None) is not type(module).forward
        ):
            return False
    return True


def is_plain(module: nn.Module, cls: type[nn.Module]) -> bool:
    """Whether calling a module runs the forward of exactly this class, and no hook of any kind."""
    return type(module) is cls and untouched(module) and not _has_any_global_hook()


def plain_tensors(*tensors: Tensor | None) -> bool:
    """Whether tensors are floating point, of one dtype and of no subclass (DTensor, quantised)."""
    # A loop, not comprehensions, because layers run it several times while the GPU waits.
    dtype = None
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) not in _PLAIN:
            return False
        if dtype is None:
            dtype = tensor.dtype
        elif tensor.dtype is not dtype:
            return False
    return dtype.is_floating_point


def refuse_other(
    owner: str,
    argument: str,
    expected: str,
    module: object,
    *classes: type[nn.Module],
    parametrised: bool = False,
) -> None:
    """Raises ValueError unless a module is exactly of one of the classes, with nothing added.

    Args:
        parametrised: whether parametrisations are allowed, as for a caller that copies the current
            values.
    """
    found = _other(module, classes, parametrised)
    if found is not None:
        raise ValueError(f"{owner}: {argument} must be {expected}, but got {found}")


def refuse_computed(method: str, module: nn.Module, names: Iterable[str]) -> None:
    """Raises ValueError if one of a module's parameters is computed from other tensors."""
    owner = f"{parametrize.type_before_parametrizations(module).__name__}.{method}"
    for name in names:
        if name not in module._parameters:
            raise ValueError(f"{owner}: {name} must be a parameter, but got {_computed(name)}")


def refuse_mixed(owner: str, tensors: Mapping[str, Tensor | None]) -> None:
    """Raises ValueError unless all of several tensors have the dtype and device of the first."""
    (first, like), *rest = ((name, t) for name, t in tensors.items() if t is not None)
    for name, tensor in rest:
        for what in ("dtype", "device"):
            expected, got = getattr(like, what), getattr(tensor, what)
            if got != expected:
                raise ValueError(
                    f"{owner}: {name} must have the {what} of {first}, {expected}, but got {got}; "
                    f"use {name}.to({first}.{what}) first"
                )


def text_of(module: object) -> str:
    """Returns the repr of a module in one line."""
    return " ".join(str(module).split())


def _other(module: object, classes: tuple[type[nn.Module], ...], parametrised: bool) -> str | None:
    """Returns why a module is refused, as the end of an error sentence, or None."""
    if not isinstance(module, classes):
        return text_of(module)
    stock = next(cls for cls in classes if isinstance(module, cls))
    if parametrize.is_parametrized(module) and not parametrised:
        listed = ", ".join(
            f"{name} ({', '.join(type(part).__name__ for part in parts)})"
            for name, parts in module.parametrizations.items()
        )
        first = next(iter(module.parametrizations))
        return (
            f"{_name(stock)} with a parametrisation of {listed}; call "
            f"torch.nn.utils.parametrize.remove_parametrizations(module, {first!r}) first"
        )
    cls = parametrize.type_before_parametrizations(module)
    if cls not in classes:
        return (
            f"{_name(cls)}, a subclass of {_name(stock)}; keep it as it is, or make a "
            f"{_name(stock)} of what it computes first"
        )
    if "forward" in vars(module):
        return f"{_name(stock)} with a forward of its own on the instance; remove that first"
    for attribute, kind in _HOOKS.items():
        for hook in vars(module)[attribute].values():
            name = getattr(hook, "__qualname__", type(hook).__qualname__)
            return f"{_name(stock)} with a {kind} ({name}); remove that first"
    for name in ("weight", "bias"):
        if name in vars(module):
            return f"{_name(stock)} whose {name} is {_computed(name)}"
    return None


def _name(cls: type) -> str:
    if issubclass(cls, nn.Module) and getattr(nn, cls.__name__, None) is cls:
        return f"nn.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def _computed(name: str) -> str:
    return (
        "a tensor computed from others (by weight_norm, spectral_norm, prune or the like); call "
        f"remove_parametrizations(module, {name!r}), remove_weight_norm or prune.remove first"
    )
