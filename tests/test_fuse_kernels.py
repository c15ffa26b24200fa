"""fuse, attn_implementation="torchweld" and use_in_sdpa never run attention's general kernel on a
GPU: it uses no tensor cores, and torch's own back ends are faster.

Which kernel a call would run is asked of the library, with fake and meta tensors. No GPU is needed.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

transformers = pytest.importorskip("transformers")

import torchweld  # noqa: E402
from samples import BF16, F16, F32  # noqa: E402
from test_hf_attention import Layer  # noqa: E402
from test_hf_masks import Calls  # noqa: E402
from tiny_models import batch, tiny_grouped  # noqa: E402
from torchweld.info import has_cuda_kernel  # noqa: E402
from torchweld.integrations import fuse  # noqa: E402
from torchweld.integrations.attention import forward as hf_attention  # noqa: E402
from torchweld.integrations.attention import mask_numbers  # noqa: E402
from torchweld.integrations.sdpa import flash  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torchweld. no kernel for tensor cores")
cuda_build = pytest.mark.skipif(
    not has_cuda_kernel("attention"), reason="needs a build with CUDA, no GPU"
)

# The head dims of query and key, and that of value.
HEAD_DIMS = [
    *((dim, dim) for dim in (64, 96, 128, 192, 256, 320, 512)),
    *((192, 128), (128, 256), (256, 264), (576, 512)),
]
DTYPES = [F32, F16, BF16]
TOKENS = 5


def numbers(*values):
    return torch.tensor(values, dtype=torch.int32)


MASKS = {
    "none": lambda: None,
    "left padding": lambda: mask_numbers.leftpad_mask(numbers(0, 2)),
    "windows": lambda: mask_numbers.ranges(numbers(5, 5), numbers(0, 0, 1, 2, 3).expand(2, -1)),
    "bidirectional": lambda: mask_numbers.bidirectional(numbers(5, 4), numbers(0, 1)),
    "window to both sides": lambda: mask_numbers.bidirectional(numbers(5, 5), window=2),
}


def meta(value):
    return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value


def assert_tensor_cores(call):
    """A call of attention runs other kernels than the general ones, forward and backward."""
    call = {name: meta(value) for name, value in call.items()}
    assert "general" not in torchweld.explain("attention", **call).kernel
    q, k, v = (call.pop(name) for name in ("query", "key", "value"))
    out = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype, device="meta")
    lse = torch.empty(q.shape[:3], dtype=F32, device="meta")
    assert (
        "general"
        not in torchweld.explain("attention_backward", out, q, k, v, out, lse, **call).kernel
    )


def fits(dtype, *dims):
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return max(dims) <= (512 if hopper and dtype != F32 else 256)


@cuda_build
@pytest.mark.parametrize("mask", MASKS)
def test_the_attention_function(mask):
    for (dim, dim_v), dtype in itertools.product(HEAD_DIMS, DTYPES):
        with FakeTensorMode(allow_non_fake_inputs=True), Calls() as calls:
            q, k = (torch.empty(2, 2, TOKENS, dim, dtype=dtype, device="cuda") for _ in range(2))
            v = torch.empty(2, 2, TOKENS, dim_v, dtype=dtype, device="cuda")
            made = MASKS[mask]()
            made = made if made is None else made.to("cuda")
            out, _ = hf_attention.attention_forward(Layer(), q, k, v, made)
        assert out.shape == (2, TOKENS, 2, dim_v) and out.dtype == dtype
        assert len(calls.op) == fits(dtype, dim, dim_v), (dim, dim_v)
        for call in calls.op:
            assert_tensor_cores(call)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels of a GPU are chosen")
@pytest.mark.parametrize("dim", [64, 320, 520])
def test_a_call_in_16_bits_compiles_in_one_graph(dim):
    """The choice between the op and SDPA depends on the GPU, whose facts Dynamo must not read."""
    layer = Layer()

    def call(q, k, v):
        return hf_attention.attention_forward(layer, q, k, v, None)[0]

    qkv = [torch.randn(2, 2, TOKENS, dim, dtype=BF16, device="cuda") for _ in range(3)]
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*qkv), call(*qkv))


@cuda_build
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [dim for dim, dim_v in HEAD_DIMS if dim == dim_v])
def test_a_fused_model(dim, dtype):
    with FakeTensorMode():
        with torch.device("cuda"):
            config = tiny_grouped("Llama", "sdpa", head_dim=dim).config
            model = transformers.LlamaForCausalLM._from_config(config, dtype=dtype).eval()
        report = fuse(model, only="attention", check=False)
        inputs = dict.fromkeys(
            ("input_ids", "attention_mask"), torch.ones(2, TOKENS, dtype=torch.int64, device="cuda")
        )
        with Calls() as calls:
            model(**inputs)
    layers = [f"model.layers.{layer}.self_attn" for layer in range(2)]
    assert report.replaced == (layers if fits(dtype, dim) else [])
    why = "torch's scaled_dot_product_attention runs: no kernel for tensor cores has a head dim"
    assert all(reason == f"{why} above 256" for _, reason in report.skipped)
    assert len(calls.op) == len(report.replaced)
    for call in calls.op:
        assert_tensor_cores(call)


@cuda_build
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sdpa(dtype, causal):
    ends = torch.empty(3, dtype=torch.int32, device="meta")
    for dim, dim_v in HEAD_DIMS:
        sizes = {"query": dim, "key": dim, "value": dim_v}
        dense = {n: torch.empty(2, 2, 5, d, dtype=dtype, device="meta") for n, d in sizes.items()}
        packed = {n: torch.empty(9, 2, d, dtype=dtype, device="meta") for n, d in sizes.items()}
        served = dtype != F32 and dim == dim_v <= 256  # torch's flash back end has no more
        refused = flash.Dense.refusal(**dense, is_causal=causal)
        assert (refused is None) == served
        assert (flash.Varlen.refusal(**packed, cum_seq_q=ends, cum_seq_k=ends) is None) == served
        if served:
            assert_tensor_cores({**dense, "causal": causal})


def test_a_model_with_large_heads(device):
    """The general kernel of the CPU is not slower: there the op runs."""
    model = tiny_grouped("Llama", "sdpa", head_dim=264).to(device).eval()
    with torch.no_grad():
        want = model(**batch(device)).logits
        report = fuse(model, only="attention")
        assert bool(report) == (device == "cpu")
        if device == "cuda":
            assert all("above 256" in reason for _, reason in report.skipped)
        assert_close(model(**batch(device)).logits, want, rtol=1e-4, atol=1e-4)
        model.set_attn_implementation("torchweld")
        with Calls() as calls:
            model(**batch(device))
    assert len(calls.op) == (2 if device == "cpu" else 0)
