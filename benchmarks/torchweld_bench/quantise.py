"""Time and error of rounding a weight to 4 bits on the CPU, with two threads.

The peer is a limit: 8 minutes for a billion weights. A row's error is the relative one of the
weight, and the eager error that of "rtn".
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from torchweld.ops.int4_weight import METHODS, round_weight
from torchweld.tuning.timer import Timing, interleaved
from torchweld_bench.results import Row, make_row

_GROUP = 128
_LIMIT = "8 min a billion"
_LIMIT_US = 8 * 60e6 / 1e9  # a weight


def rows(targets: dict[str, float]) -> Iterator[Row]:
    """Measures every case of the family, one per iteration."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.manual_seed(0)
        normal = torch.randn(256, 4096)
        heavy = torch.distributions.StudentT(3.0).sample((256, 4096))
        for name, weight in (("normal", normal), ("heavy tails", heavy)):
            yield from _cases(name, weight.bfloat16(), targets)
    finally:
        torch.set_num_threads(before)


def _cases(name: str, weight: torch.Tensor, targets: dict[str, float]) -> Iterator[Row]:
    errors = {m: round_weight(weight, _GROUP, m).quantisation_error for m in METHODS}
    calls = {m: lambda m=m: round_weight(weight, _GROUP, m) for m in METHODS}
    limit = _LIMIT_US * weight.numel()
    for method, us in interleaved(calls, device="cpu", rounds=5).items():
        case = f"quantise {method} {name} {tuple(weight.shape)} bfloat16"
        yield make_row(
            case,
            {"ours": us, _LIMIT: Timing(limit, limit, limit)},
            against=_LIMIT,
            target=targets.get(case, targets.get("every case")),
            error=errors[method],
            eager_error=errors["rtn"],
            allowed_error=errors["rtn"],
        )
