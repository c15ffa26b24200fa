"""Shared by all distributed cases: sizes and meshes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from plan import Machine, Sizes
from torchweld.tuning.timer import Timing
from torchweld_bench.common import dtype_text
from torchweld_bench.distributed.processes import device, link

PAIR = 2  # how many processes share the Llama's columns in a run of more processes


@dataclass(frozen=True)
class Cases:
    """The sizes of models and tensors.

    GPT-2 XL has 24 heads here: no number of GPUs that is measured divides its 25. Its vocabulary is
    rounded up, so that all processes have as much of it. The wide Llama has half of the layers of
    Llama 3.1 8B, so that one GPU holds it with its optimizer, and tied tables.

    `gpt2_batch` and `wide_batch` are the sequences of all processes, and the tokens per sequence.
    """

    gpt2_name: str = "gpt2-xl"
    gpt2: Sizes = Sizes(48, 1600, 24, 24, 64, 6400, False, 50304, True, 1024, True)
    gpt2_batch: tuple[int, int] = (8, 1024)
    wide_name: str = "llama-8b of 16 layers"
    wide: Sizes = Sizes(16, 4096, 32, 8, 128, 14336, True, 128256, True)
    wide_batch: tuple[int, int] = (2, 4096)
    llama_name: str = "llama-1.2b"
    llama: Sizes = Sizes(16, 2048, 32, 8, 64, 8192, True, 128256, True)
    llama_batch: tuple[int, int] = (4, 4096)  # sequences and tokens per sequence of each process
    attention: tuple[int, int, int, int, int] = (1, 32, 8, 65536, 128)
    long: int = 4  # the long attention has this many times as many keys
    linear: tuple[int, int, int] = (8192, 4096, 16384)
    loss: tuple[int, int, int] = (8192, 2048, 128256)
    dtype: torch.dtype = torch.bfloat16
    rtol: float = 1e-2  # relative tolerance of losses and of the norms of tensors
    where: tuple[str, str] = ("GPU", "GPUs")

    def named(self, what: str, how: str, size: int) -> str:
        """The case of a row, which includes the number of processes."""
        return f"{what} {dtype_text(self.dtype)}, {how} on {size} {self.where[size > 1]}"

    def tensor_parallel(self, size: int, run: str = "", wide: bool = False) -> str:
        """`run`: how the step is run, "" for eager; "compiled blocks" or "in a CUDA graph"."""
        name = self.wide_name if wide else self.gpt2_name
        step = f"{name} training step {self.wide_batch if wide else self.gpt2_batch}"
        how = f"{run + ', ' if run else ''}tensor and sequence parallel"
        return self.named(step, how, size)

    def parallelized(self, size: int) -> str:
        step = f"gpt2 of {self.gpt2.layers} layers, training step {self.gpt2_batch}"
        return self.named(step, "parallelize", size)

    def fully_sharded(self, size: int, recomputed: bool = False) -> str:
        step = f"{self.llama_name} training step {self.llama_batch} each"
        return self.named(step, f"{'recomputed, ' * recomputed}FSDP2", size)

    def fully_sharded_pairs(self, size: int, recomputed: bool = False) -> str:
        step = f"{self.llama_name} training step {self.llama_batch} a pair"
        how = f"{'recomputed, ' * recomputed}FSDP2 and tensor parallel"
        return self.named(step, how, size)

    def context_parallel(self, size: int, padded: bool = False, long: bool = False) -> str:
        batch, nheads, nheads_kv, seqlen, dim = self.attention_of(padded, long)
        call = f"attention and its gradient ({batch}, {nheads}/{nheads_kv}, {seqlen}, {dim})"
        mask = "causal leftpad" if padded else "causal"
        return self.named(f"{call} {mask}", "context parallel", size)

    def attention_of(self, padded: bool, long: bool) -> tuple[int, int, int, int, int]:
        """With padding there are twice as many sequences, half as long."""
        batch, nheads, nheads_kv, seqlen, dim = self.attention
        if padded:
            batch, seqlen = 2 * batch, seqlen // 2
        return batch, nheads, nheads_kv, seqlen * self.long if long else seqlen, dim

    def sequence_parallel(self, size: int) -> str:
        rows, k, n = self.linear
        call = f"layer_norm_linear ({rows}, {k}, {n // size}) gelu_tanh"
        return self.named(call, "sequence parallel", size)

    def vocab_parallel(self, size: int) -> str:
        how = "forward and backward, vocabulary parallel"
        return self.named(f"linear_cross_entropy {self.loss}", how, size)


TINY = Cases(
    gpt2_name="tiny gpt2",
    gpt2=Sizes(2, 64, 8, 8, 8, 128, False, 64, True, 32, True),
    gpt2_batch=(2, 32),
    wide_name="tiny wide llama",
    wide=Sizes(1, 128, 16, 8, 8, 256, True, 64, True),
    wide_batch=(2, 32),
    llama_name="tiny llama",
    llama=Sizes(2, 64, 16, 8, 8, 128, True, 64, True),
    llama_batch=(1, 32),
    attention=(1, 16, 8, 64, 16),
    linear=(64, 32, 64),
    loss=(64, 32, 96),
    dtype=torch.float32,
    rtol=1e-4,
    where=("process", "processes"),
)


class Setup:
    """The cases and the processes."""

    def __init__(self) -> None:
        self.cases = Cases() if device() == "cuda" else TINY
        self.size = dist.get_world_size()
        self.mesh = init_device_mesh(device(), (self.size,))
        shape, names = (self.size, 1), ("others", "one")
        self.one = init_device_mesh(device(), shape, mesh_dim_names=names)["one"]
        self.link = link() if self.size > 1 else Machine.link


def divided(timing: Timing, n: int) -> Timing:
    return Timing(timing.us / n, timing.low / n, timing.high / n)
