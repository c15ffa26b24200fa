"""LayerNorm, linear layer and activation in one op."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchweld._library import ops
from torchweld._refusals import sentences
from torchweld._types import Activation
from torchweld.ops.folded_layer_norm_linear import FoldedLayerNormLinear
from torchweld.ops.norm_linear import NormLinear, parts_of
from torchweld.ops.stock import refuse_other, text_of


@sentences
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
    """`activation(F.linear(F.layer_norm(x, (K,), ln_weight, ln_bias, eps), weight, bias))`.

    Args:
        x: `(..., K)`.
        weight: `(N, K)`, any strides: a GPT-2 `Conv1D` goes in as `weight.t()`.
        bias: `(N,)`.
        ln_weight: `(K,)`.
        ln_bias: `(K,)`.
        eps: added to the variance; finite and at least 0.
        activation: "none", "relu", "gelu" (erf), "gelu_tanh" or "silu".

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


class LayerNormLinear(NormLinear):
    """`nn.Sequential(nn.LayerNorm(in), nn.Linear(in, out), activation)` as one op.

    Parameters `weight`, `bias` as in `nn.Linear`; `ln_weight`, `ln_bias` as in `nn.LayerNorm`.
    `load_state_dict` also takes the names of the two modules in its place: `ln.weight`,
    `fc.weight`, or others.

    Args:
        in_features: K.
        out_features: N.
        bias: of the linear layer.
        eps: of the LayerNorm.
        activation: "none", "relu", "gelu", "gelu_tanh" or "silu".
        ln_affine: whether the LayerNorm has parameters (`elementwise_affine` of `nn.LayerNorm`).
        ln_bias: whether they include a bias (`bias` of `nn.LayerNorm`).

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
            ValueError: other parts; one of a subclass, or with hooks or a parametrisation.
        """
        owner = "LayerNormLinear.from_torch"
        norm, linear, name = parts_of(module, "LayerNorm", owner)
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
        """A frozen copy for inference with the LayerNorm's weights folded into the matmul."""
        return FoldedLayerNormLinear.from_torch(self)

    def forward(self, x: Tensor) -> Tensor:
        """`(..., in_features)` to `(..., out_features)`."""
        return self.compute(x, self.weight, self.bias, self.ln_weight, self.ln_bias)

    def compute(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ln_weight: Tensor | None,
        ln_bias: Tensor | None,
    ) -> Tensor:
        """The forward with other parameters, for example this process's shards."""
        return torch.ops.torchweld.layer_norm_linear(
            x, weight, bias, ln_weight, ln_bias, eps=self.eps, activation=self.activation
        )

    def extra_repr(self) -> str:
        parts = f"ln_affine={self.ln_weight is not None}, ln_bias={self.ln_bias is not None}"
        return f"{super().extra_repr()}, {parts}"
