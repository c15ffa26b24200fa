"""use_in_sdpa on a GPU: SDPA on torchweld's kernels against SDPA on torch's flash kernel."""

from __future__ import annotations

import inspect
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch.nn import attention
from torch.testing import assert_close

from cuda_graphs import cuda_graph
from numerics import assert_same_bits
from samples import BF16, F16
from sdpa_calls import FLASH, count_calls, draw, formula, packed_formula, strides
from torchweld import integrations
from torchweld.info import has_cuda_kernel
from torchweld.integrations.sdpa import flash as sdpa_flash

pytestmark = pytest.mark.skipif(
    not hasattr(attention, "register_flash_attention_impl")
    or not torch.cuda.is_available()
    or torch.cuda.get_device_capability() < (8, 0)
    or not has_cuda_kernel("attention_forward"),
    reason="torch's flash attention needs a GPU from sm_80 on, use_in_sdpa torch 2.11",
)


@contextmanager
def deterministic():
    """torch's flash gradient has the same bits in every run in here alone."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def counted(monkeypatch):
    return count_calls(monkeypatch, sdpa_flash)


def flash(q, k, v, **kwargs):
    with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **kwargs)


def with_grads(function, tensors, dout):
    out = function(*tensors)
    return [out.detach(), *torch.autograd.grad(out, tensors, dout)]


def exact(tensors, dout, is_causal, scale):
    """out and the gradients in float64."""
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    return with_grads(lambda *t: formula(*t, is_causal, scale)[0], doubles, dout.double())


def assert_as_good(mine, theirs, truth):
    """Checks that the error is at most twice torch's plus two roundings of the largest result."""
    for a, b, t in zip(mine, theirs, truth, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and strides(a) == strides(b)
        unit = 2.0**-11 if a.dtype == F16 else 2.0**-8
        allowed = 2 * (b - t).abs().max() + 2 * unit * max(t.abs().max().item(), 0.3)
        assert (a - t).abs().max() <= allowed


GPU_CASES = [
    # sizes, sizes_k, is_causal, scale
    ((2, 4, 128, 64), None, True, None),
    ((2, 4, 333, 128), None, True, 0.2),
    ((1, 8, 257, 64), (1, 2, 257, 64), True, None),
    ((2, 4, 100, 96), (2, 4, 517, 96), False, None),
    ((2, 4, 517, 32), (2, 1, 100, 32), False, None),
    ((1, 8, 1, 128), (1, 2, 700, 128), False, None),
    ((1, 2, 190, 256), None, True, None),
    ((1, 2, 65, 20), None, True, None),  # which SDPA pads to 24
]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("sizes, sizes_k, is_causal, scale", GPU_CASES, ids=str)
def test_sdpa_is_as_good_as_torchs_flash(
    counted, sizes, sizes_k, is_causal, scale, dtype, transposed
):
    tensors = draw(sizes, sizes_k, "cuda", dtype, transposed)
    dout = torch.randn(sizes, device="cuda").to(dtype)

    def attend(q, k, v):
        return flash(q, k, v, is_causal=is_causal, scale=scale)

    theirs = with_grads(attend, tensors, dout)
    with integrations.use_in_sdpa():
        mine = with_grads(attend, tensors, dout)
    assert (counted.forwards, counted.backwards) == (1, 1)
    assert_as_good(mine, theirs, exact(tensors, dout, is_causal, scale))
    assert_same_bits(with_grads(attend, tensors, dout)[:1], theirs[:1])
    assert (counted.forwards, counted.backwards) == (1, 1)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_op_below_sdpa_gives_what_torchs_gives(counted, is_causal):
    """lse too, and causal with more keys than queries, which SDPA itself leaves to others."""
    q, k, v = draw((2, 4, 70, 64), (2, 2, 200, 64), "cuda")
    theirs = FLASH(q, k, v, 0.0, is_causal)
    with integrations.use_in_sdpa():
        mine = FLASH(q, k, v, 0.0, is_causal)
    assert counted.forwards == 1
    assert_close(mine[0], theirs[0], atol=2e-2, rtol=2e-2)
    assert_close(mine[1], theirs[1], atol=1e-3, rtol=1e-3)
    for a, b in zip(mine[1:], theirs[1:], strict=True):
        if isinstance(b, torch.Tensor):
            assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
            assert strides(a) == strides(b)
        else:
            assert a == b


def test_the_lower_right_mask_is_served(counted):
    from torch.nn.attention.bias import causal_lower_right

    tensors = draw((1, 4, 60, 64), (1, 4, 150, 64), "cuda")
    dout = torch.randn(1, 4, 60, 64, device="cuda").to(BF16)

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, causal_lower_right(60, 150))

    theirs = with_grads(attend, tensors, dout)
    with integrations.use_in_sdpa():
        mine = with_grads(attend, tensors, dout)
    assert (counted.forwards, counted.backwards) == (1, 1)
    assert_as_good(mine, theirs, exact(tensors, dout, True, None))


def test_plain_calls_get_there_whatever_torch_prefers(counted):
    q, k, v = draw((2, 4, 128, 64), None, "cuda")
    order = torch._C._get_sdp_priority_order()
    with integrations.use_in_sdpa():
        assert torch._C._get_sdp_priority_order()[0] == int(attention.SDPBackend.FLASH_ATTENTION)
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    assert (counted.forwards, counted.backwards) == (1, 1)
    assert sorted(torch._C._get_sdp_priority_order()) == sorted(order)
    before = torch._C._get_sdp_priority_order()
    with integrations.use_in_sdpa():
        pass
    assert torch._C._get_sdp_priority_order() == before


def test_the_order_that_a_new_process_starts_with():
    """use_in_sdpa before the first choice of a back end, which sets torch's order."""
    code = (
        "import torch, torchweld\n"
        "from torch.nn.functional import scaled_dot_product_attention as f\n"
        "from torchweld.integrations import use_in_sdpa\n"
        "from torchweld.integrations.sdpa import kernels as sdpa\n"
        "calls = []\n"
        "old = sdpa.Dense.forward\n"
        "sdpa.Dense.forward = lambda *a, **k: (calls.append(1), old(*a, **k))[1]\n"
        "handle = use_in_sdpa()\n"
        "q = torch.randn(1, 2, 128, 64, device='cuda', dtype=torch.bfloat16)\n"
        "for n in (1, 2):\n"
        "    f(q, q, q)\n"
        "    assert len(calls) == n, calls\n"
        "handle.remove()\n"
        "after = torch._C._get_sdp_priority_order()\n"
        "f(q, q, q)\n"
        "assert len(calls) == 2 and torch._C._get_sdp_priority_order() == after\n"
        "torch._fused_sdp_choice(q, q, q)\n"
        "print(after)\n"
    )
    plain = (
        "import torch\n"
        "q = torch.randn(1, 2, 128, 64, device='cuda', dtype=torch.bfloat16)\n"
        "torch._fused_sdp_choice(q, q, q)\n"
        "print(torch._C._get_sdp_priority_order())\n"
    )
    printed = []
    for text in (code, plain):
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed[0] == printed[1]


def assert_left_to_torch(counted, attend, tensors, dout):
    """Result and gradients have the bits of torch's kernels, and none of ours ran."""
    with deterministic():
        theirs = with_grads(attend, tensors, dout)
        with integrations.use_in_sdpa():
            mine = with_grads(attend, tensors, dout)
    assert (counted.forwards, counted.backwards) == (0, 0)
    assert_same_bits(mine, theirs)


@pytest.mark.parametrize(
    "kwargs", [{"dropout_p": 0.3}, {"dropout_p": 0.3, "is_causal": True}], ids=str
)
def test_dropout_has_the_bits_of_torchs_flash(counted, kwargs):
    tensors = draw((2, 4, 128, 64), None, "cuda")
    dout = torch.randn(2, 4, 128, 64, device="cuda").to(BF16)

    def attend(q, k, v):
        torch.manual_seed(7)
        return flash(q, k, v, **kwargs)

    assert_left_to_torch(counted, attend, tensors, dout)


def test_other_back_ends_are_left_alone(counted):
    q, k, v = draw((1, 2, 32, 64), None, "cuda")
    mask = torch.ones(32, 32, dtype=torch.bool, device="cuda").tril()
    cases = [
        ((q.float(), k.float(), v.float()), {}),
        ((q, k, v), {"attn_mask": mask}),
        ((q[:, :, :20], k, v), {"is_causal": True}),
        ((q, k, v[..., :32]), {}),
    ]
    with integrations.use_in_sdpa(), torch.no_grad():
        for tensors, kwargs in cases:
            out = F.scaled_dot_product_attention(*tensors, **kwargs)
            with attention.sdpa_kernel(attention.SDPBackend.MATH):
                expected = F.scaled_dot_product_attention(*tensors, **kwargs)
            assert_close(out, expected, atol=2e-2, rtol=2e-2)
        with pytest.raises(RuntimeError):
            FLASH(q.float(), k.float(), v.float())
    assert (counted.forwards, counted.backwards) == (0, 0)


def test_jagged_tensors_are_served(counted):
    def packed(*seqlens):
        parts = [torch.randn(n, 2, 64, device="cuda").to(BF16) for n in seqlens]
        return torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)

    q = packed(5, 40, 17)
    expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    with integrations.use_in_sdpa():
        out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert counted.forwards == 1
    got, want = (t.transpose(1, 2).values() for t in (out, expected))
    assert_close(got, want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (6, 0), (3, 3), (-1, 4)], ids=str)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_varlen_attn_is_as_good_as_torchs(counted, dtype, window):
    """Results, lse and gradients of torch.nn.attention.varlen on packed sequences."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    if "window_size" not in inspect.signature(varlen.varlen_attn).parameters:
        pytest.skip("varlen_attn has no windows in this torch")
    lengths = [100, 1, 300, 57]
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    tensors = [
        torch.randn(sum(lengths), 4, 64, device="cuda").to(dtype).requires_grad_() for _ in "qkv"
    ]
    dout = torch.randn(sum(lengths), 4, 64, device="cuda").to(dtype)

    def attend(q, k, v):
        aux = varlen.AuxRequest(lse=True)
        return varlen.varlen_attn(q, k, v, ends, ends, 300, 300, return_aux=aux, window_size=window)

    def run(attend, tensors, dout):
        out, lse = attend(*tensors)
        return [lse.detach(), out.detach(), *torch.autograd.grad(out, tensors, dout)]

    theirs = run(attend, tensors, dout)
    with integrations.use_in_sdpa():
        mine = run(attend, tensors, dout)
    assert (counted.forwards, counted.backwards) == (1, 1)
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    truth = run(lambda *t: packed_formula(*t, lengths, window), doubles, dout.double())
    assert_close(mine[0], truth[0], atol=1e-3, rtol=1e-3, check_dtype=False)
    assert_as_good(mine[1:], theirs[1:], truth[1:])


def test_rows_without_keys_have_the_bits_of_torchs_flash(counted):
    tensors = draw((1, 2, 90, 64), (1, 2, 50, 64), "cuda")
    dout = torch.randn(1, 2, 90, 64, device="cuda").to(BF16)

    def attend(q, k, v):
        return FLASH(q, k, v, 0.0, True)[0]

    assert_left_to_torch(counted, attend, tensors, dout)


@pytest.mark.parametrize("served", ["forward", "backward"])
def test_graphs_run_backward_with_the_other_kernel(counted, served):
    tensors = draw((2, 8, 300, 64), (2, 2, 300, 64), "cuda", transposed=True)
    dout = torch.randn(2, 8, 300, 64, device="cuda").to(BF16)
    theirs = with_grads(lambda *t: flash(*t, is_causal=True), tensors, dout)
    if served == "forward":
        with integrations.use_in_sdpa():
            out = flash(*tensors, is_causal=True)
        grads = torch.autograd.grad(out, tensors, dout)
        assert (counted.forwards, counted.backwards) == (1, 0)
    else:
        out = flash(*tensors, is_causal=True)
        with integrations.use_in_sdpa():
            grads = torch.autograd.grad(out, tensors, dout)
        assert (counted.forwards, counted.backwards) == (0, 1)
    assert_as_good([out.detach(), *grads], theirs, exact(tensors, dout, True, None))


def test_compiled_graphs_run_what_is_there(counted):
    def attend(q, k, v):
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return heads.transpose(1, 2).reshape(2, 128, 256) * 2

    tensors = draw((2, 4, 128, 64), None, "cuda", transposed=True)
    dout = torch.randn(2, 128, 256, device="cuda").to(BF16)
    with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
        theirs = with_grads(attend, tensors, dout)
    with integrations.use_in_sdpa():
        compiled = torch.compile(attend, fullgraph=True)
        mine = with_grads(compiled, tensors, dout)
        assert (counted.forwards, counted.backwards) == (1, 1)
    assert_close(mine, theirs, atol=3e-2, rtol=3e-2)
    without = with_grads(compiled, tensors, dout)  # the same graph, torch's kernels
    assert (counted.forwards, counted.backwards) == (1, 1)
    assert_close(without, theirs, atol=3e-2, rtol=3e-2)


def test_a_cuda_graph_holds_the_kernels(counted):
    q, k, v = (t.detach() for t in draw((1, 4, 128, 64), None, "cuda"))
    with integrations.use_in_sdpa():
        expected = flash(q, k, v)
        graph, out = cuda_graph(lambda: flash(q, k, v))
    out.zero_()
    graph.replay()
    assert_same_bits(out, expected)
    assert counted.forwards == 3
