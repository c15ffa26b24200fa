"""Trains a small Llama on the bytes of Python's standard library, and prints what 4-bit weights
cost it: the perplexity by each method, and the divergence from the float model's predictions.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import torchweld
from torchweld.ops.int4_weight import METHODS

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from demo.text import read_text  # noqa: E402

_SEQLEN = 128
_BATCH = 16
_HELD_OUT = 32  # batches
_GROUPS = (32, 128, None)


def _batches(data: Tensor, count: int, seed: int) -> Tensor:
    """Windows of bytes `(count, batch, seqlen)` at random places."""
    draw = torch.Generator().manual_seed(seed)
    first = torch.randint(len(data) - _SEQLEN, (count, _BATCH, 1), generator=draw)
    return data[first + torch.arange(_SEQLEN)]


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids, use_cache=False).loss


@torch.no_grad()
def _judged(model: nn.Module, stock: nn.Module, batches: Tensor) -> tuple[float, float]:
    """The perplexity of a model, and the mean KL divergence from another one's predictions."""
    loss, divergence = 0.0, 0.0
    for ids in batches:
        found = model(input_ids=ids, labels=ids, use_cache=False)
        wanted = stock(input_ids=ids, use_cache=False).logits.log_softmax(-1)
        loss += found.loss.item()
        logits = found.logits.log_softmax(-1)
        divergence += F.kl_div(logits, wanted, log_target=True, reduction="sum").item()
    return math.exp(loss / len(batches)), divergence / batches.numel()


def _train(data: Tensor, steps: int, device: str) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    model = transformers.LlamaForCausalLM(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps, pct_start=0.1)
    for step, ids in enumerate(_batches(data, steps, seed=0)):
        loss = _loss(model, ids.to(device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}", file=sys.stderr, flush=True)
    return model


def main() -> None:
    """Prints a row for the float model and one for each method and group size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    documents = read_text([]).documents
    kept = len(documents) * 9 // 10
    train, test = (
        torch.frombuffer(bytearray("".join(part).encode()), dtype=torch.uint8).long()
        for part in (documents[:kept], documents[kept:])
    )
    model = _train(train, args.steps, args.device).eval()
    batches = _batches(test, _HELD_OUT, seed=1).to(args.device)
    stock, _ = _judged(model, model, batches)
    print(f"float32: {stock:.4f}")
    for group in _GROUPS:
        for method in METHODS:
            quantised = copy.deepcopy(model)
            torchweld.quantize_(quantised, torchweld.Int4(group, method=method))
            found, divergence = _judged(quantised, model, batches)
            size = "whole rows" if group is None else f"groups of {group}"
            change = f"{100 * (found / stock - 1):+.2f} %"
            print(f"{method}, {size}: {found:.4f}, {change}, divergence {divergence:.2e}")


if __name__ == "__main__":
    main()
