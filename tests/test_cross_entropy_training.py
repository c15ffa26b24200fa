"""Training through cross_entropy: autograd, memory, torch.compile and nn.CrossEntropyLoss."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import reference as R
import torchweld
from losses import grads_of, leaves_of
from numerics import assert_same_bits, check
from running import GRADIENTS
from samples import BF16, F16, F32, Maker, forward_backward, logits_call
from tensors import randn

OP = "cross_entropy"
loss_of = torchweld.cross_entropy
REDUCTIONS = ["none", "sum", "mean"]


def made(device, dtype, lead, n, **kwargs):
    return logits_call(lead, n, **kwargs)(Maker(device, dtype, 0))[0]


# Autograd


@pytest.mark.parametrize("n", [33, 20001])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_backward_twice(device, reduction, n):
    """The stored gradient is not changed: a second backward has the same bits, any scale too."""
    for dtype in (F32, BF16):
        logits, target = leaves_of(made(device, dtype, (6,), n, ignored=1))
        before = logits.detach().clone()
        out = loss_of(logits, target, reduction=reduction)
        (first,) = grads_of(out, [logits])
        kept = first.clone()
        first.zero_()  # the caller owns it
        (again,) = grads_of(out, [logits])
        assert_same_bits(again, kept)
        (scaled,) = torch.autograd.grad(out, logits, torch.full_like(out, 4.0))
        assert_same_bits(scaled, 4 * kept)
        assert_same_bits(logits.detach(), before)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_penalty_on_the_gradient_raises(device, reduction):
    """The gradient of the loss is 1, a constant; the stored gradient is none."""
    logits, target = leaves_of(made(device, F32, (6,), 33))
    loss = loss_of(logits, target, reduction=reduction).sum()
    (grad,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="not implemented"):
        grad.sum().backward()


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_gradient_of_the_loss_that_is_not_one(device, dtype, reduction):
    args = made(device, dtype, (6,), 257, ignored=1)
    logits, target = leaves_of(args)
    loss = loss_of(logits, target, reduction=reduction)
    dloss = torch.full_like(loss, -0.3)
    (got,) = torch.autograd.grad(loss, logits, dloss)
    bound = GRADIENTS[OP](dloss, *args, reduction=reduction)[0]
    check(got, bound, label="cross_entropy gradient", device=device)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_batched_gradients(device, reduction):
    logits, target = leaves_of(made(device, F32, (4,), 9, ignored=1))
    out = loss_of(logits, target, reduction=reduction)
    douts = torch.stack([torch.full_like(out, d) for d in (1.0, -2.0, 0.5)])
    (batched,) = torch.autograd.grad(out, logits, douts, retain_graph=True, is_grads_batched=True)
    for i, dout in enumerate(douts):
        (single,) = torch.autograd.grad(out, logits, dout, retain_graph=True)
        assert_same_bits(batched[i], single)


@pytest.mark.parametrize("kwargs", [{}, {"reduction": "none"}], ids=str)
def test_gradient_overwrites_neither_logits_nor_a_stored_gradient_that_is_used_again(
    device, kwargs
):
    logits, target = made(device, F32, (5,), 65, ignored=1)
    leaf = logits.detach().clone().requires_grad_()
    owned = leaf + 0
    out = loss_of(owned, target, **kwargs)
    dloss = torch.full_like(out, 3.0)
    (first,) = torch.autograd.grad(out, leaf, dloss, retain_graph=True)
    (last,) = torch.autograd.grad(out, leaf, dloss)  # frees the graph
    assert_same_bits(first, last)
    assert_same_bits(owned.detach(), logits)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, leaf, dloss)


def offloaded(*args):
    with torch.autograd.graph.save_on_cpu():
        return loss_of(*args)


@pytest.mark.parametrize("run", [offloaded, partial(checkpoint, loss_of, use_reentrant=False)])
def test_saved_tensors_that_are_moved_or_made_again(device, run):
    logits, target = leaves_of(made(device, F32, (5,), 65))
    want = torch.autograd.grad(loss_of(logits, target), logits)[0]
    (got,) = torch.autograd.grad(run(logits, target), logits)
    assert_close(got, want, rtol=1e-6, atol=1e-9)


def test_a_scale_after_forward_is_not_lost(device):
    """float16 with a loss scale: a mean over many rows has gradients that float16 can't hold."""
    logits, target = leaves_of(made(device, F16, (512,), 4099))
    scale = 2.0**14
    (got,) = torch.autograd.grad(loss_of(logits, target) * scale, logits)
    wide = logits.detach().double().requires_grad_()
    (ref,) = torch.autograd.grad(R.cross_entropy_forward(wide, target)[0] * scale, wide)
    assert (got.double() - ref).norm() <= 2e-3 * ref.norm()


def test_threads_do_not_change_a_bit():
    before = torch.get_num_threads()
    try:
        for dtype in (F32, BF16, F16):
            args = made("cpu", dtype, (40,), 5003, ignored=3)
            found = []
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                out, grads = forward_backward(OP, args, {})
                found.append([out, grads[0]])
            for other in found[1:]:
                assert_same_bits(other, found[0])
    finally:
        torch.set_num_threads(before)


def test_runs_repeat_to_the_bit(device):
    args = made(device, BF16, (64,), 50257, ignored=3)
    for kwargs in ({}, {"reduction": "none"}, {"label_smoothing": 0.1}):
        first, grads = forward_backward(OP, args, kwargs)
        for _ in range(3):
            again, more = forward_backward(OP, args, kwargs)
            assert_same_bits(again, first)
            assert_same_bits(more[0], grads[0])


def test_autocast_keeps_the_logits(device):
    logits, target = leaves_of(made(device, F32, (5,), 65))
    with torch.autocast(device, dtype=BF16):
        out = loss_of(logits, target)
    assert_same_bits(out, loss_of(logits, target))


def test_compile_and_export(device):
    logits, target = leaves_of(made(device, F32, (2, 6), 33, ignored=1))

    def both(logits):
        mean = loss_of(logits, target, shift=1, z_loss=0.1)
        return mean + loss_of(logits * 2, target, reduction="none").square().mean()

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    ours, want = compiled(logits), both(logits)
    assert_same_bits(ours, want)
    assert_close(grads_of(ours, [logits]), grads_of(want, [logits]), rtol=1e-6, atol=1e-7)

    class Model(nn.Module):
        def forward(self, logits, target):
            return loss_of(logits, target)

    given = (logits.detach(), target)
    program = torch.export.export(Model(), given)
    assert_same_bits(program.module()(*given), loss_of(*given))


# The module


@pytest.mark.parametrize("shape", [(33,), (5, 33)], ids=str)
def test_module_equals_torch(device, shape):
    options = {"ignore_index": 2, "reduction": "sum", "label_smoothing": 0.1}
    ours, want = torchweld.nn.CrossEntropyLoss(**options), nn.CrossEntropyLoss(**options)
    x, target = randn(device, F32, *shape), torch.randint(0, 33, shape[:-1], device=device)
    assert_close(ours(x, target), want(x, target), rtol=2e-6, atol=2e-6)
    assert "reduction=sum, ignore_index=2" in repr(ours)
    assert not list(ours.parameters())


def test_module_passes_every_option(device):
    options = {
        "reduction": "none", "ignore_index": 3, "label_smoothing": 0.1, "softcap": 3.0,
        "z_loss": 0.2,
    }  # fmt: skip
    module = torchweld.nn.CrossEntropyLoss(**options)
    x, target = randn(device, F32, 9, 9), torch.arange(9, device=device)
    assert_same_bits(module(x, target), loss_of(x, target, **options))


def test_module_refuses_weights_and_further_dims():
    with pytest.raises(ValueError, match="weight must be None, but got class weights; use"):
        torchweld.nn.CrossEntropyLoss(torch.ones(3))
    x: Tensor = torch.zeros(2, 3, 3)
    with pytest.raises(ValueError, match=r"input must be \(N,\) or \(rows, N\), but got 3 dims"):
        torchweld.nn.CrossEntropyLoss()(x, torch.zeros(2, 3, dtype=torch.int64))


def test_module_can_be_traced_symbolically():
    module = torchweld.nn.CrossEntropyLoss(softcap=3.0)
    traced = torch.fx.symbolic_trace(module)
    x, target = randn("cpu", F32, 9, 9), torch.arange(9)
    assert_same_bits(traced(x, target), module(x, target))
    with pytest.raises(ValueError, match="but got 3 dims"):
        traced(x[None], target[None])
