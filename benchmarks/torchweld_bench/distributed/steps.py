"""Training steps: tensor parallelism of a GPT-2, FSDP2 of a Llama, and both.

One model at a time is in memory. All processes train on the same batch, so that the mean gradient
over them is the one of each, and sharded models can be compared with those that are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

import torchweld
from plan import Machine, Sizes, layout
from torchweld.distributed import full_tensor, parallelize, parameter_groups
from torchweld.tuning.timer import Timing
from torchweld_bench.cases import compared, exactly
from torchweld_bench.common import free
from torchweld_bench.distributed.decoder import Decoder
from torchweld_bench.distributed.processes import device, measured
from torchweld_bench.distributed.setup import PAIR, Setup, divided
from torchweld_bench.results import Row

_ROUNDS = 5
_LR = 1e-4
_COMPILED, _CAPTURED = "compiled blocks", "in a CUDA graph"
_ROOMY = 120e9  # a GPU with fewer bytes of memory recomputes the Llama's activations

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass
class Trial:
    """A training step: its time, and the loss and gradient norm of the first one."""

    loss: float
    norm: float
    timing: Timing

    def differs(self, other: Trial) -> float:
        """Returns the larger relative difference; inf for NaN."""
        found = max(abs(self.loss / other.loss - 1), abs(self.norm / other.norm - 1))
        return found if math.isfinite(self.loss + self.norm) else math.inf


def _optimizer(model: nn.Module, captured: bool) -> torch.optim.Optimizer:
    groups = parameter_groups(model)
    return torch.optim.AdamW(groups, lr=_LR, fused=True, capturable=captured)


def _whole(t: Tensor) -> Tensor:
    return full_tensor(t.detach()) if isinstance(t, DTensor) else t.detach()


@contextmanager
def _freed() -> Iterator[None]:
    try:
        yield
    finally:
        free()


@_freed()
def run(
    make: Callable[[], nn.Module],
    shard: Callable[[nn.Module], nn.Module],
    batch: tuple[int, int],
    vocab: int,
    loss_of: Loss,
    inside: Callable[[], AbstractContextManager[object]] = nullcontext,
    captured: bool = False,
) -> Trial:
    """Trains a model for some steps and frees it.

    Args:
        make: a model; its parameters are drawn alike in all processes.
        shard: gives the model as it is trained.
        batch: sequences, and tokens of each.
        vocab: how many tokens there are.
        loss_of: the loss of a model from ids and labels.
        inside: a context of forward and backward.
        captured: whether the step is one CUDA graph.
    """
    torch.manual_seed(0)
    with torch.device(device()):
        model = make().train()
        ids = torch.randint(vocab, (batch[0], batch[1] + 1))
    model = shard(model)
    ids, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    optimizer = _optimizer(model, captured)

    def gradients() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with inside():
            loss = loss_of(model, ids, labels)
            loss.backward()
        return loss

    def step() -> None:
        gradients()
        optimizer.step()

    loss = _whole(gradients()).item()
    squares = [_whole(p.grad).float().square().sum() for p in model.parameters()]
    norm = torch.stack(squares).sum().sqrt().item()
    call = _captured(step) if captured else step
    return Trial(loss, norm, measured({"": call}, rounds=_ROUNDS)[""])


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    """Captures a step as one CUDA graph; returns its replay."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    # NOTE: NCCL's watchdog thread queries events meanwhile, which the mode "global" forbids.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay


def _planned(
    setup: Setup, sizes: Sizes, alone: Trial, batch: tuple[int, int], fsdp: int, tp: int
) -> Timing:
    """Predicts a step with `batch` per FSDP process, by benchmarks/plan.py."""
    count, seqlen = batch
    recompute = sizes.gated and _recompute()

    def planned(machine: Machine, fsdp: int, tp: int) -> float:
        found = layout(sizes, machine, fsdp, 1, tp, seqlen, fsdp * count, recompute, count)
        return found.step

    rate = planned(Machine(flops=1.0), 1, 1) / (alone.timing.us * 1e-6)
    return exactly(planned(Machine(flops=rate, link=setup.link), fsdp, tp) * 1e6)


def _compared(
    setup: Setup,
    case: str,
    trials: dict[str, Trial],
    others: dict[str, Timing],
    tokens: int,
    against: str = "alone",
) -> Iterator[Row]:
    """Makes a row, and rows over stock and over the plan if both exist."""
    ours, alone = trials["ours"], trials["alone"]
    stock = trials.get("stock", alone)
    times = {**{name: trial.timing for name, trial in trials.items()}, **others}
    errors = {
        "error": max(ours.differs(alone), ours.differs(stock)),
        "eager_error": stock.differs(alone),
        "allowed_error": setup.cases.rtol,
    }
    row, *over = compared(case, times, errors, against, ("stock", "plan"))
    yield replace(row, tokens=tokens)
    yield from over


def _decoder_loss(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return model(ids, labels)


def _tensor_parallel(setup: Setup, run_as: str = "", wide: bool = False) -> Iterator[Row]:
    cases = setup.cases
    sizes, batch = (cases.wide, cases.wide_batch) if wide else (cases.gpt2, cases.gpt2_batch)

    def trial(fused: bool, sharded: bool) -> Trial:
        def shard(model: nn.Module) -> nn.Module:
            model = model.to(cases.dtype)
            model = model.fuse() if fused else model
            model = model.shard_columns(setup.mesh) if sharded else model
            return model.compile_blocks() if run_as == _COMPILED else model

        inside = loss_parallel if sharded else nullcontext
        make, captured = partial(Decoder, sizes), run_as == _CAPTURED
        return run(make, shard, batch, sizes.vocab, _decoder_loss, inside, captured)

    trials = {"ours": trial(True, True), "alone": trial(True, False), "stock": trial(False, True)}
    alone = trials["alone"]
    others = {
        "plan": _planned(setup, sizes, alone, batch, 1, setup.size),
        "ideal": divided(alone.timing, setup.size),
    }
    case = cases.tensor_parallel(setup.size, run_as, wide)
    yield from _compared(setup, case, trials, others, math.prod(batch))


def tensor_parallel(setup: Setup) -> Iterator[Row]:
    """GPT-2 XL, tensor parallel, with the tokens sharded between matmuls."""
    yield from _tensor_parallel(setup)


def compiled_tensor_parallel(setup: Setup) -> Iterator[Row]:
    """GPT-2 XL with compiled blocks, which moves DTensor's host work to tracing."""
    yield from _tensor_parallel(setup, _COMPILED)


def captured_tensor_parallel(setup: Setup) -> Iterator[Row]:
    """GPT-2 XL with the whole step in a CUDA graph, so that the host only replays it."""
    yield from _tensor_parallel(setup, _CAPTURED)


def wide_tensor_parallel(setup: Setup) -> Iterator[Row]:
    """The wide Llama, tensor parallel, with the tokens sharded between matmuls."""
    yield from _tensor_parallel(setup, wide=True)


def captured_wide_tensor_parallel(setup: Setup) -> Iterator[Row]:
    """The wide Llama with the whole step in a CUDA graph."""
    yield from _tensor_parallel(setup, _CAPTURED, wide=True)


def parallelized(setup: Setup) -> Iterator[Row]:
    """A fused transformers GPT-2 with `parallelize`: only the columns of the blocks are sharded.

    As deep as GPT-2 XL and as wide as its heads.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes, batch = setup.cases.gpt2, setup.cases.gpt2_batch
    config = GPT2Config(
        vocab_size=sizes.vocab,
        n_positions=sizes.positions,
        n_embd=sizes.heads * sizes.head_dim,
        n_layer=sizes.layers,
        n_head=sizes.heads,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        **dict.fromkeys(("bos_token_id", "eos_token_id"), 0),
    )

    def loss_of(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
        logits = model(input_ids=ids, use_cache=False).logits.flatten(0, 1)
        return F.cross_entropy(logits.float(), labels.flatten())

    def trial(sharded: bool) -> Trial:
        def shard(model: nn.Module) -> nn.Module:
            model = model.to(setup.cases.dtype)
            torchweld.fuse(model, check=False)
            return parallelize(model, setup.mesh, src_data_rank=None) if sharded else model

        return run(partial(GPT2LMHeadModel, config), shard, batch, sizes.vocab, loss_of)

    trials = {"ours": trial(True), "alone": trial(False)}
    others = {"ideal": divided(trials["alone"].timing, setup.size)}
    case = setup.cases.parallelized(setup.size)
    yield from _compared(setup, case, trials, others, math.prod(batch))


def _recompute() -> bool:
    """Whether all variants recompute the Llama's activations."""
    if device() == "cpu":
        return False
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory < _ROOMY


def _llama(
    setup: Setup,
    fused: bool,
    parameters: DeviceMesh | None = None,
    columns: DeviceMesh | None = None,
) -> Trial:
    """A step with parameters in float32 and compute in dtype.

    Alone it is FSDP2 over one process: the same arithmetic, and nothing is sent.
    """
    sizes, dtype = setup.cases.llama, setup.cases.dtype
    parameters = setup.one if parameters is None else parameters

    def shard(model: nn.Module) -> nn.Module:
        model = model.fuse() if fused else model
        model = model if columns is None else model.shard_columns(columns)
        return model.shard_parameters(parameters, dtype)

    make = partial(Decoder, sizes, _recompute())
    inside = nullcontext if columns is None else loss_parallel
    return run(make, shard, setup.cases.llama_batch, sizes.vocab, _decoder_loss, inside)


def llama_config(sizes: Sizes, **more: Any) -> Any:
    """Returns transformers' LlamaConfig of these sizes, with more arguments."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.ffn,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        tie_word_embeddings=sizes.tied,
        bos_token_id=0,
        eos_token_id=0,
        **more,
    )


def _transformers_llama(sizes: Sizes) -> nn.Module:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM._from_config(llama_config(sizes), attn_implementation="sdpa")


def fully_sharded(setup: Setup) -> Iterator[Row]:
    """transformers' Llama of 1.2 billion parameters with FSDP2 and a batch per process.

    The parameters are in float32, compute is in dtype. Alone it is FSDP2 over one process: the same
    arithmetic, and nothing is sent.
    """
    cases = setup.cases
    sizes, batch = cases.llama, cases.llama_batch
    policy = MixedPrecisionPolicy(param_dtype=cases.dtype, reduce_dtype=torch.float32)

    def loss_of(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
        return model(input_ids=ids, labels=labels, shift_labels=labels, use_cache=False).loss

    def trial(fused: bool, mesh: DeviceMesh) -> Trial:
        def shard(model: nn.Module) -> nn.Module:
            if fused:
                torchweld.fuse(model, check=False, loss=True)
            if _recompute():
                model.gradient_checkpointing_enable({"use_reentrant": False})
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            return fully_shard(model, mesh=mesh, mp_policy=policy)

        return run(partial(_transformers_llama, sizes), shard, batch, sizes.vocab, loss_of)

    trials = {
        "ours": trial(True, setup.mesh),
        "alone": trial(True, setup.one),
        "stock": trial(False, setup.mesh),
    }
    alone = trials["alone"]
    others = {
        "plan": _planned(setup, sizes, alone, batch, setup.size, 1),
        "ideal": alone.timing,
    }
    case = cases.fully_sharded(setup.size, _recompute())
    yield from _compared(setup, case, trials, others, setup.size * math.prod(batch))


def fully_sharded_pairs(setup: Setup) -> Iterator[Row]:
    """The Llama with a batch per pair of processes, which share the columns.

    Over the product of both costs alone: FSDP2 of as many processes as pairs, and one pair's
    columns.
    """
    sizes, batch, pairs = setup.cases.llama, setup.cases.llama_batch, setup.size // PAIR
    names = ("one", "pairs", "columns")
    mesh = init_device_mesh(device(), (1, pairs, PAIR), mesh_dim_names=names)
    trials = {
        "ours": _llama(setup, True, mesh["pairs"], mesh["columns"]),
        "alone": _llama(setup, True),
        "stock": _llama(setup, False, mesh["pairs"], mesh["columns"]),
    }
    alone = trials["alone"]
    parameters = _llama(setup, True, mesh["pairs"]).timing.us
    columns = _llama(setup, True, mesh["one"], mesh["columns"]).timing.us
    product = parameters * columns / alone.timing.us
    others = {
        "product": exactly(product),
        "plan": _planned(setup, sizes, alone, batch, pairs, PAIR),
        "ideal": divided(alone.timing, PAIR),
    }
    case = setup.cases.fully_sharded_pairs(setup.size, _recompute())
    tokens = pairs * math.prod(batch)
    yield from _compared(setup, case, trials, others, tokens, against="product")
