"""scalar_attention on a GPU, against the time of its exponentials and the formula in torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torchweld._library import ops
from torchweld.tuning.timer import Timing
from torchweld_bench.cases import (
    CHECKED_ROWS,
    Call,
    checked,
    compared,
    drawn,
    exactly,
    judged_dx,
    timed,
)
from torchweld_bench.common import dtype_text
from torchweld_bench.results import Row

# An SM computes 16 exponentials per clock; an H200 has 132 SMs at 1.83 GHz.
_EXPONENTIALS_A_SECOND = 3.9e12
_FLOOR = "exp2 floor"


def _eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q[:, None] * k, -1) @ v


def _floor(n: int, sweeps: int) -> Timing:
    return exactly(sweeps * n * n / _EXPONENTIALS_A_SECOND * 1e6)


def _eager_fits(n: int, dtype: torch.dtype) -> bool:
    """Whether the scores, their softmax and spare memory fit in memory."""
    return 3 * n * n * dtype.itemsize < torch.cuda.mem_get_info()[0]


def _forward(n: int, dtype: torch.dtype, against: str) -> Iterator[Row]:
    q, k, v = (drawn(n, dtype=dtype) for _ in range(3))
    calls: dict[str, Call] = {"ours": lambda: ops.scalar_attention(q, k, v)}
    if _eager_fits(n, dtype):
        calls["eager"] = lambda: _eager(q, k, v)
    errors = checked(
        ops.scalar_attention(q, k, v)[:CHECKED_ROWS],
        _eager,
        [q[:CHECKED_ROWS], k, v],
        times=3,
        plus=1e-6,
    )
    times = {**timed(calls, rounds=11), _FLOOR: _floor(n, sweeps=1)}
    case = f"scalar_attention ({n},) {dtype_text(dtype)}"
    if against == "eager":
        return compared(case, times, errors, over=["eager"])
    return compared(case, times, errors, against)


def _backward(n: int, dtype: torch.dtype) -> Iterator[Row]:
    """Two sweeps: one over the keys of every query, one over the queries of every key."""
    q, k, v, dz = (drawn(n, dtype=dtype) for _ in range(4))
    _, mean, total = ops.scalar_attention_forward(q, k, v)

    def ours() -> tuple[Tensor, ...]:
        return ops.scalar_attention_backward(dz, q, k, v, mean, total, output_mask=[True] * 3)

    errors = judged_dx(ours()[0][:CHECKED_ROWS], _eager, [q, k, v], dz, plus=1e-6)
    times = {**timed({"ours": ours}, rounds=11), _FLOOR: _floor(n, sweeps=2)}
    case = f"scalar_attention_backward ({n},) {dtype_text(dtype)}"
    return compared(case, times, errors, _FLOOR)


def rows() -> Iterator[Row]:
    """Measures every case of the family, one per iteration."""
    torch.manual_seed(0)
    for n in (4096, 16384, 65536, 131072):
        yield from _forward(n, torch.float32, _FLOOR)
    yield from _forward(65536, torch.bfloat16, _FLOOR)
    for n in (4096, 16384, 65536):
        if _eager_fits(n, torch.float32):
            yield from _forward(n, torch.float32, "eager")
    for n in (16384, 65536):
        yield from _backward(n, torch.float32)
