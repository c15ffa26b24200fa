"""Gated linear layers: both products and the gate, a whole gated MLP, and the gate alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchweld._library import ops, require
from torchweld._refusals import name_fix, readable_errors
from torchweld._types import Gate
from torchweld.ops.linear import reset_as_torch
from torchweld.ops.names import rename_gated_linear
from torchweld.ops.stock import refuse_computed, refuse_mixed, refuse_other, text_of

GATES = {
    "sigmoid_tanh": lambda left, right: torch.sigmoid(left) * torch.tanh(right),
    "geglu": lambda left, right: left * F.gelu(right),
    "geglu_tanh": lambda left, right: left * F.gelu(right, approximate="tanh"),
    "swiglu": lambda left, right: F.silu(left) * right,
    "reglu": lambda left, right: left * F.relu(right),
}


@readable_errors
def gated_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gate: Gate = "geglu",
    interleaved: bool = False,
) -> Tensor:
    """Computes `gate(left, right)` of the two halves of `F.linear(x, weight, bias)`.

    Args:
        x: `(..., K)`, float32, float16 or bfloat16 (float64 on CPU), any strides.
        weight: `(2N, K)`, dtype of `x`: the left branch's rows, then the right branch's
            (interleaved: even rows left, odd rows right).
        bias: `(2N,)`, dtype of `x`, in the weight's order.
        gate: "sigmoid_tanh" = sigmoid(left) * tanh(right), "geglu" = left * gelu(right) (erf),
            "geglu_tanh", "swiglu" = silu(left) * right, "reglu" = left * relu(right).
        interleaved: whether weight and bias have the interleaved layout.

    Returns:
        `(..., N)` contiguous, dtype of `x`; sums in fp32.

    Raises:
        RuntimeError: a wrong shape, dtype, device or gate.

    Limits: differentiable once.

    Example::

        x, weight = torch.randn(4, 32), torch.randn(2 * 64, 32)
        y = torchweld.gated_linear(x, weight, gate="swiglu")
        left, right = F.linear(x, weight).chunk(2, -1)
        torch.testing.assert_close(y, F.silu(left) * right, rtol=1e-4, atol=1e-4)
    """
    return ops.gated_linear(x, weight, bias, gate=gate, interleaved=interleaved)


@readable_errors
def gated_linear_pair(
    x: Tensor,
    left: Tensor,
    right: Tensor,
    left_bias: Tensor | None = None,
    right_bias: Tensor | None = None,
    *,
    gate: Gate = "swiglu",
) -> Tensor:
    """Computes `gate(F.linear(x, left, left_bias), F.linear(x, right, right_bias))`.

    The op is `gated_linear` for two separate weights: Llama's `silu(gate_proj(x)) * up_proj(x)` has
    `left = gate_proj.weight` and `right = up_proj.weight`. If both weights have the same strides,
    the kernels read them in place. Otherwise each call on a GPU concatenates them.

    Args:
        x: `(..., K)`, float32, float16 or bfloat16 (float64 on CPU), any strides.
        left: `(N, K)`, dtype of `x`.
        right: `(N, K)`, dtype of `x`.
        left_bias: `(N,)`, dtype of `x`.
        right_bias: `(N,)`, dtype of `x`.
        gate: a gate of `gated_linear`.

    Returns:
        `(..., N)` contiguous, dtype of `x`; sums in fp32.

    Raises:
        RuntimeError: a wrong shape, dtype, device or gate.

    Limits: differentiable once.

    Example::

        x, gate_proj, up_proj = torch.randn(4, 32), torch.randn(64, 32), torch.randn(64, 32)
        y = torchweld.gated_linear_pair(x, gate_proj, up_proj, gate="swiglu")
        assert y.shape == (4, 64)
    """
    return ops.gated_linear_pair(x, left, right, left_bias, right_bias, gate=gate)


@readable_errors
def gated_activation(left: Tensor, right: Tensor, *, gate: Gate = "swiglu") -> Tensor:
    """Computes `gate(left, right)`, for example `silu(left) * right`, in one pass over memory.

    `gated_linear_pair` and `gated_mlp` also compute the linear layers in front of the gate. This op
    is for layers that must run as modules: with LoRA adapters, hooks or weights of another format.
    Its gradient reads `dy`, `left` and `right` and writes both gradients in one pass.

    Args:
        left: `(..., N)`, float32, float16 or bfloat16 (float64 on CPU).
        right: the shape and dtype of `left`.
        gate: a gate of `gated_linear`.

    Returns:
        `(..., N)` contiguous, dtype of `left`; computed in fp32 and rounded once.

    Raises:
        RuntimeError: a wrong shape, dtype, device or gate.

    Limits: differentiable once.

    Example::

        left, right = torch.randn(4, 64), torch.randn(4, 64)
        y = torchweld.gated_activation(left, right, gate="swiglu")
        torch.testing.assert_close(y, F.silu(left) * right)
    """
    return ops.gated_activation(left, right, gate=gate)


@readable_errors
def gated_mlp(
    x: Tensor,
    left: Tensor,
    right: Tensor,
    down: Tensor,
    left_bias: Tensor | None = None,
    right_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    gate: Gate = "swiglu",
) -> Tensor:
    """Computes `F.linear(gate(F.linear(x, left, left_bias), F.linear(x, right, right_bias)), down,
    down_bias)`.

    Llama's `down_proj(silu(gate_proj(x)) * up_proj(x))` has `left = gate_proj.weight`, `right =
    up_proj.weight` and `down = down_proj.weight`. The op is `gated_linear_pair` followed by
    `linear`. Its backward computes the gated values again instead of saving them. In 16 bits on
    Hopper, the matmul `dy @ down` also computes the gradients to the results of the left and the
    right product, if the time model finds that faster than a separate pass.

    Args:
        x: `(..., K)`, float32, float16 or bfloat16 (float64 on CPU), any strides.
        left: `(N, K)`, dtype of `x`.
        right: `(N, K)`, dtype of `x`.
        down: `(P, N)`, dtype of `x`.
        left_bias: `(N,)`, dtype of `x`.
        right_bias: `(N,)`, dtype of `x`.
        down_bias: `(P,)`, dtype of `x`.
        gate: a gate of `gated_linear`.

    Returns:
        `(..., P)` contiguous, dtype of `x`; sums in fp32. The gated values are rounded to that
        dtype.

    Raises:
        RuntimeError: a wrong shape, dtype, device or gate.

    Limits: differentiable once.

    Example::

        gate_proj, up_proj, down_proj = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)
        weights = gate_proj.weight, up_proj.weight, down_proj.weight
        biases = gate_proj.bias, up_proj.bias, down_proj.bias
        y = torchweld.gated_mlp(torch.randn(4, 32), *weights, *biases, gate="swiglu")
        assert y.shape == (4, 32)
    """
    return ops.gated_mlp(x, left, right, down, left_bias, right_bias, down_bias, gate=gate)


class GatedLinearReference(nn.Module):
    """Computes `Linear(in, 2 * out)`, chunk and gate in plain torch; see `GatedLinear`.

    Args:
        linear: the packed linear layer.
        gate: a gate of `gated_linear`.
        interleaved: whether even rows are left, odd rows right.
    """

    def __init__(self, linear: nn.Linear, gate: Gate = "geglu", interleaved: bool = False) -> None:
        super().__init__()
        self.linear = linear
        self.gate = gate
        self.interleaved = interleaved

    def forward(self, x: Tensor) -> Tensor:
        z = self.linear(x)
        if self.interleaved:
            return GATES[self.gate](z[..., 0::2], z[..., 1::2])
        return GATES[self.gate](*z.chunk(2, dim=-1))


class GatedLinear(nn.Module):
    """Computes `nn.Linear(in_features, 2 * out_features)`, chunk and gate as one op.

    The parameters `weight` `(2 * out_features, in_features)` and `bias` are those of the linear
    layer. `load_state_dict` also accepts the keys of the modules that are replaced: one packed
    layer with any name, or two called `left` and `right`, or `gate_proj` and `up_proj` (not with
    "sigmoid_tanh").

    Args:
        in_features: K.
        out_features: N.
        bias: whether both branches have a bias.
        gate: "sigmoid_tanh", "geglu", "geglu_tanh", "swiglu" or "reglu".
        interleaved: True: even rows of the weight are the left branch, odd rows the right one.
            False: the first half is the left branch, the second half the right one.

    Raises:
        ValueError: another gate.

    Example::

        gate_proj, up_proj = nn.Linear(32, 64), nn.Linear(32, 64)
        fused = torchweld.nn.GatedLinear.from_linears(gate_proj, up_proj, gate="swiglu")
        x = torch.randn(4, 32)
        torch.testing.assert_close(fused(x), F.silu(gate_proj(x)) * up_proj(x))
    """

    __constants__ = ["in_features", "out_features", "gate", "interleaved"]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        gate: Gate = "geglu",
        interleaved: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require()
        if gate not in GATES:
            raise ValueError(
                f"GatedLinear: gate must be one of {', '.join(GATES)}, but got {gate!r}"
                f"{name_fix('gate', gate)}"
            )
        self.in_features = in_features
        self.out_features = out_features
        self.gate = gate
        self.interleaved = interleaved
        linear = nn.Linear(in_features, 2 * out_features, bias=bias, device=device, dtype=dtype)
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)

    def reset_parameters(self) -> None:
        """Draws the parameters anew, as `nn.Linear` draws its own.

        Raises:
            ValueError: a parameter is computed from others, by a parametrisation or the like.
        """
        refuse_computed("reset_parameters", self, ("weight", "bias"))
        reset_as_torch(self._as_torch())

    @torch.jit.unused
    def _load_from_state_dict(self, state_dict, prefix, *args):
        rename_gated_linear(state_dict, prefix, self.gate, self.interleaved)
        nn.Module._load_from_state_dict(self, state_dict, prefix, *args)

    @classmethod
    def from_torch(
        cls, module: nn.Module, gate: Gate | None = None, interleaved: bool | None = None
    ) -> GatedLinear:
        """Converts a packed `nn.Linear(in, 2 * out)` or a `GatedLinearReference`.

        Shares its parameters. gate and interleaved default to "geglu" and False for an nn.Linear,
        and to those of a `GatedLinearReference`.

        Raises:
            ValueError: another module; one of a subclass, or with hooks or a parametrisation; an
                odd out_features; another gate.
        """
        owner, expected = "GatedLinear.from_torch", "nn.Linear with an even out_features"
        if isinstance(module, GatedLinearReference):
            refuse_other(owner, "module", expected, module, GatedLinearReference)
            gate = module.gate if gate is None else gate
            interleaved = module.interleaved if interleaved is None else interleaved
            module = module.linear
        refuse_other(owner, "module", expected, module, nn.Linear)
        if module.out_features % 2:
            raise ValueError(f"{owner}: module must be {expected}, but got {text_of(module)}")
        new = cls(
            module.in_features,
            module.out_features // 2,
            gate="geglu" if gate is None else gate,
            interleaved=bool(interleaved),
            device="meta",
        )
        new.weight, new.bias = module.weight, module.bias
        return new.train(module.training)

    @classmethod
    def from_linears(cls, left: nn.Linear, right: nn.Linear, gate: Gate = "geglu") -> GatedLinear:
        """Converts two linear layers; their weights are copied into a packed one.

        For Llama's `down(silu(gate_proj(x)) * up_proj(x))`: left = gate_proj, right = up_proj,
        gate "swiglu".

        Raises:
            ValueError: one is no `nn.Linear`, is of a subclass, or has hooks or a parametrisation;
                they differ in sizes, bias, dtype, device or requires_grad; another gate.
        """
        owner = "GatedLinear.from_linears"
        refuse_other(owner, "left", "nn.Linear", left, nn.Linear)
        refuse_other(owner, "right", "nn.Linear", right, nn.Linear)
        same = (left.in_features, left.out_features, left.bias is None) == (
            right.in_features,
            right.out_features,
            right.bias is None,
        )
        if not same:
            raise ValueError(
                f"{owner}: right must have left's sizes and bias, but got {left} and {right}"
            )
        sides = {"left": left, "right": right}
        tensors = {
            f"{side}.{name}": getattr(linear, name)
            for side, linear in sides.items()
            for name in ("weight", "bias")
        }
        refuse_mixed(owner, tensors)
        for name, ours in left.named_parameters():
            theirs = right.get_parameter(name)
            if theirs.requires_grad != ours.requires_grad:
                raise ValueError(
                    f"{owner}: right.{name}.requires_grad must be {ours.requires_grad} like "
                    f"left's, but got {theirs.requires_grad}; freeze both or neither"
                )
        new = cls(
            left.in_features,
            left.out_features,
            bias=left.bias is not None,
            gate=gate,
            device=left.weight.device,
            dtype=left.weight.dtype,
        )
        with torch.no_grad():
            new.weight.copy_(torch.cat([left.weight, right.weight]))
            if new.bias is not None:
                new.bias.copy_(torch.cat([left.bias, right.bias]))
        for name, parameter in new.named_parameters():
            parameter.requires_grad_(left.get_parameter(name).requires_grad)
        return new.train(left.training)

    def to_torch(self) -> GatedLinearReference:
        """Returns the module in plain torch, which shares the parameters.

        Raises:
            ValueError: the module is of a subclass, or has hooks or a parametrisation.
        """
        refuse_other("GatedLinear.to_torch", "module", "GatedLinear", self, GatedLinear)
        return self._as_torch()

    @torch.jit.unused
    def _as_torch(self) -> GatedLinearReference:
        linear = nn.Linear(self.in_features, 2 * self.out_features, device="meta")
        linear.weight, linear.bias = self.weight, self.bias
        return GatedLinearReference(linear, self.gate, self.interleaved).train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `(..., in_features)` to `(..., out_features)`."""
        return self.compute(x, self.weight, self.bias)

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Computes forward with other parameters, for example this process's shards."""
        return torch.ops.torchweld.gated_linear(
            x, weight, bias, gate=self.gate, interleaved=self.interleaved
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, gate={self.gate!r}, interleaved={self.interleaved}"
        )
