"""Mixtures whose experts are sharded, run in the processes of a mesh (meshes.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import torchweld
from meshes import DEVICE, TIGHT, WIDE, Names, shared_folder
from tiny_models import VOCAB, tiny_model
from torchweld.distributed import full_tensor
from torchweld.integrations import register_experts

register_experts()
EXPERTS = "torchweld::experts_forward"
MODELS = {"qwen3_moe": "Qwen3MoeForCausalLM", "gpt_oss": "GptOssForCausalLM"}


def mixture(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = tiny_model(kind, MODELS[kind], "eager", initializer_range=0.2)
    return model.to(DEVICE, WIDE).train()


def tokens(seed: int = 1) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (2, 8), generator=draw).to(DEVICE)


def same_gradients(ours: nn.Module, stock: nn.Module) -> None:
    wanted = dict(stock.named_parameters())
    assert [name for name, _ in ours.named_parameters()] == list(wanted)
    for name, p in ours.named_parameters():
        grad = full_tensor(p.grad) if isinstance(p.grad, DTensor) else p.grad
        assert_close(grad, wanted[name].grad, **TIGHT, msg=lambda m, n=name: f"{n}: {m}")


def plan_of_transformers(kind: str, options: dict[str, Any], mesh: DeviceMesh) -> None:
    """A mixture under transformers' own plan trains and generates as one process does.

    Under "all_reduce" the ids of the other process's experts are sentinels, under "all_to_all" its
    tokens come here.
    """
    stock = mixture(kind)
    config = transformers.distributed.DistributedConfig(tp_size=2, tp_plan="auto", **options)
    with shared_folder() as folder:
        if dist.get_rank() == 0:
            stock.save_pretrained(folder)
        dist.barrier()
        ours = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=WIDE,
            attn_implementation="eager",
            experts_implementation="torchweld",
            distributed_config=config,
        ).train()
    layers = stock.config.num_hidden_layers
    ids, ops = tokens(), []
    with Names(ops):
        loss = ours(input_ids=ids, labels=ids).loss
    assert ops.count(EXPERTS) == layers
    want = stock(input_ids=ids, labels=ids).loss
    assert_close(loss, want, **TIGHT)
    loss.backward(), want.backward()
    same_gradients(ours, stock)
    made = [
        each.eval().generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        for each in (ours, stock)
    ]
    assert torch.equal(*made)
    ours.set_experts_implementation("eager")
    skipped = torchweld.fuse(ours, only="experts", check=False).skipped
    reason = 'its forward was replaced on the instance; use experts_implementation="torchweld"'
    assert [why for _, why in skipped] == [reason] * layers


def cases(mesh: str) -> dict[str, Callable[[DeviceMesh], None]]:
    ways = ("all_reduce", "all_to_all")
    plans = {"qwen3_moe columns": ("qwen3_moe", {})} | {
        f"{kind} {way}": (kind, {"ep_size": 2, "ep_implementation": way})
        for kind, way in product(MODELS, ways)
    }
    return {name: partial(plan_of_transformers, *given) for name, given in plans.items()}
