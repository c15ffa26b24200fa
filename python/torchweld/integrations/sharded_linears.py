"""Linear layers whose products a part computes itself: plain ones, and those of parallelize.

Each process has the columns of some of a block's layers and the rows of others. Where it has
columns, a part calls its op with them, and the gradient of x is summed over the processes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchweld.ops.stock import is_plain

from .modules import hooked
from .part import instance_refusal, plain_tensors

COLUMNS: tuple[type[nn.Linear], ...] = (nn.Linear,)
if torch.distributed.is_available():
    from torchweld.distributed.collectives import copy_to_tp_region
    from torchweld.distributed.linears import ColumnLinear, RowLinear
    from torchweld.distributed.tensors import local_of, local_weight

    COLUMNS += (ColumnLinear,)


def is_columns(layer: nn.Module) -> bool:
    """Whether a layer is torch's Linear, whole or with this process's columns."""
    return type(layer) in COLUMNS and is_plain(layer, type(layer))


def why_called(layers: Mapping[str, nn.Module]) -> str:
    """Names the layers that must be called, each with the reason; "" where an op can compute them.

    Args:
        layers: Linear layers of a part, by name.
    """
    names: dict[str, list[str]] = {}
    for name, layer in layers.items():
        reason = instance_refusal(layer) or ("it has hooks" if hooked(layer) else None)
        if type(layer) not in COLUMNS:
            kind = f"{type(layer).__module__}.{type(layer).__qualname__}"
            reason = f"{kind}, not torch's Linear"
        if reason is not None:
            names.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(some)}: {reason}" for reason, some in names.items())


def has_rows(layer: nn.Module, mesh: Any) -> bool:
    """Whether a layer's results are sums over a mesh of each process's rows; None: it is whole."""
    if mesh is None:
        return is_plain(layer, nn.Linear)
    return is_plain(layer, RowLinear) and mesh_of(layer) == mesh and layer.output.is_replicate()


def mesh_of(layer: nn.Module) -> Any:
    """The mesh over which parallelize has sharded a layer, None where it is whole."""
    return None if type(layer) is nn.Linear else layer.weight.device_mesh


def takes(layers: Collection[nn.Module], x: Tensor) -> bool:
    """Whether an op can compute layers of x: all are whole or sharded alike, of one dtype."""
    if not all(map(is_columns, layers)):
        return False
    mesh, *others = map(mesh_of, layers)
    # Unless FSDP2 has gathered a sharded weight, its mesh has one dim more.
    if any(other != mesh for other in others) or (mesh is not None and mesh.ndim > 1):
        return False
    tensors = [own(layer, name) for layer in layers for name in ("weight", "bias")]
    if not plain_tensors(*tensors):
        return False
    cast = type(x) is Tensor and torch.is_autocast_enabled(x.device.type)
    return cast or plain_tensors(x, tensors[0])


def own(layer: nn.Module, name: str) -> Tensor | None:
    """This process's part of a parameter, without a gradient; the parameter of a whole layer."""
    tensor = getattr(layer, name)
    if tensor is None or type(layer) is nn.Linear:
        return tensor
    # Dynamo traces no private attribute of a DTensor.
    return tensor.to_local() if torch.compiler.is_compiling() else local_of(tensor)


def parameters(layers: Collection[nn.Module]) -> tuple[list[Tensor], list[Tensor | None]]:
    """The weights and biases of layers that :func:`takes` admits, with gradients."""
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    if mesh_of(next(iter(layers))) is None:
        return weights, biases
    return list(map(local_weight, weights)), list(map(local_weight, biases))


def copied(mesh: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, whose gradients backward sums over a mesh."""
    return tensors if mesh is None else copy_to_tp_region(mesh, *tensors)
