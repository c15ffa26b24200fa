"""The CPU kernels against the same function in eager torch, forward and with gradient, in
float32 and bfloat16, with one thread and with two; and the training step of a small Llama.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import torchweld
from torchweld._library import ops
from torchweld_bench.cases import (
    Call,
    Errors,
    Function,
    checked,
    compared,
    drawn_like,
    gradients,
    judged_loss,
    leaves,
    timed,
)
from torchweld_bench.common import dtype_text, padded_conv2d
from torchweld_bench.models import copy_of, language_loss, stepper
from torchweld_bench.results import Row
from torchweld_bench.rotary import eager_rotary


def _hidden(seqlen: int, pads: Tensor | None) -> Tensor:
    hidden = torch.ones(seqlen, seqlen, dtype=torch.bool).triu(1)
    if pads is None:
        return hidden
    return hidden | (torch.arange(seqlen) < pads[:, None, None, None])


def _padded_sdpa(pads: Tensor, seqlen: int) -> Function:
    seen = ~_hidden(seqlen, pads)
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def _causal_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _eager_causal_softmax(seqlen: int) -> Function:
    hidden = _hidden(seqlen, None)
    return lambda scores: scores.masked_fill(hidden, float("-inf")).softmax(-1)


def _gated(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    left, right = F.linear(x, weight, bias).chunk(2, -1)
    return left * F.gelu(right)


def _rms(x: Tensor, weight: Tensor, bias: Tensor, norm_weight: Tensor) -> Tensor:
    return F.silu(F.linear(F.rms_norm(x, x.shape[-1:], norm_weight, 1e-6), weight, bias))


def _layer_norm_gelu(x: Tensor, weight: Tensor, bias: Tensor, g: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(F.layer_norm(x, x.shape[-1:], g, b), weight, bias), approximate="tanh")


def _cases(dtype: torch.dtype) -> Iterator[tuple[str, Function, Function, list[Tensor]]]:
    """(case, ours, eager, tensors that get a gradient)."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape).to(dtype)

    for shape in ((4096, 512), (512, 8192)):
        yield f"softmax {shape}", ops.softmax, lambda x: x.softmax(-1), [random(*shape)]
    for shape in ((4096, 512), (512, 8192)):
        yield f"row_sum {shape}", ops.row_sum, lambda x: x.sum(-1), [random(*shape)]
    for shape in ((1, 32, 512, 128), (4, 8, 64, 64)):
        key, tables = random(*shape)[:, ::4], [random(shape[2], shape[3]) for _ in range(2)]
        yield (
            f"rotary {shape}",
            lambda q, k=key, t=tables: ops.rotary(q, k, *t)[0],
            lambda q, k=key, t=tables: eager_rotary(q, k, *(x[None] for x in t))[0],
            [random(*shape)],
        )
    for size, shape in ((3, (64, 64, 64)), (5, (2, 512, 512)), (3, (4096, 8, 8))):
        yield (
            f"conv2d {shape} {size} x {size}",
            ops.conv2d,
            padded_conv2d,
            [random(*shape), random(size, size)],
        )
    for shape in ((8, 256, 256), (12, 1024, 1024)):
        yield (
            f"causal_softmax {shape}",
            ops.causal_softmax,
            _eager_causal_softmax(shape[-1]),
            [random(*shape)],
        )
    for shape in ((4, 8, 128, 32), (2, 12, 512, 64), (1, 12, 1024, 64)):
        qkv = [random(*shape) for _ in range(3)]
        yield (
            f"attention causal {shape}",
            lambda q, k, v: ops.attention(q, k, v, causal=True),
            _causal_sdpa,
            qkv,
        )
    for seqlen, starts in ((256, [0, 100, 200, 250]), (1024, [0, 600, 800, 1000])):
        pads = torch.tensor(starts, dtype=torch.int32)
        yield (
            f"attention causal leftpad (4, 12, {seqlen}, 64)",
            lambda q, k, v, pads=pads: ops.attention(q, k, v, pads, causal=True),
            _padded_sdpa(pads, seqlen),
            [random(4, 12, seqlen, 64) for _ in range(3)],
        )
    eager_softmax = _eager_causal_softmax(512)
    yield (
        "softmax_matmul causal (2, 12, 512, 512) x 64",
        lambda s, v: ops.softmax_matmul(s, v, causal=True),
        lambda s, v: eager_softmax(s) @ v,
        [random(2, 12, 512, 512), random(2, 12, 512, 64)],
    )
    yield (
        "bmm (24, 512, 64) x (24, 64, 512)",
        ops.bmm,
        torch.bmm,
        [
            random(24, 512, 64),
            random(24, 64, 512),
        ],
    )
    for m, k, n in ((1, 4096, 4096), (4, 4096, 4096), (16, 4096, 4096), (128, 1024, 4096)):
        codes, zeros = torch.randint(0, 16, (n, k)), torch.randint(0, 16, (n, k // 128))
        packed = [ops.int4_pack(t.to(torch.uint8)) for t in (codes, zeros)]
        scale = (torch.rand(n, k // 128) * k**-0.5).to(dtype)
        dense = ((codes.view(n, -1, 128) - zeros[..., None]) * scale[..., None]).flatten(1)
        yield (
            f"int4_linear group 128 ({m}, {k}, {n})",
            lambda x, q=packed[0], s=scale, z=packed[1]: ops.int4_linear(x, q, s, z),
            lambda x, w=dense: F.linear(x, w.to(x.dtype)),
            [random(m, k)],
        )
    heads = [(512, 1024, 32000)] + [(1024, 768, 50257)] * (dtype != torch.float32)
    for m, k, n in heads:
        target = torch.randint(0, n, (m,))
        yield (
            f"linear_cross_entropy ({m}, {k}, {n})",
            lambda x, w, t=target: ops.linear_cross_entropy(x, w, t),
            lambda x, w, t=target: F.cross_entropy(F.linear(x, w), t),
            [random(m, k), random(n, k) * k**-0.5],
        )
    yield (
        "scalar_attention (4096,)",
        ops.scalar_attention,
        lambda q, k, v: (q[:, None] * k).softmax(-1) @ v,
        [random(4096) for _ in range(3)],
    )
    for m, k, n in ((512, 256, 1024), (1024, 768, 3072)):
        x, weight, bias = random(m, k), random(n, k) * k**-0.5, random(n)
        norm = [(torch.rand(k) + 0.5).to(dtype), random(k)]
        yield (
            f"linear gelu_tanh ({m}, {k}, {n})",
            lambda x, w, b: ops.linear(x, w, b, activation="gelu_tanh"),
            lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"),
            [x, weight, bias],
        )
        yield (
            f"layer_norm_linear gelu_tanh ({m}, {k}, {n})",
            lambda x, w, b, g, c: ops.layer_norm_linear(x, w, b, g, c, activation="gelu_tanh"),
            _layer_norm_gelu,
            [x, weight, bias, *norm],
        )
        yield (
            f"rms_norm_linear silu ({m}, {k}, {n})",
            lambda x, w, b, g: ops.rms_norm_linear(x, w, b, g, activation="silu"),
            _rms,
            [x, weight, bias, norm[0]],
        )
        yield f"gated_linear geglu ({m}, {k}, {n})", ops.gated_linear, _gated, [x, weight, bias]
        yield (
            f"gated_linear_pair swiglu ({m}, {k}, {n // 2})",
            ops.gated_linear_pair,
            lambda x, left, right: F.silu(F.linear(x, left)) * F.linear(x, right),
            [x, *(w.clone() for w in weight.chunk(2))],
        )
        folded_weight, weight_sum, folded_bias = ops.fold_layer_norm(weight, bias, *norm)
        yield (
            f"folded_layer_norm_linear gelu_tanh ({m}, {k}, {n})",
            lambda x, w=folded_weight, s=weight_sum, b=folded_bias: ops.folded_layer_norm_linear(
                x, w, s, b, activation="gelu_tanh"
            ),
            lambda x, w=weight, b=bias, norm=norm: _layer_norm_gelu(
                x, *(t.to(x.dtype) for t in (w, b, *norm))
            ),
            [x],
        )


def _with_threads(case: str, calls: dict[str, Call], errors: Errors) -> Iterator[Row]:
    """The rows with one thread and with two."""
    for threads in (1, 2):
        torch.set_num_threads(threads)
        name = f"{case}, {threads} thread{'s' if threads > 1 else ''}"
        yield from compared(name, timed(calls, device="cpu"), errors, "eager")


def _llama_rows() -> Iterator[Row]:
    """The training step of a Llama of 4 M parameters, beside the stock model."""
    import transformers

    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=4096, tie_word_embeddings=True, **sizes, **heads)
    tokens = torch.randint(config.vocab_size, (8, 128))
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        stock = transformers.LlamaForCausalLM._from_config(
            config, attn_implementation="sdpa", dtype=dtype
        ).train()
        fused = copy_of(stock)
        torchweld.fuse(fused, check=False, loss=True)
        optimizer = torch.optim.AdamW(stock.parameters(), lr=1e-5, fused=True)
        compute = {
            name: partial(language_loss, model, tokens)
            for name, model in (("ours", fused), ("eager", stock))
        }
        steps = {name: stepper(loss, optimizer) for name, loss in compute.items()}
        with torch.no_grad():
            losses = {name: loss().item() for name, loss in compute.items()}
        allowed = 1e-5 if dtype == torch.float32 else 1e-2
        errors = judged_loss(losses["ours"], losses["eager"], allowed)
        case = f"llama training step (8, 128) {dtype_text(dtype)}"
        yield from _with_threads(case, steps, errors)


def rows() -> Iterator[Row]:
    """Measures every case of the family, one per iteration."""
    before = torch.get_num_threads()
    try:
        yield from _llama_rows()
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(0)
            for case, ours, eager, tensors in _cases(dtype):
                out, operands = ours(*tensors), leaves(*tensors)
                errors, dy = checked(out, eager, tensors, times=4), drawn_like(out)
                functions = {"ours": ours, "eager": eager}
                for kind, calls in (
                    ("forward", {n: partial(f, *tensors) for n, f in functions.items()}),
                    (
                        "with gradient",
                        {n: gradients(f, operands, dy) for n, f in functions.items()},
                    ),
                ):
                    yield from _with_threads(f"{case} {kind} {dtype_text(dtype)}", calls, errors)
    finally:
        torch.set_num_threads(before)
