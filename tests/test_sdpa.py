"""use_in_sdpa: torchweld's kernels under SDPA, the calls that they run, and their removal.

No GPU is needed: the two kernels replace stand-ins on the CPU, below the same dispatcher and the
same autograd node. test_sdpa_gpu.py compares SDPA itself with torch's flash kernel.
"""

from __future__ import annotations

import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn import attention
from torch.testing import assert_close

import torchweld
from numerics import assert_same_bits
from samples import BF16, F16, F32
from sdpa_calls import FLASH, draw, formula, strides
from torchweld import integrations
from torchweld.info import has_cuda_kernel
from torchweld.integrations.sdpa import kernels as sdpa
from torchweld.integrations.sdpa.gpus import has_code

pytestmark = pytest.mark.skipif(
    not hasattr(attention, "register_flash_attention_impl"),
    reason="torch has no registry of flash attention implementations",
)
cuda_build = pytest.mark.skipif(
    torch.version.cuda is None or not has_cuda_kernel("attention_forward"),
    reason="needs a build with CUDA, no GPU",
)

PAIRS = (sdpa.Dense, sdpa.Varlen)
OPS = [f"aten::{name}" for pair in PAIRS for name in (pair.FORWARD, pair.BACKWARD)]


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = [torch._C._dispatch_dump(op) for op in OPS]
    order = torch._C._get_sdp_priority_order()
    yield
    assert attention.current_flash_attention_impl() is None
    assert [torch._C._dispatch_dump(op) for op in OPS] == before
    if not torch.cuda.is_available():  # where the first choice of a back end sets it
        assert torch._C._get_sdp_priority_order() == order


def meta(*sizes, dtype=BF16):
    return torch.empty(sizes, dtype=dtype, device="meta")


def call(sizes=(2, 4, 8, 32), sizes_k=None, sizes_v=None, dtype=BF16):
    sizes_k = sizes_k or sizes
    made = [meta(*s, dtype=dtype) for s in (sizes, sizes_k, sizes_v or sizes_k)]
    return dict(zip(("query", "key", "value"), made, strict=True))


# ---- which calls are served

SERVED = {
    "plain": call(),
    "causal": {**call(), "is_causal": True},
    "float16": call(dtype=F16),
    "grouped heads": call((2, 8, 5, 64), (2, 2, 5, 64)),
    "more keys, causal": {**call((1, 2, 3, 8), (1, 2, 9, 8)), "is_causal": True},
    "more queries": call((1, 2, 9, 8), (1, 2, 3, 8)),
    "one query, causal": {**call((1, 2, 1, 8), (1, 2, 9, 8)), "is_causal": True},
    "head dim 256, scale": {**call((1, 2, 9, 256)), "scale": -2.0},
    "transposed": {name: t.transpose(1, 2) for name, t in call().items()},
    "expanded": {**call(), "key": meta(1, 4, 8, 32).expand(2, -1, -1, -1)},
}
NOT_SERVED = {
    "dropout_p": {**call(), "dropout_p": 0.1},
    "return_debug_mask": {**call(), "return_debug_mask": True},
    "float16 or bfloat16": call(dtype=F32),
    "not float16": {**call(), "key": meta(2, 4, 8, 32, dtype=F16)},
    "not 4-D": {**call(), "query": meta(4, 8, 32)},
    "devices": {**call(), "value": torch.empty(2, 4, 8, 32, dtype=BF16)},
    "belong together": call(sizes_v=(2, 4, 8, 64)),
    "don't belong": call((2, 4, 8, 32), (1, 4, 8, 32)),
    "size is 0": call((2, 4, 0, 32)),
    "is 0": call((2, 4, 8, 32), (2, 4, 0, 32)),
    "heads of key": call((2, 4, 8, 32), (2, 3, 8, 32)),
    "head dim": call((2, 4, 8, 20)),
    "above 256": call((2, 4, 8, 264)),
    "contiguous": {**call(), "query": meta(2, 4, 32, 8).transpose(2, 3)},
    "no key": {**call((1, 2, 9, 8), (1, 2, 3, 8)), "is_causal": True},
    "not finite": {**call(), "scale": math.inf},
    "scale is not": {**call(), "scale": math.nan},
}


@pytest.mark.parametrize("arguments", SERVED.values(), ids=SERVED)
def test_what_is_served(arguments):
    assert sdpa.Dense.refusal(**arguments) is None


@pytest.mark.parametrize("reason", NOT_SERVED)
def test_what_is_left_to_torch(reason):
    assert reason in sdpa.Dense.refusal(**NOT_SERVED[reason])


def test_nested_tensors_are_left_to_torch():
    nested = torch.nested.nested_tensor([torch.randn(2, 3, 8), torch.randn(2, 5, 8)])
    assert sdpa.Dense.refusal(nested, nested, nested) == "nested tensors"


def saved(**changes):
    out = meta(2, 4, 8, 32)
    given = {**call(), "grad_out": out, "out": out, "logsumexp": meta(2, 4, 8, dtype=F32)}
    given |= {"cum_seq_q": None, "cum_seq_k": None, "dropout_p": 0.0, "is_causal": True}
    return {**given, **changes}


def test_the_gradient_is_served_by_what_was_saved():
    assert sdpa.Dense.backward_refusal(**saved()) is None
    for reason, changes in {
        "packed": {"cum_seq_q": meta(3, dtype=torch.int32)},
        "dropout_p": {"dropout_p": 0.5},
        "logsumexp": {"logsumexp": meta(2, 4, 128, dtype=F32)},
        "float32": {"logsumexp": meta(2, 4, 8)},
        "like query": {"grad_out": meta(2, 4, 8, 32, dtype=F32)},
        "devices": {"out": torch.empty(2, 4, 8, 32, dtype=BF16)},
        "no key": {"key": meta(2, 4, 5, 32), "value": meta(2, 4, 5, 32)},
    }.items():
        assert reason in sdpa.Dense.backward_refusal(**saved(**changes))


def test_gpu_code_and_gpus():
    assert has_code((9, 0), ["9.0a"]) and has_code((8, 6), ["8.0"])
    assert has_code((12, 0), ["9.0a", "8.0+PTX"]) and has_code((8, 0), [])
    assert has_code((8, 0), ["Ampere"])
    assert not has_code((8, 0), ["9.0a"]) and not has_code((10, 0), ["9.0a", "8.0"])
    assert not has_code((10, 0), ["9.0a+PTX"]) and not has_code((8, 0), ["8.6+PTX"])


# ---- the kernels below torch's dispatcher and autograd, on the CPU


class StandIn:
    """Replaces torch's flash kernels and counts its calls."""

    def __init__(self):
        self.forwards = self.backwards = 0

    def forward(self, q, k, v, dropout_p=0.0, is_causal=False, debug=False, *, scale=None):
        self.forwards += 1
        out, lse = formula(q, k, v, is_causal, scale)
        seed, offset = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
        laid_out = torch.empty_like(q).copy_(out)
        more = (None, None, q.size(2), k.size(2), seed, offset, q.new_empty(0))
        return laid_out, lse.float(), *more

    def backward(self, dout, q, k, v, out, lse, cum_q, cum_k, *rest, scale=None):
        self.backwards += 1
        assert cum_q is None and cum_k is None
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        group = q.shape[1] // k.shape[1]
        dout, wide_q, out = dout.double(), q.double(), out.double()
        wide_k, wide_v = (t.double().repeat_interleave(group, 1) for t in (k, v))
        weights = (wide_q @ wide_k.mT * scale - lse.double()[..., None]).exp()
        if rest[3]:
            weights = weights.tril(k.shape[2] - q.shape[2])
        dscores = weights * (dout @ wide_v.mT - (dout * out).sum(-1, keepdim=True)) * scale
        grads = (dscores @ wide_k, dscores.mT @ wide_q, weights.mT @ dout)
        return tuple(
            torch.empty_like(t).copy_(grad.unflatten(1, (t.shape[1], -1)).sum(2))
            for grad, t in zip(grads, (q, k, v), strict=True)
        )


@pytest.fixture
def stand_in():
    made = StandIn()
    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl(sdpa.Dense.FORWARD, made.forward)
    library.impl(sdpa.Dense.BACKWARD, made.backward)
    yield made
    library._destroy()


CASES = [
    ((2, 4, 16, 32), None, True, None),
    ((2, 4, 16, 32), None, False, 0.3),
    ((1, 6, 7, 24), (1, 2, 7, 24), True, None),
    ((2, 2, 5, 16), (2, 1, 13, 16), True, 1.5),
    ((2, 2, 13, 16), (2, 2, 5, 16), False, None),
    ((2, 2, 1, 64), (2, 2, 40, 64), True, None),
]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("sizes, sizes_k, is_causal, scale", CASES, ids=str)
def test_a_served_call_is_the_formula_in_torchs_layout(
    stand_in, sizes, sizes_k, is_causal, scale, transposed
):
    q, k, v = draw(sizes, sizes_k, transposed=transposed)
    kernels = sdpa.Kernels("CPU", (sdpa.Dense,))
    try:
        results = FLASH(q, k, v, 0.0, is_causal, scale=scale)
        dout = torch.randn_like(results[0])
        grads = torch.autograd.grad(results[0], (q, k, v), dout)
    finally:
        kernels.remove()
    assert (stand_in.forwards, stand_in.backwards) == (0, 0)
    # Dtypes, sizes and strides equal those of torch's meta kernel.
    expected = FLASH(*(t.to("meta") for t in (q, k, v)), 0.0, is_causal, scale=scale)
    for mine, theirs in zip(results, expected, strict=True):
        if isinstance(theirs, torch.Tensor):
            assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        else:
            assert mine == theirs
    assert strides(results[0]) == strides(torch.empty_like(q))
    assert results[1].is_contiguous()
    for grad, t in zip(grads, (q, k, v), strict=True):
        assert grad.dtype == t.dtype and strides(grad) == strides(torch.empty_like(t))
    out, lse = formula(*(t.detach() for t in (q, k, v)), is_causal, scale)
    assert_close(results[0], out, atol=2e-2, rtol=2e-2, check_dtype=False)
    assert_close(results[1], lse, atol=1e-3, rtol=1e-3, check_dtype=False)
    out = torchweld.attention(q, k, v, causal=is_causal, scale=scale)
    assert_same_bits(results[0], out)
    assert_same_bits(grads, torch.autograd.grad(out, (q, k, v), dout))


@pytest.mark.parametrize(
    "sizes, sizes_k, numbers",
    [
        ((1, 2, 8, 16), None, (0.25, True)),
        ((1, 2, 8, 16), (1, 2, 5, 16), (0.0, True)),
        ((1, 2, 8, 12), None, (0.0, False)),
    ],
    ids=["dropout", "rows without keys", "head dim"],
)
def test_what_is_not_served_runs_the_kernel_that_was_there(stand_in, sizes, sizes_k, numbers):
    q, k, v = draw(sizes, sizes_k)
    former = FLASH(q, k, v, *numbers)
    former_grads = torch.autograd.grad(former[0].sum(), (q, k, v))
    kernels = sdpa.Kernels("CPU", (sdpa.Dense,))
    try:
        results = FLASH(q, k, v, *numbers)
        grads = torch.autograd.grad(results[0].sum(), (q, k, v))
    finally:
        kernels.remove()
    assert (stand_in.forwards, stand_in.backwards) == (2, 2)
    assert_same_bits(results[0], former[0])
    assert_same_bits(results[1], former[1])
    assert_same_bits(grads, former_grads)


@pytest.mark.parametrize("served_forward", [True, False])
def test_a_graph_runs_backward_with_the_other_kernel(stand_in, served_forward):
    q, k, v = draw((2, 4, 9, 16), (2, 2, 9, 16))
    dout = torch.randn(2, 4, 9, 16).to(BF16)
    whole = torch.autograd.grad(FLASH(q, k, v, 0.0, True)[0], (q, k, v), dout)
    calls = (stand_in.forwards, stand_in.backwards)
    assert calls == (1, 1)
    if served_forward:
        kernels = sdpa.Kernels("CPU", (sdpa.Dense,))
        out = FLASH(q, k, v, 0.0, True)[0]
        kernels.remove()
        mixed = torch.autograd.grad(out, (q, k, v), dout)
        assert (stand_in.forwards, stand_in.backwards) == (1, 2)
    else:
        out = FLASH(q, k, v, 0.0, True)[0]
        kernels = sdpa.Kernels("CPU", (sdpa.Dense,))
        mixed = torch.autograd.grad(out, (q, k, v), dout)
        kernels.remove()
        assert (stand_in.forwards, stand_in.backwards) == (2, 1)
    assert_close(mixed, whole, atol=5e-2, rtol=5e-2)


def test_autocast_and_expanded_gradients(stand_in):
    q, k, v = draw((1, 2, 8, 16), dtype=F16)
    kernels = sdpa.Kernels("CPU", (sdpa.Dense,))
    try:
        with torch.autocast("cpu", dtype=BF16):
            out = FLASH(q, k, v, 0.0, True)[0]
            out.sum().backward()
    finally:
        kernels.remove()
    assert out.dtype == q.grad.dtype == F16
    assert (stand_in.forwards, stand_in.backwards) == (0, 0)


def test_a_compiled_graph_runs_what_is_there_when_it_is_called(stand_in):
    def attend(q, k, v):
        return FLASH(q, k, v, 0.0, True)[0]

    q, k, v = draw((1, 2, 8, 16), transposed=True)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    compiled(q, k, v).sum().backward()
    assert (stand_in.forwards, stand_in.backwards) == (1, 1)
    theirs, q.grad = q.grad, None
    kernels = sdpa.Kernels("CPU", (sdpa.Dense,))
    try:
        compiled(q, k, v).sum().backward()
    finally:
        kernels.remove()
    assert (stand_in.forwards, stand_in.backwards) == (1, 1)
    assert_close(q.grad, theirs, atol=5e-2, rtol=5e-2)


# ---- torch's registry and the handle


def kernel_of(op):
    return repr(torch.library.get_kernel(op, "CUDA"))


@cuda_build
def test_the_kernels_come_and_go_with_the_handle():
    before = [kernel_of(op) for op in OPS]
    handle = integrations.use_in_sdpa()
    assert attention.current_flash_attention_impl() == "torchweld"
    assert "torchweld" in attention.list_flash_attention_impls()
    assert all(a != b for a, b in zip(before, map(kernel_of, OPS), strict=True))
    handle.remove()
    assert attention.current_flash_attention_impl() is None
    assert [kernel_of(op) for op in OPS] == before
    handle.remove()


@cuda_build
def test_calls_nest():
    with integrations.use_in_sdpa():
        present = [kernel_of(op) for op in OPS]
        with integrations.use_in_sdpa() as inner:
            assert [kernel_of(op) for op in OPS] == present
            inner.remove()
        assert attention.current_flash_attention_impl() == "torchweld"
        assert [kernel_of(op) for op in OPS] == present
    assert attention.current_flash_attention_impl() is None
    with pytest.raises(ZeroDivisionError), integrations.use_in_sdpa():
        raise ZeroDivisionError
    assert attention.current_flash_attention_impl() is None


@pytest.fixture
def other():
    """Another implementation in the registry, which counts."""
    state = SimpleNamespace(active=0)

    def register():
        state.active += 1
        return SimpleNamespace(remove=lambda: setattr(state, "active", state.active - 1))

    attention.register_flash_attention_impl("other", register_fn=register)
    yield state
    if attention.current_flash_attention_impl() is not None:
        attention.restore_flash_attention_impl()
    del attention._registry._FLASH_ATTENTION_IMPLS["other"]


@cuda_build
def test_the_implementation_that_was_active_comes_back(other):
    attention.activate_flash_attention_impl("other")
    with integrations.use_in_sdpa():
        assert (attention.current_flash_attention_impl(), other.active) == ("torchweld", 0)
        with integrations.use_in_sdpa():
            pass
        assert other.active == 0
    assert (attention.current_flash_attention_impl(), other.active) == ("other", 1)


@cuda_build
def test_what_torch_has_taken_back_stays_so(other):
    handle = integrations.use_in_sdpa()
    attention.restore_flash_attention_impl()
    assert attention.current_flash_attention_impl() is None
    again = integrations.use_in_sdpa()
    handle.remove()  # of the former activation
    assert attention.current_flash_attention_impl() == "torchweld"
    attention.activate_flash_attention_impl("other")
    again.remove()
    assert (attention.current_flash_attention_impl(), other.active) == ("other", 1)


@cuda_build
def test_flash_comes_first_and_the_order_comes_back(monkeypatch):
    order = [3, 1, 2, 0, 4]
    assert sdpa.flash_first(order) == [1, 3, 2, 0, 4]
    assert sdpa.flash_first([1, 2, 0]) == [1, 2, 0]
    state = SimpleNamespace(order=order, chosen=0)

    def choose(*tensors):
        state.chosen += 1

    # Simulate an initialised CUDA on a GPU where cuDNN has priority.
    monkeypatch.setattr(torch.cuda, "_lazy_call", lambda function: function())
    monkeypatch.setattr(sdpa.torch, "empty", lambda *a, **k: None)
    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    monkeypatch.setattr(torch._C, "_get_sdp_priority_order", lambda: state.order)
    monkeypatch.setattr(
        torch._C, "_set_sdp_priority_order", lambda new: setattr(state, "order", new)
    )
    handle = integrations.use_in_sdpa()
    assert state.order == [1, 3, 2, 0, 4] and state.chosen == 1
    handle.remove()
    assert state.order == order
    handle = integrations.use_in_sdpa()
    state.order = [2, 1, 3, 0, 4]  # set by other code
    handle.remove()
    assert state.order == [2, 1, 3, 0, 4]


@cuda_build
def test_nothing_initialises_cuda_or_warns():
    code = (
        "import torch, torchweld.integrations as i\n"
        "with i.use_in_sdpa(): assert not torch.cuda.is_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True)
    assert done.returncode == 0 and not done.stderr, done.stderr.decode()


def test_a_torch_without_the_registry(monkeypatch):
    monkeypatch.delattr(attention, "register_flash_attention_impl")
    with pytest.raises(RuntimeError, match=r"use_in_sdpa: torch must have .* torch 2\.11 .* lacks"):
        integrations.use_in_sdpa()


def test_a_build_without_cuda(monkeypatch):
    monkeypatch.setattr(sdpa, "has_cuda_kernel", lambda op: False)
    with pytest.raises(RuntimeError, match="use_in_sdpa: torchweld must be built with CUDA"):
        integrations.use_in_sdpa()


def test_a_torch_without_cuda(monkeypatch):
    monkeypatch.setattr(sdpa, "has_cuda_kernel", lambda op: True)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(RuntimeError, match="use_in_sdpa: torch must be built with CUDA"):
        integrations.use_in_sdpa()
