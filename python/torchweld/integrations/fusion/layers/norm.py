"""Runs norms on torchweld's ops: alone, of a residual sum, and in front of projections."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchweld._library import ops
from torchweld.integrations import recorder
from torchweld.integrations.fusion.probes import Probes

from .deferred import LayerInput, Normed, Sum, computed, modes
from .fused_module import FusedModule, stock_forward
from .linears import Operands, copied

Parameters = tuple[Tensor | None, ...]


class FusedNorm(FusedModule):
    """A norm over the last dimension.

    Attributes:
        op: The op of the norm alone. ``add_<op>`` adds a residual first, and ``<op>_linears``
            projects the result.
    """

    kind = "norm"

    @classmethod
    def probe(cls, module: nn.Module, row: Any, weight: Tensor, probes: Probes) -> str | None:
        return probes.refusal(cls.op, weight) or probes.refusal(f"{cls.op}_linears", weight)

    def operands(self, x: Any) -> Parameters | None:
        """Returns the op's arguments to normalise x, or None if the stock forward must run."""
        raise NotImplementedError

    def options(self) -> dict[str, float]:
        """Returns the options of the ops."""
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or not args or args[1:]:
            return stock_forward(self, *args, **kwargs)
        (x,) = args
        if type(x) is Sum and x.h is not None and self in x.norms and x.mode == modes():
            if recorder.calls is not None:
                recorder.record((self, "add"))
                recorder.record(self)
            h, x.h = x.h, None
            add = getattr(ops, f"add_{self.op}")
            h, x.x = add(h, x.x, *x.norms[self], **self.options())
            return h
        if type(x) is LayerInput and self in x.projections:
            return Normed(self, x)
        x = computed(x)
        # torch.compile fuses stock norms with other ops. After unfuse, self is a stock module.
        runs = isinstance(self, FusedNorm) and not torch.compiler.is_compiling()
        tensors = self.operands(x) if runs else None
        if tensors is None:
            return stock_forward(self, x)
        if recorder.calls is not None:
            recorder.record(self)
        return getattr(ops, self.op)(*tensors, **self.options())

    def linears(self, x: Tensor, parameters: Parameters, projections: Operands) -> list[Tensor]:
        """Computes the results of layers that project the normalised x."""
        weights, biases, mesh = projections
        given = [bias for bias in biases if bias is not None]
        if given and len(given) < len(biases):  # the op takes one for each layer or none
            pairs = zip(weights, biases, strict=True)
            given = [w.new_zeros(w.shape[0]) if bias is None else bias for w, bias in pairs]
        if mesh is not None:
            x, *parameters = copied(mesh, x, *parameters)
        linears = getattr(ops, f"{self.op}_linears")
        return linears(x, weights, given, *parameters, **self.options())
