"""RMSNorm and LayerNorm of rows, against a pass over memory with the same traffic.

A norm reads and writes one matrix, as a copy does; with a residual it reads and writes two. The
backward reads two matrices and writes one, as an addition does; with the sum's gradient it reads
three.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweld._library import ops
from torchweld_bench.cases import (
    CHECKED_ROWS,
    Call,
    Function,
    captured,
    checked,
    drawn,
    gradients,
    judged,
    leaves,
    measured,
)
from torchweld_bench.common import dtype_text, installed
from torchweld_bench.results import Row

_SHAPES = ((16384, 4096), (16384, 2048), (4096, 8192), (1024, 4096), (8192, 768))
_EPS = 1e-6


def _llama(x: Tensor, weight: Tensor) -> Tensor:
    """LlamaRMSNorm of transformers."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _EPS)
    return weight * normed.to(x.dtype)


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, _EPS)


def _layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, _EPS)


def _peers() -> dict[str, Function]:
    """RMSNorms of Hugging Face and of packages that are installed, as functions of x and weight."""
    found: dict[str, Function] = {"HF eager": _llama}
    quack = installed("quack", "rmsnorm")
    if quack is not None:
        found["quack"] = lambda x, weight: quack(x, weight, eps=_EPS)
    liger = installed("liger_kernel.transformers.functional", "liger_rms_norm")
    if liger is not None:
        found["Liger"] = lambda x, weight: liger(x, weight, _EPS, in_place=False)
    return found


def _of(op: str) -> tuple[Callable[..., Tensor], int]:
    """Eager's norm, and the number of vectors."""
    return (_rms, 1) if op.endswith("rms_norm") else (_layer, 2)


def _forward(op: str, shape: tuple[int, int], dtype: torch.dtype) -> Iterator[Row]:
    eager, count = _of(op)
    x, residual, out, total = (drawn(*shape, dtype=dtype) for _ in range(4))
    vectors = [drawn(shape[1], dtype=dtype) for _ in range(count)]
    adds = op.startswith("add_")

    def composite(x: Tensor, residual: Tensor, *vectors: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return eager(total, *vectors), total

    def copy() -> None:
        out.copy_(x)
        if adds:
            total.copy_(residual)

    ours, formula = partial(getattr(ops, op), eps=_EPS), composite if adds else eager
    inputs = [x, residual, *vectors] if adds else [x, *vectors]
    calls: dict[str, Call] = {
        "ours": partial(ours, *inputs),
        "copy": copy,
        "torch.compile": partial(torch.compile(formula, dynamic=False), *inputs),
        "eager": partial(formula, *inputs),
    }
    if op == "rms_norm":
        calls |= {name: partial(f, x, *vectors) for name, f in _peers().items()}
    few = [t[:CHECKED_ROWS] if t.dim() == 2 else t for t in inputs]
    got = ours(*few)[0] if adds else ours(*few)
    first = few[0] + few[1] if adds else few[0]
    errors = checked(got, eager, [first, *vectors])
    case = f"{op} {shape} {dtype_text(dtype)}"
    return measured(case, captured(calls), errors, "copy", ["torch.compile"])


@contextlib.contextmanager
def _capture_stream() -> Iterator[None]:
    """Runs its body on the stream that CUDA graphs are captured on."""
    graph = torch.cuda.graph
    graph.default_capture_stream = graph.default_capture_stream or torch.cuda.Stream()
    graph.default_capture_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(graph.default_capture_stream):
        yield
    torch.cuda.current_stream().wait_stream(graph.default_capture_stream)


def _backward(op: str, shape: tuple[int, int], dtype: torch.dtype) -> Iterator[Row]:
    eager, count = _of(op)
    dy, x, dsum, out = (drawn(*shape, dtype=dtype) for _ in range(4))
    vectors = [drawn(shape[1], dtype=dtype) for _ in range(count)]
    adds = op.startswith("add_")
    statistics = getattr(ops, f"{op.removeprefix('add_')}_forward")(x, *vectors, eps=_EPS)[1:]
    ours = partial(getattr(ops, f"{op}_backward"), output_mask=[True] * (1 + count))

    def run(rows: int = shape[0]) -> tuple[Tensor, ...]:
        last = [t[:rows] for t in (*statistics, *[dsum] * adds)]
        return ours(dy[:rows], x[:rows], vectors[0], *last)

    def through(function: Function) -> Call:
        given = leaves(x, *vectors)
        # run forward on the capture stream, because backward runs on the stream of forward
        with _capture_stream():
            y = function(*given)

        def backward() -> None:
            dx, *_ = torch.autograd.grad(y, given, dy, retain_graph=True)
            if adds:
                dx.add_(dsum)

        return backward

    calls: dict[str, Call] = {
        "ours": run,
        "move": lambda: torch.add(dy, x, out=out),
        "torch.compile": through(torch.compile(eager, dynamic=False)),
        "eager": through(eager),
    }
    if op == "rms_norm":
        calls |= {name: through(f) for name, f in _peers().items()}
    if adds:  # with a sum, "move" reads three matrices and writes one
        add_three = torch.compile(lambda a, b, c: a + b + c, dynamic=False)
        calls["move"] = lambda: add_three(dy, x, dsum)

    def dx(dtype: torch.dtype) -> Tensor:
        few, dy_few, dsum_few = (t[:CHECKED_ROWS].to(dtype) for t in (x, dy, dsum))
        given = leaves(few, *(v.to(dtype) for v in vectors))
        found = gradients(eager, given, dy_few)()[0]
        return found + dsum_few if adds else found

    errors = judged(run(CHECKED_ROWS)[0], dx(dtype), dx(torch.float64))
    case = f"{op}_backward {shape} {dtype_text(dtype)}"
    return measured(case, captured(calls), errors, "move", ["torch.compile"])


def rows() -> Iterator[Row]:
    """Measures every case of the family, one per iteration."""
    for op in ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm"):
        for shape in _SHAPES:
            yield from _forward(op, shape, torch.bfloat16)
            yield from _backward(op, shape, torch.bfloat16)
    for op in ("rms_norm", "layer_norm"):
        yield from _forward(op, _SHAPES[0], torch.float32)
        yield from _backward(op, _SHAPES[0], torch.float32)
