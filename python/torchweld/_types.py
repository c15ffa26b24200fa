"""The names and tensors that ops take."""

from __future__ import annotations

from typing import Any, Literal

Activation = Literal["none", "relu", "gelu", "gelu_tanh", "silu", "relu_squared"]
ConvActivation = Literal["none", "silu"]
Gate = Literal["sigmoid_tanh", "geglu", "geglu_tanh", "swiglu", "reglu"]
ExpertGate = Literal[
    "swiglu", "geglu", "geglu_tanh", "reglu", "relu", "relu_squared", "silu", "gelu", "gelu_tanh"
]
Reduction = Literal["none", "mean", "sum"]
Keep = Literal["auto", "exponentials", "gradients", "nothing"]


def is_dtensor(t: Any) -> bool:
    return type(t).__name__ == "DTensor"  # without an import of torch.distributed.tensor
