"""gated_linear_pair on a GPU, as CUDA graphs: two weights against gated_linear of the packed one,
and against eager, torch.compile and Liger's SwiGLU between two linear layers. gated_mlp against
gated_linear_pair and torch's linear layer, and against torch.compile. gated_activation against
eager, torch.compile and Liger's SwiGLU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweld._library import ops
from torchweld.tuning.timer import interleaved
from torchweld_bench.common import dtype_text, free, in_turn, installed, largest_error
from torchweld_bench.results import Row, make_row

_ROUNDS = 7
_CHECKED_ROWS = 64
# (rows, K, N) of Llama 3.2 1B, Llama 3.1 8B, Qwen 3 0.6B, Llama 2 7B with few rows, and of a
# generation step of Llama 3.2 1B.
_SIZES = (
    (16384, 2048, 8192),
    (8192, 4096, 14336),
    (16384, 1024, 3072),
    (512, 4096, 11008),
    (16, 2048, 8192),
)


def _eager(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return F.silu(F.linear(x, left)) * F.linear(x, right)


def _packed(x: Tensor, weight: Tensor) -> Tensor:
    return ops.gated_linear(x, weight, gate="swiglu")


def _liger() -> Callable[..., Tensor] | None:
    gate = installed("liger_kernel.ops.swiglu", "LigerSiLUMulFunction")
    if gate is None:
        return None
    return lambda x, left, right: gate.apply(F.linear(x, left), F.linear(x, right))


def _errors(x: Tensor, left: Tensor, right: Tensor) -> dict[str, float]:
    """The errors of dx for some rows."""

    def dx(function: Callable[..., Tensor], dtype: torch.dtype) -> Tensor:
        some = x[:_CHECKED_ROWS].detach().to(dtype).requires_grad_()
        weights = (t.detach().to(dtype) for t in (left, right))
        return torch.autograd.grad(function(some, *weights).sum(), some)[0]

    exact, of_eager = dx(_eager, torch.float64), dx(_eager, x.dtype)
    eager_error = largest_error(of_eager, exact)
    return {
        "error": largest_error(dx(ops.gated_linear_pair, x.dtype), exact),
        "eager_error": eager_error,
        "allowed_error": 3 * eager_error,
    }


def _case(case: str, operands: list[Tensor], targets: dict[str, float]) -> Iterator[Row]:
    x, left, right = operands
    packed = [x, torch.cat([left.detach(), right.detach()]).requires_grad_()]
    functions: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
        "ours": (ops.gated_linear_pair, operands),
        "gated_linear": (_packed, packed),
        "eager": (_eager, operands),
        "torch.compile": (torch.compile(_eager), operands),
    }
    liger = _liger()
    if liger is not None:
        functions["Liger"] = liger, operands
    dy = torch.randn(x.shape[0], left.shape[0], device="cuda", dtype=x.dtype)
    plain: dict[str, Callable[[], Any]] = {}
    trained: dict[str, Callable[[], Any]] = {}
    for name, (f, args) in functions.items():
        values = [t.detach() for t in args]
        plain[name] = lambda f=f, values=values: f(*values)
        trained[name] = lambda f=f, args=args: torch.autograd.grad(f(*args), args, dy)
    errors = _errors(*operands)
    for what, calls in (("forward", plain), ("forward and backward", trained)):
        graphs = {name: in_turn([call], 1) for name, call in calls.items()}
        times = interleaved(graphs, device="cuda", rounds=_ROUNDS)
        for peer in ("gated_linear", "torch.compile", "eager", "Liger"):
            if peer in times:
                name = f"{case}, {what} over {peer}"
                yield make_row(name, times, against=peer, target=targets.get(name), **errors)


def _two_ops(x: Tensor, left: Tensor, right: Tensor, down: Tensor) -> Tensor:
    return F.linear(ops.gated_linear_pair(x, left, right), down)


def _eager_mlp(x: Tensor, left: Tensor, right: Tensor, down: Tensor) -> Tensor:
    return F.linear(_eager(x, left, right), down)


def _gate(left: Tensor, right: Tensor) -> Tensor:
    return F.silu(left) * right


def _trained_case(
    case: str,
    functions: dict[str, Callable[..., Tensor]],
    eager: Callable[..., Tensor],
    operands: list[Tensor],
    targets: dict[str, float],
) -> Iterator[Row]:
    """Forward and backward of "ours" against every other function."""
    ours, dy = functions["ours"], torch.randn_like(operands[0])
    graphs: dict[str, Any] = {}
    for name, f in functions.items():
        graphs[name] = in_turn([lambda f=f: torch.autograd.grad(f(*operands), operands, dy)], 1)
    times = interleaved(graphs, device="cuda", rounds=_ROUNDS)

    def dx(function: Callable[..., Tensor], dtype: torch.dtype) -> Tensor:
        rows = [t[:_CHECKED_ROWS] if t.shape == dy.shape else t for t in operands]
        given = [t.detach().to(dtype) for t in rows]
        given[0].requires_grad_()
        return torch.autograd.grad(function(*given).sum(), given[0])[0]

    exact = dx(eager, torch.float64)
    eager_error = largest_error(dx(eager, dy.dtype), exact)
    errors = {
        "error": largest_error(dx(ours, dy.dtype), exact),
        "eager_error": eager_error,
        "allowed_error": 3 * eager_error,
    }
    for peer in functions:
        if peer != "ours":
            name = f"{case}, forward and backward over {peer}"
            yield make_row(name, times, against=peer, target=targets.get(name), **errors)


def rows(targets: dict[str, float]) -> Iterator[Row]:
    """Every case of the family, measured lazily."""
    for m, k, n in _SIZES:
        torch._dynamo.reset()
        free()
        torch.manual_seed(0)
        x = torch.randn(m, k, device="cuda").bfloat16().requires_grad_()
        weights = [
            (torch.randn(n, k, device="cuda") * k**-0.5).bfloat16().requires_grad_()
            for _ in range(2)
        ]
        case = f"gated_linear_pair ({m}, {k}, {n}) {dtype_text(x.dtype)}"
        yield from _case(case, [x, *weights], targets)
        down = (torch.randn(k, n, device="cuda") * n**-0.5).bfloat16().requires_grad_()
        case = case.replace("gated_linear_pair", "gated_mlp")
        functions = {
            "ours": ops.gated_mlp,
            "gated_linear_pair": _two_ops,
            "torch.compile": torch.compile(_eager_mlp),
        }
        yield from _trained_case(case, functions, _eager_mlp, [x, *weights, down], targets)
        branches = [torch.randn(m, n, device="cuda").bfloat16().requires_grad_() for _ in range(2)]
        functions = {
            "ours": ops.gated_activation,
            "eager": _gate,
            "torch.compile": torch.compile(_gate),
        }
        silu_mul = installed("liger_kernel.ops.swiglu", "LigerSiLUMulFunction")
        if silu_mul is not None:
            functions["Liger"] = silu_mul.apply
        case = f"gated_activation ({m}, {n}) {dtype_text(x.dtype)}"
        yield from _trained_case(case, functions, _gate, branches, targets)
