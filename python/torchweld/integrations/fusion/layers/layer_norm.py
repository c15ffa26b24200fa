"""torch's LayerNorm on torchweld's ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchweld._library import ops
from torchweld.integrations import recorder
from torchweld.integrations.fusion.probes import Probes

from .fused_module import FusedModule, instance_refusal, plain_tensors, stock_forward
from .stock_modules import weight_and_bias

# On a CPU torch's norm is the faster one in float32 and float16.
_DTYPES = {"cuda": (torch.float32, torch.float16, torch.bfloat16), "cpu": (torch.bfloat16,)}


class FusedLayerNorm(FusedModule):
    """A LayerNorm over the last dimension as :func:`torchweld.layer_norm`."""

    kind = "norm"

    @staticmethod
    def label(module: nn.Module, row: None) -> str:
        return "layer_norm"

    @staticmethod
    def probe(module: nn.Module, row: None, weight: Tensor, probes: Probes) -> str | None:
        if not _is_faster(weight):
            device, dtype = weight.device.type, str(weight.dtype)[6:]
            return f"torch's layer_norm of {dtype} is as fast on {device}"
        return probes.refusal("layer_norm", weight)

    @staticmethod
    def refusal(module: nn.Module, row: None) -> str | None:
        if len(module.normalized_shape) != 1:
            return f"it normalises {len(module.normalized_shape)} dimensions"
        return instance_refusal(module)

    @staticmethod
    def op_parameters(module: nn.Module, row: None) -> dict[str, Tensor | None]:
        return {"weight": module.weight, "bias": module.bias}

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        tensors = None
        if len(args) == 1 and not kwargs and not torch.compiler.is_compiling():
            tensors = norm_operands(self, args[0])
        if tensors is None:
            return stock_forward(self, *args, **kwargs)
        if recorder.calls is not None:
            recorder.record(self)
        return ops.layer_norm(*tensors, eps=self.eps)


def norm_operands(norm: nn.Module, x: Any) -> tuple[Tensor | None, ...] | None:
    """The arguments x, weight and bias of an op that normalises x, or None if none may run."""
    if not isinstance(x, Tensor) or x.shape[-1:] != norm.normalized_shape:
        return None
    tensors = x, *weight_and_bias(norm)
    if x.is_cuda and torch.is_autocast_enabled("cuda"):  # torch's norm is a float32 one there
        tensors = tuple(None if tensor is None else tensor.float() for tensor in tensors)
    return tensors if plain_tensors(*tensors) and _is_faster(tensors[0]) else None


def _is_faster(tensor: Tensor) -> bool:
    return tensor.dtype in _DTYPES.get(tensor.device.type, ())
