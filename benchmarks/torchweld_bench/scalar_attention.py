"""scalar_attention on a GPU, against the time of its exponentials and the formula in torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torchweld._library import ops
from torchweld.tuning.timer import Timing, interleaved
from torchweld_bench.common import dtype_text, largest_error
from torchweld_bench.results import Row, make_row

# An SM computes 16 exponentials per clock. The GPU has 132 SMs at 1.83 GHz.
_EXPONENTIALS_A_SECOND = 3.9e12
_CHECKED = 64
_FLOOR = "exp2 floor"


def _eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q[:, None] * k, -1) @ v


def _floor(n: int, sweeps: int) -> Timing:
    us = sweeps * n * n / _EXPONENTIALS_A_SECOND * 1e6
    return Timing(us, us, us)


def _vectors(n: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(n, device="cuda").to(dtype) for _ in range(3)]


def _eager_fits(n: int, dtype: torch.dtype) -> bool:
    """Whether the scores, their softmax and spare memory fit in memory."""
    return 3 * n * n * dtype.itemsize < torch.cuda.mem_get_info()[0]


def _forward(n: int, dtype: torch.dtype, against: str, targets: dict[str, float]) -> Row:
    q, k, v = _vectors(n, dtype)
    case = f"scalar_attention ({n},) {dtype_text(dtype)}"
    case += " over eager" if against == "eager" else ""
    calls = {"ours": lambda: ops.scalar_attention(q, k, v)}
    if _eager_fits(n, dtype):
        calls["eager"] = lambda: _eager(q, k, v)
    exact = _eager(q[:_CHECKED].double(), k.double(), v.double())
    eager_error = largest_error(_eager(q[:_CHECKED], k, v), exact)
    times = interleaved(calls, device="cuda", rounds=11)
    return make_row(
        case,
        {**times, _FLOOR: _floor(n, sweeps=1)},
        against=against,
        target=targets.get(case),
        error=largest_error(ops.scalar_attention(q, k, v)[:_CHECKED], exact),
        eager_error=eager_error,
        allowed_error=3 * eager_error + 1e-6,
    )


def _backward(n: int, dtype: torch.dtype, targets: dict[str, float]) -> Row:
    """Two sweeps: one over the keys of every query, one over the queries of every key."""
    q, k, v = _vectors(n, dtype)
    dz = torch.randn_like(q)
    _, mean, total = ops.scalar_attention_forward(q, k, v)
    case = f"scalar_attention_backward ({n},) {dtype_text(dtype)}"

    def ours() -> tuple[Tensor, ...]:
        return ops.scalar_attention_backward(dz, q, k, v, mean, total, output_mask=[True] * 3)

    def of_first_rows(*dtypes: torch.dtype) -> Tensor:
        part = [t.to(*dtypes) for t in (q[:_CHECKED], k, v)]
        row = part[0].requires_grad_()
        return torch.autograd.grad(_eager(row, *part[1:]), row, dz[:_CHECKED].to(*dtypes))[0]

    exact = of_first_rows(torch.float64)
    eager_error = largest_error(of_first_rows(dtype), exact)
    times = interleaved({"ours": ours}, device="cuda", rounds=11)
    return make_row(
        case,
        {**times, _FLOOR: _floor(n, sweeps=2)},
        against=_FLOOR,
        target=targets.get(case),
        error=largest_error(ours()[0][:_CHECKED], exact),
        eager_error=eager_error,
        allowed_error=3 * eager_error + 1e-6,
    )


def rows(targets: dict[str, float]) -> Iterator[Row]:
    """Measures every case of the family, one per iteration."""
    torch.manual_seed(0)
    for n in (4096, 16384, 65536, 131072):
        yield _forward(n, torch.float32, _FLOOR, targets)
    yield _forward(65536, torch.bfloat16, _FLOOR, targets)
    for n in (4096, 16384, 65536):
        if _eager_fits(n, torch.float32):
            yield _forward(n, torch.float32, "eager", targets)
    for n in (16384, 65536):
        yield _backward(n, torch.float32, targets)
