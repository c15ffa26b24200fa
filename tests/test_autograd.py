"""Uses of autograd that every differentiable op serves: second derivatives, pipelines that split
a backward, checkpointing that stops early, batches of gradients, and no gradient that is not asked
for.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from numerics import assert_same_bits
from samples import (
    DIFFERENTIABLE,
    F32,
    F64,
    SAMPLES,
    TWICE_DIFFERENTIABLE,
    as_tuple,
    call,
    each_call,
    need_kernel,
    requiring,
)
from tensors import randn


class Recorded(NamedTuple):
    """A call as a function of its leaves, which require a gradient."""

    outputs: Callable[..., Sequence[Tensor]]
    leaves: list[Tensor]

    def loss(self, leaves: Sequence[Tensor] | None = None) -> Tensor:
        outputs = self.outputs(*(self.leaves if leaves is None else leaves))
        return sum(o.sin().sum() for o in outputs if o.requires_grad)


def of_sample(s, device: str, dtype: torch.dtype) -> Recorded:
    args, kwargs = s.make(device, dtype)
    args = requiring(s.op, args)
    at = [i for i, a in enumerate(args) if isinstance(a, Tensor) and a.requires_grad]

    def outputs(*leaves: Tensor) -> Sequence[Tensor]:
        given = dict(zip(at, leaves, strict=True))
        return as_tuple(call(s.op)(*[given.get(i, a) for i, a in enumerate(args)], **kwargs))

    return Recorded(outputs, [args[i] for i in at])


def of_lists(op: str, biased: bool, device: str, dtype: torch.dtype) -> Recorded:
    torch.manual_seed(0)
    sizes, k = (4, 2), 8
    leaves = [randn(device, dtype, 3, k), *[randn(device, dtype, n, k) for n in sizes]]
    leaves += [randn(device, dtype, n) for n in sizes] if biased else []
    leaves += [randn(device, dtype, k, mean=1.0) for _ in range(1 + (op[0] == "l"))]

    def outputs(x: Tensor, *rest: Tensor) -> Sequence[Tensor]:
        weights, rest = rest[:2], rest[2:]
        biases, vectors = (rest[:2], rest[2:]) if biased else ([], rest)
        return call(op)(x, weights, biases, *vectors)

    return Recorded(outputs, [leaf.requires_grad_() for leaf in leaves])


CALLS = {s.id: s for op in DIFFERENTIABLE for s in SAMPLES[op] if s.name != "empty"} | {
    f"{op}-{'biases' if biased else 'plain'}": (op, biased)
    for op in ("rms_norm_linears", "layer_norm_linears")
    for biased in (True, False)
}


def op_of(name: str) -> str:
    return name.split("-")[0]


def made(name: str, device: str, dtype: torch.dtype = F32) -> Recorded:
    need_kernel(op_of(name), device)
    what = CALLS[name]
    if isinstance(what, tuple):
        return of_lists(*what, device, dtype)
    return of_sample(what, device, dtype)


@each_call([name for name in CALLS if op_of(name) not in TWICE_DIFFERENTIABLE], op_of)
def test_a_second_derivative_raises_for_every_input_alone(name, device):
    """The other inputs and the gradient of the result require no gradient."""
    all_of_it = made(name, device)
    for i in range(len(all_of_it.leaves)):
        leaves = [leaf.detach() for leaf in all_of_it.leaves]
        leaves[i].requires_grad_()
        total = sum(o.sum() for o in all_of_it.outputs(*leaves) if o.requires_grad)
        (grad,) = torch.autograd.grad(total, leaves[i], create_graph=True)
        assert grad.requires_grad
        with pytest.raises(RuntimeError, match="derivative for torchweld::.* is not implemented"):
            torch.autograd.grad(grad.sum(), leaves[i], allow_unused=True)


@pytest.mark.parametrize("op", TWICE_DIFFERENTIABLE)
def test_a_linear_op_has_a_second_derivative(op, device):
    x = randn(device, F32, 3, 5).requires_grad_()
    args = (x, 1.5) if op == "add_scalar" else (x,)
    (grad,) = torch.autograd.grad(call(op)(*args).pow(3).sum(), x, create_graph=True)
    assert torch.autograd.grad(grad.sum(), x)[0].abs().max() > 0


@each_call(CALLS, op_of)
def test_a_pipeline_may_split_the_backward(name, device):
    """Gradients of inputs first, of parameters later: right, or refused in the first pass."""
    record = made(name, device, F64 if device == "cpu" else F32)
    if len(record.leaves) == 1:
        return
    parameters = [torch.nn.Parameter(leaf.detach()) for leaf in record.leaves[1:]]
    x = record.leaves[0]
    loss = record.loss([x * 1, *parameters])
    want = torch.autograd.grad(loss, [x, *parameters], retain_graph=True, allow_unused=True)
    try:
        _, groups = stage_backward_input([loss], None, [x], iter(parameters))
    except RuntimeError as error:  # torch 2.15 raises its own error from the op's
        reason = error.__cause__ or error
        results = sum(o.requires_grad for o in record.outputs(*record.leaves))
        assert results > 1, error
        assert isinstance(reason, NotImplementedError), error
        assert str(reason).startswith(f"torchweld::{op_of(name)}: "), error
        return
    stage_backward_weight(iter(parameters), groups)
    for leaf, grad in zip([x, *parameters], want, strict=True):
        assert grad is None or torch.equal(leaf.grad, grad), name


@each_call(CALLS, op_of)
def test_a_hook_of_a_node_changes_nothing_if_all_gradients_are_asked_for(name, device):
    """torch's debug log hooks every node."""
    record = made(name, device)
    want = torch.autograd.grad(record.loss(), record.leaves)
    outputs = [o for o in record.outputs(*record.leaves) if o.requires_grad]
    seen = []
    for output in outputs:
        output.grad_fn.register_prehook(lambda grads: seen.append(grads))
    got = torch.autograd.grad(sum(o.sin().sum() for o in outputs), record.leaves)
    assert len(seen) >= len(outputs)
    assert_same_bits(got, want, name)


@each_call(CALLS, op_of)
def test_a_checkpoint_that_stops_early_frees_what_it_recomputed(name, device):
    record = made(name, device)
    alive = []

    def region(*leaves: Tensor) -> Tensor:
        inputs = [leaf * 1 for leaf in leaves]
        alive.extend(weakref.ref(t) for t in inputs)
        return record.outputs(*inputs)[0]

    checkpoint(region, *record.leaves, use_reentrant=False).sum().backward()
    gc.collect()
    # Once in the forward, and once more if the op saves a tensor.
    assert len(alive) in (len(record.leaves), 2 * len(record.leaves))
    assert all(ref() is None for ref in alive)


@each_call(CALLS, op_of)
def test_a_batch_of_gradients_is_the_single_gradients(name, device):
    record = made(name, device)
    outputs = [o for o in record.outputs(*record.leaves) if o.requires_grad]
    douts = [torch.randn(3, *o.shape, device=device) for o in outputs]
    ask = dict(retain_graph=True, allow_unused=True)
    batched = torch.autograd.grad(outputs, record.leaves, douts, is_grads_batched=True, **ask)
    for i in range(3):
        each = torch.autograd.grad(outputs, record.leaves, [d[i] for d in douts], **ask)
        torch.testing.assert_close([got[i] for got in batched], each)


class Masks(TorchDispatchMode):
    """Collects the output masks of the backward ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[list[bool]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        arguments = func._schema.arguments if func.namespace == "torchweld" else []
        for i, argument in enumerate(arguments):
            if argument.name == "output_mask":
                self.found.append((kwargs or {}).get("output_mask") or args[i])
        return func(*args, **(kwargs or {}))


@each_call(CALLS, op_of)
def test_only_the_gradients_that_are_asked_for_are_computed(name, device):
    record = made(name, device)
    loss = record.loss()
    every = torch.autograd.grad(loss, record.leaves, retain_graph=True)
    for i, leaf in enumerate(record.leaves):
        with Masks() as masks:
            (grad,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        assert_same_bits(grad, every[i], name)
        assert all(sum(mask) == 1 for mask in masks.found), (i, masks.found)
