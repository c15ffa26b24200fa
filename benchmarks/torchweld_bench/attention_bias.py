"""attention with a bias or ALiBi on a GPU, forward and with the gradients of all operands: against
the same call without, and against SDPA's memory-efficient back end and FlexAttention, which have
gradients of a bias.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from torchweld._library import ops
from torchweld_bench.attention import EAGER_ERRORS
from torchweld_bench.cases import checked, drawn, trained
from torchweld_bench.results import Row

# batch, nheads, seqlen, head_dim. The bias is (1, nheads, seqlen, seqlen), as in T5. With ALiBi the
# cases are causal.
_CASES = [(8, 16, 2048, 64), (32, 12, 512, 64), (4, 16, 4096, 128)]


def _ours(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return ops.attention(q, k, v, bias=bias)


def _efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, bias.expand(len(q), -1, -1, -1))


_flex_attention = torch.compile(flex_attention, dynamic=False)


def _flex(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    def add(score: Tensor, b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return score + bias[0, h, row, key]

    return _flex_attention(q, k, v, score_mod=add)


def _with_alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    return ops.attention(q, k, v, causal=True, alibi_slopes=slopes)


def _flex_alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    def add(score: Tensor, b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return score - slopes[h] * (row - key)

    return _flex_attention(q, k, v, score_mod=add, block_mask=_causal_blocks(q.shape[2]))


@functools.cache
def _causal_blocks(seqlen: int) -> BlockMask:
    return create_block_mask(lambda b, h, row, key: row >= key, None, None, seqlen, seqlen)


def _exact_alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    position = torch.arange(q.shape[2], device="cuda")
    distance = (position[:, None] - position).float()
    scores = q @ k.mT * q.shape[-1] ** -0.5 - slopes[:, None, None] * distance
    return scores.masked_fill(distance < 0, -torch.inf).softmax(-1).to(v.dtype) @ v


def _alibi_rows() -> Iterator[Row]:
    without = functools.partial(ops.attention, causal=True)
    torch._dynamo.reset()  # else FlexAttention would exceed the limit of recompilations
    for batch, nheads, seqlen, dim in _CASES:
        qkv = [drawn(batch, nheads, seqlen, dim).requires_grad_() for _ in range(3)]
        slopes = 2 ** -(8 / nheads * torch.arange(1, nheads + 1, device="cuda").float())
        few = [*(t.detach()[-1:, -1:] for t in qkv), slopes[-1:]]
        errors = checked(_with_alibi(*few), _exact_alibi, few, EAGER_ERRORS)
        _causal_blocks(seqlen)  # before a graph is captured
        functions = {
            "ours": functools.partial(_with_alibi, slopes=slopes),
            "without": without,
            "flex": functools.partial(_flex_alibi, slopes=slopes),
        }
        yield from trained(
            f"attention ({batch}, {nheads}, {seqlen}, {dim}) bfloat16 causal ALiBi",
            functions,
            qkv,
            errors,
            forward=functions,
            backward=functions,
        )


def _exact(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5 + bias).softmax(-1) @ v


def rows() -> Iterator[Row]:
    """Measures every case, one per iteration."""
    torch.manual_seed(0)
    functions = {"ours": _ours, "without": ops.attention, "sdpa efficient": _efficient}
    functions["flex"] = _flex
    for batch, nheads, seqlen, dim in _CASES:
        qkv = [drawn(batch, nheads, seqlen, dim) for _ in range(3)]
        bias = drawn(1, nheads, seqlen, seqlen)
        operands = [t.requires_grad_() for t in (*qkv, bias)]
        few = [t.detach()[-1:, -1:] for t in operands]
        errors = checked(_ours(*few), _exact, few, EAGER_ERRORS)
        yield from trained(
            f"attention ({batch}, {nheads}, {seqlen}, {dim}) bfloat16 bias",
            functions,
            operands,
            errors,
            others={"without": operands[:3]},
            forward=functions,
            backward=functions,
        )
    yield from _alibi_rows()
