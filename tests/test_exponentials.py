"""linear_cross_entropy(keep="exponentials"), which keeps 2^(l - k) in place of the logits.

On Hopper its kernels take bfloat16 with K in whole 16-byte chunks; torch's ops take the rest.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from losses import assert_ignored_rows_may_hold, leaves_of, made
from numerics import assert_same_bits
from samples import BF16, F32, check_op, forward_backward, trained

OP = "linear_cross_entropy"
KEEP = {"keep": "exponentials"}
OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 3.0},
    "z_loss": {"z_loss": 0.05},
    "temperature": {"temperature": 0.7},
    "shift": {"shift": 1},
    "label_smoothing": {"label_smoothing": 0.1},
    "all_smooth": {"label_smoothing": 1.0},
    "smooth": {"label_smoothing": 0.2, "z_loss": 0.1, "temperature": 1.3, "shift": 1},
    "together": {"softcap": 5.0, "z_loss": 0.1, "temperature": 1.3, "shift": 1},
}
# A tile of one class, odd vocabularies, rows and classes beyond a tile, K of a partial k-block.
SIZES = [((2, 9), 257, 64), ((3,), 1, 8), ((2, 130), 130, 72), ((1, 4), 4099, 136)]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("options", OPTIONS)
def test_options(device, dtype, reduction, options):
    kwargs = {"reduction": reduction, **OPTIONS[options], **KEEP}
    check_op(OP, made(device, dtype, (2, 9), 70, 24, ignored=3), kwargs, eager=False)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_label_smoothing_of_recomputed_logits(device, reduction):
    kwargs = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 0.05, "keep": "nothing"}
    check_op(OP, made(device, BF16, (2, 9), 70, 24, ignored=3), kwargs, eager=False)


@pytest.mark.parametrize("keep", ["exponentials", "nothing"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_sizes(device, size, bias, keep):
    kwargs = {"reduction": "none", "keep": keep}
    check_op(OP, made(device, BF16, *size, bias=bias), kwargs, eager=False)


def test_products_of_a_long_sum(device):
    """From 1024 features on the product has tiles of 256 columns."""
    args = made(device, BF16, (150,), 700, 1032, ignored=5)
    check_op(OP, args, {"reduction": "mean", **KEEP}, eager=False)


@pytest.mark.parametrize("features", [64, 1032])
@pytest.mark.parametrize("apart", [30.0, 200.0, 3000.0])
def test_logits_far_above_the_target(device, features, apart):
    """A tile that is more than 86 above its row's target has an exponent of its own."""
    x, weight, _, _ = made(device, BF16, (7,), 600, features, bias=False)
    target = torch.arange(7, device=device)
    bias = torch.zeros(600, device=device, dtype=BF16)
    bias[300], bias[590] = apart, apart + 1
    logits = F.linear(x.double(), weight.double(), bias.double())
    out, grads = forward_backward(OP, [x, weight, target, bias], {"reduction": "none", **KEEP})
    want = F.cross_entropy(logits, target, reduction="none")
    torch.testing.assert_close(out.double(), want, rtol=1e-6, atol=1e-5)
    p = logits.softmax(-1)
    p[torch.arange(7), target] -= 1
    for got, ref in ((grads[0], p @ weight.double()), (grads[1], p.T @ x.double())):
        error = (got.double() - ref).abs().max() / ref.abs().max()
        assert error < 0.02


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("keep", ["exponentials", "nothing"])
def test_ignored_rows_may_hold_anything(device, keep, label_smoothing):
    args = made(device, BF16, (6,), 33, 8, ignored=2)
    for value in (torch.inf, torch.nan):
        for reduction in ("sum", "none"):
            kwargs = {"reduction": reduction, "keep": keep, "label_smoothing": label_smoothing}
            assert_ignored_rows_may_hold(value, args, kwargs)


def test_nan_spreads_as_in_torch(device):
    x, weight, target, _ = made(device, BF16, (5,), 300, 8, bias=False)
    for row in (3, 290):
        spoilt = weight.clone()
        spoilt[row] = torch.nan
        want = F.cross_entropy(F.linear(x, spoilt), target, reduction="none")
        out, _ = forward_backward(OP, [x, spoilt, target, None], {"reduction": "none", **KEEP})
        assert out.isnan().equal(want.isnan())


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_backward_twice_has_the_same_bits(device, dtype):
    leaves = leaves_of(made(device, dtype, (6,), 130, 16))
    inputs = trained(leaves)
    out = torch.ops.torchweld.linear_cross_entropy(*leaves, **KEEP)
    first = torch.autograd.grad(out, inputs, retain_graph=True)
    assert_same_bits(torch.autograd.grad(out, inputs), first)


def test_batched_gradients(device):
    leaves = leaves_of(made(device, BF16, (4,), 130, 16))
    inputs = trained(leaves)
    out = torch.ops.torchweld.linear_cross_entropy(*leaves, reduction="none", **KEEP)
    douts = torch.randn(3, *out.shape, device=device)
    batched = torch.autograd.grad(out, inputs, douts, retain_graph=True, is_grads_batched=True)
    for i, dout in enumerate(douts):
        alone = torch.autograd.grad(out, inputs, dout, retain_graph=True)
        assert_same_bits([a[i] for a in batched], alone)
