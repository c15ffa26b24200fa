"""Runs LayerNorms on torchweld's ops, alone and after a residual addition."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from torchweld._library import ops
from torchweld.integrations import recorder
from torchweld.integrations.fusion.probes import Probes
from torchweld.ops.stock import plain_tensors

from .fused_module import (
    ROW,
    FusedModule,
    Replacement,
    below,
    instance_refusal,
    stock_forward,
)
from .norm import FusedNorm
from .rms_norm import FusedRMSNorm
from .stock_modules import hooked, weight_and_bias

# On a CPU torch's norm is the faster one in float32 and float16.
_DTYPES = {"cuda": (torch.float32, torch.float16, torch.bfloat16), "cpu": (torch.bfloat16,)}


class FusedLayerNorm(FusedNorm):
    """A LayerNorm over the last dimension that runs :func:`torchweld.layer_norm`."""

    op = "layer_norm"

    @classmethod
    def probe(cls, module: nn.Module, row: None, weight: Tensor, probes: Probes) -> str | None:
        reason = super().probe(module, row, weight, probes)
        if reason is None and not is_faster(weight):
            device, dtype = weight.device.type, str(weight.dtype)[6:]
            reason = f"torch's layer_norm of {dtype} is as fast on {device}"
        return reason

    @staticmethod
    def refusal(module: nn.Module, row: None) -> str | None:
        if len(module.normalized_shape) != 1:
            return f"it normalises {len(module.normalized_shape)} dimensions"
        return instance_refusal(module)

    @staticmethod
    def op_parameters(module: nn.Module, row: None) -> dict[str, Tensor | None]:
        return {"weight": module.weight, "bias": module.bias}

    def operands(self, x: Any) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
        # NOTE: on the host, x.shape[-1:] and x.device.type take as long as ten attributes.
        if not isinstance(x, Tensor) or not x.dim() or (x.shape[-1],) != self.normalized_shape:
            return None
        tensors = x, *weight_and_bias(self)
        autocast = torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled("cuda")
        if autocast and x.is_cuda:  # torch's norm is a float32 one there
            tensors = tuple(None if tensor is None else tensor.float() for tensor in tensors)
        return tensors if plain_tensors(*tensors) and is_faster(tensors[0]) else None

    def options(self) -> dict[str, float]:
        return {"eps": self.eps}


class CentredNorm(NamedTuple):
    """Settings of a LayerNorm: eps or its attribute's name, and a number added to the weight."""

    eps: str | float
    weight_offset: float


class FusedCentredNorm(FusedNorm):
    """A LayerNorm of another class than torch's that runs :func:`torchweld.layer_norm`."""

    op = "layer_norm"
    refusal = staticmethod(FusedRMSNorm.refusal)

    @staticmethod
    def op_parameters(module: nn.Module, row: CentredNorm) -> dict[str, Tensor | None]:
        return {name: getattr(module, name, None) for name in ("weight", "bias")}

    def operands(self, x: Any) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
        row: CentredNorm = getattr(self, ROW)
        weight, bias = self.op_parameters(self, row).values()
        # Whether autocast casts the input of such a norm depends on its class.
        if x is None or torch._C._is_any_autocast_enabled() or not plain_tensors(x, weight, bias):
            return None
        # The stock norms compute in fp32 even if x is float64; the op would not.
        if x.dtype == torch.float64 or weight is not None and weight.shape != x.shape[-1:]:
            return None
        if weight is not None and row.weight_offset:
            weight = weight + row.weight_offset
        return x, weight, bias

    def options(self) -> dict[str, float]:
        eps = getattr(self, ROW).eps
        return {"eps": getattr(self, eps) if isinstance(eps, str) else eps}


class PostNorm(NamedTuple):
    """Names the modules of ``norm(dropout(linear(x)) + residual)``."""

    linear: str
    dropout: str
    norm: str


class FusedPostNorm(FusedModule):
    """A linear layer whose residual sum and norm run as :func:`torchweld.add_layer_norm`."""

    kind, op = "norm", "add_layer_norm"

    @staticmethod
    def replacement(path: str, module: nn.Module, row: PostNorm) -> Replacement:
        norm = module._modules[row.norm]
        return Replacement(below(path, row.norm), (norm, "add"), (module, norm))

    @staticmethod
    def label(module: nn.Module, row: PostNorm) -> str:
        return f"add_layer_norm (residual + {row.linear} -> {row.norm})"

    @staticmethod
    def refusal(module: nn.Module, row: PostNorm) -> str | None:
        if hooked(module._modules[row.norm]):
            return "it has hooks, which would see other values"
        return instance_refusal(module)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        row = getattr(self, ROW, None)
        if row is None or len(args) != 2 or kwargs or torch.compiler.is_compiling():
            return stock_forward(self, *args, **kwargs)
        x, residual = args
        modules = self._modules
        norm, x = modules[row.norm], modules[row.dropout](modules[row.linear](x))
        called = hooked(norm) or _has_any_global_hook() or not isinstance(residual, Tensor)
        tensors = None if called or x.shape != residual.shape else FusedLayerNorm.operands(norm, x)
        # Under autocast, torch adds x and residual before it casts their sum. The op can't do that.
        if tensors is None or tensors[0] is not x or not plain_tensors(x, residual):
            return norm(x + residual)
        if recorder.calls is not None:
            recorder.record((norm, "add"))
        return ops.add_layer_norm(x, residual, *tensors[1:], eps=norm.eps)[0]


def is_faster(tensor: Tensor) -> bool:
    """Whether the ops are faster than torch's for a tensor's device and dtype."""
    device = "cuda" if tensor.is_cuda else "cpu" if tensor.is_cpu else ""
    return tensor.dtype in _DTYPES.get(device, ())
