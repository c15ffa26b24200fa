"""FSDP2, DDP, checkpoints and compiled blocks, run in the processes of a mesh (meshes.py)."""

from __future__ import annotations

import copy
import importlib.util
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.testing import assert_close
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import torchweld
from meshes import DEVICE, TIGHT, WIDE, Names, expected_skips, refused, shared_folder
from tiny_models import VOCAB, tiny_gpt2, tiny_grouped, tiny_model
from torchweld.distributed import (
    NormColwise,
    Rowwise,
    context_parallel,
    full_tensor,
    parallelize,
    parameter_groups,
    shard_sequence,
)

SITE, HEADS = "torchweld::layer_norm_linear_forward", "torchweld::attention_forward"


def batches(count: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCAB, (2, 8), generator=draw).to(DEVICE) for _ in range(count)]


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits
    return F.cross_entropy(logits.to(WIDE).flatten(0, 1), ids.flatten())


def gpt2() -> nn.Module:
    return tiny_gpt2().to(DEVICE, WIDE).train()


def llama() -> nn.Module:
    return tiny_grouped().to(DEVICE, WIDE).train()


def shard_blocks(model: nn.Module, mesh: DeviceMesh, **more: Any) -> nn.Module:
    base = model.base_model
    for block in base.h if hasattr(base, "h") else base.layers:
        fully_shard(block, mesh=mesh, **more)
    return fully_shard(model, mesh=mesh, **more)


def of_one_process(stock: nn.Module, count: int) -> dict[str, Tensor]:
    """Stock's gradients, averaged over the batches of that many processes."""
    stock = copy.deepcopy(stock)
    sum(loss_of(stock, ids) for ids in batches(count)).div(count).backward()
    return gradients_of(stock)


def fused_gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    """A fused model, and stock's gradients."""
    model = gpt2()
    wanted = of_one_process(model, 2)
    torchweld.fuse(model, check=False)
    return model, wanted


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    grads = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    return {n: full_tensor(g) if isinstance(g, DTensor) else g for n, g in grads.items()}


def trained_alike(
    ours: nn.Module, wanted: dict[str, Tensor], rank: int | None = None, **tolerance: Any
) -> Counter[str]:
    """Runs forward and backward with this process's batch; returns how often each op ran."""
    rank = dist.get_rank() if rank is None else rank
    with Names() as ops:
        loss_of(ours, batches(rank + 1)[rank]).backward()
    assert_close(gradients_of(ours), wanted, **(tolerance or TIGHT))
    return Counter(ops)


def fused_first(mesh: DeviceMesh) -> None:
    """Six modules of two blocks stay fused, state_dict keeps its names, unfuse works later."""
    stock = gpt2()
    wanted = of_one_process(stock, 2)
    ours = copy.deepcopy(stock)
    assert len(torchweld.fuse(ours).replaced) == 6
    shard_blocks(ours, mesh)
    assert list(ours.state_dict()) == list(stock.state_dict())
    ran = trained_alike(ours, wanted)
    assert (ran[SITE], ran[HEADS]) == (4, 2)
    torchweld.unfuse(ours)
    ours.zero_grad()
    ran = trained_alike(ours, wanted)
    assert ran[SITE] == ran[HEADS] == 0


def recomputed(mesh: DeviceMesh) -> None:
    """Non-reentrant checkpointing: the same gradients, the forward ops run twice."""
    stock, wanted = fused_gpt2()
    shard_blocks(stock, mesh)
    stock.gradient_checkpointing_enable({"use_reentrant": False})
    ran = trained_alike(stock, wanted)
    assert (ran[SITE], ran[HEADS]) == (8, 4)


def recomputed_in_part(mesh: DeviceMesh) -> None:
    """Selective checkpointing recognises the ops that autograd runs by name."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = op in (torch.ops.torchweld.attention_forward.default,)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = torchweld.nn.CausalSelfAttention(16, 4)
            self.up = torchweld.nn.LayerNormLinear(16, 32, activation="gelu")
            self.down = nn.Linear(32, 16)

        def inside(self, x: Tensor) -> Tensor:
            x = x + self.attend(x)
            return x + self.down(self.up(x))

        def forward(self, x: Tensor, kept: bool = True) -> Tensor:
            contexts = partial(create_selective_checkpoint_contexts, policy)
            if not kept:
                return self.inside(x)
            return checkpoint(self.inside, x, use_reentrant=False, context_fn=contexts)

    torch.manual_seed(0)
    block = Block().to(DEVICE, WIDE)
    plain = copy.deepcopy(block)
    fully_shard(block, mesh=mesh)
    x = torch.randn(2, 6, 16, dtype=WIDE, device=DEVICE)
    with Names() as ops:
        block(x).square().sum().backward()
    plain(x, kept=False).square().sum().backward()
    assert_close(gradients_of(block), gradients_of(plain), **TIGHT)
    assert (ops.count(HEADS), ops.count(SITE)) == (1, 2)


def compiled(mesh: DeviceMesh) -> None:
    stock, wanted = fused_gpt2()
    shard_blocks(stock, mesh)
    for block in stock.transformer.h:
        block.compile(backend="aot_eager")
    trained_alike(stock, wanted)


def mixed_precision(mesh: DeviceMesh) -> None:
    """Mixed precision (bfloat16 blocks, float32 reduction) has at most twice stock's error."""
    stock = tiny_gpt2().to(DEVICE).train()
    wanted = of_one_process(stock, 2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    errors = []
    for fused in (True, False):
        ours = copy.deepcopy(stock)
        if fused:
            torchweld.fuse(ours, check=False)
        shard_blocks(ours, mesh, mp_policy=policy)
        ran = trained_alike(ours, wanted, rtol=0, atol=1e9)
        assert ran[SITE] == (4 if fused else 0)
        pairs = zip(ours.parameters(), wanted.values(), strict=True)
        errors.append(torch.stack([(full_tensor(p.grad) - want).norm() for p, want in pairs]))
    size = torch.stack([want.norm() for want in wanted.values()])
    assert (errors[0] <= 2 * errors[1] + 1e-3 * size).all(), errors


def an_mlp_of_its_own(mesh: DeviceMesh) -> None:
    """Its parameters are gathered when it runs, so the site there runs stock."""
    stock, wanted = fused_gpt2()
    for block in stock.transformer.h:
        fully_shard(block.mlp, mesh=mesh)
    shard_blocks(stock, mesh)
    ran = trained_alike(stock, wanted)
    assert (ran[SITE], ran[HEADS]) == (2, 2)


def sharded_first(mesh: DeviceMesh) -> None:
    """fuse after fully_shard: the ops run on gathered parameters; unfuse keeps the sharding."""
    stock = gpt2()
    wanted = of_one_process(stock, 2)
    ours = shard_blocks(stock, mesh)
    kinds = [type(module) for module in ours.modules()]
    assert len(torchweld.fuse(ours).replaced) == 6
    assert all(isinstance(block, FSDPModule) for block in ours.transformer.h)
    ran = trained_alike(ours, wanted)
    assert (ran[SITE], ran[HEADS]) == (4, 2)
    torchweld.unfuse(ours)
    assert [type(module).__name__ for module in ours.modules()] == [k.__name__ for k in kinds]
    ours.zero_grad()
    ran = trained_alike(ours, wanted)
    assert ran[SITE] == ran[HEADS] == 0


def decoders_sharded_first(mesh: DeviceMesh) -> None:
    """Every part of a decoder that is sharded already, the loss too, and an MLP of its own."""
    for name, own_mlp in (("Llama", True), ("Qwen3", False)):
        stock = tiny_grouped(name, head_dim=8).to(DEVICE).train()
        whole = copy.deepcopy(stock)
        sum(labelled_loss(whole, ids) for ids in batches(2)).div(2).backward()
        for layer in stock.model.layers if own_mlp else ():
            fully_shard(layer.mlp, mesh=mesh)
        ours = shard_blocks(stock, mesh)
        report = torchweld.fuse(ours, loss=True)
        assert not report.skipped and report.max_abs_diff < 1e-5
        assert not any("not run" in op for op in report.ops.values())
        for runs in (2, 0):
            ours.zero_grad()
            with Names() as ops:
                labelled_loss(ours, batches(2)[dist.get_rank()]).backward()
            assert_close(gradients_of(ours), gradients_of(whole), rtol=1e-4, atol=1e-6)
            for op in ("rms_norm_linears_forward", "gated_mlp_backward", "add_rms_norm_forward"):
                assert ops.count(f"torchweld::{op}") == runs, op
            assert len(torchweld.unfuse(ours)) == (len(report.replaced) if runs else 0)


def masked_models(mesh: DeviceMesh) -> None:
    """The loss of a head that the model gathers; one that is gathered by a module stays stock."""
    more = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "is_decoder": False}
    more["tie_word_embeddings"] = False
    stock = tiny_model("bert", "BertForMaskedLM", "sdpa", **more).to(DEVICE).train()
    whole = copy.deepcopy(stock)
    sum(labelled_loss(whole, ids) for ids in batches(2)).div(2).backward()
    for before, apart in product((True, False), (True, False)):
        ours = copy.deepcopy(stock)
        if before:
            torchweld.fuse(ours, check=False, loss=True)
        for module in (*ours.bert.encoder.layer, *([ours.cls] if apart else [])):
            fully_shard(module, mesh=mesh)
        fully_shard(ours, mesh=mesh)
        if not before:
            reasons = dict(torchweld.fuse(ours, loss=True).skipped)
            assert ("cls.predictions.decoder" in reasons) == apart
        for _ in range(2):
            ours.zero_grad()
            with Names() as ops:
                labelled_loss(ours, batches(2)[dist.get_rank()]).backward()
            assert any("torchweld::linear_cross_entropy" in op for op in ops) != apart
            assert_close(gradients_of(ours), gradients_of(whole), rtol=1e-4, atol=1e-6)


def adapters(mesh: DeviceMesh) -> None:
    """LoRA of PEFT, fused before and after fully_shard."""
    import peft

    config = peft.LoraConfig(target_modules="all-linear", r=4, init_lora_weights=False)
    stock = peft.get_peft_model(tiny_grouped().to(DEVICE), config).train()
    whole = copy.deepcopy(stock)
    sum(labelled_loss(whole, ids) for ids in batches(2)).div(2).backward()
    for before in (False, True):
        ours = copy.deepcopy(stock)
        if before:
            torchweld.fuse(ours, check=False)
        for layer in ours.base_model.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(ours, mesh=mesh)
        if not before:
            assert not torchweld.fuse(ours, check=False).skipped
        with Names() as ops:
            labelled_loss(ours, batches(2)[dist.get_rank()]).backward()
        assert ops.count("torchweld::gated_activation") == 2
        assert ops.count("aten::addmm_") >= 14
        assert_close(gradients_of(ours), gradients_of(whole), rtol=1e-4, atol=1e-6)


def labelled_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def plan_of_transformers(mesh: DeviceMesh) -> None:
    """FSDP2 by `from_pretrained` with a DistributedConfig, fused from the start or later."""
    stock = llama()
    wanted = of_one_process(stock, 2)
    with shared_folder() as folder:
        if dist.get_rank() == 0:
            stock.save_pretrained(folder)
        dist.barrier()
        for implementation in ("torchweld", "sdpa"):
            ours = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=WIDE,
                attn_implementation=implementation,
                distributed_config=transformers.distributed.DistributedConfig(fsdp_size=2),
            ).train()
            if implementation == "sdpa":
                assert expected_skips(torchweld.fuse(ours, check=False))
            assert trained_alike(ours, wanted)[HEADS] == 2


def data_parallel(mesh: DeviceMesh) -> None:
    stock, wanted = fused_gpt2()
    ran = trained_alike(nn.parallel.DistributedDataParallel(stock), wanted)
    assert (ran[SITE], ran[HEADS]) == (4, 2)


def saved_and_loaded(mesh: DeviceMesh) -> None:
    """A distributed checkpoint of a fused, sharded and trained model loads into a stock one."""
    ours, stock = gpt2(), tiny_gpt2(seed=5).to(DEVICE, WIDE).train()
    torchweld.fuse(ours, check=False)
    shard_blocks(ours, mesh)
    optimizer = torch.optim.AdamW(parameter_groups(ours), lr=0.1)
    loss_of(ours, batches(1)[0]).backward()
    optimizer.step()
    state = {"model": stock.state_dict()}
    with shared_folder() as folder:
        dcp.save({"model": ours.state_dict()}, checkpoint_id=folder)
        dcp.load(state, checkpoint_id=folder)
    stock.load_state_dict(state["model"])
    for (name, a), b in zip(ours.named_parameters(), stock.parameters(), strict=True):
        assert torch.equal(full_tensor(a.detach()), b.detach()), name
    ids = batches(1)[0]
    assert_close(loss_of(stock, ids), loss_of(ours, ids), **TIGHT)


def gpt2_with_tensor_parallel(mesh: DeviceMesh) -> None:
    stock = gpt2()
    wanted = of_one_process(stock, 2)
    ours = copy.deepcopy(stock)
    torchweld.fuse(ours, check=False)
    shard_blocks(parallelize(ours, mesh["inner"]), mesh["outer"])
    assert trained_alike(ours, wanted, mesh.get_local_rank("outer"))[SITE] == 4


def with_tensor_parallel(mesh: DeviceMesh) -> None:
    """FSDP2 over one dim of a mesh, tensor parallel over the other; saved and loaded."""
    stock = llama()
    wanted = of_one_process(stock, 2)
    ours = parallelize(copy.deepcopy(stock), mesh["inner"])
    assert expected_skips(torchweld.fuse(ours, check=False))
    shard_blocks(ours, mesh["outer"])
    ran = trained_alike(ours, wanted, mesh.get_local_rank("outer"))
    assert (ran[HEADS], ran["torchweld::gated_mlp_backward"]) == (2, 2)
    loaded = {name: torch.zeros_like(t) for name, t in stock.state_dict().items()}
    with shared_folder() as folder:
        dcp.save(ours.state_dict(), checkpoint_id=folder)
        dcp.load(loaded, checkpoint_id=folder)
    for name, want in stock.state_dict().items():
        assert torch.equal(loaded[name], want), name


def packed_mlps_with_tensor_parallel(mesh: DeviceMesh) -> None:
    """FSDP2 shards another dim of packed weights than parallelize, so that they can be gathered."""
    stock = tiny_grouped("Glm4", head_dim=8).to(DEVICE).train()
    wanted = of_one_process(stock, 2)
    ours = parallelize(copy.deepcopy(stock), mesh["inner"])
    torchweld.fuse(ours, check=False)
    packed = {layer.mlp.gate_up_proj.weight for layer in ours.model.layers}
    shard_blocks(ours, mesh["outer"], shard_placement_fn=lambda p: Shard(int(p in packed)))
    ran = trained_alike(ours, wanted, mesh.get_local_rank("outer"), rtol=1e-4, atol=1e-5)
    assert ran["torchweld::gated_linear_backward"] == 2
    for name, want in stock.state_dict().items():
        given = ours.state_dict()[name]
        assert torch.equal(full_tensor(given) if isinstance(given, DTensor) else given, want), name


def losses_with_tensor_parallel(mesh: DeviceMesh) -> None:
    """The loss of a head whose classes are sharded, under FSDP2, fused before or after it."""
    stock = tiny_grouped().to(DEVICE).train()
    whole = copy.deepcopy(stock)
    sum(labelled_loss(whole, ids) for ids in batches(2)).div(2).backward()
    for before in (True, False):
        ours = parallelize(copy.deepcopy(stock), mesh["inner"])
        if before:
            torchweld.fuse(ours, check=False, loss=True)
        shard_blocks(ours, mesh["outer"])
        if not before:
            torchweld.fuse(ours, check=False, loss=True)
        with Names() as ops:
            loss = labelled_loss(ours, batches(2)[mesh.get_local_rank("outer")])
        assert sum("torchweld::linear_cross_entropy" in op for op in ops) == 1
        loss.backward()
        assert_close(gradients_of(ours), gradients_of(whole), rtol=1e-4, atol=1e-5)


def modules_with_tensor_parallel(mesh: DeviceMesh) -> None:
    """NormColwise in sequence parallel under fully_shard equals one process over two batches."""
    for rows in (Rowwise, RowwiseParallel):
        torch.manual_seed(0)
        stock = nn.Sequential(
            torchweld.nn.RMSNormLinear(8, 16, activation="silu"), nn.Linear(16, 8)
        ).to(DEVICE, WIDE)
        ours = copy.deepcopy(stock)
        place = Shard(1)
        plan = {"0": NormColwise(input_layouts=place), "1": rows(output_layouts=place)}
        fully_shard(parallelize_module(ours, mesh["inner"], plan), mesh=mesh["outer"])
        for _ in range(2):
            whole = torch.randn(2, 2, 4, 8, dtype=WIDE, device=DEVICE)
            stock(whole).square().sum().div(2).backward()
            x = whole[mesh.get_local_rank("outer")].chunk(2, 1)[mesh.get_local_rank("inner")]
            ours(x).square().sum().backward()
        assert_close(gradients_of(ours), gradients_of(stock), **TIGHT)


def mixed_modules_with_tensor_parallel(mesh: DeviceMesh) -> None:
    """In bfloat16 inside, where FSDP2's DTensors still say float32."""
    torch.manual_seed(0)
    stock = nn.Sequential(
        torchweld.nn.LayerNormLinear(8, 16, activation="gelu"),
        nn.Linear(16, 8),
        torchweld.nn.RMSNormLinear(8, 8),
        torchweld.nn.GatedLinear(8, 16, interleaved=True),
        nn.Linear(16, 8),
    ).to(DEVICE)
    ours = copy.deepcopy(stock)
    norm, rows = NormColwise(), Rowwise()
    third = NormColwise(output_layouts=Replicate())
    parallelize_module(
        ours, mesh["inner"], {"0": norm, "1": rows, "2": third, "3": norm, "4": rows}
    )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for model, group in ((ours, mesh["outer"]), (stock, mesh["outer", "inner"]._flatten("both"))):
        fully_shard(model, mesh=group, mp_policy=policy)
    x = torch.randn(4, 8, device=DEVICE)
    for model in (ours, stock):
        model(x).float().square().mean().backward()
    for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
        got, want = full_tensor(a.grad), full_tensor(b.grad)
        # bfloat16 rounds a few sums of 8 or 16 products.
        assert (got - want).norm() <= 8 * 2**-8 * want.norm()


def packed_weights_are_not_lost(mesh: DeviceMesh) -> None:
    """FSDP2's placements list another order than it shards in; gathering and saving raise."""
    layer = torchweld.nn.GatedLinear(8, 16, device=DEVICE)
    parallelize_module(layer, mesh["inner"], NormColwise())
    fully_shard(layer, mesh=mesh["outer"])
    with refused(ValueError, "full_tensor: dim 0 of t must be sharded by one dim of the mesh"):
        full_tensor(layer.weight)
    sentence = "Failed to validate global plan"
    with shared_folder() as folder, refused(dcp.api.CheckpointException, sentence):
        dcp.save(layer.state_dict(), checkpoint_id=folder)


def with_context_parallel(mesh: DeviceMesh) -> None:
    """Tokens over one dim, batches over the other, parameters over both."""
    stock, wanted = fused_gpt2()
    shard_blocks(stock, mesh["outer", "inner"]._flatten("all"))
    ids = batches(2)[mesh.get_local_rank("outer")]
    group = mesh["inner"]
    positions = shard_sequence(torch.arange(8, device=DEVICE).expand(2, -1), group)
    mine = shard_sequence(ids, group)
    with context_parallel(group):
        logits = stock(input_ids=mine, position_ids=positions, use_cache=False).logits
        # FSDP2 averages over all processes; the inner ones each have a part of one loss.
        loss = F.cross_entropy(logits.flatten(0, 1), mine.flatten())
        loss.backward()
    assert_close(gradients_of(stock), wanted, **TIGHT)


def example(options: str, mesh: DeviceMesh) -> None:
    """examples/train_parallel.py, run in these processes, has the loss of one process."""
    path = Path(__file__).resolve().parent.parent / "examples" / "train_parallel.py"
    spec = importlib.util.spec_from_file_location("train_parallel", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sizes = "--steps 3 --batch 4 --context 32 --width 32 --heads 4 --vocab 300"
    options = [*options.split(), *sizes.split(), "--text", str(path)]
    with shared_folder() as folder, patch.dict(os.environ, TORCHWELD_CACHE_DIR=folder):
        assert module.main(options) == 0
        module.TOLERANCE = -1.0  # which no loss is within
        assert module.main([*options, "--steps", "1"]) == 1
        for wrong in (["--cp", "3"], ["--fsdp", "1", "--cp", "1", "--tp", "1"]):
            assert module.main([*options, *wrong]) == 2


def cases(mesh: str) -> dict[str, Callable[[DeviceMesh], None]]:
    every = [
        fused_first, recomputed, recomputed_in_part, compiled, mixed_precision, an_mlp_of_its_own,
        sharded_first, decoders_sharded_first, plan_of_transformers, data_parallel,
        saved_and_loaded, masked_models,
    ]  # fmt: skip
    if mesh == "2x2":
        every = [
            with_tensor_parallel, gpt2_with_tensor_parallel, packed_mlps_with_tensor_parallel,
            losses_with_tensor_parallel, modules_with_tensor_parallel,
            mixed_modules_with_tensor_parallel, packed_weights_are_not_lost, with_context_parallel,
        ]  # fmt: skip
    elif importlib.util.find_spec("peft") is not None:
        every.append(adapters)
    of_example = {
        "2": ["--tp 2", "--model llama --cp 2 --method ring", "--model llama --fsdp 2"],
        "2x2": ["--cp 2 --tp 2", "--model llama --fsdp 2 --tp 2"],
    }
    named = {options: partial(example, options) for options in of_example[mesh]}
    return {case.__name__: case for case in every} | named
