"""PEFT's LoRA layer on ``nn.Linear``: the adapter's product is added to that of the base layer.

PEFT computes ``base(x) + lora_B(lora_A(x)) * scaling`` op by op. With float32 adapters, which is
its default, the casts, the factor and the sum move more memory than the base layer's product does
in 16 bits. Here the small product is added to the result in place (``addmm_``), forward and
backward. Both small products are computed in the dtype of x, as under autocast.

Importing this module does not import peft.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchweld._autograd import once_differentiable
from torchweld.integrations.fusion.layers.fused_module import (
    FusedModule,
    instance_refusal,
    is_fused,
    stock_forward,
)
from torchweld.integrations.fusion.probes import Probes
from torchweld.ops.stock import is_plain, plain_tensors

from . import recorder


class _LoraLinear(torch.autograd.Function):
    """Computes ``F.linear(x, weight, bias) + scaling * (low @ a.T) @ b.T``.

    The tensors have the dtype of x, except ``a (r, K)`` and ``b (N, r)``, which are cast to it.
    ``low`` is x after the adapter's dropout, or None if the adapter has no dropout.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        low: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scaling: float,
    ) -> Tensor:
        rows = (x if low is None else low).reshape(-1, a.shape[1])
        hidden = rows @ a.to(x.dtype).t()
        y = F.linear(x, weight, bias)
        y.view(-1, b.shape[0]).addmm_(hidden, b.to(x.dtype).t(), alpha=scaling)
        ctx.save_for_backward(x if weight.requires_grad else None, low, rows, hidden, weight, a, b)
        ctx.scaling, ctx.shape, ctx.has_bias = scaling, x.shape, bias is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, low, rows, hidden, weight, a, b = ctx.saved_tensors
        wants_x, wants_low, wants_weight, wants_bias, wants_a, wants_b, _ = ctx.needs_input_grad
        grad = dy.reshape(-1, dy.shape[-1])
        dhidden = (grad @ b.to(dy.dtype)).mul_(ctx.scaling)
        dx = dlow = dweight = dbias = da = db = None
        if wants_x:
            dx = grad @ weight
            if low is None:
                dx.addmm_(dhidden, a.to(dy.dtype))
            dx = dx.view(ctx.shape)
        if wants_low:
            dlow = (dhidden @ a.to(dy.dtype)).view(ctx.shape)
        if wants_weight:
            dweight = grad.t() @ x.reshape(-1, x.shape[-1])
        if wants_bias and ctx.has_bias:
            dbias = grad.sum(0)
        if wants_a:
            da = (dhidden.t() @ rows).to(a.dtype)
        if wants_b:
            db = (grad.t() @ hidden).mul_(ctx.scaling).to(b.dtype)
        return dx, dlow, dweight, dbias, da, db, None


class FusedLora(FusedModule):
    """PEFT's LoRA layer on an ``nn.Linear``; it adds one plain adapter's product in place."""

    kind = "lora"

    @staticmethod
    def label(module: nn.Module, row: None) -> str:
        return "aten::addmm_ (base_layer + lora_A -> lora_B)"

    @staticmethod
    def probe(module: nn.Module, row: None, weight: Tensor, probes: Probes) -> str | None:
        return None  # the fused forward calls only torch's ops

    @staticmethod
    def refusal(module: nn.Module, row: None) -> str | None:
        reason = instance_refusal(module)
        if reason is None and _adapter(module) is None:
            reason = "its adapters are not one active LoRA without variants on torch's Linear"
        return reason

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        adapter = None
        if is_fused(self) and not (args or kwargs or _is_transformed()):
            adapter = _adapter(self)
        if adapter is None or not _runs(self, adapter, x):
            return stock_forward(self, x, *args, **kwargs)
        if recorder.calls is not None:
            recorder.record(self)
        base, a, b = self.base_layer, self.lora_A[adapter].weight, self.lora_B[adapter].weight
        device, dropout = x.device.type, self.lora_dropout[adapter]
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x, weight = x.to(dtype), base.weight.to(dtype)
            bias = None if base.bias is None else base.bias.to(dtype)
        else:
            weight, bias = base.weight, base.bias
        low = None if type(dropout) is nn.Identity else dropout(x)
        with torch.autocast(device, enabled=False):
            return _LoraLinear.apply(x, low, weight, bias, a, b, self.scaling[adapter])


def _is_transformed() -> bool:
    """Whether torch.compile or torch.func transforms the call; the stock forward runs then."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def _adapter(layer: nn.Module) -> str | None:
    """Returns the name of a layer's only active adapter, or None if it is not one plain LoRA."""
    if layer.disable_adapters or layer.merged or not is_plain(layer.base_layer, nn.Linear):
        return None
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(names) != 1 or names[0] in getattr(layer, "lora_variant", {}):
        return None
    low, high = layer.lora_A[names[0]], layer.lora_B[names[0]]
    plain = is_plain(low, nn.Linear) and is_plain(high, nn.Linear)
    return names[0] if plain and low.bias is None and high.bias is None else None


def _runs(layer: nn.Module, adapter: str, x: Tensor) -> bool:
    low, high, base = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight, layer.base_layer
    if not plain_tensors(low, high) or not plain_tensors(base.weight, base.bias):
        return False
    if type(x) is Tensor and torch.is_autocast_enabled(x.device.type):
        return x.is_floating_point()
    narrower = low.dtype == torch.float32 and x.dtype in (torch.float16, torch.bfloat16)
    return plain_tensors(x, base.weight) and (low.dtype == x.dtype or narrower)
