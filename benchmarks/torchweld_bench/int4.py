"""Linear layers with 4-bit weights on a GPU, against the time to read the weight and cuBLAS.

Up to 16 rows of x, the calls alternate between weights of several times the L2 in one CUDA graph.
Generation does the same, and the time of a single launch would hide the time of the kernel.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweld._library import ops
from torchweld.ops.int4_module import Int4Linear
from torchweld.tuning.timer import Timing, interleaved
from torchweld_bench.common import dtype_text, each_of, in_turn, judged, largest_error, read_rate
from torchweld_bench.results import Row, make_row

_CHECKED_ROWS = 64
_ROUNDS = 21
_GROUP = 128
_DECODE_UP_TO = 16  # the maximum number of x rows for which reading the weight dominates the time
# the size of all weights that the calls rotate through; several times any L2 cache
_DECODE_BYTES = 128 << 20
# the minimum number of calls in a CUDA graph, so that the start of the graph hardly counts
_DECODE_CALLS = 48
_FLOOR = "read floor"
_FORWARD = "the forward"
_GRADIENTS_FROM = 1024  # rows of x in training


def _tinygemm(module: Int4Linear) -> tuple[Tensor, Tensor]:
    """Operands of torch's own kernel: other zeros, so that only its time is of use."""
    qweight, scale, _ = module.portable()
    codes = ops.int4_unpack(qweight, module.in_features)
    pairs = codes[:, ::2] << 4 | codes[:, 1::2]
    packed = torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), 8)
    scale = scale.t().contiguous()
    return packed, torch.stack([scale, torch.zeros_like(scale)], -1).to(torch.bfloat16)


def _cases(m: int, k: int, n: int, dtype: torch.dtype, rate: float) -> Iterator[Row]:
    """One matmul; a row for each peer that has a target."""
    linear = torch.nn.Linear(k, n, bias=False, device="cuda", dtype=dtype)
    module = Int4Linear.from_linear(linear, _GROUP)
    weight = (module.qweight, module.scale, module.zero)
    weight_bytes = sum(t.numel() * t.element_size() for t in weight)
    # For a small batch the calls rotate through several weights, so that no weight is in L2
    # although the kernels follow each other directly. For a large batch the timer's flush is
    # enough.
    turns = -(-_DECODE_BYTES // weight_bytes) if m <= _DECODE_UP_TO else 1
    times = max(turns, _DECODE_CALLS) if turns > 1 else 1
    modules = [copy.deepcopy(module) for _ in range(turns)]
    dense, x = module.dequantise(), torch.randn(m, k, device="cuda").to(dtype)
    denses = [dense.clone() for _ in range(turns)]
    calls = {
        "ours": [lambda own=own: own(x) for own in modules],
        "cublas": [lambda own=own: F.linear(x, own) for own in denses],
    }
    if dtype == torch.bfloat16:
        packed, scales = _tinygemm(module)
        calls["int4pack_mm"] = [
            lambda own=own: torch._weight_int4pack_mm(x, own, _GROUP, scales)
            for own in (packed.clone() for _ in range(turns))
        ]
    variants = {name: in_turn(own, times) if turns > 1 else own[0] for name, own in calls.items()}
    us = each_of(times, interleaved(variants, device="cuda", rounds=_ROUNDS))
    floor = weight_bytes / rate
    us[_FLOOR] = Timing(floor, floor, floor)
    part = x[:_CHECKED_ROWS]
    reference, eager = part.double() @ dense.double().t(), F.linear(part, dense)
    allowed = 3 * largest_error(eager, reference) + 1e-6
    errors = judged(module(x)[:_CHECKED_ROWS], eager, reference, allowed)
    case = f"int4 ({m}, {k}, {n}) {dtype_text(dtype)}"
    row = make_row(case, us, against="cublas", **errors)
    yield row
    others = ["int4pack_mm"] if "int4pack_mm" in us else []
    for peer in others + ([_FLOOR] if m <= _DECODE_UP_TO else []):
        yield row.over(peer)


def gradient_rows(m: int, k: int, n: int, dtype: torch.dtype, device: str) -> Iterator[Row]:
    """The gradient to x of one matmul, over cuBLAS and over the forward."""
    linear = torch.nn.Linear(k, n, bias=False, device=device, dtype=dtype)
    module = Int4Linear.from_linear(linear, _GROUP)
    weight, dense = ops.int4_repack(*module.portable()), module.dequantise()
    x, dy = (torch.randn(m, size, device=device).to(dtype) for size in (k, n))
    calls = {
        "ours": lambda: ops.int4_linear_repacked_backward(dy, *weight, in_features=k),
        "cublas": lambda: dy @ dense,
        _FORWARD: lambda: module(x),
    }
    us = interleaved(calls, device=device, rounds=_ROUNDS)
    part = dy[:_CHECKED_ROWS]
    reference, eager = part.double() @ dense.double(), part @ dense
    allowed = 3 * largest_error(eager, reference) + 1e-6
    errors = judged(calls["ours"]()[:_CHECKED_ROWS], eager, reference, allowed)
    case = f"int4 dx ({m}, {k}, {n}) {dtype_text(dtype)}"
    row = make_row(case, us, against="cublas", **errors)
    yield row
    yield row.over(_FORWARD)


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
