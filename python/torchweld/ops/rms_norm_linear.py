"""RMSNorm, linear layer and activation in one op."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from torchweld._library import ops
from torchweld._refusals import readable_errors
from torchweld._types import Activation
from torchweld.ops.norm_linear import NormLinear, split_norm_linear
from torchweld.ops.stock import refuse_other, text_of


@readable_errors
def rms_norm_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0,
    activation: Activation = "none",
) -> Tensor:
    """Computes RMSNorm, linear layer and activation,
    `activation(F.linear(F.rms_norm(x, (K,), norm_weight + weight_offset, eps), weight, bias))`.

    Args:
        x: `(..., K)`, float32, float16 or bfloat16 (float64 on CPU), any strides.
        weight: `(N, K)`, dtype of `x`, any strides.
        bias: `(N,)`, dtype of `x`.
        norm_weight: `(K,)`, dtype of `x` (not float32 for a 16-bit `x`, unlike in `rms_norm`); None
            for no scale.
        eps: added to the mean square; finite and at least 0.
        weight_offset: added to `norm_weight` in fp32; Gemma's norms scale by 1 + weight. Must be 0
            without a `norm_weight`.
        activation: "none", "relu", "gelu" (erf), "gelu_tanh", "silu" or "relu_squared".

    Returns:
        `(..., N)` contiguous, dtype of `x`; statistics and sums in fp32.

    Raises:
        RuntimeError: a wrong shape, dtype, device, eps, weight_offset or activation.

    Limits: differentiable once. The normalised rows are not kept for the gradient. Under autocast
        `x` is rounded to the autocast dtype before it is normalised.

    Example::

        x, weight, norm_weight = torch.randn(4, 32), torch.randn(64, 32), torch.ones(32)
        y = torchweld.rms_norm_linear(x, weight, None, norm_weight, activation="silu")
        assert y.shape == (4, 64)
    """
    return ops.rms_norm_linear(
        x, weight, bias, norm_weight, eps=eps, weight_offset=weight_offset, activation=activation
    )


class RMSNormLinear(NormLinear):
    """Computes `nn.Sequential(nn.RMSNorm(in), nn.Linear(in, out), activation)` as one op.

    The parameters are `weight` and `bias` of the `nn.Linear`, and `norm_weight` of the norm.
    `load_state_dict` also accepts the keys of a separate norm and linear layer under any names,
    such as `norm.weight` and `fc.weight`.

    Args:
        in_features: K.
        out_features: N.
        bias: whether the linear layer has a bias.
        eps: the RMSNorm adds it to the mean square.
        activation: "none", "relu", "gelu", "gelu_tanh", "silu" or "relu_squared".
        norm_affine: whether the RMSNorm has a weight (`elementwise_affine` of `nn.RMSNorm`).

    Raises:
        ValueError: another activation.

    Example::

        torchs = nn.Sequential(nn.RMSNorm(32, eps=1e-6), nn.Linear(32, 64), nn.SiLU())
        fused = torchweld.nn.RMSNormLinear.from_torch(torchs)
        x = torch.randn(4, 32)
        torch.testing.assert_close(fused(x), torchs(x))
    """

    _norm_names = ("norm_weight",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        eps: float = 1e-6,
        activation: Activation = "none",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        norm_affine: bool = True,
    ) -> None:
        super().__init__(in_features, out_features, bias, eps, activation, device, dtype)
        self.norm_weight: nn.Parameter | None
        norm = nn.RMSNorm(in_features, elementwise_affine=norm_affine, device=device, dtype=dtype)
        self.register_parameter("norm_weight", norm.weight)

    @classmethod
    def from_torch(cls, module: nn.Sequential) -> RMSNormLinear:
        """Converts `nn.Sequential(RMSNorm, Linear[, activation])`; shares its parameters.

        RMSNorm is `nn.RMSNorm` or a class of Hugging Face's that computes the same (LlamaRMSNorm
        and its many kin). Those round the normalised row before they multiply by the weight; this
        module rounds once.

        The eps of an `nn.RMSNorm` with `eps=None` becomes a number: torch's default in the
        module's dtype, which is float32's machine epsilon in 16 bits too.

        Raises:
            ValueError: other modules; one of a subclass, or with hooks or a parametrisation; an
                RMSNorm of another formula, for example Gemma's, which scales by 1 + weight.
        """
        owner = "RMSNormLinear.from_torch"
        norm, linear, name = split_norm_linear(module, "RMSNorm", owner)
        eps = _eps_of(norm, linear, owner)
        if eps is None:
            raise ValueError(
                f"{owner}: module must be nn.Sequential(RMSNorm((K,)), "
                f"Linear(K, N)[, activation]), but got {text_of(module)}"
            )
        new = cls(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            eps=eps,
            activation=name,
            device="meta",
            norm_affine=norm.weight is not None,
        )
        new.weight, new.bias, new.norm_weight = linear.weight, linear.bias, norm.weight
        return new.train(module.training)

    @torch.jit.unused
    def _as_torch(self) -> nn.Sequential:
        affine = self.norm_weight is not None
        norm = nn.RMSNorm(self.in_features, self.eps, affine, device="meta")
        norm.weight = self.norm_weight
        return self._behind(norm)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `(..., in_features)` to `(..., out_features)`."""
        return self.compute(x, self.weight, self.bias, self.norm_weight)

    def compute(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None
    ) -> Tensor:
        """Computes forward with other parameters, for example this process's shards."""
        return torch.ops.torchweld.rms_norm_linear(
            x, weight, bias, norm_weight, eps=self.eps, activation=self.activation
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, norm_affine={self.norm_weight is not None}"


def _eps_of(norm: nn.Module, linear: nn.Linear, owner: str) -> float | None:
    """Returns the eps of an RMSNorm before a linear layer; None for another module."""
    shape = (linear.in_features,)
    if isinstance(norm, nn.RMSNorm):
        if tuple(norm.normalized_shape) != shape:
            return None
        refuse_other(owner, "module[0]", "nn.RMSNorm", norm, nn.RMSNorm)
        if norm.eps is not None:
            return norm.eps
        # If eps is None, torch uses the machine epsilon of the dtype in which it computes the norm.
        dtype = (linear if norm.weight is None else norm).weight.dtype
        return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(eps, float) or not hasattr(norm, "weight"):
        return None
    refuse_other(owner, "module[0]", "an RMSNorm", norm, type(norm))
    # The norm must have no other parameter, buffer or child module, because training could change
    # what it does to the result.
    if [(n, p.shape) for n, p in norm.named_parameters()] != [("weight", shape)]:
        return None
    if any(True for _ in norm.children()) or any(True for _ in norm.buffers()):
        return None
    offset = _weight_offset(norm, eps)
    if offset == 1:
        raise ValueError(
            "RMSNormLinear.from_torch: the RMSNorm must scale by weight, but got "
            f"{type(norm).__name__}, which scales by 1 + weight"
        )
    return None if offset is None else eps


def _weight_offset(norm: nn.Module, eps: float) -> int | None:
    """Returns 0 if an RMSNorm scales by weight, 1 if by 1 + weight, None if by neither.

    A copy of the module runs, in training and in eval mode, because classes with equal attributes
    may compute different things.
    """
    with torch.device("cpu"), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        copied = copy.deepcopy(norm).to_empty(device="cpu").float()
        width = copied.weight.numel()
        weight = torch.randn(width, generator=generator, dtype=torch.float32)
        copied.weight.copy_(weight)
        # Rows whose mean square is about eps reveal a norm that adds eps in another place.
        size = torch.tensor([[max(eps, 1e-12) ** 0.5], [1.0], [1e3]], dtype=torch.float32)
        x = torch.randn(2, 3, width, generator=generator, dtype=torch.float32) * size
        try:
            outs = [copied.train(mode)(x) for mode in (True, False)]
        except Exception:  # the forward may require other arguments
            return None
        for offset in (0, 1):
            expected = nn.functional.rms_norm(x, (width,), weight + offset, eps)
            if all(
                isinstance(out, Tensor)
                and out.shape == x.shape
                and torch.allclose(out, expected, rtol=1e-4, atol=1e-5)
                for out in outs
            ):
                return offset
    return None
