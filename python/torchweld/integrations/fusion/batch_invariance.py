"""Runs every call of a model in the batch-invariant mode."""

from __future__ import annotations

import threading

import torch
from torch import nn

from torchweld._library import ops

_THREAD = threading.local()  # .before: the modes before the calls that this thread is inside of


# The hooks are not compiled: they change a thread's state, which a graph can't hold.
@torch.compiler.disable
def _enter(module: nn.Module, args: object) -> None:
    if not hasattr(_THREAD, "before"):
        _THREAD.before = []
    _THREAD.before.append(ops._set_batch_invariant(True))


@torch.compiler.disable
def _leave(module: nn.Module, args: object, output: object) -> None:
    ops._set_batch_invariant(_THREAD.before.pop())


def hold(model: nn.Module) -> None:
    """Runs every call of the model in `torchweld.batch_invariant()`."""
    release(model)
    model.register_forward_pre_hook(_enter, prepend=True)
    model.register_forward_hook(_leave, always_call=True)


def release(model: nn.Module) -> bool:
    """Undoes `hold`. Returns whether there was anything to undo."""
    held = [key for key, hook in model._forward_pre_hooks.items() if hook is _enter]
    for key in held:
        del model._forward_pre_hooks[key]
    for key in [key for key, hook in model._forward_hooks.items() if hook is _leave]:
        del model._forward_hooks[key]
        model._forward_hooks_always_called.pop(key, None)
    return bool(held)
