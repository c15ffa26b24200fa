"""README's accuracy rule for every op: in float32, the largest error is at most twice that of the
same formula in eager torch, plus two roundings of the largest result. Gradients too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import reference as R
import torchweld
from numerics import check_promise
from samples import F32, as_tuple, call, need_kernel, requiring, trained, with_defaults
from tensors import randn

# The changes to the first argument of a call; its last dim holds rows.
ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda t: t,
    **{f"offset {size:g}": lambda t, size=size: t + size for size in (1e2, 1e4)},
    **{f"scale {size:g}": lambda t, size=size: t * size for size in (1e2, 1e4)},
    "constant rows": lambda t: torch.full_like(t, 1000.3),
    "dominated rows": lambda t: t + 500.0 * torch.eye(*t.shape[-2:], device=t.device),
}


def calls(device: str) -> dict[str, tuple[list, dict]]:
    """A call of each public op over rows of a few hundred elements."""
    torch.manual_seed(0)

    def rand(*shape: int, std: float = 1.0) -> Tensor:
        return randn(device, F32, *shape, scale=std)

    x, n, k = (16, 96), 96, 64
    weight, target = rand(k, n, std=n**-0.5), torch.randint(k, (16,), device=device)
    vector = rand(n, std=0.2) + 1
    rows = {
        "softmax": ([rand(*x)], {}),
        "causal_softmax": ([rand(2, 3, 16, 96)], {}),
        "softmax_matmul": ([rand(2, 3, 16, 96), rand(2, 3, 96, 32)], {}),
        "cross_entropy": ([rand(16, k), target], {"reduction": "none"}),
        "linear_cross_entropy": ([rand(*x), weight, target], {"reduction": "sum"}),
        "linear_token_logprobs": ([rand(*x), weight, target], {}),
        "linear": ([rand(*x), weight, rand(k)], {"activation": "gelu"}),
        "layer_norm": ([rand(*x), vector, rand(n)], {}),
        "rms_norm": ([rand(*x), vector], {}),
        "rms_norm_gated": ([rand(*x), rand(*x), vector], {}),
        "add_layer_norm": ([rand(*x), rand(*x), vector, rand(n)], {}),
        "add_rms_norm": ([rand(*x), rand(*x), vector], {}),
        "layer_norm_linear": ([rand(*x), weight, rand(k), vector, rand(n)], {}),
        "rms_norm_linear": ([rand(*x), weight, rand(k), vector], {}),
        "gated_linear": ([rand(*x), weight, rand(k)], {"gate": "swiglu"}),
        "gated_linear_pair": ([rand(*x), weight, rand(k, n, std=0.1)], {"gate": "swiglu"}),
        "gated_mlp": (
            [rand(*x), weight, rand(k, n, std=0.1), rand(n, k, std=0.1)],
            {"gate": "swiglu"},
        ),
        "gated_activation": ([rand(*x), rand(*x)], {"gate": "swiglu"}),
        "bmm": ([rand(3, 16, 96), rand(3, 96, 32)], {}),
        "row_sum": ([rand(*x)], {}),
    }
    # Keys this small keep scores of 1e4 times q near enough for many rows to have an error: with
    # few, one tie decides both errors, and the order of sums, thus the machine, the tie.
    heads = [rand(128, 3, 5, 64), rand(128, 3, 40, 64, std=0.02), rand(128, 3, 40, 64)]
    return rows | {"attention": (heads, {})}


def scaled_dot_product(q: Tensor, k: Tensor, v: Tensor, **defaults: Any) -> Tensor:
    """torch's own kernel in float32, which takes lse and delta as ours does; see numerics.md."""
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v)


CALLS = tuple(calls("cpu"))
# logsumexp's gradient is less accurate than that of torch's own op.
EAGER = R.EAGER | {
    "cross_entropy": lambda *args, reduction, **defaults: F.cross_entropy(
        *args, reduction=reduction
    )
}


def results(function: Callable, op: str, args: list, kwargs: dict, dout: Tensor) -> list[Tensor]:
    """The result and the gradients, in the dtype of the arguments."""
    leaves = requiring(op, args)
    out = as_tuple(function(*leaves, **kwargs))[0]
    return [out.detach(), *torch.autograd.grad(out, trained(leaves), dout.to(out.dtype))]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("op", CALLS)
def test_the_rule_of_the_readme(op, rows, device):
    args, kwargs = calls(device)[op]
    args[0] = ROWS[rows](args[0])
    eager = with_defaults(op, kwargs)
    dout = torch.randn(as_tuple(call(op)(*args, **kwargs))[0].shape, device=device)
    wide = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    exact = results(EAGER[op], op, wide, eager, dout.double())
    yardstick = EAGER[op]
    if device == "cuda" and op == "softmax_matmul" and rows != "plain":
        pytest.skip("its gradient on a GPU takes lse and delta, as attention's; numerics.md")
    if device == "cuda" and op == "attention":
        yardstick = scaled_dot_product
    theirs = results(yardstick, op, args, eager, dout)
    ours = results(call(op), op, args, kwargs, dout)
    for mine, torchs, want in zip(ours, theirs, exact, strict=True):
        check_promise(mine, torchs, want)


def test_dominated_rows_of_attention_err_less_than_eager_s():
    """Scores of hundreds are rounded in another order, so that either may be luckier in a call."""
    errors: list[list[Tensor]] = []
    for seed in range(20):
        torch.manual_seed(seed)
        q, k, v = (torch.randn(2, 3, s, 64) for s in (5, 40, 40))
        args, dout = [ROWS["dominated rows"](q), k, v], torch.randn(2, 3, 5, 64)
        eager = with_defaults("attention", {})
        wide = [a.double() for a in args]
        exact = results(R.EAGER["attention"], "attention", wide, eager, dout.double())
        theirs = results(R.EAGER["attention"], "attention", args, eager, dout)
        for found in (results(call("attention"), "attention", args, {}, dout), theirs):
            errors.append([(x - y).abs().max() for x, y in zip(found, exact, strict=True)])
    ours, theirs = (torch.tensor(errors[i::2]).median(0).values for i in (0, 1))
    assert (ours < theirs).all()


@pytest.mark.parametrize("op", ["softmax", "causal_softmax", "softmax_matmul", "cross_entropy"])
def test_a_visible_score_of_minus_infinity_has_a_gradient_of_zero(op, device):
    args, kwargs = calls(device)[op]
    args[0][..., 1] = -torch.inf
    if op == "cross_entropy":
        args[1][args[1] == 1] = 0
    dout = torch.randn(as_tuple(call(op)(*args, **kwargs))[0].shape, device=device)
    theirs = results(EAGER[op], op, args, kwargs, dout)
    ours = results(call(op), op, args, kwargs, dout)
    assert (ours[1][..., 1] == 0).all()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_product_that_overflows_to_minus_infinity_has_a_gradient_of_zero(device):
    need_kernel("attention", device)
    q, k, v = calls(device)["attention"][0]
    q, k = q.abs() * 1e20, k.abs()
    k[:, :, 3] *= -1e20
    leaves = [t.requires_grad_() for t in (q, k, v)]
    grads = torch.autograd.grad(torchweld.attention(*leaves).sum(), leaves)
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[1][:, :, 3] == 0).all() and (grads[2][:, :, 3] == 0).all()
