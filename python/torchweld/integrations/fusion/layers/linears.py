"""Describes linear layers whose products a fused module computes: plain or of parallelize.

parallelize gives each process columns of some of a block's layers and rows of others. With layers
that are sharded by columns, the module calls its op on this process's columns, and backward sums
the gradient of x over the processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from torchweld.ops.stock import is_plain, plain_tensors, untouched

from .fused_module import instance_refusal
from .stock_modules import hooked, weight_and_bias

_WHOLE = {nn.Linear}
COLUMNS: tuple[type[nn.Linear], ...] = (nn.Linear,)
_HEADS: tuple[type[nn.Linear], ...] = ()
if torch.distributed.is_available():
    from torchweld.distributed.collectives import copy_to_tp_region
    from torchweld.distributed.linears import ColumnLinear, GatheredLinear, RowLinear
    from torchweld.distributed.tensors import local_of, local_weight
    from torchweld.distributed.vocabulary import vocab_parallel_linear_cross_entropy

    COLUMNS += (ColumnLinear,)
    _HEADS += (GatheredLinear,)


def why_called(layers: Mapping[str, nn.Module]) -> str:
    """Names the layers that must be called, with reasons; "" if an op can compute them all."""
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
    """Whether a layer is plain and, with a mesh, sharded by rows over it and summed."""
    if mesh is None:
        return is_plain(layer, nn.Linear)
    return is_plain(layer, RowLinear) and mesh_of(layer) == mesh and layer.output.is_replicate()


def has_classes(head: nn.Module | None) -> bool:
    """Whether parallelize has sharded a plain head and given each process some classes."""
    return type(head) in _HEADS and is_plain(head, type(head))


def sharded_loss(*args: Any, **options: Any) -> Tensor:
    """Computes `linear_cross_entropy` of a sharded head."""
    return vocab_parallel_linear_cross_entropy(*args, **options)


def mesh_of(layer: nn.Module) -> Any:
    """Returns the mesh over which parallelize has sharded a layer, or None if it is whole."""
    return None if type(layer) is nn.Linear else layer.weight.device_mesh


class Operands(NamedTuple):
    """Weights and biases of linear layers, with gradients, and the mesh that shards them."""

    weights: list[Tensor]
    biases: list[Tensor | None]
    mesh: Any = None


def operands(layers: Sequence[nn.Module], x: Tensor) -> Operands | None:
    """Returns the operands of an op that computes several layers of x.

    None unless all layers are whole, or all are sharded alike, and all have one dtype.
    """
    if _has_any_global_hook() or not untouched(*layers):
        return None
    mesh = None
    if {type(layer) for layer in layers} != _WHOLE:
        mesh, *meshes = map(_mesh_of_columns, layers)
        # A weight that FSDP2 shards too and has not gathered has a mesh of more than one dim.
        if mesh is None or any(other != mesh for other in meshes) or mesh.ndim > 1:
            return None
    weights, biases = [], []
    for layer in layers:
        weight, bias = weight_and_bias(layer)
        weights.append(weight)
        biases.append(bias)
    if mesh is None:
        tensors = weights + biases
    else:
        tensors = [own(layer, name) for layer in layers for name in ("weight", "bias")]
        weights, biases = list(map(local_weight, weights)), list(map(local_weight, biases))
    if not plain_tensors(x, *tensors):
        cast = type(x) is Tensor and torch.is_autocast_enabled(x.device.type)
        if not cast or not plain_tensors(*tensors):
            return None
    return Operands(weights, biases, mesh)


def _mesh_of_columns(layer: nn.Module) -> Any:
    """Returns the mesh over which a layer's columns are sharded, or None if they are not."""
    return mesh_of(layer) if type(layer) in COLUMNS else None


def own(layer: nn.Module, name: str) -> Tensor | None:
    """Returns this process's shard of a parameter, without a gradient; all of a whole layer's."""
    tensor = getattr(layer, name)
    if tensor is None or type(layer) is nn.Linear:
        return tensor
    # local_of reads a private attribute of DTensor, which Dynamo can't trace.
    return tensor.to_local() if torch.compiler.is_compiling() else local_of(tensor)


def local(layer: nn.Module) -> Tensor:
    """Returns this process's shard of a layer's weight, with its gradient."""
    return local_weight(layer.weight)


def copied(mesh: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors; backward sums their gradients over a mesh, if there is one."""
    return tensors if mesh is None else copy_to_tp_region(mesh, *tensors)
