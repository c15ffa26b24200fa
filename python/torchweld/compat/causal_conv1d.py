"""The functions of the package `causal_conv1d`, on torchweld's op.

Models of transformers call that package if it can be imported. They run torchweld's op if this
module replaces the package before they are imported::

    import sys
    import torchweld.compat.causal_conv1d
    sys.modules["causal_conv1d"] = torchweld.compat.causal_conv1d
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchweld.ops.causal_conv1d import causal_conv1d
from torchweld.ops.key_start import key_start_from_documents

__all__ = ["causal_conv1d_fn", "causal_conv1d_update"]

_ACTIVATIONS = {None: "none", "silu": "silu", "swish": "silu"}


def _convolve(
    name: str, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None,
    activation: str | None, key_start: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Runs the op in the wider dtype of x and weight; returns x's dtype."""
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f'{name}: activation must be None, "silu" or "swish", but got {activation!r}'
        )
    dtype = torch.promote_types(x.dtype, weight.dtype)
    x_wide, weight, bias, state = (
        None if t is None else t.to(dtype) for t in (x, weight, bias, state)
    )
    y = causal_conv1d(
        x_wide, weight, bias, state, activation=_ACTIVATIONS[activation], key_start=key_start
    )
    return y.to(x.dtype)


def _last(x: Tensor, state: Tensor | None, length: int) -> Tensor:
    """Returns each channel's last values; zeros stand in front of x without a state."""
    if state is None:
        state = x.new_zeros(*x.shape[:2], length)
    return torch.cat([state.to(x.dtype), x], -1)[..., -length:]


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes `causal_conv1d_fn` of the package `causal_conv1d`.

    Args:
        x: `(batch, channels, seqlen)`, float32, float16 or bfloat16 (float64 on CPU).
        weight: `(channels, width)` with a width of 2 to 4; if its dtype is not that of `x`, the op
            computes in the wider one.
        bias: `(channels,)`.
        seq_idx: int32 `(batch, seqlen)`, the document of each position; not with states.
        initial_states: `(batch, channels, width - 1)`, the values in front of position 0.
        return_final_states: whether to return the last `width - 1` values of each channel too.
        final_states_out: with return_final_states, a tensor `(batch, channels, width - 1)` that
            the last values are written to, and that is returned as the final states.
        activation: None, "silu" or "swish".

    Returns:
        `(batch, channels, seqlen)`, dtype of `x`; with `return_final_states` a tuple of it and of
        `(batch, channels, width - 1)`.

    Raises:
        RuntimeError: a wrong shape, dtype or device.
        ValueError: another activation; documents with states.

    Example::

        x, weight = torch.randn(2, 8, 16), torch.randn(8, 4)
        y, state = causal_conv1d.causal_conv1d_fn(x, weight, return_final_states=True)
        assert torch.equal(state, x[..., -3:])
    """
    name, key_start = "causal_conv1d_fn", None
    if seq_idx is not None:
        if initial_states is not None or return_final_states:
            raise ValueError(f"{name}: seq_idx must be None with initial or final states")
        key_start = key_start_from_documents(seq_idx)
    y = _convolve(name, x, weight, bias, initial_states, activation, key_start)
    if not return_final_states:
        return y
    final = _last(x, initial_states, weight.shape[1] - 1)
    return y, final if final_states_out is None else final_states_out.copy_(final)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """Computes `causal_conv1d_update` of the package `causal_conv1d`: a step of generation.

    Args:
        x: `(batch, channels)` or `(batch, channels, seqlen)`, the new positions.
        conv_state: `(batch, channels, length)` with at least `width - 1` values of each channel; it
            is updated in place: shifted, with the values of `x` at the end.
        weight, bias, activation: as in `causal_conv1d_fn`.
        cache_seqlens, conv_state_indices: None; ring buffers and pools of states are refused.

    Returns:
        The shape and dtype of `x`.

    Raises:
        RuntimeError: a wrong shape, dtype or device.
        ValueError: another activation, a short state, a ring buffer or a pool.

    Example::

        x, weight, state = torch.randn(2, 8), torch.randn(8, 4), torch.zeros(2, 8, 4)
        y = causal_conv1d.causal_conv1d_update(x, state, weight)
        torch.testing.assert_close(y, x * weight[:, -1])
    """
    name = "causal_conv1d_update"
    for argument, value in zip(
        ("cache_seqlens", "conv_state_indices"), (cache_seqlens, conv_state_indices), strict=True
    ):
        if value is not None:
            raise ValueError(
                f"{name}: {argument} must be None; give the states of the batch in its order"
            )
    seen, length = weight.shape[-1] - 1, conv_state.shape[-1]
    if length < seen:
        raise ValueError(
            f"{name}: conv_state must be (batch, channels, {seen} or more), but got "
            f"{tuple(conv_state.shape)}"
        )
    rows = x if x.dim() == 3 else x.unsqueeze(-1)
    y = _convolve(name, rows, weight, bias, conv_state[..., length - seen :], activation)
    conv_state.copy_(_last(rows, conv_state, length))
    return y.squeeze(-1) if x.dim() == 2 else y
