"""The 4-bit layers of AutoAWQ, GPTQ and compressed-tensors as codes, scales and zeros.

Each function takes a layer's tensors under the names that they have in a checkpoint, and returns
`codes` uint8 `(N, K)`, `scale` `(N, groups)` and `zero` uint8 `(N, groups)` with the weight
`scale * (code - zero)`. The conversions are exact. The number of groups alone does not give their
size: 96 columns in 3 groups may be groups of 32 or of 40.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchweld._library import ops

Codes = tuple[Tensor, Tensor, Tensor]

# Nibble i of an AWQ word is column _AWQ_ORDER[i] of the word's eight.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq_codes(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, group_size: int | None = None
) -> Codes:
    """Converts the tensors of `Int4Linear.from_awq`.

    Source: casper-hansen/AutoAWQ, awq/modules/linear/gemm.py.
    """
    owner = "Int4Linear.from_awq"
    _check_words(owner, qweight=qweight, qzeros=qzeros)
    _check_dims(owner, scales=scales)
    (k, words), groups = qweight.shape, scales.shape[0]
    _check_shapes(
        owner, {"qzeros": (qzeros, (groups, words)), "scales": (scales, (groups, 8 * words))}
    )
    _check_groups(owner, k, groups, group_size)
    place = torch.tensor(_AWQ_ORDER, device=qweight.device).argsort()
    codes, zero = (
        ops.int4_unpack(tensor, 8 * words).unflatten(1, (-1, 8))[..., place].flatten(1).t()
        for tensor in (qweight, qzeros)
    )
    return codes, scales.t(), zero


def gptq_codes(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None = None,
    checkpoint_format: str = "gptq",
    group_size: int | None = None,
) -> Codes:
    """Converts the tensors of `Int4Linear.from_gptq`.

    Source: AutoGPTQ/AutoGPTQ, auto_gptq/nn_modules/qlinear/qlinear_cuda.py, and "gptq_v2" of
    ModelCloud/GPTQModel.
    """
    owner = "Int4Linear.from_gptq"
    if checkpoint_format not in ("gptq", "gptq_v2"):
        raise ValueError(
            f'{owner}: checkpoint_format must be "gptq" or "gptq_v2", but got {checkpoint_format!r}'
        )
    _check_words(owner, qweight=qweight, qzeros=qzeros)
    _check_dims(owner, scales=scales)
    (words, n), groups = qweight.shape, scales.shape[0]
    k = 8 * words
    _check_shapes(owner, {"qzeros": (qzeros, (groups, n // 8)), "scales": (scales, (groups, n))})
    _check_groups(owner, k, groups, group_size, g_idx=g_idx)
    zero = ops.int4_unpack(qzeros, n).t()
    if checkpoint_format == "gptq":
        if zero.numel() and zero.max() > 14:
            raise ValueError(
                f"{owner}: qzeros must be at most 14, since this format adds 1 and a zero has 4 "
                "bits, but got 15; save with sym=True or as gptq_v2"
            )
        zero = zero + 1
    return ops.int4_unpack(qweight.t(), k), scales.t(), zero


def compressed_codes(
    weight_packed: Tensor,
    weight_scale: Tensor,
    weight_shape: Tensor,
    weight_zero_point: Tensor | None = None,
    weight_g_idx: Tensor | None = None,
    group_size: int | None = None,
) -> Codes:
    """Converts the tensors of `Int4Linear.from_compressed_tensors`.

    Codes and zeros are stored with an offset of 8, which cancels in their difference.

    Source: vllm-project/compressed-tensors, compressed_tensors/compressors/pack_quantized.
    """
    owner = "Int4Linear.from_compressed_tensors"
    _check_words(owner, weight_packed=weight_packed)
    _check_dims(owner, weight_scale=weight_scale)
    n, k = (int(size) for size in weight_shape)
    groups = weight_scale.shape[1]
    _check_shapes(
        owner,
        {
            "weight_packed": (weight_packed, (n, (k + 7) // 8)),
            "weight_scale": (weight_scale, (n, groups)),
        },
    )
    _check_groups(owner, k, groups, group_size, weight_g_idx=weight_g_idx)
    if weight_zero_point is None:
        zero = torch.full((n, groups), 8, dtype=torch.uint8, device=weight_packed.device)
    else:
        _check_words(owner, weight_zero_point=weight_zero_point)
        shape = ((n + 7) // 8, groups)
        _check_shapes(owner, {"weight_zero_point": (weight_zero_point, shape)})
        zero = ops.int4_unpack(weight_zero_point.t(), n).t()
    return ops.int4_unpack(weight_packed, k), weight_scale, zero


def _check_words(owner: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int32 or tensor.dim() != 2:
            got = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise ValueError(f"{owner}: {name} must be int32 with 2 dims, but got {got}")


def _check_shapes(owner: str, tensors: dict[str, tuple[Tensor, tuple[int, ...]]]) -> None:
    for name, (tensor, shape) in tensors.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{owner}: {name} must be {shape}, but got {tuple(tensor.shape)}")


def _check_dims(owner: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dim() != 2:
            raise ValueError(
                f"{owner}: {name} must have 2 dims, those of groups, but got {tuple(tensor.shape)}"
            )


def _check_groups(
    owner: str, k: int, groups: int, group_size: int | None, **order: Tensor | None
) -> None:
    """Raises ValueError unless equal groups of adjacent columns divide the columns.

    Args:
        order: each column's group, by the name of the argument; None if it is not given.
    """
    name, g_idx = next(iter(order.items()), ("", None))
    if g_idx is not None and (g_idx.shape != (k,) or bool((g_idx.diff() < 0).any())):
        raise ValueError(
            f"{owner}: {name} must put columns into groups in their order, but got another one "
            "(act-order, desc_act=True); quantise with desc_act=False"
        )
    if group_size is not None:
        size = k if group_size == -1 else min(group_size, k)
    elif g_idx is not None:
        size = int((g_idx == 0).sum())
    elif groups == 1:
        size = k
    else:
        raise ValueError(
            f"{owner}: group_size must be given, since {groups} groups of {k} columns may be of "
            "several sizes, but got None; pass the one of the checkpoint's quantization_config"
        )
    if size < 1 or -(-k // size) != groups:
        raise ValueError(
            f"{owner}: group_size must make {groups} groups of {k} columns, as the scales have, "
            f"but got {group_size or size}"
        )
    if k % size:
        raise ValueError(
            f"{owner}: group_size must divide the {k} columns, but got {size}; quantise with a "
            "size that divides them"
        )
    if g_idx is not None and not torch.equal(
        g_idx.long(), torch.arange(k, device=g_idx.device) // size
    ):
        raise ValueError(f"{owner}: {name} must have groups of {size} columns, but got others")
