"""What LayerNormLinear and RMSNormLinear share: all but the norm."""

from __future__ import annotations

import torch
from torch import nn

from torchweld._library import require
from torchweld.ops.linear import activation_module, check_activation, reset_as_torch


class NormLinear(nn.Module):
    """The linear layer's parameters, and the sizes of a module of norm, linear and activation."""

    __constants__ = ["in_features", "out_features", "eps", "activation"]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        eps: float,
        activation: str,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        require()
        self.in_features = in_features
        self.out_features = out_features
        self.eps = eps
        self.activation = check_activation(activation, type(self).__name__)
        linear = nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)

    def reset_parameters(self) -> None:
        """Draws the parameters anew, as torch's linear layer and norm draw theirs."""
        reset_as_torch(self.to_torch())

    @torch.jit.unused
    def _behind(self, norm: nn.Module) -> nn.Sequential:
        biased = self.bias is not None
        linear = nn.Linear(self.in_features, self.out_features, biased, device="meta")
        linear.weight, linear.bias = self.weight, self.bias
        return nn.Sequential(norm, linear, activation_module(self.activation)).train(self.training)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, eps={self.eps}, activation={self.activation!r}"
        )
