"""torch.func over every op: the bits of autograd, vmap as a loop, per-sample gradients."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor
from torch.func import grad, jacrev, jvp, vjp, vmap
from torch.testing import assert_close

import torchweld
from samples import AUTOCAST, DIFFERENTIABLE, PUBLIC, SAMPLES, as_tuple, call, each_call

OPS = [op for op in PUBLIC if op in DIFFERENTIABLE]
EVERY = [s for op in OPS for s in SAMPLES[op]]


@pytest.fixture(autouse=True)
def _no_warning():
    """Turns warnings into errors, for example torch's about an op without a batching rule."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=UserWarning)
        yield


def wanted(op: str, args: list) -> list[int]:
    return [i for i in DIFFERENTIABLE[op] if i < len(args) and isinstance(args[i], Tensor)]


def function_of(op: str, args: list, kwargs: dict):
    """The op as a function of the arguments that take a gradient, and those."""
    at = wanted(op, args)

    def function(*tensors: Tensor) -> Tensor:
        values = list(args)
        for i, t in zip(at, tensors, strict=True):
            values[i] = t
        return as_tuple(call(op)(*values, **kwargs))[0]

    return function, [args[i] for i in at]


def leaves_of(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@each_call(EVERY)
def test_vjp_has_the_bits_of_autograd(s, device):
    op, (args, kwargs) = s.op, s.make(device)
    if op == "linear_cross_entropy":  # torch.func keeps nothing for the gradient
        kwargs["keep"] = "nothing"
    if op == "cross_entropy":  # a scalar's gradient is computed for dloss = 1 and then scaled
        kwargs["reduction"] = "none"
    function, tensors = function_of(op, args, kwargs)
    leaves = leaves_of(tensors)
    y = function(*leaves)
    dy = torch.randn_like(y)
    want = torch.autograd.grad(y, leaves, dy)
    ours, pull = vjp(function, *tensors)
    assert torch.equal(ours.nan_to_num(7.0), y.detach().nan_to_num(7.0))
    assert_same(pull(dy), want)


@each_call(EVERY)
def test_vmap_is_a_loop(s, device):
    op, (args, kwargs) = s.op, s.make(device)
    at = wanted(op, args)
    for batched in (at[:1], at):  # the first alone: the others are the same for the whole batch
        more = [
            torch.stack([a, a.roll(1), a * 0.5], -1) if i in batched else a
            for i, a in enumerate(args)
        ]
        dims = tuple(-1 if i in batched else None for i in range(len(args)))
        ours = as_tuple(vmap(lambda *values: call(op)(*values, **kwargs), dims)(*more))
        for i in range(3):
            entry = [a[..., i] if d == -1 else a for a, d in zip(more, dims, strict=True)]
            want = as_tuple(call(op)(*entry, **kwargs))
            assert_close([a[i] for a in ours], want, equal_nan=True)


@pytest.mark.parametrize("op", OPS)
def test_per_sample_gradients(op, device):
    args, kwargs = SAMPLES[op][0].make(device)
    function, tensors = function_of(op, args, kwargs)
    first = torch.stack([tensors[0], tensors[0] * 0.5])

    def loss(x: Tensor, *others: Tensor) -> Tensor:
        return function(x, *others).square().sum()

    which = tuple(range(len(tensors)))
    dims = (0, *[None] * (len(tensors) - 1))
    ours = vmap(grad(loss, argnums=which), dims)(first, *tensors[1:])
    for i in range(2):
        leaves = [t.detach().clone().requires_grad_() for t in (first[i], *tensors[1:])]
        want = torch.autograd.grad(loss(*leaves), leaves)
        assert_close([a[i] for a in ours], want)


def test_masks_as_numbers_and_the_gradient_of_lse():
    q, k, v = (torch.randn(2, 4, 7, 5) for _ in range(3))
    sink, key_start = torch.randn(4), torch.tensor([[0, 0, 0, 3, 3, 3, 6]] * 2, dtype=torch.int32)
    numbers = {"key_start": key_start, "window": 3, "softcap": 2.0, "causal": True}

    def loss(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        out, lse = torchweld.attention_with_lse(q, k, v, sink=sink, **numbers)
        return out.square().sum() + lse.sin().sum()

    leaves = [t.clone().requires_grad_() for t in (q, k, v, sink)]
    want = torch.autograd.grad(loss(*leaves), leaves)
    assert_close(grad(loss, (0, 1, 2, 3))(q, k, v, sink), want)
    more = torch.stack([q, q * 0.5])
    sinks = torch.stack([sink, sink + 1])
    ours = vmap(grad(loss, (0, 3)), (0, None, None, 0))(more, k, v, sinks)
    for i in range(2):
        leaves = [t.clone().requires_grad_() for t in (more[i], k, v, sinks[i])]
        want = torch.autograd.grad(loss(*leaves), [leaves[0], leaves[3]])
        assert_close([a[i] for a in ours], want)
    scores = torch.randn(3, 2, 4, 7, 7)

    def rows(s: Tensor) -> Tensor:
        return torchweld.causal_softmax(s, key_start=key_start, sink=sink)

    assert_close(vmap(rows)(scores), torch.stack([rows(s) for s in scores]))


def test_jacobian_and_a_gradient_of_a_batch():
    x = torch.randn(3, 5)
    assert_close(jacrev(torchweld.softmax)(x), jacrev(lambda x: torch.softmax(x, -1))(x))
    weight = torch.randn(4, 5)

    def loss(linear):
        return lambda w: vmap(lambda row: linear(row, w))(x).square().sum()

    want = grad(loss(torch.nn.functional.linear))(weight)
    assert_close(grad(loss(torchweld.linear))(weight), want)


def test_functional_call_of_a_module():
    module = torchweld.nn.LayerNormLinear(8, 6, activation="gelu_tanh")
    stock = module.to_torch()
    x = torch.randn(4, 3, 8)

    def gradients(m):
        def loss(parameters, x):
            return torch.func.functional_call(m, parameters, (x,)).square().mean()

        return vmap(grad(loss), (None, 0))(dict(m.named_parameters()), x)

    ours, want = gradients(module), gradients(stock)
    for mine, theirs in {"weight": "1.weight", "ln_weight": "0.weight", "bias": "1.bias"}.items():
        assert ours[mine].shape[0] == 4
        assert_close(ours[mine], want[theirs], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", [op for op in OPS if op in AUTOCAST])
def test_autocast(op, dtype):
    args, kwargs = SAMPLES[op][0].make("cpu")
    function, tensors = function_of(op, args, kwargs)
    with torch.autocast("cpu", dtype):
        leaves = leaves_of(tensors)
        y = function(*leaves)
        ours, pull = vjp(function, *tensors)
        assert ours.dtype == y.dtype
        want = torch.autograd.grad(y.sum(), leaves)
        for a, b in zip(pull(torch.ones_like(y)), want, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("op", OPS)
def test_forward_mode_is_refused(op):
    args, kwargs = SAMPLES[op][0].make("cpu")
    function, tensors = function_of(op, args, kwargs)
    with pytest.raises(NotImplementedError) as error:
        jvp(function, tuple(tensors), tuple(map(torch.ones_like, tensors)))
    assert str(error.value) == (
        f"torchweld::{op}: the derivative must be reverse-mode, but got forward-mode (jvp, jacfwd, "
        "hessian); use torch.func.vjp or jacrev"
    )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("op", SAMPLES)
def test_a_tangent_is_refused_in_every_grad_mode(op, mode):
    """Forward mode is independent of grad mode; an op that ignores a tangent makes it zero."""
    args, kwargs = SAMPLES[op][0].make("cpu")
    at = [i for i, a in enumerate(args) if isinstance(a, Tensor) and a.is_floating_point()]
    if not at:
        pytest.skip("it takes no floating-point tensor")
    with fwAD.dual_level(), mode():
        for i in at:
            args[i] = fwAD.make_dual(args[i].clone(), torch.ones_like(args[i]))
        with pytest.raises(NotImplementedError):
            call(op)(*args, **kwargs)


@each_call(EVERY)
def test_batched_gradients_are_those_of_a_loop(s, device):
    """The backward runs several times, and must not overwrite the saved tensors."""
    op, (args, kwargs) = s.op, s.make(device)
    function, tensors = function_of(op, args, kwargs)
    leaves = leaves_of(tensors)
    y = function(*leaves)
    dys = torch.randn(3, *y.shape, dtype=y.dtype, device=device)
    batched = torch.autograd.grad(y, leaves, dys, is_grads_batched=True)
    for i, dy in enumerate(dys):
        again = leaves_of(tensors)
        alone = torch.autograd.grad(function(*again), again, dy)
        assert_same(tuple(t[i] for t in batched), alone)


@pytest.mark.parametrize("op", OPS)
def test_compiled_autograd_behind_an_eager_forward(op):
    args, kwargs = SAMPLES[op][0].make("cpu")
    function, tensors = function_of(op, args, kwargs)
    eager, compiled = leaves_of(tensors), leaves_of(tensors)
    function(*eager).sum().backward()
    loss = function(*compiled).sum()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(compiled_autograd=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo looks at .grad of tensors that are no leaves
        torch.compile(lambda value: value.backward(), backend="eager")(loss)
    assert_same(tuple(t.grad for t in compiled), tuple(t.grad for t in eager))


def test_a_second_gradient_is_never_zero():
    x = torch.randn(3, 5)

    def inner(x):
        return grad(lambda x: torchweld.softmax(x).square().sum())(x).sum()

    with pytest.raises(RuntimeError, match="softmax_backward"):
        grad(inner)(x)


def test_a_gradient_that_is_not_there_is_refused():
    args, kwargs = SAMPLES["int4_linear"][0].make("cpu")

    def loss(scale):
        return call("int4_linear")(args[0], args[1], scale, *args[3:], **kwargs).sum()

    with pytest.raises(RuntimeError, match="torchweld::int4_linear: scale must "):
        grad(loss)(args[2])


def test_functionalize_and_compile():
    x = torch.randn(3, 5)
    want = grad(lambda x: torch.softmax(x, -1).square().sum())(x)

    def gradient(x):
        return grad(lambda x: torchweld.softmax(x).square().sum())(x)

    assert torch.equal(torch.func.functionalize(torchweld.softmax)(x), torchweld.softmax(x))
    assert_close(torch.compile(gradient, backend="aot_eager")(x), want)


def test_an_empty_vmap_is_refused():
    with pytest.raises(RuntimeError, match="softmax: the batch of vmap must be at least 1"):
        vmap(torchweld.softmax)(torch.ones(0, 3))
