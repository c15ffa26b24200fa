"""rms_norm_linears on a GPU, as CUDA graphs: query, key and value of one normalised row, against
one product with the packed weight (alone and behind rms_norm), and against eager and torch.compile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweld._library import ops
from torchweld_bench.cases import Function, drawn, judged_dx, leaves, trained
from torchweld_bench.common import dtype_text, free
from torchweld_bench.results import Row

_EPS = 1e-6
# Rows, K, N of each weight: Llama 3.2 1B, Llama 3.1 8B, Qwen 3 0.6B, and a generation step of
# Llama 3.2 1B.
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


def rows() -> Iterator[Row]:
    """Measures every case of the family lazily."""
    for m, k, sizes in _SIZES:
        torch._dynamo.reset()
        free()
        torch.manual_seed(0)
        x, scale, *weights = leaves(
            drawn(m, k), drawn(k), *(drawn(n, k, std=k**-0.5) for n in sizes)
        )
        packed = leaves(x, scale, torch.cat(weights))
        functions: dict[str, Function] = {
            "ours": _ours,
            "the bare product": _product,
            "norm and product": _packed,
            "torch.compile": torch.compile(_eager),
            "eager": _eager,
        }
        columns = " + ".join(map(str, sizes))
        yield from trained(
            f"rms_norm_linears ({m}, {k}, {columns}) {dtype_text(x.dtype)}",
            functions,
            [x, scale, *weights],
            judged_dx(_ours, _eager, [x, scale, *weights]),
            others=dict.fromkeys(("the bare product", "norm and product"), packed),
            forward=functions,
            backward=[name for name in functions if name != "the bare product"],
        )
