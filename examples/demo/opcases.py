"""The calls of the demo's op table: each op, and the plain torch code that it replaces.

The calls are those of a GPT-2, and of ops that no model of the demo runs; those of a Llama are in
llama_cases.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Case:
    """One op on the sizes of the demo's model.

    Attributes:
        op: The op's name.
        shape: The sizes, for the table.
        ours: Calls torchweld.
        eager: The same in plain torch, on any floating dtype.
        inputs: Arguments of both.
    """

    op: str
    shape: str
    ours: Callable[..., Any]
    eager: Callable[..., Any]
    inputs: tuple[Tensor, ...]


def _causal_mask(rows: int, keys: int, device: torch.device) -> Tensor:
    """True where a key is hidden."""
    hidden = torch.ones(rows, keys, dtype=torch.bool, device=device)
    return hidden.triu(1 + keys - rows)


def _fold(weight: Tensor, bias: Tensor, ln_weight: Tensor, ln_bias: Tensor) -> tuple:
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    folded = weight * ln_weight
    return folded, folded.to(wide).sum(1), (weight.to(wide) @ ln_bias.to(wide)) + bias.to(wide)


def normals(device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor]:
    """A function that returns seeded random tensors of a shape, with standard deviation scale."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(device, dtype)

    return normal


def cases(
    batch: int, heads: int, context: int, dim: int, device: torch.device, dtype: torch.dtype
) -> list[Case]:
    """The op table's calls, for a model of these sizes, with seeded random inputs."""
    import torchweld as tw

    normal = normals(device, dtype)
    # fp64 references of the scores must fit, whatever sizes were asked for.
    limit = 2**24 if device.type == "cpu" else 2**27
    few = max(1, min(batch, limit // (heads * context * context)))
    width = dim // heads
    scale = width**-0.5
    hidden = _causal_mask(context, context, device)
    scores = normal(few, heads, context, context, scale=3.0)
    q, k, v = (normal(few, heads, context, width) for _ in range(3))
    x = normal(batch * context, dim)
    wide_weight = normal(4 * dim, dim, scale=dim**-0.5)
    wide_bias = normal(4 * dim, scale=0.1)
    gated_weight = normal(8 * dim, dim, scale=dim**-0.5)
    gated_bias = normal(8 * dim, scale=0.1)
    ln_weight, ln_bias = 1 + normal(dim, scale=0.1), normal(dim, scale=0.1)
    with torch.no_grad():
        folded = _fold(wide_weight, wide_bias, ln_weight, ln_bias)

    def masked(s: Tensor) -> Tensor:
        return torch.softmax((s * scale).masked_fill(hidden, float("-inf")), -1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def folded_eager(x: Tensor, weight: Tensor, sums: Tensor, bias: Tensor) -> Tensor:
        normed = F.layer_norm(x, (dim,))
        return F.gelu(F.linear(normed, weight, bias.to(x.dtype)), approximate="tanh")

    def gated_eager(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        left, right = F.linear(x, w, b).chunk(2, -1)
        return left * F.gelu(right)

    square = f"{few}x{heads}x{context}x{context}"
    matmul = f"{batch * context}x{dim}x{4 * dim}"
    act = {"activation": "gelu_tanh"}

    # In the order in which torch.compile gets its turn while its time lasts.
    return [
        Case(
            "layer_norm_linear",
            f"{matmul} gelu_tanh",
            lambda x, w, b, g, h: tw.layer_norm_linear(x, w, b, g, h, **act),
            lambda x, w, b, g, h: F.gelu(
                F.linear(F.layer_norm(x, (dim,), g, h), w, b), approximate="tanh"
            ),
            (x, wide_weight, wide_bias, ln_weight, ln_bias),
        ),
        Case(
            "attention",
            f"{few}x{heads}x{context}x{width} causal",
            lambda q, k, v: tw.attention(q, k, v, causal=True),
            attend,
            (q, k, v),
        ),
        Case(
            "causal_softmax",
            square,
            lambda s: tw.causal_softmax(s, scale=scale),
            masked,
            (scores,),
        ),
        Case(
            "gated_linear",
            f"{matmul} geglu",
            lambda x, w, b: tw.gated_linear(x, w, b, gate="geglu"),
            gated_eager,
            (x, gated_weight, gated_bias),
        ),
        Case("softmax", square, tw.softmax, lambda s: torch.softmax(s, -1), (scores,)),
        Case(
            "softmax_matmul",
            f"{square}x{width} causal",
            lambda s, v: tw.softmax_matmul(s, v, causal=True, scale=scale),
            lambda s, v: masked(s) @ v,
            (scores, v),
        ),
        Case(
            "rms_norm_linear",
            matmul,
            lambda x, w, b, g: tw.rms_norm_linear(x, w, b, g, eps=1e-6),
            lambda x, w, b, g: F.linear(F.rms_norm(x, (dim,), g, 1e-6), w, b),
            (x, wide_weight, wide_bias, ln_weight),
        ),
        Case(
            "folded_layer_norm_linear",
            f"{matmul} gelu_tanh",
            lambda x, w, s, b: tw.folded_layer_norm_linear(x, w, s, b, **act),
            folded_eager,
            (x, *folded),
        ),
        Case(
            "linear",
            f"{matmul} gelu_tanh",
            lambda x, w, b: tw.linear(x, w, b, **act),
            lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"),
            (x, wide_weight, wide_bias),
        ),
        Case(
            "fold_layer_norm",
            f"{4 * dim}x{dim}",
            tw.fold_layer_norm,
            _fold,
            (wide_weight, wide_bias, ln_weight, ln_bias),
        ),
    ]
