"""Linear layers with 4-bit weights, and the packing of their codes."""

from __future__ import annotations

from torch import Tensor

from torchweld._library import ops
from torchweld._refusals import readable_errors


@readable_errors
def int4_pack(codes: Tensor) -> Tensor:
    """Packs eight 4-bit codes a word along the last dimension, lowest nibble first.

    Args:
        codes: uint8 `(..., cols)`, values 0 to 15; of a larger value the low four bits count.

    Returns:
        int32 `(..., ceil(cols / 8))`; the unused nibbles of the last word are 0.

    Raises:
        RuntimeError: another dtype, or no dimension.

    Example::

        codes = torch.randint(0, 16, (64, 128), dtype=torch.uint8)
        packed = torchweld.int4_pack(codes)
        assert packed.shape == (64, 16) and packed.dtype == torch.int32
    """
    return ops.int4_pack(codes)


@readable_errors
def int4_unpack(packed: Tensor, cols: int) -> Tensor:
    """Unpacks the codes from words of `int4_pack`.

    Args:
        packed: int32 `(..., ceil(cols / 8))`, any bit pattern.
        cols: how many codes a row has.

    Returns:
        uint8 `(..., cols)`, values 0 to 15.

    Raises:
        RuntimeError: another dtype, or a number of words that is not `ceil(cols / 8)`.

    Example::

        codes = torch.randint(0, 16, (64, 128), dtype=torch.uint8)
        packed = torchweld.int4_pack(codes)
        assert torch.equal(torchweld.int4_unpack(packed, 128), codes)
    """
    return ops.int4_unpack(packed, cols)


@readable_errors
def int4_linear(
    x: Tensor, qweight: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Computes `x @ W.T + bias` with `W = scale * (code - zero)` of 4-bit codes and zeros.

    `code - zero` is exact. A weight is rounded once to the dtype of `x`, or not at all if the
    kernel multiplies the float32 sum of a group by its scale.

    Args:
        x: `(..., K)`, float32, float16 or bfloat16 (float64 on CPU), K a multiple of 8.
        qweight: int32 `(N, K / 8)`, packed by `int4_pack`.
        scale: `(N, K / group)` in the dtype of `x`; group is a multiple of 8 that divides K.
        zero: int32 `(N, ceil(K / group / 8))`, packed by `int4_pack`, unsigned, no offset.
        bias: `(N,)`, dtype of `x`.

    Returns:
        `(..., N)` contiguous, dtype of `x`; sums in fp32.

    Raises:
        RuntimeError: a wrong shape, dtype or device, or a scale or bias that requires a gradient.

    Limits: gradient to `x` only, once. On CUDA the weight is repacked in every call; see
        `int4_repack`.

    Example::

        layer = torchweld.nn.Int4Linear.from_linear(nn.Linear(128, 64), group_size=64)
        y = torchweld.int4_linear(torch.randn(4, 128), *layer.portable(), layer.bias)
        assert y.shape == (4, 64)
    """
    return ops.int4_linear(x, qweight, scale, zero, bias)


@readable_errors
def int4_repack(qweight: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Reorders the weight of `int4_linear` once for the tensor cores.

    Args:
        qweight: int32 `(N, K / 8)`.
        scale: `(N, K / group)`, float32, float16 or bfloat16 (float64 on CPU).
        zero: int32 `(N, ceil(K / group / 8))`.

    Returns:
        `packed`, int32 `(ceil(N/16), ceil(K/64), 128)`, `packed_scale`, `(ceil(N/16), K/group, 16)`
        and `packed_zero`, int32 `(ceil(N/16), K/group, 2)`. The layout is described in
        csrc/int4/layout.h; it may change from one version to the next, so save the tensors of
        `int4_linear`. `Int4Linear` converts back when it is saved.

    Raises:
        RuntimeError: a wrong shape, dtype or device.

    Example::

        layer = torchweld.nn.Int4Linear.from_linear(nn.Linear(128, 64), group_size=64)
        packed, packed_scale, packed_zero = torchweld.int4_repack(*layer.portable())
    """
    return ops.int4_repack(qweight, scale, zero)


@readable_errors
def int4_linear_repacked(
    x: Tensor,
    packed: Tensor,
    packed_scale: Tensor,
    packed_zero: Tensor,
    bias: Tensor | None = None,
    *,
    out_features: int,
) -> Tensor:
    """Computes `int4_linear` with the weight that `int4_repack` made.

    Args:
        x: `(..., K)`, float32, float16 or bfloat16 (float64 on CPU), K a multiple of 8.
        packed: int32 `(ceil(N/16), ceil(K/64), 128)`.
        packed_scale: `(ceil(N/16), K/group, 16)` in the dtype of `x`.
        packed_zero: int32 `(ceil(N/16), K/group, 2)`.
        bias: `(N,)`, dtype of `x`.
        out_features: N.

    Returns:
        `(..., N)` contiguous, dtype of `x`; sums in fp32.

    Raises:
        RuntimeError: a wrong shape, dtype or device, or a scale or bias that requires a gradient.

    Limits: gradient to `x` only, once. Full speed needs float16 or bfloat16 and a group of 64, 128
        or another multiple of 64.

    Source: Frantar et al., "MARLIN: Mixed-Precision Auto-Regressive Parallel Inference on Large
        Language Models", 2024.

    Example::

        layer = torchweld.nn.Int4Linear.from_linear(nn.Linear(128, 64), group_size=64)
        weight = torchweld.int4_repack(*layer.portable())
        y = torchweld.int4_linear_repacked(torch.randn(4, 128), *weight, out_features=64)
        assert y.shape == (4, 64)
    """
    return ops.int4_linear_repacked(
        x, packed, packed_scale, packed_zero, bias, out_features=out_features
    )
