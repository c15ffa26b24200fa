"""RMSNorm and LayerNorm of rows, against a pass over memory with the same traffic.

A norm reads and writes one matrix, as a copy does; with a residual it reads and writes two. The
backward reads two matrices and writes one, as an addition does; with the sum's gradient it reads
three.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweld._library import ops
from torchweld.tuning.timer import interleaved
from torchweld_bench.common import dtype_text, in_turn, installed, judged, two_roundings
from torchweld_bench.results import Row, make_row

_SHAPES = ((16384, 4096), (16384, 2048), (4096, 8192), (1024, 4096), (8192, 768))
_CHECKED = 64  # the number of rows that are checked
_EPS = 1e-6

Call = Callable[[], Any]


def _randn(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def _llama(x: Tensor, weight: Tensor) -> Tensor:
    """LlamaRMSNorm of transformers."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _EPS)
    return weight * normed.to(x.dtype)


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, _EPS)


def _layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, _EPS)


def _peers() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """RMSNorms of packages that are installed, as functions of x and weight."""
    found: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}
    quack = installed("quack", "rmsnorm")
    if quack is not None:
        found["quack"] = lambda x, weight: quack(x, weight, eps=_EPS)
    liger = installed("liger_kernel.transformers.functional", "liger_rms_norm")
    if liger is not None:
        found["Liger"] = lambda x, weight: liger(x, weight, _EPS, in_place=False)
    return found


def _of(op: str) -> tuple[Callable[..., Tensor], Callable[..., Any], int]:
    """Eager's norm, ours, and the number of vectors."""
    if op.endswith("rms_norm"):
        return _rms, lambda *args: getattr(ops, op)(*args, eps=_EPS), 1
    return _layer, lambda *args: getattr(ops, op)(*args, eps=_EPS), 2


def _forward(
    op: str, shape: tuple[int, int], dtype: torch.dtype, targets: dict[str, float]
) -> Iterator[Row]:
    eager, ours, count = _of(op)
    x, residual, out, total = (_randn(dtype, *shape) for _ in range(4))
    vectors = [_randn(dtype, shape[1]) for _ in range(count)]
    adds = op.startswith("add_")

    def composite(x: Tensor, residual: Tensor, *vectors: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return eager(total, *vectors), total

    inputs = [x, residual, *vectors] if adds else [x, *vectors]
    reference_of = composite if adds else eager
    compiled = torch.compile(reference_of, dynamic=False)

    def copy() -> None:
        out.copy_(x)
        if adds:
            total.copy_(residual)

    calls: dict[str, Call] = {
        "ours": lambda: ours(*inputs),
        "copy": copy,
        "torch.compile": lambda: compiled(*inputs),
        "eager": lambda: reference_of(*inputs),
    }
    if op == "rms_norm":
        calls["HF eager"] = lambda: _llama(x, *vectors)
        for name, peer in _peers().items():
            calls[name] = lambda peer=peer: peer(x, *vectors)
    few = [t[:_CHECKED] if t.dim() == 2 else t for t in inputs]
    first = few[0] + few[1] if adds else few[0]
    reference = eager(first.double(), *(v.double() for v in vectors))
    got = ours(*few)[0] if adds else ours(*few)
    case = f"{op} {shape} {dtype_text(dtype)}"
    row = make_row(
        case,
        interleaved({n: in_turn([c], 1) for n, c in calls.items()}, device="cuda"),
        against="copy",
        target=targets.get(case),
        **judged(got, eager(first, *vectors), reference),
    )
    yield row
    yield row.over("torch.compile", targets)


@contextlib.contextmanager
def _capture_stream() -> Iterator[None]:
    """Runs its body on the stream that CUDA graphs are captured on."""
    graph = torch.cuda.graph
    graph.default_capture_stream = graph.default_capture_stream or torch.cuda.Stream()
    graph.default_capture_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(graph.default_capture_stream):
        yield
    torch.cuda.current_stream().wait_stream(graph.default_capture_stream)


def _backward(
    op: str, shape: tuple[int, int], dtype: torch.dtype, targets: dict[str, float]
) -> Iterator[Row]:
    eager, _, count = _of(op)
    dy, x, dsum, out = (_randn(dtype, *shape) for _ in range(4))
    vectors = [_randn(dtype, shape[1]) for _ in range(count)]
    adds = op.startswith("add_")
    statistics = getattr(ops, f"{op.removeprefix('add_')}_forward")(x, *vectors, eps=_EPS)[1:]
    mask = [True] * (1 + count)
    ours = getattr(ops, f"{op}_backward")
    last = [dsum] if adds else []

    def run(rows: int = shape[0]) -> tuple[Tensor, ...]:
        given = [t[:rows] for t in (dy, x)], [t[:rows] for t in (*statistics, *last)]
        return ours(*given[0], vectors[0], *given[1], output_mask=mask)

    def through(function: Callable[..., Tensor]) -> Call:
        leaves = [t.detach().requires_grad_() for t in (x, *vectors)]
        # run forward on the capture stream, because backward runs on the stream of forward
        with _capture_stream():
            y = function(*leaves)

        def backward() -> None:
            dx, *_ = torch.autograd.grad(y, leaves, dy, retain_graph=True)
            if adds:
                dx.add_(dsum)

        return backward

    def move() -> None:
        torch.add(dy, x, out=out)

    calls: dict[str, Call] = {
        "ours": run,
        "move": move,
        "torch.compile": through(torch.compile(eager, dynamic=False)),
        "eager": through(eager),
    }
    if op == "rms_norm":
        calls["HF eager"] = through(_llama)
        for name, peer in _peers().items():
            calls[name] = through(peer)
    if adds:  # the yardstick with a sum: adding two matrices into a third in one pass
        add_three = torch.compile(lambda a, b, c: a + b + c, dynamic=False)
        calls["move"] = lambda: add_three(dy, x, dsum)
    few = [t[:_CHECKED].detach().double().requires_grad_() for t in (x,)]
    y = eager(*few, *(v.double() for v in vectors))
    (reference,) = torch.autograd.grad(y, few, dy[:_CHECKED].double())
    part = [x[:_CHECKED].detach().requires_grad_()]
    (eager_dx,) = torch.autograd.grad(eager(*part, *vectors), part, dy[:_CHECKED])
    if adds:
        reference, eager_dx = reference + dsum[:_CHECKED].double(), eager_dx + dsum[:_CHECKED]
    case = f"{op}_backward {shape} {dtype_text(dtype)}"
    row = make_row(
        case,
        interleaved({n: in_turn([c], 1) for n, c in calls.items()}, device="cuda"),
        against="move",
        target=targets.get(case),
        **judged(
            run(_CHECKED)[0],
            eager_dx,
            reference,
            two_roundings(dtype, reference.abs().max().item()),
        ),
    )
    yield row
    yield row.over("torch.compile", targets)


def rows(targets: dict[str, float]) -> Iterator[Row]:
    """Measures every case of the family, one per iteration."""
    for op in ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm"):
        for shape in _SHAPES:
            yield from _forward(op, shape, torch.bfloat16, targets)
            yield from _backward(op, shape, torch.bfloat16, targets)
    for op in ("rms_norm", "layer_norm"):
        yield from _forward(op, _SHAPES[0], torch.float32, targets)
        yield from _backward(op, _SHAPES[0], torch.float32, targets)
