"""LayerNorm + linear with the LayerNorm's weights folded into the matmul, for inference."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchweld._library import ops, require
from torchweld._refusals import sentences
from torchweld._types import Activation
from torchweld.ops.linear import activation_module
from torchweld.ops.stock import refuse_other


@sentences
def fold_layer_norm(
    weight: Tensor,
    bias: Tensor | None = None,
    ln_weight: Tensor | None = None,
    ln_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Folds a LayerNorm's weights into the linear layer after it.

    Args:
        weight: `(N, K)`.
        bias: `(N,)`.
        ln_weight: `(K,)`.
        ln_bias: `(K,)`.

    Returns:
        `folded_weight = weight * ln_weight` in the weight's dtype, `weight_sum` = its row sums and
        `folded_bias = bias + weight @ ln_bias`, both fp32 `(N,)`. The sums are taken from the
        rounded folded weight: from unrounded ones the row mean would not cancel.

    Raises:
        RuntimeError: a wrong shape, dtype or device.

    Limits: no gradient; the fold is a frozen form for inference.

    Example::

        norm, fc = nn.LayerNorm(32), nn.Linear(32, 64)
        parameters = (p.detach() for p in (fc.weight, fc.bias, norm.weight, norm.bias))
        weight, weight_sum, bias = torchweld.fold_layer_norm(*parameters)
        assert weight.shape == (64, 32) and weight_sum.shape == (64,)
    """
    return ops.fold_layer_norm(weight, bias, ln_weight, ln_bias)


@sentences
def folded_layer_norm_linear(
    x: Tensor,
    folded_weight: Tensor,
    weight_sum: Tensor,
    folded_bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    activation: Activation = "none",
) -> Tensor:
    """`activation(rstd * (x @ folded_weight.T - mean * weight_sum) + folded_bias)`.

    Args:
        x: `(..., K)`.
        folded_weight: `(N, K)` of `fold_layer_norm` (or a plain weight of a LayerNorm without
            parameters).
        weight_sum: fp32 `(N,)`: the row sums of `folded_weight`; other values are not supported.
        folded_bias: fp32 `(N,)`.
        eps: added to the variance; finite and at least 0.
        activation: "none", "relu", "gelu" (erf), "gelu_tanh" or "silu".

    Returns:
        `(..., N)` contiguous, dtype of `x`.

    Raises:
        RuntimeError: a wrong shape, dtype, device, eps or activation, or a folded tensor that
            requires a gradient.

    Limits: gradient to `x` only.

    Example::

        x, weight, ln_weight = torch.randn(4, 32), torch.randn(64, 32), torch.randn(32)
        folded = torchweld.fold_layer_norm(weight, None, ln_weight)
        y = torchweld.folded_layer_norm_linear(x, *folded, activation="relu")
        assert y.shape == (4, 64)
    """
    return ops.folded_layer_norm_linear(
        x, folded_weight, weight_sum, folded_bias, eps=eps, activation=activation
    )


class FoldedLayerNormLinear(nn.Module):
    """Frozen `nn.Sequential(LayerNorm, Linear, activation)` for inference.

    Made by `LayerNormLinear.fold()`. Everything is a buffer: it does not follow later changes of
    the module that it was made from.

    Example::

        trained = torchweld.nn.LayerNormLinear(32, 64, activation="gelu")
        folded = trained.fold()
        x = torch.randn(4, 32)
        torch.testing.assert_close(folded(x), trained(x), rtol=1e-4, atol=1e-5)
    """

    __constants__ = ["in_features", "out_features", "eps", "activation"]

    def __init__(
        self,
        folded_weight: Tensor,
        weight_sum: Tensor,
        folded_bias: Tensor,
        eps: float = 1e-5,
        activation: Activation = "none",
    ) -> None:
        super().__init__()
        require()
        self.out_features, self.in_features = folded_weight.shape
        self.eps = eps
        self.activation = activation
        self.register_buffer("folded_weight", folded_weight)
        self.register_buffer("weight_sum", weight_sum)
        self.register_buffer("folded_bias", folded_bias)

    @classmethod
    def from_torch(cls, module: nn.Module) -> FoldedLayerNormLinear:
        """Converts a `LayerNormLinear`, or the `nn.Sequential` that it replaces.

        Raises:
            ValueError: another module, one of a subclass or with hooks.
        """
        from torchweld.ops.layer_norm_linear import LayerNormLinear

        if isinstance(module, nn.Sequential):
            module = LayerNormLinear.from_torch(module)
        refuse_other(
            "FoldedLayerNormLinear.from_torch",
            "module",
            "LayerNormLinear or nn.Sequential(LayerNorm((K,)), Linear(K, N)[, activation])",
            module,
            LayerNormLinear,
            parametrised=True,
        )
        with torch.no_grad():
            folded = fold_layer_norm(module.weight, module.bias, module.ln_weight, module.ln_bias)
        return cls(*folded, eps=module.eps, activation=module.activation).eval()

    def to_torch(self) -> nn.Sequential:
        """`nn.Sequential(LayerNorm without parameters, Linear, activation)`, equal results.

        Its parameters are frozen copies, in eval mode.

        Raises:
            ValueError: the module is of a subclass or has hooks.
        """
        refuse_other(
            "FoldedLayerNormLinear.to_torch",
            "module",
            "FoldedLayerNormLinear",
            self,
            FoldedLayerNormLinear,
        )
        weight = self.folded_weight
        linear = nn.Linear(
            self.in_features, self.out_features, device=weight.device, dtype=weight.dtype
        )
        with torch.no_grad():
            linear.weight.copy_(weight)
            linear.bias.copy_(self.folded_bias)
        norm = nn.LayerNorm(self.in_features, eps=self.eps, elementwise_affine=False)
        stock = nn.Sequential(norm, linear, activation_module(self.activation))
        return stock.requires_grad_(False).eval()

    def _apply(self, fn, recurse: bool = True):
        # If the module is cast, weight_sum and folded_bias stay in fp32. If the cast rounds the
        # weight, its sums are computed again.
        before = self.folded_weight
        sums = (self.weight_sum, self.folded_bias)
        super()._apply(fn, recurse)
        weight = self.folded_weight
        if weight.dtype != before.dtype and weight.device.type != "meta":
            self.weight_sum = _row_sums(weight)
            self.folded_bias = sums[1].to(weight.device, self.weight_sum.dtype)
        return self

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        # Loading may round the weight, so the row sums are computed again.
        super()._load_from_state_dict(state_dict, prefix, *args)
        given, weight = state_dict.get(prefix + "folded_weight"), self.folded_weight
        if given is not None and given.dtype != weight.dtype and weight.device.type != "meta":
            self.weight_sum = _row_sums(weight)

    def forward(self, x: Tensor) -> Tensor:
        """`(..., in_features)` to `(..., out_features)`."""
        return torch.ops.torchweld.folded_layer_norm_linear(
            x,
            self.folded_weight,
            self.weight_sum,
            self.folded_bias,
            eps=self.eps,
            activation=self.activation,
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, eps={self.eps}, "
            f"activation={self.activation!r}"
        )


def _row_sums(weight: Tensor) -> Tensor:
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return weight.sum(1, dtype=torch.float64).to(wide)
