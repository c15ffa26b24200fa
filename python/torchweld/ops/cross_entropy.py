"""Cross entropy of given logits."""

from __future__ import annotations

import torch.fx
from torch import Tensor, nn

from torchweld._library import ops, require
from torchweld._refusals import readable_errors
from torchweld._types import Reduction


@readable_errors
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0,
    softcap: float | None = None,
    z_loss: float = 0,
    shift: int = 0,
    temperature: float = 1.0,
) -> Tensor:
    """Computes `F.cross_entropy(z, target)` over the last dim of the logits z.

    With reduction "mean" or "sum" the forward pass also computes the gradient of the logits, so
    training reads the logits from memory once. Calls with reduction "none" or float16, and calls
    under torch.compile, torch.func or saved-tensor hooks (activation checkpointing sets such
    hooks), compute the gradient in backward and read the logits twice. The page "losses" has the
    memory. `linear_cross_entropy` computes the loss of hidden states without whole logits.

    Args:
        logits: `(..., N)` float32, float16 or bfloat16 (float64 on the CPU), N the number of
            classes. They are never overwritten.
        target: `(...)` int64 or int32, from 0 to N - 1 or `ignore_index`.
        reduction: "none", "sum" or "mean"; "mean" divides by the number of targets that are not
            ignored, and is NaN if all are.
        ignore_index: rows with this target add nothing to the loss and get a gradient of 0, even
            where their logits are infinite or NaN.
        label_smoothing: eps of `(1 - eps) (lse - z_t) + eps (lse - mean(z))`, from 0 to 1; z_t is
            the target's logit.
        softcap: c; the logits become `c tanh(z / c)`. None for no cap.
        z_loss: factor of `lse(z)^2`, added to each row's loss (PaLM).
        shift: 1 for the loss of the next token, which drops the last position of logits
            `(..., S, N)` and the first of target `(..., S)`.
        temperature: the logits are divided by it, after the cap.

    Returns:
        `()`, or with reduction "none" target's shape (its last size less 1 with shift=1); float32
        (float64 for float64). An ignored row's loss is 0.

    Raises:
        RuntimeError: a wrong shape, dtype, device or option; on the CPU a target out of range,
            which is a device assertion on CUDA.

    Limits: differentiable once.

    Example::

        logits = torch.randn(8, 1000, requires_grad=True)
        target = torch.randint(0, 1000, (8,))
        loss = torchweld.cross_entropy(logits, target, label_smoothing=0.1)
        loss.backward()
    """
    return ops.cross_entropy(
        logits,
        target,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=softcap,
        z_loss=z_loss,
        shift=shift,
        temperature=temperature,
    )


class CrossEntropyLoss(nn.Module):
    """Computes `nn.CrossEntropyLoss` for class indices, with a soft cap and a z-loss.

    The loss of 16-bit logits is float32; torch's has the logits' dtype.

    Args:
        weight: None; class weights are refused.
        ignore_index, reduction, label_smoothing, softcap, z_loss: as in `torchweld.cross_entropy`.

    Raises:
        ValueError: class weights, or logits with more than two dims, whose classes torch reads
            from dim 1.

    Example::

        criterion = torchweld.nn.CrossEntropyLoss(label_smoothing=0.1)
        loss = criterion(torch.randn(8, 1000, requires_grad=True), torch.randint(0, 1000, (8,)))
        loss.backward()
    """

    __constants__ = ["ignore_index", "reduction", "label_smoothing", "softcap", "z_loss"]

    def __init__(
        self,
        weight: None = None,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        z_loss: float = 0.0,
    ) -> None:
        super().__init__()
        require()
        if weight is not None:
            raise ValueError(
                "torchweld.nn.CrossEntropyLoss: weight must be None, but got class weights; use "
                "reduction='none' and multiply by weight[target]"
            )
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.softcap = softcap
        self.z_loss = z_loss

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        _check_rows(input)
        return ops.cross_entropy(
            input,
            target,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            softcap=self.softcap,
            z_loss=self.z_loss,
        )

    def extra_repr(self) -> str:
        return f"reduction={self.reduction}, ignore_index={self.ignore_index}"


@torch.fx.wrap  # fx's symbolic_trace knows no sizes, so it keeps the call as a node
def _check_rows(input: Tensor) -> None:
    if input.dim() > 2:
        raise ValueError(
            "torchweld.nn.CrossEntropyLoss: input must be (N,) or (rows, N), but got "
            f"{input.dim()} dims; use torchweld.cross_entropy, whose classes are the last dim"
        )
