"""Forward and backward of ops with one matmul on a GPU, against eager and torch.compile:
times, as CUDA graphs, and the peak memory beyond the operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweld._library import ops
from torchweld.tuning.timer import interleaved
from torchweld_bench.common import dtype_text, in_turn, largest_error, peak_memory
from torchweld_bench.results import Row, make_row

_ROUNDS = 11
_CHECKED_ROWS = 64
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
_OPS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], int, bool]] = {
    "linear": (ops.linear, F.linear, 1, False),
    "layer_norm_linear": (
        lambda x, w, b, g, h: ops.layer_norm_linear(x, w, b, g, h, activation="gelu_tanh"),
        _layer_norm_linear,
        1,
        True,
    ),
    "gated_linear": (
        lambda x, w, b: ops.gated_linear(x, w, b, gate="swiglu"),
        _gated_linear,
        2,
        False,
    ),
}


def _gradients(f: Callable[..., Tensor], args: list[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(f(*args), args, dy)


def _rows_of(
    op: str, m: int, k: int, n: int, dtype: torch.dtype, targets: dict[str, float]
) -> Iterator[Row]:
    own, eager, halves, normed = _OPS[op]

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device="cuda") * scale).to(dtype).requires_grad_()

    args = [draw(m, k), draw(halves * n, k, scale=k**-0.5), draw(halves * n)]
    args += [draw(k), draw(k)] if normed else []
    dy = torch.randn(m, n, device="cuda").to(dtype)
    compiled = torch.compile(eager)
    calls = {
        "ours": lambda: _gradients(own, args, dy),
        "eager": lambda: _gradients(eager, args, dy),
        "torch.compile": lambda: _gradients(compiled, args, dy),
    }

    def dx_of_rows(f: Callable[..., Tensor], to: torch.dtype) -> Tensor:
        some = [t.detach().to(to).requires_grad_() for t in (args[0][:_CHECKED_ROWS], *args[1:])]
        return _gradients(f, some, dy[:_CHECKED_ROWS].to(to))[0]

    exact, of_eager = dx_of_rows(eager, torch.float64), dx_of_rows(eager, dtype)
    eager_error = largest_error(of_eager, exact)
    common = {
        "error": largest_error(dx_of_rows(own, dtype), exact),
        "eager_error": eager_error,
        "allowed_error": 3 * eager_error,
    }
    graphs = {name: in_turn([call], 1) for name, call in calls.items()}
    times = interleaved(graphs, device="cuda", rounds=_ROUNDS)
    memory = {name: peak_memory(call) for name, call in calls.items()}
    case = f"{op} ({m}, {k}, {n}) {dtype_text(dtype)}, forward and backward"
    for name, what, against in (
        (case, times, "torch.compile"),
        (f"{case} over eager", times, "eager"),
        (f"{case} peak memory, MiB", memory, "torch.compile"),
        (f"{case} peak memory over eager, MiB", memory, "eager"),
    ):
        yield make_row(name, what, against=against, target=targets.get(name), **common)


def rows(targets: dict[str, float]) -> Iterator[Row]:
    """Every case of the family, measured lazily. Peak memory is in MiB; the other rows are in
    microseconds.
    """
    cases = [(op, *size) for size in _SIZES for op in _OPS]
    cases += [(op, *size, torch.bfloat16) for op, sizes in _MORE.items() for size in sizes]
    for op, m, k, n, dtype in cases:
        torch._dynamo.reset()
        yield from _rows_of(op, m, k, n, dtype, targets)
