"""Tiny real calls, which tell ``fuse`` whether the ops run on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchweld import _library


class Probes:
    """Tiny real calls, forward and backward: the one honest test that a kernel is there."""

    def __init__(self) -> None:
        self._seen: dict[Any, str | None] = {}

    def layer_norm_linear(self, weight: Tensor, activation: str) -> str | None:
        def call() -> Tensor:
            x = torch.zeros(2, 8, device=weight.device, dtype=weight.dtype, requires_grad=True)
            w = torch.zeros(8, 8, device=weight.device, dtype=weight.dtype)
            return _library.ops.layer_norm_linear(x, w.t(), activation=activation)

        return self._run(("layer_norm_linear", weight.device, weight.dtype, activation), call)

    def rms_norm(self, weight: Tensor) -> str | None:
        def call() -> Tensor:
            x, scale = _zeros(weight, 2, 8), _zeros(weight, 8)
            return _library.ops.rms_norm(x, scale)

        return self._run(("rms_norm", weight.device, weight.dtype), call)

    def rms_norm_linears(self, weight: Tensor) -> str | None:
        def call() -> Tensor:
            x = _zeros(weight, 8, 8)
            return torch.cat(_library.ops.rms_norm_linears(x, [x, x], []))

        return self._run(("rms_norm_linears", weight.device, weight.dtype), call)

    def add_rms_norm(self, weight: Tensor) -> str | None:
        def call() -> Tensor:
            x, scale = _zeros(weight, 2, 8), _zeros(weight, 8)
            return _library.ops.add_rms_norm(x, x, scale)[0]

        return self._run(("add_rms_norm", weight.device, weight.dtype), call)

    def rotary(self, weight: Tensor) -> str | None:
        def call() -> Tensor:
            x = _zeros(weight, 1, 1, 2, 8)
            table = x[0, 0].detach()
            return _library.ops.rotary(x, x, table, table)[0]

        return self._run(("rotary", weight.device, weight.dtype), call)

    def gated_linear(self, weight: Tensor, gate: str, packed: bool) -> str | None:
        def call() -> Tensor:
            x = _zeros(weight, 8, 8)
            if packed:
                return _library.ops.gated_linear(x, x, gate=gate)
            return _library.ops.gated_mlp(x, x, x, x, gate=gate)

        return self._run(("gated_linear", weight.device, weight.dtype, gate, packed), call)

    def gated_activation(self, weight: Tensor, gate: str) -> str | None:
        def call() -> Tensor:
            x = _zeros(weight, 2, 8)
            return _library.ops.gated_activation(x, x, gate=gate)

        return self._run(("gated_activation", weight.device, weight.dtype, gate), call)

    def loss(self, weight: Tensor) -> str | None:
        def call() -> Tensor:
            x = torch.zeros(2, 8, device=weight.device, dtype=weight.dtype, requires_grad=True)
            target = torch.zeros(2, device=weight.device, dtype=torch.int64)
            return _library.ops.linear_cross_entropy(x, x, target)

        return self._run(("loss", weight.device, weight.dtype), call)

    def attention(self, attn: Any, base: Any) -> str | None:
        # A quantised layer computes in the dtype of its input. Its integer weights don't tell this
        # dtype.
        floating = [p for p in attn.parameters() if p.is_floating_point()]
        weight = floating[0] if floating else base.wte.weight
        device = device_of(attn, weight)
        dim = attn.head_dim

        def call() -> Tensor:
            q = torch.zeros(1, 1, 2, dim, device=device, dtype=weight.dtype, requires_grad=True)
            pad = torch.zeros(1, dtype=torch.int32, device=device)
            return _library.ops.attention(q, q, q, pad, causal=True)

        return self._run(("attention", device, weight.dtype, dim), call)

    def once(self, key: Any, compare: Callable[[], str | None]) -> str | None:
        """What a comparison says, which is made once for each key."""
        if key not in self._seen:
            self._seen[key] = compare()
        return self._seen[key]

    def _run(self, key: Any, call: Any) -> str | None:
        if key not in self._seen:
            self._seen[key] = None
            if key[1].type == "meta":
                self._seen[key] = "the parameters are on the meta device"
            else:
                try:
                    with torch.inference_mode(False), torch.enable_grad(), _no_autocast(key[1]):
                        call().sum().backward()
                except (RuntimeError, AttributeError) as error:
                    text = str(error).strip().splitlines()
                    self._seen[key] = text[0] if text else type(error).__name__
        return self._seen[key]


def _zeros(like: Tensor, *shape: int) -> Tensor:
    return torch.zeros(shape, device=like.device, dtype=like.dtype, requires_grad=True)


def device_of(module: nn.Module, parameter: Tensor) -> torch.device:
    """Returns the device a module computes on: that of accelerate's hooks or the parameter's."""
    for part in module.modules():
        hook = getattr(part, "_hf_hook", None)
        for each in getattr(hook, "hooks", (hook,)):
            device = getattr(each, "execution_device", None)
            if device is not None:
                return torch.device(device)
    return parameter.device


def _no_autocast(device: torch.device) -> Any:
    return torch.autocast(device.type, enabled=False)
