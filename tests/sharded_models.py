"""Modules and models under tensor parallelism, run in the processes of a mesh (meshes.py)."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.testing import assert_close
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import torchweld
from meshes import DEVICE, TIGHT, WIDE, Names, expected_skips, refused, shared_folder
from tiny_models import VOCAB, tiny_gpt2, tiny_grouped
from torchweld.distributed import (
    NormColwise,
    Rowwise,
    full_tensor,
    overlap,
    parallelize,
    parameter_groups,
)
from torchweld.distributed.collectives import copy_to_tp_region, copy_to_tp_region_once, gathered
from torchweld.distributed.tensors import local_part


def whole(t: Tensor) -> Tensor:
    return full_tensor(t) if isinstance(t, DTensor) else t


def drawn_anew(module: nn.Module) -> nn.Module:
    """Moves a module to the device in its widest dtype, with random norms and biases: 1 and 0 would
    hide a forgotten one.
    """
    for name, parameter in module.named_parameters():
        if "norm" in name or "ln_" in name or name.endswith("bias"):
            nn.init.normal_(parameter, 0.5, 0.3)
    return module.to(DEVICE, WIDE)


def same_gradients(ours: nn.Module, stock: nn.Module, **tolerance: float) -> None:
    theirs = dict(stock.named_parameters())
    assert [name for name, _ in ours.named_parameters()] == list(theirs)
    for name, parameter in ours.named_parameters():
        want = theirs[name].grad
        assert (parameter.grad is None) == (want is None), name
        if want is None:
            continue
        assert want.abs().max() > 0, name
        grad, allowed = whole(parameter.grad), tolerance or TIGHT
        assert_close(grad, want, **allowed, msg=lambda m, n=name: f"d{n}: {m}")


def steps(ours: nn.Module, stock: nn.Module) -> None:
    """A step of AdamW with foreach, the default on GPUs, leaves both with the same parameters."""
    for model in (ours, stock):
        torch.optim.AdamW(parameter_groups(model), lr=0.1, eps=1.0, foreach=True).step()
    for (name, a), b in zip(ours.named_parameters(), stock.parameters(), strict=True):
        assert_close(whole(a.detach()), b.detach(), **TIGHT, msg=lambda m, n=name: f"{n}: {m}")


def tokens(mesh: DeviceMesh, place: Any, *size: int, dtype: torch.dtype = WIDE) -> list[Tensor]:
    """Random tokens of all processes, and this one's part of them; both are leaves."""
    x = torch.randn(size, device=DEVICE).to(dtype)
    dist.broadcast(x, 0)
    part = distribute_tensor(x, mesh, [place]).to_local().clone()
    return [x.requires_grad_(), part.requires_grad_()]


def same_parts(mesh: DeviceMesh, place: Any, *pairs: tuple[Tensor, Tensor]) -> None:
    for part, want in pairs:
        assert_close(full_tensor(DTensor.from_local(part, mesh, [place])), want, **TIGHT)


class MLP(nn.Module):
    def __init__(self, up: nn.Module, down: nn.Linear) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x))


def sharded(stock: MLP, mesh: DeviceMesh, place: Any, rows: Any = Rowwise) -> MLP:
    """A copy with its tokens in this placement."""
    ours = copy.deepcopy(stock)
    plan = {"up": NormColwise(input_layouts=place), "down": rows(output_layouts=place)}
    return parallelize_module(ours, mesh, plan)


def styles(mesh: DeviceMesh) -> None:
    """An MLP of each module in front of a row-parallel linear layer, of ours or torch's style, with
    and without sequence parallel, is the one of one process: result, gradients, a step of the
    optimizer.
    """
    ups = [
        torchweld.nn.LayerNormLinear(6, 8, activation="gelu"),
        torchweld.nn.LayerNormLinear(6, 8, bias=False, ln_affine=False),
        torchweld.nn.RMSNormLinear(6, 8, activation="silu"),
        torchweld.nn.GatedLinear(6, 8, gate="swiglu"),
        torchweld.nn.GatedLinear(6, 8, bias=False, interleaved=True),
    ]
    for up, sequence, rows in product(ups, (False, True), (Rowwise, RowwiseParallel)):
        stock = drawn_anew(MLP(copy.deepcopy(up), nn.Linear(8, 6, bias=up.bias is not None)))
        place = Shard(1) if sequence else Replicate()
        ours = sharded(stock, mesh, place, rows)
        x, mine = tokens(mesh, place, 2, 4, 6)
        y, want = ours(mine), stock(x)
        draw = torch.Generator().manual_seed(1)
        dy = torch.randn(want.shape, dtype=WIDE, generator=draw).to(DEVICE)
        want.backward(dy)
        y.backward(distribute_tensor(dy, mesh, [place]).to_local())
        same_parts(mesh, place, (y, want), (mine.grad, x.grad))
        same_gradients(ours, stock)
        steps(ours, stock)


def memory_of_styles(mesh: DeviceMesh) -> None:
    """Each process has only its part of the weight, and backward sums one tensor."""
    layer = torchweld.nn.LayerNormLinear(6, 8, device=DEVICE)
    parallelize_module(layer, mesh, NormColwise())
    assert layer.weight.to_local().shape == (8 // mesh.size(), 6)
    x = torch.randn(3, 6, device=DEVICE, requires_grad=True)
    with CommDebugMode() as comms:
        y = layer(x)
        assert not comms.get_total_counts() and y.shape == (3, 8 // mesh.size())
        y.sum().backward()
    assert comms.get_total_counts() == 1, comms.get_comm_counts()
    assert layer.ln_weight.grad.placements == (Replicate(),)


def collectives_of_sequences(mesh: DeviceMesh) -> None:
    """Forward and backward each gather and scatter the tokens once; backward also sums the norm's
    gradients, and nothing else.
    """
    stock = MLP(torchweld.nn.LayerNormLinear(6, 8, activation="gelu"), nn.Linear(8, 6)).to(DEVICE)
    ours = sharded(stock, mesh, Shard(1))

    def counted(call: Callable[[], Any]) -> tuple[Any, list[str]]:
        with CommDebugMode() as comms:
            given = call()
        counts = comms.get_comm_counts().items()
        names = (str(op).partition(".")[2].strip("_") for op, n in counts for _ in range(n))
        return given, sorted(names)

    # Batches of one sequence, of a few, and of many, which are copied before they are sent.
    for batch, moved in (
        (1, ["allgather_base", "reduce_scatter_base"]),
        (2, ["allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"]),
        (20, ["all_gather_into_tensor", "reduce_scatter_tensor"]),
    ):
        x = torch.randn(batch, 2, 6, device=DEVICE, requires_grad=True)
        y, forward = counted(lambda x=x: ours(x))
        assert forward == moved, forward
        _, backward = counted(lambda y=y: y.sum().backward())
        assert sorted(backward) == sorted([*moved, "allreduce_coalesced"]), backward
        with torch.no_grad():
            again, forward = counted(lambda x=x: ours(x))
        assert forward == moved, forward
        assert_close(again, y)


class GlooBuffer:
    """A `_SymmetricBuffer` for processes without GPUs: gloo sends the parts."""

    def __init__(self) -> None:
        self.rank, self.sent = dist.get_rank(), []
        self.on_side_stream, self.mine = lambda sending: nullcontext(), torch.empty(0)

    def slots(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        self.mine = torch.full((dist.get_world_size(), *shape), torch.nan, dtype=dtype)
        return self.mine

    def send(self, shard: Tensor, to: int) -> None:
        self.sent.append((dist.isend(shard, to), shard))

    def wait(self, of: int) -> None:
        dist.recv(self.mine[of], of)

    def join(self) -> None:
        while self.sent:
            self.sent.pop()[0].wait()


@contextmanager
def overlapped() -> Iterator[list[str]]:
    """Overlaps linear layers of every size; yields the names of the overlapped calls."""
    ran: list[str] = []

    def counting(name: str) -> Callable[..., Any]:
        product = getattr(overlap, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            ran.append(name.partition("_")[0])
            return product(*args, **kwargs)

        return call

    changes = {name: counting(name) for name in ("gathered_linear", "scattered_linear")}
    changes |= {"_MIN_PRODUCTS": 0, "_MIN_PRODUCTS_OF_GRAPHS": 0}
    if DEVICE == "cpu":
        changes["_symmetric_buffer"] = lambda mesh, size: GlooBuffer()
        changes["_supports_p2p"] = lambda x: True
    with patch.multiple(overlap, **changes):
        yield ran


def overlap_equals_one_process(mesh: DeviceMesh) -> None:
    """Overlapped linear layers give the answers of one process."""
    every = ["gathered", "scattered", "gathered", "scattered"]  # forward and backward
    for activation, bias in product(("none", "gelu_tanh", "gelu", "silu", "relu"), (True, False)):
        layer = torchweld.nn.LayerNormLinear(16, 32, bias=bias, activation=activation)
        stock = drawn_anew(MLP(layer, nn.Linear(32, 16, bias=bias)))
        place = Shard(1)
        ours = sharded(stock, mesh, place)
        for batch in (1, 2, 17):
            x, mine = tokens(mesh, place, batch, 8, 16)
            with overlapped() as calls:
                y, want = ours(mine), stock(x)
                want.square().sum().backward(), y.square().sum().backward()
                assert calls == (every if batch < 17 else []), calls
                with torch.no_grad():
                    assert_close(ours(mine), y, **TIGHT)
            same_parts(mesh, place, (y, want), (mine.grad, x.grad))
        same_gradients(ours, stock)
    small, weight = torch.randn(1, 8, 16, device=DEVICE), ours.up.weight.to_local()
    with patch.object(overlap, "_supports_p2p", lambda x: True):
        for gathers in (True, False):
            assert not overlap.supports_overlap(mesh, 1, small, weight, gathers=gathers)


def some_gradients_of_overlap(mesh: DeviceMesh) -> None:
    """Overlapped layers make no gradients of frozen parameters, take x of two dims and dy of any
    strides. Backward inside autocast computes in the dtypes of forward.
    """
    place = Shard(0)
    every = ["up.weight", "up.bias", "down.weight", "down.bias"]
    for frozen in ([], every[:2], every[1:3], every[3:], every):
        layer = torchweld.nn.LayerNormLinear(16, 32, activation="gelu_tanh")
        stock = drawn_anew(MLP(layer, nn.Linear(32, 16))).to(torch.float32)
        ours = sharded(stock, mesh, place)
        for model in (ours, stock):
            for name in frozen:
                model.get_parameter(name).requires_grad_(False)
        x, dy = (torch.randn(16, 8, device=DEVICE).t() for _ in range(2))
        dist.broadcast(x := x.contiguous(), 0), dist.broadcast(dy := dy.contiguous(), 0)
        mine = distribute_tensor(x, mesh, [place]).to_local().clone().requires_grad_()
        mine_dy = distribute_tensor(dy, mesh, [place]).to_local()
        x.requires_grad_()
        with overlapped() as calls:
            y, want = ours(mine), stock(x)
            want.backward(dy)
            y += 0  # is no view
            with torch.autocast(DEVICE, torch.bfloat16):
                y.backward(mine_dy.t().contiguous().t())
        assert calls == ["gathered", "scattered", "gathered", "scattered"], calls
        for a, b in ((y, want), (mine.grad, x.grad)):
            whole_a = full_tensor(DTensor.from_local(a.detach(), mesh, [place]))
            assert_close(whole_a, b.detach(), rtol=1e-4, atol=1e-4)
        theirs = dict(stock.named_parameters())
        for name, parameter in ours.named_parameters():
            assert (parameter.grad is None) == (name in frozen), name
            if name not in frozen:
                assert_close(whole(parameter.grad), theirs[name].grad, rtol=1e-4, atol=1e-4)


def errors_of_overlap(mesh: DeviceMesh) -> None:
    """A matmul that raises leaves the next overlapped calls right."""
    x, weight = torch.randn(1, 8, 16, device=DEVICE), torch.randn(32, 16, device=DEVICE)
    dist.broadcast(weight, 0)

    def gathered_y() -> Tensor:
        return overlap.gathered_linear(mesh, 1, x, weight)[1]

    with overlapped():
        want = gathered_y()
        with patch.object(overlap, "ops", None), refused(AttributeError, "_linear_part"):
            gathered_y()
        assert_close(gathered_y(), want)


def overlap_in_graphs(mesh: DeviceMesh) -> None:
    """A CUDA graph overlaps matmuls that are too small for overlap in eager mode; eager calls
    allocate its buffers. The graph is replayed with other tokens.
    """
    stock = drawn_anew(MLP(torchweld.nn.LayerNormLinear(16, 32), nn.Linear(32, 16)))
    place = Shard(1)
    ours = sharded(stock, mesh, place)
    whole_x = torch.randn(2, 8, 16, dtype=WIDE, device=DEVICE)
    dist.broadcast(whole_x, 0)
    x = distribute_tensor(whole_x, mesh, [place]).to_local().clone().requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        y = ours(x)
        return y.detach(), torch.autograd.grad(y.square().sum(), x)[0]

    with overlapped() as calls, patch.object(overlap, "_MIN_PRODUCTS", 1 << 60):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        assert not calls, calls
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, dx = step()
    assert calls == ["gathered", "scattered", "gathered", "scattered"], calls
    for times in range(3):
        with torch.no_grad():
            x.mul_(1 + times)
            whole_x.mul_(1 + times)
        graph.replay()
        want_x = whole_x.clone().requires_grad_()
        want = stock(want_x)
        (want_dx,) = torch.autograd.grad(want.square().sum(), want_x)
        same_parts(mesh, place, (y, want.detach()), (dx, want_dx))


def gradients_of_parameters(mesh: DeviceMesh) -> None:
    """Autograd passes a DTensor parameter's gradient to hooks, `torch.autograd.grad` and the
    accumulated sum, and to nothing that is not in `inputs`.
    """

    def made() -> tuple[nn.Parameter, Tensor]:
        t = torch.arange(4.0, device=DEVICE).outer(torch.ones(2, device=DEVICE))
        return nn.Parameter(distribute_tensor(t, mesh, [Shard(0)])), t.chunk(mesh.size())[rank]

    rank = mesh.get_local_rank()
    parameter, part = made()
    y = (local_part(parameter) ** 2).sum()
    (grad,) = torch.autograd.grad(y, parameter, retain_graph=True)
    assert grad.placements == (Shard(0),)
    assert parameter.grad is None
    assert_close(grad.to_local(), 2 * part)
    y.backward(inputs=[torch.zeros(1, device=DEVICE, requires_grad=True)], retain_graph=True)
    assert parameter.grad is None
    for times in (1, 2):
        y.backward(inputs=[parameter], retain_graph=True)
        assert parameter.grad.placements == (Shard(0),)
        assert_close(parameter.grad.to_local(), 2 * times * part)

    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        parameter, part = made()
        seen: list[Tensor] = []
        getattr(parameter, register)(lambda t, seen=seen: seen.append(t))
        (local_part(parameter) ** 2).sum().backward()
        assert len(seen) == 1
        assert_close(parameter.grad.to_local(), 2 * part)

    # AccumulateGrad, which DDP hooks, receives the gradient of every parameter of a layer.
    for place in (Replicate(), Shard(1)):
        layers = MLP(torchweld.nn.LayerNormLinear(6, 8), nn.Linear(8, 6)).to(DEVICE)
        layers = sharded(layers, mesh, place)
        received: dict[str, Tensor] = {}
        nodes = []  # a node that nothing references is made anew, without its hooks
        for name, parameter in layers.named_parameters():
            nodes.append(parameter.view_as(parameter).grad_fn.next_functions[0][0])
            nodes[-1].register_prehook(
                lambda grads, n=name, into=received: into.update({n: grads[0]})
            )
        layers(torch.randn(1, 4, 6, device=DEVICE)).square().sum().backward()
        for name, parameter in layers.named_parameters():
            assert_close(received[name].to_local(), parameter.grad.to_local())

    # Autograd passes one gradient tensor to both parameters; they must not share it.
    (first, _), (second, _) = made(), made()
    (local_part(first) + local_part(second)).square().sum().backward()
    first.grad.to_local().zero_()
    assert_close(second.grad.to_local(), 4 * part)

    # The caller may pass gradients in another layout; autograd keeps them in the parameter's.
    parameter, part = made()
    dy = torch.ones(2, len(part), device=DEVICE)
    local_part(parameter).t().backward(dy)
    assert parameter.grad.to_local().stride() == parameter.to_local().stride()
    parameter, part = made()
    dy = torch.ones_like(part)
    local_part(parameter).backward(dy)
    parameter.grad.to_local().zero_()
    assert dy.sum() == dy.numel()

    # A second derivative, which the layers lack, raises.
    for place in (Replicate(), Shard(1)):
        layer = torchweld.nn.LayerNormLinear(6, 8, activation="gelu").to(DEVICE)
        ours = sharded(MLP(layer, nn.Linear(8, 6).to(DEVICE)), mesh, place)
        loss = ours(torch.randn(1, 4, 6, device=DEVICE)).square().sum()
        for parameter in (ours.up.ln_weight, ours.down.weight)[: 1 + place.is_shard()]:
            with refused(RuntimeError, "create_graph must be False, because a second derivative"):
                torch.autograd.grad(loss, parameter, create_graph=True)

    # `local_part` has second derivatives.
    parameter, part = made()
    (grad,) = torch.autograd.grad((local_part(parameter) ** 3).sum(), parameter, create_graph=True)
    grad.to_local().sum().backward()
    assert_close(parameter.grad.to_local(), 6 * part)


def compiled_sequences(mesh: DeviceMesh) -> None:
    """Layers in sequence parallel compile without a graph break."""
    for layer in (torchweld.nn.LayerNormLinear, torchweld.nn.RMSNormLinear):
        stock = drawn_anew(MLP(layer(6, 8, activation="gelu"), nn.Linear(8, 6)))
        ours = sharded(stock, mesh, Shard(1))
        ours.compile(backend="aot_eager", fullgraph=True)
        x, mine = tokens(mesh, Shard(1), 2, 4, 6)
        y, want = ours(mine), stock(x)
        same_parts(mesh, Shard(1), (y, want))
        y.square().sum().backward(), want.square().sum().backward()
        same_gradients(ours, stock)


def norms_of_shards(mesh: DeviceMesh) -> None:
    """In sequence parallel a process normalises only its own rows, and gathers them in the dtype of
    the matmul.
    """
    layers = [
        torchweld.nn.LayerNormLinear(6, 8, activation="gelu"),
        torchweld.nn.RMSNormLinear(6, 8, activation="gelu"),
    ]
    exact, rounded = (torch.float32, torch.float32, 1e-5), (torch.float32, torch.bfloat16, 2e-2)
    for layer, (given, dtype, error) in product(
        layers, (exact, rounded, (torch.bfloat16, torch.bfloat16, 2e-2))
    ):
        stock = drawn_anew(copy.deepcopy(layer)).float()
        ours = copy.deepcopy(stock)
        style = NormColwise(input_layouts=Shard(1), output_layouts=Replicate())
        parallelize_module(ours, mesh, style)
        x, mine = tokens(mesh, Shard(1), 2, 4, 6, dtype=given)
        with (
            torch.autocast(x.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16),
            patch("torchweld.distributed.products.gathered", wraps=gathered) as gathering,
            Names() as ran,
        ):
            y, want = ours(mine), stock(x)
        rows = gathering.call_args_list[0].args[2]
        assert rows.shape == mine.shape and rows.dtype == dtype
        assert y.dtype == want.dtype == dtype
        close = partial(assert_close, rtol=error, atol=error)
        close(y, want)
        y.sum().backward(), want.sum().backward()
        close(mine.grad, distribute_tensor(x.grad, mesh, [Shard(1)]).to_local())
        for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
            close(whole(a.grad), b.grad, atol=error * float(b.grad.abs().max()))
        assert "torchweld::linear_forward" in ran
        assert ("aten::native_layer_norm" in ran) == isinstance(ours, torchweld.nn.LayerNormLinear)


def refusals_of_styles(mesh: DeviceMesh) -> None:
    layer = torchweld.nn.RMSNormLinear(4, 5, device=DEVICE)
    with refused(ValueError, "NormColwise: out_features must be a multiple of the mesh's 2 "):
        parallelize_module(layer, mesh, NormColwise())
    assert type(layer.weight) is nn.Parameter
    with refused(ValueError, "Rowwise: in_features must be a multiple of the mesh's 2 processes"):
        parallelize_module(nn.Linear(5, 4, device=DEVICE), mesh, Rowwise())
    with refused(TypeError, "Rowwise: module must be nn.Linear"):
        parallelize_module(torchweld.nn.RMSNormLinear(4, 4), mesh, Rowwise())
    with refused(ValueError, "Rowwise: output_layouts must be Replicate() or Shard(dim), but got"):
        Rowwise(output_layouts=Partial())
    x = torch.randn(2, 3, 4 // mesh.size(), device=DEVICE)
    for dim, sentence in (
        (1, "Rowwise: dim 1 of x must be a multiple of the mesh's 2 processes, but got 3"),
        (-1, "Rowwise: output_layouts must be Replicate() or a dim of the tokens, but got Shard("),
        (4, "Rowwise: output_layouts must shard one of the 3 dims of x, but got Shard(4)"),
    ):
        rows = nn.Linear(4, 4, device=DEVICE)
        parallelize_module(rows, mesh, Rowwise(output_layouts=Shard(dim)))
        with CommDebugMode() as comms, refused(ValueError, sentence):
            rows(x)
        assert not comms.get_total_counts()
    columns = torchweld.nn.RMSNormLinear(4, 4, device=DEVICE)
    parallelize_module(columns, mesh, NormColwise(input_layouts=Shard(3)))
    with refused(ValueError, "NormColwise: input_layouts must shard one of the 3 dims of x, but "):
        columns(torch.randn(2, 3, 4, device=DEVICE))
    with refused(TypeError, "NormColwise: module must be one of LayerNormLinear, "):
        parallelize_module(nn.Linear(4, 4), mesh, NormColwise())
    with refused(ValueError, "NormColwise: device_mesh must have one dim, but got 2"):
        square = DeviceMesh(DEVICE, [[0], [1]])
        NormColwise()._apply(torchweld.nn.RMSNormLinear(4, 4), square)


def prompts(pads: tuple[int, ...] = (0, 3)) -> dict[str, Tensor]:
    ids = torch.randint(1, VOCAB, (len(pads), 8), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(8) >= torch.tensor(pads)[:, None]).long()
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    return {name: t.to(DEVICE) for name, t in given.items()}


def loss_of(model: nn.Module) -> Tensor:
    """The loss of the tokens; at padding, implementations differ."""
    given = prompts()
    logits, mask = model(**given).logits, given["attention_mask"].bool()
    assert type(logits) is Tensor
    return F.cross_entropy(logits[mask], given["input_ids"][mask])


def gpt2() -> nn.Module:
    return drawn_anew(tiny_gpt2()).train()


def llama(**changes: Any) -> nn.Module:
    return drawn_anew(tiny_grouped(**changes)).train()


def glm4(**changes: Any) -> nn.Module:
    return drawn_anew(tiny_grouped("Glm4", head_dim=8, **changes)).train()


def trained_alike(ours: nn.Module, stock: nn.Module) -> None:
    loss, want = loss_of(ours), loss_of(stock)
    assert_close(loss, want, **TIGHT)
    loss.backward(), want.backward()
    same_gradients(ours, stock)
    steps(ours, stock)
    assert_close(loss_of(ours), loss_of(stock), **TIGHT)


def parallelized(make: Callable[[], nn.Module], before: bool, mesh: DeviceMesh) -> None:
    """`fuse` before or after `parallelize`: modules stay fused, and training equals stock's."""
    stock = make()
    ours = copy.deepcopy(stock)
    if before:
        report = torchweld.fuse(ours)
    parallelize(ours, mesh)
    if not before:
        report = torchweld.fuse(ours, check=False)
    assert expected_skips(report) and report.replaced
    assert any(isinstance(p, DTensor) for p in ours.parameters())
    with Names() as ops:
        trained_alike(ours, stock)
    assert "torchweld::attention_forward" in ops
    assert ("torchweld::layer_norm_linear_forward" in ops) == (make is gpt2)
    torchweld.unfuse(ours)
    assert_close(loss_of(ours), loss_of(stock), **TIGHT)


def sharded_and_fused(stock: nn.Module, mesh: DeviceMesh) -> nn.Module:
    ours = parallelize(copy.deepcopy(stock), mesh)
    torchweld.fuse(ours, check=False)
    return ours


def decoders_in_float32(mesh: DeviceMesh) -> None:
    """Each block runs its fused parts on this process's columns and rows."""
    more = {"head_dim": 8}
    for before, (name, changes) in product(
        (False, True),
        (
            ("Llama", {"attention_bias": True, "mlp_bias": True}),
            ("Qwen3", more),
            ("Gemma2", {**more, "implementation": "eager"}),
            ("Glm4", more),
            ("Glm", more),  # in no table
            ("Phi3", {}),
        ),
    ):
        stock = drawn_anew(tiny_grouped(name, **changes)).float().train()
        ours = copy.deepcopy(stock)
        if before:
            report = torchweld.fuse(ours, check=False)
        parallelize(ours, mesh)
        if not before:
            report = torchweld.fuse(ours)
            assert not report.skipped, (name, report.skipped)
            assert not any("not run" in op for op in report.ops.values()), (name, report.ops)
        runs = parts_run(ours, stock)
        # The results of Phi-3's qkv_proj are gathered, so it must be called. A recognised attention
        # runs its stock forward, which calls its sharded projections.
        mlp = "gated_linear" if name in ("Glm4", "Glm", "Phi3") else "gated_mlp"
        heads = {} if name in ("Phi3", "Glm") else {"rms_norm_linears_forward": 2}
        assert runs == {f"{mlp}_backward": 2, **heads}, (name, runs)


def parts_run(ours: nn.Module, stock: nn.Module) -> dict[str, int]:
    """How often a step runs two ops, with the logits and gradients of the stock model."""
    mask = prompts()["attention_mask"].bool()
    logits = [model(**prompts()).logits[mask] for model in (ours, stock)]
    assert_close(*logits, rtol=1e-4, atol=1e-5)
    with Names() as ops:
        loss_of(ours).backward()
    loss_of(stock).backward()
    same_gradients(ours, stock, rtol=1e-4, atol=1e-5)
    counted = ("gated_mlp_backward", "gated_linear_backward", "rms_norm_linears_forward")
    runs = {name: ops.count(f"torchweld::{name}") for name in counted}
    return {name: count for name, count in runs.items() if count}


def adapted_mlps(mesh: DeviceMesh) -> None:
    """An MLP whose down_proj must be called runs gate and up in one op on its columns."""
    stock = llama().float()
    ours = parallelize(copy.deepcopy(stock), mesh)
    torchweld.fuse(ours)
    for layer in ours.model.layers:
        layer.mlp.down_proj.register_forward_hook(lambda module, args, out: None)
    with Names() as ops:
        loss = loss_of(ours)
    assert ops.count("torchweld::gated_linear_pair_forward") == 2
    loss.backward(), loss_of(stock).backward()
    same_gradients(ours, stock, rtol=1e-4, atol=1e-5)


def packed_mlps(mesh: DeviceMesh) -> None:
    """Each process has the same columns of both halves of a packed weight, stock or fused."""
    for activation, fused in product(("silu", "gelu"), (False, True)):
        stock = glm4(hidden_act=activation)
        ours = parallelize(copy.deepcopy(stock), mesh)
        if fused:
            report = torchweld.fuse(ours, check=False)
            assert report.ops["model.layers.0.mlp"].startswith("gated_")
        mlp, whole_mlp = ours.model.layers[0].mlp, stock.model.layers[0].mlp
        part = mlp.gate_up_proj.weight.to_local().unflatten(0, (2, -1))
        halves = whole_mlp.gate_up_proj.weight.unflatten(0, (2, -1))
        assert torch.equal(part, halves.chunk(mesh.size(), 1)[mesh.get_local_rank()])
        assert torch.equal(full_tensor(mlp.gate_up_proj.weight), whole_mlp.gate_up_proj.weight)
        x = torch.randn(2, 3, 32, dtype=WIDE, device=DEVICE)
        dist.broadcast(x, 0)
        with Names() as ops:
            assert_close(mlp(x), whole_mlp(x), **TIGHT)
        assert [op for op in ops if op.startswith("c10d")] == ["c10d::allreduce_"]
        trained_alike(ours, copy.deepcopy(stock))


def packed_heads(mesh: DeviceMesh) -> None:
    """Each process attends with its heads of a packed projection, stock, fused or compiled."""
    stock = drawn_anew(tiny_grouped("Phi3")).train()
    for how in ("stock", "fused", "compiled", "checkpointed"):
        ours = parallelize(copy.deepcopy(stock), mesh)
        if how != "stock":
            torchweld.fuse(ours, check=False)
        if how == "compiled":
            for layer in ours.model.layers:
                layer.compile(backend="aot_eager", fullgraph=True)
        elif how == "checkpointed":
            ours = copy.deepcopy(ours)
            ours.gradient_checkpointing_enable({"use_reentrant": False})
        seen: list[torch.Size] = []
        ours.model.layers[0].self_attn.o_proj.register_forward_pre_hook(
            lambda module, args, seen=seen: seen.append(args[0].shape)
        )
        trained_alike(ours, trained := copy.deepcopy(stock))
        assert how == "compiled" or set(seen) == {torch.Size((2, 8, 32 // mesh.size()))}
        given = {**prompts(), "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        # generate compiles into CUDA graphs, which can't hold a collective for which the host waits
        # (TORCH_NCCL_BLOCKING_WAIT in meshes.py).
        given["disable_compile"] = True
        for cache in (None, "static") if how == "fused" else ():
            given["cache_implementation"] = cache
            assert torch.equal(*(m.eval().generate(**given) for m in (ours, trained)))
        config = pickle.loads(pickle.dumps(ours.model.layers[0].self_attn.config))
        assert (config.num_attention_heads, config.hidden_size) == (4 // mesh.size(), 32)
        ours.set_attn_implementation("eager")
        assert ours.model.layers[0].self_attn.config._attn_implementation == "eager"


def packed_mlps_that_stay_gathered(mesh: DeviceMesh) -> None:
    """MLPs of an odd size or of other code have transformers' plan, and their results are right."""

    def neighbours(self: nn.Module, x: Tensor) -> Tensor:
        both = self.gate_up_proj(x)
        return self.down_proj(self.activation_fn(both[..., ::2]) * both[..., 1::2])

    cls = transformers.models.glm4.modeling_glm4.Glm4MLP
    other = type("OtherMLP", (cls,), {"forward": neighbours})
    for size, kind in ((47, cls), (48, other)):
        stock = drawn_anew(tiny_grouped("Glm4", head_dim=8, intermediate_size=size)).train()
        for layer in stock.model.layers:
            layer.mlp.__class__ = kind
        ours = parallelize(copy.deepcopy(stock), mesh)
        trained_alike(ours, stock)


def losses_of_sharded_heads(mesh: DeviceMesh) -> None:
    """The loss is computed without the whole logits, fused before or after; other calls gather."""
    options = {"Gemma2": {"implementation": "eager", "head_dim": 8}, "Arcee": {}, "Granite": {}}
    for tied, before, (name, more) in product((True, False), (True, False), options.items()):
        stock = drawn_anew(tiny_grouped(name, tie_word_embeddings=tied, **more)).float().train()
        ours = copy.deepcopy(stock)
        if before:
            torchweld.fuse(ours, check=False, loss=True)
        parallelize(ours, mesh)
        if not before:
            report = torchweld.fuse(ours, check=False, loss=True)
            assert report.ops["lm_head"].startswith("vocab_parallel_linear_cross_entropy (lm_head")
        given = prompts((0, 0))
        with Names() as ops:
            out = ours(**given, labels=given["input_ids"])
        want = stock(**given, labels=given["input_ids"])
        assert out.logits is None and any("torchweld::linear_cross_entropy" in op for op in ops)
        assert_close(out.loss, want.loss, rtol=1e-5, atol=1e-5)
        out.loss.backward(), want.loss.backward()
        same_gradients(ours, stock, rtol=1e-4, atol=1e-5)
        logits = ours.eval()(**given).logits
        assert type(logits) is Tensor
        assert_close(logits, stock.eval()(**given).logits, rtol=1e-4, atol=1e-4)


def tied_weights(mesh: DeviceMesh) -> None:
    stock = llama(tie_word_embeddings=True)
    ours = parallelize(copy.deepcopy(stock), mesh)
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    trained_alike(ours, stock)


def norms_of_heads(mesh: DeviceMesh) -> None:
    """Qwen's q_norm, which is replicated, has the gradients of all heads."""
    stock = drawn_anew(tiny_grouped("Qwen3", head_dim=8))
    ours = parallelize(copy.deepcopy(stock), mesh)
    torchweld.fuse(ours)
    trained_alike(ours, stock)


def sums_of_parallelize(mesh: DeviceMesh) -> None:
    """A block sums two results in forward and two gradients in backward, whatever its inputs.

    A sharded head sums the gradient of its input. torch's own embedding has other collectives.
    """
    for make in (gpt2, llama, glm4):
        ours = parallelize(make(), mesh)
        torchweld.fuse(ours, check=False)
        sums = 2 * ours.config.num_hidden_layers
        with Names() as ops:
            loss = loss_of(ours)
            assert sums_in(ops) == sums, ops
            loss.backward()
        assert sums_in(ops) == 2 * sums + (make is not gpt2), ops


def sums_in(ops: list[str]) -> int:
    return sum(op.startswith("c10d::allreduce_") for op in ops)


def compiled_blocks(mesh: DeviceMesh) -> None:
    """Blocks compile without a graph break. torch 2.15 fails after its own style of embedding."""
    for make in (gpt2, llama) if torch.__version__ < "2.15" else (gpt2,):
        stock = make()
        ours = sharded_and_fused(stock, mesh)
        for block in ours.transformer.h if make is gpt2 else ours.model.layers:
            block.compile(backend="aot_eager", fullgraph=True)
        trained_alike(ours, stock)


def compiled_model(mesh: DeviceMesh) -> None:
    stock = llama()
    ours = parallelize(copy.deepcopy(stock), mesh)
    ours.compile(backend="aot_eager")
    trained_alike(ours, stock)


def kept_products(mesh: DeviceMesh) -> None:
    """Checkpointing, plain or selective with kept matmuls, has stock's gradients."""
    keeps = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in keeps else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    for make, options in product((gpt2, llama), ({}, {"context_fn": contexts})):
        stock = make()
        ours = sharded_and_fused(stock, mesh)
        ours.gradient_checkpointing_enable({"use_reentrant": False, **options})
        loss_of(ours).backward(), loss_of(stock).backward()
        same_gradients(ours, stock)


def accumulated_gradients(mesh: DeviceMesh) -> None:
    """Two batches; backward runs twice through the graph of the first."""
    for stock in (gpt2(), llama(), drawn_anew(tiny_grouped("Qwen3", head_dim=8))):
        ours = parallelize(copy.deepcopy(stock), mesh)
        for model in (ours, stock):
            loss = loss_of(model)
            loss.backward(retain_graph=True), loss.backward()
            loss_of(model).backward()
        same_gradients(ours, stock)


def what_stays_alive(mesh: DeviceMesh) -> None:
    """Backward and recomputation free the tensor that a block's layers share."""

    def alive(checkpoint: bool) -> tuple[int, int]:
        model = parallelize(llama(), mesh)
        if checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        inputs: list[weakref.ref[Tensor]] = []
        for module in model.modules():
            if type(module).__name__ == "LlamaRMSNorm":
                module.register_forward_hook(lambda m, i, y: inputs.append(weakref.ref(y)))
        loss = loss_of(model)
        gc.collect()
        forward = sum(y() is not None for y in inputs)
        loss.backward()
        gc.collect()
        return forward, sum(y() is not None for y in inputs)

    assert alive(False)[1] <= 1
    assert max(alive(True)) <= 2


def dtypes_under_autocast(mesh: DeviceMesh) -> None:
    models = (
        (tiny_gpt2(), "transformer.h.0.mlp.c_proj"),
        (tiny_grouped(attention_bias=True, mlp_bias=True), "model.layers.0.mlp.down_proj"),
    )
    for model, path in models:
        model = parallelize(model.to(DEVICE), mesh)
        found: list[torch.dtype] = []
        layer = model.get_submodule(path)
        layer.register_forward_hook(lambda m, i, y, found=found: found.append(y.dtype))
        with torch.autocast(DEVICE, torch.bfloat16):
            model(**prompts())
        assert found == [torch.bfloat16]


def one_process_gives_the_parameters(mesh: DeviceMesh) -> None:
    """All processes get the parameters of process 0, plain biases too."""
    for make in (gpt2, partial(llama, attention_bias=True, mlp_bias=True)):
        torch.manual_seed(dist.get_rank())
        model = parallelize(drawn_anew(make()), mesh)
        for name, parameter in model.named_parameters():
            shared = name.endswith(("proj.bias", "c_attn.bias"))
            if shared and type(parameter.data) is Tensor:
                first = parameter.detach().clone()
                dist.broadcast(first, 0)
                assert_close(parameter.detach(), first, rtol=0, atol=0, msg=name)


def frozen_parameters(mesh: DeviceMesh) -> None:
    """Trained parameters have stock's gradients, and frozen ones none."""
    for make in (gpt2, llama):
        stock = make()
        for i, parameter in enumerate(stock.parameters()):
            parameter.requires_grad_(i % 3 == 0)
        ours = sharded_and_fused(stock, mesh)
        loss_of(ours).backward(), loss_of(stock).backward()
        same_gradients(ours, stock)


def copied_once(mesh: DeviceMesh) -> None:
    """Two copies of one x are one tensor with one sum of gradients; another x has its own."""
    x = torch.ones(2, dtype=WIDE, device=DEVICE, requires_grad=True)
    y = x * 1
    with Names() as ops:
        (first, kept), (again, same) = (
            copy_to_tp_region_once(mesh, y),
            copy_to_tp_region_once(mesh, y),
        )
        assert first is again is not y
        assert kept is same is not None
        (first + 2 * again).sum().backward()
    assert sums_in(ops) == 1, ops
    assert_close(x.grad, torch.full_like(x, 3 * mesh.size()))
    other, _ = copy_to_tp_region_once(mesh, x * 1)
    assert other is not first
    assert not kept
    with torch.no_grad():
        assert copy_to_tp_region_once(mesh, y) == (y, None)


def what_needs_no_gradient(mesh: DeviceMesh) -> None:
    x, bias = torch.ones(2, device=DEVICE), torch.ones(2, device=DEVICE, requires_grad=True)
    copied, none, grown = copy_to_tp_region(mesh, x, None, bias)
    assert copied is x
    assert none is None
    assert grown.requires_grad


def norms_in_float32(mesh: DeviceMesh) -> None:
    """Gradients of two dtypes are summed over the processes and keep their dtypes."""
    for compiled in (False, True):
        torch.manual_seed(0)
        stock = torchweld.nn.LayerNormLinear(6, 8).to(DEVICE, torch.float16)
        for parameter in (stock.ln_weight, stock.ln_bias):
            parameter.data = parameter.data.float()
        ours = copy.deepcopy(stock)
        parallelize_module(ours, mesh, NormColwise(output_layouts=Replicate()))
        if compiled:
            ours.compile(backend="aot_eager")
        x = torch.randn(3, 6, device=DEVICE).half()
        with torch.autocast(DEVICE, torch.float16):
            loss, want = ours(x).float().sum(), stock(x).float().sum()
        loss.backward(), want.backward()
        for name, parameter in ours.named_parameters():
            grad = stock.get_parameter(name).grad
            assert parameter.grad.dtype == grad.dtype
            assert_close(whole(parameter.grad), grad, rtol=2e-3, atol=2e-3)


def copies_of_sharded_models(mesh: DeviceMesh) -> None:
    ours = gpt2()
    torchweld.fuse(ours)
    parallelize(ours, mesh)
    weight = ours.transformer.h[0].attn.c_attn.weight
    assert weight.to_local().shape == (32, 96 // mesh.size())
    assert_close(full_tensor(weight), gpt2().transformer.h[0].attn.c_attn.weight.detach())
    assert_close(loss_of(copy.deepcopy(ours)), loss_of(ours), rtol=0, atol=0)


def refusals_of_parallelize(mesh: DeviceMesh) -> None:
    size = mesh.size()
    odd = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24}
    one_head = {"num_key_value_heads": 1}
    phi = tiny_grouped("Phi3")
    phi.tp_plan["model.layers.*.mlp.down_proj"] = "packed_rowwise"
    for model, sentence in (
        (
            tiny_gpt2(n_head=3, n_embd=24),
            f"num_attention_heads must be a multiple of the mesh's {size}",
        ),
        (tiny_gpt2(n_inner=47), f"the MLP's 47 columns must be a multiple of the mesh's {size} "),
        (
            tiny_gpt2(add_cross_attention=True),
            "h.0 must be transformers' GPT2Block, but got one with",
        ),
        (
            tiny_grouped(**odd),
            "num_attention_heads must be a multiple of the mesh's 2 processes, but got 3",
        ),
        (
            tiny_grouped(**one_head),
            "num_key_value_heads must be a multiple of the mesh's 2 processes",
        ),
        (
            tiny_grouped(intermediate_size=47),
            "gate_proj.out_features must be a multiple of the mesh's 2",
        ),
        (phi, "plan must have the styles colwise, "),
        (transformers.OPTForCausalLM(OPT), "must have a plan of transformers (tp_plan), but"),
    ):
        before = {name: id(p) for name, p in model.named_parameters()}
        with CommDebugMode() as comms, refused(ValueError, "parallelize: "):
            parallelize(model, mesh)
        with refused(ValueError, sentence):
            parallelize(model, mesh)
        assert {name: id(p) for name, p in model.named_parameters()} == before
        assert not comms.get_total_counts()
    with refused(TypeError, "other models can use parallelize_module with NormColwise"):
        parallelize(nn.Linear(2, 2), mesh)
    with refused(TypeError, "parallelize: mesh must be a DeviceMesh, but got int"):
        parallelize(gpt2(), 2)
    twice = parallelize(llama(), mesh)
    with refused(ValueError, "parameters must be plain, but got DTensor"):
        parallelize(twice, mesh)


OPT = transformers.OPTConfig(
    vocab_size=VOCAB, hidden_size=8, ffn_dim=8, num_hidden_layers=1, num_attention_heads=2
)


def plan_of_transformers(mesh: DeviceMesh) -> None:
    """transformers' own plan (`tp_plan="auto"` or a DistributedConfig), torchweld's attention and a
    later `fuse`; padding and grouped heads.
    """
    stock = llama(vocab_size=VOCAB + 1)  # some versions of transformers ask for an even one
    with shared_folder() as folder:
        if dist.get_rank() == 0:
            stock.save_pretrained(folder)
        dist.barrier()
        config = transformers.distributed.DistributedConfig(tp_size=mesh.size(), tp_plan="auto")
        for implementation, given in (
            ("torchweld", {"tp_plan": "auto"}),
            ("sdpa", {"distributed_config": config}),
        ):
            ours = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=WIDE, attn_implementation=implementation, **given
            ).train()
            if implementation == "sdpa":
                assert expected_skips(torchweld.fuse(ours))
            want = copy.deepcopy(stock)
            with Names() as ops:
                trained_alike(ours, want)
            assert "torchweld::attention_forward" in ops


def cases(mesh: str) -> dict[str, Callable[[DeviceMesh], None]]:
    if mesh == "4":
        return {"overlap_equals_one_process": overlap_equals_one_process}
    every = [
        styles, memory_of_styles, collectives_of_sequences, overlap_equals_one_process,
        some_gradients_of_overlap, compiled_sequences, gradients_of_parameters, norms_of_shards,
        refusals_of_styles, decoders_in_float32, adapted_mlps, packed_mlps, packed_heads,
        packed_mlps_that_stay_gathered, losses_of_sharded_heads, tied_weights, norms_of_heads,
        sums_of_parallelize, compiled_blocks, compiled_model, kept_products, accumulated_gradients,
        what_stays_alive, dtypes_under_autocast, one_process_gives_the_parameters,
        what_needs_no_gradient, frozen_parameters, copied_once, norms_in_float32,
        copies_of_sharded_models, refusals_of_parallelize, plan_of_transformers,
    ]  # fmt: skip
    if DEVICE == "cuda":
        every += [overlap_in_graphs, errors_of_overlap]
    orders = {
        f"{make.__name__}_{'fused' if before else 'sharded'}_first": partial(
            parallelized, make, before
        )
        for make, before in product((gpt2, llama), (True, False))
    }
    return {case.__name__: case for case in every} | orders
