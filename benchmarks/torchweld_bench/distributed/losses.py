"""The loss of a head whose vocabulary is sharded over the processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torchweld._library import ops
from torchweld.distributed import vocab_parallel_linear_cross_entropy
from torchweld_bench.cases import compared
from torchweld_bench.distributed.processes import device, highest, measured
from torchweld_bench.distributed.setup import Setup, divided
from torchweld_bench.results import Row

_ROUNDS = 7


def vocab_parallel(setup: Setup) -> Iterator[Row]:
    """Forward and backward: all processes together, and alone with the whole weight."""
    rows, k, n = setup.cases.loss
    torch.manual_seed(0)
    x = torch.randn(rows, k, device=device()).to(setup.cases.dtype).requires_grad_()
    whole = (torch.randn(n, k, device=device()) * k**-0.5).to(setup.cases.dtype).requires_grad_()
    target = torch.randint(0, n, (rows,), device=device())
    part = nn.Parameter(distribute_tensor(whole.detach(), setup.mesh, [Shard(0)]))

    def gradients(loss: Callable[[], Tensor], weight: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: torch.autograd.grad(loss(), (x, weight))

    def sharded(**options: float) -> Callable[[], tuple[Tensor, ...]]:
        return gradients(
            lambda: vocab_parallel_linear_cross_entropy(x, part, target, **options), part
        )

    def alone(**options: Any) -> Callable[[], tuple[Tensor, ...]]:
        return gradients(lambda: ops.linear_cross_entropy(x, whole, target, **options), whole)

    calls = {
        "ours": sharded(),
        "alone": alone(),
        "alone, nothing kept": alone(keep="nothing"),
        "label_smoothing": sharded(label_smoothing=0.1),
    }
    errors = [
        ((got.float() - ref.float()).norm() / ref.float().norm()).item()
        for ours, want in (
            (calls["ours"](), calls["alone"]()),
            (calls["label_smoothing"](), alone(label_smoothing=0.1)()),
        )
        for got, ref in zip(
            (ours[0], ours[1].full_tensor() if isinstance(ours[1], DTensor) else ours[1]),
            want,
            strict=True,
        )
    ]
    times = measured(calls, rounds=_ROUNDS)
    case = setup.cases.vocab_parallel(setup.size)
    judged = {
        "error": highest(max(errors)),
        "eager_error": 0.0,
        "allowed_error": setup.cases.rtol,
    }
    whole_times = {**times, "ideal": divided(times["alone"], setup.size)}
    yield from compared(case, whole_times, judged, "alone", ["alone, nothing kept"])
    smooth = {"ours": times["label_smoothing"], "without": times["ours"]}
    yield from compared(f"{case}, label_smoothing, over without", smooth, judged, "without")
