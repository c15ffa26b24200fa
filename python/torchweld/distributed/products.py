"""Linear layers in sequence parallel: tokens are sharded on one side of the layer, columns on the
other.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchweld._library import ops

from . import overlap
from .collectives import gathered, scattered
from .tensors import (
    as_in_autocast,
    function_input,
    local_parameters,
    once_outside_autocast,
    parameter_gradients,
    parameter_of,
)


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
        local, keeps = local_parameters(weight, bias), activation not in ("none", "relu")
        whole, y, preact = _gathered_linear(mesh, dim, x, *local, activation, True, keeps)
        ctx.mesh, ctx.dim, ctx.activation = mesh, dim, activation
        ctx.weight, ctx.bias = parameter_of(weight), parameter_of(bias)
        ctx.save_for_backward(whole, local[0], y if activation == "relu" else preact)
        return y

    @staticmethod
    @once_outside_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs_dx, *wanted = ctx.needs_input_grad[3:]
        x, weight, kept = ctx.saved_tensors
        if needs_dx and overlap.supports_overlap(ctx.mesh, ctx.dim, dy, weight.t(), gathers=False):
            dz, dbias = ops._activation_backward(
                dy, kept, activation=ctx.activation, sums=wanted[1]
            )
            dz = dy if kept is None else dz
            dx, dweight = overlap.scattered_linear(
                ctx.mesh,
                ctx.dim,
                dz,
                weight.t(),
                meanwhile=lambda: _weight_gradient(dz, x, wanted[0]),
            )
        else:
            dx, dweight, dbias = ops.linear_backward(
                dy, x, weight, kept, activation=ctx.activation, output_mask=[needs_dx, *wanted]
            )
            dx = scattered(ctx.mesh, ctx.dim, dx) if needs_dx else None
        return None, None, None, dx, *parameter_gradients(ctx, wanted, dweight, dbias)


class _ScatteredLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mesh: DeviceMesh, dim: int, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.mesh, ctx.dim = mesh, dim
        ctx.weight, ctx.bias = parameter_of(weight), parameter_of(bias)
        local = local_parameters(weight, bias)
        ctx.save_for_backward(x, local[0])
        return _scattered_linear(mesh, dim, x, *local)

    @staticmethod
    @once_outside_autocast
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs_dx, *wanted = ctx.needs_input_grad[2:]
        dx, (x, weight) = None, ctx.saved_tensors
        if needs_dx and overlap.supports_overlap(ctx.mesh, ctx.dim, dy, weight.t(), gathers=True):
            whole, dx, _ = overlap.gathered_linear(
                ctx.mesh, ctx.dim, dy, weight.t(), keeps_x=any(wanted)
            )
        else:
            whole = gathered(ctx.mesh, ctx.dim, dy)
            dx = whole @ weight if needs_dx else None
        dweight = _weight_gradient(whole, x, wanted[0])
        # `whole` has the tokens of all processes, so the bias gradient needs no sum over processes.
        dbias = _bias_gradient(whole, wanted[1])
        return None, None, dx, *parameter_gradients(ctx, wanted, dweight, dbias)


def _weight_gradient(dy: Tensor, x: Tensor, wanted: bool) -> Tensor | None:
    return dy.flatten(0, -2).t() @ x.flatten(0, -2) if wanted else None


def _bias_gradient(dy: Tensor, wanted: bool) -> Tensor | None:
    if not wanted:
        return None
    if dy.is_cuda and dy.dtype == torch.float64:  # the op supports float64 only on the CPU
        return dy.flatten(0, -2).sum(0)
    # NOTE: torch's column sums take three times as long as this op.
    return ops._activation_backward(dy, sums=True)[1]


def _gathered_linear(
    mesh: DeviceMesh,
    dim: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    keeps_x: bool,
    keeps_preact: bool,
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Returns the gathered x, `linear` of it, and the pre-activation; None for one not kept."""
    options = {"activation": activation}
    if overlap.supports_overlap(mesh, dim, x, weight, gathers=True):
        kept = {"keeps_x": keeps_x, "keeps_preact": keeps_preact}
        return overlap.gathered_linear(mesh, dim, x, weight, bias, **options, **kept)
    whole = gathered(mesh, dim, x)
    if keeps_preact:
        return whole, *ops.linear_forward(whole, weight, bias, **options)
    return whole, ops.linear(whole, weight, bias, **options), None


def _scattered_linear(
    mesh: DeviceMesh, dim: int, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    if overlap.supports_overlap(mesh, dim, x, weight, gathers=False):
        return overlap.scattered_linear(mesh, dim, x, weight, bias)[0]
    # Only rank 0 adds the bias, so that the sum over the processes contains the bias once.
    once = bias if bias is not None and mesh.get_local_rank() == 0 else None
    return scattered(mesh, dim, F.linear(x, weight, once))


def gathered_linear(
    mesh: DeviceMesh,
    dim: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str = "none",
) -> Tensor:
    """Gathers the tokens of all processes and applies `linear` with this process's columns.

    Args:
        mesh: one dim.
        dim: the dim of x, from 0 on, along which the processes have equal shards; not the last.
        x: `(..., K)`, this process's tokens.
        weight, bias: `(N, K)` and `(N,)`, this process's columns; plain, or parameters that are
            DTensors.
        activation: as in :func:`torchweld.linear`.

    Returns:
        `(..., N)`, all tokens. Backward sums the gradients to x over the processes and gives each
        process the gradient of its tokens.
    """
    x = as_in_autocast(x)
    if not torch.is_grad_enabled():
        return _gathered_linear(
            mesh, dim, x, *local_parameters(weight, bias), activation, False, False
        )[1]
    return _GatheredLinear.apply(
        mesh, dim, activation, x, function_input(weight), function_input(bias)
    )


def scattered_linear(
    mesh: DeviceMesh, dim: int, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Multiplies this process's columns, sums the products over the processes, and gives each
    process its tokens of the sum.

    Args:
        mesh: one dim.
        dim: the dim of the result, from 0 on, along which the processes get equal shards; not the
            last.
        x: `(..., K)`, all tokens, this process's columns.
        weight: `(N, K)`, this process's columns; plain, or a parameter that is a DTensor.
        bias: `(N,)`, the same in all processes; plain, or a parameter that is a DTensor.

    Raises:
        ValueError: dim is the last one, or the processes don't divide the tokens.
    """
    size = mesh.size()
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
    x = as_in_autocast(x)
    if not torch.is_grad_enabled():
        return _scattered_linear(mesh, dim, x, *local_parameters(weight, bias))
    return _ScatteredLinear.apply(mesh, dim, x, function_input(weight), function_input(bias))
