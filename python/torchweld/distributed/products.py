"""Products between tensors whose tokens are on several processes and those whose columns are:
sequence parallel.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from torchweld._library import ops

from .tensors import as_in_autocast, gathered, starting_scatter


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mesh: DeviceMesh,
        dim: int,
        activation: str,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        whole = gathered(mesh, dim, x)
        y, preact = ops.linear_forward(whole, weight, bias, activation=activation)
        ctx.mesh, ctx.dim, ctx.activation = mesh, dim, activation
        kept = {"none": None, "relu": y}.get(activation, preact)
        ctx.save_for_backward(whole, weight, kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved, (of_x, of_weight, of_bias) = ctx.saved_tensors, ctx.needs_input_grad[3:]

        def gradients(*wanted: bool) -> tuple[Tensor, Tensor, Tensor]:
            return ops.linear_backward(
                dy, *saved, activation=ctx.activation, output_mask=list(wanted)
            )

        dx = dweight = dbias = None
        if of_x:  # first, because the other processes wait for it
            scattered = starting_scatter(ctx.mesh, ctx.dim, gradients(True, False, False)[0])
        if of_weight or of_bias:
            _, dweight, dbias = gradients(False, of_weight, of_bias)
        if of_x:
            dx = scattered()
        return None, None, None, dx, dweight if of_weight else None, dbias if of_bias else None


class _ScatteredLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mesh: DeviceMesh, dim: int, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.mesh, ctx.dim = mesh, dim
        ctx.save_for_backward(x, weight)
        y = starting_scatter(mesh, dim, ops.linear(x, weight))()
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        # The bias's gradient is of all tokens here: it needs no sum over the processes.
        whole = gathered(ctx.mesh, ctx.dim, dy)
        grads = ops.linear_backward(
            whole, *ctx.saved_tensors, None, activation="none", output_mask=list(wanted)
        )
        given = (grad if want else None for grad, want in zip(grads, wanted, strict=True))
        return None, None, *given


def gathered_linear(
    mesh: DeviceMesh,
    dim: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str = "none",
) -> Tensor:
    """`linear` of the tokens of all processes, with the columns that a process has.

    Args:
        mesh: one dim.
        dim: of x, along which each process has an equal part; not the last.
        x: `(..., K)`, this process's tokens.
        weight, bias: `(N, K)` and `(N,)`, this process's columns.
        activation: as of :func:`torchweld.linear`.

    Returns:
        `(..., N)`, all tokens. The gradient to x is summed over the processes, while that to the
        weight is computed, and each has the part of its tokens.
    """
    x, weight, bias = (None if t is None else as_in_autocast(t) for t in (x, weight, bias))
    dim = dim % x.dim()
    if not torch.is_grad_enabled():
        return ops.linear(gathered(mesh, dim, x), weight, bias, activation=activation)
    return _GatheredLinear.apply(mesh, dim, activation, x, weight, bias)


def scattered_linear(
    mesh: DeviceMesh, dim: int, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """`linear` of columns that are on all processes: the sum of their products, of which each
    process gets some tokens.

    Args:
        mesh: one dim.
        dim: of the result, along which each process gets an equal part; not the last.
        x: `(..., K)`, all tokens, this process's columns.
        weight: `(N, K)`, this process's columns.
        bias: `(N,)`, the same in all processes.

    Raises:
        ValueError: dim is the last one, or the processes don't divide the tokens.
    """
    dim, size = dim % x.dim(), mesh.size()
    if dim == x.dim() - 1:
        raise ValueError(
            "Rowwise: output_layouts must be Replicate() or a dim of the tokens, but got "
            f"Shard({dim}) of {x.dim()} dims"
        )
    if x.shape[dim] % size:
        raise ValueError(
            f"Rowwise: dim {dim} of x must be a multiple of the mesh's {size} processes, but got "
            f"{x.shape[dim]}"
        )
    x, weight, bias = (None if t is None else as_in_autocast(t) for t in (x, weight, bias))
    return _ScatteredLinear.apply(mesh, dim, x, weight, bias)
