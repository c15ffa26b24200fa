"""Mixtures whose experts are sharded, run in the processes of a mesh (meshes.py)."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing import assert_close
from transformers.distributed import DistributedConfig

import torchweld
from meshes import DEVICE, TIGHT, WIDE, Names, shared_folder
from tiny_models import VOCAB, assert_same_tokens, tiny_model
from torchweld.distributed import full_tensor
from torchweld.integrations import register_experts

register_experts()
EXPERTS = "torchweld::experts_forward"
HAS_EXPERT_PARALLEL = "ep_size" in inspect.signature(DistributedConfig).parameters
MODELS = {"qwen3_moe": "Qwen3MoeForCausalLM", "gpt_oss": "GptOssForCausalLM"}


def mixture(kind: str) -> nn.Module:
    torch.manual_seed(0)
    # An even vocabulary: some releases of transformers cannot divide a head of another size.
    model = tiny_model(kind, MODELS[kind], "eager", initializer_range=0.2, vocab_size=VOCAB + 1)
    return model.to(DEVICE, WIDE).train()


def tokens(seed: int) -> Tensor:
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
    config = DistributedConfig(tp_size=2, tp_plan="auto", **options)
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
    ids = tokens(1)
    with Names() as ops:
        loss = ours(input_ids=ids, labels=ids).loss
    assert ops.count(EXPERTS) == layers
    want = stock(input_ids=ids, labels=ids).loss
    assert_close(loss, want, **TIGHT)
    loss.backward(), want.backward()
    same_gradients(ours, stock)
    assert_same_tokens(ours, stock, ids, pad_token_id=0)
    ours.set_experts_implementation("eager")
    skipped = torchweld.fuse(ours, only="experts", check=False).skipped
    reason = 'its forward was replaced on the instance; use experts_implementation="torchweld"'
    assert [why for _, why in skipped] == [reason] * layers


def fully_sharded(kind: str, order: str, mesh: DeviceMesh) -> None:
    """FSDP2 around fused experts, and fuse inside of FSDP2: the gradients of one process."""
    stock = mixture(kind)
    ours = copy.deepcopy(stock)
    for ids in map(tokens, (1, 2)):
        (stock(input_ids=ids, labels=ids).loss / 2).backward()
    if order == "fused first":
        assert torchweld.fuse(ours, only="experts").replaced
    for layer in ours.model.layers:
        if order == "experts of their own":
            fully_shard(layer.mlp.experts, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    fully_shard(ours, mesh=mesh)
    if order != "fused first":
        assert torchweld.fuse(ours, only="experts").replaced
    assert list(ours.state_dict()) == list(stock.state_dict())
    ids = tokens(dist.get_rank() + 1)
    with Names() as ops:
        ours(input_ids=ids, labels=ids).loss.backward()
    assert ops.count(EXPERTS) == stock.config.num_hidden_layers
    same_gradients(ours, stock)
    state, want = ours.state_dict(), stock.state_dict()
    for name, t in state.items():
        assert torch.equal(full_tensor(t), want[name]), name
    assert len(torchweld.unfuse(ours)) == stock.config.num_hidden_layers
    with Names() as ops:
        ours(input_ids=ids)
    assert EXPERTS not in ops


def cases(mesh: str) -> dict[str, Callable[[DeviceMesh], None]]:
    ways = ("all_reduce", "all_to_all")
    orders = ("fused first", "sharded first", "experts of their own")
    return {
        "qwen3_moe columns": partial(plan_of_transformers, "qwen3_moe", {}),
        **{
            f"{kind} {way}": partial(
                plan_of_transformers, kind, {"ep_size": 2, "ep_implementation": way}
            )
            for kind, way in product(MODELS, ways)
        },
        **{
            f"{kind} {order}": partial(fully_sharded, kind, order)
            for kind, order in product(MODELS, orders)
        },
    }
