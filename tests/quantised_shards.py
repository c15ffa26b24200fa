"""4-bit layers over several processes, run in the processes of a mesh (meshes.py)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import torchweld
from meshes import DEVICE, WIDE, refused
from tiny_models import VOCAB, tiny_grouped
from torchweld.distributed import full_tensor, parallelize
from torchweld.nn import Int4Linear

IDS = torch.arange(12).view(2, 6) % VOCAB


def quantised(group: int | None = 8, **changes: Any) -> nn.Module:
    model = tiny_grouped(intermediate_size=64, **changes).to(DEVICE, WIDE)
    torchweld.quantize_(model, torchweld.Int4(group))
    return model


def logits_and_gradient(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Logits, and the gradient of the embedding, which has passed through every layer."""
    model.zero_grad()
    logits = model(input_ids=IDS.to(DEVICE)).logits
    logits.square().sum().backward()
    grad = model.get_input_embeddings().weight.grad
    return logits.detach(), full_tensor(grad) if isinstance(grad, DTensor) else grad


def tensor_parallel(mesh: DeviceMesh) -> None:
    """Columns and rows of whole groups, one group a row among them; each process has half."""
    for group in (8, 16, None):
        model = quantised(group, attention_bias=True)
        for layer in model.modules():
            if isinstance(layer, Int4Linear) and layer.bias is not None:
                layer.bias.normal_(generator=torch.Generator(DEVICE).manual_seed(0))
        wanted = logits_and_gradient(model)
        whole = sum(m.qweight.numel() for m in model.modules() if isinstance(m, Int4Linear))
        assert parallelize(model, mesh) is model
        names = {type(m).__name__ for m in model.modules() if isinstance(m, Int4Linear)}
        assert names == {"ColumnInt4Linear", "RowInt4Linear"}
        part = sum(m.qweight.numel() for m in model.modules() if isinstance(m, Int4Linear))
        assert part * mesh.size() == whole
        for got, ref in zip(logits_and_gradient(model), wanted, strict=True):
            assert_close(got, ref, rtol=1e-4, atol=1e-4)


def the_first_process_decides(mesh: DeviceMesh) -> None:
    """As for float layers, whose weights are broadcast too."""
    model = quantised()
    wanted, _ = logits_and_gradient(model)
    if mesh.get_local_rank() > 0:
        for layer in model.modules():
            if isinstance(layer, Int4Linear):
                layer.scale.zero_()
    got, _ = logits_and_gradient(parallelize(model, mesh))
    assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def tensor_parallel_refusals(mesh: DeviceMesh) -> None:
    """Nothing is changed then."""
    model = tiny_grouped(intermediate_size=48).to(DEVICE, WIDE)
    torchweld.quantize_(model, torchweld.Int4(16))
    text = "parallelize: model.layers.0.mlp.down_proj must have a multiple of the mesh's 2 process"
    with refused(ValueError, text):
        parallelize(model, mesh)
    head = tiny_grouped(vocab_size=64).to(DEVICE, WIDE)
    torchweld.quantize_(head, torchweld.Int4(8, skip=()))
    with refused(ValueError, "parallelize: lm_head must be a float layer in the style"):
        parallelize(head, mesh)
    for each in (model, head):
        layers = [m for m in each.modules() if isinstance(m, Int4Linear)]
        assert all(type(m) is Int4Linear for m in layers)


def lora_with_fsdp(mesh: DeviceMesh) -> None:
    """Adapters and embeddings are sharded, codes are whole in every process."""
    import peft

    from torchweld.integrations import register_lora

    def made() -> nn.Module:
        model = quantised()
        config = peft.LoraConfig(target_modules="all-linear", r=4, init_lora_weights=False)
        torch.manual_seed(0)
        return peft.get_peft_model(model, register_lora(config, model))

    def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
        return model(input_ids=ids, labels=ids).loss

    ids = [(IDS + rank).to(DEVICE) for rank in range(mesh.size())]
    stock, ours = made(), made()
    (sum(loss_of(stock, each) for each in ids) / mesh.size()).backward()
    wanted = {name: p.grad for name, p in stock.named_parameters() if p.requires_grad}
    for block in ours.base_model.model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(ours, mesh=mesh)
    loss_of(ours, ids[dist.get_rank()]).backward()
    found = {name: p for name, p in ours.named_parameters() if p.requires_grad}
    assert found.keys() == wanted.keys() and len(found) == 28
    for name, parameter in found.items():
        assert isinstance(parameter, DTensor)
        assert_close(full_tensor(parameter.grad), wanted[name], rtol=1e-4, atol=1e-5)
    for layer in ours.modules():
        if isinstance(layer, Int4Linear):
            assert layer.weight.shape == (layer.out_features, layer.in_features)
            assert not isinstance(layer.qweight, DTensor)


def cases(mesh: str) -> dict[str, Callable[[DeviceMesh], None]]:
    every = [tensor_parallel, the_first_process_decides, tensor_parallel_refusals]
    if importlib.util.find_spec("peft") is not None:
        every.append(lora_with_fsdp)
    return {case.__name__: case for case in every} if mesh == "2" else {}
