"""Linear layers with 4-bit weights, and the packing of their codes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchweld._library import ops, require
from torchweld._refusals import sentences
from torchweld.ops.int4_weight import NoValues, round_weight
from torchweld.ops.stock import refuse_mixed, refuse_other


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
        csrc/int4/layout.h; it may change from one version to the next, so keep the
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


_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


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

    The state_dict also has an empty `weight`. A float layer refuses it by its size, with
    `strict=False` too; without it, transformers' `from_pretrained` and `load_state_dict` would
    leave such a layer's weight as it was initialised. So `save_pretrained` of a model with
    Int4Linear layers makes a file that `from_pretrained` refuses, unless `ignore_mismatched_sizes`
    is set. To load it, build the float model, put the Int4Linear layers in, then use
    `load_state_dict`. TorchScript keeps the repacked weight in the state_dict and leaves `weight`
    out: load a scripted module's into another scripted one.

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
        largest_error: the largest rounding, at most half of a group's scale (a whole one where a
            level would leave the range of the dtype).
    """

    __constants__ = ["in_features", "out_features"]
    __jit_unused_properties__ = ["weight"]

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
        the scales as kept. No level that is used is beyond the dtype's range.

        Args:
            linear: a layer whose in_features is a multiple of 8; it is not changed.
            group_size: columns that share a scale and a zero, None for a whole row.

        Returns:
            A module in eval mode on the layer's device, with `quantisation_error` set.

        Raises:
            ValueError: `linear` is no `nn.Linear`, is of a subclass, or has hooks or a
                parametrisation; it has another dtype than the ops, mixed ones, or no values (on
                the meta device); group_size is no multiple of 8 that divides in_features.
        """
        owner = "Int4Linear.from_linear"
        refuse_other(owner, "linear", "nn.Linear", linear, nn.Linear)
        weight = linear.weight
        if weight.dtype not in _DTYPES:
            listed = ", ".join(map(str, _DTYPES))
            raise ValueError(
                f"{owner}: linear.weight must be one of {listed}, but got {weight.dtype}"
            )
        refuse_mixed(owner, {"linear.weight": weight, "linear.bias": linear.bias})
        if weight.is_meta:
            raise ValueError(
                f"{owner}: linear.weight must have values, but got one on the meta device; load "
                "the layer first, or build Int4Linear(in_features, out_features) for a state_dict"
            )
        module = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            group_size,
            weight.device,
            weight.dtype,
        )
        rounded = round_weight(weight, module.group_size)
        module.qweight.copy_(ops.int4_pack(rounded.codes))
        module.scale.copy_(rounded.scale)
        module.zero.copy_(ops.int4_pack(rounded.zero))
        if linear.bias is not None:
            module.bias.copy_(linear.bias)
        module.quantisation_error = rounded.quantisation_error
        module.largest_error = rounded.largest_error
        module.repack()
        return module.eval()

    @classmethod
    def from_torch(cls, module: nn.Linear) -> Int4Linear:
        """`from_linear` with groups of 128; raises as it does."""
        return cls.from_linear(module)

    def to_torch(self) -> nn.Linear:
        """Frozen `nn.Linear` with the dequantised weight, rounded to its dtype.

        Raises:
            ValueError: the module is of a subclass or has hooks.
        """
        refuse_other("Int4Linear.to_torch", "module", "Int4Linear", self, Int4Linear)
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
        return linear.requires_grad_(False).eval()

    @property
    def weight(self) -> Tensor:
        """For those who ask a linear layer's weight for its shape, dtype or device.

        It has no memory and no values, and an op on it raises RuntimeError: use `dequantise()`.
        Under torch.compile and torch.export it is what `dequantise()` gives, computed where the
        values are used.
        """
        if torch.compiler.is_compiling():
            return self.dequantise()
        return NoValues((self.out_features, self.in_features), self.scale)

    @torch.jit.unused
    def dequantise(self) -> Tensor:
        """The weight `(out_features, in_features)` that the codes stand for."""
        # A view makes the codes signed. A cast would stay in the graph of torch.export even if its
        # result were not used.
        codes = ops.int4_unpack(self.qweight, self.in_features).view(torch.int8)
        zeros = ops.int4_unpack(self.zero, self.scale.shape[1]).view(torch.int8)
        groups = codes.unflatten(1, (-1, self.group_size))
        return (self.scale[..., None] * (groups - zeros[..., None])).flatten(1)

    @torch.jit.unused
    def repack(self) -> None:
        """Makes the repacked weight anew; it is empty where the buffers are not on CUDA."""
        if self.qweight.is_cuda:
            made = ops.int4_repack(self.qweight, self.scale, self.zero)
        else:
            # Three separate tensors, because torch.jit.trace refuses a module that holds one tensor
            # under several names.
            made = tuple(self.scale.new_empty(0) for _ in range(3))
        self.packed, self.packed_scale, self.packed_zero = made

    def _apply(self, fn, recurse: bool = True):
        # The codes are integers, so .half() does not change them.
        super()._apply(fn, recurse)
        self.repack()
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise AttributeError(
                "Int4Linear: weight must stay the codes' own, but got another one (as tie_weights "
                "gives a tied head); put an nn.Linear with that weight in this module's place"
            )
        super().__setattr__(name, value)

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        # transformers builds the model on the meta device and reads the names of its parameters
        # from the state_dict. Such a state_dict must not list `weight`, because files lack it.
        if not self.scale.is_meta:
            destination[prefix + "weight"] = self.scale.new_empty(0)

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        wrong = []
        weight = state_dict.pop(prefix + "weight", None)  # older files have no such entry
        if weight is not None and weight.numel() > 0:
            wrong.append(
                f"{prefix}weight must be empty, but got {tuple(weight.shape)}; load it into "
                "nn.Linear and use Int4Linear.from_linear"
            )
        for name, buffer in self.named_buffers():
            given = state_dict.get(prefix + name)
            floating = buffer.is_floating_point()
            if given is None or (
                given.is_floating_point() if floating else given.dtype == torch.int32
            ):
                continue
            expected = "floating point" if floating else "int32"
            wrong.append(
                f"{prefix}{name} must be {expected}, but got {given.dtype}; cast the module with "
                ".to(dtype) and not its state_dict"
            )
        if wrong:
            error_msgs += [f"Int4Linear.load_state_dict: {text}" for text in wrong]
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
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
