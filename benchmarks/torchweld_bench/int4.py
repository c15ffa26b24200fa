"""Linear layers with 4-bit weights on a GPU, against the time to read the weight and cuBLAS.

Up to 16 rows of x, the calls alternate between weights of several times the L2 in one CUDA graph.
Generation does the same, and the time of a single launch would hide the time of the kernel.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweld._library import ops
from torchweld.ops.int4_module import Int4Linear
from torchweld_bench.cases import (
    CHECKED_ROWS,
    Call,
    checked,
    compared,
    drawn,
    exactly,
    rotated,
    timed,
)
from torchweld_bench.common import dtype_text, read_rate
from torchweld_bench.results import Row

_ROUNDS = 21
GROUP = 128
_DECODE_UP_TO = 16  # the maximum number of x rows for which reading the weight dominates the time
# the size of all weights that the calls rotate through; more than the L2 cache of an H200 (50 MB)
_DECODE_BYTES = 128 << 20
# the minimum number of calls in a CUDA graph, so that the start of the graph hardly counts
_DECODE_CALLS = 48
_FLOOR = "read floor"
_FORWARD = "the forward"
_GRADIENTS_FROM = 1024  # rows of x in training


def _tinygemm(module: Int4Linear) -> tuple[Tensor, Tensor]:
    """Makes operands of torch's own kernel, with other zeros: only its time is of use."""
    qweight, scale, _ = module.portable()
    codes = ops.int4_unpack(qweight, module.in_features)
    pairs = codes[:, ::2] << 4 | codes[:, 1::2]
    packed = torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), 8)
    scale = scale.t().contiguous()
    return packed, torch.stack([scale, torch.zeros_like(scale)], -1).to(torch.bfloat16)


def rotation(m: int, weight_bytes: int) -> tuple[int, int]:
    """Returns how many weights the calls with m rows of x rotate through, and how many calls do.

    For a small batch they are several, so that no weight is in L2 although no flush runs between
    the kernels. For a large batch the timer flushes L2 between the calls.
    """
    turns = -(-_DECODE_BYTES // weight_bytes) if m <= _DECODE_UP_TO else 1
    return turns, max(turns, _DECODE_CALLS) if turns > 1 else 1


def _cases(m: int, k: int, n: int, dtype: torch.dtype, rate: float) -> Iterator[Row]:
    """Times one matmul; a row for each peer with a target."""
    linear = torch.nn.Linear(k, n, bias=False, device="cuda", dtype=dtype)
    module = Int4Linear.from_linear(linear, GROUP)
    weight = (module.qweight, module.scale, module.zero)
    weight_bytes = sum(t.numel() * t.element_size() for t in weight)
    turns, times = rotation(m, weight_bytes)
    dense, x = module.dequantise(), drawn(m, k, dtype=dtype)
    calls: dict[str, list[Call]] = {
        "ours": [partial(copy.deepcopy(module), x) for _ in range(turns)],
        "cublas": [partial(F.linear, x, dense.clone()) for _ in range(turns)],
    }
    if dtype == torch.bfloat16:
        packed, scales = _tinygemm(module)
        calls["int4pack_mm"] = [
            partial(torch._weight_int4pack_mm, x, packed.clone(), GROUP, scales)
            for _ in range(turns)
        ]
    if turns > 1:
        us = rotated(calls, times, _ROUNDS)
    else:
        us = timed({name: each for name, (each,) in calls.items()}, _ROUNDS)
    us[_FLOOR] = exactly(weight_bytes / rate)
    out = module(x)[:CHECKED_ROWS]
    errors = checked(out, F.linear, [x[:CHECKED_ROWS], dense], 3, 1e-6)
    over = ["int4pack_mm", *[_FLOOR] * (m <= _DECODE_UP_TO)]
    return compared(f"int4 ({m}, {k}, {n}) {dtype_text(dtype)}", us, errors, "cublas", over)


def gradient_rows(m: int, k: int, n: int, dtype: torch.dtype, device: str) -> Iterator[Row]:
    """Times the gradient to x of one matmul, over cuBLAS and over the forward."""
    linear = torch.nn.Linear(k, n, bias=False, device=device, dtype=dtype)
    module = Int4Linear.from_linear(linear, GROUP)
    weight, dense = ops.int4_repack(*module.portable()), module.dequantise()
    x, dy = (drawn(m, size, dtype=dtype, device=device) for size in (k, n))
    calls: dict[str, Call] = {
        "ours": lambda: ops.int4_linear_repacked_backward(dy, *weight, in_features=k),
        "cublas": lambda: dy @ dense,
        _FORWARD: lambda: module(x),
    }
    few = [dy[:CHECKED_ROWS], dense]
    errors = checked(calls["ours"]()[:CHECKED_ROWS], torch.matmul, few, times=3, plus=1e-6)
    case = f"int4 dx ({m}, {k}, {n}) {dtype_text(dtype)}"
    return compared(case, timed(calls, _ROUNDS, device), errors, "cublas", [_FORWARD])


def rows() -> Iterator[Row]:
    """Measures every case of the family, one per iteration."""
    torch.manual_seed(0)
    rate = read_rate()
    brain, half, single = torch.bfloat16, torch.float16, torch.float32
    for k, n in ((4096, 4096), (4096, 14336)):
        for m in (1, 4, 8, 16, 32, 64, 128, 256, 1024, 4096):
            yield from _cases(m, k, n, brain, rate)
            if m >= _GRADIENTS_FROM:
                yield from gradient_rows(m, k, n, brain, "cuda")
    yield from _cases(1, 14336, 4096, brain, rate)
    yield from _cases(16, 4096, 14336, half, rate)
    yield from _cases(256, 4096, 14336, half, rate)
    yield from _cases(1, 4096, 14336, single, rate)
    yield from _cases(256, 4096, 14336, single, rate)
