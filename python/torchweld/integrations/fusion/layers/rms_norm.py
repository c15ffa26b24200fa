"""RMSNorms on torchweld's ops: alone, of a residual sum, and in front of projections."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchweld._library import ops
from torchweld.integrations import recorder
from torchweld.integrations.fusion.probes import Probes

from .deferred import LayerInput, Normed, Sum, computed
from .fused_module import ROW, FusedModule, instance_refusal, plain_tensors, stock_forward
from .linears import Operands, copied


class Norm(NamedTuple):
    """The attributes of a family's RMSNorm."""

    eps: str
    weight_offset: float


class FusedNorm(FusedModule):
    """An RMSNorm as :func:`torchweld.rms_norm`."""

    kind = "norm"

    @staticmethod
    def label(module: nn.Module, row: Norm) -> str:
        return "rms_norm"

    @staticmethod
    def probe(module: nn.Module, row: Norm, weight: Tensor, probes: Probes) -> str | None:
        return probes.refusal("rms_norm", weight) or probes.refusal("rms_norm_linears", weight)

    @staticmethod
    def refusal(module: nn.Module, row: Norm) -> str | None:
        weight = weight_of(module)
        if weight is not None and weight.dtype == torch.float64:
            return "it is float64, of which the stock norm computes in float32"
        return instance_refusal(module)

    @staticmethod
    def op_parameters(module: nn.Module, row: Norm) -> dict[str, Tensor | None]:
        return {"weight": weight_of(module)}

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if len(args) != 1 or kwargs:
            return stock_forward(self, *args, **kwargs)
        (x,) = args
        if type(x) is Sum and x.h is not None and self in x.norms and x.is_in_mode():
            if recorder.calls is not None:
                recorder.record((self, "add"))
            h, x.h = x.h, None
            h, x.x = ops.add_rms_norm(h, x.x, weight_of(self), **_options(self))
            return h
        if type(x) is LayerInput and x.projections is not None and self in x.norms:
            return Normed(self, x.x, x.projections)
        x = computed(x)
        if not runs_norm(self, x):
            return stock_forward(self, x)
        if recorder.calls is not None:
            recorder.record(self)
        return ops.rms_norm(x, weight_of(self), **_options(self))

    def linears(self, x: Tensor, projections: Operands) -> list[Tensor]:
        """The results of layers that project the normalised x."""
        weights, biases, mesh = projections
        biases = [] if biases[0] is None else biases
        x, scale = copied(mesh, x, weight_of(self))
        return ops.rms_norm_linears(x, weights, biases, scale, **_options(self))


def weight_of(norm: nn.Module) -> Tensor | None:
    """Returns the weight of a norm, or None if it has none."""
    return getattr(norm, "weight", None)


def _options(norm: nn.Module) -> dict[str, float]:
    """Returns the options that a fused norm passes to its op."""
    row: Norm = getattr(norm, ROW)
    offset = row.weight_offset if row.weight_offset and weight_of(norm) is not None else 0.0
    return {"eps": getattr(norm, row.eps), "weight_offset": offset}


def runs_norm(norm: nn.Module, x: Any) -> bool:
    # The stock norms compute in fp32 even if x is float64, and the op computes in float64. The
    # results would differ visibly.
    serves = (
        isinstance(norm, FusedNorm) and isinstance(x, Tensor) and plain_tensors(x, weight_of(norm))
    )
    return serves and x.dtype != torch.float64 and not torch.compiler.is_compiling()


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
