"""RMSNorm and LayerNorm of rows, alone and with a residual added first."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchweld._library import ops, require
from torchweld._refusals import readable_errors
from torchweld.ops.stock import refuse_computed, refuse_other


@readable_errors
def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6, weight_offset: float = 0
) -> Tensor:
    """Computes `F.rms_norm(x, (n,), weight + weight_offset, eps)`.

    All arithmetic is fp32 (fp64 for fp64) with one rounding of the result, as in torch. Hugging
    Face's `LlamaRMSNorm` also rounds the normalised row before it multiplies by the weight.

    Args:
        x: `(..., n)`, float32, float16 or bfloat16 (float64 on CPU), any strides.
        weight: `(n,)`, dtype of `x`, or float32 for a 16-bit `x`.
        eps: added to the mean square; finite and at least 0.
        weight_offset: added to the weight in fp32; Gemma's norms scale by 1 + weight. Must be 0
            without a weight.

    Returns:
        `(..., n)` contiguous, dtype of `x`.

    Raises:
        RuntimeError: a wrong shape, dtype, device, eps or weight_offset.

    Limits: differentiable once. Under autocast the dtype of `x` is kept. A float32 weight stays
        in float32.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.

    Example::

        x, weight = torch.randn(4, 32), torch.randn(32)
        y = torchweld.rms_norm(x, weight, eps=1e-6)
        torch.testing.assert_close(y, F.rms_norm(x, (32,), weight, 1e-6))
    """
    return ops.rms_norm(x, weight, eps=eps, weight_offset=weight_offset)


@readable_errors
def rms_norm_gated(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    gate_first: bool = False,
) -> Tensor:
    """Computes `rms_norm(x, weight) * F.silu(gate)`, or `rms_norm(x * F.silu(gate), weight)`.

    Models need the op behind linear attention (Qwen3-Next, Qwen3.5) and, gate first, behind
    Mamba-2's scan. All arithmetic is fp32 (fp64 for fp64) with one rounding of the result.

    Args:
        x: `(..., n)`, float32, float16 or bfloat16 (float64 on CPU), any strides.
        gate: shape and dtype of `x`.
        weight: `(n,)`, dtype of `x`, or float32 for a 16-bit `x`.
        eps: added to the mean square; finite and at least 0.
        gate_first: True: the gate multiplies x before the norm. False: it multiplies the result.

    Returns:
        `(..., n)` contiguous, dtype of `x`.

    Raises:
        RuntimeError: a wrong shape, dtype, device or eps.

    Limits: differentiable once. Under autocast the dtype of `x * gate` is kept, and a float32
        weight stays in float32.

    Source: Dao and Gu, "Transformers are SSMs", 2024.

    Example::

        x, gate, weight = torch.randn(4, 32), torch.randn(4, 32), torch.randn(32)
        y = torchweld.rms_norm_gated(x, gate, weight)
        torch.testing.assert_close(y, F.rms_norm(x, (32,), weight, 1e-6) * F.silu(gate))
    """
    return ops.rms_norm_gated(x, gate, weight, eps=eps, gate_first=gate_first)


@readable_errors
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """Computes `F.layer_norm(x, (n,), weight, bias, eps)` over the last dimension.

    All arithmetic is fp32 (fp64 for fp64) with one rounding of the result. The rounding error of
    the mean is subtracted, so the error does not grow with `|mean| / std`. A row whose values are
    all equal gives `bias`.

    Args:
        x: `(..., n)`, float32, float16 or bfloat16 (float64 on CPU), any strides.
        weight: `(n,)`, dtype of `x`, or float32 for a 16-bit `x`.
        bias: `(n,)`, dtype of `weight`; without a weight that of `x`.
        eps: added to the variance; finite and at least 0.

    Returns:
        `(..., n)` contiguous, dtype of `x`.

    Raises:
        RuntimeError: a wrong shape, dtype, device or eps.

    Limits: differentiable once. Under autocast the dtype of `x` is kept, while torch's
        `layer_norm` returns float32 on CUDA. A float32 weight and bias stay in float32.

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016.

    Example::

        x, weight, bias = torch.randn(4, 32), torch.randn(32), torch.randn(32)
        y = torchweld.layer_norm(x, weight, bias)
        torch.testing.assert_close(y, F.layer_norm(x, (32,), weight, bias))
    """
    return ops.layer_norm(x, weight, bias, eps=eps)


@readable_errors
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0,
) -> tuple[Tensor, Tensor]:
    """Computes `sum = x + residual` and `rms_norm(sum, weight)` in one pass.

    Args:
        x: `(..., n)`, float32, float16 or bfloat16 (float64 on CPU), any strides.
        residual: shape and dtype of `x`.
        weight: `(n,)`, dtype of `x`, or float32 for a 16-bit `x`.
        eps: added to the mean square; finite and at least 0.
        weight_offset: added to the weight in fp32; must be 0 without a weight.

    Returns:
        `(normed, sum)`, each `(..., n)` contiguous in the dtype of `x`. `normed` is the norm of the
        rounded sum. Both have a gradient; `x` and `residual` share one gradient tensor.

    Raises:
        RuntimeError: a wrong shape, dtype, device, eps or weight_offset.

    Limits: differentiable once. Under autocast `x` and `residual` are added in the wider of their
        dtypes, as `x + residual` is. A float32 weight stays in float32.

    Example::

        x, residual, weight = torch.randn(4, 32), torch.randn(4, 32), torch.ones(32)
        normed, residual = torchweld.add_rms_norm(x, residual, weight)
    """
    return ops.add_rms_norm(x, residual, weight, eps=eps, weight_offset=weight_offset)


@readable_errors
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Computes `sum = x + residual` and `layer_norm(sum, weight, bias)` in one pass.

    Args:
        x: `(..., n)`, float32, float16 or bfloat16 (float64 on CPU), any strides.
        residual: shape and dtype of `x`.
        weight: `(n,)`, dtype of `x`, or float32 for a 16-bit `x`.
        bias: `(n,)`, dtype of `weight`; without a weight that of `x`.
        eps: added to the variance; finite and at least 0.

    Returns:
        `(normed, sum)`, each `(..., n)` contiguous in the dtype of `x`. `normed` is the norm of the
        rounded sum. Both have a gradient; `x` and `residual` share one gradient tensor.

    Raises:
        RuntimeError: a wrong shape, dtype, device or eps.

    Limits: differentiable once. Under autocast `x` and `residual` are added in the wider of their
        dtypes, as `x + residual` is. A float32 weight and bias stay in float32.

    Example::

        x, residual, weight = torch.randn(4, 32), torch.randn(4, 32), torch.ones(32)
        normed, residual = torchweld.add_layer_norm(x, residual, weight)
    """
    return ops.add_layer_norm(x, residual, weight, bias, eps=eps)


class RMSNorm(nn.Module):
    """Applies RMSNorm over the last dimension; replaces `torch.nn.RMSNorm`.

    The parameter `weight` is that of `nn.RMSNorm`, None without `elementwise_affine`.

    Args:
        normalized_shape: n, the size of the last dimension, or `(n,)`.
        eps: added to the mean square.
        elementwise_affine: whether there is a weight.
        weight_offset: added to the weight in fp32; Gemma's norms scale by 1 + weight. Must be 0
            without a weight.

    Raises:
        ValueError: normalized_shape has several sizes.

    Example::

        norm = torchweld.nn.RMSNorm(32, eps=1e-5)
        assert norm(torch.randn(4, 32)).shape == (4, 32)
        gemma = torchweld.nn.RMSNorm(32, weight_offset=1.0)  # scales by 1 + weight
    """

    __constants__ = ["normalized_shape", "eps", "weight_offset"]
    normalized_shape: int
    eps: float
    weight_offset: float

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
    ) -> None:
        super().__init__()
        require()
        normalized_shape = _last_size("RMSNorm: normalized_shape", normalized_shape)
        self.normalized_shape = normalized_shape
        self.eps = eps
        self.weight_offset = weight_offset
        weight = torch.empty(normalized_shape, device=device, dtype=dtype)
        self.register_parameter("weight", nn.Parameter(weight) if elementwise_affine else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to 1 - weight_offset, with which rows are scaled by 1.

        Raises:
            ValueError: the weight is computed from others, by a parametrisation or the like.
        """
        refuse_computed("reset_parameters", self, ("weight",))
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    @classmethod
    def from_torch(cls, module: nn.RMSNorm) -> RMSNorm:
        """Converts an `nn.RMSNorm` over one dimension; shares its weight.

        An eps of None becomes a number here: the machine epsilon of float64 for a float64 weight,
        that of float32 otherwise. torch chooses the epsilon anew in each call, by the dtype of x.

        Raises:
            ValueError: another module; one of a subclass, or with hooks or a parametrisation; a
                norm over several dimensions.
        """
        owner = "RMSNorm.from_torch"
        refuse_other(owner, "module", "nn.RMSNorm", module, nn.RMSNorm)
        eps = module.eps
        if eps is None:
            wide = module.weight is not None and module.weight.dtype == torch.float64
            eps = torch.finfo(torch.float64 if wide else torch.float32).eps
        n = _last_size(f"{owner}: module.normalized_shape", module.normalized_shape)
        new = cls(n, eps, module.weight is not None, device="meta")
        new.weight = module.weight
        return new.train(module.training)

    def to_torch(self) -> nn.RMSNorm:
        """Returns the norm in plain torch; shares the weight.

        Raises:
            ValueError: the module is of a subclass, or has hooks, a parametrisation or a
                weight_offset.
        """
        refuse_other("RMSNorm.to_torch", "module", "RMSNorm", self, RMSNorm)
        if self.weight_offset != 0:
            raise ValueError(
                f"RMSNorm.to_torch: weight_offset must be 0, but got {self.weight_offset}; add it "
                "to the weight first"
            )
        affine = self.weight is not None
        norm = nn.RMSNorm(self.normalized_shape, self.eps, affine, device="meta")
        norm.weight = self.weight
        return norm.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        """Keeps `x`'s shape and dtype."""
        if self.weight is None:
            _check_width("rms_norm", x, self.normalized_shape)
        return torch.ops.torchweld.rms_norm(
            x, self.weight, eps=self.eps, weight_offset=self.weight_offset
        )

    def extra_repr(self) -> str:
        text = f"{self.normalized_shape}, eps={self.eps}"
        affine = f"elementwise_affine={self.weight is not None}"
        return f"{text}, {affine}, weight_offset={self.weight_offset}"


class LayerNorm(nn.Module):
    """Applies LayerNorm over the last dimension; replaces `torch.nn.LayerNorm`.

    The parameters `weight` and `bias` are those of `nn.LayerNorm`; each may be None.

    Args:
        normalized_shape: n, the size of the last dimension, or `(n,)`.
        eps: added to the variance.
        elementwise_affine: whether there are a weight and, with `bias`, a bias.
        bias: whether there is a bias.

    Raises:
        ValueError: normalized_shape has several sizes.

    Example::

        norm = torchweld.nn.LayerNorm(32)
        assert norm(torch.randn(4, 32)).shape == (4, 32)
        norm = torchweld.nn.LayerNorm.from_torch(nn.LayerNorm(32, bias=False))
    """

    __constants__ = ["normalized_shape", "eps"]
    normalized_shape: int
    eps: float

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require()
        normalized_shape = _last_size("LayerNorm: normalized_shape", normalized_shape)
        self.normalized_shape = normalized_shape
        self.eps = eps
        norm = nn.LayerNorm(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self.register_parameter("weight", norm.weight)
        self.register_parameter("bias", norm.bias)

    def reset_parameters(self) -> None:
        """Sets the weight to 1 and the bias to 0.

        Raises:
            ValueError: a parameter is computed from others, by a parametrisation or the like.
        """
        refuse_computed("reset_parameters", self, ("weight", "bias"))
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @classmethod
    def from_torch(cls, module: nn.LayerNorm) -> LayerNorm:
        """Converts an `nn.LayerNorm` over one dimension; shares its parameters.

        Raises:
            ValueError: another module; one of a subclass, or with hooks or a parametrisation; a
                norm over several dimensions.
        """
        owner = "LayerNorm.from_torch"
        refuse_other(owner, "module", "nn.LayerNorm", module, nn.LayerNorm)
        n = _last_size(f"{owner}: module.normalized_shape", module.normalized_shape)
        new = cls(n, module.eps, False)
        new.weight, new.bias = module.weight, module.bias
        return new.train(module.training)

    def to_torch(self) -> nn.LayerNorm:
        """Returns the norm in plain torch; shares the parameters.

        Raises:
            ValueError: the module is of a subclass, or has hooks or a parametrisation.
        """
        refuse_other("LayerNorm.to_torch", "module", "LayerNorm", self, LayerNorm)
        norm = nn.LayerNorm(self.normalized_shape, self.eps, self.weight is not None, device="meta")
        norm.weight, norm.bias = self.weight, self.bias
        return norm.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        """Keeps `x`'s shape and dtype."""
        if self.weight is None:
            _check_width("layer_norm", x, self.normalized_shape)
        return torch.ops.torchweld.layer_norm(x, self.weight, self.bias, eps=self.eps)

    def extra_repr(self) -> str:
        text = f"{self.normalized_shape}, eps={self.eps}"
        return f"{text}, elementwise_affine={self.weight is not None}, bias={self.bias is not None}"


def _check_width(op: str, x: Tensor, n: int) -> None:
    """Raises RuntimeError if a module without a weight gets rows that are not n wide."""
    if x.dim() == 0 or x.size(-1) != n:
        raise RuntimeError(f"torchweld::{op}: x must be (..., {n}), but got {list(x.shape)}")


def _last_size(argument: str, normalized_shape: int | Sequence[int]) -> int:
    """Returns the size of a norm's dimension; ValueError if there are several."""
    if not isinstance(normalized_shape, (list, tuple)):
        return normalized_shape
    if len(normalized_shape) != 1:
        raise ValueError(
            f"{argument} must be one size, but got {tuple(normalized_shape)}; use torch's norm"
        )
    return normalized_shape[0]
