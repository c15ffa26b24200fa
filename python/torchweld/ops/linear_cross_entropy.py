"""Cross entropy and log-probabilities of a linear layer; its logits are never whole in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchweld._library import ops, require
from torchweld._refusals import readable_errors
from torchweld._types import Keep, Reduction
from torchweld.ops.linear import reset_as_torch
from torchweld.ops.stock import refuse_computed, refuse_other


@readable_errors
def linear_cross_entropy(
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
    """Computes `F.cross_entropy(z, target)` of the logits `z = F.linear(x, weight, bias)`.

    The logits are computed in float32 for a chunk of rows at a time: 32 MiB, or 4 % of the logits
    if that is more. The page "losses" has the exceptions, and the tensors kept for the gradient.

    Args:
        x: `(..., K)` float32, float16 or bfloat16 (float64 on the CPU).
        weight: `(N, K)` in the dtype of `x`, N the size of the vocabulary; often tied to the
            embedding.
        target: `(...)` int64 or int32, from 0 to N - 1 or `ignore_index`.
        bias: `(N,)` in the dtype of `x`.
        reduction: "none", "sum" or "mean"; "mean" divides by the number of targets that are not
            ignored, and is NaN if all are.
        ignore_index: rows with this target add nothing to the loss and get a gradient of 0, even
            where their logits are infinite or NaN.
        label_smoothing: eps of `(1 - eps) (lse - z_t) + eps (lse - mean(z))`, from 0 to 1; z_t is
            the target's logit.
        softcap: c; the logits become `c tanh(z / c)`. None for no cap.
        z_loss: factor of `lse(z)^2`, added to each row's loss (PaLM).
        shift: 1 for the loss of the next token, which drops the last position of x `(..., S, K)`
            and the first of target `(..., S)`.
        temperature: the logits are divided by it, after the cap.
        keep: what forward stores for the gradient. "exponentials": exponentials of all logits in
            the dtype of `x` (three products; not with both label_smoothing and softcap).
            "gradients": dx and dweight, computed beside the loss (three products; reduction "mean"
            or "sum", not in float16). "nothing": backward computes the logits again (four
            products). "auto": "exponentials" for bfloat16 on Hopper, else "gradients" if it is
            possible, else "nothing".

    Returns:
        `()`, or with reduction "none" target's shape (its last size less 1 with shift=1); float32
        (float64 for float64). An ignored row's loss is 0.

    Raises:
        RuntimeError: a wrong shape, dtype, device or option; on the CPU a target out of range,
            which is a device assertion on CUDA.

    Limits: differentiable once.

    Example::

        hidden = torch.randn(2, 16, 32, requires_grad=True)
        head = torch.randn(1000, 32, requires_grad=True)
        tokens = torch.randint(0, 1000, (2, 16))
        loss = torchweld.linear_cross_entropy(hidden, head, tokens, shift=1)
        loss.backward()
    """
    return ops.linear_cross_entropy(
        x,
        weight,
        target,
        bias,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=softcap,
        z_loss=z_loss,
        shift=shift,
        temperature=temperature,
        keep=keep,
    )


@readable_errors
def linear_token_logprobs(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """Computes `log_softmax(z)` at each target, of the logits `z = F.linear(x, weight, bias)`.

    PPO and GRPO need such log-probabilities of the policy. The logits are computed in float32 for a
    chunk of rows at a time, as in `linear_cross_entropy`; backward computes them again.

    Args:
        x: `(..., K)` float32, float16 or bfloat16 (float64 on the CPU).
        weight: `(N, K)` in the dtype of `x`, N the size of the vocabulary.
        target: `(...)` int64 or int32, from 0 to N - 1.
        bias: `(N,)` in the dtype of `x`.
        temperature: the logits are divided by it, after the cap.
        softcap: c; the logits become `c tanh(z / c)`. None for no cap.
        entropy: whether to compute each row's entropy, `lse(z) - sum(softmax(z) z)`.

    Returns:
        logprob: target's shape, float32 (float64 for float64).
        entropy: the same shape and dtype, or `(0,)` without `entropy`. Both are differentiable.

    Raises:
        RuntimeError: a wrong shape, dtype, device or option; on the CPU a target out of range,
            which is a device assertion on CUDA.

    Limits: differentiable once.

    Example::

        hidden, head = torch.randn(2, 16, 32), torch.randn(1000, 32)
        tokens = torch.randint(0, 1000, (2, 16))
        logprobs, entropy = torchweld.linear_token_logprobs(hidden, head, tokens, entropy=True)
        assert logprobs.shape == entropy.shape == (2, 16)
    """
    return ops.linear_token_logprobs(
        x, weight, target, bias, temperature=temperature, softcap=softcap, entropy=entropy
    )


class LinearCrossEntropy(nn.Module):
    """Computes `nn.Linear(in_features, num_classes)` and `nn.CrossEntropyLoss` as one op.

    The parameters `weight` `(num_classes, in_features)` and `bias` are those of the linear layer.
    The call is `loss = module(x, target)`. torch 2.13's `nn.LinearCrossEntropyLoss` has its
    parameters in a submodule `linear`: convert that submodule with `from_linear`.

    Args:
        in_features: K.
        num_classes: N, the size of the vocabulary.
        bias: whether the logits have a bias.
        reduction, ignore_index, label_smoothing, softcap, z_loss, shift, temperature, keep: as in
            `torchweld.linear_cross_entropy`.

    Example::

        criterion = torchweld.nn.LinearCrossEntropy(32, 1000, shift=1)
        loss = criterion(torch.randn(2, 16, 32), torch.randint(0, 1000, (2, 16)))
        loss.backward()
        head = nn.Linear(32, 1000, bias=False)
        criterion = torchweld.nn.LinearCrossEntropy.from_linear(head)  # shares its weight
    """

    __constants__ = ["in_features", "num_classes", "reduction", "ignore_index"]

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = False,
        *,
        reduction: Reduction = "mean",
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        z_loss: float = 0.0,
        shift: int = 0,
        temperature: float = 1.0,
        keep: Keep = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require()
        self.in_features = in_features
        self.num_classes = num_classes
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.softcap = softcap
        self.z_loss = z_loss
        self.shift = shift
        self.temperature = temperature
        self.keep = keep
        linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)

    def reset_parameters(self) -> None:
        """Draws the parameters anew, as `nn.Linear` draws its own.

        Raises:
            ValueError: a parameter is computed from others, by a parametrisation or the like.
        """
        refuse_computed("reset_parameters", self, ("weight", "bias"))
        linear = nn.Linear(self.in_features, self.num_classes, self.bias is not None, device="meta")
        linear.weight, linear.bias = self.weight, self.bias
        reset_as_torch(linear)

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> LinearCrossEntropy:
        """Makes the loss of a language model's head, an `nn.Linear`; shares its parameters.

        Args:
            linear: the head, whose weight may be tied to an embedding.
            **options: keywords of the class, such as shift=1.

        Raises:
            ValueError: another module; one of a subclass, or with hooks or a parametrisation.
        """
        refuse_other("LinearCrossEntropy.from_linear", "linear", "nn.Linear", linear, nn.Linear)
        new = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            device="meta",
            **options,
        )
        new.weight, new.bias = linear.weight, linear.bias
        return new.train(linear.training)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return ops.linear_cross_entropy(
            x,
            self.weight,
            target,
            self.bias,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            softcap=self.softcap,
            z_loss=self.z_loss,
            shift=self.shift,
            temperature=self.temperature,
            keep=self.keep,
        )

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, num_classes={self.num_classes}"
        return f"{text}, bias={self.bias is not None}, reduction={self.reduction}"
