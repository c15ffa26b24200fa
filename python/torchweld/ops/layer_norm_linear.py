"""LayerNorm, linear layer and activation in one op, and folded into one weight for inference."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchweld._library import ops, require
from torchweld._refusals import readable_errors
from torchweld._types import Activation
from torchweld.ops.linear import activation_module
from torchweld.ops.norm_linear import NormLinear, split_norm_linear
from torchweld.ops.stock import refuse_other, text_of


@readable_errors
def layer_norm_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    ln_weight: Tensor | None = None,
    ln_bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    activation: Activation = "none",
) -> Tensor:
    """Computes LayerNorm, linear layer and activation,
    `activation(F.linear(F.layer_norm(x, (K,), ln_weight, ln_bias, eps), weight, bias))`.

    Args:
        x: `(..., K)`, float32, float16 or bfloat16 (float64 on CPU), any strides.
        weight: `(N, K)`, dtype of `x`, any strides: pass `weight.t()` of a GPT-2 `Conv1D`.
        bias: `(N,)`, dtype of `x`.
        ln_weight: `(K,)`, dtype of `x`; None for no scale.
        ln_bias: `(K,)`, dtype of `x`; None for no shift.
        eps: added to the variance; finite and at least 0.
        activation: "none", "relu", "gelu" (erf), "gelu_tanh", "silu" or "relu_squared".

    Returns:
        `(..., N)` contiguous, dtype of `x`; statistics and sums in fp32.

    Raises:
        RuntimeError: a wrong shape, dtype, device, eps or activation.

    Limits: differentiable once. The normalised rows are not kept for the gradient. Under autocast
        `x` is rounded to the autocast dtype before it is normalised.

    Example::

        norm, fc = nn.LayerNorm(32), nn.Linear(32, 64)
        x = torch.randn(4, 32)
        y = torchweld.layer_norm_linear(
            x, fc.weight, fc.bias, norm.weight, norm.bias, eps=norm.eps, activation="gelu"
        )
        torch.testing.assert_close(y, F.gelu(fc(norm(x))))
    """
    return ops.layer_norm_linear(
        x, weight, bias, ln_weight, ln_bias, eps=eps, activation=activation
    )


@readable_errors
def fold_layer_norm(
    weight: Tensor,
    bias: Tensor | None = None,
    ln_weight: Tensor | None = None,
    ln_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Folds a LayerNorm's weights into the linear layer after it.

    Args:
        weight: `(N, K)`, float32, float16 or bfloat16 (float64 on CPU), any strides.
        bias: `(N,)`, dtype of `weight`; None for 0.
        ln_weight: `(K,)`, dtype of `weight`; None for no scale.
        ln_bias: `(K,)`, dtype of `weight`; None for no shift.

    Returns:
        `folded_weight = weight * ln_weight` in the weight's dtype, `weight_sum` = its row sums and
        `folded_bias = bias + weight @ ln_bias`, both fp32 (fp64 for fp64) `(N,)`. The sums are
        taken from the rounded folded weight: from unrounded ones the row mean would not cancel.

    Raises:
        RuntimeError: a wrong shape, dtype or device.

    Limits: backward through the op raises RuntimeError; the fold is a frozen form for inference.

    Example::

        norm, fc = nn.LayerNorm(32), nn.Linear(32, 64)
        parameters = (p.detach() for p in (fc.weight, fc.bias, norm.weight, norm.bias))
        weight, weight_sum, bias = torchweld.fold_layer_norm(*parameters)
        assert weight.shape == (64, 32) and weight_sum.shape == (64,)
    """
    return ops.fold_layer_norm(weight, bias, ln_weight, ln_bias)


@readable_errors
def folded_layer_norm_linear(
    x: Tensor,
    folded_weight: Tensor,
    weight_sum: Tensor,
    folded_bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    activation: Activation = "none",
) -> Tensor:
    """Computes `activation(rstd * (x @ folded_weight.T - mean * weight_sum) + folded_bias)`.

    Args:
        x: `(..., K)`, float32, float16 or bfloat16 (float64 on CPU), any strides; mean and rstd are
            those of its rows.
        folded_weight: `(N, K)`, dtype of `x`, from `fold_layer_norm` (or the plain weight of a
            linear layer behind a LayerNorm without parameters).
        weight_sum: fp32 (fp64 for fp64) `(N,)`: the row sums of `folded_weight`; other values are
            not supported.
        folded_bias: `(N,)`, dtype of `weight_sum`.
        eps: added to the variance; finite and at least 0.
        activation: "none", "relu", "gelu" (erf), "gelu_tanh", "silu" or "relu_squared".

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


def _row_sums(weight: Tensor) -> Tensor:
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    return weight.sum(1, dtype=torch.float64).to(wide)


class LayerNormLinear(NormLinear):
    """Computes `nn.Sequential(nn.LayerNorm(in), nn.Linear(in, out), activation)` as one op.

    Parameters `weight` and `bias` are those of `nn.Linear`, `ln_weight` and `ln_bias` the norm's.
    `load_state_dict` also accepts the keys of a separate norm and linear layer under any names,
    such as `ln.weight` and `fc.weight`.

    Args:
        in_features: K.
        out_features: N.
        bias: as in `nn.Linear`.
        eps: as in `nn.LayerNorm`.
        activation: "none", "relu", "gelu", "gelu_tanh", "silu" or "relu_squared".
        ln_affine: whether the LayerNorm has parameters (`elementwise_affine` of `nn.LayerNorm`).
        ln_bias: whether these parameters include a bias (`bias` of `nn.LayerNorm`).

    Raises:
        ValueError: another activation.

    Example::

        torchs = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU())
        fused = torchweld.nn.LayerNormLinear.from_torch(torchs)
        x = torch.randn(4, 32)
        torch.testing.assert_close(fused(x), torchs(x))
    """

    _norm_names = ("ln_weight", "ln_bias")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        eps: float = 1e-5,
        activation: Activation = "none",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        ln_affine: bool = True,
        ln_bias: bool = True,
    ) -> None:
        super().__init__(in_features, out_features, bias, eps, activation, device, dtype)
        norm = nn.LayerNorm(in_features, eps, ln_affine, ln_bias, device=device, dtype=dtype)
        self.ln_weight: nn.Parameter | None
        self.ln_bias: nn.Parameter | None
        self.register_parameter("ln_weight", norm.weight)
        self.register_parameter("ln_bias", norm.bias)

    @classmethod
    def from_torch(cls, module: nn.Sequential) -> LayerNormLinear:
        """Converts `nn.Sequential(LayerNorm, Linear[, activation])`; shares its parameters.

        Raises:
            ValueError: other modules; one of a subclass, or with hooks or a parametrisation.
        """
        owner = "LayerNormLinear.from_torch"
        norm, linear, name = split_norm_linear(module, "LayerNorm", owner)
        shape = (linear.in_features,)
        if not isinstance(norm, nn.LayerNorm) or tuple(norm.normalized_shape) != shape:
            raise ValueError(
                f"{owner}: module must be nn.Sequential(LayerNorm((K,)), "
                f"Linear(K, N)[, activation]), but got {text_of(module)}"
            )
        refuse_other(owner, "module[0]", "nn.LayerNorm", norm, nn.LayerNorm)
        new = cls(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            eps=norm.eps,
            activation=name,
            device="meta",
            ln_affine=norm.weight is not None,
            ln_bias=norm.bias is not None,
        )
        new.weight, new.bias = linear.weight, linear.bias
        new.ln_weight, new.ln_bias = norm.weight, norm.bias
        return new.train(module.training)

    @torch.jit.unused
    def _as_torch(self) -> nn.Sequential:
        affine, shifted = self.ln_weight is not None, self.ln_bias is not None
        norm = nn.LayerNorm(self.in_features, self.eps, affine, shifted, device="meta")
        norm.weight, norm.bias = self.ln_weight, self.ln_bias
        return self._behind(norm)

    @torch.jit.unused
    def fold(self) -> FoldedLayerNormLinear:
        """Returns a frozen copy for inference, with the LayerNorm's weights in the matmul's.

        Raises:
            ValueError: the module is of a subclass or has hooks.
        """
        return FoldedLayerNormLinear.from_torch(self)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `(..., in_features)` to `(..., out_features)`."""
        return self.compute(x, self.weight, self.bias, self.ln_weight, self.ln_bias)

    def compute(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ln_weight: Tensor | None,
        ln_bias: Tensor | None,
    ) -> Tensor:
        """Computes forward with other parameters, for example this process's shards."""
        return torch.ops.torchweld.layer_norm_linear(
            x, weight, bias, ln_weight, ln_bias, eps=self.eps, activation=self.activation
        )

    def extra_repr(self) -> str:
        affine = f"ln_affine={self.ln_weight is not None}, ln_bias={self.ln_bias is not None}"
        return f"{super().extra_repr()}, {affine}"


class FoldedLayerNormLinear(nn.Module):
    """Computes `nn.Sequential(LayerNorm, Linear, activation)` with frozen weights, for inference.

    `LayerNormLinear.fold()` makes it; the constructor takes the results of `fold_layer_norm`. All
    tensors are buffers: they do not follow later changes of the original module.

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
            ValueError: another module, one of a subclass or with hooks; in an `nn.Sequential`, one
                with a parametrisation.
        """
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
        """Returns `nn.Sequential(LayerNorm without parameters, Linear, activation)`.

        It computes the same, up to rounding. Its parameters are frozen copies, in eval mode.

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
        """Maps `(..., in_features)` to `(..., out_features)`."""
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
