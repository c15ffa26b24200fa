"""A gradient may write over the tensors that its forward kept, only where no one else holds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from numerics import assert_same_bits
from samples import call

CASES = [
    *[("linear", {"activation": a}) for a in ("gelu", "gelu_tanh", "silu", "relu_squared")],
    ("layer_norm_linear", {"activation": "gelu_tanh"}),
    ("rms_norm_linear", {"activation": "silu"}),
    *[
        ("gated_linear", {"gate": gate, "interleaved": interleaved})
        for gate in ("sigmoid_tanh", "geglu", "geglu_tanh", "swiglu", "reglu")
        for interleaved in (False, True)
    ],
]
every_case = pytest.mark.parametrize(("op", "kwargs"), CASES)


def inputs_of(op: str, device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    sizes = {"x": (64, 32), "weight": (256, 32), "bias": (256,), "scale": (32,)}
    made = {name: torch.randn(*size, device=device, dtype=dtype) for name, size in sizes.items()}
    if not op.endswith("norm_linear"):
        del made["scale"]
    return [t.requires_grad_() for t in made.values()]


def gradients(out: Tensor, inputs: Sequence[Tensor], keep: bool) -> tuple[Tensor, ...]:
    dout = torch.linspace(-1, 1, out.numel(), device=out.device).to(out.dtype).view_as(out)
    return torch.autograd.grad(out, inputs, dout, retain_graph=keep)


def allocated_by(run: Callable[[], object], device: str) -> int:
    """Bytes that a call allocates in all, one after the other."""
    if device == "cuda":
        before = torch.cuda.memory_stats()["allocated_bytes.all.allocated"]
        run()
        return torch.cuda.memory_stats()["allocated_bytes.all.allocated"] - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as prof:
        run()
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    return sum(max(0, e.nbytes()) for e in events)


@every_case
def test_no_second_preactivation_is_allocated(op, kwargs, device):
    inputs = inputs_of(op, device)
    out = call(op)(*inputs, **kwargs)
    gradients(out, inputs, keep=True)
    kept = allocated_by(lambda: gradients(out, inputs, keep=True), device)
    given = allocated_by(lambda: gradients(out, inputs, keep=False), device)
    assert kept - given == 64 * 256 * 4


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_those_of_a_kept_graph(op, kwargs, dtype, device):
    inputs = inputs_of(op, device, dtype)
    out = call(op)(*inputs, **kwargs)
    kept = gradients(out, inputs, keep=True)
    assert_same_bits(gradients(out, inputs, keep=False), kept, op)


@every_case
def test_the_callers_own_stays_as_it_was(op, kwargs, device):
    inputs = inputs_of(op, device)
    out, preact, *_ = call(f"{op}_forward")(*inputs, **kwargs)
    before = preact.clone()
    gradients(out, inputs, keep=False)
    assert_same_bits(preact, before, op)


@every_case
def test_what_a_view_has_stays_as_it_was(op, kwargs, device):
    inputs = inputs_of(op, device)
    out, preact, *_ = call(f"{op}_forward")(*inputs, **kwargs)
    before, view = preact.clone(), preact.detach()[1:]
    del preact
    gradients(out, inputs, keep=False)
    assert_same_bits(view, before[1:], op)


def alias_of_preact(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    out, preact = torch.ops.torchweld.linear_forward(x, weight, bias, activation="gelu")
    return out, preact.detach()


def test_what_an_alias_in_torchscript_has_stays_as_it_was(device):
    """The alias is no view that would hold its base; no Python object holds the pre-activation."""
    inputs = inputs_of("linear", device)
    out, alias = torch.jit.script(alias_of_preact)(*inputs)
    assert not alias._is_view()
    before = alias.clone()
    gradients(out, inputs, keep=False)
    assert_same_bits(alias, before)


@every_case
def test_what_a_hook_keeps_stays_as_it_was(op, kwargs, device):
    inputs = inputs_of(op, device)
    packed: list[tuple[Tensor, Tensor]] = []

    def pack(t: Tensor) -> int:
        packed.append((t, t.detach().clone()))
        return len(packed) - 1

    with saved_tensors_hooks(pack, lambda i: packed[i][0]):
        out = call(op)(*inputs, **kwargs)
    gradients(out, inputs, keep=False)
    assert any(t.numel() >= 64 * 256 for t, _ in packed)
    for t, before in packed:
        assert_same_bits(t.detach(), before, op)


@every_case
def test_checkpointed_gradients(op, kwargs, device):
    inputs = inputs_of(op, device)
    want = gradients(call(op)(*inputs, **kwargs), inputs, keep=False)
    out = checkpoint(lambda *t: call(op)(*t, **kwargs), *inputs, use_reentrant=False)
    assert_same_bits(gradients(out, inputs, keep=False), want, op)


@every_case
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded"])
def test_the_bits_do_not_depend_on_retain_graph(op, kwargs, layout, device):
    """The order of sums follows the layout of dz, so dz always has the pre-activation's layout."""
    inputs = inputs_of(op, device)
    out = call(op)(*inputs, **kwargs)
    dout = torch.randn(out.shape[::-1], device=device).t()
    if layout == "contiguous":
        dout = dout.contiguous()
    elif layout == "expanded":
        dout = dout[:1].expand_as(out)
    kept = torch.autograd.grad(out, inputs, dout, retain_graph=True)
    assert_same_bits(torch.autograd.grad(out, inputs, dout), kept)
