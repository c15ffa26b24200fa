"""RMSNorm, linear layer and activation in one op."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchweld._library import ops, require
from torchweld.ops.linear import activation_module, activation_name, check_activation


def rms_norm_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    activation: str = "none",
) -> Tensor:
    """`activation(F.linear(F.rms_norm(x, (K,), norm_weight, eps), weight, bias))`.

    Args:
        x: `(..., K)`.
        weight: `(N, K)`, any strides.
        bias: `(N,)`.
        norm_weight: `(K,)`.
        eps: added to the mean square; finite and at least 0.
        activation: "none", "relu", "gelu" (erf), "gelu_tanh" or "silu".

    Returns:
        `(..., N)` contiguous, dtype of `x`; statistics and sums in fp32.

    Raises:
        RuntimeError: a wrong shape, dtype, device, eps or activation.

    Limits: differentiable once. The normalised rows are not kept for the gradient. Under autocast
        `x` is rounded to the autocast dtype before it is normalised.
    """
    return ops.rms_norm_linear(x, weight, bias, norm_weight, eps=eps, activation=activation)


class RMSNormLinear(nn.Module):
    """`nn.Sequential(nn.RMSNorm(in), nn.Linear(in, out), activation)` as one op.

    Parameters `weight`, `bias` as in `nn.Linear`; `norm_weight` as `nn.RMSNorm.weight`.

    Args:
        in_features: K.
        out_features: N.
        bias: bias of the linear part.
        eps: of the RMSNorm.
        activation: "none", "relu", "gelu", "gelu_tanh" or "silu".
    """

    __constants__ = ["in_features", "out_features", "eps", "activation"]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        eps: float = 1e-6,
        activation: str = "none",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require()
        self.in_features = in_features
        self.out_features = out_features
        self.eps = eps
        self.activation = check_activation(activation, "RMSNormLinear")
        linear = nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        self.norm_weight: nn.Parameter | None
        self.register_parameter(
            "norm_weight", nn.Parameter(torch.ones(in_features, device=device, dtype=dtype))
        )

    @classmethod
    def from_torch(cls, module: nn.Sequential) -> RMSNormLinear:
        """From `nn.Sequential(RMSNorm, Linear[, activation])`; shares its parameters."""
        parts = list(module)
        if (
            len(parts) not in (2, 3)
            or not isinstance(parts[0], nn.RMSNorm)
            or not isinstance(parts[1], nn.Linear)
            or tuple(parts[0].normalized_shape) != (parts[1].in_features,)
        ):
            raise ValueError(
                "RMSNormLinear.from_torch: module must be nn.Sequential(RMSNorm((K,)), "
                f"Linear(K, N)[, activation]), but got {module}"
            )
        norm, linear = parts[0], parts[1]
        name = activation_name(parts[2] if len(parts) == 3 else None, "RMSNormLinear.from_torch")
        # nn.RMSNorm's eps=None means the machine epsilon of the input's dtype.
        eps = norm.eps if norm.eps is not None else torch.finfo(linear.weight.dtype).eps
        new = cls(linear.in_features, linear.out_features, eps=eps, activation=name, device="meta")
        new.weight, new.bias, new.norm_weight = linear.weight, linear.bias, norm.weight
        return new.train(module.training)

    def to_torch(self) -> nn.Sequential:
        """`nn.Sequential(RMSNorm, Linear, activation)` that shares the parameters."""
        norm = nn.RMSNorm(self.in_features, eps=self.eps, device="meta")
        linear = nn.Linear(self.in_features, self.out_features, device="meta")
        norm.weight = self.norm_weight
        linear.weight, linear.bias = self.weight, self.bias
        return nn.Sequential(norm, linear, activation_module(self.activation)).train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.torchweld.rms_norm_linear(
            x,
            self.weight,
            self.bias,
            self.norm_weight,
            eps=self.eps,
            activation=self.activation,
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, eps={self.eps}, activation={self.activation!r}"
        )
