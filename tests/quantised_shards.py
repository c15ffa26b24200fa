"""4-bit layers over several processes, run in the processes of a mesh (meshes.py)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import torchweld
from meshes import DEVICE, WIDE, refused
from tiny_models import VOCAB, tiny_grouped
from torchweld.distributed import codes_as_parameters, full_tensor, parallelize
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


def codes_in(model: nn.Module) -> int:
    """The number of bytes of codes, without the padding of the layout for kernels."""
    layers = (m for m in model.modules() if isinstance(m, Int4Linear))
    return sum(layer.portable()[0].numel() for layer in layers)


def tensor_parallel(mesh: DeviceMesh) -> None:
    """Columns and rows of whole groups, one group a row among them; each process has half."""
    for group in (8, 16, None):
        model = quantised(group, attention_bias=True)
        for layer in model.modules():
            if isinstance(layer, Int4Linear) and layer.bias is not None:
                layer.bias.normal_(generator=torch.Generator(DEVICE).manual_seed(0))
        wanted = logits_and_gradient(model)
        whole = codes_in(model)
        assert parallelize(model, mesh) is model
        names = {type(m).__name__ for m in model.modules() if isinstance(m, Int4Linear)}
        assert names == {"ColumnInt4Linear", "RowInt4Linear"}
        assert codes_in(model) * mesh.size() == whole
        assert_close(logits_and_gradient(model), wanted, rtol=1e-4, atol=1e-4)


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


def with_adapters(**changes: Any) -> nn.Module:
    import peft

    from torchweld.integrations import register_lora

    model = quantised(**changes).to(torch.float32)
    config = peft.LoraConfig(target_modules="all-linear", r=4, init_lora_weights=False)
    torch.manual_seed(0)
    return peft.get_peft_model(model, register_lora(config, model))


def fully_sharded(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    for block in model.base_model.model.model.layers:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def int4_layers(model: nn.Module) -> list[Int4Linear]:
    return [module for module in model.modules() if isinstance(module, Int4Linear)]


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def lora_with_fsdp(mesh: DeviceMesh) -> None:
    """Adapters and embeddings are sharded; the codes too once they are parameters."""
    ids = [(IDS + rank).to(DEVICE) for rank in range(mesh.size())]
    stock = with_adapters()
    (sum(loss_of(stock, each) for each in ids) / mesh.size()).backward()
    wanted = {name: p.grad for name, p in stock.named_parameters() if p.requires_grad}
    for as_parameters in (False, True):
        ours = with_adapters()
        if as_parameters:
            assert len(codes_as_parameters(ours)) == 14 and not codes_as_parameters(ours)
        whole = sum(t.nbytes for m in int4_layers(stock) for t in m.buffers())
        fully_sharded(ours, mesh)
        loss_of(ours, ids[dist.get_rank()]).backward()
        found = {name: p for name, p in ours.named_parameters() if p.requires_grad}
        assert found.keys() == wanted.keys() and len(found) == 28
        for name, parameter in found.items():
            assert isinstance(parameter, DTensor)
            assert_close(full_tensor(parameter.grad), wanted[name], rtol=1e-4, atol=1e-5)
        for layer in int4_layers(ours):
            assert layer.weight.shape == (layer.out_features, layer.in_features)
            assert isinstance(layer.qweight, DTensor) == as_parameters
        if as_parameters:
            kept = sum(p.to_local().nbytes for m in int4_layers(ours) for p in m.parameters())
            total = torch.tensor(kept, device=DEVICE)
            dist.all_reduce(total)
            assert total == whole


def sharded_codes_in_mixed_precision(mesh: DeviceMesh) -> None:
    """Codes have the dtype of the scales, so that a cast to that dtype leaves them alone."""
    stock, ours, wrong = (with_adapters().to(torch.bfloat16) for _ in range(3))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    ids = IDS.to(DEVICE)
    for model in (ours, wrong):
        codes_as_parameters(model)
        with refused(RuntimeError, "an Int4Linear with codes as parameters must stay torch.bfloa"):
            model.float()
    fully_sharded(ours, mesh, mp_policy=policy)
    got, ref = ours(input_ids=ids).logits, stock(input_ids=ids).logits
    # On a GPU the layouts of the codes differ, and so do the kernels.
    tolerance = 0.0 if DEVICE == "cpu" else 2e-2
    assert_close(got, ref, rtol=tolerance, atol=tolerance)
    fully_sharded(wrong, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    with refused(RuntimeError, "qweight must stay torch.bfloat16, whose bits are 4-bit codes, but"):
        wrong(input_ids=ids)


def sharded_codes_in_a_state_dict(mesh: DeviceMesh) -> None:
    """Gathered, it loads into a plain model; sharded, into a sharded one."""
    stock, ours, other = with_adapters(), with_adapters(), with_adapters()
    for layer in int4_layers(other):
        layer.scale.zero_()
    for model in (ours, other):
        codes_as_parameters(model)
        fully_sharded(model, mesh)
    state = ours.state_dict()
    codes = next(tensor for name, tensor in state.items() if name.endswith("qweight"))
    assert isinstance(codes, DTensor) and codes.dtype == torch.int32
    with refused(RuntimeError, "zero must be int32, but got torch.int64"):
        wrong = {name: t.long() if name.endswith("zero") else t for name, t in state.items()}
        ours.load_state_dict(wrong)
    other.load_state_dict(state)
    plain = with_adapters()
    for layer in int4_layers(plain):
        layer.scale.zero_()
    plain.load_state_dict({name: full_tensor(tensor) for name, tensor in state.items()})
    wanted = stock(input_ids=IDS.to(DEVICE)).logits
    for model in (other, plain):
        assert torch.equal(model(input_ids=IDS.to(DEVICE)).logits, wanted)


def codes_that_stay_buffers(mesh: DeviceMesh) -> None:
    """Nothing is changed then."""
    split = parallelize(quantised(), mesh)
    with refused(ValueError, "q_proj must be an Int4Linear, but got ColumnInt4Linear"):
        codes_as_parameters(split)
    with refused(ValueError, "must be of a dtype with at most 32 bits, but got torch.float64"):
        codes_as_parameters(quantised().double().cpu())
    empty = quantised().to("meta")
    with refused(ValueError, "must be on a device with values, but got the meta device"):
        codes_as_parameters(empty)
    assert not any(isinstance(m.scale, nn.Parameter) for m in int4_layers(empty))


def cases(mesh: str) -> dict[str, Callable[[DeviceMesh], None]]:
    every = [tensor_parallel, the_first_process_decides, tensor_parallel_refusals]
    every.append(codes_that_stay_buffers)
    if importlib.util.find_spec("peft") is not None:
        every += [lora_with_fsdp, sharded_codes_in_mixed_precision, sharded_codes_in_a_state_dict]
    return {case.__name__: case for case in every} if mesh == "2" else {}
