"""The loss of a head whose vocabulary is sharded over the processes.

Each process computes the statistics of its own logits and sends 8 bytes a row. Where the loss keeps
exponentials (csrc/losses/exponentials.h), a row's factor is corrected after the exchange: the shard
divides its exponentials by their own sum, the loss by the sum of all shards.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel.style import ParallelStyle

from torchweld._library import ops
from torchweld.nn import LinearCrossEntropy

from .collectives import begin_sum, gathered, summed
from .tensors import (
    as_in_autocast,
    function_input,
    gradient_of,
    local_of,
    once_outside_autocast,
    parameter_of,
    shard_parameter,
)

_OP = "vocab_parallel_linear_cross_entropy"
# The index of an ignored row in the targets of a shard.
_IGNORED = -100
_KEEPS = ("auto", "exponentials", "nothing")
_KEEP_SENTENCE = "keep must be 'auto', 'exponentials' or 'nothing'"


class _Targets:
    """The targets of all rows, as classes of this process's shard."""

    def __init__(
        self, mesh: DeviceMesh, classes: int, target: Tensor, ignore_index: int, shift: int
    ) -> None:
        # The number of classes per shard, as DTensor divides them: only the last shards may be
        # smaller.
        size = -(-classes // mesh.size())
        ignored = target == ignore_index
        _check_targets(target, classes, ignored)
        owner = target.masked_fill(ignored, 0).long() // size
        inside = ~ignored & (owner == mesh.get_local_rank())
        # Targets of other shards are replaced by class 0. Their losses are not read.
        local = torch.where(inside, target - mesh.get_local_rank() * size, 0)
        self.local = local.masked_fill(ignored, _IGNORED)
        # With shift=1, the first position of each sequence is the target of no row.
        self.owner, self.ignored, self.inside = (
            t[..., 1:] if shift else t for t in (owner, ignored, inside)
        )


def _check_targets(target: Tensor, classes: int, ignored: Tensor) -> None:
    valid = ((target >= 0) & (target < classes) | ignored).all()
    sentence = f"{_OP}: target must be from 0 to N - 1 = {classes - 1} or ignore_index"
    if target.is_cuda:
        torch._assert_async(valid, sentence)
    elif not torch.compiler.is_compiling() and not valid:
        wrong = target[~((target >= 0) & (target < classes) | ignored)]
        raise ValueError(f"{sentence}, but got {wrong.flatten()[0].item()}")


def _reduced(loss: Tensor, ignored: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / (~ignored).sum()


class _Statistics(NamedTuple):
    """A value per token, of this process's shard and of all shards."""

    local_loss: Tensor
    local_lse: Tensor
    loss: Tensor  # without z_loss
    lse: Tensor


def _complete(
    y: Tensor,
    factor: Tensor,
    targets: _Targets,
    rows: _Statistics,
    z_loss: float,
    options: dict[str, Any],
) -> Tensor:
    """Writes the exponential at each row's target into y `(..., N)`.

    Args:
        y, factor: of `linear_cross_entropy_exponentials_forward` with the local targets. It has
            overwritten y at the local target, which is class 0 where another shard has the target.

    Returns:
        The factor of each row for the loss of all shards, 0 where the row is ignored.
    """
    softcap, temperature = options["softcap"], options["temperature"]
    tokens, local, stored = targets.local, factor, y
    if options["shift"]:  # the last position has no target
        tokens, local, stored = tokens[..., 1:], factor[..., :-1], y[..., :-1, :]
    slope = 1 + 2 * z_loss * rows.lse
    slope = torch.where(slope.abs() < 1e-10, 1e-10, slope)
    # A shard without a possible class has an lse of -inf and an infinite factor.
    whole = torch.where(rows.local_lse == -torch.inf, 0, local * (rows.local_lse - rows.lse).exp())
    whole = whole * slope
    # At a target in the shard, y is about -1 / factor. The factor has a minimum, so that y and its
    # products are finite. The other exponentials of such a row are below 2^64 (1 in float16), so
    # the error of their gradients is below 2^-36 (2^-14).
    smallest = (2.0**-14 if y.dtype == torch.float16 else 2.0**-100) / temperature
    of_target = whole.abs().clamp(min=smallest).copysign(whole)
    whole = torch.where(targets.inside, of_target, whole).masked_fill(targets.ignored, 0)
    # The logits at the local targets are lse - loss of the shard that has them.
    p = torch.where(targets.inside, slope * (-rows.loss).exp() - 1, (-rows.local_loss).exp())
    value = p / torch.where(targets.inside, whole, local)
    if softcap is not None:
        z = rows.local_lse - rows.local_loss
        value = value * (1 - (z * temperature / softcap).square())
    value = (value / temperature).masked_fill(targets.ignored | (whole == 0), 0)
    tokens = tokens.clamp(min=0).long().unsqueeze(-1)
    stored.scatter_(-1, tokens, value.unsqueeze(-1).to(y.dtype))
    return F.pad(whole, (0, 1)) if options["shift"] else whole


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mesh: DeviceMesh,
        targets: _Targets,
        reduction: str,
        z_loss: float,
        keep: str,
        options: dict[str, Any],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        parts = [None if t is None else as_in_autocast(local_of(t)) for t in (weight, bias)]
        forward, kept = ops.linear_cross_entropy_forward, {}
        if keep != "nothing":
            forward, kept = ops.linear_cross_entropy_exponentials_forward, {"keep": keep}
        loss, local_lse, *exponentials = forward(
            x, parts[0], targets.local, parts[1], reduction="none", ignore_index=_IGNORED,
            **options, **kept,
        )  # fmt: skip
        losses, shards = gathered(mesh, 0, torch.stack((loss, local_lse))[None]).unbind(1)
        lse = torch.logsumexp(shards, 0)
        owner = targets.owner[None]
        # The loss of the target's shard is relative to the lse of that shard. The lse of all shards
        # is larger, so their difference is added.
        whole_loss = losses.gather(0, owner)[0] + (lse - shards.gather(0, owner)[0])
        # With keep="auto" the exponentials are empty if no kernel computes them.
        if exponentials and exponentials[0].numel():
            y, factor = exponentials
            rows = _Statistics(loss, local_lse, whole_loss, lse)
            exponentials[1] = _complete(y, factor, targets, rows, z_loss, options)
        loss = (whole_loss + z_loss * lse.square()).masked_fill(targets.ignored, 0)
        ctx.mesh, ctx.targets, ctx.reduction = mesh, targets, reduction
        ctx.z_loss, ctx.options = z_loss, options
        ctx.weight, ctx.bias = parameter_of(weight), parameter_of(bias)
        ctx.save_for_backward(x, *parts, lse.masked_fill(targets.ignored, 0), *exponentials)
        return _reduced(loss, targets.ignored, reduction)

    @staticmethod
    @once_outside_autocast
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, lse, *exponentials = ctx.saved_tensors
        targets: _Targets = ctx.targets
        if ctx.reduction == "mean":
            dloss = dloss / (~targets.ignored).sum()
        dloss = dloss.expand(lse.shape).masked_fill(targets.ignored, 0)
        wanted = list(ctx.needs_input_grad[6:])
        if exponentials and exponentials[0].numel():
            dx, dweight, dbias = _backward_of_exponentials(
                ctx, dloss, x, weight, exponentials, wanted
            )
            return *[None] * 6, dx, dweight, dbias
        elsewhere = dloss * (1 + 2 * ctx.z_loss * lse)
        dx, dweight, dbias = ops.linear_cross_entropy_backward(
            dloss.masked_fill(~targets.inside, 0),
            x,
            weight,
            targets.local,
            lse,
            bias,
            reduction="none",
            ignore_index=_IGNORED,
            z_loss=ctx.z_loss,
            **ctx.options,
            dlse=elsewhere.masked_fill(targets.inside, 0),
            output_mask=wanted,
        )
        return (
            *[None] * 6,
            summed([dx], ctx.mesh)[0] if wanted[0] else None,
            gradient_of(ctx.weight, dweight) if wanted[1] else None,
            gradient_of(ctx.bias, dbias) if wanted[2] else None,
        )


def _backward_of_exponentials(
    ctx: Any,
    dloss: Tensor,
    x: Tensor,
    weight: Tensor,
    exponentials: list[Tensor],
    wanted: list[bool],
) -> tuple[Tensor | None, ...]:
    def gradients(mask: list[bool]) -> tuple[Tensor, ...]:
        return ops.linear_cross_entropy_exponentials_backward(
            dloss,
            x,
            weight,
            ctx.targets.local,
            *exponentials,
            reduction="none",
            ignore_index=_IGNORED,
            shift=ctx.options["shift"],
            temperature=ctx.options["temperature"],
            output_mask=mask,
        )

    # The sum of dx over the processes runs beside the product of dweight.
    dx = begin_sum(gradients([True, False, False])[0], ctx.mesh) if wanted[0] else None
    _, dweight, dbias = gradients([False, *wanted[1:]])
    return (
        None if dx is None else dx(),
        gradient_of(ctx.weight, dweight) if wanted[1] else None,
        gradient_of(ctx.bias, dbias) if wanted[2] else None,
    )


def vocab_parallel_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    softcap: float | None = None,
    z_loss: float = 0,
    shift: int = 0,
    temperature: float = 1.0,
    keep: str = "auto",
) -> Tensor:
    """:func:`torchweld.linear_cross_entropy` of a weight whose vocabulary is sharded.

    Each process computes the logits of its own classes and gathers two float32 values a row from
    all. Backward gives each process the gradient of its own shard and sums the gradient of x over
    the processes.

    Args:
        x: `(..., K)`, the same in all processes; plain, or a DTensor.
        weight: `(N, K)`, a DTensor with `Shard(0)` on a mesh of one dim.
        target: `(...)`, the same in all processes, plain; from 0 to N - 1 or `ignore_index`.
        bias: `(N,)`, a DTensor placed as the weight.
        reduction, ignore_index, softcap, z_loss, shift, temperature: as in
            `torchweld.linear_cross_entropy`.
        keep: what forward stores. "exponentials": 16-bit exponentials in place of the logits of the
            shard. "nothing": backward computes the logits again, a chunk at a time. "auto":
            "exponentials" for bfloat16 on Hopper, else "nothing".

    Returns:
        `()`, or with reduction "none" a loss per token; float32 (float64 for float64), plain, the
        same in all processes.

    Raises:
        ValueError: the weight or bias is placed otherwise; a process has no class; another
            reduction or keep; on the CPU a target out of range, a device assertion on CUDA.
        RuntimeError: a wrong shape, dtype or option.

    Limits: differentiable once.
    """
    mesh = _mesh_of(weight, bias)
    if isinstance(x, DTensor):
        x = x.redistribute(placements=[Replicate()]).to_local()
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{_OP}: reduction must be 'none', 'mean' or 'sum', but got {reduction!r}")
    if keep not in _KEEPS:
        raise ValueError(f"{_OP}: {_KEEP_SENTENCE}, but got {keep!r}")
    if not (
        torch.is_grad_enabled() and any(t.requires_grad for t in (x, weight, bias) if t is not None)
    ):
        keep = "nothing"
    targets = _Targets(mesh, weight.shape[0], target, ignore_index, shift)
    options = {"softcap": softcap, "shift": shift, "temperature": temperature}
    return _VocabParallel.apply(
        mesh,
        targets,
        reduction,
        z_loss,
        keep,
        options,
        as_in_autocast(x),
        function_input(weight),
        function_input(bias),
    )


def _mesh_of(weight: Tensor, bias: Tensor | None) -> DeviceMesh:
    for name, t in (("weight", weight), ("bias", bias)):
        if t is None:
            continue
        if not (isinstance(t, DTensor) and tuple(t.placements) == (Shard(0),)):
            got = t.placements if isinstance(t, DTensor) else "a plain Tensor"
            raise ValueError(
                f"{_OP}: {name} must be a DTensor placed (Shard(0),) on a mesh of one dim, but got "
                f"{got}"
            )
    mesh, classes = weight.device_mesh, weight.shape[0]
    if -(-classes // mesh.size()) * (mesh.size() - 1) >= classes:
        raise ValueError(
            f"{_OP}: every one of the mesh's {mesh.size()} processes must have a class of weight, "
            f"but got {classes} classes"
        )
    return mesh


class VocabParallelCrossEntropy(LinearCrossEntropy):
    """A `LinearCrossEntropy` whose weight and bias are DTensors with `Shard(0)`."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return vocab_parallel_linear_cross_entropy(
            x,
            self.weight,
            target,
            self.bias,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            softcap=self.softcap,
            z_loss=self.z_loss,
            shift=self.shift,
            temperature=self.temperature,
            keep=self.keep,
        )


class VocabParallel(ParallelStyle):
    """Shards the vocabulary of a `LinearCrossEntropy`: `Shard(0)` of weight and bias.

    The call is `loss = module(x, target)`, with x and target replicated, and the loss is the same
    in all processes. See :func:`vocab_parallel_linear_cross_entropy`.

    Raises:
        TypeError: another module, when it is applied.
        ValueError: the module has label_smoothing or keep="gradients"; the mesh has more than one
            dim, or more processes than it can give classes.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is not LinearCrossEntropy:
            raise TypeError(
                "VocabParallel: module must be LinearCrossEntropy (no subclass, not sharded yet), "
                f"but got {type(module).__name__}"
            )
        if device_mesh.ndim != 1:
            raise ValueError(
                f"VocabParallel: device_mesh must have one dim, but got {device_mesh.ndim}; use "
                'one of its dims, as mesh["tp"]'
            )
        if module.label_smoothing != 0:
            raise ValueError(
                "VocabParallel: label_smoothing must be 0, but got "
                f"{module.label_smoothing}; a process has the logits of its own classes alone"
            )
        if module.keep not in _KEEPS:
            raise ValueError(f"VocabParallel: {_KEEP_SENTENCE}, but got {module.keep!r}")
        for name, parameter in list(module.named_parameters(recurse=False)):
            shard_parameter(module, name, parameter, device_mesh, Shard(0), self.src_data_rank)
        module.__class__ = VocabParallelCrossEntropy
        return module
