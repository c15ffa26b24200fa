"""A training step of GPT-2 124M on a GPU, with and without `fuse`, bf16 autocast."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import torchweld
from torchweld.tuning.timer import interleaved
from torchweld_bench.cases import compared, judged_loss
from torchweld_bench.common import peak_memory
from torchweld_bench.results import Row

_BATCH, _SEQLEN = 16, 1024
_ROUNDS = 9
_LOSS_RTOL = 1e-2
_STOCK = "stock sdpa"


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


def rows() -> Iterator[Row]:
    """Rows of times in microseconds and of peak memory in MiB, for fuse and for fuse(loss=True)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    stock = GPT2LMHeadModel(config).cuda().train()
    fused, with_loss = copy.deepcopy(stock), copy.deepcopy(stock)
    torchweld.fuse(fused)
    torchweld.fuse(with_loss, loss=True)
    tokens = torch.randint(config.vocab_size, (_BATCH, _SEQLEN), device="cuda")
    models = {"fuse": fused, "fuse(loss=True)": with_loss, _STOCK: stock}
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        for name, model in models.items()
    }
    steps = {name: _stepper(models[name], optimizers[name], tokens) for name in models}
    losses = {name: step().item() for name, step in steps.items()}
    times = interleaved(steps, device="cuda", rounds=_ROUNDS, warmup=2)
    memory = {}
    for name, step in steps.items():
        others = 0
        for other in models.keys() - {name}:
            optimizers[other].zero_grad(set_to_none=True)
            others += _held_bytes(models[other], optimizers[other])
        memory[name] = peak_memory(step, held=others)
    for name, end in (("fuse", ""), ("fuse(loss=True)", ", with its loss")):
        case = f"gpt2 training step ({_BATCH}, {_SEQLEN}) bfloat16{end}"
        errors = judged_loss(losses[name], losses[_STOCK], _LOSS_RTOL)
        for label, values in ((case, times), (f"{case} peak memory, MiB", memory)):
            found = {"ours": values[name], _STOCK: values[_STOCK]}
            yield from compared(label, found, errors, _STOCK)
