"""gated_mlp, its forward and backward ops, and the kernel that computes the gate's gradient."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchweld
from cuda_graphs import cuda_graph
from numerics import assert_equal, assert_same_bits, check
from reference import GATES
from running import REFERENCES
from samples import BF16, F16, F32, check_op, dtypes, forward_backward
from tensors import check_empty, check_output_mask, randn

OP = "gated_mlp"
ops = torch.ops.torchweld

# M, N, K, P
SIZES = [(1, 1, 1, 1), (33, 65, 64, 31), (64, 32, 127, 33), (65, 63, 129, 64), (96, 192, 192, 128)]
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the engines run on a GPU")


def call_args(device, dtype, m, n, k, p, biases=(True, True, True)):
    weights = [randn(device, dtype, n, k, scale=max(k, 1) ** -0.5) for _ in range(2)]
    weights.append(randn(device, dtype, p, n, scale=max(n, 1) ** -0.5))
    sizes = zip((n, n, p), biases, strict=True)
    vectors = [randn(device, dtype, size) if given else None for size, given in sizes]
    return [randn(device, dtype, m, k), *weights, *vectors]


def backward_args(device, dtype, m, n, k, p):
    x, *weights = call_args(device, dtype, m, n, k, p)[:4]
    _, z = ops.gated_mlp_forward(x, *weights)
    return [randn(device, dtype, m, p), x, *weights, z]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(device, dtype, size):
    for gate in GATES:
        eager = min(size) > 4
        check_op(OP, call_args(device, dtype, *size), {"gate": gate}, eager=eager)
        bare = call_args(device, dtype, *size, biases=(False, False, False))
        check_op(OP, bare, {"gate": gate}, eager=eager)


@pytest.mark.parametrize("size", [(300, 264, 72, 200), (520, 512, 128, 256)], ids=str)
def test_large(device, size):
    if device == "cpu" and size[0] > 300:  # the bounds would take 8 s
        size = (260, 256, *size[2:])
    for dtype in dtypes(device):
        for biases in ((False, False, False), (True, False, True), (False, True, False)):
            check_op(OP, call_args(device, dtype, *size, biases=biases), {"gate": "swiglu"})


def test_equals_its_two_ops(device):
    for dtype in dtypes(device):
        x, left, right, down, *biases = call_args(device, dtype, 40, 64, 128, 72)
        for gate in GATES:
            y, z = ops.gated_mlp_forward(x, left, right, down, *biases, gate=gate)
            assert_same_bits(torchweld.gated_mlp(x, left, right, down, *biases, gate=gate), y)
            pair = ops.gated_linear_pair_forward(x, left, right, *biases[:2], gate=gate)
            assert_same_bits(z, pair[1])
            assert_same_bits(y, torchweld.linear(pair[0], down, biases[2]))


def test_a_llama_mlp(device):
    gate, up = (nn.Linear(64, 192, bias=False, device=device) for _ in range(2))
    down = nn.Linear(192, 64, bias=False, device=device)
    x = torch.randn(2, 5, 64, device=device)
    y = torchweld.gated_mlp(x, gate.weight, up.weight, down.weight)
    assert y.shape == x.shape and y.is_contiguous()
    torch.testing.assert_close(y, down(F.silu(gate(x)) * up(x)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "size", [(0, 3, 4, 2), (3, 0, 4, 2), (3, 4, 0, 2), (3, 4, 2, 0), (0, 0, 0, 0)], ids=str
)
def test_empty(device, size):
    for dtype in dtypes(device):
        for gate in GATES:
            check_empty(OP, call_args(device, dtype, *size), {"gate": gate}, size[0], size[3])


def test_output_mask(device):
    for dtype in dtypes(device):
        args = backward_args(device, dtype, 9, 64, 24, 40)
        for mask in (0b0000001, 0b0000010, 0b0010100, 0b0001000, 0b1000000, 0b0110000, 0):
            check_output_mask(OP + "_backward", args, mask, 7)


def test_gradients_keep_the_weights_layouts(device):
    args = call_args(device, F32, 9, 16, 24, 8, (False, False, False))
    args[2], args[3] = (t.t().contiguous().t() for t in args[2:4])
    _, (_, dleft, dright, ddown, *_) = forward_backward(OP, args, {})
    assert (dleft.stride(), dright.stride(), ddown.stride()) == ((24, 1), (1, 16), (1, 8))


def test_a_frozen_weight_has_no_gradient(device):
    x, left, right, down = call_args(device, F32, 9, 16, 24, 8)[:4]
    for frozen in range(4):
        leaves = [t.detach().requires_grad_(i != frozen) for i, t in enumerate((x, left, right))]
        leaves.append(down.detach().requires_grad_(frozen != 3))
        torchweld.gated_mlp(*leaves).sum().backward()
        assert [t.grad is None for t in leaves] == [i == frozen for i in range(4)]


def test_a_second_backward_gives_the_same_bits(device):
    """The first one keeps the graph, so dz must not overwrite z; the last one may."""
    args = [t.requires_grad_() for t in call_args(device, F32, 40, 64, 24, 32)]
    y = torchweld.gated_mlp(*args)
    dy = torch.randn_like(y)
    first = torch.autograd.grad(y, args, dy, retain_graph=True)
    assert_same_bits(first, torch.autograd.grad(y, args, dy))


# The kernel on Hopper


def needs_hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for Hopper")


def kernels_of(call, *args, **kwargs) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call(*args, **kwargs)
        torch.cuda.synchronize()
    return [event.key for event in profile.key_averages()]


@on_gpu
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_the_kernel_and_the_pass_meet_the_bounds(dtype, gate):
    """A transposed down has no such kernel. Sizes reach beyond tiles, and many tiles a worker."""
    needs_hopper()
    for m, n, k, p in ((2048, 1024, 64, 512), (1000, 1032, 72, 136), (4100, 2184, 64, 64)):
        args = backward_args("cuda", dtype, m, n, k, p)
        wanted = {"gate": gate, "output_mask": [True] * 7}
        bounds = REFERENCES[OP + "_backward"](*args, **wanted)
        transposed = [*args]
        transposed[4] = args[4].t().contiguous().t()
        for given, fused in ((args, True), (transposed, False)):
            names = kernels_of(ops.gated_mlp_backward, *given, **wanted)
            assert any("GateBackward" in name for name in names) == fused
            grads = ops.gated_mlp_backward(*given, **wanted)
            for i, (grad, bound) in enumerate(zip(grads, bounds, strict=True)):
                check(grad, bound, label=f"{m, n, k, p} fused={fused}, gradient {i}", device="cuda")


@on_gpu
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_the_kernel_is_exact_for_integers(dtype):
    """With z = (1, 1) and reglu both branches of dz are dact, a sum of small integers."""
    needs_hopper()

    def grid(*shape):
        return torch.randint(-2, 3, shape).double()

    for m, n, p in ((2048, 1024, 64), (1000, 1032, 72), (513, 4096, 128), (256, 256, 64)):
        dy, down, left, right, x = grid(m, p), grid(p, n), grid(n, 64), grid(n, 64), grid(m, 64)
        dact = (dy @ down).to(dtype).double()
        given = [t.to(dtype).cuda() for t in (dy, x, left, right, down)]
        ones = torch.ones(m, 2 * n, dtype=dtype, device="cuda")
        dx, dleft, dright, ddown, *dbiases = ops.gated_mlp_backward(
            *given, ones, gate="reglu", output_mask=[True] * 7
        )
        assert_equal(dx, (dact @ (left + right)).to(dtype).cuda())
        for grad in (dleft, dright):
            assert_equal(grad, (dact.T @ x).to(dtype).cuda())
        assert_equal(ddown, dy.sum(0)[:, None].expand(p, n).to(dtype).cuda())
        assert_equal(dbiases, [sums.sum(0).to(dtype).cuda() for sums in (dact, dact, dy)])


@on_gpu
def test_the_kernel_overwrites_z_in_training():
    """dz has the memory of z, and only act has new memory of such a size."""
    needs_hopper()
    m, n, k = 4096, 4096, 512
    args = [t.requires_grad_() for t in call_args("cuda", BF16, m, n, k, k, (False,) * 3)[:4]]
    plain = [t.detach().clone().requires_grad_() for t in args]
    torchweld.gated_mlp(*args).sum().backward()  # caches
    kept = torchweld.gated_mlp(*plain)
    ones = torch.ones_like(kept)
    expected = torch.autograd.grad(kept, plain, ones, retain_graph=True)
    y = torchweld.gated_mlp(*args)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    grads = torch.autograd.grad(y, args, ones)
    assert torch.cuda.max_memory_allocated() - before < 4 * n * m
    assert_same_bits(grads, expected)


@on_gpu
def test_the_kernel_in_a_cuda_graph():
    needs_hopper()
    args = backward_args("cuda", BF16, 1024, 1024, 256, 256)
    expected = ops.gated_mlp_backward(*args, output_mask=[True] * 7)
    graph, results = cuda_graph(lambda: ops.gated_mlp_backward(*args, output_mask=[True] * 7))
    for _ in range(3):
        graph.replay()
        assert_same_bits(results, expected)


def test_no_argument_changes(device):
    args = backward_args(device, F32, 9, 64, 24, 40)
    before = copy.deepcopy(args)
    ops.gated_mlp_backward(*args, output_mask=[True] * 7)
    assert_same_bits(args, before)


def test_the_forward_keeps_z_but_not_the_result_of_the_gate(device):
    args = [t.requires_grad_() for t in call_args(device, F32, 9, 64, 24, 40, (False,) * 3)[:4]]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        torchweld.gated_mlp(*args)
    assert [tuple(t.shape) for t in kept] == [(9, 24), (64, 24), (64, 24), (40, 64), (9, 128)]


def test_checkpointing_recomputes_no_product_with_down(device):
    """The recomputation ends at the last saved tensor, which is z."""
    args = [t.requires_grad_() for t in call_args(device, F32, 9, 64, 24, 40)]
    expected = torch.autograd.grad(torchweld.gated_mlp(*args).sum(), args)
    seen = []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    with Seen():
        y = checkpoint(torchweld.gated_mlp, *args, use_reentrant=False)
        forward = len(seen)
        grads = torch.autograd.grad(y.sum(), args)
    assert seen[:forward].count("torchweld::linear") == 1
    assert "torchweld::gated_linear_pair_forward" in seen[forward:]
    assert "torchweld::linear" not in seen[forward:]
    assert_same_bits(grads, expected)
