"""rotary on a GPU, as CUDA graphs: forward and backward against a copy of q and k, and against the
function of Hugging Face in eager and under torch.compile, and Liger where it is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from torchweld._library import ops
from torchweld_bench.cases import (
    Call,
    Function,
    captured,
    checked,
    drawn,
    gradients,
    leaves,
    measured,
)
from torchweld_bench.common import dtype_text, free, installed
from torchweld_bench.results import Row

_ROUNDS = 11
# (batch, heads of q, heads of k, seqlen, head_dim, rotary_dim) of Llama 3 8B with two sequence
# lengths, Llama 3.2 1B, Phi-2, GLM-4 9B, and of a generation step.
_SIZES = (
    (8, 32, 8, 4096, 128, 128),
    (1, 32, 8, 32768, 128, 128),
    (8, 32, 8, 4096, 64, 64),
    (4, 32, 32, 2048, 80, 32),
    (4, 32, 2, 4096, 128, 64),
    (64, 32, 8, 1, 128, 128),
)


def _rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def eager_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """apply_rotary_pos_emb of Llama, and Phi's code around it if a part is rotated."""
    size = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def rotated(x: Tensor) -> Tensor:
        front = x[..., :size]
        front = front * cos + _rotate_half(front) * sin
        return front if size == x.shape[-1] else torch.cat((front, x[..., size:]), dim=-1)

    return rotated(q), rotated(k)


def _tables(seqlen: int, size: int) -> list[Tensor]:
    inverse = 10000.0 ** (-torch.arange(0, size, 2, device="cuda") / size)
    angle = torch.arange(seqlen, device="cuda")[None, :, None] * inverse
    angle = torch.cat((angle, angle), dim=-1)
    return [angle.cos(), angle.sin()]


def _rows_of(case: str, operands: list[Tensor], tables: list[Tensor]) -> Iterator[Row]:
    q, k = operands
    results = [torch.empty_like(t) for t in operands]
    few = [q[:1], k[:1], *tables]
    errors = checked(ops.rotary(*few), eager_rotary, few)

    def copy() -> None:
        results[0].copy_(q)
        results[1].copy_(k)

    functions: dict[str, Function] = {
        "ours": ops.rotary,
        "eager": eager_rotary,
        "torch.compile": torch.compile(eager_rotary),
    }
    liger = installed("liger_kernel.ops.rope", "LigerRopeFunction")
    if liger is not None and tables[0].shape[-1] == q.shape[-1] and tables[0].dtype == q.dtype:
        functions["Liger"] = liger.apply
    # Liger overwrites its arguments, so it gets copies.
    given = {name: [q.clone(), k.clone()] if name == "Liger" else [q, k] for name in functions}

    def both(name: str) -> Call:
        # Pass views of the leaves, because autograd does not allow Liger to overwrite a leaf.
        return gradients(
            lambda *t: functions[name](*(x.view_as(x) for x in t), *tables),
            leaves(*given[name]),
            [torch.randn_like(t) for t in operands],
        )

    for what, calls, over in (
        (
            "forward",
            {**{n: partial(f, *given[n], *tables) for n, f in functions.items()}, "copy": copy},
            ["copy", "torch.compile", "Liger"],
        ),
        (
            "backward",
            {"ours": partial(ops.rotary_backward, q, k, *tables, output_mask=[True, True]),
             "copy": copy},
            ["copy"],
        ),
        ("forward and backward", {n: both(n) for n in functions}, ["torch.compile", "Liger"]),
    ):  # fmt: skip
        yield from measured(f"{case}, {what}", captured(calls), errors, over=over, rounds=_ROUNDS)


def rows() -> Iterator[Row]:
    """Measures every case of the family lazily."""
    for batch, nheads, nheads_k, seqlen, head_dim, rotary_dim in _SIZES:
        torch._dynamo.reset()
        free()
        torch.manual_seed(0)
        operands = [drawn(batch, seqlen, n, head_dim).transpose(1, 2) for n in (nheads, nheads_k)]
        case = f"rotary ({batch}, {nheads} + {nheads_k}, {seqlen}, {head_dim})"
        if rotary_dim < head_dim:
            case += f" rotary_dim {rotary_dim}"
        case += f" {dtype_text(operands[0].dtype)}"
        wide = _tables(seqlen, rotary_dim)
        yield from _rows_of(case, operands, [t.bfloat16() for t in wide])
        if (seqlen, head_dim) == (4096, 128) and rotary_dim == head_dim:
            yield from _rows_of(f"{case}, float32 tables", operands, wide)
            dense = [t.contiguous() for t in operands]
            narrow = [t.bfloat16() for t in wide]
            yield from _rows_of(f"{case}, heads before positions", dense, narrow)
