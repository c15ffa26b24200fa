"""cross_entropy against float64 and torch: values, layouts, ignored rows and refusals."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import reference as R
import torchweld
from losses import OPTIONS, assert_refused, grads_of, leaves_of
from numerics import assert_equal, assert_same_bits, check_promise
from samples import (
    BF16,
    F32,
    F64,
    Maker,
    check_op,
    dtypes,
    forward_backward,
    logits_call,
)

OP = "cross_entropy"
loss_of = torchweld.cross_entropy

# Rows in one access, in an odd number of elements, in one block of shared memory and in a cluster
# of 2, 4 and 8; the largest are of GPT-2 and Llama 3.
SIZES = [1, 7, 16, 257, 2049, 4099, 16384, 20001, 50257, 65536, 128256, 262145]


def made(device, dtype, lead, n, seed=0, **kwargs):
    return logits_call(lead, n, **kwargs)(Maker(device, dtype, seed))[0]


# Values and gradients


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("options", OPTIONS)
def test_options(device, dtype, reduction, options):
    kwargs = {"reduction": reduction, **OPTIONS[options]}
    check_op(OP, made(device, dtype, (2, 9), 257, ignored=3, **kwargs), kwargs)
    check_op(OP, made(device, dtype, (5,), 20000), kwargs, eager=False)


@pytest.mark.parametrize("n", SIZES)
def test_sizes(device, dtype, n):
    args = made(device, dtype, (3,), n, ignored=1)
    for kwargs in ({"reduction": "none"}, {}, {"temperature": 0.7, "z_loss": 0.01}):
        check_op(OP, args, kwargs, eager=False)


@pytest.mark.parametrize("n", [10, 50257])
def test_many_rows(device, n):
    """More rows than blocks run at once, on a GPU."""
    rows = 1000 if n == 10 else 400 if device == "cuda" else 40
    check_op(OP, made(device, BF16, (rows,), n, ignored=5), {}, eager=False)


def test_equals_torch(device):
    """torch's own loss, with ignored targets and label smoothing, in float32."""
    logits, target = leaves_of(made(device, F32, (40,), 257, ignored=7))
    for reduction, eps in product(("none", "sum", "mean"), (0.0, 0.1)):
        kwargs = {"reduction": reduction, "label_smoothing": eps}
        ours = loss_of(logits, target, **kwargs)
        want = F.cross_entropy(logits, target, **kwargs)
        assert_close(ours, want, rtol=2e-6, atol=2e-6)
        assert_close(grads_of(ours, [logits]), grads_of(want, [logits]), rtol=1e-5, atol=1e-7)


def test_equals_linear_cross_entropy(device):
    """The identity as a weight gives the given logits."""
    logits, target = made(device, F32, (6,), 33, ignored=1)
    weight = torch.eye(33, device=device)
    kwargs = {"softcap": 4.0, "z_loss": 0.1, "label_smoothing": 0.2, "temperature": 0.8}
    want = torchweld.linear_cross_entropy(logits, weight, target, **kwargs)
    assert_close(loss_of(logits, target, **kwargs), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", [1000, 50257])
def test_loss_and_statistics_are_within_two_roundings(device, n):
    """The target's logit and the statistics are not rounded to the dtype of the logits."""
    for dtype in (F32, BF16):
        logits, target = made(device, dtype, (64,), n)
        args = {"reduction": "none"}
        found = torch.ops.torchweld.cross_entropy_forward(logits, target, **args)
        want = R.cross_entropy_forward(R.up(logits), R.up(target), **args)
        size = (want[1] + want[2]).abs().clamp(min=want[0].abs().max())
        for got, ref in zip(found, want, strict=True):
            assert ((got.cpu().double() - ref).abs() <= 2 * 2.0**-24 * size).all()


@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("n", [9, 1000, 20000])
def test_large_logits_are_as_accurate_as_in_torch(device, n, reduction):
    """Offsets, scales, a few large classes, and logits that are all the same."""
    logits, target = made(device, F32, (16,), n)
    rows = [logits + offset for offset in (1e2, 1e4, 1e6, 1e20)]
    rows += [logits * 10, logits * 100, torch.full_like(logits, -1e30)]
    rows.append(torch.cat([logits[:, :2] + 500, logits[:, 2:]], -1))
    dloss = torch.randn(16 if reduction == "none" else (), device=device)
    for z, smoothing in product(rows, (0.0, 0.1)):
        options = {"reduction": reduction, "label_smoothing": smoothing}
        found = []
        for loss, dtype in ((loss_of, F32), (F.cross_entropy, F32), (F.cross_entropy, F64)):
            leaf = z.to(dtype).requires_grad_()
            out = loss(leaf, target, **options)
            found.append((out, *torch.autograd.grad(out, leaf, dloss.to(dtype))))
        for ours, torchs, exact in zip(*found, strict=True):
            check_promise(ours, torchs, exact)


def test_int32_target_is_the_same(device):
    logits, target = made(device, F32, (2, 6), 17, ignored=2)
    assert_same_bits(loss_of(logits, target.int()), loss_of(logits, target))


def test_shift_is_the_loss_of_the_next_token(device):
    logits, target = leaves_of(made(device, F32, (3, 7), 33, ignored=2))
    for reduction in ("none", "mean"):
        ours = loss_of(logits, target, shift=1, reduction=reduction)
        want = loss_of(logits[:, :-1], target[:, 1:], reduction=reduction)
        assert ours.is_contiguous()
        assert_close(ours, want, rtol=1e-6, atol=1e-6)
        assert_close(grads_of(ours, [logits]), grads_of(want, [logits]), rtol=1e-5, atol=1e-7)
    one = leaves_of(made(device, F32, (2, 1), 5))
    assert loss_of(*one, shift=1, reduction="none").shape == (2, 0)
    assert loss_of(*one, shift=1).isnan()


# Layouts


@pytest.mark.parametrize("n", [33, 20001])
@pytest.mark.parametrize("offset", [0, 1])
def test_rows_of_a_wider_matrix(device, n, offset):
    """A padded vocabulary: its rows and the gradient's differ in their phase of 16 bytes."""
    for dtype in dtypes(device):
        logits, target = made(device, dtype, (5,), n, ignored=1)
        wide = logits.new_full((5, n + 63), math.nan)
        view = wide[:, offset : offset + n]
        view.copy_(logits)
        for reduction in ("none", "mean"):
            kwargs = {"reduction": reduction}
            check_op(OP, [view, target], kwargs, eager=False)
            assert wide[:, n + offset :].isnan().all()


@pytest.mark.parametrize("n", [1, 2, 33])
def test_expanded_and_transposed_logits(device, n):
    for dtype in (F32, BF16):
        logits, target = made(device, dtype, (1,), n)
        classes = made(device, dtype, (n,), 6)[0].t()
        for strided in (logits.expand(6, n), classes, logits[:, :1].expand(6, n)):
            for reduction in ("none", "mean"):
                kwargs = {"reduction": reduction}
                pairs = [
                    forward_backward(OP, [t, target.expand(6)], kwargs)
                    for t in (strided, strided.contiguous())
                ]
                assert_same_bits(pairs[0][0], pairs[1][0])
                assert_same_bits(pairs[0][1][0], pairs[1][1][0])


@pytest.mark.parametrize("lead", [(0,), (2, 0), (0, 3)], ids=str)
def test_empty_batch(device, lead):
    for dtype in dtypes(device):
        args = made(device, dtype, lead, 5)
        out, grads = forward_backward(OP, args, {"reduction": "sum"})
        assert out == 0 and grads[0].shape == (*lead, 5)
        assert loss_of(*args).isnan()
        assert loss_of(*args, reduction="none").shape == lead


# Ignored rows and values that are not finite


@pytest.mark.parametrize("n", [33, 20001])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_ignored_rows_may_hold_anything(device, value, n):
    for dtype in dtypes(device):
        logits, target = made(device, dtype, (6,), n, ignored=2)
        dirty = logits.clone()
        dirty[:2] = value
        for reduction in ("sum", "mean", "none"):
            kwargs = {"reduction": reduction, "z_loss": 0.1, "label_smoothing": 0.1}
            for options in (kwargs, {"reduction": reduction}):
                out, grads = forward_backward(OP, [dirty, target], options)
                want, want_grads = forward_backward(OP, [logits, target], options)
                assert_same_bits(out, want)
                assert_same_bits(grads[0], want_grads[0])
                assert (grads[0][:2] == 0).all()


def test_all_rows_ignored(device):
    """torch's answers: a sum of 0, a mean of NaN, and gradients of 0."""
    for n in (9, 20001):
        args = made(device, F32, (4,), n, ignored=4)
        for reduction in ("sum", "mean"):
            out, grads = forward_backward(OP, args, {"reduction": reduction})
            assert out.isnan() if reduction == "mean" else out == 0
            assert (grads[0] == 0).all()


@pytest.mark.parametrize("n", [33, 20001])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_inf_and_nan_spread_as_in_torch(device, value, n):
    logits, target = made(device, F32, (5,), n)
    for j in (0, int(target[1])):
        spoilt = logits.clone()
        spoilt[1, j] = value
        spoilt[3] = -math.inf
        (leaf,) = leaves_of([spoilt])
        for reduction in ("none", "sum"):
            ours, want = (f(leaf, target, reduction=reduction) for f in (loss_of, F.cross_entropy))
            assert_equal(ours.isnan(), want.isnan())
            assert_equal(ours.isinf(), want.isinf())
            (got,), (ref,) = grads_of(ours, [leaf]), grads_of(want, [leaf])
            assert_equal(got.isnan(), ref.isnan())


# Refusals

LOGITS, TARGET = torch.zeros(4, 5), torch.zeros(4, dtype=torch.int64)
REFUSED = [
    ({"logits": torch.tensor(1.0)}, r"logits must be \(..., N\)"),
    ({"logits": LOGITS.long()}, "logits must be float32, float16 or bfloat16"),
    ({"target": TARGET.float()}, "target must be int64 or int32.*use target.long"),
    ({"target": TARGET[:3]}, "target must be the leading dims of logits"),
    ({"target": TARGET.to("meta")}, "target must be on"),
    ({"temperature": 0.0}, "temperature must be finite and above 0"),
    ({"softcap": 0.0}, "softcap must be finite and above 0, or None"),
    ({"reduction": "average"}, "reduction must be 'none', 'mean' or 'sum', but got 'average'"),
    ({"label_smoothing": 1.5}, "label_smoothing must be from 0 to 1"),
    ({"z_loss": math.inf}, "z_loss must be finite"),
    ({"shift": 2}, "shift must be 0 or 1, but got 2"),
    (
        {"shift": 1, "logits": LOGITS[0], "target": TARGET[0]},
        r"logits must be \(..., S, N\) with S at least 1",
    ),
]


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(("change", "sentence"), REFUSED)
def test_refusals(device, change, sentence, trains):
    given = {"logits": LOGITS, "target": TARGET, **change}
    logits = given["logits"].detach()
    given["logits"] = logits.requires_grad_(trains and logits.is_floating_point())
    assert_refused(OP, device, given, sentence)


@pytest.mark.parametrize("value", [-1, 5, 2**40])
def test_target_out_of_range(value):
    """An error on the CPU; CUDA asserts on the device, which would end this process."""
    target = torch.tensor([0, 1, value, -100])
    for logits in (LOGITS, LOGITS.clone().requires_grad_()):
        with pytest.raises(
            RuntimeError, match="target must be from 0 to N - 1 = 4 or ignore_index"
        ):
            loss_of(logits, target)


def test_helper_ops_refuse_bad_arguments(device):
    logits, target = LOGITS.to(device), TARGET.to(device)
    lse = torch.zeros(4, device=device)
    ops = torch.ops.torchweld
    with pytest.raises(RuntimeError, match="dloss must be the loss's shape"):
        ops.cross_entropy_backward(lse, logits, target, lse, lse)
    for bad, saved in {"max": (lse[:2], lse), "log_sum": (lse, lse[:2])}.items():
        with pytest.raises(RuntimeError, match=f"{bad} must be the shape of a result per token"):
            ops.cross_entropy_backward(lse[0], logits, target, *saved)
    with pytest.raises(RuntimeError, match="reduction must be 'mean' or 'sum', but got 'none'"):
        ops.cross_entropy_gradients_forward(logits, target, reduction="none")
    with pytest.raises(RuntimeError, match="dloss must be a scalar"):
        ops.cross_entropy_gradients_backward(lse, logits)
