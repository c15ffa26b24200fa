"""Forward and backward of ops with one matmul on a GPU, against eager and torch.compile:
times, as CUDA graphs, and the peak memory beyond the operands.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweld._library import ops
from torchweld_bench.cases import (
    Function,
    captured,
    compared,
    drawn,
    gradients,
    judged_dx,
    leaves,
    measured,
)
from torchweld_bench.common import dtype_text, peak_memory
from torchweld_bench.results import Row

_ROUNDS = 11
_SIZES = ((512, 1024, 4096, torch.float16), (8192, 768, 3072, torch.bfloat16),
          (4096, 1600, 6400, torch.bfloat16), (8192, 4096, 16384, torch.bfloat16))  # fmt: skip
_MORE = {
    "linear": ((4096, 4096, 4096), (16384, 2048, 2048)),
    "layer_norm_linear": ((4096, 4096, 4096), (16384, 2048, 2048)),
    "gated_linear": ((8192, 4096, 11008),),
}


def _layer_norm_linear(x: Tensor, w: Tensor, b: Tensor, g: Tensor, h: Tensor) -> Tensor:
    return F.gelu(F.linear(F.layer_norm(x, x.shape[-1:], g, h), w, b), approximate="tanh")


def _gated_linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    left, right = F.linear(x, w, b).chunk(2, -1)
    return F.silu(left) * right


# For each op: its call, the same computation in torch, the ratio of weight rows to N, and whether
# the op has a norm.
_OPS: dict[str, tuple[Function, Function, int, bool]] = {
    "linear": (ops.linear, F.linear, 1, False),
    "layer_norm_linear": (
        partial(ops.layer_norm_linear, activation="gelu_tanh"), _layer_norm_linear, 1, True,
    ),
    "gated_linear": (partial(ops.gated_linear, gate="swiglu"), _gated_linear, 2, False),
}  # fmt: skip


def _rows_of(op: str, m: int, k: int, n: int, dtype: torch.dtype) -> Iterator[Row]:
    own, eager, halves, normed = _OPS[op]
    x, weight = drawn(m, k, dtype=dtype), drawn(halves * n, k, dtype=dtype, std=k**-0.5)
    vectors = [drawn(size, dtype=dtype) for size in (halves * n, *[k] * (2 * normed))]
    args, dy = leaves(x, weight, *vectors), drawn(m, n, dtype=dtype)
    functions = {"ours": own, "eager": eager, "torch.compile": torch.compile(eager)}
    calls = {name: gradients(f, args, dy) for name, f in functions.items()}
    errors = judged_dx(own, eager, args, dy)
    case = f"{op} ({m}, {k}, {n}) {dtype_text(dtype)}, forward and backward"
    over = "torch.compile", ["eager"]
    yield from measured(case, captured(calls), errors, *over, rounds=_ROUNDS)
    memory = {name: peak_memory(call) for name, call in calls.items()}
    yield from compared(f"{case} peak memory", memory, errors, *over, end=", MiB")


def rows() -> Iterator[Row]:
    """Measures every case of the family lazily. Peak memory is in MiB; the other rows are in
    microseconds.
    """
    cases = [(op, *size) for size in _SIZES for op in _OPS]
    cases += [(op, *size, torch.bfloat16) for op, sizes in _MORE.items() for size in sizes]
    for op, m, k, n, dtype in cases:
        torch._dynamo.reset()
        yield from _rows_of(op, m, k, n, dtype)
