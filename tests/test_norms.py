"""rms_norm, layer_norm and their add_ ops, forward and backward, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import torchweld
from numerics import assert_same_bits, check
from running import GRADIENTS, REFERENCES
from samples import (
    BF16,
    F16,
    F32,
    F64,
    as_tuple,
    call,
    check_op,
    dtypes,
    forward_backward,
    requiring,
)
from tensors import randn

PLAIN, ADDS = ("rms_norm", "layer_norm"), ("add_rms_norm", "add_layer_norm")
OP = PLAIN[0]
TWO = (*ADDS, "rms_norm_gated")  # ops with two inputs of rows
OPS = (*PLAIN, *TWO)
# Around the tiles of both directions, the longest row of a block, and longer ones.
COLUMNS = (1, 2, 7, 8, 255, 256, 257, 768, 1024, 2048, 2056, 4096, 4104, 8192, 8200, 16384, 16392)
LONG = (32768, 32776, 65537)
ROWS = ((1, 24), (2, 768), (63, 2048), (1023, 768), (4097, 64))

every_op = pytest.mark.parametrize("op", OPS)


def vectors_of(op, device, dtype, n):
    scale = [randn(device, dtype, n, scale=0.2, mean=1.0)]
    return scale + ([randn(device, dtype, n, scale=0.2)] if op.endswith("layer_norm") else [])


def call_args(op, device, dtype, rows, n, *, mean=0.0):
    inputs = [randn(device, dtype, rows, n, mean=mean) for _ in range(1 + (op in TWO))]
    return [*inputs, *vectors_of(op, device, dtype, n)]


@every_op
@pytest.mark.parametrize("n", COLUMNS)
def test_columns(op, device, n):
    if op.endswith("layer_norm") and n == 1:  # its rows are all 0
        pytest.skip("a centred row of one value is 0")
    for dtype in dtypes(device):
        check_op(op, call_args(op, device, dtype, 5, n), eager=False)


@every_op
@pytest.mark.parametrize("rows, n", [*ROWS, *((3, n) for n in LONG)])
def test_rows(op, device, rows, n):
    """Gradients of the weight and bias are sums over all rows."""
    for dtype in (F32, BF16):
        check_op(op, call_args(op, device, dtype, rows, n), eager=rows > 100)


@every_op
def test_a_weight_offset(op, device):
    if op.endswith(("layer_norm", "gated")):
        pytest.skip("LayerNorm and the gated norm have no weight_offset")
    for dtype in dtypes(device):
        *inputs, weight = call_args(op, device, dtype, 33, 264)
        args = [*inputs, weight - 1]
        check_op(op, args, {"weight_offset": 1.0, "eps": 1e-3}, eager=False)


def test_the_offset_is_added_in_float32(device):
    """In bfloat16 1 + 2^-9 would be 1."""
    x, weight = randn(device, BF16, 4, 64), torch.full((64,), 2**-9, dtype=BF16, device=device)
    got = torchweld.rms_norm(x, weight, weight_offset=1)
    expected = F.rms_norm(x.float(), (64,), weight.float() + 1, 1e-6).to(BF16)
    assert not torch.equal(got, torchweld.rms_norm(x))
    assert_same_bits(got, expected)


@every_op
def test_optional_vectors(op, device):
    for dtype in dtypes(device):
        args = call_args(op, device, dtype, 9, 40)
        inputs, vectors = args[: 1 + (op in TWO)], args[1 + (op in TWO) :]
        for given in range(2 ** len(vectors)):
            kept = [v if given >> i & 1 else None for i, v in enumerate(vectors)]
            check_op(op, [*inputs, *kept], eager=False)


@pytest.mark.parametrize("op", ["layer_norm", "add_layer_norm"])
def test_a_large_mean(op, device):
    """The error of a variance by E[x^2] - E[x]^2 would be larger than the variance."""
    for dtype in {F32, F64} & set(dtypes(device)):
        check_op(op, call_args(op, device, dtype, 17, 1000, mean=1000.0), eager=False)


@every_op
def test_rows_of_zeros(op, device):
    """rstd is 1 / sqrt(eps); nothing is divided by 0."""
    for dtype in dtypes(device):
        args = call_args(op, device, dtype, 5, 264)
        for t in args[: 1 + (op in TWO)]:
            t[2] = 0
        check_op(op, args, eager=False)
        out = as_tuple(call(op)(*args))[0]
        bias = args[-1] if op.endswith("layer_norm") else torch.zeros_like(args[-1])
        assert_same_bits(out[2], bias)


@every_op
def test_margins_are_not_read(op, device):
    """NaN stands around the rows and in the gaps between them."""
    for dtype in (F32, BF16):
        for n in (264, 265):
            args = call_args(op, device, dtype, 6, n)
            expected = as_tuple(call(op)(*args))
            moved = []
            for t in args:
                wide = torch.full((*t.shape[:-1], n + 16), float("nan"), dtype=dtype, device=device)
                wide[..., 8 : 8 + n] = t
                moved.append(wide[..., 8 : 8 + n])
            assert_same_bits(as_tuple(call(op)(*moved)), expected)
            check_op(op, moved, eager=False)


@every_op
def test_expanded_inputs(op, device):
    for dtype in (F32, F16):
        args = call_args(op, device, dtype, 4, 64)
        args[0] = args[0][:1].expand(4, 64)
        args[1 + (op in TWO)] = randn(device, dtype, 1).expand(64)
        check_op(op, args, eager=False)


@every_op
def test_no_columns(op, device):
    """The mean of no values is NaN, as in torch; results and gradients are empty or 0."""
    args = call_args(op, device, F32, 3, 0)
    leaves = requiring(op, args)
    out = as_tuple(call(op)(*leaves))[0]
    assert out.shape == (3, 0)
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert [g.shape for g in grads] == [a.shape for a in args]
    statistics = call(op + "_forward")(*args)[1 + (op in ADDS) :]
    assert all(s.isnan().all() and s.shape == (3,) for s in statistics)


# The sum of an add_ op and its gradient


def summed(op, args, dnormed, dsum):
    """Gradients of an add_ op to its inputs, where one of its upstream gradients may be None."""
    leaves = requiring(op, args)
    outputs = call(op)(*leaves)
    pairs = [(o, d) for o, d in zip(outputs, (dnormed, dsum), strict=True) if d is not None]
    outs, upstream = zip(*pairs, strict=True)
    return torch.autograd.grad(outs, leaves, upstream, allow_unused=True)


@pytest.mark.parametrize("op", ADDS)
@pytest.mark.parametrize("n", [40, 41, 1024, 4096, 32776])
def test_both_gradients(op, device, n):
    for dtype in dtypes(device):
        args = call_args(op, device, dtype, 5, n)
        dnormed, dsum = (randn(device, dtype, 5, n) for _ in range(2))
        grads = summed(op, args, dnormed, dsum)
        assert_same_bits(grads[0], grads[1])
        bounds = REFERENCES[op + "_backward"]
        residual, *saved = call(op + "_forward")(*args)[1:]
        mask = [True] * (len(args) - 1)
        expected = bounds(dnormed, residual, args[2], *saved, dsum, output_mask=mask)
        for got, bound in zip(grads[1:], expected, strict=True):
            check(got, bound, label=f"{op} with dsum", device=device)


@pytest.mark.parametrize("op", ADDS)
def test_one_gradient(op, device):
    args = call_args(op, device, F32, 5, 64)
    dy = randn(device, F32, 5, 64)
    alone = summed(op, args, dy, None)
    for got, bound in zip(alone, GRADIENTS[op](dy, *args), strict=True):
        check(got, bound, label=op, device=device)
    passed = summed(op, args, None, dy)
    assert_same_bits(passed[0], dy)
    assert_same_bits(passed[1], dy)
    assert all(g is None for g in passed[2:])


@pytest.mark.parametrize("op", ADDS)
def test_gradients_of_leaves_are_not_shared(op, device):
    x, residual, *vectors = call_args(op, device, F32, 5, 64)
    x.requires_grad_()
    residual.requires_grad_()
    normed, total = call(op)(x, residual, *vectors)
    (normed.sum() + total.square().sum()).backward()
    assert_same_bits(x.grad, residual.grad)
    x.grad.zero_()
    assert residual.grad.abs().sum() > 0


@pytest.mark.parametrize("op", ADDS)
def test_the_norm_is_of_the_rounded_sum(op, device):
    for dtype in dtypes(device):
        x, residual, *vectors = call_args(op, device, dtype, 7, 320)
        normed, total = call(op)(x, residual, *vectors)
        assert_same_bits(total, x + residual)
        assert_same_bits(normed, call(op.removeprefix("add_"))(total, *vectors))


@every_op
def test_the_same_bits_in_every_run(op, device):
    args = call_args(op, device, BF16, 700, 1024)
    grads = []
    for _ in range(3):
        leaves = requiring(op, args)
        out = as_tuple(call(op)(*leaves))[0]
        grads.append(torch.autograd.grad(out, leaves, torch.ones_like(out)))
    for again in grads[1:]:
        assert_same_bits(again, grads[0])


@every_op
def test_masks_of_the_backward(op, device, dtype):
    """Every subset of the gradients has the bits of all of them."""
    for n in (64, 65):
        args = call_args(op, device, dtype, 37, n)
        results = call(op + "_forward")(*args)
        rows = [results[1]] if op in ADDS else args[: 1 + (op in TWO)]
        saved = results[1 + (op in ADDS) :]
        dy, weight = randn(device, dtype, 37, n), args[1 + (op in TWO)]
        count = 2 + op.endswith(("layer_norm", "gated"))
        backward = call(op + "_backward")
        every = backward(dy, *rows, weight, *saved, output_mask=[True] * count)
        for bits in range(2**count):
            mask = [bool(bits >> i & 1) for i in range(count)]
            grads = backward(dy, *rows, weight, *saved, output_mask=mask)
            for got, ref, wanted in zip(grads, every, mask, strict=True):
                assert_same_bits(got, ref if wanted else ref.new_empty(0))


# float32 vectors beside 16-bit rows


@every_op
@pytest.mark.parametrize("n", [40, 41, 256, 1024, 4096, 8192, 16392])
def test_float32_vectors_beside_16_bit_rows(op, device, n):
    """The result has the dtype of x and one rounding. The vectors' gradients stay in float32."""
    for dtype in set(dtypes(device)) & {F16, BF16}:
        rows = [randn(device, dtype, 37, n, mean=0.5)]
        if op in TWO:  # the sum with zeros is exact
            rows.append(torch.zeros_like(rows[0]) if op in ADDS else randn(device, dtype, 37, n))
        vectors = vectors_of(op, device, F32, n)
        upstream = randn(device, dtype, 37, n)
        (out, grads), (wide, wide_grads) = (
            forward_backward(op, [*(r.to(kind) for r in rows), *vectors], {}, upstream.to(kind))
            for kind in (dtype, F32)
        )
        assert [g.dtype for g in grads] == [dtype] * len(rows) + [F32] * len(vectors)
        for got, ref in zip([out, *grads], [wide, *wide_grads], strict=True):
            rounding = 1.01 * torch.finfo(dtype).eps / 2 if got.dtype == dtype else 1e-5
            assert_close(got.float(), ref, rtol=rounding, atol=2e-5)


# The gate


@pytest.mark.parametrize("n", COLUMNS)
def test_the_gate_in_front_of_the_norm(device, n):
    for dtype in dtypes(device):
        args = call_args("rms_norm_gated", device, dtype, 5, n)
        check_op("rms_norm_gated", args, {"gate_first": True}, eager=False)


def test_the_norms_of_models(device):
    """Written as Qwen3-Next and as Mamba-2 write them."""
    for dtype in {F32, F64} & set(dtypes(device)):
        x, gate, weight = call_args("rms_norm_gated", device, dtype, 6, 128)
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        assert_close(torchweld.rms_norm_gated(x, gate, weight), weight * normed * F.silu(gate))
        rows = x * F.silu(gate)
        normed = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-5)
        ours = torchweld.rms_norm_gated(x, gate, weight, eps=1e-5, gate_first=True)
        assert_close(ours, weight * normed)


# Autocast


@every_op
def test_autocast_keeps_the_dtype_of_x(op, device):
    args = call_args(op, device, F32, 5, 64)
    inputs = 1 + (op in TWO)
    narrow = [a.to(BF16) for a in args[:inputs]]
    with torch.autocast(device, dtype=BF16):
        out = as_tuple(call(op)(*narrow, *args[inputs:]))
        wide = as_tuple(call(op)(*args))
    assert_same_bits(out, as_tuple(call(op)(*narrow, *args[inputs:])))
    assert_same_bits(wide, as_tuple(call(op)(*args)))


@pytest.mark.parametrize("op", ADDS)
def test_autocast_adds_in_the_wider_dtype(op, device):
    x, residual, *vectors = call_args(op, device, F32, 5, 64)
    with torch.autocast(device, dtype=BF16):
        out = call(op)(x.to(BF16), residual, *vectors)
    assert_same_bits(out, call(op)(x.to(BF16).float(), residual, *vectors))


def test_refusals(device):
    x, weight = torch.ones(3, 8, device=device), torch.ones(8, device=device)
    with pytest.raises(RuntimeError, match="weight_offset must be 0 without a weight, but got 1"):
        torchweld.rms_norm(x, weight_offset=1)
    with pytest.raises(RuntimeError, match="add_rms_norm: residual must be x's shape"):
        torchweld.add_rms_norm(x, x[:1], weight)
    with pytest.raises(RuntimeError, match="rms_norm_gated: gate must be x's shape"):
        torchweld.rms_norm_gated(x, x[:1], weight)
    with pytest.raises(RuntimeError, match="rms_norm: weight must be bfloat16 like x"):
        torchweld.rms_norm(x.to(BF16), weight.to(F16))
    with pytest.raises(RuntimeError, match="rms_norm: weight must be float32 like x"):
        torchweld.rms_norm(x, weight.to(BF16))
    with pytest.raises(RuntimeError, match="layer_norm: bias must be float32 like weight"):
        torchweld.layer_norm(x.to(BF16), weight, weight.to(BF16))
    with pytest.raises(RuntimeError, match="layer_norm: bias must be bfloat16 like x"):
        torchweld.layer_norm(x.to(BF16), None, weight)


# Modules


def test_the_module_of_an_offset(device):
    module = torchweld.nn.RMSNorm(64, weight_offset=1.0, device=device)
    x = randn(device, F32, 5, 64)
    assert module.weight.abs().sum() == 0
    assert_same_bits(module(x).detach(), torchweld.rms_norm(x))
    with pytest.raises(ValueError, match="weight_offset must be 0, but got 1.0; add it to the"):
        module.to_torch()


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("scripted", [False, True])
def test_a_module_without_a_weight_refuses_rows_of_another_width(name, scripted):
    module = getattr(torchweld.nn, name)(8, elementwise_affine=False)
    if scripted:
        module = torch.jit.script(module)
    assert module(torch.ones(3, 8)).shape == (3, 8)
    for shape in ((3, 4), ()):
        with pytest.raises(Exception, match=r"_norm: x must be \(\.\.\., 8\), but got \["):
            module(torch.ones(shape))


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_a_module_over_two_dims_is_refused(name):
    stock, ours = getattr(torch.nn, name)((4, 8)), getattr(torchweld.nn, name)
    with pytest.raises(ValueError, match=f"{name}.from_torch: module.normalized_shape must be one"):
        ours.from_torch(stock)
    with pytest.raises(ValueError, match=rf"{name}: normalized_shape must be .* got \(4, 8\)"):
        ours((4, 8), elementwise_affine=False)  # which would be the norm over the last dim
    assert ours((8,)).normalized_shape == ours(torch.Size([8])).normalized_shape == 8


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_reset_parameters(name):
    module = getattr(torchweld.nn, name)(8)
    for p in module.parameters():
        torch.nn.init.normal_(p)
    module.reset_parameters()
    assert_same_bits(module.weight.detach(), torch.ones(8))
    assert name == "RMSNorm" or not module.bias.any()
