"""Ops with one matmul on a GPU, against the matmul alone by cuBLAS and eager compositions. Products
are also compared with quack where it is installed (pip install quack-kernels).

The rows of a group that has a target for its geometric mean are followed by a row of that mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweld._library import ops
from torchweld.ops.gated_linear import GATES
from torchweld.tuning.timer import interleaved
from torchweld_bench.common import dtype_text, installed, largest_error, runs
from torchweld_bench.results import Row, make_row

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
    peers: dict[str, Callable[[], object]] | None = None,
) -> Row:
    """`eager` is the op on rows of x, with fp64 rows the reference. `peers` are further columns."""
    part = x[:_CHECKED_ROWS]
    reference, out = eager(part.double()), eager(part)
    eager_error = largest_error(out, reference)
    return make_row(
        case,
        interleaved(
            {
                "ours": ours,
                "cublas bare": bare,
                "eager": lambda: eager(x),
                **(peers or {}),
            },
            device="cuda",
            rounds=_ROUNDS,
        ),
        against="cublas bare",
        target=targets.get(case),
        error=largest_error(ours()[:_CHECKED_ROWS], reference),
        eager_error=eager_error,
        allowed_error=3 * eager_error,
    )


def _linear(m: int, k: int, n: int, dtype: torch.dtype, targets: dict[str, float], tf32="") -> Row:
    x, weight = _matrix(m, k, dtype), _weight(n, k, dtype)
    peers = {}
    quack = installed("quack.gemm_interface", "gemm")
    if quack is not None and dtype != torch.float32:

        def gemm() -> Tensor:
            return quack(x, weight.t(), tuned=False)

        if runs("quack", gemm):
            peers["quack"] = gemm
    return _row(
        f"linear ({m}, {k}, {n}) {dtype_text(dtype)}{tf32}",
        lambda: ops.linear(x, weight),
        lambda: F.linear(x, weight),
        lambda rows: F.linear(rows, weight.to(rows.dtype)),
        x,
        targets,
        peers=peers,
    )


def _linear_gradients(
    m: int, k: int, n: int, dtype: torch.dtype, targets: dict[str, float]
) -> Iterator[Row]:
    """The gradients of x and of the weight, a row each."""
    x, weight, dy = _matrix(m, k, dtype), _weight(n, k, dtype), _matrix(m, n, dtype)
    for i, (name, left, right) in enumerate((("dx", dy, weight), ("dweight", dy.t(), x))):
        mask = [i == 0, i == 1, False]
        yield _row(
            f"linear {name} ({m}, {k}, {n}) {dtype_text(dtype)}",
            lambda mask=mask, i=i: ops.linear_backward(dy, x, weight, output_mask=mask)[i],
            lambda left=left, right=right: left @ right,
            lambda rows, right=right: rows @ right.to(rows.dtype),
            left,
            targets,
        )


def _norm_linears(
    m: int, k: int, n: int, dtype: torch.dtype, targets: dict[str, float]
) -> Iterator[Row]:
    """LayerNorm, RMSNorm and the folded LayerNorm, then a linear layer and GELU."""
    x, weight, bias = _matrix(m, k, dtype), _weight(n, k, dtype), _matrix(1, n, dtype)[0]
    scale, shift = _matrix(1, k, dtype)[0], _matrix(1, k, dtype)[0]
    folded = ops.fold_layer_norm(weight, bias, scale, shift)
    act = {"activation": "gelu_tanh", "eps": 1e-5}

    def eager(rows: Tensor) -> Tensor:
        w, b, g, h = (t.to(rows.dtype) for t in (weight, bias, scale, shift))
        return F.gelu(F.linear(F.layer_norm(rows, (k,), g, h), w, b), approximate="tanh")

    def eager_rms(rows: Tensor) -> Tensor:
        w, b, g = (t.to(rows.dtype) for t in (weight, bias, scale))
        return F.gelu(F.linear(F.rms_norm(rows, (k,), g, 1e-5), w, b), approximate="tanh")

    calls: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]] = {
        "layer_norm_linear": (
            lambda: ops.layer_norm_linear(x, weight, bias, scale, shift, **act),
            eager,
        ),
        "rms_norm_linear": (lambda: ops.rms_norm_linear(x, weight, bias, scale, **act), eager_rms),
        "folded_layer_norm_linear": (
            lambda: ops.folded_layer_norm_linear(x, *folded, **act),
            eager,
        ),
    }
    for op, (ours, reference) in calls.items():
        yield _row(
            f"{op} ({m}, {k}, {n}) {dtype_text(dtype)} gelu_tanh",
            ours,
            lambda: F.linear(x, weight),
            reference,
            x,
            targets,
        )


def _gated_linears(
    m: int,
    k: int,
    n: int,
    dtype: torch.dtype,
    targets: dict[str, float],
    gates: Iterable[str] = GATES,
    tf32: str = "",
) -> Iterator[Row]:
    x, weight, bias = _matrix(m, k, dtype), _weight(2 * n, k, dtype), _matrix(1, 2 * n, dtype)[0]
    for gate in gates:

        def eager(rows: Tensor, gate: str = gate) -> Tensor:
            left, right = F.linear(rows, weight.to(rows.dtype), bias.to(rows.dtype)).chunk(2, -1)
            return GATES[gate](left, right)

        yield _row(
            f"gated_linear ({m}, {k}, {n}) {dtype_text(dtype)} {gate}{tf32}",
            lambda gate=gate: ops.gated_linear(x, weight, bias, gate=gate),
            lambda: F.linear(x, weight),
            eager,
            x,
            targets,
        )


def _bmm(case: str, a: Tensor, b: Tensor, targets: dict[str, float]) -> Row:
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


# Batch * heads, sequence length, head dim.
_HEADS = ((512, 128, 64), (256, 256, 64), (96, 1024, 64), (128, 512, 128), (32, 2048, 128),
          (16, 1024, 256))  # fmt: skip


def _bmms(targets: dict[str, float]) -> Iterator[Row]:
    """The two matmuls of attention, and every layout of a plain one."""
    brain = torch.bfloat16
    for batch, seqlen, dim in _HEADS:
        q, k, v = (torch.randn(batch, seqlen, dim, device="cuda").to(brain) for _ in range(3))
        p = torch.rand(batch, seqlen, seqlen, device="cuda").to(brain)
        yield _bmm(f"bmm ({batch}, {seqlen}, {seqlen}, {dim}) bfloat16", q, k.mT, targets)
        yield _bmm(f"bmm ({batch}, {seqlen}, {dim}, {seqlen}) bfloat16", p, v, targets)


def _bmm_layouts(targets: dict[str, float]) -> Iterator[Row]:
    a = torch.randn(64, 1024, 1024, device="cuda").to(torch.bfloat16)
    b = torch.randn(64, 1024, 1024, device="cuda").to(torch.bfloat16)
    for name, left, right in (
        ("nn", a, b),
        ("nt", a, b.mT),
        ("tn", a.mT, b),
        ("tt", a.mT, b.mT),
    ):
        yield _bmm(f"bmm (64, 1024, 1024, 1024) bfloat16 {name}", left, right, targets)


def _with_mean(case: str, measured: Iterable[Row], targets: dict[str, float]) -> Iterator[Row]:
    """The rows and their geometric mean, which is wrong if one of them is."""
    every = []
    for row in measured:
        every.append(row)
        yield row

    def mean(values: Iterable[float]) -> float:
        logs = [math.log(value) for value in values]
        return math.exp(sum(logs) / len(logs))

    against = every[0].against
    right = all(row.ratio is not None for row in every)
    ours = round(mean(row.ours_us for row in every), 2)
    peer = round(mean(row.peers_us[against] for row in every), 2)
    yield Row(
        case=case,
        ours_us=ours,
        spread_us=(ours, ours),
        peers_us={against: peer},
        against=against,
        ratio=round(mean(row.ratio for row in every if row.ratio), 3) if right else None,
        target=targets.get(case),
        error=max(row.error for row in every),
        eager_error=max(row.eager_error for row in every),
    )


_LARGE = ((4096, 4096, 4096), (8192, 8192, 8192), (4096, 14336, 4096), (8192, 1024, 8192),
          (2048, 3072, 768), (16384, 4096, 4096))  # fmt: skip
_GPT2 = ((8192, 768, 3072), (8192, 3072, 768))
_SINGLE = ((1024, 4096, 2048), (4096, 4096, 4096), (8192, 1024, 4096))
_MLP = ((8192, 768, 3072), (4096, 1600, 6400), (8192, 4096, 16384))
_TRAINED = (*_MLP, (8192, 2048, 8192), (16384, 2048, 2048), (16384, 2048, 8192),
            (4096, 4096, 4096))  # fmt: skip
_GATED = ((8192, 768, 3072), (8192, 4096, 11008), (512, 4096, 11008))


def _few_rows(targets: dict[str, float]) -> Iterator[Row]:
    for k, n in ((4096, 4096), (4096, 14336), (14336, 4096)):
        for m in (1, 8, 16, 64):
            yield _linear(m, k, n, torch.bfloat16, targets)


def rows(targets: dict[str, float]) -> Iterator[Row]:
    """Measures every case of the family, one per iteration."""
    half, brain, single = torch.float16, torch.bfloat16, torch.float32
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = False
        for dtype in (brain, half):
            large = (_linear(*size, dtype, targets) for size in _LARGE)
            yield from _with_mean(f"linear {dtype_text(dtype)}, geometric mean", large, targets)
        for size in _GPT2:
            yield _linear(*size, brain, targets)
        yield from _few_rows(targets)
        for size in _SINGLE:
            yield _linear(*size, single, targets)
        gradients = (row for size in _TRAINED for row in _linear_gradients(*size, brain, targets))
        yield from _with_mean("linear dx and dweight bfloat16, geometric mean", gradients, targets)
        yield from _norm_linears(512, 1024, 4096, half, targets)
        for size in _MLP:
            yield from _norm_linears(*size, brain, targets)
        for size in _GATED:
            yield from _gated_linears(*size, brain, targets)
        yield from _gated_linears(1024, 2048, 2048, single, targets, ("sigmoid_tanh",))
        yield from _with_mean("bmm bfloat16, geometric mean", _bmms(targets), targets)
        yield from _bmm_layouts(targets)
        torch.backends.cuda.matmul.allow_tf32 = True
        for size in _SINGLE:
            yield _linear(*size, single, targets, tf32=" tf32")
        yield from _gated_linears(
            1024, 2048, 2048, single, targets, ("sigmoid_tanh",), tf32=" tf32"
        )
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
