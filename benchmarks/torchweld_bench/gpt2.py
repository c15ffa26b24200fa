"""A training step of GPT-2 124M on a GPU, with and without `fuse`, bf16 autocast."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import torchweld
from torchweld.tuning.timer import Timing, interleaved
from torchweld_bench.results import Row, make_row

_BATCH, _SEQLEN = 16, 1024
_ROUNDS = 9
_LOSS_RTOL = 1e-2


def _stepper(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor
) -> Callable[[], Tensor]:
    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of a model's weights and buffers and of its optimizer's state."""
    state = [value for values in optimizer.state.values() for value in values.values()]
    tensors = [*model.parameters(), *model.buffers(), *filter(torch.is_tensor, state)]
    return sum(tensor.nbytes for tensor in tensors)


def rows(targets: dict[str, float]) -> Iterator[Row]:
    """A row of times in microseconds and one of peak memory in MiB."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    stock = GPT2LMHeadModel(config).cuda().train()
    fused = copy.deepcopy(stock)
    torchweld.fuse(fused)
    tokens = torch.randint(config.vocab_size, (_BATCH, _SEQLEN), device="cuda")
    models = {"ours": fused, "stock sdpa": stock}
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        for name, model in models.items()
    }
    steps = {name: _stepper(models[name], optimizers[name], tokens) for name in models}
    losses = {name: step().item() for name, step in steps.items()}
    case = f"gpt2 training step ({_BATCH}, {_SEQLEN}) bfloat16"
    memory_case = f"{case} peak memory, MiB"
    common = {
        "against": "stock sdpa",
        "error": abs(losses["ours"] / losses["stock sdpa"] - 1),
        "eager_error": 0.0,
        "allowed_error": _LOSS_RTOL,
    }
    times = interleaved(steps, device="cuda", rounds=_ROUNDS, warmup=2)
    yield make_row(case, times, target=targets.get(case), **common)
    memory = {}
    for name, step in steps.items():
        (other,) = (n for n in models if n != name)
        optimizers[other].zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        step()
        others = _held_bytes(models[other], optimizers[other])
        mib = (torch.cuda.max_memory_allocated() - others) / 2**20
        memory[name] = Timing(mib, mib, mib)
    yield make_row(memory_case, memory, target=targets.get(memory_case), **common)
