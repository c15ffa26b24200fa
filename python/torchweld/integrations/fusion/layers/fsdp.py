"""Handles modules to which ``fully_shard`` (FSDP2) has given a class.

That class has two parents, FSDPModule and the class that the module had. ``fuse`` and ``unfuse``
change the second parent (:func:`.fused_module.set_class`); FSDPModule, the module's hooks and its
state stay.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import nn


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether fully_shard was called with a module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # nothing is sharded before its import
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def class_before(module: nn.Module) -> type[nn.Module]:
    """Returns the class of a module before fully_shard changed it."""
    return type(module).__bases__[1] if is_fully_sharded(module) else type(module)


def gathered(model: nn.Module) -> frozenset[int]:
    """Returns the ids of the parameters that fully_shard gathers whenever their modules run."""
    owners: Iterator[nn.Module] = filter(is_fully_sharded, model.modules())
    return frozenset(id(parameter) for owner in owners for parameter in owner.parameters())
