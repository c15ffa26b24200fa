"""Greedy completions: a left-padded batch, each prompt alone, and the stock model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from demo.model import Pair
from demo.options import Options
from demo.text import Tokens

_CODE_PROMPTS = (
    "import os\nimport ",
    "def __init__(self, ",
    "    for key, value in ",
    '    if not isinstance(value, str):\n        raise TypeError("',
    "class Error(Exception):\n    def ",
)
_MAX_NEW = 32


@dataclass
class Completion:
    """One prompt and its completion by the fused model in the padded batch."""

    prompt: str
    prompt_tokens: int
    pads: int
    completion: str
    equals_alone: bool | None = None
    equals_stock: bool | None = None
    difference: str | None = None


@dataclass
class Generation:
    """The completions and the results of their comparisons; they are added one by one."""

    new_tokens: int = 0
    completions: list[Completion] = field(default_factory=list)

    def passed(self) -> bool | None:
        """Whether every comparison was made and held; None before there was one."""
        answers = [a for c in self.completions for a in (c.equals_alone, c.equals_stock)]
        return all(answers) if answers and None not in answers else None

    def to_dict(self) -> dict[str, Any]:
        """The completions as plain JSON-able data."""
        return {
            "greedy": True,
            "dtype": "float32",
            "new_tokens": self.new_tokens,
            "completions": [asdict(c) for c in self.completions],
            "passed": self.passed(),
        }


def prompts(options: Options, tokens: Tokens, new_tokens: int) -> list[list[int]]:
    """Token ids of prompts of different lengths: code, or the user's own text.

    They are cut so that prompt and completion fit the context.
    """
    budget = options.context - new_tokens
    if options.text:
        longest = min(24, budget)
        last = tokens.ids.numel() - longest
        rows = [
            tokens.ids[last * part // 4 :][: longest * part // 4].tolist() for part in (1, 2, 3, 4)
        ]
    else:
        rows = [tokens.tokenizer.encode(p, add_special_tokens=False).ids for p in _CODE_PROMPTS]
    # Different lengths, the longest first to be cut: equal ones would leave the padding untested.
    used: set[int] = set()
    out = []
    for row in sorted(rows, key=len, reverse=True):
        length = min(len(row), budget)
        while length in used and length > 1:
            length -= 1
        used.add(length)
        out.append(row[:length])
    return out[::-1]


def generate(
    options: Options, pair: Pair, tokens: Tokens, result: Generation, tick: Callable[[str], None]
) -> None:
    """Fills `result`: the fused model's batch, each prompt alone, the batch in stock code.

    Args:
        options: For the context and the device.
        pair: The trained models.
        tokens: The tokenizer.
        result: Filled as far as it gets.
        tick: Called with the name of each step.
    """
    result.new_tokens = min(_MAX_NEW, options.context // 2)
    rows = prompts(options, tokens, result.new_tokens)
    modes = (pair.stock.training, pair.fused.training)
    pair.stock.eval()
    pair.fused.eval()
    try:
        tick("fused, the whole batch")
        batched = _greedy(pair.fused, rows, tokens.end_id, result.new_tokens)
        longest = max(len(row) for row in rows)
        for row, ids in zip(rows, batched, strict=True):
            text = tokens.decode(ids)
            result.completions.append(
                Completion(tokens.decode(row), len(row), longest - len(row), text)
            )
        for index, (row, done) in enumerate(zip(rows, batched, strict=True)):
            tick(f"fused, prompt {index + 1} alone")
            alone = _greedy(pair.fused, [row], tokens.end_id, result.new_tokens)[0]
            completion = result.completions[index]
            completion.equals_alone = alone == done
            if alone != done:
                completion.difference = _explain(pair.fused, row, done, alone, "alone")
        tick("stock, the whole batch")
        # Runs these weights through the stock code: two trainings in bfloat16 part by a rounding,
        # and then so do near ties between tokens.
        trained = {name: t.clone() for name, t in pair.stock.state_dict().items()}
        pair.stock.load_state_dict(pair.fused.state_dict())
        stock = _greedy(pair.stock, rows, tokens.end_id, result.new_tokens)
        for completion, row, ids, done in zip(
            result.completions, rows, stock, batched, strict=True
        ):
            completion.equals_stock = ids == done
            if ids != done and completion.difference is None:
                completion.difference = _explain(pair.fused, row, done, ids, "stock")
        pair.stock.load_state_dict(trained)
    finally:
        pair.stock.train(modes[0])
        pair.fused.train(modes[1])


def _greedy(model: nn.Module, rows: list[list[int]], end_id: int, new: int) -> list[list[int]]:
    """Greedy completions of left-padded rows, each cut after the end of text."""
    device = next(model.parameters()).device
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), end_id, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, longest - len(row) :] = torch.tensor(row)
        mask[index, longest - len(row) :] = 1
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore", UserWarning)
        out = model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            do_sample=False,
            num_beams=1,
            max_new_tokens=new,
            eos_token_id=end_id,
            pad_token_id=end_id,
        )
    completions = out[:, longest:].tolist()
    return [c[: c.index(end_id) + 1] if end_id in c else c for c in completions]


def _explain(model: nn.Module, row: list[int], ours: list[int], other: list[int], who: str) -> str:
    """The first token where two completions differ, and how near the two tokens were."""
    place = next(
        (i for i, (a, b) in enumerate(zip(ours, other, strict=False)) if a != b),
        min(len(ours), len(other)),
    )
    device = next(model.parameters()).device
    with torch.inference_mode():
        ids = torch.tensor([row + ours[:place]], device=device)
        logits = model(input_ids=ids, use_cache=False).logits[0, -1].float()
    best = logits.topk(2).values
    gap = (best[0] - best[1]).item()
    return (
        f"differs from {who} at new token {place + 1}, "
        f"where the best two logits are {gap:.2g} apart"
    )
