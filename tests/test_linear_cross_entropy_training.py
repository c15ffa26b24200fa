"""Training through linear_cross_entropy: autograd, torch.compile and nn.LinearCrossEntropy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reference as R
import torchweld
from losses import grads_of, leaves_of, made
from numerics import assert_same_bits
from samples import BF16, F16, F32, forward_backward, trained
from tensors import randn

OP = "linear_cross_entropy"
loss_of = torchweld.linear_cross_entropy
logprobs_of = torchweld.linear_token_logprobs


# Autograd


def test_tied_weight(device):
    """The weight is the embedding's too; its gradient is the sum of both uses."""
    embedding = randn(device, F32, 33, 8).requires_grad_()
    tokens = torch.randint(0, 33, (2, 7), device=device)

    def loss(ours: bool) -> Tensor:
        x = F.embedding(tokens, embedding).tanh()
        if ours:
            return loss_of(x, embedding, tokens, shift=1)
        logits = F.linear(x, embedding)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    ours, want = (torch.autograd.grad(loss(each), embedding)[0] for each in (True, False))
    torch.testing.assert_close(ours, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("keep", ["auto", "nothing"])
@pytest.mark.parametrize("wanted", [(0,), (1,), (3,), (0, 3), (1, 3)], ids=str)
def test_frozen_arguments_cost_no_product(device, keep, wanted):
    from torch.utils.flop_counter import FlopCounterMode

    args = made(device, F32, (6,), 33, 8)
    _, full = forward_backward(OP, args, {"keep": keep})
    leaves = [a.detach().requires_grad_() if i in wanted else a for i, a in enumerate(args)]
    with FlopCounterMode(display=False) as counter:
        out = loss_of(*leaves, keep=keep)
        grads = torch.autograd.grad(out, [leaves[i] for i in wanted])
    assert_same_bits(grads, [full[i] for i in wanted])
    products = 1 + (keep == "nothing") + (0 in wanted) + (1 in wanted)
    assert counter.get_total_flops() == products * 2 * 6 * 33 * 8


@pytest.mark.parametrize("keep", ["gradients", "nothing"])
def test_backward_twice(device, keep):
    """Stored gradients are not changed: a second backward has the same bits, another scale too."""
    args = leaves_of(made(device, F32, (6,), 33, 8))
    out = loss_of(*args, keep=keep)
    first = grads_of(out, args)
    for a, b in zip(grads_of(out, args), first, strict=True):
        assert a.data_ptr() != b.data_ptr()
        assert_same_bits(a, b)
    leaves = trained(args)
    assert_same_bits(torch.autograd.grad(4 * out, leaves), [4 * b for b in first])


@pytest.mark.parametrize("keep", ["gradients", "exponentials", "nothing"])
def test_a_penalty_on_the_gradient_raises(device, keep):
    """The gradient of the loss is 1, a constant; the stored gradients are none."""
    args = leaves_of(made(device, F32, (4,), 9, 3))
    leaves = trained(args)
    grads = torch.autograd.grad(loss_of(*args, keep=keep), leaves, create_graph=True)
    for grad in grads:
        with pytest.raises(RuntimeError, match="not implemented"):
            grad.sum().backward(retain_graph=True)


@pytest.mark.parametrize("keep", ["gradients", "nothing"])
def test_batched_gradients(device, keep):
    args = leaves_of(made(device, F32, (4,), 9, 3))
    leaves = trained(args)
    out = loss_of(*args, keep=keep)
    douts = torch.tensor([1.0, -2.0, 0.5], device=device)
    batched = torch.autograd.grad(out, leaves, douts, retain_graph=True, is_grads_batched=True)
    for i, dout in enumerate(douts):
        single = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        assert_same_bits([a[i] for a in batched], single)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_every_keep_gives_the_same_gradients(device, reduction):
    for dtype in (F32, BF16):
        args = made(device, dtype, (2, 9), 257, 33, ignored=3)
        kwargs = {"reduction": reduction, "softcap": 5.0, "z_loss": 0.1}
        out, want = forward_backward(OP, args, {**kwargs, "keep": "nothing"})
        for keep in ("auto", "gradients"):
            again, grads = forward_backward(OP, args, {**kwargs, "keep": keep})
            assert_same_bits(again, out)
            for a, b in zip(grads, want, strict=True):
                if b is not None:
                    assert_same_bits(a, b)  # dloss is 1, so that nothing is rounded twice


@pytest.mark.parametrize("keep", ["gradients", "nothing"])
def test_threads_do_not_change_a_bit(keep):
    before = torch.get_num_threads()
    try:
        for dtype in (F32, BF16):
            args = made("cpu", dtype, (40,), 5003, 65, ignored=3)
            found = []
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                out, grads = forward_backward(OP, args, {"keep": keep})
                found.append([out, *(g for g in grads if g is not None)])
            for other in found[1:]:
                assert_same_bits(other, found[0])
    finally:
        torch.set_num_threads(before)


def test_a_scale_after_forward_is_not_lost(device):
    """float16 with a loss scale: a mean over many rows has gradients that float16 can't hold."""
    x, weight, target, _ = leaves_of(made(device, F16, (64,), 4099, 16))
    scale = 2.0**14
    (got,) = torch.autograd.grad(loss_of(x, weight, target) * scale, weight)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    want = R.linear_cross_entropy_forward(*wide, target, None)[0] * scale
    (ref,) = torch.autograd.grad(want, wide[1])
    assert (got.double() - ref).norm() <= 2e-3 * ref.norm()


def test_compile_and_export(device):
    x, weight, target, bias = leaves_of(made(device, F32, (2, 6), 33, 8, ignored=1))

    def both(x, weight, bias):
        logprob, entropy = logprobs_of(x, weight, target.clamp(min=0), bias, entropy=True)
        loss = loss_of(x, weight, target, bias, shift=1, z_loss=0.1)
        return loss + (logprob - entropy).mean()

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    ours, want = compiled(x, weight, bias), both(x, weight, bias)
    assert_same_bits(ours, want)
    pairs = zip(grads_of(ours, (x, weight, bias)), grads_of(want, (x, weight, bias)), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)

    class Model(nn.Module):
        def forward(self, x, weight, target):
            return loss_of(x, weight, target)

    given = (x.detach(), weight.detach(), target)
    program = torch.export.export(Model(), given)
    assert_same_bits(program.module()(*given), loss_of(*given))


# The module


def test_module_equals_torch(device):
    head = nn.Linear(8, 33).to(device)
    module = torchweld.nn.LinearCrossEntropy.from_linear(head, label_smoothing=0.1)
    assert module.weight is head.weight and module.bias is head.bias
    assert dict(module.named_parameters()).keys() == dict(head.named_parameters()).keys()
    assert "in_features=8, num_classes=33, bias=True" in repr(module)
    x = randn(device, F32, 5, 8)
    target = torch.randint(0, 33, (5,), device=device)
    want = F.cross_entropy(head(x), target, label_smoothing=0.1)
    torch.testing.assert_close(module(x, target), want, rtol=2e-6, atol=2e-6)


def test_module_passes_every_option(device):
    options = {
        "reduction": "sum", "ignore_index": 3, "label_smoothing": 0.1, "softcap": 3.0,
        "z_loss": 0.2, "shift": 1, "temperature": 0.7, "keep": "nothing",
    }  # fmt: skip
    module = torchweld.nn.LinearCrossEntropy(8, 9, bias=True, **options, device=device)
    x = randn(device, F32, 2, 5, 8)
    target = torch.arange(10, device=device).view(2, 5) % 9
    assert_same_bits(module(x, target), loss_of(x, module.weight, target, module.bias, **options))


def test_module_draws_its_parameters_as_torch_does():
    torch.manual_seed(0)
    module = torchweld.nn.LinearCrossEntropy(8, 9, bias=True)
    torch.manual_seed(0)
    plain = nn.Linear(8, 9)
    assert_same_bits(module.weight, plain.weight)
    torch.manual_seed(1)
    module.reset_parameters()
    torch.manual_seed(1)
    plain.reset_parameters()
    assert_same_bits(module.weight, plain.weight)
    assert_same_bits(module.bias, plain.bias)
    assert torchweld.nn.LinearCrossEntropy(8, 9).bias is None


def test_module_refuses_what_is_no_linear():
    class Scaled(nn.Linear):
        pass

    for module in (nn.Identity(), Scaled(3, 4)):
        with pytest.raises(ValueError, match="from_linear: linear must be nn.Linear, but got"):
            torchweld.nn.LinearCrossEntropy.from_linear(module)
