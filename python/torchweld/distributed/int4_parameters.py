"""`Int4Linear` layers whose tensors are parameters, so that `fully_shard` shards them.

FSDP2 of torch 2.11 ignores buffers and refuses parameters of integers. The codes are therefore
stored as parameters of the scales' dtype with the same bits, which a mixed precision of that dtype
leaves alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchweld.nn import Int4Linear
from torchweld.ops.int4_checks import state_errors

_CODES = ("qweight", "zero")


def codes_as_parameters(model: nn.Module) -> list[str]:
    """Turns the tensors of every `Int4Linear` into frozen parameters, which FSDP2 can shard.

    Call it on the device where the model trains, before `fully_shard`, with or without adapters.
    The layers compute the same. `MixedPrecisionPolicy.param_dtype` must be None or the dtype of the
    scales. A state_dict has the tensors in the layout of their device; `Int4Linear` loads it.

    Args:
        model: changed in place.

    Returns:
        The paths of the changed layers.

    Raises:
        ValueError: a layer is on the meta device, is sharded by `parallelize`, or has float64
            scales; nothing is changed then.

    Example::

        model = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 128))
        torchweld.quantize_(model, torchweld.Int4(group_size=64))
        assert torchweld.distributed.codes_as_parameters(model) == ["0", "1"]
        fully_shard(model, mesh=mesh)
    """
    layers = [(path, m) for path, m in model.named_modules() if isinstance(m, Int4Linear)]
    layers = [(path, m) for path, m in layers if not isinstance(m, ParameterInt4Linear)]
    for path, layer in layers:
        refusal = None
        if type(layer) is not Int4Linear:
            refusal = f"an Int4Linear, but got {type(layer).__name__}"
        elif layer.scale.is_meta:
            refusal = "on a device with values, but got the meta device"
        elif layer.scale.dtype == torch.float64:
            refusal = "of a dtype with at most 32 bits, but got torch.float64"
        if refusal is not None:
            raise ValueError(f"torchweld.distributed.codes_as_parameters: {path} must be {refusal}")
    for _, layer in layers:
        dtype = layer.scale.dtype
        for name, tensor in list(layer.named_buffers()):
            delattr(layer, name)
            stored = tensor.contiguous().view(dtype) if name in _CODES else tensor
            layer.register_parameter(name, nn.Parameter(stored, requires_grad=False))
        layer.__class__ = ParameterInt4Linear
        layer.stored_dtype = dtype
    return [path for path, _ in layers]


class ParameterInt4Linear(Int4Linear):
    """An `Int4Linear` made by `codes_as_parameters`; its parameters may be sharded by FSDP2."""

    stored_dtype: torch.dtype

    def stored(self) -> tuple[Tensor, Tensor, Tensor]:
        for name in _CODES:
            if (got := getattr(self, name).dtype) != self.stored_dtype:
                raise RuntimeError(
                    f"torchweld: {name} must stay {self.stored_dtype}, whose bits are 4-bit codes, "
                    f"but got {got}; give MixedPrecisionPolicy the param_dtype "
                    f"{self.stored_dtype} or None, and do not cast the model"
                )
        return self.qweight.view(torch.int32), self.scale, self.zero.view(torch.int32)

    def repack(self) -> None:
        """Does nothing: sharded tensors keep their layout."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        got = fn(self.scale.new_empty(0)).dtype
        if got != self.stored_dtype:
            raise RuntimeError(
                f"torchweld: an Int4Linear with codes as parameters must stay {self.stored_dtype}, "
                f"but got {got}; cast the model before codes_as_parameters"
            )
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)
        for name in _CODES:
            destination[prefix + name] = _viewed(destination[prefix + name], torch.int32)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        words = torch.empty(0, dtype=torch.int32, device="meta")
        expected = {**self._parameters, **dict.fromkeys(_CODES, words)}
        tensors = [(name, tensor) for name, tensor in expected.items() if tensor is not None]
        weight = state_dict.pop(prefix + "weight", None)
        if wrong := state_errors(prefix, weight, state_dict, tensors):
            args[-1].extend(wrong)
            return
        for name in _CODES:
            if prefix + name in state_dict:
                given = state_dict[prefix + name]
                state_dict[prefix + name] = _viewed(given, self.stored_dtype)
        nn.Module._load_from_state_dict(self, state_dict, prefix, *args, **kwargs)


def _viewed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Views the bits of a tensor, sharded or not, as another dtype."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().contiguous().view(dtype)
    local = tensor.to_local().detach()
    ratio = local.element_size() / dtype.itemsize
    shape = (*tensor.shape[:-1], int(tensor.shape[-1] * ratio))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local.view(dtype),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )
