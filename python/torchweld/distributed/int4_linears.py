"""`Int4Linear` layers whose columns or rows are sharded over the processes.

The tensors of a sharded layer are plain: words of eight codes are no dim that a DTensor could
shard. A row-parallel layer has whole groups, so that no scale is in two processes.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from torchweld._library import ops
from torchweld.nn import Int4Linear

from .collectives import columns_of, reduce_from_tp_region


class ColumnInt4Linear(Int4Linear):
    """Computes this process's columns of the result from a replicated x."""

    mesh: DeviceMesh

    def forward(self, x: Tensor) -> Tensor:
        return columns_of(self.mesh, x, lambda x: self.compute(x, self.bias))


class RowInt4Linear(Int4Linear):
    """Sums the products of all processes' columns of x."""

    mesh: DeviceMesh

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, DTensor):
            x = x.redistribute(placements=[Shard(x.dim() - 1)]).to_local()
        y = reduce_from_tp_region(self.mesh, self.compute(x, None))
        return y if self.bias is None else y + self.bias.to(y.dtype)


def unsupported_reason(layer: Int4Linear, style: str, size: int) -> str | None:
    """Returns why a layer can't have a style, as the end of a sentence, or None."""
    if style not in ("colwise", "rowwise"):
        return f"must be a float layer in the style {style}, but got an Int4Linear; put it in skip"
    if style == "colwise":
        return None
    groups = layer.in_features // layer.group_size
    if groups > 1 and groups % size:
        return (
            f"must have a multiple of the mesh's {size} processes as groups of its in_features, "
            f"but got {groups}; quantise with another group_size"
        )
    if layer.in_features // size % 8:
        return f"must have in_features of a multiple of {8 * size}, but got {layer.in_features}"
    return None


def shard_int4(
    layer: Int4Linear, dim: int, mesh: DeviceMesh, src_data_rank: int | None
) -> Int4Linear:
    """Keeps this process's rows (dim 0) or columns (dim 1) of a layer's weight, in place.

    Args:
        src_data_rank: the process whose tensors are sharded; None if all have the same.
    """
    qweight, scale, zero = (tensor.contiguous() for tensor in layer.portable())
    group, size, rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()
    if src_data_rank is not None:
        source = dist.get_global_rank(group, src_data_rank)
        for tensor in (qweight, scale, zero, layer.bias):
            if tensor is not None:
                dist.broadcast(tensor, source, group)
    if dim == 0:
        layer.out_features //= size
        layer.qweight, layer.scale, layer.zero = (
            _part(tensor, 0, rank, size) for tensor in (qweight, scale, zero)
        )
        if layer.bias is not None:
            layer.bias = _part(layer.bias, 0, rank, size)
    else:
        if scale.shape[1] > 1:
            zeros = ops.int4_unpack(zero, scale.shape[1])
            scale, zero = _part(scale, 1, rank, size), ops.int4_pack(_part(zeros, 1, rank, size))
        layer.in_features //= size
        layer.group_size = min(layer.group_size, layer.in_features)
        layer.qweight, layer.scale, layer.zero = _part(qweight, 1, rank, size), scale, zero
    layer.repack()
    layer.__class__ = RowInt4Linear if dim else ColumnInt4Linear
    layer.mesh = mesh
    return layer


def _part(tensor: Tensor, dim: int, rank: int, size: int) -> Tensor:
    """Copies a process's part, so that the whole tensor can be freed."""
    return tensor.chunk(size, dim)[rank].clone()
