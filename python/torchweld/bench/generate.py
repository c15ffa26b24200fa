"""Generation on a GPU: GPT-2 124M after left-padded prompts, fused and stock, in bfloat16."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import torchweld
from torchweld.bench.common import free, largest_error
from torchweld.bench.results import Row, make_row
from torchweld.bench.timer import Timing, interleaved

_BATCH, _PROMPT, _TOKENS = 16, 512, 64
_ROUNDS = 5


def _prompts(vocabulary: int) -> dict[str, Tensor]:
    """Left-padded up to half of their length."""
    pads = torch.linspace(0, _PROMPT // 2, _BATCH).int()[:, None]
    mask = (torch.arange(_PROMPT) >= pads).long()
    tokens = torch.randint(1, vocabulary, (_BATCH, _PROMPT)) * mask
    return {"input_ids": tokens.cuda(), "attention_mask": mask.cuda()}


def _generator(model: nn.Module, prompts: dict[str, Tensor], **cache: Any) -> Callable[[], Tensor]:
    def generate() -> Tensor:
        return model.generate(
            **prompts,
            max_new_tokens=_TOKENS,
            min_new_tokens=_TOKENS,
            do_sample=False,
            pad_token_id=0,
            **cache,
        )

    return generate


def _next_logits(model: nn.Module, prompts: dict[str, Tensor]) -> Tensor:
    """Of the first token that is generated."""
    positions = (prompts["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        return model(**prompts, position_ids=positions).logits[:, -1].double()


def _timed(calls: dict[str, Callable[[], Tensor]], *, compiled: bool) -> dict[str, Timing]:
    """Interleaved; compiled ones each as if nothing had run before in this process.

    NOTE: what another model compiled is looked at first in every step, and where its cache lies
    moves this one's, for which torch records its CUDA graph anew.
    """
    groups = [{name: call} for name, call in calls.items()] if compiled else [calls]
    times = {}
    for group in groups:
        torch.compiler.reset()
        free()
        times |= interleaved(group, device="cuda", rounds=_ROUNDS, warmup=2)
    return times


def rows(targets: dict[str, float]) -> Iterator[Row]:
    """In eager mode with the cache that grows, and compiled with a static one."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    exact = GPT2LMHeadModel(GPT2Config()).cuda().eval()
    stock = copy.deepcopy(exact).bfloat16()
    fused = copy.deepcopy(stock)
    torchweld.fuse(fused)
    prompts = _prompts(exact.config.vocab_size)
    reference = _next_logits(exact, prompts)
    errors = [largest_error(_next_logits(model, prompts), reference) for model in (fused, stock)]
    ways = {"eager": {}, "static cache, compiled": {"cache_implementation": "static"}}
    for name, cache in ways.items():
        case = f"generate {_TOKENS} tokens after ({_BATCH}, {_PROMPT}) bfloat16, {name}"
        calls = {
            "ours": _generator(fused, prompts, **cache),
            "stock sdpa": _generator(stock, prompts, **cache),
        }
        times = _timed(calls, compiled=bool(cache))
        yield make_row(
            case,
            times,
            against="stock sdpa",
            target=targets.get(case),
            error=errors[0],
            eager_error=errors[1],
            allowed_error=3 * errors[1],
        )
