"""Linear layers with 4-bit weights, and the packing of their codes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchweld._library import ops, require
from torchweld._refusals import sentences


@sentences
def int4_pack(codes: Tensor) -> Tensor:
    """Eight 4-bit codes a word along the last dimension, lowest nibble first.

    Args:
        codes: uint8 `(..., cols)`, values 0 to 15; of larger ones the low four bits count.

    Returns:
        int32 `(..., ceil(cols / 8))`; codes that fill up the last word are 0.

    Raises:
        RuntimeError: another dtype, or no dimension.
    """
    return ops.int4_pack(codes)


@sentences
def int4_unpack(packed: Tensor, cols: int) -> Tensor:
    """The codes of `int4_pack`'s words.

    Args:
        packed: int32 `(..., ceil(cols / 8))`, any bit pattern.
        cols: how many codes a row has.

    Returns:
        uint8 `(..., cols)`, values 0 to 15.

    Raises:
        RuntimeError: another dtype, or a number of words that is not `ceil(cols / 8)`.
    """
    return ops.int4_unpack(packed, cols)


@sentences
def int4_linear(
    x: Tensor, qweight: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`x @ W.T + bias` with `W = scale * (code - zero)` of 4-bit codes and zeros.

    The codes less the zeros are exact. A weight is rounded once to the dtype of `x`, or not at all
    where the kernel lets the scale multiply the float32 sum of a group.

    Args:
        x: `(..., K)`, K a multiple of 8.
        qweight: int32 `(N, K / 8)`, packed by `int4_pack`.
        scale: `(N, K / group)` in the dtype of `x`; group is a multiple of 8 that divides K.
        zero: int32 `(N, ceil(K / group / 8))`, packed the same way, unsigned, no offset.
        bias: `(N,)`.

    Returns:
        `(..., N)` contiguous, dtype of `x`; sums in fp32.

    Raises:
        RuntimeError: a wrong shape, dtype or device, or a scale or bias that requires a gradient.

    Limits: gradient to `x` only, once. On CUDA the weight is repacked in every call; see
        `int4_repack`.
    """
    return ops.int4_linear(x, qweight, scale, zero, bias)


@sentences
def int4_repack(qweight: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The weight of `int4_linear` in the order in which the tensor cores want it; done once.

    Args:
        qweight: int32 `(N, K / 8)`.
        scale: `(N, K / group)`.
        zero: int32 `(N, ceil(K / group / 8))`.

    Returns:
        `packed`, int32 `(ceil(N/16), ceil(K/64), 128)`, `packed_scale`, `(ceil(N/16), K/group, 16)`
        and `packed_zero`, int32 `(ceil(N/16), K/group, 2)`. The layout is described in
        csrc/ops/int4_pack/int4_layout.h; it may change from one version to the next, so keep the
        portable tensors in files.

    Raises:
        RuntimeError: a wrong shape, dtype or device.
    """
    return ops.int4_repack(qweight, scale, zero)


@sentences
def int4_linear_repacked(
    x: Tensor,
    packed: Tensor,
    packed_scale: Tensor,
    packed_zero: Tensor,
    bias: Tensor | None = None,
    *,
    out_features: int,
) -> Tensor:
    """`int4_linear` with the weight as `int4_repack` made it.

    Args:
        x: `(..., K)`, K a multiple of 8.
        packed: int32 `(ceil(N/16), ceil(K/64), 128)`.
        packed_scale: `(ceil(N/16), K/group, 16)` in the dtype of `x`.
        packed_zero: int32 `(ceil(N/16), K/group, 2)`.
        bias: `(N,)`.
        out_features: N.

    Returns:
        `(..., N)` contiguous, dtype of `x`; sums in fp32.

    Raises:
        RuntimeError: a wrong shape, dtype or device, or a scale or bias that requires a gradient.

    Limits: gradient to `x` only, once. Full speed needs float16 or bfloat16 and a group of 64, 128
        or another multiple of 64.

    Source: Frantar et al., "MARLIN: Mixed-Precision Auto-Regressive Parallel Inference on Large
        Language Models", 2024.
    """
    return ops.int4_linear_repacked(
        x, packed, packed_scale, packed_zero, bias, out_features=out_features
    )


def _group_of(in_features: int, group_size: int | None) -> int:
    group = in_features if group_size is None else group_size
    if group < 8 or group % 8 or in_features % group:
        raise ValueError(
            f"Int4Linear: group_size must be a multiple of 8 that divides in_features = "
            f"{in_features}, but got {group_size}; None makes one group of a whole row"
        )
    return group


class Int4Linear(nn.Module):
    """Frozen `torch.nn.Linear` with weights of 4 bits; stands in for it at inference.

    Made by `Int4Linear.from_linear(linear)`. The buffers are the portable layout of `int4_linear`,
    and they alone are in the state_dict, which so does not depend on the device. On CUDA the
    repacked weight stands beside them, another half byte a weight: it is made when the module is
    moved there and when a state_dict is loaded. Who edits a buffer in place calls `repack()`
    afterwards.

    Args:
        in_features: K, a multiple of 8.
        out_features: N.
        bias: whether there is a bias.
        group_size: columns that share a scale and a zero: a multiple of 8 that divides K, or None
            for K.
        device, dtype: of scales and bias.

    Attributes:
        quantisation_error: of the weight that `from_linear` was given, relative: the root of the
            mean square of the rounding, over that of the weight; 0 where nothing was quantised.
        largest_error: the largest rounding, at most half of a group's scale.
    """

    __constants__ = ["in_features", "out_features"]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        group_size: int | None = 128,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require()
        self.in_features, self.out_features = in_features, out_features
        self.group_size = _group_of(in_features, group_size)
        self.quantisation_error = 0.0
        self.largest_error = 0.0
        groups = in_features // self.group_size

        def words(count: int) -> Tensor:
            return torch.zeros(out_features, count, dtype=torch.int32, device=device)

        self.register_buffer("qweight", words(in_features // 8))
        self.register_buffer("scale", torch.zeros(out_features, groups, device=device, dtype=dtype))
        self.register_buffer("zero", words((groups + 7) // 8))
        shift = torch.zeros(out_features, device=device, dtype=dtype) if bias else None
        self.register_buffer("bias", shift)
        for name in ("packed", "packed_scale", "packed_zero"):
            self.register_buffer(name, torch.empty(0, device=device), persistent=False)
        self.repack()

    @classmethod
    @torch.no_grad()
    def from_linear(cls, linear: nn.Linear, group_size: int | None = 128) -> Int4Linear:
        """Rounds the weight to the nearest of 16 levels between each group's least and largest.

        The levels include 0. Scales are kept in the weight's dtype, and the codes are chosen for
        the scales as kept.

        Args:
            linear: a layer whose in_features is a multiple of 8; it is not changed.
            group_size: columns that share a scale and a zero, None for a whole row.

        Returns:
            A module in eval mode on the layer's device, with `quantisation_error` set.

        Raises:
            ValueError: `linear` is no `nn.Linear`, or group_size no multiple of 8 that divides
                in_features.
        """
        if not isinstance(linear, nn.Linear):
            raise ValueError(f"Int4Linear.from_linear: linear must be nn.Linear, but got {linear}")
        weight = linear.weight
        module = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            group_size,
            weight.device,
            weight.dtype,
        )
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        groups = weight.to(wide).unflatten(1, (-1, module.group_size))
        low = groups.amin(-1, keepdim=True).clamp(max=0)
        high = groups.amax(-1, keepdim=True).clamp(min=0)
        kept = ((high - low) / 15).to(weight.dtype)
        scale = kept.to(wide)
        step = torch.where(scale > 0, scale, 1.0)
        zero = (-low / step).round().clamp(0, 15)
        codes = ((groups / step).round() + zero).clamp(0, 15)
        error = scale * (codes - zero) - groups
        module.qweight.copy_(ops.int4_pack(codes.flatten(1).to(torch.uint8)))
        module.scale.copy_(kept.squeeze(-1))
        module.zero.copy_(ops.int4_pack(zero.squeeze(-1).to(torch.uint8)))
        if linear.bias is not None:
            module.bias.copy_(linear.bias)
        if weight.numel():
            size = groups.square().mean().sqrt().item()
            module.quantisation_error = error.square().mean().sqrt().item() / size if size else 0.0
            module.largest_error = error.abs().max().item()
        module.repack()
        return module.eval()

    @classmethod
    def from_torch(cls, module: nn.Linear) -> Int4Linear:
        """`from_linear` with groups of 128."""
        return cls.from_linear(module)

    def to_torch(self) -> nn.Linear:
        """`nn.Linear` with the dequantised weight, rounded to its dtype."""
        linear = nn.Linear(
            self.in_features,
            self.out_features,
            self.bias is not None,
            self.scale.device,
            self.scale.dtype,
        )
        with torch.no_grad():
            linear.weight.copy_(self.dequantise())
            if self.bias is not None:
                linear.bias.copy_(self.bias)
        return linear.eval()

    @torch.jit.unused
    def dequantise(self) -> Tensor:
        """The weight `(out_features, in_features)` that the codes stand for."""
        codes = ops.int4_unpack(self.qweight, self.in_features).to(self.scale.dtype)
        zeros = ops.int4_unpack(self.zero, self.scale.shape[1]).to(self.scale.dtype)
        groups = codes.unflatten(1, (-1, self.group_size))
        return (self.scale[..., None] * (groups - zeros[..., None])).flatten(1)

    @torch.jit.unused
    def repack(self) -> None:
        """Makes the repacked weight anew; it is empty where the buffers are not on CUDA."""
        if self.qweight.is_cuda:
            made = ops.int4_repack(self.qweight, self.scale, self.zero)
        else:
            made = (self.scale.new_empty(0),) * 3
        self.packed, self.packed_scale, self.packed_zero = made

    def _apply(self, fn, recurse: bool = True):
        # Codes are no floats, so that .half() leaves them alone.
        super()._apply(fn, recurse)
        self.repack()
        return self

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.repack()

    def forward(self, x: Tensor) -> Tensor:
        """`(..., in_features)` to `(..., out_features)`."""
        if self.packed.numel() > 0:
            return torch.ops.torchweld.int4_linear_repacked(
                x,
                self.packed,
                self.packed_scale,
                self.packed_zero,
                self.bias,
                out_features=self.out_features,
            )
        return torch.ops.torchweld.int4_linear(x, self.qweight, self.scale, self.zero, self.bias)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, group_size={self.group_size}, "
            f"quantisation_error={self.quantisation_error:.2g}"
        )
