"""Forwards for modules of transformers, which keep their parameters.

`kernels` gives a stock module the forward of a class below, so `self` is the stock module. A class
may have nothing but this forward. If the op would not compute the same as the stock forward, the
stock one runs: `type(self).forward`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .stock import is_plain, plain_tensors

_SILU = {"torch.nn.modules.activation.SiLU", "transformers.activations.SiLUActivation"}


class RMSNorm(nn.Module):
    """`LlamaRMSNorm` and its like: parameter `weight` `(n,)`, attribute `variance_epsilon`.

    `forward(hidden_states)` takes and returns `(..., n)`, float32, float16 or bfloat16, and has a
    gradient. The stock forward runs for float64 and for a weight of another dtype.
    """

    can_torch_compile = False  # torch.compile fuses the stock norm with neighbouring ops
    has_backward = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        # The stock norm computes in float32 even for a float64 input; the op would not.
        plain = plain_tensors(hidden_states, self.weight)
        if not plain or hidden_states.dtype == torch.float64:
            return type(self).forward(self, hidden_states)
        return torch.ops.torchweld.rms_norm(hidden_states, self.weight, eps=self.variance_epsilon)


class MLP(nn.Module):
    """`LlamaMLP` and its like: `down_proj(act_fn(gate_proj(x)) * up_proj(x))`.

    `forward(x)` takes and returns `(..., hidden_size)`, float32, float16 or bfloat16, and has a
    gradient. The stock forward runs for activations other than SiLU, for layers other than
    `nn.Linear`, for layers with hooks or parametrisations, and for mixed dtypes.
    """

    can_torch_compile = True
    has_backward = True

    def forward(self, x: Tensor) -> Tensor:
        layers = self.gate_proj, self.up_proj, self.down_proj
        act = type(self.act_fn)
        silu = f"{act.__module__}.{act.__qualname__}" in _SILU and is_plain(self.act_fn, act)
        if not silu or not all(is_plain(layer, nn.Linear) for layer in layers):
            return type(self).forward(self, x)
        tensors = [layer.weight for layer in layers] + [layer.bias for layer in layers]
        if not plain_tensors(x, *tensors):
            return type(self).forward(self, x)
        return torch.ops.torchweld.gated_mlp(x, *tensors, gate="swiglu")
