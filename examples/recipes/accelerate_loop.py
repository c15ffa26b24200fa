"""A loop of accelerate, with accumulated gradients."""

import torch
from accelerate import Accelerator
from tiny import batches, check, llama

import torchweld


def train(fused: bool) -> list[float]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = llama().to(accelerator.device)
    if fused:
        torchweld.fuse(model, loss=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for ids in torch.cat(batches()).split(2):
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


check(train, "attention", "rms_norm_linears", "gated_mlp", "linear_cross_entropy")
