"""PEFT's LoRA: fuse after get_peft_model."""

import torch
from peft import LoraConfig, get_peft_model
from tiny import batches, check, llama

import torchweld


def train(fused: bool) -> list[float]:
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules="all-linear"))
    if fused:
        print(torchweld.fuse(model, loss=True))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for ids in batches():
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


check(train, "attention", "rms_norm", "gated_activation", "linear_cross_entropy")
