"""RMSNorms on torchweld's ops."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchweld.ops.stock import plain_tensors

from .fused_module import instance_refusal
from .norm import FusedNorm


class Norm(NamedTuple):
    """The attributes of a family's RMSNorm."""

    eps: str
    weight_offset: float


class FusedRMSNorm(FusedNorm):
    """An RMSNorm as :func:`torchweld.rms_norm`."""

    op = "rms_norm"

    @staticmethod
    def refusal(module: nn.Module, row: Norm) -> str | None:
        weight = _weight(module)
        if weight is not None and weight.dtype == torch.float64:
            return "it is float64, of which the stock norm computes in float32"
        return instance_refusal(module)

    @staticmethod
    def op_parameters(module: nn.Module, row: Norm) -> dict[str, Tensor | None]:
        return {"weight": _weight(module)}

    def operands(self, x: Any) -> tuple[Tensor, Tensor | None] | None:
        # The stock norms compute in fp32 even if x is float64, and the op computes in float64. The
        # results would differ visibly.
        own = self._parameters
        weight = own["weight"] if "weight" in own else _weight(self)
        serves = x is not None and plain_tensors(x, weight) and x.dtype != torch.float64
        return (x, weight) if serves else None

    def options(self) -> dict[str, float]:
        row: Norm = self._torchweld_row
        offset = row.weight_offset
        if offset and _weight(self) is None:
            offset = 0.0
        return {"eps": getattr(self, row.eps), "weight_offset": offset}


def _weight(norm: nn.Module) -> Tensor | None:
    """Returns the weight of a norm, or None if it has none."""
    return getattr(norm, "weight", None)


class FusedTorchNorm(FusedRMSNorm):
    """An ``nn.RMSNorm`` over the last dimension as :func:`torchweld.rms_norm`."""

    @staticmethod
    def refusal(module: nn.Module, row: Norm) -> str | None:
        if len(module.normalized_shape) != 1:
            return f"it normalises {len(module.normalized_shape)} dimensions"
        if module.eps is None:
            return "its eps depends on the dtype of the input"
        if module.weight is not None and module.weight.dtype == torch.float64:
            return "it is float64"
        return FusedRMSNorm.refusal(module, row)
