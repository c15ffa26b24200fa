"""Ops with one matmul on a GPU, against the matmul alone by cuBLAS and eager compositions. Products
are also compared with quack where it is installed (pip install quack-kernels).

The rows of a group that has a target for its geometric mean are followed by a row of that mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweld._library import ops
from torchweld.ops.gated_linear import GATES
from torchweld_bench.cases import CHECKED_ROWS, Call, Function, checked, drawn, measured
from torchweld_bench.common import dtype_text, installed, runs
from torchweld_bench.results import Row

_ROUNDS = 15


def _weight(n: int, k: int, dtype: torch.dtype) -> Tensor:
    return drawn(n, k, dtype=dtype, std=k**-0.5)


def _rows_of(
    case: str,
    ours: Call,
    bare: Call,
    eager: Function,
    x: Tensor,
    peers: dict[str, Call] | None = None,
) -> Iterator[Row]:
    """`eager` is the op on rows of x, and on fp64 rows the reference; `peers` are more columns."""
    errors = checked(ours()[:CHECKED_ROWS], eager, [x[:CHECKED_ROWS]], times=3, plus=0)
    calls = {"ours": ours, "cublas bare": bare, "eager": lambda: eager(x), **(peers or {})}
    return measured(case, calls, errors, "cublas bare", rounds=_ROUNDS)


def _linear(m: int, k: int, n: int, dtype: torch.dtype, tf32: str = "") -> Iterator[Row]:
    x, weight = drawn(m, k, dtype=dtype), _weight(n, k, dtype)
    peers: dict[str, Call] = {}
    quack = installed("quack.gemm_interface", "gemm")
    if quack is not None and dtype != torch.float32:
        call = partial(quack, x, weight.t(), tuned=False)
        if runs("quack", call):
            peers["quack"] = call
    return _rows_of(
        f"linear ({m}, {k}, {n}) {dtype_text(dtype)}{tf32}",
        lambda: ops.linear(x, weight),
        lambda: F.linear(x, weight),
        lambda rows: F.linear(rows, weight.to(rows.dtype)),
        x,
        peers,
    )


def _linear_gradients(m: int, k: int, n: int, dtype: torch.dtype) -> Iterator[Row]:
    """Measures the gradients of x and of the weight, a row each."""
    x, weight, dy = drawn(m, k, dtype=dtype), _weight(n, k, dtype), drawn(m, n, dtype=dtype)
    for i, (name, left, right) in enumerate((("dx", dy, weight), ("dweight", dy.t(), x))):
        mask = [i == 0, i == 1, False]
        yield from _rows_of(
            f"linear {name} ({m}, {k}, {n}) {dtype_text(dtype)}",
            lambda mask=mask, i=i: ops.linear_backward(dy, x, weight, output_mask=mask)[i],
            lambda left=left, right=right: left @ right,
            lambda rows, right=right: rows @ right.to(rows.dtype),
            left,
        )


def _norm_linears(m: int, k: int, n: int, dtype: torch.dtype) -> Iterator[Row]:
    """Measures LayerNorm, RMSNorm and folded LayerNorm before a linear layer and GELU."""
    x, weight = drawn(m, k, dtype=dtype), _weight(n, k, dtype)
    bias, scale, shift = (drawn(size, dtype=dtype) for size in (n, k, k))
    folded = ops.fold_layer_norm(weight, bias, scale, shift)
    act = {"activation": "gelu_tanh", "eps": 1e-5}

    def gelu(normed: Tensor) -> Tensor:
        w, b = weight.to(normed.dtype), bias.to(normed.dtype)
        return F.gelu(F.linear(normed, w, b), approximate="tanh")

    def eager(rows: Tensor) -> Tensor:
        return gelu(F.layer_norm(rows, (k,), scale.to(rows.dtype), shift.to(rows.dtype)))

    def eager_rms(rows: Tensor) -> Tensor:
        return gelu(F.rms_norm(rows, (k,), scale.to(rows.dtype), 1e-5))

    for op, args, formula in (
        ("layer_norm_linear", (weight, bias, scale, shift), eager),
        ("rms_norm_linear", (weight, bias, scale), eager_rms),
        ("folded_layer_norm_linear", folded, eager),
    ):
        case = f"{op} ({m}, {k}, {n}) {dtype_text(dtype)} gelu_tanh"
        ours = partial(getattr(ops, op), x, *args, **act)
        yield from _rows_of(case, ours, lambda: F.linear(x, weight), formula, x)


def _gated_linears(
    m: int, k: int, n: int, dtype: torch.dtype, gates: Iterable[str] = GATES, tf32: str = ""
) -> Iterator[Row]:
    x, weight, bias = drawn(m, k, dtype=dtype), _weight(2 * n, k, dtype), drawn(2 * n, dtype=dtype)
    for gate in gates:

        def eager(rows: Tensor, gate: str = gate) -> Tensor:
            left, right = F.linear(rows, weight.to(rows.dtype), bias.to(rows.dtype)).chunk(2, -1)
            return GATES[gate](left, right)

        case = f"gated_linear ({m}, {k}, {n}) {dtype_text(dtype)} {gate}{tf32}"
        ours = partial(ops.gated_linear, x, weight, bias, gate=gate)
        yield from _rows_of(case, ours, lambda: F.linear(x, weight), eager, x)


def _bmm(case: str, a: Tensor, b: Tensor) -> Iterator[Row]:
    errors = checked(ops.bmm(a, b)[:1], torch.bmm, [a[:1], b[:1]], times=3, plus=0)
    calls = {"ours": lambda: ops.bmm(a, b), "cublas": lambda: torch.bmm(a, b)}
    return measured(f"bmm {case}", calls, errors, "cublas", rounds=_ROUNDS)


# Batch * heads, sequence length, head dim.
_HEADS = ((512, 128, 64), (256, 256, 64), (96, 1024, 64), (128, 512, 128), (32, 2048, 128),
          (16, 1024, 256))  # fmt: skip


def _bmms() -> Iterator[Row]:
    """Measures both matmuls of attention, and every layout of a plain one."""
    for batch, seqlen, dim in _HEADS:
        q, k, v = (drawn(batch, seqlen, dim) for _ in range(3))
        p = torch.rand(batch, seqlen, seqlen, device="cuda").bfloat16()
        yield from _bmm(f"({batch}, {seqlen}, {seqlen}, {dim}) bfloat16", q, k.mT)
        yield from _bmm(f"({batch}, {seqlen}, {dim}, {seqlen}) bfloat16", p, v)


def _bmm_layouts() -> Iterator[Row]:
    a, b = (drawn(64, 1024, 1024) for _ in range(2))
    for name, left, right in (("nn", a, b), ("nt", a, b.mT), ("tn", a.mT, b), ("tt", a.mT, b.mT)):
        yield from _bmm(f"(64, 1024, 1024, 1024) bfloat16 {name}", left, right)


def _with_mean(case: str, rows: Iterable[Row]) -> Iterator[Row]:
    """Adds the geometric mean to rows; it is wrong if one of the rows is."""
    every = []
    for row in rows:
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
        target=None,
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


def _few_rows() -> Iterator[Row]:
    for k, n in ((4096, 4096), (4096, 14336), (14336, 4096)):
        for m in (1, 8, 16, 64):
            yield from _linear(m, k, n, torch.bfloat16)


def rows() -> Iterator[Row]:
    """Measures every case of the family, one per iteration."""
    half, brain, single = torch.float16, torch.bfloat16, torch.float32
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = False
        for dtype in (brain, half):
            large = (row for size in _LARGE for row in _linear(*size, dtype))
            yield from _with_mean(f"linear {dtype_text(dtype)}, geometric mean", large)
        for size in _GPT2:
            yield from _linear(*size, brain)
        yield from _few_rows()
        for size in _SINGLE:
            yield from _linear(*size, single)
        gradients = (row for size in _TRAINED for row in _linear_gradients(*size, brain))
        yield from _with_mean("linear dx and dweight bfloat16, geometric mean", gradients)
        yield from _norm_linears(512, 1024, 4096, half)
        for size in _MLP:
            yield from _norm_linears(*size, brain)
        for size in _GATED:
            yield from _gated_linears(*size, brain)
        yield from _gated_linears(1024, 2048, 2048, single, ("sigmoid_tanh",))
        yield from _with_mean("bmm bfloat16, geometric mean", _bmms())
        yield from _bmm_layouts()
        torch.backends.cuda.matmul.allow_tf32 = True
        for size in _SINGLE:
            yield from _linear(*size, single, tf32=" tf32")
        yield from _gated_linears(1024, 2048, 2048, single, ("sigmoid_tanh",), tf32=" tf32")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
