"""Products whose tokens travel beside them: those of one process are multiplied while those of
another arrive, or leave.

The copies are torch's symmetric memory's, made by the GPUs' copy engines over NVLink: NCCL's
kernels would take multiprocessors from the product. On two H100s gathering (8192, 4096) of bfloat16
and multiplying it by 8192 columns takes 763 us so, 881 us one after the other, the product alone
718.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed.device_mesh import DeviceMesh

from torchweld._library import ops

# Multiplications of one process's tokens from which on this is used. It takes the host 100 us more,
# and the GPU takes 100 us for 2^35 of them.
_LEAST_PRODUCTS = 1 << 36

_served: dict[str, bool] = {}  # by group: whether its processes see each other's memory


def is_served(mesh: DeviceMesh, dim: int, x: Tensor, rows: int, columns: int) -> bool:
    """Whether tokens along `dim` are to travel beside their product; the same in all processes.

    Args:
        x: what is multiplied; the tokens are the rows of a matrix, whichever dim they are.
        rows: how many tokens one process has.
        columns: of the product.
    """
    if torch.compiler.is_compiling() or not x.is_cuda or mesh.size() == 1:
        return False
    if x.shape[:dim].numel() != 1 or rows * columns * x.shape[-1] < _LEAST_PRODUCTS:
        return False
    name = mesh.get_group().group_name
    if name not in _served and torch.cuda.is_current_stream_capturing():
        return False
    if name not in _served:
        try:
            symmetric_memory.get_symm_mem_workspace(name, min_size=1 << 20)
            _served[name] = True
        except torch.OutOfMemoryError:  # of this process alone
            raise
        except RuntimeError:  # other hosts, or no NVLink: torch asks all processes before it raises
            _served[name] = False
    return _served[name]


def gathered_linear(
    mesh: DeviceMesh,
    dim: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    keeps_preact: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """All processes' x, and `linear` of it; without a gradient.

    Returns:
        x, y, and the pre-activation where it is kept.
    """
    x, shape = x.contiguous(), list(x.shape)
    shape[dim] *= mesh.size()
    whole, y = x.new_empty(shape), x.new_empty([*shape[:-1], weight.shape[0]])
    preact = torch.empty_like(y) if keeps_preact else None
    parts = [None if t is None else t.flatten(0, -2).chunk(mesh.size()) for t in (y, preact)]

    def multiply(tokens: Tensor, rank: int) -> None:
        y_part, preact_part = (None if part is None else part[rank] for part in parts)
        ops._linear_part(tokens, weight, bias, y_part, preact_part, activation=activation)

    symmetric_memory._pipelined_all_gather_and_consume(
        x.flatten(0, -2), multiply, whole.flatten(0, -2), mesh.get_group().group_name
    )
    return whole, y, preact


def scattered_linear(
    mesh: DeviceMesh, dim: int, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """The sum of all processes' products of x, of which each gets its tokens; without a gradient.

    Args:
        bias: what this process adds to the sum.
    """
    shape, size, columns = list(x.shape), mesh.size(), weight.shape[0]
    shape[dim] //= size
    tokens = x.contiguous().flatten(0, -2).chunk(size)
    terms = x.new_empty(size, len(tokens[0]), columns)  # one of each process, of this one's tokens

    def multiply(rank: int, part: Tensor) -> None:
        if bias is None:
            torch.mm(tokens[rank], weight.t(), out=part)
        else:
            torch.addmm(bias, tokens[rank], weight.t(), out=part)

    symmetric_memory._pipelined_produce_and_all2all(
        multiply, terms.flatten(0, 1), mesh.get_group().group_name
    )
    return terms.sum(0).view([*shape[:-1], columns])
