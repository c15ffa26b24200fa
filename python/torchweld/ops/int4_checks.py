"""The checks of Int4Linear and quantize_."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from torchweld.ops.int4_weight import METHODS
from torchweld.ops.stock import refuse_mixed

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def group_of(in_features: int, group_size: int | None) -> int:
    """Returns a group's columns, all for None; ValueError if the ops can't have such a group."""
    group = in_features if group_size is None else group_size
    if group < 8 or group % 8 or in_features % group:
        raise ValueError(
            f"Int4Linear: group_size must be a multiple of 8 that divides in_features = "
            f"{in_features}, but got {group_size}; None makes one group of a whole row"
        )
    return group


def check_method(owner: str, method: str) -> None:
    """Raises ValueError for a method that is not a key of METHODS."""
    if method not in METHODS:
        known = ", ".join(f'"{name}"' for name in METHODS)
        raise ValueError(f"{owner}: method must be one of {known}, but got {method!r}")


def check_float(owner: str, linear: nn.Linear) -> None:
    """Raises ValueError unless a layer's tensors are of one dtype that the ops accept."""
    weight = linear.weight
    if weight.dtype not in _DTYPES:
        listed = ", ".join(map(str, _DTYPES))
        raise ValueError(f"{owner}: linear.weight must be one of {listed}, but got {weight.dtype}")
    refuse_mixed(owner, {"linear.weight": weight, "linear.bias": linear.bias})


def state_errors(
    prefix: str,
    weight: Tensor | None,
    state: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, Tensor]],
) -> list[str]:
    """Returns the errors in the dtypes of a state_dict for an Int4Linear.

    Args:
        weight: the state_dict's weight, which must be empty.
        tensors: the module's tensors, by name.
    """
    found = []
    if weight is not None and weight.numel() > 0:
        found.append(
            f"{prefix}weight must be empty, but got {tuple(weight.shape)}; load it into nn.Linear "
            "and use Int4Linear.from_linear"
        )
    for name, tensor in tensors:
        given, floating = state.get(prefix + name), tensor.is_floating_point()
        if given is None or (given.is_floating_point() if floating else given.dtype == torch.int32):
            continue
        expected = "floating point" if floating else "int32"
        found.append(
            f"{prefix}{name} must be {expected}, but got {given.dtype}; cast the module with "
            ".to(dtype) and not its state_dict"
        )
    return [f"Int4Linear.load_state_dict: {text}" for text in found]
