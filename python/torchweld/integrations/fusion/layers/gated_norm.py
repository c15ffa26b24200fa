"""Norms behind linear attention and state-space scans, as :func:`torchweld.rms_norm_gated`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweld._library import ops
from torchweld.integrations import recorder
from torchweld.ops.stock import plain_tensors

from .fused_module import (
    ARGUMENTS,
    ROW,
    FusedModule,
    call_arguments,
    stock_forward,
)
from .rms_norm import FusedRMSNorm


class GatedNorm(NamedTuple):
    """The attribute of eps, and whether the gate multiplies the rows in front of the norm."""

    eps: str
    gate_first: bool


class FusedGatedNorm(FusedModule):
    """An RMSNorm of ``(x, gate)``."""

    kind, op = "norm", "rms_norm_gated"
    refusal = staticmethod(FusedRMSNorm.refusal)
    op_parameters = staticmethod(FusedRMSNorm.op_parameters)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = None if torch.compiler.is_compiling() else call_arguments(self, args, kwargs)
        if given is None:
            return stock_forward(self, *args, **kwargs)
        x, gate = map(given.get, getattr(self, ARGUMENTS).names)
        # The stock norms compute in fp32 even if x is float64.
        serves = gate is not None and plain_tensors(x, gate, self.weight)
        if not serves or x.dtype == torch.float64 or x.shape != gate.shape:
            return stock_forward(self, *args, **kwargs)
        if recorder.calls is not None:
            recorder.record(self)
        row = getattr(self, ROW)
        eps = getattr(self, row.eps)
        return ops.rms_norm_gated(x, gate, self.weight, eps=eps, gate_first=row.gate_first)
