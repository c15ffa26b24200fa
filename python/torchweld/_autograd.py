"""The decorator of every backward in Python that has no derivative itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuses `create_graph=True`, under which torch runs a backward in grad mode.

    NOTE: torch's decorator of this name raises only where the incoming gradient requires a
    gradient, and has no edge to the saved tensors, so that many second derivatives become zero.

    Raises:
        RuntimeError: a second derivative is asked for.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Any) -> Any:
        # torch itself refuses second derivatives of a compiled graph, which it traces in grad mode
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                f"{backward.__module__}: create_graph must be False, because a second derivative "
                "is not implemented, but got True; use torch's own layers"
            )
        with torch.no_grad():
            return backward(ctx, *grads)

    return once
