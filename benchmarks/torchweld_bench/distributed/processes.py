"""Processes started by torchrun that measure together."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from torchweld.tuning.timer import Timing, summary

_SECONDS = 60  # the time limit of a collective
_LINK_BYTES = 1 << 28


def refusal() -> str | None:
    """Returns why the processes can't start, as a sentence, or None."""
    if "RANK" not in os.environ or "LOCAL_RANK" not in os.environ:
        return (
            "distributed must be started by torchrun: "
            "torchrun --nproc-per-node 2 benchmarks/bench.py distributed"
        )
    here, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if torch.cuda.is_available() and gpus < here:
        return f"distributed needs a GPU for each of the {here} processes, but there are {gpus}"
    return None


@contextmanager
def started() -> Iterator[tuple[int, int]]:
    """Starts the process group, with NCCL if there are GPUs; yields rank and size."""
    # NOTE: NVLink multicast occupies the switches of the whole host, which other jobs may share. On
    # a host of your own, set NCCL_NVLS_ENABLE=1.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    limit = timedelta(seconds=_SECONDS)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=limit, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=limit)
    yield dist.get_rank(), dist.get_world_size()
    dist.barrier()  # a process that leaves early closes the connections of the others
    dist.destroy_process_group()


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def complaint(call: Callable[[], object]) -> str:
    """Returns the error of the first process in which a call raised, in all; "" for none."""
    mine = trace = ""
    try:
        call()
        _wait()
    except Exception as error:
        lines = str(error).strip().splitlines()
        mine = f"{type(error).__name__}: {lines[0] if lines else ''}"
        trace = traceback.format_exc()
    said: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(said, mine)
    first = next((rank for rank, text in enumerate(said) if text), None)
    if first is None:
        return ""
    if first == dist.get_rank():
        print(trace, file=sys.stderr, flush=True)
    return f"process {first}: {said[first]}"


def highest(value: float) -> float:
    """Returns the highest of the processes' values."""
    one = torch.tensor([value], dtype=torch.float64, device=device())
    dist.all_reduce(one, dist.ReduceOp.MAX)
    return one.item()


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measured(
    variants: dict[str, Callable[[], object]], *, rounds: int, warmup: int = 2, calls: int = 1
) -> dict[str, Timing]:
    """Times rounds in which every variant runs once, started together; the slowest process counts.

    Args:
        variants: the functions to call, by name; the same in all processes.
        rounds: how often each is timed.
        warmup: calls of each before that.
        calls: the number of consecutive calls in one sample; the time is per call.

    Returns:
        A `Timing` by name, the same in all processes.
    """
    for call in variants.values():
        for _ in range(warmup):
            call()
    samples = torch.zeros(rounds, len(variants), dtype=torch.float64)
    for i in range(rounds):
        for j, call in enumerate(variants.values()):
            _wait()
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            _wait()
            samples[i, j] = (time.perf_counter() - begin) / calls * 1e6
    slowest = samples.to(device())
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return {name: summary(slowest[:, j].tolist()) for j, name in enumerate(variants)}


def link() -> float:
    """Measures the bytes per second that each process receives in a long all-gather."""
    size = dist.get_world_size()
    length = (_LINK_BYTES if torch.cuda.is_available() else 1 << 20) // size
    part = torch.zeros(length, dtype=torch.uint8, device=device())
    whole = part.repeat(size)
    gather = measured({"": lambda: dist.all_gather_into_tensor(whole, part)}, rounds=5, calls=4)
    return (size - 1) * length / (gather[""].us * 1e-6)


def say(text: str) -> None:
    """Prints a line to stderr from one process."""
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)
