"""The ops around one matmul on a GPU, against the bare product by cuBLAS and eager compositions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweld._library import ops
from torchweld.bench.common import dtype_text, largest_error
from torchweld.bench.results import Row, make_row
from torchweld.bench.timer import interleaved

_CHECKED_ROWS = 64
_ROUNDS = 15


def _matrix(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, columns, device="cuda").to(dtype)


def _weight(n: int, k: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(n, k, device="cuda") * k**-0.5).to(dtype)


def _row(
    case: str,
    ours: Callable[[], Tensor],
    bare: Callable[[], object],
    eager: Callable[[Tensor], Tensor],
    x: Tensor,
    targets: dict[str, float],
    timed: Callable[[], object] | None = None,
) -> Row:
    """`eager` is the op on rows of x, with fp64 rows the reference. `timed` is what is timed as
    eager where that is more.
    """
    part = x[:_CHECKED_ROWS]
    reference, out = eager(part.double()), eager(part)
    eager_error = largest_error(out, reference)
    return make_row(
        case,
        interleaved(
            {"ours": ours, "cublas bare": bare, "eager": timed or (lambda: eager(x))},
            device="cuda",
            rounds=_ROUNDS,
        ),
        against="cublas bare",
        target=targets.get(case),
        error=largest_error(ours()[:_CHECKED_ROWS], reference),
        eager_error=eager_error,
        allowed_error=3 * eager_error,
    )


def _linear(m: int, k: int, n: int, dtype: torch.dtype, targets: dict[str, float]) -> Row:
    x, weight = _matrix(m, k, dtype), _weight(n, k, dtype)
    return _row(
        f"linear ({m}, {k}, {n}) {dtype_text(dtype)}",
        lambda: ops.linear(x, weight),
        lambda: F.linear(x, weight),
        lambda rows: F.linear(rows, weight.to(rows.dtype)),
        x,
        targets,
    )


def _linear_backward(m: int, k: int, n: int, dtype: torch.dtype, targets: dict[str, float]) -> Row:
    x, weight, dy = _matrix(m, k, dtype), _weight(n, k, dtype), _matrix(m, n, dtype)

    def bare() -> tuple[Tensor, Tensor]:
        return dy @ weight, dy.t() @ x

    return _row(
        f"linear_backward ({m}, {k}, {n}) {dtype_text(dtype)}",
        lambda: ops.linear_backward(dy, x, weight, output_mask=[True, True, False])[0],
        bare,
        lambda rows: rows @ weight.to(rows.dtype),
        dy,
        targets,
        timed=bare,
    )


def _layer_norm_linear(
    m: int, k: int, n: int, dtype: torch.dtype, targets: dict[str, float]
) -> Row:
    x, weight, bias = _matrix(m, k, dtype), _weight(n, k, dtype), _matrix(1, n, dtype)[0]
    ln_weight, ln_bias = _matrix(1, k, dtype)[0], _matrix(1, k, dtype)[0]

    def eager(rows: Tensor) -> Tensor:
        w, b, g, h = (t.to(rows.dtype) for t in (weight, bias, ln_weight, ln_bias))
        return F.gelu(F.linear(F.layer_norm(rows, (k,), g, h), w, b), approximate="tanh")

    return _row(
        f"layer_norm_linear ({m}, {k}, {n}) {dtype_text(dtype)} gelu_tanh",
        lambda: ops.layer_norm_linear(
            x, weight, bias, ln_weight, ln_bias, activation="gelu_tanh", eps=1e-5
        ),
        lambda: F.linear(x, weight),
        eager,
        x,
        targets,
    )


def _gated_linear(m: int, k: int, n: int, dtype: torch.dtype, targets: dict[str, float]) -> Row:
    x, weight, bias = _matrix(m, k, dtype), _weight(2 * n, k, dtype), _matrix(1, 2 * n, dtype)[0]

    def eager(rows: Tensor) -> Tensor:
        left, right = F.linear(rows, weight.to(rows.dtype), bias.to(rows.dtype)).chunk(2, -1)
        return torch.sigmoid(left) * torch.tanh(right)

    return _row(
        f"gated_linear ({m}, {k}, {n}) {dtype_text(dtype)} sigmoid_tanh",
        lambda: ops.gated_linear(x, weight, bias, gate="sigmoid_tanh"),
        lambda: F.linear(x, weight),
        eager,
        x,
        targets,
    )


def _bmm(batch: int, m: int, n: int, k: int, dtype: torch.dtype, targets: dict[str, float]) -> Row:
    a = torch.randn(batch, m, k, device="cuda").to(dtype)
    b = torch.randn(batch, k, n, device="cuda").to(dtype)
    case = f"bmm ({batch}, {m}, {n}, {k}) {dtype_text(dtype)}"
    reference, out = a[0].double() @ b[0].double(), torch.bmm(a[:1], b[:1])[0]
    eager_error = largest_error(out, reference)
    return make_row(
        case,
        interleaved(
            {"ours": lambda: ops.bmm(a, b), "cublas": lambda: torch.bmm(a, b)},
            device="cuda",
            rounds=_ROUNDS,
        ),
        against="cublas",
        target=targets.get(case),
        error=largest_error(ops.bmm(a, b)[0], reference),
        eager_error=eager_error,
        allowed_error=3 * eager_error,
    )


def rows(targets: dict[str, float]) -> Iterator[Row]:
    """Every case of the family, measured when it is asked for."""
    half, brain, single = torch.float16, torch.bfloat16, torch.float32
    mlp = [(8192, 768, 3072), (4096, 1600, 6400), (8192, 4096, 16384)]
    gated = [(8192, 768, 3072), (8192, 4096, 11008), (512, 4096, 11008)]
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = False
        yield _linear(4096, 4096, 4096, brain, targets)
        yield _linear(8192, 768, 3072, brain, targets)
        yield _linear(8192, 3072, 768, brain, targets)
        yield _linear(16, 4096, 4096, brain, targets)
        yield _linear(4096, 4096, 4096, single, targets)
        yield _linear_backward(8192, 768, 3072, brain, targets)
        yield _layer_norm_linear(512, 1024, 4096, half, targets)
        for m, k, n in mlp:
            yield _layer_norm_linear(m, k, n, brain, targets)
        for m, k, n in gated:
            yield _gated_linear(m, k, n, brain, targets)
        yield _gated_linear(1024, 2048, 2048, single, targets)
        for batch, m, n, k in ((64, 1024, 1024, 1024), (96, 1024, 1024, 64), (96, 1024, 64, 1024)):
            yield _bmm(batch, m, n, k, brain, targets)
        torch.backends.cuda.matmul.allow_tf32 = True
        tf32 = _gated_linear(1024, 2048, 2048, single, {})
        tf32.case += " tf32"
        tf32.target = targets.get(tf32.case)
        yield tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
