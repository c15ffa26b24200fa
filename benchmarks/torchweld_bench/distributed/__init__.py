"""Tensor, sequence and context parallelism and FSDP2 on the GPUs of one host, under torchrun.

    torchrun --nproc-per-node 2 benchmarks/bench.py distributed --out benchmarks/results

Peers: "alone" is the same work on one GPU; "stock" is the same model in torch's modules, sharded by
torch's styles; "plan" is what benchmarks/plan.py predicts from alone's speed and the measured
bandwidth of a gather; "ideal" is alone divided by the GPUs that share its work. Without GPUs the
processes talk over gloo, the sizes are tiny and the times mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchweld_bench.common import free
from torchweld_bench.distributed import losses, ops, steps
from torchweld_bench.distributed.picture import draw
from torchweld_bench.distributed.processes import complaint, device, say
from torchweld_bench.distributed.setup import PAIR, Setup
from torchweld_bench.results import Failure, Row

__all__ = ["draw", "rows"]


def rows() -> Iterator[Row | Failure]:
    """Measures all rows, equal in all processes; a `Failure` if a case raises in any process."""
    setup = Setup()
    if setup.size > 1:
        say(f"in a gather each of the {setup.size} receives {setup.link / 1e9:.1f} GB/s")
    cases = [steps.tensor_parallel, steps.compiled_tensor_parallel, steps.wide_tensor_parallel]
    if device() == "cuda":
        cases += [steps.captured_tensor_parallel, steps.captured_wide_tensor_parallel]
    cases += [steps.parallelized, steps.fully_sharded]
    if setup.size > PAIR and setup.size % PAIR == 0:
        cases.append(steps.fully_sharded_pairs)
    # The cases that run torch's own context_parallel come last, because it is a prototype.
    cases += [losses.vocab_parallel, ops.linear, ops.padded_attention]
    cases += [ops.long_attention, ops.attention]
    for case in cases:
        found: list[Row] = []
        reason = complaint(lambda case=case, found=found: found.extend(case(setup)))
        if reason:
            yield Failure(case.__name__, reason)
        else:
            yield from found
        free()
