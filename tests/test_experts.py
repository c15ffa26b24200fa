"""experts: routing, gates and gradients."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F

import reference as R
import torchweld
from choices_helpers import _C, dry_records, explains_kernels
from cuda_graphs import cuda_graph
from numerics import assert_equal, assert_same_bits
from samples import BF16, F32, F64, call, check_op, dtypes, forward_backward, need_kernel
from tensors import check_output_mask, randn

OP = "experts"
GATES = tuple(R.EXPERT_GATES)
# T, H, I, E, k
SIZES = [(1, 1, 1, 1, 1), (7, 8, 16, 4, 2), (33, 40, 24, 5, 3), (130, 64, 72, 8, 2)]


@pytest.fixture(autouse=True)
def kernel(device):
    need_kernel(OP, device)


def routing(kind, tokens, experts, k, device):
    """(T, k): each token's experts are distinct, unless all are one."""
    scores = torch.rand(tokens, experts, dtype=F64)
    if kind == "skewed":
        scores /= torch.arange(1, experts + 1) ** 1.2
    if kind == "half empty":
        scores[:, (experts + 1) // 2 :] -= 2
        k = min(k, (experts + 1) // 2)
    index = scores.topk(k).indices
    if kind == "one":
        index = torch.full_like(index, experts - 1)
    if kind == "sentinels":
        index[torch.rand(index.shape) < 0.4] = experts
        index[torch.rand(index.shape) < 0.1] = -1
        index[0, 0] = 0
    return index.to(device)


ROUTINGS = ("random", "skewed", "half empty", "one", "sentinels")


def call_args(device, dtype, t, h, n, e, k, *, kind="random", gate="swiglu", biases=False):
    width = 2 * n if "glu" in gate else n
    index = routing(kind, t, e, k, device)
    args = [
        randn(device, dtype, t, h),
        randn(device, dtype, e, width, h, scale=h**-0.5),
        randn(device, dtype, e, h, n, scale=n**-0.5),
        index,
        torch.rand(index.shape, dtype=F64).to(dtype).to(device),
    ]
    vectors = [randn(device, dtype, e, width), randn(device, dtype, e, h)] if biases else []
    return args + vectors


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes_and_routings(device, size, kind):
    for dtype in dtypes(device):
        for biases in (False, True):
            args = call_args(device, dtype, *size, kind=kind, biases=biases)
            check_op(OP, args, eager=size[0] > 30)


@pytest.mark.parametrize("gate", GATES)
def test_gates(device, gate):
    for dtype in dtypes(device):
        args = call_args(device, dtype, 40, 32, 48, 4, 2, gate=gate, biases=True)
        check_op(OP, args, {"gate": gate})
        if "glu" in gate:
            check_op(OP, args, {"gate": gate, "limit": 0.7, "interleaved": True})


def test_the_gate_of_gpt_oss(device):
    for dtype in dtypes(device):
        args = call_args(device, dtype, 40, 32, 48, 4, 2, biases=True)
        args[1], args[2] = args[1].mT.contiguous(), args[2].mT.contiguous()
        options = {"alpha": 1.702, "limit": 1.0, "interleaved": True, "transposed": True}
        check_op(OP, args, options)


LARGE = [(300, 128, 256, 4, 2), (500, 264, 136, 16, 4), (1000, 64, 64, 64, 8)]


@pytest.mark.parametrize("size", LARGE, ids=str)
def test_large(device, size):
    # Each dtype has both kinds, at one size or another.
    for i, dtype in enumerate(dtypes(device), LARGE.index(size)):
        kind = ("skewed", "sentinels")[i % 2]
        check_op(OP, call_args(device, dtype, *size, kind=kind, biases=True))


@pytest.mark.parametrize("size", [(0, 4, 4, 2, 2), (3, 4, 0, 2, 2), (3, 4, 4, 2, 0)], ids=str)
def test_empty(device, size):
    t, h, n, e, k = size
    for dtype in dtypes(device):
        args = call_args(device, dtype, t, h, max(n, 1), e, k, biases=True)
        args[1], args[2], args[5] = args[1][:, : 2 * n], args[2][..., :n], args[5][:, : 2 * n]
        y, grads = forward_backward(OP, args, {})
        assert y.shape == (t, h)
        if n and not t * k:
            assert all((g == 0).all() for g in [y, *grads] if g is not None)


def test_no_token_has_an_expert(device):
    args = call_args(device, F32, 5, 8, 8, 3, 2, biases=True)
    args[3] = torch.full_like(args[3], 3)
    y, grads = forward_backward(OP, args, {})
    assert all((g == 0).all() for g in [y, *grads] if g is not None)


def test_a_nan_of_one_expert_stays_there(device):
    """The tiles of a group may load rows of the next one."""
    for dtype in dtypes(device):
        args = call_args(device, dtype, 90, 64, 64, 6, 1, biases=True)
        args[3] = (torch.arange(90, device=device) % 6)[:, None]
        good, grads = forward_backward(OP, args, {}, dout := randn(device, dtype, 90, 64))
        bad_rows = torch.arange(90, device=device) % 6 == 2
        args[0] = args[0].masked_fill(bad_rows[:, None], float("nan"))
        y, bad_grads = forward_backward(OP, args, {}, dout)
        assert y[bad_rows].isnan().all()
        assert_same_bits(y[~bad_rows], good[~bad_rows])
        for i in (1, 2, 5):
            others = torch.arange(6, device=device) != 2
            assert_same_bits(bad_grads[i][others], grads[i][others])
        assert_same_bits(bad_grads[0][~bad_rows], grads[0][~bad_rows])


def test_what_no_route_reaches_counts_nothing(device):
    """NaN in the weights of an expert without a token, and in a token whose ids are sentinels."""
    for dtype in dtypes(device):
        args = call_args(device, dtype, 90, 64, 64, 6, 2, biases=True)
        args[3] = torch.stack([torch.arange(90) % 5, torch.arange(90) % 3], 1).to(device)
        args[3][:, 1] += 2 * (args[3][:, 1] == args[3][:, 0])
        args[3][::7] = torch.tensor([6, -1], device=device)
        args[4][1, 0], args[3][1, 0] = 0, 6
        dout = randn(device, dtype, 90, 64)
        good, grads = forward_backward(OP, args, {}, dout)
        for i in (1, 2, 5, 6):
            args[i][5] = float("nan")
        for t in (args[0], args[4], dout):
            t[::7] = float("nan")
        args[4][1, 0] = float("inf")
        y, bad_grads = forward_backward(OP, args, {}, dout)
        assert (y[::7] == 0).all()
        for one, other in zip([y, *bad_grads], [good, *grads], strict=True):
            if one is not None:
                assert_same_bits(one, other)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_ids_of_any_value(device, dtype):
    """Ids that wrap to an expert in fewer bits, ids that a token has twice."""
    limits = torch.iinfo(dtype)
    args = call_args(device, F32, 40, 32, 48, 4, 3, biases=True)
    ids = torch.tensor([limits.min, limits.max, limits.min + 1, -4, -1, 4, 5], dtype=torch.int64)
    if dtype == torch.int64:
        ids = torch.cat([ids, torch.tensor([2**32, 2**32 + 1, 2**31, -(2**32)])])
    index = torch.arange(120).view(40, 3) % 4
    index[:, 2] = index[:, 0]
    wild = index.clone()
    wild[::3, 1] = ids.repeat(3)[:14]
    index[::3, 1] = 4
    dout = randn(device, F32, 40, 32)
    args[3] = index.to(device)
    check_op(OP, args, dout=dout)
    good, grads = forward_backward(OP, args, {}, dout)
    args[3] = wild.to(dtype).to(device)
    y, again = forward_backward(OP, args, {}, dout)
    for one, other in zip([y, *again], [good, *grads], strict=True):
        if one is not None:
            assert_same_bits(one, other)


def test_integers_are_exact(device):
    """Sums of small integers have no rounding errors: the routing and the order are right."""
    for dtype in dtypes(device):
        t, h, n, e, k = 200, 32, 32, 9, 3
        index = routing("sentinels", t, e, k, device)
        shapes = (t, h), (e, n, h), (e, h, n)
        x, gate_up, down = (torch.randint(-2, 3, s).to(dtype).to(device) for s in shapes)
        x[:, 4:], down[:, :, 4:] = 0, 0
        y = torchweld.experts(x, gate_up, down, index, torch.ones_like(index, dtype=dtype),
                              gate="relu")  # fmt: skip
        wide = R.experts(*map(R.up, (x, gate_up, down, index, torch.ones(t, k))), gate="relu")
        assert_equal(y, wide.to(dtype).to(device))


def test_router_weights_in_float32(device):
    for dtype in dtypes(device):
        args = call_args(device, dtype, 40, 32, 48, 4, 2)
        args[4] = torch.rand(40, 2, dtype=F64 if dtype == F64 else F32).to(device)
        y, grads = forward_backward(OP, args, {})
        assert y.dtype == dtype and grads[4].dtype == args[4].dtype
        check_op(OP, args, eager=False)
    with pytest.raises(RuntimeError, match="weight must be bfloat16 like x, or float32"):
        torchweld.experts(*(t.to(BF16) for t in args[:3]), args[3], args[4].double())


def test_index_may_be_int32(device):
    args = call_args(device, F32, 40, 32, 48, 4, 2, kind="sentinels")
    y = torchweld.experts(*args)
    args[3] = args[3].int()
    assert_same_bits(torchweld.experts(*args), y)


def test_every_run_has_the_same_bits(device):
    args = call_args(device, BF16, 700, 64, 96, 16, 4, kind="skewed", biases=True)
    dout = randn(device, BF16, 700, 64)
    first = forward_backward(OP, args, {}, dout)
    for _ in range(5):
        again = forward_backward(OP, args, {}, dout)
        for one, other in zip([first[0], *first[1]], [again[0], *again[1]], strict=True):
            if one is not None:
                assert_same_bits(one, other)


def test_output_mask(device):
    for dtype in dtypes(device):
        args = call_args(device, dtype, 20, 16, 24, 4, 2, biases=True)
        _, z = torch.ops.torchweld.experts_forward(*args)
        backward = [randn(device, dtype, 20, 16), *args[:5], z, args[6]]
        for mask in (0b000001, 0b000010, 0b000100, 0b001000, 0b010000, 0b100000, 0b100101, 0):
            check_output_mask(OP + "_backward", backward, mask, 6)


def test_gradients_keep_the_weights_layouts(device):
    args = call_args(device, F32, 20, 16, 24, 4, 2)
    args[1], args[2] = (t.mT.contiguous().mT for t in args[1:3])
    _, grads = forward_backward(OP, args, {})
    assert grads[1].stride() == args[1].stride() and grads[2].stride() == args[2].stride()


def test_a_second_backward_gives_the_same_bits(device):
    args = call_args(device, F32, 40, 32, 48, 4, 2)
    leaves = [t.requires_grad_() if t.is_floating_point() else t for t in args]
    y = torchweld.experts(*leaves)
    wanted = [t for t in leaves if t.requires_grad]
    dy = torch.randn_like(y)
    first = torch.autograd.grad(y, wanted, dy, retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(y, wanted, dy), strict=True):
        assert_same_bits(one, other)


def test_a_mixtral_layer(device):
    """Written as the model writes it."""
    x, gate_up, down, index, weight = call_args(device, F32, 24, 16, 32, 4, 2)
    expected = torch.zeros_like(x)
    for t in range(24):
        for j in range(2):
            gate, up = F.linear(x[t], gate_up[index[t, j]]).chunk(2)
            expected[t] += weight[t, j] * F.linear(F.silu(gate) * up, down[index[t, j]])
    torch.testing.assert_close(
        torchweld.experts(x, gate_up, down, index, weight), expected, rtol=1e-4, atol=1e-4
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph")
def test_a_cuda_graph_replays_other_routings():
    args = call_args("cuda", BF16, 256, 64, 64, 8, 2)
    graph, y = cuda_graph(lambda: call(OP)(*args))
    for kind in ROUTINGS[1:]:
        args[3].copy_(routing(kind, 256, 8, 2, "cuda"))
        graph.replay()
        assert_same_bits(y, call(OP)(*args))


@contextlib.contextmanager
def forced(args, kwargs, choice):
    """Every grouped product of the call, and of its gradient, runs this choice if it can."""
    _, z = torch.ops.torchweld.experts_forward(*args, **kwargs)
    backward = [torch.empty_like(args[0]), *args[:5], z, *args[6:]]
    calls = [("experts", args, kwargs), ("experts_backward", backward, kwargs | EVERY_GRADIENT)]
    problems = {
        tuple(r["problem"])
        for op, given, options in calls
        for r in dry_records(op, *given, device=0, **options)
        if r["family"] == "matmul"
    }
    legal = [
        list(numbers)
        for numbers in problems
        for c in _C.candidates("matmul", list(numbers))
        if c["choice"] == choice and not c["refusal"]
    ]
    assert legal, choice
    for numbers in legal:
        torch.ops.torchweld._force_choice("matmul", numbers, choice)
    try:
        yield
    finally:
        for numbers in legal:
            torch.ops.torchweld._force_choice("matmul", numbers, "")


EVERY_GRADIENT = {"output_mask": [True] * 6}
HOPPER = (
    "sm90 128x128 ping-pong cluster 2", "sm90 128x256 cluster 2", "sm90 64x64 ping-pong",
    "sm90 128x32 swap_ab", "sm90 128x64 swap_ab",
)  # fmt: skip


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the engines run on a GPU")
@pytest.mark.parametrize("choice", [*HOPPER, "sync 128x128", "sync 64x64"])
@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
def test_engines(dtype, choice):
    if choice in HOPPER and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for Hopper")
    for kind in ROUTINGS:
        for biases in (False, True):
            args = call_args("cuda", dtype, 700, 264, 200, 5, 2, kind=kind, biases=biases)
            with forced(args, {}, choice):
                check_op(OP, args)
    args = call_args("cuda", dtype, 300, 128, 192, 6, 2)
    args[1], args[2] = args[1].mT.contiguous(), args[2].mT.contiguous()
    with forced(args, {"transposed": True}, choice):
        check_op(OP, args, {"transposed": True})


def gate_backward_parts(args, options, device):
    """The products that the backward of a dry run computes."""
    _, z = torch.ops.torchweld.experts_forward(*args, **options)
    given = [torch.empty_like(args[0]), *args[:5], z, *args[6:]]
    records = dry_records("experts_backward", *given, device=device, **options | EVERY_GRADIENT)
    return {r["part"] for r in records if r["family"] == "matmul"}


@explains_kernels
def test_which_layers_compute_the_gate_s_gradient_in_an_epilogue():
    args = [t.to("meta") for t in call_args("cpu", BF16, 2500, 264, 200, 5, 2)]
    fused = {"ddown", "dx", "dgate_up"}
    assert gate_backward_parts(args, {}, -1) == fused
    assert gate_backward_parts(args, {"interleaved": True}, -1) == fused | {"dact"}
    assert gate_backward_parts(args, {"limit": 7.0}, -1) == fused | {"dact"}
    with torchweld.batch_invariant():
        assert gate_backward_parts(args, {}, -1) == fused | {"dact"}
    few = [t.to("meta") for t in call_args("cpu", BF16, 33, 40, 24, 5, 3)]
    assert gate_backward_parts(few, {}, -1) == fused | {"dact"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel runs on a GPU")
@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
def test_the_gate_s_gradient_in_an_epilogue(dtype, kind):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for Hopper")
    for weight_dtype in (dtype, F32):
        args = call_args("cuda", dtype, 2500, 264, 200, 5, 2, kind=kind)
        args[4] = args[4].to(weight_dtype)
        assert "dact" not in gate_backward_parts(args, {}, 0)
        check_op(OP, args)
    _, z = torch.ops.torchweld.experts_forward(*args)
    backward = [randn("cuda", dtype, 2500, 264), *args[:5], z]
    for mask in (0b000001, 0b000010, 0b001001, 0b000101):
        check_output_mask(OP + "_backward", backward, mask, 6)


@pytest.mark.parametrize("kind", ("one", "skewed"))
def test_bias_gradients_of_many_rows(device, kind):
    """Several parts of 256 rows an expert."""
    for dtype in dtypes(device):
        for h, n in ((24, 40), (13, 7)):
            args = call_args(device, dtype, 1500, h, n, 3, 1, kind=kind, biases=True)
            check_op(OP, args, eager=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_many_experts(device, dtype):
    check_op(OP, call_args(device, dtype, 300, 24, 16, 257, 8, kind="skewed"))


def test_refuses_indices_that_are_no_ids(device):
    args = call_args(device, F32, 8, 8, 8, 3, 2)
    for bad in (args[3].float(), args[3][:, 0], args[3][:4], args[3].to("meta")):
        given = [*args[:3], bad, args[4]]
        with pytest.raises(RuntimeError, match="index must be"):
            torchweld.experts(*given)
