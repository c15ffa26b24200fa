"""Runs RMSNorms on torchweld's ops, also those after linear attention and state-space scans."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchweld._library import ops
from torchweld.integrations import recorder
from torchweld.ops.stock import plain_tensors

from .fused_module import (
    ARGUMENTS,
    ROW,
    FusedModule,
    call_arguments,
    instance_refusal,
    stock_forward,
)
from .norm import FusedNorm
from .stock_modules import weight_of


class Norm(NamedTuple):
    """Settings of an RMSNorm: eps's attribute name, and a number added to the weight."""

    eps: str
    weight_offset: float


class FusedRMSNorm(FusedNorm):
    """An RMSNorm that runs :func:`torchweld.rms_norm`."""

    op = "rms_norm"

    @staticmethod
    def refusal(module: nn.Module, row: Norm) -> str | None:
        weight = weight_of(module)
        if weight is not None and weight.dtype == torch.float64:
            return "it is float64, of which the stock norm computes in float32"
        return instance_refusal(module)

    @staticmethod
    def op_parameters(module: nn.Module, row: Norm) -> dict[str, Tensor | None]:
        return {"weight": weight_of(module)}

    def operands(self, x: Any) -> tuple[Tensor, Tensor | None] | None:
        # The stock norms compute in fp32 even if x is float64. The op would compute in float64, and
        # the results would differ visibly.
        weight = weight_of(self)
        serves = x is not None and plain_tensors(x, weight) and x.dtype != torch.float64
        return (x, weight) if serves else None

    def options(self) -> dict[str, float]:
        row: Norm = self._torchweld_row
        offset = row.weight_offset
        if offset and weight_of(self) is None:
            offset = 0.0
        return {"eps": getattr(self, row.eps), "weight_offset": offset}


class FusedTorchNorm(FusedRMSNorm):
    """An ``nn.RMSNorm`` over the last dimension that runs :func:`torchweld.rms_norm`."""

    @staticmethod
    def refusal(module: nn.Module, row: Norm) -> str | None:
        if len(module.normalized_shape) != 1:
            return f"it normalises {len(module.normalized_shape)} dimensions"
        if module.eps is None:
            return "its eps depends on the dtype of the input"
        if module.weight is not None and module.weight.dtype == torch.float64:
            return "it is float64"
        return FusedRMSNorm.refusal(module, row)


class GatedNorm(NamedTuple):
    """Settings of a gated norm: eps's attribute name, and whether the gate precedes the norm."""

    eps: str
    gate_first: bool


class FusedGatedNorm(FusedModule):
    """An RMSNorm of ``(x, gate)`` that runs :func:`torchweld.rms_norm_gated`."""

    kind, op = "norm", "rms_norm_gated"
    refusal = staticmethod(FusedRMSNorm.refusal)
    op_parameters = staticmethod(FusedRMSNorm.op_parameters)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = None if torch.compiler.is_compiling() else call_arguments(self, args, kwargs)
        if given is None:
            return stock_forward(self, *args, **kwargs)
        x, gate = map(given.get, getattr(self, ARGUMENTS).names)
        # The stock norms compute in fp32 even if x is float64; the op would not.
        serves = gate is not None and plain_tensors(x, gate, self.weight)
        if not serves or x.dtype == torch.float64 or x.shape != gate.shape:
            return stock_forward(self, *args, **kwargs)
        if recorder.calls is not None:
            recorder.record(self)
        row = getattr(self, ROW)
        eps = getattr(self, row.eps)
        return ops.rms_norm_gated(x, gate, self.weight, eps=eps, gate_first=row.gate_first)
