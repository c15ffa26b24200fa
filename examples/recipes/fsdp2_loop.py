"""A plain loop; torchrun --nproc-per-node 2 starts it with FSDP2."""

import os

import torch
from tiny import batches, check, llama
from torch.distributed.fsdp import fully_shard

import torchweld

SIZE, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))


def train(fused: bool) -> list[float]:
    model = llama()
    if fused:
        torchweld.fuse(model, loss=True)
    if SIZE > 1:
        for module in [*model.model.layers, model]:
            fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for ids in batches():
        ids = ids.chunk(SIZE)[RANK]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if SIZE > 1:
    torch.distributed.init_process_group("gloo")
check(train, "attention", "rms_norm_linears", "gated_mlp", "linear_cross_entropy")
if SIZE > 1:
    torch.distributed.destroy_process_group()
