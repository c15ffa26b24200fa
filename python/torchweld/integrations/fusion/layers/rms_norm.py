"""torch's RMSNorm on torchweld's op."""

from __future__ import annotations

import torch
from torch import nn

from .decoder import FusedNorm, Norm


class FusedTorchNorm(FusedNorm):
    """An ``nn.RMSNorm`` over the last dimension as :func:`torchweld.rms_norm`."""

    @staticmethod
    def refusal(module: nn.Module, row: Norm) -> str | None:
        if len(module.normalized_shape) != 1:
            return f"it normalises {len(module.normalized_shape)} dimensions"
        if module.eps is None:
            return "its eps depends on the dtype of the input"
        if module.weight is not None and module.weight.dtype == torch.float64:
            return "it is float64"
        return FusedNorm.refusal(module, row)
