"""The loss of a sharded vocabulary, run in the processes of a mesh (meshes.py)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing import assert_close

import torchweld
from meshes import DEVICE, TIGHT, WIDE, refused
from torchweld.distributed import VocabParallel, vocab_parallel_linear_cross_entropy

OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum", "z_loss": 0.1},
    {"reduction": "none", "softcap": 3.0, "temperature": 0.7},
    {"shift": 1, "z_loss": 0.05},
    {"reduction": "none", "shift": 1, "ignore_index": 3},
    {"label_smoothing": 0.1, "z_loss": 0.1, "temperature": 0.7, "shift": 1},
    {"label_smoothing": 1.0, "reduction": "sum"},
    {"label_smoothing": 0.2, "softcap": 3.0, "z_loss": 0.1, "temperature": 0.7},
]

KEEPS: list[dict[str, Any]] = [{"keep": "nothing"}, {"keep": "exponentials"}]


def stored(options: dict[str, Any]) -> list[dict[str, Any]]:
    """The options with every keep that they allow."""
    keeps = KEEPS[:1] if "softcap" in options and "label_smoothing" in options else KEEPS
    return [{**options, **keep} for keep in keeps]


def drawn(n: int, k: int, dtype: torch.dtype, ignore_index: int) -> list[Tensor]:
    """x, target, weight and bias; the first two targets are ignored."""
    x, weight, bias = (torch.randn(*s, dtype=torch.float64) for s in ((2, 9, k), (n, k), (n,)))
    target = torch.randint(0, n, (2, 9))
    target[0, :2] = ignore_index
    return [t.to(DEVICE, dtype) for t in (x, weight, bias)] + [target.to(DEVICE)]


def sharded(t: Tensor, mesh: DeviceMesh) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(t, mesh, [Shard(0)]))


def both(
    mesh: DeviceMesh, n: int, dtype: torch.dtype, biased: bool, options: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """Loss and gradients of all processes together, and of one."""
    x, weight, bias, target = drawn(n, 16, dtype, options.get("ignore_index", -100))
    found = []
    for op, place in (
        (vocab_parallel_linear_cross_entropy, lambda t: sharded(t, mesh)),
        (torchweld.linear_cross_entropy, lambda t: t.clone().requires_grad_()),
    ):
        leaves = [x.clone().requires_grad_(), place(weight)] + [place(bias)] * biased
        loss = op(*leaves[:2], target, *leaves[2:], **options)
        torch.manual_seed(1)
        loss.backward(torch.randn(loss.shape, dtype=torch.float64).to(loss))
        grads = [t.grad for t in leaves]
        whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
        found.append([loss.detach(), *whole])
    return found[0], found[1]


def equals_one_process(mesh: DeviceMesh) -> None:
    for case in [case for options in OPTIONS for case in stored(options)]:
        for n, biased in ((64, True), (131, False)):  # the last shard of 131 is smaller
            for got, want in zip(*both(mesh, n, WIDE, biased, case), strict=True):
                assert_close(got, want, **TIGHT)


def shards_far_apart(mesh: DeviceMesh) -> None:
    """The target's shard has nearly no probability, or the other shards have none at all."""
    n = 64 * mesh.size()
    limits = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2.0**-6}
    fars, smoothings = (-50.0, -300.0, -torch.inf), (0.0, 0.1)
    for dtype, far, eps, keep in product((WIDE, torch.bfloat16), fars, smoothings, KEEPS):
        x, weight, bias, target = drawn(n, 16, dtype, -100)
        bias[64:] += far
        if far == -torch.inf:
            target = torch.where(target < 0, target, target % 64)
        leaves = [x.requires_grad_(), sharded(weight, mesh), sharded(bias, mesh)]
        loss = vocab_parallel_linear_cross_entropy(
            *leaves[:2], target, leaves[2], label_smoothing=eps, **keep
        )
        exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
        logits = F.linear(*exact)
        want = F.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=eps)
        assert_close(loss.double(), want, rtol=1e-6, atol=1e-6)
        loss.backward()
        for leaf, ref in zip(leaves, torch.autograd.grad(want, exact), strict=True):
            grad = leaf.grad.full_tensor() if isinstance(leaf.grad, DTensor) else leaf.grad
            assert (grad - ref).norm() <= limits[dtype] * ref.norm()


def sixteen_bits(mesh: DeviceMesh) -> None:
    """As far from one process as the rounding of dlogits and of the partial sums of dx allows."""
    unit = torch.finfo(torch.bfloat16).eps
    for case in [case for i in (0, 1, 5, 7) for case in stored(OPTIONS[i])]:
        (loss, *grads), (want, *want_grads) = both(mesh, 131, torch.bfloat16, True, case)
        assert loss.dtype == torch.float32
        assert_close(loss, want, rtol=1e-5, atol=1e-5)
        for got, ref in zip(grads, want_grads, strict=True):
            assert (got - ref).norm() <= 2 * unit * ref.norm()


def ignored_rows_may_hold_nan(mesh: DeviceMesh) -> None:
    x, weight, _, target = drawn(64, 16, WIDE, -100)
    for options in stored({}) + stored({"label_smoothing": 0.1}):
        found = []
        for dirty in (x.clone(), x.clone()):
            if found:
                dirty[0, :2] = float("nan")
            leaf, words = dirty.requires_grad_(), sharded(weight, mesh)
            loss = vocab_parallel_linear_cross_entropy(leaf, words, target, **options)
            loss.backward()
            found.append((loss.detach(), leaf.grad, words.grad.full_tensor()))
        for got, want in zip(*found, strict=True):
            assert torch.equal(got, want)


def style(mesh: DeviceMesh) -> None:
    """The style of LinearCrossEntropy: the loss, the gradients and a step."""
    options = {"shift": 1, "z_loss": 0.1, "label_smoothing": 0.1}
    stock = torchweld.nn.LinearCrossEntropy(16, 64, bias=True, **options).to(DEVICE, WIDE)
    ours = torchweld.nn.LinearCrossEntropy(16, 64, bias=True, **options).to(DEVICE, WIDE)
    ours.load_state_dict(stock.state_dict())
    ours = parallelize_module(ours, mesh, VocabParallel())
    x, _, _, target = drawn(64, 16, WIDE, -100)
    for placed in (x, distribute_tensor(x, mesh, [Replicate()])):
        loss, want = ours(placed, target), stock(x, target)
        assert_close(loss, want, **TIGHT)
        for module, value in ((ours, loss), (stock, want)):
            module.zero_grad()
            value.backward()
        for (name, a), b in zip(ours.named_parameters(), stock.parameters(), strict=True):
            assert isinstance(a.grad, DTensor) and a.grad.placements == (Shard(0),), name
            assert_close(a.grad.full_tensor(), b.grad, **TIGHT)


def frozen(mesh: DeviceMesh) -> None:
    """Only the gradient that is wanted is computed."""
    x, weight, _, target = drawn(64, 16, WIDE, -100)
    words = sharded(weight, mesh)
    vocab_parallel_linear_cross_entropy(x, words, target).backward()
    assert words.grad is not None
    words = words.detach().requires_grad_(False)
    leaf = x.clone().requires_grad_()
    vocab_parallel_linear_cross_entropy(leaf, words, target).backward()
    other = x.clone().requires_grad_()
    torchweld.linear_cross_entropy(other, weight, target).backward()
    assert_close(leaf.grad, other.grad, **TIGHT)
    with torch.no_grad():
        loss = vocab_parallel_linear_cross_entropy(x, words, target)
    assert_close(loss, torchweld.linear_cross_entropy(x, weight, target), **TIGHT)


def under_autocast(mesh: DeviceMesh) -> None:
    """float32 tensors are cast as linear_cross_entropy casts them; gradients are float32."""
    x, weight, _, target = drawn(64, 16, torch.float32, -100)
    leaf, words = x.clone().requires_grad_(), sharded(weight, mesh)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = vocab_parallel_linear_cross_entropy(leaf, words, target)
        want = torchweld.linear_cross_entropy(x, weight, target)
    loss.backward()
    assert_close(loss, want, rtol=1e-5, atol=1e-5)
    assert leaf.grad.dtype == words.grad.dtype == loss.dtype == torch.float32


def refusals(mesh: DeviceMesh) -> None:
    x, weight, bias, target = drawn(64, 16, WIDE, -100)
    words, loss_of = sharded(weight, mesh), vocab_parallel_linear_cross_entropy
    with refused(ValueError, "but got a plain Tensor"):
        loss_of(x, weight, target)
    with refused(ValueError, "bias must be a DTensor placed"):
        loss_of(x, words, target, bias)
    with refused(ValueError, "must have a class of weight, but got 1 classes"):
        loss_of(x, sharded(weight[:1], mesh), target.clamp(max=0))
    with refused(ValueError, "reduction must be 'none', 'mean' or 'sum'"):
        loss_of(x, words, target, reduction="average")
    with refused(ValueError, "keep must be 'auto', 'exponentials' or 'nothing'"):
        loss_of(x, words, target, keep="gradients")
    with refused(ValueError, "label_smoothing must be from 0 to 1, but got 1.5"):
        loss_of(x, words, target, label_smoothing=1.5)
    with refused(ValueError, "keep='exponentials' must have label_smoothing 0 with a softcap"):
        loss_of(x, words, target, label_smoothing=0.1, softcap=2.0, keep="exponentials")
    leaf = x.clone().requires_grad_()
    for keep in KEEPS:
        loss = loss_of(leaf, words, target, **keep)
        for t in (leaf, words):
            with refused(RuntimeError, "create_graph must be False, because a second derivative"):
                torch.autograd.grad(loss, t, create_graph=True)
    if DEVICE == "cpu":
        with refused(ValueError, "target must be from 0 to N - 1 = 63 or ignore_index, but got 64"):
            loss_of(x, words, torch.full_like(target, 64))
    with refused(TypeError, "module must be LinearCrossEntropy"):
        parallelize_module(nn.Linear(4, 4), mesh, VocabParallel())
    stored = torchweld.nn.LinearCrossEntropy(16, 64, keep="gradients").to(DEVICE)
    with refused(ValueError, "keep must be 'auto', 'exponentials' or 'nothing'"):
        parallelize_module(stored, mesh, VocabParallel())


def cases(mesh: str) -> dict[str, Callable[[DeviceMesh], None]]:
    every = [
        equals_one_process, shards_far_apart, sixteen_bits, ignored_rows_may_hold_nan, style,
        frozen, under_autocast, refusals,
    ]  # fmt: skip
    return {case.__name__: case for case in every}
