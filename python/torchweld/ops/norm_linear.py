"""The base class of LayerNormLinear and RMSNormLinear: everything but the norm."""

from __future__ import annotations

import torch
from torch import nn

from torchweld._library import require
from torchweld._types import Activation
from torchweld.ops.linear import (
    activation_module,
    activation_name,
    check_activation,
    reset_as_torch,
)
from torchweld.ops.names import rename_norm_linear
from torchweld.ops.stock import refuse_computed, refuse_other, text_of


class NormLinear(nn.Module):
    """Holds the linear layer's parameters and the sizes of a module of norm, linear and activation.

    `load_state_dict` also accepts the keys of a norm and a linear layer below the module's name.
    """

    __constants__ = ["in_features", "out_features", "eps", "activation", "_norm_names"]
    _norm_names: tuple[str, ...] = ()

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        eps: float,
        activation: Activation,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        require()
        self.in_features = in_features
        self.out_features = out_features
        self.eps = float(eps)
        self.activation = check_activation(activation, type(self).__name__)
        linear = nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)

    def reset_parameters(self) -> None:
        """Draws the parameters anew, as torch's linear layer and norm draw theirs.

        Raises:
            ValueError: a parameter is computed from others, by a parametrisation or the like.
        """
        refuse_computed("reset_parameters", self, ("weight", "bias", *self._norm_names))
        reset_as_torch(self._as_torch())

    @torch.jit.unused
    def _load_from_state_dict(self, state_dict, prefix, *args):
        rename_norm_linear(state_dict, prefix, self._norm_names)
        nn.Module._load_from_state_dict(self, state_dict, prefix, *args)

    def to_torch(self) -> nn.Sequential:
        """Returns `nn.Sequential(norm, Linear, activation)`, which shares the parameters.

        Raises:
            ValueError: the module is of a subclass, or has hooks or a parametrisation.
        """
        # cls is LayerNormLinear or RMSNormLinear, even if the module is of a subclass.
        cls = next(cls for cls in type(self).__mro__ if NormLinear in cls.__bases__)
        refuse_other(f"{cls.__name__}.to_torch", "module", cls.__name__, self, cls)
        return self._as_torch()

    def _as_torch(self) -> nn.Sequential:
        raise NotImplementedError

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


def split_norm_linear(module: nn.Module, norm: str, owner: str) -> tuple[nn.Module, nn.Linear, str]:
    """Splits the argument of `from_torch` into norm, linear layer and name of the activation.

    Raises:
        ValueError: module is not a Sequential of two or three modules, or the linear layer or the
            activation is not a class of torch. The caller checks the norm.
    """
    expected = f"nn.Sequential({norm}((K,)), Linear(K, N)[, activation])"
    refuse_other(owner, "module", expected, module, nn.Sequential)
    modules = list(module)
    if len(modules) not in (2, 3) or not isinstance(modules[1], nn.Linear):
        raise ValueError(f"{owner}: module must be {expected}, but got {text_of(module)}")
    refuse_other(owner, "module[1]", "nn.Linear", modules[1], nn.Linear)
    return modules[0], modules[1], activation_name(modules[2] if len(modules) == 3 else None, owner)
