"""`torch.nn.Linear` with a weight of 4 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchweld._library import ops, require
from torchweld.ops.int4_checks import check_float, check_method, group_of, state_errors
from torchweld.ops.int4_formats import awq_codes, compressed_codes, gptq_codes
from torchweld.ops.int4_weight import NoValues, is_repacked_on, portable_from_repacked, round_weight
from torchweld.ops.stock import refuse_mixed, refuse_other

_WEIGHT = ("qweight", "scale", "zero")


class Int4Linear(nn.Module):
    """Frozen `torch.nn.Linear` with 4-bit weights, for inference.

    Made by `Int4Linear.from_linear(linear)`. The buffers `qweight`, `scale` and `zero` have the
    portable layout of `int4_linear`, but on CUDA only that of `int4_repack`: the module repacks
    them when it is moved to CUDA and when it loads a state_dict. `portable()` returns the portable
    layout on every device. Call `repack()` after assigning a buffer.

    A state_dict has the portable layout, so that it does not depend on the device. On CUDA its
    tensors are copies.

    The state_dict also has an empty `weight`. Its size makes `from_pretrained` and
    `load_state_dict` of a float layer fail, with `strict=False` too; without it, that layer would
    keep its initial weight. `torchweld.quantize_` makes models that `from_pretrained` loads. The
    state_dict of a `torch.jit.load` module has its device's layout and no `weight`; an Int4Linear
    can load it.

    Args:
        in_features: K, a multiple of 8.
        out_features: N.
        bias: whether there is a bias.
        group_size: columns that share a scale and a zero: a multiple of 8 that divides K, or None
            for K.
        device: the device of all buffers.
        dtype: the dtype of scales and bias.

    Raises:
        ValueError: group_size is no multiple of 8 that divides in_features.

    Attributes:
        quantisation_error: root of the mean square of the rounding errors in `from_linear`,
            divided by that of the weight; 0 if nothing was quantised.
        largest_error: the largest rounding error; with method "rtn" at most half of a group's scale
            (the whole scale if a level would leave the range of the dtype).
        replaces_conv1d: whether `dequantize_` turns the layer into transformers' Conv1D.

    Example::

        linear = nn.Linear(256, 64)
        small = torchweld.nn.Int4Linear.from_linear(linear, group_size=64, method="mse")
        y = small(torch.randn(4, 256))
        print(small.quantisation_error)  # relative to the weight
    """

    replaces_conv1d = False  # without an annotation, which TorchScript can't read here
    __constants__ = ["in_features", "out_features", "group_size"]
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
        self.group_size = group_of(in_features, group_size)
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
        self.repack()

    @classmethod
    @torch.no_grad()
    def from_linear(
        cls, linear: nn.Linear, group_size: int | None = 128, method: str = "rtn"
    ) -> Int4Linear:
        """Rounds the weight to the nearest of 16 levels in each group of columns.

        The levels include 0. Scales are kept in the weight's dtype, and the codes are chosen for
        the scales as kept. No level that is used is beyond the dtype's range.

        Args:
            linear: a layer whose in_features is a multiple of 8; it is not changed.
            group_size: columns that share a scale and a zero, None for a whole row.
            method: how a group's scale and zero are chosen. "rtn": the levels span the group's
                extremes. "mse": the clip ratio and zero with the smallest squared error, 0.89 of
                that of "rtn" for normal weights in groups of 128, and 0.72 in rows of 1,024.
                "hqq": half-quadratic iterations, 0.92 and 0.80. No method needs data. "mse" and
                "hqq" take about 10 times as long as "rtn" (docs/quantised.md has the times).

        Returns:
            A module in eval mode on the layer's device, with `quantisation_error` set.

        Raises:
            ValueError: `linear` is no `nn.Linear`, is of a subclass, or has hooks or a
                parametrisation; it has another dtype than the ops, mixed ones, or no values (on
                the meta device); group_size is no multiple of 8 that divides in_features; the
                method is unknown.
        """
        owner = "Int4Linear.from_linear"
        check_method(owner, method)
        refuse_other(owner, "linear", "nn.Linear", linear, nn.Linear)
        check_float(owner, linear)
        weight = linear.weight
        if weight.is_meta:
            raise ValueError(
                f"{owner}: linear.weight must have values, but got one on the meta device; load "
                "the layer first, or build Int4Linear(in_features, out_features) for a state_dict"
            )
        group = group_of(linear.in_features, group_size)
        rounded = round_weight(weight, group, method)
        module = cls.from_codes(rounded.codes, rounded.scale, rounded.zero, linear.bias)
        module.quantisation_error = rounded.quantisation_error
        module.largest_error = rounded.largest_error
        return module

    @classmethod
    @torch.no_grad()
    def from_codes(
        cls, codes: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None = None
    ) -> Int4Linear:
        """Makes a module with the weight `scale * (code - zero)`, as other libraries store it.

        Args:
            codes: uint8 `(N, K)`, values 0 to 15.
            scale: `(N, K / group)`.
            zero: uint8 `(N, K / group)`, values 0 to 15.
            bias: `(N,)` in the dtype of `scale`.

        Returns:
            A module in eval mode on the device of the codes, with copies of all four tensors.

        Raises:
            ValueError: shapes or dtypes that do not fit, or a code or zero above 15.
        """
        owner = "Int4Linear.from_codes"
        for name, tensor in (("codes", codes), ("zero", zero)):
            if tensor.dtype != torch.uint8 or tensor.dim() != 2:
                got = f"{tensor.dtype} {tuple(tensor.shape)}"
                raise ValueError(f"{owner}: {name} must be uint8 with 2 dims, but got {got}")
            if tensor.numel() and not tensor.is_meta and tensor.max() > 15:
                raise ValueError(
                    f"{owner}: {name} must have values of 0 to 15, but got {int(tensor.max())}"
                )
        (n, k), groups = codes.shape, zero.shape[1]
        if scale.shape != zero.shape or zero.shape[0] != n or not groups or k % groups:
            shapes = f"{tuple(codes.shape)}, {tuple(scale.shape)} and {tuple(zero.shape)}"
            raise ValueError(
                f"{owner}: codes, scale and zero must be (N, K), (N, groups) and (N, groups), but "
                f"got {shapes}"
            )
        if bias is not None and bias.shape != (n,):
            raise ValueError(f"{owner}: bias must be ({n},), but got {tuple(bias.shape)}")
        refuse_mixed(owner, {"scale": scale, "bias": bias})
        module = cls(k, n, bias is not None, k // groups, "meta", scale.dtype)
        module.qweight, module.zero = ops.int4_pack(codes), ops.int4_pack(zero)
        module.scale = scale.detach().clone(memory_format=torch.contiguous_format)
        if bias is not None:
            module.bias = bias.detach().clone()
        module.repack()
        return module.eval()

    @classmethod
    def from_awq(
        cls,
        qweight: Tensor,
        qzeros: Tensor,
        scales: Tensor,
        bias: Tensor | None = None,
        *,
        group_size: int | None = None,
    ) -> Int4Linear:
        """Converts a layer of an AutoAWQ checkpoint, version "gemm", exactly.

        Args:
            qweight: int32 `(K, N / 8)`.
            qzeros: int32 `(K / group, N / 8)`.
            scales: `(K / group, N)`.
            bias: `(N,)` in the dtype of `scales`.
            group_size: that of the checkpoint; -1 is a whole row. None is allowed for one group.

        Raises:
            ValueError: shapes or dtypes that do not fit; no group_size for several groups; one
                that does not fit them or does not divide K.
        """
        return cls.from_codes(*awq_codes(qweight, qzeros, scales, group_size), bias)

    @classmethod
    def from_gptq(
        cls,
        qweight: Tensor,
        qzeros: Tensor,
        scales: Tensor,
        g_idx: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        checkpoint_format: str = "gptq",
        group_size: int | None = None,
    ) -> Int4Linear:
        """Converts a layer of a GPTQ checkpoint with 4 bits, exactly.

        Args:
            qweight: int32 `(K / 8, N)`.
            qzeros: int32 `(K / group, N / 8)`: the zeros minus 1; in "gptq_v2" the zeros.
            scales: `(K / group, N)`.
            g_idx: `(K,)`, the group of each column.
            bias: `(N,)` in the dtype of `scales`.
            checkpoint_format: "gptq" or "gptq_v2".
            group_size: that of the checkpoint; -1 is a whole row. None is allowed with `g_idx`, and
                for one group.

        Raises:
            ValueError: another checkpoint_format; shapes or dtypes that do not fit; columns in
                another order than their groups (act-order); a zero of 16, which needs a fifth bit;
                no group_size for several groups without `g_idx`, or one that does not fit them or
                does not divide K.
        """
        found = gptq_codes(qweight, qzeros, scales, g_idx, checkpoint_format, group_size)
        return cls.from_codes(*found, bias)

    @classmethod
    def from_compressed_tensors(
        cls,
        weight_packed: Tensor,
        weight_scale: Tensor,
        weight_shape: Tensor,
        weight_zero_point: Tensor | None = None,
        weight_g_idx: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        group_size: int | None = None,
    ) -> Int4Linear:
        """Converts a layer of a 4-bit compressed-tensors checkpoint, "pack-quantized", exactly.

        Args:
            weight_packed: int32 `(N, K / 8)`.
            weight_scale: `(N, K / group)`.
            weight_shape: N and K, `(2,)`.
            weight_zero_point: int32 `(ceil(N / 8), K / group)`; None for symmetric codes, zero 8.
            weight_g_idx: `(K,)`, the group of each column.
            bias: `(N,)` in the dtype of `weight_scale`.
            group_size: that of the checkpoint; -1 is a whole row. None is allowed with
                `weight_g_idx`, and for one group.

        Raises:
            ValueError: shapes or dtypes that do not fit; columns in another order than their
                groups (act-order); no group_size for several groups without `weight_g_idx`; one
                that does not fit them or does not divide K.
        """
        found = compressed_codes(
            weight_packed, weight_scale, weight_shape, weight_zero_point, weight_g_idx, group_size
        )
        return cls.from_codes(*found, bias)

    @classmethod
    def from_torch(cls, module: nn.Linear) -> Int4Linear:
        """Calls `from_linear` with groups of 128; raises the same."""
        return cls.from_linear(module)

    def to_torch(self) -> nn.Linear:
        """Returns a frozen `nn.Linear` with the dequantised weight in the dtype of the scales.

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
        """Returns a tensor for code that asks a linear layer's weight for shape, dtype or device.

        The tensor has no memory, and an op on it raises RuntimeError: use `dequantise()`. Under
        torch.compile and torch.export it is the result of `dequantise()`, computed only if the
        values are used.
        """
        if torch.compiler.is_compiling():
            return self.dequantise()
        return NoValues((self.out_features, self.in_features), self.scale)

    def stored(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns `qweight`, `scale` and `zero` in the device's layout."""
        return self.qweight, self.scale, self.zero

    @torch.jit.unused
    def portable(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns `qweight`, `scale` and `zero` in `int4_linear`'s layout; on CUDA, copies."""
        stored = self.stored()
        if stored[0].dim() == 2:
            return stored
        return portable_from_repacked(*stored, self.out_features, self.in_features)

    @torch.jit.unused
    def dequantise(self) -> Tensor:
        """Returns the weight `(out_features, in_features)` of the codes."""
        qweight, scale, zero = self.portable()
        # Signed by a view: torch.export keeps a cast, and all before it, even where it is not used.
        codes = ops.int4_unpack(qweight, self.in_features).view(torch.int8)
        zeros = ops.int4_unpack(zero, scale.shape[1]).view(torch.int8)
        groups = codes.unflatten(1, (-1, self.group_size))
        return (scale[..., None] * (groups - zeros[..., None])).flatten(1)

    dequantize = dequantise  # torch's spelling

    @torch.jit.unused
    def repack(self) -> None:
        """Converts the weight to the layout of its device: repacked on CUDA, else portable."""
        given, repacked = self.stored(), self.qweight.dim() == 3
        if repacked != is_repacked_on(self.qweight.device):
            made = self.portable() if repacked else ops.int4_repack(*given)
            for new, old in zip(made, given, strict=True):
                vars(new).update(vars(old))  # transformers marks the tensors that it loads
            self.qweight, self.scale, self.zero = made

    # NOTE: torch.jit.script gives its module the unused methods, which then have another class than
    # zero-argument super() wants.
    @torch.jit.unused
    def _apply(self, fn, recurse=True):
        # The codes are integers, so .half() leaves them alone.
        nn.Module._apply(self, fn, recurse)
        self.repack()
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise AttributeError(
                "Int4Linear: weight must stay the codes' own, but got another one (as tie_weights "
                "gives a tied head); put an nn.Linear with that weight in this module's place"
            )
        super().__setattr__(name, value)

    @torch.jit.unused
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)
        for name, tensor in zip(_WEIGHT, self.portable(), strict=True):
            destination[prefix + name] = tensor
        # transformers asks a model on the meta device which keys to load; `weight` is none of them.
        if not self.scale.is_meta:
            destination[prefix + "weight"] = self.scale.new_empty(0)

    @torch.jit.unused
    def _load_from_state_dict(self, state_dict, prefix, *args):
        weight = state_dict.pop(prefix + "weight", None)  # not there in older files
        wrong = state_errors(prefix, weight, state_dict, self.named_buffers())
        if wrong:
            args[-1].extend(wrong)
            return
        given = [state_dict.get(prefix + name) for name in _WEIGHT]
        if all(tensor is not None and tensor.dim() == 3 for tensor in given):
            made = portable_from_repacked(*given, self.out_features, self.in_features)
            state_dict.update(zip((prefix + name for name in _WEIGHT), made, strict=True))
        self.qweight, self.scale, self.zero = self.portable()
        nn.Module._load_from_state_dict(self, state_dict, prefix, *args)
        self.repack()

    def forward(self, x: Tensor) -> Tensor:
        """Maps `(..., in_features)` to `(..., out_features)`."""
        return self.compute(x, self.bias)

    def compute(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Computes forward with another bias, or none."""
        qweight, scale, zero = self.stored()
        if qweight.dim() == 3:
            return torch.ops.torchweld.int4_linear_repacked(
                x, qweight, scale, zero, bias, out_features=self.out_features
            )
        return torch.ops.torchweld.int4_linear(x, qweight, scale, zero, bias)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, group_size={self.group_size}, "
            f"quantisation_error={self.quantisation_error:.2g}"
        )
