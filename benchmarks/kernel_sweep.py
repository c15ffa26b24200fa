"""The calls with which `unused_kernels.py` sweeps the choices of every op, on meta tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from torchweld._types import Activation, ExpertGate, Gate

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (F32, F16, BF16)
MASKS = (
    {},
    {"causal": True},
    {"leftpad": True},
    {"causal": True, "leftpad": True},
    {"causal": True, "window": 100},
    {"causal": True, "key_start": True},
    {"key_start": True, "key_end": True},
    {"causal": True, "softcap": 30.0},
    {"causal": True, "sink": True},
)


class Call(NamedTuple):
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = {}
    invariant: bool = False  # whether the call runs in the batch-invariant mode


def empty(*shape: int, dtype: torch.dtype = F32, offset: int = 0, pitch: int = 0) -> Tensor:
    """A meta tensor whose first element is `offset` elements behind a 16-byte boundary.

    Args:
        *shape: Its shape.
        dtype: Its dtype.
        offset: Elements before the first one.
        pitch: Elements behind each row, between the rows.
    """
    *lead, n = shape
    return torch.empty(*lead, n + offset + pitch, dtype=dtype, device="meta")[
        ..., offset : offset + n
    ]


def f32(*shape: int) -> Tensor:
    return empty(*shape) if shape else torch.empty((), device="meta")


def each(*values: Any) -> Iterator[tuple[Any, ...]]:
    return itertools.product(*values)


def mask_of(mask: dict[str, Any], batch: int, seqlen: int, heads: int) -> dict[str, Any]:
    """The tensors of a row of MASKS for a call."""
    made = dict(mask)
    for name in {"leftpad", "key_end"} & mask.keys():
        made[name] = torch.empty(batch, dtype=torch.int32, device="meta")
    if "key_start" in mask:
        made["key_start"] = torch.empty(batch, seqlen, dtype=torch.int32, device="meta")
    if "sink" in mask:
        made["sink"] = f32(heads)
    return made


# Row lengths on both sides of those at which the kernels over rows change their configuration.
LENGTHS = (1, 7, 8, 100, 128, 250, 256, 500, 512, 768, 1000, 1024, 1500, 2048, 3000, 4096, 5000)
LENGTHS += (8192, 12000, 16384, 20000, 32768, 50000, 65536, 100000, 131072, 200001, 262144)
LENGTHS += (500000, 10**6)


def softmaxes() -> Iterator[Call]:
    for n, dtype, offset in each(LENGTHS, DTYPES, (0, 1)):
        x, y = empty(64, n, dtype=dtype, offset=offset), empty(64, n, dtype=dtype)
        yield Call("softmax", (x,))
        yield Call("softmax_backward", (x, y))
        masks = [mask for mask in MASKS if mask == {} or mask.get("causal")]
        for mask, scale in each(masks, (0.5, 0.0)):
            kwargs = {k: v for k, v in mask_of(mask, 2, 4, 2).items() if k != "causal"}
            scores = empty(2, 2, 4, n, dtype=dtype, offset=offset)
            yield Call("causal_softmax", (scores,), {**kwargs, "scale": scale})
            y = empty(2, 2, 4, n, dtype=dtype)
            late = "softcap" in mask or "sink" in mask
            kwargs |= {"scores": scores} if late else {}
            yield Call("causal_softmax_backward", (y, y), {**kwargs, "scale": scale})


def attentions() -> Iterator[Call]:
    dims = [(16, 16), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (64, 128), (128, 64)]
    dims += [(80, 36), (512, 512)]
    for (d, dv), (sq, sk), group, dtype, mask in each(
        dims, ((1, 512), (512, 512), (16, 4096), (2048, 2048), (5, 0)), (1, 4), DTYPES, MASKS
    ):
        heads, kwargs = 4 * group, mask_of(mask, 2, sq, 4 * group)
        q, k = empty(2, heads, sq, d, dtype=dtype), empty(2, 4, sk, d, dtype=dtype)
        v, out = empty(2, 4, sk, dv, dtype=dtype), empty(2, heads, sq, dv, dtype=dtype)
        yield Call("attention_forward", (q, k, v), kwargs)
        yield Call("attention_forward", (q, k, v), kwargs, invariant=True)
        lse = f32(2, heads, sq)
        yield Call("attention_backward", (out, q, k, v, out, lse), kwargs)
        yield Call("attention_backward", (out, q, k, v, out, lse), {**kwargs, "dlse": lse})
        if group == 1:
            scores = empty(2, heads, sq, sk, dtype=dtype)
            yield Call("softmax_matmul_forward", (scores, v), kwargs)
            yield Call("softmax_matmul_backward", (out, scores, v, out, lse), kwargs)


def layouts(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A contiguous tensor, and one whose last two dimensions are stored in the other order."""
    *lead, rows, columns = shape
    return empty(*shape, dtype=dtype), empty(*lead, columns, rows, dtype=dtype).transpose(-1, -2)


ACTIVATIONS, GATES, EXPERT_GATES = map(get_args, (Activation, Gate, ExpertGate))
# Rows, columns and K of products.
PRODUCTS = ((1, 768, 768), (5, 64, 2048), (16, 4096, 4096), (100, 33, 65), (4096, 4096, 4096))
PRODUCTS += ((64, 7, 8),)


def products() -> Iterator[Call]:
    for (m, n, k), dtype in each(PRODUCTS, DTYPES):
        bias = empty(n, dtype=dtype)
        for x, weight in each(layouts(m, k, dtype=dtype), layouts(n, k, dtype=dtype)):
            yield Call("linear", (x, weight))
            yield Call("linear", (x, weight), invariant=True)
            for act in ACTIVATIONS:
                yield Call("linear_forward", (x, weight, bias), {"activation": act})
        for a, b in each(layouts(3, m, k, dtype=dtype), layouts(3, k, n, dtype=dtype)):
            yield Call("bmm", (a, b))
            dy = empty(3, m, n, dtype=dtype)
            yield Call("bmm_backward", (dy, a, b), {"output_mask": [True, True]})
        x, weight, dy = empty(m, k, dtype=dtype), empty(n, k, dtype=dtype), empty(m, n, dtype=dtype)
        for act, offset in each(ACTIVATIONS, (0, 1)):
            preact = None if act == "none" else empty(m, n, dtype=dtype, offset=offset)
            options = {"activation": act, "output_mask": [True] * 3}
            yield Call("linear_backward", (dy, x, weight, preact), options)


def norms() -> Iterator[Call]:
    for n, rows, dtype in each((384, 640, *LENGTHS), (1, 5000), DTYPES):
        for offset, vectors in each((0, 1), (None, dtype, F32)):
            x = empty(rows, n, dtype=dtype, offset=offset)
            dy, stat = empty(rows, n, dtype=dtype), f32(rows)
            w = None if vectors is None else empty(n, dtype=vectors)
            yield Call("rms_norm_forward", (x, w))
            yield Call("layer_norm_forward", (x, w, w))
            yield Call("add_rms_norm_forward", (x, dy, w))
            yield Call("add_layer_norm_forward", (x, dy, w, w))
            for dsum, mask in each((None, dy), (True, False)):
                three = {"output_mask": [True, mask, mask]}
                two = {"output_mask": [True, mask]}
                yield Call("add_rms_norm_backward", (dy, x, w, stat, dsum), two)
                yield Call("add_layer_norm_backward", (dy, x, w, stat, stat, dsum), three)
            yield Call("rms_norm_backward", (dy, x, w, stat), {"output_mask": [True, True]})
            yield Call("layer_norm_backward", (dy, x, w, stat, stat), {"output_mask": [True] * 3})
    for (m, n, k), dtype, act in each(PRODUCTS, DTYPES, ACTIVATIONS):
        x, weight, bias = empty(m, k, dtype=dtype), empty(n, k, dtype=dtype), empty(n, dtype=dtype)
        scale, dy, stat = empty(k, dtype=dtype), empty(m, n, dtype=dtype), f32(m)
        preact, options = None if act == "none" else dy, {"activation": act}
        yield Call("layer_norm_linear_forward", (x, weight, bias, scale, scale), options)
        yield Call("rms_norm_linear_forward", (x, weight, bias, scale), options)
        five, four = {"output_mask": [True] * 5}, {"output_mask": [True] * 4}
        args = (dy, x, weight, scale)
        yield Call("layer_norm_linear_backward", (*args, scale, stat, stat, preact), options | five)
        yield Call("rms_norm_linear_backward", (*args, stat, preact), options | four)
        yield Call("fold_layer_norm", (weight, bias, scale, scale))
        fold = (weight, f32(n), f32(n))
        yield Call("folded_layer_norm_linear", (x, *fold), options)
        yield Call("folded_layer_norm_linear_backward", (dy, x, *fold), options)


def gates() -> Iterator[Call]:
    for (m, n, k), dtype, gate, bias in each(PRODUCTS, DTYPES, GATES, (True, False)):
        x, dy = empty(m, k, dtype=dtype), empty(m, n, dtype=dtype)
        weight, z = empty(2 * n, k, dtype=dtype), empty(m, 2 * n, dtype=dtype)
        b = empty(2 * n, dtype=dtype) if bias else None
        for interleaved, offset in each((True, False), (0, 1)):
            options = {"gate": gate, "interleaved": interleaved}
            for each_weight in layouts(2 * n, k, dtype=dtype):
                yield Call("gated_linear", (x, each_weight, b), options)
                yield Call("gated_linear", (x, each_weight, b), options, invariant=True)
            z = empty(m, 2 * n, dtype=dtype, offset=offset)
            yield Call("gated_linear_forward", (x, weight, b), options)
            options["output_mask"] = [True, True, bias]
            yield Call("gated_linear_backward", (dy, x, weight, z), options)
        left, h = empty(n, k, dtype=dtype), empty(n, dtype=dtype) if bias else None
        yield Call("gated_linear_pair_forward", (x, left, left, h, h), {"gate": gate})
        options = {"gate": gate, "output_mask": [True, True, True, bias, bias]}
        yield Call("gated_linear_pair_backward", (dy, x, left, left, z), options)


def mixtures() -> Iterator[Call]:
    for (h, n, experts, k), tokens, dtype in each(
        ((64, 48, 8, 2), (1024, 512, 16, 4), (30, 10, 3, 1)), (1, 40, 3000), DTYPES
    ):
        x, weight = empty(tokens, h, dtype=dtype), empty(tokens, k, dtype=dtype)
        index = empty(tokens, k, dtype=torch.int64)
        stacked, ends = empty(experts, n, h, dtype=dtype), empty(experts, dtype=torch.int32)
        dy, preact = (empty(tokens, n, dtype=dtype) for _ in range(2))
        for activation, mask in each(("none", "gelu"), (True, False)):
            options = {"activation": activation}
            yield Call("grouped_linear_forward", (x, stacked, ends), options)
            args = (dy, x, stacked, ends, None if activation == "none" else preact)
            yield Call(
                "grouped_linear_backward", args, options | {"output_mask": [mask, True, mask]}
            )
        for gate, transposed, biased in each(EXPERT_GATES, (False, True), (False, True)):
            width = 2 * n if "glu" in gate else n
            shapes = ((h, width), (n, h)) if transposed else ((width, h), (h, n))
            gate_up, down = (empty(experts, *shape, dtype=dtype) for shape in shapes)
            vectors = [empty(experts, size, dtype=dtype) if biased else None for size in (width, h)]
            options = {"gate": gate, "transposed": transposed}
            yield Call("experts", (x, gate_up, down, index, weight, *vectors), options)
            args = (x, x, gate_up, down, index, weight, empty(tokens * k, width, dtype=dtype))
            options = options | {"output_mask": [True, True, True, True, biased, biased]}
            yield Call("experts_backward", (*args, vectors[1]), options)


def int4s() -> Iterator[Call]:
    sizes = ((4096, 4096, 32), (33, 72, 3), (512, 1024, 16), (64, 8192, 1))
    for (n, k, groups), m, dtype in each(sizes, (1, 3, 8, 16, 40, 64, 100, 256, 4096), DTYPES):
        x, dy = empty(m, k, dtype=dtype), empty(m, n, dtype=dtype)
        words = torch.empty(n, k // 8, dtype=torch.int32, device="meta")
        scale = empty(n, groups, dtype=dtype)
        zero = torch.empty(n, -(-groups // 8), dtype=torch.int32, device="meta")
        yield Call("int4_linear", (x, words, scale, zero, empty(n, dtype=dtype)))
        yield Call("int4_linear_backward", (dy, words, scale, zero))
        packed = torch.ops.torchweld.int4_repack(words, scale, zero)
        yield Call("int4_repack", (words, scale, zero))
        yield Call("int4_linear_repacked", (x, *packed), {"out_features": n})
        yield Call("int4_linear_repacked_backward", (dy, *packed), {"in_features": k})
    for columns in (5, 64, 4096):
        yield Call("int4_pack", (torch.empty(64, columns, dtype=torch.uint8, device="meta"),))
        words = torch.empty(64, -(-columns // 8), dtype=torch.int32, device="meta")
        yield Call("int4_unpack", (words, columns))


def losses() -> Iterator[Call]:
    options = ({}, {"softcap": 30.0}, {"label_smoothing": 0.1}, {"temperature": 0.7, "z_loss": 0.1})
    for n, dtype, option, offset in each(LENGTHS, DTYPES, options, (0, 1)):
        logits = empty(64, n, dtype=dtype, offset=offset)
        target = torch.empty(64, dtype=torch.int64, device="meta")
        yield Call("cross_entropy_forward", (logits, target), option)
        yield Call("cross_entropy_backward", (f32(), logits, target, f32(64)), option)
        yield Call("cross_entropy_gradients_forward", (logits, target), option)
        one_row = empty(n, dtype=dtype, offset=offset)
        yield Call("cross_entropy_gradients_backward", (f32(), one_row))
    name = "linear_cross_entropy"
    for (m, n, k), dtype, option, bias in each(PRODUCTS, DTYPES, options, (True, False)):
        x, weight, b = empty(m, k, dtype=dtype), empty(n, k, dtype=dtype), empty(n, dtype=dtype)
        target = torch.empty(m, dtype=torch.int64, device="meta")
        row, b, mask = f32(m), b if bias else None, {"output_mask": [True, True, bias]}
        yield Call(name + "_forward", (x, weight, target, b), option)
        yield Call(name + "_backward", (f32(), x, weight, target, row, b), option | mask)
        yield Call(name + "_gradients_forward", (x, weight, target, b), option | mask)
        yield Call(name + "_gradients_backward", (f32(), x, weight, b if bias else x[:0, 0]))
        if "label_smoothing" not in option:
            yield Call(name + "_exponentials_forward", (x, weight, target, b), option)
        y = empty(m, -(-n // 64) * 64, dtype=dtype)
        args = (f32(), x, weight, target, y, row)
        yield Call(name + "_exponentials_backward", args, mask)
        if option.keys() <= {"softcap", "temperature"}:
            for entropy in (True, False):
                args = (x, weight, target, b)
                yield Call("linear_token_logprobs_forward", args, option | {"entropy": entropy})
                args = (row, x, weight, target, row, b, *([row, row] if entropy else []))
                yield Call("linear_token_logprobs_backward", args, option | mask)


def others() -> Iterator[Call]:
    for dtype, dim, seqlen, wide, interleaved in each(
        DTYPES, (8, 64, 128, 40), (1, 100), (True, False), (True, False)
    ):
        q = empty(2, 4, seqlen, dim, dtype=dtype, offset=dim == 40)
        table = empty(seqlen, dim // 2 * 2, dtype=F32 if wide else dtype)
        yield Call("rotary", (q, q[:, :2], table, table), {"interleaved": interleaved})
        options = {"interleaved": interleaved, "output_mask": [True, True]}
        yield Call("rotary_backward", (q, q[:, :2], table, table), options)
    for dtype, channels, width, documents in each(DTYPES, (1, 40), (2, 3, 4), (False, True)):
        x = empty(2, 70, channels, dtype=dtype).transpose(1, 2)
        weight, vector = empty(channels, width, dtype=dtype), empty(channels, dtype=dtype)
        starts = empty(2, 70, dtype=torch.int32) if documents else None
        state = None if documents else empty(2, channels, width - 1, dtype=dtype)
        args, options = (x, weight, vector, state), {"activation": "silu", "key_start": starts}
        yield Call("causal_conv1d", args, options)
        yield Call("causal_conv1d_backward", (x, *args), options | {"output_mask": [True] * 4})
    for dtype, n, rows, offset in each(DTYPES, LENGTHS, (1, 64, 5000), (0, 1)):
        x = empty(rows, n, dtype=dtype, offset=offset)
        yield Call("gated_activation", (x, x), {"gate": "swiglu"})
        options = {"gate": "swiglu", "output_mask": [True, True]}
        yield Call("gated_activation_backward", (x, x, x), options)
        for first, wide in each((False, True), (False, True)):
            weight, options = empty(n, dtype=F32 if wide else dtype), {"gate_first": first}
            yield Call("rms_norm_gated_forward", (x, x, weight), options)
            masked = options | {"output_mask": [True] * 3}
            yield Call("rms_norm_gated_backward", (x, x, x, weight, empty(rows, dtype=F32)), masked)
        column, row, dz = (
            empty(rows, dtype=dtype),
            empty(n, dtype=dtype),
            empty(rows, n, dtype=dtype),
        )
        for value in (x, empty(rows, n, dtype=dtype)):
            yield Call("row_sum", (value,))
            yield Call("add_scalar", (value, 1.5))
            yield Call("mul_relu", (value, column))
            yield Call("mul_relu_backward", (dz, value, column))
            yield Call("outer_add_backward", (value,))
            yield Call("outer_mul_relu_backward", (value, row, column))
        yield Call("outer_add", (row, column))
        yield Call("outer_mul_relu", (row, column))
    for dtype, n in each(DTYPES, (1, 200, 1000, 5000, 100000)):
        q = empty(n, dtype=dtype)
        yield Call("scalar_attention_forward", (q, q, q))
        options = {"output_mask": [True] * 3}
        yield Call("scalar_attention_backward", (q, q, q, q, f32(n), f32(n)), options)
    sizes, kernels = (
        ((4, 4), (8, 8), (16, 16), (28, 28), (64, 64), (100, 33), (5, 8), (512, 512)),
        range(1, 9),
    )
    for dtype, (h, w), size in each(DTYPES, sizes, (*kernels, 15, 16, 31, 40)):
        for kernel in ((size, size), (size, 2)):
            x, weight = empty(64, h, w, dtype=dtype), empty(*kernel, dtype=dtype)
            yield Call("conv2d", (x, weight))
            yield Call("conv2d_backward", (x, x, weight), {"output_mask": [True, True]})


def calls() -> Iterator[Call]:
    for part in (softmaxes, attentions, products, norms, gates, mixtures, int4s, losses, others):
        yield from part()
