"""The loss of a head whose vocabulary is sharded over the processes.

Each process computes the statistics of its own logits and sends 8 bytes a row, 12 with label
smoothing. Where the loss keeps exponentials (csrc/losses/exponentials.h), a row's factor is
corrected after the exchange: the shard divides its exponentials by their own sum, the loss by the
sum of all shards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel.style import ParallelStyle

from torchweld._library import ops
from torchweld._types import Keep, Reduction
from torchweld.nn import LinearCrossEntropy

from .collectives import begin_sum, gathered, summed
from .tensors import (
    as_in_autocast,
    function_input,
    local_parameters,
    once_outside_autocast,
    parameter_gradients,
    parameter_of,
    shard_parameter,
)
from .vocabulary_rows import IGNORED, OP, Statistics, Targets, Terms, completed_factor

_KEEPS = ("auto", "exponentials", "nothing")
_KEEP_SENTENCE = "keep must be 'auto', 'exponentials' or 'nothing'"


def _reduced(loss: Tensor, ignored: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / (~ignored).sum()


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mesh: DeviceMesh,
        targets: Targets,
        reduction: str,
        terms: Terms,
        keep: str,
        options: dict[str, Any],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        local = local_parameters(weight, bias)
        smooths = terms.label_smoothing != 0
        local_loss, local_lse, y, factor, mean = ops.linear_cross_entropy_exponentials_forward(
            x, local[0], targets.local, local[1], reduction="none", ignore_index=IGNORED,
            **options, keep=keep, mean=smooths,
        )  # fmt: skip
        sent = torch.stack([local_loss, local_lse] + [mean] * smooths)
        losses, shards, *means = gathered(mesh, 0, sent[None]).unbind(1)
        lse = torch.logsumexp(shards, 0)
        owner = targets.owner[None]
        # The loss of the target's shard is relative to the lse of that shard. The lse of all shards
        # is larger, so their difference is added.
        loss = losses.gather(0, owner)[0] + (lse - shards.gather(0, owner)[0])
        if y.numel():  # y is empty unless forward kept the exponentials
            rows = Statistics(local_loss, local_lse, loss, lse)
            factor = completed_factor(y, factor, targets, rows, terms, options)
        if smooths:
            uniform = terms.label_smoothing * (lse - targets.mean(means[0]))
            loss = (1 - terms.label_smoothing) * loss + uniform
        loss = (loss + terms.z_loss * lse.square()).masked_fill(targets.ignored, 0)
        ctx.mesh, ctx.targets, ctx.reduction = mesh, targets, reduction
        ctx.terms, ctx.options = terms, options
        ctx.weight, ctx.bias = parameter_of(weight), parameter_of(bias)
        ctx.save_for_backward(x, *local, lse.masked_fill(targets.ignored, 0), y, factor)
        return _reduced(loss, targets.ignored, reduction)

    @staticmethod
    @once_outside_autocast
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, lse, y, factor = ctx.saved_tensors
        targets: Targets = ctx.targets
        terms: Terms = ctx.terms
        if ctx.reduction == "mean":
            dloss = dloss / (~targets.ignored).sum()
        dloss = dloss.expand(lse.shape).masked_fill(targets.ignored, 0)
        wanted = list(ctx.needs_input_grad[6:])
        # The label smoothing of the local mean of z, in proportion to the shard's classes.
        smoothing = terms.label_smoothing * weight.shape[0] / targets.classes
        if y.numel():
            dx, dweight, dbias = _backward_of_exponentials(
                ctx, dloss, x, weight, (y, factor), smoothing, wanted
            )
        else:
            dlse = dloss * (1 + 2 * terms.z_loss * lse)
            dx, dweight, dbias = ops.linear_cross_entropy_backward(
                (dloss * (1 - terms.label_smoothing)).masked_fill(~targets.inside, 0),
                x,
                weight,
                targets.local,
                lse,
                bias,
                reduction="none",
                ignore_index=IGNORED,
                z_loss=terms.z_loss,
                **ctx.options,
                # The op's own loss contributes 1 - label_smoothing of dlse if the target is inside.
                dlse=torch.where(targets.inside, dlse * terms.label_smoothing, dlse),
                dmean=None if smoothing == 0 else dloss * -smoothing,
                output_mask=wanted,
            )
            dx = summed([dx], ctx.mesh)[0] if wanted[0] else None
        return *[None] * 6, dx, *parameter_gradients(ctx, wanted[1:], dweight, dbias)


def _backward_of_exponentials(
    ctx: Any,
    dloss: Tensor,
    x: Tensor,
    weight: Tensor,
    exponentials: tuple[Tensor, Tensor],
    smoothing: float,
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
            ignore_index=IGNORED,
            label_smoothing=smoothing,
            shift=ctx.options["shift"],
            temperature=ctx.options["temperature"],
            output_mask=mask,
        )

    # The sum of dx over the processes runs beside the product of dweight.
    dx = begin_sum(gradients([True, False, False])[0], ctx.mesh) if wanted[0] else None
    _, dweight, dbias = gradients([False, *wanted[1:]])
    return None if dx is None else dx(), dweight, dbias


def vocab_parallel_linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0,
    softcap: float | None = None,
    z_loss: float = 0,
    shift: int = 0,
    temperature: float = 1.0,
    keep: Keep = "auto",
) -> Tensor:
    """Computes :func:`torchweld.linear_cross_entropy` for a weight whose vocabulary is sharded.

    Each process computes the logits of its own classes and gathers two float32 values a row from
    all, three with label_smoothing. Backward gives each process the gradient of its own shard and
    sums the gradient of x over the processes.

    Args:
        x: `(..., K)`, the same in all processes; plain, or a DTensor.
        weight: `(N, K)`, a DTensor with `Shard(0)` on a mesh of one dim.
        target: `(...)`, the same in all processes, plain; from 0 to N - 1 or `ignore_index`.
        bias: `(N,)`, a DTensor placed as the weight.
        reduction, ignore_index, label_smoothing, softcap, z_loss, shift, temperature: as in
            `torchweld.linear_cross_entropy`.
        keep: what forward stores. "exponentials": exponentials of the shard's logits in the dtype
            of x (not with both label_smoothing and softcap). "nothing": backward computes the
            logits again, a chunk at a time. "auto": "exponentials" for bfloat16 on Hopper if
            they can be stored, else "nothing".

    Returns:
        `()`, or with reduction "none" a loss per token; float32 (float64 for float64), plain, the
        same in all processes.

    Raises:
        ValueError: the weight or bias is placed otherwise; a process has no class; another
            reduction or keep, or a label_smoothing out of range; on the CPU a target out of range,
            which is a device assertion on CUDA.
        RuntimeError: a wrong shape, dtype or option.

    Limits: differentiable once.

    Example::

        head = distribute_tensor(torch.randn(1000, 32), mesh, [Shard(0)])
        hidden, target = torch.randn(2, 16, 32), torch.randint(0, 1000, (2, 16))
        loss = torchweld.distributed.vocab_parallel_linear_cross_entropy(hidden, head, target)
    """
    mesh = _mesh_of(weight, bias)
    if isinstance(x, DTensor):
        x = x.redistribute(placements=[Replicate()]).to_local()
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{OP}: reduction must be 'none', 'mean' or 'sum', but got {reduction!r}")
    if keep not in _KEEPS:
        raise ValueError(f"{OP}: {_KEEP_SENTENCE}, but got {keep!r}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{OP}: label_smoothing must be from 0 to 1, but got {label_smoothing}")
    if keep == "exponentials" and label_smoothing != 0 and softcap is not None:
        raise ValueError(
            f"{OP}: keep='exponentials' must have label_smoothing 0 with a softcap, but got "
            f"{label_smoothing}; use keep='auto'"
        )
    if not (
        torch.is_grad_enabled() and any(t.requires_grad for t in (x, weight, bias) if t is not None)
    ):
        keep = "nothing"
    targets = Targets(mesh, weight.shape[0], target, ignore_index, shift)
    options = {"softcap": softcap, "shift": shift, "temperature": temperature}
    return _VocabParallel.apply(
        mesh,
        targets,
        reduction,
        Terms(z_loss, label_smoothing),
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
                f"{OP}: {name} must be a DTensor placed (Shard(0),) on a mesh of one dim, but got "
                f"{got}"
            )
    mesh, classes = weight.device_mesh, weight.shape[0]
    if -(-classes // mesh.size()) * (mesh.size() - 1) >= classes:
        raise ValueError(
            f"{OP}: every one of the mesh's {mesh.size()} processes must have a class of weight, "
            f"but got {classes} classes"
        )
    return mesh


class VocabParallelCrossEntropy(LinearCrossEntropy):
    """A `LinearCrossEntropy` whose weight and bias are DTensors with `Shard(0)`."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        keywords = vocab_parallel_linear_cross_entropy.__kwdefaults__
        options = {name: getattr(self, name) for name in keywords}
        return vocab_parallel_linear_cross_entropy(x, self.weight, target, self.bias, **options)


class VocabParallel(ParallelStyle):
    """Shards the vocabulary of a `LinearCrossEntropy`: `Shard(0)` of weight and bias.

    The call is `loss = module(x, target)`, with x and target replicated, and the loss is the same
    in all processes. See :func:`vocab_parallel_linear_cross_entropy`.

    Raises:
        TypeError: the style is applied to another module.
        ValueError: the module has keep="gradients"; the mesh has more than one dim; in a call, a
            process has no class.

    Example::

        criterion = torchweld.nn.LinearCrossEntropy(32, 1000, shift=1)
        parallelize_module(criterion, mesh, torchweld.distributed.VocabParallel())
        loss = criterion(torch.randn(2, 16, 32), torch.randint(0, 1000, (2, 16)))
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
        if module.keep not in _KEEPS:
            raise ValueError(f"VocabParallel: {_KEEP_SENTENCE}, but got {module.keep!r}")
        for name, parameter in list(module.named_parameters(recurse=False)):
            shard_parameter(module, name, parameter, device_mesh, Shard(0), self.src_data_rank)
        module.__class__ = VocabParallelCrossEntropy
        return module
