"""The op table's calls for a Llama; those for a GPT-2 are in opcases.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from demo.model import gated_width, key_heads
from demo.opcases import Case, normals
from demo.options import Options

_EPS = 1e-6


def cases(options: Options, heads: int, dim: int, dtype: torch.dtype) -> list[Case]:
    """The calls of a Llama's layer and loss, with seeded random inputs.

    Args:
        options: For batch, context, vocabulary and device.
        heads: Attention heads of the model.
        dim: Width of the model.
        dtype: dtype of the inputs.
    """
    import torchweld as tw

    normal = normals(options.device, dtype)
    batch, context = options.batch, options.context
    heads_k, width, hidden = key_heads(heads), dim // heads, gated_width(dim)
    rows, dim_k = batch * context, key_heads(heads) * width
    x, residual = normal(rows, dim), normal(rows, dim)
    norm = 1 + normal(dim, scale=0.1)
    qkv = [normal(size, dim, scale=dim**-0.5) for size in (dim, dim_k, dim_k)]
    gated = [normal(hidden, dim, scale=dim**-0.5) for _ in range(2)]
    down = normal(dim, hidden, scale=hidden**-0.5)
    head = normal(options.vocab, dim, scale=dim**-0.5)
    q = normal(batch, heads, context, width)
    k, v = normal(batch, heads_k, context, width), normal(batch, heads_k, context, width)
    angles = torch.arange(context)[:, None] * 1e4 ** -(torch.arange(0, width, 2) / width)
    angles = torch.cat([angles, angles], -1).to(options.device)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    target = torch.arange(rows, device=options.device) % options.vocab

    def rms(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (dim,), weight, _EPS)

    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat([-right, left], -1) * sin

    return [
        Case(
            "gated_mlp",
            f"{rows}x{dim}x{hidden} swiglu",
            tw.gated_mlp,
            lambda x, left, right, down: F.linear(
                F.silu(F.linear(x, left)) * F.linear(x, right), down
            ),
            (x, *gated, down),
        ),
        Case(
            "attention",
            f"{batch}x{heads}/{heads_k}x{context}x{width} causal",
            lambda q, k, v: tw.attention(q, k, v, causal=True),
            lambda q, k, v: F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            ),
            (q, k, v),
        ),
        Case(
            "linear_cross_entropy",
            f"{rows}x{dim}x{options.vocab}",
            tw.linear_cross_entropy,
            lambda x, weight, target: F.cross_entropy(F.linear(x, weight), target),
            (x, head, target),
        ),
        Case(
            "rms_norm_linears",
            f"{rows}x{dim}x{dim}+{dim_k}+{dim_k}",
            lambda x, g, *w: tuple(tw.rms_norm_linears(x, w, [], g, eps=_EPS)),
            lambda x, g, *w: tuple(F.linear(rms(x, g), weight) for weight in w),
            (x, norm, *qkv),
        ),
        Case(
            "rotary",
            f"{batch}x{heads}+{heads_k}x{context}x{width}",
            tw.rotary,
            lambda q, k, cos, sin: (rotated(q, cos, sin), rotated(k, cos, sin)),
            (q, k, cos, sin),
        ),
        Case(
            "add_rms_norm",
            f"{rows}x{dim}",
            lambda x, residual, g: tw.add_rms_norm(x, residual, g, eps=_EPS),
            lambda x, residual, g: (rms(x + residual, g), x + residual),
            (x, residual, norm),
        ),
        Case("rms_norm", f"{rows}x{dim}", lambda x, g: tw.rms_norm(x, g, eps=_EPS), rms, (x, norm)),
    ]
