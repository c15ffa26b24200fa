"""gated_linear_pair on a GPU, as CUDA graphs: two weights against gated_linear of the packed one,
and against eager, torch.compile and Liger's SwiGLU between two linear layers. gated_mlp against
gated_linear_pair and torch's linear layer, and against torch.compile. gated_activation against
eager, torch.compile and Liger's SwiGLU.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweld._library import ops
from torchweld_bench.cases import Function, drawn, judged_dx, leaves, trained
from torchweld_bench.common import dtype_text, free, installed
from torchweld_bench.results import Row

# (rows, K, N) of Llama 3.2 1B, Llama 3.1 8B, Qwen 3 0.6B, Llama 2 7B with few rows, and of a
# generation step of Llama 3.2 1B.
_SIZES = (
    (16384, 2048, 8192),
    (8192, 4096, 14336),
    (16384, 1024, 3072),
    (512, 4096, 11008),
    (16, 2048, 8192),
)


def _gate(left: Tensor, right: Tensor) -> Tensor:
    return F.silu(left) * right


def _eager(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return F.silu(F.linear(x, left)) * F.linear(x, right)


def _packed(x: Tensor, weight: Tensor) -> Tensor:
    return ops.gated_linear(x, weight, gate="swiglu")


def _two_ops(x: Tensor, left: Tensor, right: Tensor, down: Tensor) -> Tensor:
    return F.linear(ops.gated_linear_pair(x, left, right), down)


def _eager_mlp(x: Tensor, left: Tensor, right: Tensor, down: Tensor) -> Tensor:
    return F.linear(_eager(x, left, right), down)


def _rows_of(m: int, k: int, n: int) -> Iterator[Row]:
    x, left, right, down = leaves(
        drawn(m, k), *(drawn(n, k, std=k**-0.5) for _ in range(2)), drawn(k, n, std=n**-0.5)
    )
    silu_mul = installed("liger_kernel.ops.swiglu", "LigerSiLUMulFunction")
    functions: dict[str, Function] = {
        "ours": ops.gated_linear_pair,
        "gated_linear": _packed,
        "torch.compile": torch.compile(_eager),
        "eager": _eager,
    }
    if silu_mul is not None:
        functions["Liger"] = lambda x, left, right: silu_mul.apply(
            F.linear(x, left), F.linear(x, right)
        )
    pair, packed = [x, left, right], leaves(x, torch.cat([left, right]))
    dtype = dtype_text(x.dtype)
    yield from trained(
        f"gated_linear_pair ({m}, {k}, {n}) {dtype}",
        functions,
        pair,
        judged_dx(ops.gated_linear_pair, _eager, pair),
        others={"gated_linear": packed},
        forward=functions,
        backward=functions,
    )
    functions = {
        "ours": ops.gated_mlp,
        "gated_linear_pair": _two_ops,
        "torch.compile": torch.compile(_eager_mlp),
    }
    errors = judged_dx(ops.gated_mlp, _eager_mlp, [*pair, down])
    case = f"gated_mlp ({m}, {k}, {n}) {dtype}"
    yield from trained(case, functions, [*pair, down], errors, backward=functions)
    functions = {
        "ours": ops.gated_activation,
        "eager": _gate,
        "torch.compile": torch.compile(_gate),
    }
    if silu_mul is not None:
        functions["Liger"] = silu_mul.apply
    branches = leaves(drawn(m, n), drawn(m, n))
    errors = judged_dx(ops.gated_activation, _gate, branches, cut=(0, 1))
    case = f"gated_activation ({m}, {n}) {dtype}"
    yield from trained(case, functions, branches, errors, backward=functions)


def rows() -> Iterator[Row]:
    """Measures every case of the family lazily."""
    for size in _SIZES:
        torch._dynamo.reset()
        free()
        torch.manual_seed(0)
        yield from _rows_of(*size)
