"""use_in_sdpa("cpu"); torch's varlen_attn on torchweld's kernels, in place of stand-ins."""

from __future__ import annotations

from inspect import signature

import pytest
import torch
import torch.nn.functional as F
from torch.nn import attention
from torch.testing import assert_close

import torchweld
from numerics import assert_same_bits
from samples import BF16, F16, F32, F64
from sdpa_calls import count_calls, draw, formula, packed_formula, strides
from torchweld import integrations
from torchweld.integrations.sdpa import flash
from torchweld.integrations.sdpa import kernels as sdpa

pytestmark = pytest.mark.skipif(
    not hasattr(attention, "register_flash_attention_impl"),
    reason="torch has no registry of flash attention implementations",
)
CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@pytest.fixture
def counted(monkeypatch):
    return count_calls(monkeypatch, flash)


CASES = [
    # sizes, sizes_k, is_causal, scale
    ((2, 4, 9, 16), None, True, None),
    ((1, 6, 7, 20), (1, 2, 7, 20), True, 0.3),
    ((2, 2, 5, 16), (2, 1, 13, 16), False, None),
    ((2, 2, 13, 16), (2, 2, 5, 16), False, 1.5),
]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [F32, F64, F16, BF16], ids=str)
@pytest.mark.parametrize("sizes, sizes_k, is_causal, scale", CASES, ids=str)
def test_sdpa_on_the_cpu(counted, sizes, sizes_k, is_causal, scale, dtype, transposed):
    """The formula, in the strides of torch's kernels, and the bits of torchweld.attention."""
    tensors = draw(sizes, sizes_k, dtype=dtype, transposed=transposed)
    options = {"is_causal": is_causal, "scale": scale}
    theirs = CPU(*tensors, 0.0, **options)
    with integrations.use_in_sdpa("cpu"):
        out = F.scaled_dot_product_attention(*tensors, enable_gqa=True, **options)
        mine = CPU(*tensors, 0.0, **options)
        grads = torch.autograd.grad(out, tensors, torch.ones_like(out))
    assert (counted.forwards, counted.backwards) == (2, 1)
    for result, other in zip(mine, theirs, strict=True):
        assert (result.shape, result.dtype) == (other.shape, other.dtype)
        assert strides(result) == strides(other)
    want = torchweld.attention(*tensors, causal=is_causal, scale=scale)
    assert_same_bits(out, want)
    assert_same_bits(grads, torch.autograd.grad(want, tensors, torch.ones_like(want)))
    for grad, t in zip(grads, torch.autograd.grad(theirs[0].sum(), tensors), strict=True):
        assert strides(grad) == strides(t)
    exact, lse = formula(*(t.detach() for t in tensors), is_causal, scale)
    tolerance = 1e-5 if dtype in (F32, F64) else 2e-2
    assert_close(mine[0], exact, atol=tolerance, rtol=tolerance, check_dtype=False)
    assert_close(mine[1], lse, atol=tolerance, rtol=tolerance, check_dtype=False)


MASK = torch.ones(9, 9, dtype=torch.bool).tril()
LEFT = {
    "attn_mask": {"attn_mask": MASK},
    "dropout": {"dropout_p": 0.5},
    "top left": {"is_causal": True},
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_left_to_torch_on_the_cpu(counted, case):
    q, k, v = draw((1, 2, 9, 16), (1, 2, 12 if case == "top left" else 9, 16), dtype=F32)

    def run():
        torch.manual_seed(0)
        out = F.scaled_dot_product_attention(q, k, v, **LEFT[case])
        return out, *torch.autograd.grad(out.sum(), (q, k, v))

    want = run()
    with integrations.use_in_sdpa("cpu"):
        got = run()
    assert (counted.forwards, counted.backwards) == (0, 0)
    assert_same_bits(got, want)


def test_reasons_on_the_cpu():
    def why(*sizes, **more):
        return flash.Cpu.refusal(*(torch.zeros(size) for size in sizes), **more)

    q = (2, 4, 5, 8)
    assert why(q, q, q, is_causal=True) is None
    assert why(q, q, q, dropout_p=0.1) == "dropout_p is above 0"
    assert why(q, (2, 3, 5, 8), (2, 3, 5, 8)) == "the heads of key don't divide those of query"
    assert why(q, q, (2, 4, 5, 6)) == "the shapes don't belong together"
    assert why(q, (1, 4, 5, 8), (1, 4, 5, 8)) == "the shapes don't belong together"
    assert why(q[1:], q[1:], q[1:]) == "a tensor is not 4-D"
    assert why(q, q, q, scale=float("inf")) == "scale is not finite"


@pytest.mark.parametrize("served_forward", [True, False])
def test_graphs_on_the_cpu_run_backward_with_the_other_kernel(counted, served_forward):
    q, k, v = draw((2, 4, 9, 16), (2, 2, 9, 16), dtype=F32)
    out = CPU(q, k, v, 0.0, True)[0]
    want = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    if served_forward:
        with integrations.use_in_sdpa("cpu"):
            out = CPU(q, k, v, 0.0, True)[0]
        got = torch.autograd.grad(out.sum(), (q, k, v))
        assert (counted.forwards, counted.backwards) == (1, 0)
    else:
        with integrations.use_in_sdpa("cpu"):
            got = torch.autograd.grad(out.sum(), (q, k, v))
        assert (counted.forwards, counted.backwards) == (0, 1)
    assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_handles_on_the_cpu_nest_and_leave_nothing():
    op = f"aten::{sdpa.Cpu.FORWARD}"
    before = torch._C._dispatch_dump(op)
    with integrations.use_in_sdpa("cpu"):
        present = torch._C._dispatch_dump(op)
        with integrations.use_in_sdpa("cpu"):
            pass
        assert torch._C._dispatch_dump(op) == present != before
    assert torch._C._dispatch_dump(op) == before
    assert attention.current_flash_attention_impl() is None
    with pytest.raises(ValueError, match="device must be .* but got 'mps'"):
        integrations.use_in_sdpa("mps")


def test_compiled_graphs_on_the_cpu(counted):
    q, k, v = draw((1, 2, 9, 16), dtype=F32)
    compiled = torch.compile(F.scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
    with integrations.use_in_sdpa("cpu"):
        compiled(q, k, v, is_causal=True).sum().backward()
    assert (counted.forwards, counted.backwards) == (1, 1)


# ---- torch.nn.attention.varlen, whose op has kernels for CUDA alone


@pytest.fixture
def torchs(monkeypatch):
    """Stand-ins for torch's kernels on the CPU, which name themselves."""

    def forward(*args, **kwargs):
        raise NotImplementedError("torch's forward")

    def backward(*args, **kwargs):
        raise NotImplementedError("torch's backward")

    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl(sdpa.Varlen.FORWARD, forward)
    library.impl(sdpa.Varlen.BACKWARD, backward)
    kernels = sdpa.Kernels("CPU", (sdpa.Varlen,))
    yield count_calls(monkeypatch, flash)
    kernels.remove()
    library._destroy()


varlen = pytest.importorskip("torch.nn.attention.varlen")
LENGTHS = [5, 1, 12, 7]


def ends_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def packed(tokens, nheads=4, dtype=BF16):
    return torch.randn(tokens, nheads, 16).to(dtype).requires_grad_()


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (4, 0), (2, 2), (-1, 3)], ids=str)
def test_varlen_attn(torchs, window):
    """Results, lse and gradients of torch's function."""
    tensors = [packed(25) for _ in range(3)]
    ends = ends_of(LENGTHS)
    out, lse = varlen.varlen_attn(
        *tensors, ends, ends, 12, 12, return_aux=varlen.AuxRequest(lse=True), window_size=window
    )
    grads = torch.autograd.grad(out, tensors, torch.ones_like(out))
    assert (torchs.forwards, torchs.backwards) == (1, 1)
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    want, want_lse = packed_formula(*doubles, LENGTHS, window)
    wanted = torch.autograd.grad(want, doubles, torch.ones_like(want))
    assert_close(out, want, atol=2e-2, rtol=2e-2, check_dtype=False)
    assert_close(lse, want_lse, atol=1e-3, rtol=1e-3, check_dtype=False)
    for grad, exact, t in zip(grads, wanted, tensors, strict=True):
        assert_close(grad, exact, atol=5e-2, rtol=5e-2, check_dtype=False)
        assert strides(grad) == strides(t)


def test_rows_without_keys_have_torchs_lse(torchs):
    """inf, as in torch's kernel, in both directions; fewer heads of key."""
    q, k, v = packed(6), packed(4, 2), packed(4, 2)
    ends_q, ends_k = ends_of([4, 2]), ends_of([0, 4])
    fewer = {"enable_gqa": True} if "enable_gqa" in signature(varlen.varlen_attn).parameters else {}
    out, lse = varlen.varlen_attn(
        q, k, v, ends_q, ends_k, 4, 4, return_aux=varlen.AuxRequest(lse=True), **fewer
    )
    assert (lse[:, :4] == torch.inf).all() and lse[:, 4:].isfinite().all()
    assert (out[:4] == 0).all()
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert (grads[0][:4] == 0).all() and all(grad.isfinite().all() for grad in grads)


def test_a_compiled_varlen_attn(torchs):
    tensors = [packed(25) for _ in range(3)]
    run = torch.compile(varlen.varlen_attn, backend="aot_eager", fullgraph=True)
    for lengths in (LENGTHS, [25, 0, 0, 0]):
        ends = ends_of(lengths)
        out = run(*tensors, ends, ends, 25, 25, window_size=(-1, 0))
        out.sum().backward()
        want = torchweld.varlen_attention(*tensors, ends, ends, causal=True)
        assert_same_bits(out, want)
    assert torchs.backwards == 2


@pytest.mark.parametrize("case", ["float32", "head dim", "lengths", "dropout"])
def test_other_calls_run_torchs_varlen_kernel(torchs, case):
    dtype = F32 if case == "float32" else BF16
    size = 12 if case == "head dim" else 16
    q = torch.zeros(5, 2, size, dtype=dtype)
    ends = torch.tensor([0, 5], dtype=torch.int64 if case == "lengths" else torch.int32)
    dropout = 0.1 if case == "dropout" else 0.0
    with pytest.raises(NotImplementedError, match="torch's forward"):
        torch.ops.aten._flash_attention_forward(q, q, q, ends, ends, 5, 5, dropout, False, False)
