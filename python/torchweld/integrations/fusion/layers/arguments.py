"""Reads a stock forward: its arguments from its signature, and its source.

transformers adds and renames arguments from one minor release to the next. A fused forward gets all
arguments by name, and runs the stock forward if it does not know one that the stock forward names.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

# transformers 5.24 renamed the second to the first. Fused forwards know the cache by either.
CACHES = ("cache", "past_key_values")


@dataclass(frozen=True)
class Arguments:
    """The arguments of one stock forward, without ``self`` and ``**kwargs``."""

    names: tuple[str, ...]  # in order
    required: frozenset[str]  # those without a default
    cache: str | None  # the name of the key and value cache, None without one
    unknown: dict[str, Any]  # arguments that the fused forward does not know, with defaults
    is_open: bool  # whether the forward takes ``**kwargs`` too

    def by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the arguments of a call by name, with those of ``**kwargs``, or None.

        None means that the stock forward must run: the call has an argument that the fused forward
        does not know, or the stock forward raises an error for it.
        """
        # NOTE: this must be fast: every layer calls it in generation, while the GPU waits.
        given = {**kwargs}
        if args:
            given.update(zip(self.names, args, strict=False))
            if len(given) < len(args) + len(kwargs):  # too many, or one of them twice
                return None
        if "past_key_values" in given and self.cache == "cache":  # its deprecated name
            given.setdefault("cache", given.pop("past_key_values"))
        for name in self.required:
            if name not in given:
                return None
        for name in self.unknown:
            if name in given and given.pop(name) is not self.unknown[name]:
                return None
        return given

    def unknown_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Returns a call's first argument that the fused forward does not know, or None."""
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        unknown = (n for n, default in self.unknown.items() if given.get(n, default) is not default)
        return next(unknown, None)

    def update(
        self, cache: Any, key: Any, value: Any, layer_idx: int, kwargs: dict[str, Any]
    ) -> Any:
        """Calls ``cache.update``; passes the forward's ``kwargs`` if the stock forward does."""
        if self.cache == "cache":
            return cache.update(key, value, layer_idx, kwargs=kwargs)
        return cache.update(key, value, layer_idx)


def of(stock: type[nn.Module], known: tuple[str, ...] | None = None) -> Arguments:
    """Reads the arguments of ``stock.forward``.

    ``known`` names those that the fused forward knows, the cache as "cache"; None means all.
    """
    return _read(stock.forward, known)


@functools.cache  # by the function and not by the class, whose forward may be replaced
def _read(forward: Callable[..., Any], known: tuple[str, ...] | None) -> Arguments:
    _, *parameters = inspect.signature(forward).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = {each.name: each.default for each in parameters if each.kind not in variable}
    cache = next((name for name in CACHES if name in named), None)
    unknown = {} if known is None else {n: d for n, d in named.items() if n not in known}
    if cache is not None:
        unknown.pop(cache, None)
    return Arguments(
        tuple(named),
        frozenset(n for n, default in named.items() if default is inspect.Parameter.empty),
        cache,
        unknown,
        any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters),
    )


def parsed(forward: Callable[..., Any]) -> ast.Module | None:
    """Returns the syntax tree of a forward without its wrappers, or None if it has no source."""
    try:
        source = inspect.getsource(inspect.unwrap(forward))
    except (OSError, TypeError):  # it was made by exec
        return None
    return ast.parse(textwrap.dedent(source))


def difference(
    stock: type[nn.Module], wanted: tuple[str, ...], is_open: bool = False
) -> str | None:
    """Returns how ``stock.forward`` lacks arguments that a fused forward needs, or None.

    With ``is_open`` the stock forward must take ``**kwargs``.
    """
    found = of(stock, wanted)
    names = {"cache" if name == found.cache else name for name in found.names}
    parts = [f"lacks {name}" for name in wanted if name not in names]
    if is_open and not found.is_open:
        parts.append("lacks **kwargs")
    if not parts:
        return None
    return f"its arguments are ({', '.join(found.names)}): it {', '.join(parts)}"
