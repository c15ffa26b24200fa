"""The rows of a loss whose vocabulary is sharded: their targets and statistics."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

OP = "vocab_parallel_linear_cross_entropy"
# The index of an ignored row in the targets of a shard.
IGNORED = -100


class Targets:
    """Converts the targets of all rows to classes of this process's shard."""

    def __init__(
        self, mesh: DeviceMesh, classes: int, target: Tensor, ignore_index: int, shift: int
    ) -> None:
        # The number of classes per shard, as DTensor divides them. Only the last shard may have
        # fewer: _mesh_of() refuses a mesh with an empty shard.
        self.size, self.classes = -(-classes // mesh.size()), classes
        ignored = target == ignore_index
        _check_targets(target, classes, ignored)
        owner = target.masked_fill(ignored, 0).long() // self.size
        inside = ~ignored & (owner == mesh.get_local_rank())
        # Targets of other shards are replaced by class 0. Their losses are not read.
        local = torch.where(inside, target - mesh.get_local_rank() * self.size, 0)
        self.local = local.masked_fill(ignored, IGNORED)
        # With shift=1, the first position of each sequence is the target of no row.
        self.owner, self.ignored, self.inside = (
            t[..., 1:] if shift else t for t in (owner, ignored, inside)
        )

    def mean(self, means: Tensor) -> Tensor:
        """Returns the mean over the vocabulary, given the means over the shards `(shards, ...)`."""
        last = self.classes - (means.shape[0] - 1) * self.size
        return (means[:-1].sum(0) * self.size + means[-1] * last) / self.classes


def _check_targets(target: Tensor, classes: int, ignored: Tensor) -> None:
    valid = ((target >= 0) & (target < classes) | ignored).all()
    sentence = f"{OP}: target must be from 0 to N - 1 = {classes - 1} or ignore_index"
    if target.is_cuda:
        torch._assert_async(valid, sentence)
    elif not torch.compiler.is_compiling() and not valid:
        wrong = target[~((target >= 0) & (target < classes) | ignored)]
        raise ValueError(f"{sentence}, but got {wrong.flatten()[0].item()}")


class Statistics(NamedTuple):
    """Values per token: of this process's shard, and of all shards. The losses are lse - z_t."""

    local_loss: Tensor
    local_lse: Tensor
    loss: Tensor
    lse: Tensor


class Terms(NamedTuple):
    """The terms of the loss beside lse - z_t, as in `torchweld.linear_cross_entropy`."""

    z_loss: float
    label_smoothing: float


def completed_factor(
    y: Tensor,
    factor: Tensor,
    targets: Targets,
    rows: Statistics,
    terms: Terms,
    options: dict[str, Any],
) -> Tensor:
    """Writes the exponential at each row's target into y `(..., N)`.

    Args:
        y, factor: results of `linear_cross_entropy_exponentials_forward` with the local targets.
            The op has overwritten y at the local target: class 0 if another shard has the target.

    Returns:
        The factor of each row for the loss of all shards, 0 for an ignored row.
    """
    softcap, temperature = options["softcap"], options["temperature"]
    tokens, local, stored = targets.local, factor, y
    if options["shift"]:  # the last position has no target
        tokens, local, stored = tokens[..., 1:], factor[..., :-1], y[..., :-1, :]
    slope = 1 + 2 * terms.z_loss * rows.lse
    slope = torch.where(slope.abs() < 1e-10, 1e-10, slope)
    # If a shard's logits are all -inf, its lse is -inf and the factor infinite, but it adds 0.
    whole = torch.where(rows.local_lse == -torch.inf, 0, local * (rows.local_lse - rows.lse).exp())
    whole = whole * slope
    # At a target in the shard, y is about -1 / factor. The factor has a minimum, so that y and its
    # products are finite. The other exponentials of such a row are below 2^64 (1 in float16), so
    # the error of their gradients is below 2^-36 (2^-14).
    smallest = (2.0**-14 if y.dtype == torch.float16 else 2.0**-100) / temperature
    of_target = whole.abs().clamp(min=smallest).copysign(whole)
    whole = torch.where(targets.inside, of_target, whole).masked_fill(targets.ignored, 0)
    # exp(-loss) is the target's probability; if it is elsewhere, exp(-local_loss) is class 0's.
    at_target = slope * (-rows.loss).exp() - (1 - terms.label_smoothing)
    p = torch.where(targets.inside, at_target, (-rows.local_loss).exp())
    value = p / torch.where(targets.inside, whole, local)
    if softcap is not None:
        z = rows.local_lse - rows.local_loss
        value = value * (1 - (z * temperature / softcap).square())
    value = (value / temperature).masked_fill(targets.ignored | (whole == 0), 0)
    tokens = tokens.clamp(min=0).long().unsqueeze(-1)
    stored.scatter_(-1, tokens, value.unsqueeze(-1).to(y.dtype))
    if terms.label_smoothing != 0:
        # Backward adds the uniform term to the rows whose factor is not 0, and divides by the
        # factor, which so needs a minimum. A row below the minimum has exponentials below 2^64.
        least = whole.abs().clamp(min=2.0**-100 / temperature).copysign(whole)
        whole = least.masked_fill(targets.ignored, 0)
    return F.pad(whole, (0, 1)) if options["shift"] else whole
