"""Generation on a GPU after left-padded prompts: GPT-2 124M and Llama 1.2B, fused and stock, bf16.

The rows time the prompts alone, and the prompts with the generated tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import torchweld
from torchweld.tuning.timer import Timing, interleaved
from torchweld_bench.cases import compared, judged
from torchweld_bench.common import free
from torchweld_bench.models import LLAMA
from torchweld_bench.results import Row

_BATCH, _PROMPT, _TOKENS = 16, 512, 64
_ROUNDS = 5


def _prompts(vocabulary: int) -> dict[str, Tensor]:
    """Prompts that are left-padded up to half of their length."""
    pads = torch.linspace(0, _PROMPT // 2, _BATCH).int()[:, None]
    mask = (torch.arange(_PROMPT) >= pads).long()
    tokens = torch.randint(1, vocabulary, (_BATCH, _PROMPT)) * mask
    return {"input_ids": tokens.cuda(), "attention_mask": mask.cuda()}


def generator(
    model: nn.Module, prompts: dict[str, Tensor], tokens: int, **cache: Any
) -> Callable[[], Tensor]:
    def generate() -> Tensor:
        return model.generate(
            **prompts,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            **cache,
        )

    return generate


def _prefill(model: nn.Module, prompts: dict[str, Tensor]) -> Callable[[], Tensor]:
    """Fills the cache and returns the logits of the first generated token."""
    positions = (prompts["attention_mask"].cumsum(1) - 1).clamp(min=0)

    @torch.no_grad()
    def prefill() -> Tensor:
        out = model(**prompts, position_ids=positions, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1]

    return prefill


def _timed(calls: dict[str, Callable[[], Tensor]], *, compiled: bool) -> dict[str, Timing]:
    """Interleaved timings; compiled variants each start from a clean compiler state.

    NOTE: torch checks the code of a model compiled earlier first in every step, and the memory of
    that model's cache moves this one's, for which torch records the CUDA graph again.
    """
    groups = [{name: call} for name, call in calls.items()] if compiled else [calls]
    times = {}
    for group in groups:
        torch.compiler.reset()
        free()
        times |= interleaved(group, device="cuda", rounds=_ROUNDS, warmup=2)
    return times


def rows() -> Iterator[Row]:
    """For each model, prefill; then decoding, in eager mode and compiled with a static cache."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    models = {
        "": (GPT2LMHeadModel, GPT2Config()),
        "llama 1.2B ": (LlamaForCausalLM, LlamaConfig(**LLAMA)),
    }
    for name, (cls, config) in models.items():
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = cls._from_config(config, attn_implementation="sdpa").eval()
        yield from _rows(name, model)
        del model
        free()


def _rows(name: str, exact: nn.Module) -> Iterator[Row]:
    """The rows of a float32 model, whose name they begin with."""
    stock = copy.deepcopy(exact).bfloat16()
    fused = copy.deepcopy(stock)
    torchweld.fuse(fused)
    prompts = _prompts(exact.config.vocab_size)
    reference = _prefill(exact, prompts)().double()
    prefills = {"ours": _prefill(fused, prompts), "stock sdpa": _prefill(stock, prompts)}
    errors = judged(*(prefill() for prefill in prefills.values()), reference, times=3, plus=0)
    times = _timed(prefills, compiled=False)
    case = f"{name}prompts ({_BATCH}, {_PROMPT}) bfloat16, left-padded"
    yield from compared(case, times, errors, "stock sdpa")
    ways = {"eager": {}, "static cache, compiled": {"cache_implementation": "static"}}
    for way, cache in ways.items():
        calls = {
            "ours": generator(fused, prompts, _TOKENS, **cache),
            "stock sdpa": generator(stock, prompts, _TOKENS, **cache),
        }
        times = _timed(calls, compiled=bool(cache))
        case = f"{name}generate {_TOKENS} tokens after ({_BATCH}, {_PROMPT}) bfloat16, {way}"
        yield from compared(case, times, errors, "stock sdpa")
