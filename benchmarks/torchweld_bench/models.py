"""Training steps of Llama-like models on a GPU: stock, compiled blocks, Liger and `fuse`, bf16.

The last cases train LoRA adapters alone.

All variants train the same parameters with the same optimizer, so one copy of them is in memory.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import torchweld
from torchweld.tuning.timer import Timing, interleaved
from torchweld_bench.cases import compared, judged_loss
from torchweld_bench.common import free, installed, peak_memory
from torchweld_bench.results import Row

_ROUNDS = 7
_LOSS_RTOL = 1e-2
STOCK, COMPILED, _LIGER = "stock sdpa", "compiled blocks", "liger"


class Case(NamedTuple):
    name: str
    family: str  # the prefix of the classes in transformers
    batch: int
    seqlen: int
    recomputed: bool
    sizes: dict[str, Any]
    lora: str | None = None  # the layers with a LoRA adapter, a key of _ADAPTED; None: no LoRA


LLAMA = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
}
_LLAMA_8B = {
    **LLAMA,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
QWEN3 = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_CASES = (
    Case("llama 1.2B", "Llama", 4, 4096, False, LLAMA),
    Case("llama 1.2B", "Llama", 8, 4096, True, LLAMA),
    Case("qwen3 0.6B", "Qwen3", 8, 2048, False, QWEN3),
    Case("llama 8B", "Llama", 1, 4096, True, _LLAMA_8B, "attention"),
    Case("llama 8B", "Llama", 1, 4096, True, _LLAMA_8B, "all layers"),
)
_ADAPTED = {"attention": ["q_proj", "k_proj", "v_proj", "o_proj"], "all layers": "all-linear"}
_RANK = 16


def copy_of(model: nn.Module) -> nn.Module:
    """Copies the modules of a model, but not the parameters."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def compiled_copy(model: nn.Module, backend: str = "inductor") -> nn.Module:
    """Copies the modules, not the parameters, and compiles the blocks: the longest list."""
    copied = copy_of(model)
    lists = [m for m in copied.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    for block in max(lists, key=len):
        block.compile(backend=backend)
    return copied


def _liger(model: nn.Module) -> tuple[nn.Module, Any] | None:
    """Returns a model on Liger's kernels and a context with the functions it replaces, or None."""
    name = model.config.model_type
    apply_liger = installed("liger_kernel.transformers", f"apply_liger_kernel_to_{name}")
    if apply_liger is None:
        return None
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    stock = dict(vars(module))
    apply_liger(model=model)
    patched = {key: value for key, value in vars(module).items() if stock.get(key) is not value}
    vars(module).update(stock)

    @contextlib.contextmanager
    def replaced() -> Iterator[None]:
        vars(module).update(patched)
        try:
            yield
        finally:
            vars(module).update(stock)

    return model, replaced


def _adapted(model: nn.Module, layers: str) -> nn.Module:
    """Adds LoRA adapters to a model, which alone are trained."""
    import peft

    config = peft.LoraConfig(r=_RANK, lora_alpha=2 * _RANK, target_modules=_ADAPTED[layers])
    return peft.get_peft_model(model, config, autocast_adapter_dtype=False)


def language_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Computes a causal language model's loss with the tokens as labels."""
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def stepper(
    compute_loss: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer,
    context: Any = contextlib.nullcontext,
) -> Callable[[], Tensor]:
    """Returns a function that makes one training step and returns the loss."""

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with context():
            loss = compute_loss()
            loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _variants(case: Case) -> dict[str, Callable[[], Tensor]]:
    """Returns the training steps to be timed, by name."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{case.family}Config")(**case.sizes)
    cls = getattr(transformers, f"{case.family}ForCausalLM")
    with torch.device("cuda"):
        stock = cls._from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16).train()
    if case.recomputed:
        stock.gradient_checkpointing_enable()
    if case.lora is not None:
        stock = _adapted(stock, case.lora)
    trained = [parameter for parameter in stock.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    tokens = torch.randint(config.vocab_size, (case.batch, case.seqlen), device="cuda")

    ours = copy_of(stock)
    torchweld.fuse(ours, check=False, loss=True)
    models = {"ours": ours, STOCK: stock}
    if not case.recomputed:
        models[COMPILED] = compiled_copy(stock)
    losses = {name: partial(language_loss, model, tokens) for name, model in models.items()}
    steps = {name: stepper(loss, optimizer) for name, loss in losses.items()}
    patched = None if case.lora else _liger(copy_of(stock))
    if patched is not None:
        loss = partial(language_loss, patched[0], tokens)
        steps[_LIGER] = stepper(loss, optimizer, patched[1])
    return steps


def _peak(step: Callable[[], Tensor]) -> Timing:
    free()
    return peak_memory(step, held=0)


def step_rows(case: Case) -> Iterator[Row]:
    """Rows of times in microseconds and of peak memory in MiB, optimizer and weights included."""
    steps = _variants(case)
    losses = {name: step().item() for name, step in steps.items()}
    memory = {name: _peak(step) for name, step in steps.items()}
    times = interleaved(steps, device="cuda", rounds=_ROUNDS, warmup=1)
    end = "" if case.lora is None else f", LoRA of rank {_RANK} on {case.lora}"
    end += ", recomputed" if case.recomputed else ""
    label = f"{case.name} training step ({case.batch}, {case.seqlen}) bfloat16{end}"
    errors = judged_loss(losses["ours"], losses[STOCK], _LOSS_RTOL)
    for name, values in ((label, times), (f"{label} peak memory, MiB", memory)):
        yield from compared(name, values, errors, STOCK, (COMPILED, _LIGER))
    del steps
    free()


def rows() -> Iterator[Row]:
    """Measures every case of the family lazily."""
    for case in _CASES:
        if case.lora is None or installed("peft", "get_peft_model") is not None:
            yield from step_rows(case)
