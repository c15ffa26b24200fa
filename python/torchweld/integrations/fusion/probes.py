"""Runs tiny calls of the ops, to tell ``fuse`` whether they run on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchweld import _library
from torchweld.ops.experts import experts


class _Like:
    """Makes zeros of a device and a dtype; only those of :meth:`__call__` need a gradient."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def __call__(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self.device, dtype=self.dtype, requires_grad=True)

    def fixed(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(shape, device=self.device, dtype=dtype or self.dtype)


def _gated_linear(ops: Any, zeros: _Like, gate: str, packed: bool) -> Tensor:
    x = zeros(8, 8)
    return ops.gated_linear(x, x, gate=gate) if packed else ops.gated_mlp(x, x, x, x, gate=gate)


def _rotary(ops: Any, zeros: _Like) -> Tensor:
    x, table = zeros(1, 1, 2, 8), zeros.fixed(2, 8)
    return ops.rotary(x, x, table, table)[0]


def _experts(ops: Any, zeros: _Like, gate: str, limit: float | None, alpha: float | None) -> Tensor:
    index = zeros.fixed(2, 1, dtype=torch.int64)
    gate_up = zeros(1, 16 if "glu" in gate else 8, 8)
    return experts(
        zeros(2, 8),
        gate_up,
        zeros(1, 8, 8),
        index,
        zeros(2, 1),
        gate=gate,
        limit=limit,
        alpha=alpha,
    )


def _attention(ops: Any, zeros: _Like, head_dim: int) -> Tensor:
    q, leftpad = zeros(1, 1, 2, head_dim), zeros.fixed(1, dtype=torch.int32)
    return ops.attention(q, q, q, leftpad, causal=True)


# For each op, the call that tells whether it runs.
_CALLS: dict[str, Callable[..., Tensor]] = {
    "layer_norm_linear": lambda ops, zeros, activation: ops.layer_norm_linear(
        zeros(2, 8), zeros.fixed(8, 8), activation=activation
    ),
    "linear": lambda ops, zeros, activation: ops.linear(
        zeros(8, 8), zeros(8, 8), activation=activation
    ),
    "layer_norm": lambda ops, zeros: ops.layer_norm(zeros(2, 8), zeros(8), zeros(8)),
    "add_layer_norm": lambda ops, zeros: ops.add_layer_norm(
        zeros(2, 8), zeros(2, 8), zeros(8), zeros(8)
    )[0],
    "rms_norm": lambda ops, zeros: ops.rms_norm(zeros(2, 8), zeros(8)),
    "rms_norm_linears": lambda ops, zeros: torch.cat(
        ops.rms_norm_linears(zeros(8, 8), [zeros(8, 8), zeros(8, 8)], [])
    ),
    "layer_norm_linears": lambda ops, zeros: torch.cat(
        ops.layer_norm_linears(zeros(8, 8), [zeros(8, 8), zeros(8, 8)], [])
    ),
    "add_rms_norm": lambda ops, zeros: ops.add_rms_norm(zeros(2, 8), zeros(2, 8), zeros(8))[0],
    "rms_norm_gated": lambda ops, zeros: ops.rms_norm_gated(zeros(2, 8), zeros(2, 8), zeros(8)),
    "rotary": _rotary,
    "gated_linear": _gated_linear,
    "gated_activation": lambda ops, zeros, gate: ops.gated_activation(
        zeros(2, 8), zeros(2, 8), gate=gate
    ),
    "linear_cross_entropy": lambda ops, zeros: ops.linear_cross_entropy(
        zeros(2, 8), zeros(2, 8), zeros.fixed(2, dtype=torch.int64)
    ),
    "attention": _attention,
    "experts": _experts,
    "grouped_linear": lambda ops, zeros: ops.grouped_linear(
        zeros(2, 8), zeros(1, 8, 8), zeros.fixed(1, dtype=torch.int32)
    ),
}


class Probes:
    """Runs tiny calls of the ops, forward and backward, and remembers why some of them fail."""

    def __init__(self) -> None:
        self._known: dict[Any, str | None] = {}

    def refusal(
        self, op: str, weight: Tensor, *options: Any, device: torch.device | None = None
    ) -> str | None:
        """Returns why an op fails in a weight's dtype, on its device or ``device``, or None."""
        device = device or weight.device
        key = op, device, weight.dtype, options
        return self.once(key, lambda: _refusal(op, _Like(device, weight.dtype), options))

    def once(self, key: Any, compare: Callable[[], str | None]) -> str | None:
        """Returns the result of a comparison, which runs once for each key."""
        if key not in self._known:
            self._known[key] = compare()
        return self._known[key]


def _refusal(op: str, zeros: _Like, options: tuple[Any, ...]) -> str | None:
    device = zeros.device
    if device.type == "meta":
        return "the parameters are on the meta device"
    autocast = torch.autocast(device.type, enabled=False)
    try:
        with torch.inference_mode(False), torch.enable_grad(), autocast:
            _CALLS[op](_library.ops, zeros, *options).sum().backward()
    except (RuntimeError, AttributeError) as error:
        text = str(error).strip().splitlines()
        return text[0] if text else type(error).__name__
    return None


def device_of(module: nn.Module, parameter: Tensor) -> torch.device:
    """Returns the device a module computes on: that of accelerate's hooks or the parameter's."""
    for each in module.modules():
        hook = getattr(each, "_hf_hook", None)
        for one in getattr(hook, "hooks", (hook,)):
            device = getattr(one, "execution_device", None)
            if device is not None:
                return torch.device(device)
    return parameter.device
