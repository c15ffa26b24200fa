"""Checks an installed torchweld: one fused training step, a grouped-query backward, a generation.

`make wheel` runs it in an environment that has only the wheel; it needs transformers and nothing of
the sources. On a machine with a GPU it runs there.

    python tools/smoke.py
"""

from __future__ import annotations

import time

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM

import torchweld

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def small_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).to(DEVICE)


def train_one_step(model: LlamaForCausalLM, tokens: torch.Tensor) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    return loss.item()


def gradients(attention, **options) -> list[torch.Tensor]:
    """The gradients of query, key and value: four query heads, two key heads."""
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(2, heads, 96, 64, generator=generator).to(DEVICE).requires_grad_()
        for heads in (4, 2, 2)
    ]
    out = attention(*inputs, **options)
    return list(torch.autograd.grad(out.square().sum(), inputs))


def main() -> None:
    torch.manual_seed(0)
    start = time.perf_counter()
    tokens = torch.randint(128, (2, 16), device=DEVICE)
    stock = small_llama()
    fused = small_llama()
    fused.load_state_dict(stock.state_dict())
    torchweld.fuse(fused, loss=True)
    losses = train_one_step(stock, tokens), train_one_step(fused, tokens)
    seconds = time.perf_counter() - start
    print(f"smoke: a fused training step on {DEVICE}, {seconds:.1f} s after the imports")
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-4)

    ours = gradients(torchweld.attention, causal=True)
    stocks = gradients(scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(ours, stocks, rtol=1e-3, atol=1e-3)

    fused.load_state_dict(stock.state_dict())
    options = {"attention_mask": torch.ones_like(tokens), "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(fused.generate(tokens, **options), stock.generate(tokens, **options))
    print("smoke: a grouped-query backward and a generation with a cache equal stock's")


if __name__ == "__main__":
    main()
