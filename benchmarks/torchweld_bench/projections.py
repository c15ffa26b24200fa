"""rms_norm_linears on a GPU, as CUDA graphs: query, key and value of one normalised row, against
one product with the packed weight (alone and behind rms_norm), and against eager and torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweld._library import ops
from torchweld.tuning.timer import interleaved
from torchweld_bench.common import dtype_text, free, in_turn, largest_error
from torchweld_bench.results import Row, make_row

_ROUNDS = 7
_CHECKED_ROWS = 64
_EPS = 1e-6
# Rows, K, N of each weight: Llama 3.2 1B, Llama 3.1 8B, Qwen 3 0.6B, and a step of generation of
# the first.
_SIZES: Sequence[tuple[int, int, tuple[int, ...]]] = (
    (16384, 2048, (2048, 512, 512)),
    (8192, 4096, (4096, 1024, 1024)),
    (16384, 1024, (2048, 1024, 1024)),
    (16, 2048, (2048, 512, 512)),
)


def _eager(x: Tensor, scale: Tensor, *weights: Tensor) -> list[Tensor]:
    normed = F.rms_norm(x, scale.shape, scale, _EPS)
    return [F.linear(normed, weight) for weight in weights]


def _ours(x: Tensor, scale: Tensor, *weights: Tensor) -> list[Tensor]:
    return ops.rms_norm_linears(x, list(weights), [], scale, eps=_EPS)


def _packed(x: Tensor, scale: Tensor, weight: Tensor) -> list[Tensor]:
    return [F.linear(ops.rms_norm(x, scale, eps=_EPS), weight)]


def _product(x: Tensor, scale: Tensor, weight: Tensor) -> list[Tensor]:
    return [F.linear(x, weight)]


def _errors(operands: list[Tensor]) -> dict[str, float]:
    """The errors of dx for some rows."""

    def dx(function: Callable[..., list[Tensor]], dtype: torch.dtype) -> Tensor:
        x, *others = (t.detach().to(dtype) for t in operands)
        some = x[:_CHECKED_ROWS].requires_grad_()
        return torch.autograd.grad(torch.cat(function(some, *others), -1).sum(), some)[0]

    exact, of_eager = dx(_eager, torch.float64), dx(_eager, operands[0].dtype)
    eager_error = largest_error(of_eager, exact)
    return {
        "error": largest_error(dx(_ours, operands[0].dtype), exact),
        "eager_error": eager_error,
        "allowed_error": 3 * eager_error,
    }


def _case(case: str, operands: list[Tensor], targets: dict[str, float]) -> Iterator[Row]:
    x, scale, *weights = operands
    packed = [x, scale, torch.cat([w.detach() for w in weights]).requires_grad_()]
    functions: dict[str, tuple[Callable[..., list[Tensor]], list[Tensor]]] = {
        "ours": (_ours, operands),
        "the bare product": (_product, packed),
        "norm and product": (_packed, packed),
        "torch.compile": (torch.compile(_eager), operands),
        "eager": (_eager, operands),
    }
    dys = [torch.randn(x.shape[0], w.shape[0], device="cuda", dtype=x.dtype) for w in weights]
    whole = [torch.cat(dys, -1)]
    plain: dict[str, Callable[[], Any]] = {}
    trained: dict[str, Callable[[], Any]] = {}
    for name, (f, args) in functions.items():
        values = [t.detach() for t in args]
        plain[name] = lambda f=f, values=values: f(*values)
        if name == "the bare product":
            continue
        grads = whole if args is packed else dys
        trained[name] = lambda f=f, args=args, grads=grads: torch.autograd.grad(
            f(*args), args, grads
        )
    errors = _errors(operands)
    for what, calls in (("forward", plain), ("forward and backward", trained)):
        graphs = {name: in_turn([call], 1) for name, call in calls.items()}
        times = interleaved(graphs, device="cuda", rounds=_ROUNDS)
        for peer in functions:
            if peer != "ours" and peer in times:
                name = f"{case}, {what} over {peer}"
                yield make_row(name, times, against=peer, target=targets.get(name), **errors)


def rows(targets: dict[str, float]) -> Iterator[Row]:
    """Every case of the family, measured lazily."""
    for m, k, sizes in _SIZES:
        torch._dynamo.reset()
        free()
        torch.manual_seed(0)
        x = torch.randn(m, k, device="cuda").bfloat16().requires_grad_()
        scale = torch.randn(k, device="cuda").bfloat16().requires_grad_()
        weights = [
            (torch.randn(n, k, device="cuda") * k**-0.5).bfloat16().requires_grad_() for n in sizes
        ]
        columns = " + ".join(map(str, sizes))
        case = f"rms_norm_linears ({m}, {k}, {columns}) {dtype_text(x.dtype)}"
        yield from _case(case, [x, scale, *weights], targets)
