"""The op table's calls for a Llama or an OLMoE; those for a GPT-2 are in opcases.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from demo.kinds import EXPERTS, KINDS, PER_TOKEN, key_heads
from demo.opcases import Case, normals
from demo.options import Options

_EPS = 1e-6


def cases(options: Options, heads: int, dim: int, dtype: torch.dtype) -> list[Case]:
    """The calls of a layer and the loss, with seeded random inputs.

    Args:
        options: For model, batch, context, vocabulary and device.
        heads: Attention heads of the model.
        dim: Width of the model.
        dtype: dtype of the inputs.
    """
    import torchweld as tw

    normal = normals(options.device, dtype)
    batch, context = options.batch, options.context
    heads_k, width, hidden = key_heads(heads), dim // heads, KINDS[options.model].width(dim)
    rows, dim_k = batch * context, key_heads(heads) * width
    x, residual = normal(rows, dim), normal(rows, dim)
    norm = 1 + normal(dim, scale=0.1)
    qkv = [normal(size, dim, scale=dim**-0.5) for size in (dim, dim_k, dim_k)]
    if KINDS[options.model].mixture:
        mlp = _experts(rows, dim, hidden, normal)
    else:
        mlp = _gated_mlp(rows, dim, hidden, normal)
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
        mlp,
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


def _gated_mlp(rows: int, dim: int, hidden: int, normal: Callable[..., Tensor]) -> Case:
    import torchweld as tw

    gated = [normal(hidden, dim, scale=dim**-0.5) for _ in range(2)]
    return Case(
        "gated_mlp",
        f"{rows}x{dim}x{hidden} swiglu",
        tw.gated_mlp,
        lambda x, left, right, down: F.linear(F.silu(F.linear(x, left)) * F.linear(x, right), down),
        (normal(rows, dim), *gated, normal(dim, hidden, scale=hidden**-0.5)),
    )


def _experts(rows: int, dim: int, hidden: int, normal: Callable[..., Tensor]) -> Case:
    import torchweld as tw

    def loop(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        """As transformers' eager experts."""
        y = torch.zeros_like(x)
        for e in range(EXPERTS):
            token, slot = torch.where(index == e)
            gate, up = F.linear(x[token], gate_up[e]).chunk(2, -1)
            act = F.linear(F.silu(gate) * up, down[e])
            y.index_add_(0, token, act * weight[token, slot, None])
        return y

    weight, index = normal(rows, EXPERTS).softmax(-1).topk(PER_TOKEN)
    gate_up = normal(EXPERTS, 2 * hidden, dim, scale=dim**-0.5)
    down = normal(EXPERTS, dim, hidden, scale=hidden**-0.5)
    return Case(
        "experts",
        f"{rows}x{dim}x{hidden} swiglu, {PER_TOKEN} of {EXPERTS}",
        tw.experts,
        loop,
        (normal(rows, dim), gate_up, down, index, weight),
    )
