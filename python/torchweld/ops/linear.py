"""A linear layer with an activation, and a batched matmul."""

from __future__ import annotations

from torch import Tensor, nn

from torchweld._library import ops
from torchweld._refusals import name_fix, readable_errors
from torchweld._types import Activation
from torchweld.ops.stock import refuse_other


class ReLUSquared(nn.Module):
    """Computes `relu(x)**2`, for which torch has no module."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(x).square()


_ACTIVATIONS = {
    "none": nn.Identity,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
    "relu_squared": ReLUSquared,
}


@readable_errors
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: Activation = "none"
) -> Tensor:
    """Computes `activation(torch.nn.functional.linear(x, weight, bias))`.

    Args:
        x: `(..., K)`, float32, float16 or bfloat16 (float64 on CPU), any strides.
        weight: `(N, K)` as in `nn.Linear`, dtype of `x`, any strides: pass `weight.t()` of a GPT-2
            `Conv1D`.
        bias: `(N,)`, dtype of `x`.
        activation: "none", "relu", "gelu" (erf), "gelu_tanh", "silu" or "relu_squared".

    Returns:
        `(..., N)` contiguous, dtype of `x`; sums in fp32.

    Raises:
        RuntimeError: a wrong shape, dtype, device or activation.

    Limits: differentiable once.

    Example::

        x, weight, bias = torch.randn(4, 32), torch.randn(64, 32), torch.randn(64)
        y = torchweld.linear(x, weight, bias, activation="gelu_tanh")
        assert y.shape == (4, 64)
    """
    return ops.linear(x, weight, bias, activation=activation)


@readable_errors
def bmm(a: Tensor, b: Tensor) -> Tensor:
    """Computes `torch.matmul(a, b)` of three-dimensional tensors; a batch of 1 broadcasts.

    Args:
        a: `(batch, M, K)`, float32, float16 or bfloat16 (float64 on CPU), any strides: a transposed
            view is not copied.
        b: `(batch, K, N)`, any strides, dtype and device of `a`.

    Returns:
        `(batch, M, N)` contiguous, dtype of `a`; sums in fp32.

    Raises:
        RuntimeError: a wrong shape, dtype or device.

    Limits: differentiable once.

    Example::

        a, b = torch.randn(2, 4, 8), torch.randn(2, 8, 16)
        torch.testing.assert_close(torchweld.bmm(a, b), torch.bmm(a, b))
    """
    return ops.bmm(a, b)


def reset_as_torch(module: nn.Module) -> None:
    """Initialises the parameters of a torch module anew, as its submodules do when built."""
    for part in module.modules():
        if isinstance(part, (nn.Linear, nn.LayerNorm, nn.RMSNorm)):
            part.reset_parameters()


def activation_module(name: str) -> nn.Module:
    """Returns an activation's torch module by its name."""
    return _ACTIVATIONS[name]()


def activation_name(module: nn.Module | None, owner: str) -> str:
    """Returns the name of an activation module, "none" for None; ValueError for other modules."""
    if module is None:
        return "none"
    names = {
        nn.ReLU: "relu",
        nn.GELU: "gelu",
        nn.SiLU: "silu",
        ReLUSquared: "relu_squared",
        nn.Identity: "none",
    }
    expected = "nn.ReLU, nn.GELU, nn.SiLU or nn.Identity"
    refuse_other(owner, "the activation", expected, module, *names)
    if isinstance(module, nn.GELU) and module.approximate == "tanh":
        return "gelu_tanh"
    return names[type(module)]


def check_activation(name: str, owner: str) -> str:
    """Returns the name; ValueError if no op has the activation."""
    if name not in _ACTIVATIONS:
        raise ValueError(
            f"{owner}: activation must be one of {', '.join(_ACTIVATIONS)}, but got {name!r}"
            f"{name_fix('activation', name)}"
        )
    return name
