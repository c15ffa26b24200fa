"""Runs torchweld's op inside of layers that call ``F.scaled_dot_product_attention``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchweld._library import ops
from torchweld.integrations import recorder
from torchweld.integrations.attention.fallback import SDPA, warn_once
from torchweld.integrations.fusion.probes import Probes
from torchweld.integrations.sdpa.flash import Cpu
from torchweld.integrations.sdpa.gpus import general_kernel
from torchweld.ops.stock import plain_tensors

from .fused_module import FusedModule, instance_refusal, stock_forward


class FusedSdpaLayer(FusedModule):
    """A layer whose stock forward runs, with its calls of SDPA as :func:`torchweld.attention`.

    Calls that the op does not serve run SDPA. Nothing else in the layer changes.
    """

    kind = op = "attention"

    @staticmethod
    def probe(module: nn.Module, row: None, weight: Tensor, probes: Probes) -> str | None:
        return probes.refusal("attention", weight, 64)

    @staticmethod
    def refusal(module: nn.Module, row: None) -> str | None:
        if not getattr(module, "fused_attn", True):
            return "its fused_attn is off, so that it computes the scores itself"
        return instance_refusal(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _Calls(self):
            out = stock_forward(self, *args, **kwargs)
        if recorder.calls is not None and self not in recorder.calls:
            recorder.record(self, "the stock forward runs: it called no SDPA")
        return out


class _Calls(TorchFunctionMode):
    """Runs the op in place of a layer's calls of SDPA, in this thread alone.

    NOTE: torch calls a mode for each of its functions, which takes the host some microseconds a
    function. Compiled code calls the mode only while it is traced.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return _attention(self.layer, *args, **(kwargs or {}))
        # NOTE: Dynamo can trace x.unflatten(), but not Tensor.unflatten(x), which calls super().
        if func is Tensor.unflatten and torch.compiler.is_compiling():
            return args[0].unflatten(*args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attention(
    layer: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Runs the op, or SDPA if the op can't serve the call; the arguments are SDPA's."""
    tensors = query, key, value
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        tensors = tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)
    options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    reason = _refusal(*tensors, enable_gqa, attn_mask=attn_mask, **options)
    if recorder.calls is not None:
        recorder.record(layer, reason and f"{SDPA} runs: {reason}")
    if reason is None:
        return ops.attention(*tensors, causal=is_causal, scale=scale)
    warn_once(reason)
    return F.scaled_dot_product_attention(*tensors, attn_mask, **options, enable_gqa=enable_gqa)


def _refusal(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, **options: Any
) -> str | None:
    """Returns why a call of SDPA does not run the op, or None."""
    plain = all(map(plain_tensors, (query, key, value)))
    if not plain and not torch.compiler.is_exporting():  # export traces with fake tensors
        return "a tensor is of a subclass or not floating point"
    # SDPA has on every device the rules that Cpu checks, such as causal masks at the top left.
    reason = Cpu.refusal(query, key, value, **options)
    if reason is None and query.shape[1] != key.shape[1] and not enable_gqa:
        reason = "the heads differ without enable_gqa"
    if reason is None and query.is_cuda:
        reason = general_kernel(query, query.shape[-1], value.shape[-1])
        if query.dtype == torch.float64:
            reason = "the kernels for CUDA know no float64"
    return reason
