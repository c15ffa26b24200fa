"""linear_cross_entropy and linear_token_logprobs against float64, and their refusals."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import reference as R
import torchweld
from losses import OPTIONS, assert_ignored_rows_may_hold, assert_refused, grads_of, leaves_of, made
from numerics import assert_equal, assert_same_bits, check, check_promise
from running import GRADIENTS, REFERENCES
from samples import (
    BF16,
    F32,
    Maker,
    check_op,
    cross_entropy_backward_call,
    dtypes,
    forward_backward,
    loss_call,
)

OP = "linear_cross_entropy"
loss_of = torchweld.linear_cross_entropy
logprobs_of = torchweld.linear_token_logprobs

# Vocabularies, one of them odd, and one with a chunk of a few columns at its end.
SIZES = [((2, 9), 257, 33), ((2, 3), 1, 4), ((5,), 16, 8), ((2, 40), 130, 64), ((3,), 4099, 7)]


# Values and gradients


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("options", OPTIONS)
def test_options(device, dtype, reduction, options):
    kwargs = {"reduction": reduction, **OPTIONS[options]}
    check_op(OP, made(device, dtype, (2, 9), 257, 33, ignored=3, **kwargs), kwargs)
    check_op(OP, made(device, dtype, (2, 9), 257, 33, bias=False), kwargs)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(device, dtype, size):
    for reduction in ("none", "mean"):
        check_op(OP, made(device, dtype, *size), {"reduction": reduction}, eager=False)
    check_op("linear_token_logprobs", made(device, dtype, *size), {"temperature": 0.8}, eager=False)


@pytest.mark.parametrize(("dtype", "rows"), [(F32, 9), (BF16, 12)])
def test_several_chunks(device, dtype, rows):
    """A chunk may have 32 MiB of logits: 9 rows in float32 and 12 in bfloat16 take two chunks."""
    check_op(OP, made(device, dtype, (rows,), 1_000_003, 3, ignored=1), {"reduction": "sum"})


def test_several_chunks_of_logprobs(device):
    check_op("linear_token_logprobs", made(device, BF16, (12,), 1_000_003, 3), {})


@pytest.mark.parametrize("options", ["plain", "ignore_index", "shift", "together"])
def test_gradients_of_lse_and_mean(device, options):
    """backward's dlse and dmean, beside dloss and alone, as where a shard lacks the target."""
    backward = torch.ops.torchweld.linear_cross_entropy_backward
    for dtype, reduction in product(dtypes(device), ("none", "mean")):
        loss = loss_call((2, 9), 257, 64, ignored=3, reduction=reduction, **OPTIONS[options])
        for others in (["dlse"], ["dmean"], ["dlse", "dmean"]):
            build = cross_entropy_backward_call(loss, [True] * 3, others)
            args, kwargs = build(Maker(device, dtype, 0))
            for dloss in (args[0], torch.zeros_like(args[0])):
                args[0] = dloss
                bounds = REFERENCES[OP + "_backward"](*args, **kwargs)
                for got, bound in zip(backward(*args, **kwargs), bounds, strict=True):
                    check(got, bound, label=f"linear_cross_entropy {others}", device=device)


@pytest.mark.parametrize("size", [*SIZES, ((3, 5), 131, 65)], ids=str)
def test_without_onednn(size):
    """The CPU's own tiles, which also serve CPUs that oneDNN has no kernels for."""
    with torch.backends.mkldnn.flags(enabled=False):
        for dtype in dtypes("cpu"):
            check_op(OP, made("cpu", dtype, *size), {"reduction": "mean"}, eager=False)


def test_odd_sizes_of_bfloat16(device):
    """The CPU multiplies pairs of bfloat16 values: rows, classes and features are odd or even."""
    for rows, n, k in product((1, 2, 5), (129, 130), (1, 2, 65)):
        check_op(OP, made(device, BF16, (rows,), n, k), {"reduction": "sum"}, eager=False)


def test_equals_torch(device):
    """torch's own loss, with ignored targets and label smoothing, in float32."""
    x, weight, target, bias = leaves_of(made(device, F32, (40,), 257, 65, ignored=7))
    for reduction, eps in product(("none", "sum", "mean"), (0.0, 0.1)):
        ours = loss_of(x, weight, target, bias, reduction=reduction, label_smoothing=eps)
        want = F.cross_entropy(
            F.linear(x, weight, bias), target, reduction=reduction, label_smoothing=eps
        )
        assert_close(ours, want, rtol=2e-6, atol=2e-6)
        pairs = zip(
            grads_of(ours, (x, weight, bias)), grads_of(want, (x, weight, bias)), strict=True
        )
        for got, ref in pairs:
            assert_close(got, ref, rtol=1e-5, atol=1e-6)


def test_loss_and_lse_are_within_two_roundings(device):
    """Exact logits: the rest is the error of the sum of exponentials and of its logarithm."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-2, 3, (64, 4), generator=generator).to(device, F32)
    weight = torch.randint(-2, 3, (50257, 4), generator=generator).to(device, F32)
    target = torch.randint(0, 50257, (64,), generator=generator).to(device)
    loss, lse = torch.ops.torchweld.linear_cross_entropy_forward(
        x, weight, target, reduction="none"
    )
    want_loss, want_lse = R.linear_cross_entropy_forward(
        *map(R.up, (x, weight, target)), reduction="none"
    )
    for got, want in ((loss, want_loss), (lse, want_lse)):
        error = (got.cpu().double() - want).abs()
        assert (error <= 2 * 2.0**-24 * want_lse.abs().clamp(min=want.abs().max())).all()


@pytest.mark.parametrize("options", [{}, {"temperature": 0.6, "softcap": 4.0}], ids=str)
def test_logprobs_and_entropy(device, options):
    for dtype in dtypes(device):
        args = leaves_of(made(device, dtype, (3, 7), 257, 33))
        logprob, entropy = logprobs_of(*args, **options, entropy=True)
        bounds = GRADIENTS["linear_token_logprobs"]
        for dlogprob, dentropy in ((1.0, 0.0), (0.0, 1.0), (0.7, -0.3)):
            grads = [torch.full_like(logprob, d) for d in (dlogprob, dentropy)]
            got = torch.autograd.grad(
                [logprob, entropy], [args[0], args[1], args[3]], grads, retain_graph=True
            )
            want = bounds(grads[0], *args, dentropy=grads[1], entropy=True, **options)
            for grad, bound in zip(got, (want[0], want[1], want[3]), strict=True):
                check(grad, bound, label="linear_token_logprobs gradient", device=device)


def test_one_gradient_of_logprobs_alone(device):
    args = leaves_of(made(device, F32, (5,), 65, 9))
    logprob, entropy = logprobs_of(*args, entropy=True)
    for out, alone in ((logprob, 0), (entropy, 1)):
        other = [torch.zeros_like(logprob)] * 2
        other[alone] = torch.ones_like(logprob)
        want = torch.autograd.grad([logprob, entropy], args[:2], other, retain_graph=True)
        got = torch.autograd.grad(out.sum(), args[:2], retain_graph=True)
        assert_same_bits(got, want)


def test_entropy_of_impossible_tokens(device):
    """A logit of -inf has probability 0 and adds nothing; its gradient is 0."""
    x, weight, target, _ = leaves_of(made(device, F32, (4,), 6, 3))
    bias = torch.zeros(6, device=device)
    bias[2] = -math.inf
    target = torch.where(target == 2, 0, target)
    bias.requires_grad_()
    logprob, entropy = logprobs_of(x, weight, target, bias, entropy=True)
    seen = [0, 1, 3, 4, 5]
    moved = torch.tensor([0, 1, 9, 2, 3, 4], device=device)[target]
    want, want_entropy = logprobs_of(x, weight[seen], moved, entropy=True)
    assert_close(logprob, want, rtol=1e-6, atol=1e-6)
    assert_close(entropy, want_entropy, rtol=1e-6, atol=1e-6)
    (dbias,) = torch.autograd.grad((logprob + entropy).sum(), bias)
    assert dbias.isfinite().all() and dbias[2] == 0


def test_int32_target_is_the_same(device):
    x, weight, target, bias = made(device, F32, (2, 6), 17, 5, ignored=2)
    assert_same_bits(loss_of(x, weight, target.int(), bias), loss_of(x, weight, target, bias))
    target = target.clamp(min=0)
    got, want = (logprobs_of(x, weight, t, bias)[0] for t in (target.int(), target))
    assert_same_bits(got, want)


def test_shift_is_the_loss_of_the_next_token(device):
    x, weight, target, _ = leaves_of(made(device, F32, (3, 7), 33, 9, ignored=2))
    for reduction in ("none", "mean"):
        ours = loss_of(x, weight, target, shift=1, reduction=reduction)
        want = loss_of(x[:, :-1], weight, target[:, 1:], reduction=reduction)
        assert ours.is_contiguous()
        assert_close(ours, want, rtol=1e-6, atol=1e-6)
        assert_close(grads_of(ours, (x, weight)), grads_of(want, (x, weight)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lead", [(1,), (2, 1)], ids=str)
def test_shift_of_one_position_has_no_loss(device, lead):
    x, weight, target, _ = leaves_of(made(device, F32, lead, 5, 3))
    assert loss_of(x, weight, target, shift=1, reduction="none").shape == (*lead[:-1], 0)
    assert loss_of(x, weight, target, shift=1).isnan()


# Layouts


def test_expanded_tensors(device):
    for dtype in (F32, BF16):
        x, weight, target, bias = made(device, dtype, (1,), 33, 8)
        wide = [x.expand(6, 8), weight, target.expand(6), bias[:1].expand(33)]
        same = [t.contiguous() for t in wide]
        pairs = [forward_backward(OP, args, {})[1] for args in (wide, same)]
        for got, want in zip(*pairs, strict=True):
            assert (got is None) == (want is None)
            if got is not None:
                assert_same_bits(got, want)


def test_transposed_weight_gets_a_transposed_gradient(device):
    x, weight, target, _ = made(device, F32, (6,), 33, 8)
    plain = forward_backward(OP, [x, weight, target], {"reduction": "sum"})[1][1]
    moved = weight.t().contiguous().t()
    grad = forward_backward(OP, [x, moved, target], {"reduction": "sum"})[1][1]
    assert grad.stride() == moved.stride()
    assert_close(grad, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lead", [(0,), (2, 0), (0, 3)], ids=str)
def test_empty_batch(device, lead):
    for dtype in dtypes(device):
        args = made(device, dtype, lead, 5, 3)
        for keep in ("auto", "nothing"):
            out, grads = forward_backward(OP, args, {"reduction": "sum", "keep": keep})
            assert out == 0
            assert all((g == 0).all() for g in grads if g is not None)
        assert loss_of(*args).isnan()
        logprob, entropy = logprobs_of(*args, entropy=True)
        assert logprob.shape == entropy.shape == lead


def test_no_features(device):
    """Without K the logits are the bias."""
    args = made(device, F32, (4,), 7, 0)
    check_op(OP, args, {"reduction": "none"}, eager=False)


# Ignored rows


@pytest.mark.parametrize("keep", ["auto", "nothing"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_ignored_rows_may_hold_anything(device, value, keep):
    for dtype in dtypes(device):
        args = made(device, dtype, (6,), 33, 8, ignored=2)
        for reduction in ("sum", "mean", "none"):
            kwargs = {"reduction": reduction, "keep": keep, "z_loss": 0.1, "label_smoothing": 0.1}
            assert_ignored_rows_may_hold(value, args, kwargs)


@pytest.mark.parametrize("keep", ["auto", "nothing"])
def test_all_rows_ignored(device, keep):
    """torch's answers: a sum of 0, a mean of NaN, and gradients of 0."""
    for dtype, reduction, more in product(dtypes(device), ("sum", "mean"), (0.0, 0.1)):
        args = made(device, dtype, (4,), 257, 64, ignored=4)
        options = {"keep": keep, "label_smoothing": more, "z_loss": more}
        out, grads = forward_backward(OP, args, {"reduction": reduction, **options})
        assert out.isnan() if reduction == "mean" else out == 0
        assert all((g == 0).all() for g in grads if g is not None)


@pytest.mark.parametrize("scale", [0.3, 3.0, 10.0])
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_logprobs_and_entropies_are_as_accurate_as_in_float32(device, scale, softcap):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 256, generator=generator) for n in (128, 4099))
    x, weight = (x * scale / 16).to(device, BF16), weight.to(device, BF16)
    logits = x.float() @ weight.float().t()
    likely = logits.argmax(-1)
    target = torch.where(torch.arange(128, device=device) % 2 == 0, likely, likely // 2)
    got = logprobs_of(x, weight, target, softcap=softcap, entropy=True)

    def formula(z):
        z = z if softcap is None else softcap * (z / softcap).tanh()
        logp = z.log_softmax(-1)
        return logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    exact = formula(x.double() @ weight.double().t())
    for ours, eager, want in zip(got, formula(logits), exact, strict=True):
        check_promise(ours, eager, want)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_inf_and_nan_spread_as_in_torch(device, value):
    x, weight, target, bias = made(device, F32, (5,), 33, 8)
    for j in (0, int(target[1])):
        spoilt = bias.clone()
        spoilt[j] = value
        want = F.cross_entropy(F.linear(x, weight, spoilt), target, reduction="none")
        assert_equal(
            loss_of(x, weight, target, spoilt, reduction="none").isfinite(), want.isfinite()
        )
    spoilt = torch.full_like(bias, -math.inf)
    loss, lse = torch.ops.torchweld.linear_cross_entropy_forward(
        x, weight, target, spoilt, reduction="none"
    )
    assert loss.isnan().all() and (lse == -math.inf).all()


# Refusals

X, WEIGHT, TARGET = torch.zeros(4, 3), torch.zeros(5, 3), torch.zeros(4, dtype=torch.int64)
REFUSED = [
    ({"x": torch.tensor(1.0)}, "x must be"),
    ({"weight": torch.zeros(3, 5)}, r"weight must be \(N, K\).*use weight.t\(\)"),
    ({"target": TARGET.float()}, "target must be int64 or int32.*use target.long"),
    ({"target": TARGET[:3]}, "target must be the leading dims of x"),
    ({"target": TARGET.to("meta")}, "target must be on"),
    ({"bias": torch.zeros(4)}, r"bias must be \(N,\)"),
    ({"temperature": 0.0}, "temperature must be finite and above 0"),
    ({"temperature": math.nan}, "temperature must be finite and above 0"),
    ({"softcap": 0.0}, "softcap must be finite and above 0, or None"),
    ({"softcap": math.inf}, "softcap must be finite and above 0, or None"),
]
REFUSED_LOSS = [
    ({"reduction": "average"}, "reduction must be 'none', 'mean' or 'sum', but got 'average'"),
    ({"label_smoothing": -0.1}, "label_smoothing must be from 0 to 1"),
    ({"label_smoothing": 1.5}, "label_smoothing must be from 0 to 1"),
    ({"z_loss": math.inf}, "z_loss must be finite"),
    ({"shift": 2}, "shift must be 0 or 1, but got 2"),
    ({"shift": 1, "x": X[0], "target": TARGET[0]}, r"x must be \(..., S, K\) with S at least 1"),
    ({"shift": 1, "x": X[:0], "target": TARGET[:0]}, r"x must be \(..., S, K\) with S at least 1"),
    ({"keep": "all"}, "keep must be 'auto', 'exponentials', 'gradients' or 'nothing'"),
    (
        {"keep": "exponentials", "label_smoothing": 0.1, "softcap": 2.0},
        "keep='exponentials' must have label_smoothing 0 with a softcap, but got 0.1",
    ),
    ({"keep": "gradients", "reduction": "none"}, "must have reduction 'mean' or 'sum'"),
    ({"keep": "gradients", "x": X.half(), "weight": WEIGHT.half()}, "float32 or bfloat16"),
]


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(
    ("op", "change", "sentence"),
    [(op, *refused) for op in (OP, "linear_token_logprobs") for refused in REFUSED]
    + [(OP, *refused) for refused in REFUSED_LOSS],
)
def test_refusals(device, op, change, sentence, trains):
    given = {"x": X, "weight": WEIGHT, "target": TARGET, **change}
    given["x"] = given["x"].detach().requires_grad_(trains)
    assert_refused(op, device, given, sentence)


@pytest.mark.parametrize("value", [-1, 5, -100, 2**40])
def test_target_out_of_range(value):
    """An error on the CPU; CUDA asserts on the device, which would end this process."""
    target = torch.tensor([0, 1, value, 2])
    with pytest.raises(RuntimeError, match="linear_token_logprobs: target must be from 0 to N - 1"):
        logprobs_of(X.detach().requires_grad_(), WEIGHT, target)
    if value != -100:
        with pytest.raises(
            RuntimeError, match="target must be from 0 to N - 1 = 4 or ignore_index"
        ):
            loss_of(X, WEIGHT, target)


def test_backward_ops_refuse_bad_gradients(device):
    x, weight, target = (t.to(device) for t in (X, WEIGHT, TARGET))
    lse = torch.zeros(4, device=device)
    ops = torch.ops.torchweld
    wanted = {"output_mask": [True] * 3}
    with pytest.raises(RuntimeError, match="dloss must be the loss's shape"):
        ops.linear_cross_entropy_backward(lse, x, weight, target, lse, **wanted)
    with pytest.raises(RuntimeError, match="lse must be the shape of a result per token"):
        ops.linear_cross_entropy_backward(lse[0], x, weight, target, lse[:2], **wanted)
    with pytest.raises(RuntimeError, match="dlse must be the shape of a result per token"):
        ops.linear_cross_entropy_backward(lse[0], x, weight, target, lse, dlse=lse[:2], **wanted)
    with pytest.raises(RuntimeError, match="row_entropy must be given with dentropy"):
        ops.linear_token_logprobs_backward(lse, x, weight, target, lse, None, None, lse, **wanted)
    with pytest.raises(RuntimeError, match="reduction must be 'mean' or 'sum', but got 'none'"):
        ops.linear_cross_entropy_gradients_forward(x, weight, target, reduction="none", **wanted)
    with pytest.raises(RuntimeError, match="dmean must be the shape of a result per token"):
        ops.linear_cross_entropy_backward(lse[0], x, weight, target, lse, dmean=lse[:2], **wanted)
    exponentials = ops.linear_cross_entropy_exponentials_forward
    with pytest.raises(RuntimeError, match="'exponentials', 'auto' or 'nothing', but got 'all'"):
        exponentials(x, weight, target, keep="all")
    with pytest.raises(RuntimeError, match="must have mean False with a softcap, but got True"):
        exponentials(x, weight, target, softcap=2.0, mean=True)
    with pytest.raises(RuntimeError, match="dloss must be a scalar"):
        ops.linear_cross_entropy_gradients_backward(lse, x, weight, lse)
