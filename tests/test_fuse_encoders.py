"""torchweld.fuse of encoders: LayerNorms are replaced one by one."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.testing import assert_close

transformers = pytest.importorskip("transformers")

from test_fuse import Calls  # noqa: E402
from tiny_models import tiny_model  # noqa: E402
from torchweld.integrations import fuse, unfuse  # noqa: E402
from torchweld.integrations.fusion import attention_switch  # noqa: E402
from torchweld.integrations.fusion.layers import layer_norm  # noqa: E402

CLASSES = {
    "vit": "ViTModel",
    "siglip_vision_model": "SiglipVisionModel",
    "clip_vision_model": "CLIPVisionModel",
    "dinov2": "Dinov2Model",
    "whisper": "WhisperModel",
    "wav2vec2": "Wav2Vec2Model",
    "bert": "BertModel",
    "phi": "PhiModel",
}


@pytest.fixture(autouse=True)
def float32_on_a_cpu(monkeypatch):
    """Lets the norms run where torch's are faster, for exact comparisons on a CPU."""
    monkeypatch.setitem(layer_norm._DTYPES, "cpu", (torch.float32, torch.bfloat16))


def encoder(kind, device="cpu", dtype=torch.float32, **changes):
    """A model of two layers with random norms and biases, without dropout."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind]().to_dict()
    drops = {name: 0.0 for name, p in config.items() if "drop" in name and isinstance(p, float)}
    masks = {"apply_spec_augment": False} if kind == "wav2vec2" else {}
    more = {"is_decoder": kind == "phi", **drops, **masks, **changes}
    model = tiny_model(kind, CLASSES[kind], "sdpa", **more)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.7, 0.2)
    return model.to(device, dtype)


def step(model):
    """The first result of a step on the default sample, and the gradients of all parameters."""
    model.zero_grad()
    out = model(**attention_switch.sample_of(model))[0]
    torch.manual_seed(1)
    out.backward(torch.randn(out.shape).to(out))
    return out.detach(), {name: p.grad for name, p in model.named_parameters()}


def assert_same_step(model, stock):
    (out, grads), (want, want_grads) = step(model), step(stock)
    assert_close(out, want, rtol=1e-4, atol=1e-4)
    for key, grad in grads.items():
        if want_grads[key] is None:
            assert grad is None, key
            continue
        atol = 2e-5 * max(1.0, want_grads[key].abs().max().item())
        assert_close(grad, want_grads[key], rtol=1e-4, atol=atol, msg=lambda m, n=key: n + m)


def loaded_again(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def ops_of(report, kind):
    return [path for path, op in report.ops.items() if op.split(" ")[0] == kind]


@pytest.mark.parametrize("kind", CLASSES)
def test_layer_norms(device, kind):
    model = encoder(kind, device).train()
    stock = copy.deepcopy(model)
    report = fuse(model, only="norm")
    norms = [path for path, m in stock.named_modules() if type(m) is nn.LayerNorm]
    assert report.replaced == norms
    with Calls() as calls:
        assert_same_step(model, stock)
    assert calls.names["torchweld::layer_norm_forward"] == len(norms)
    assert model.state_dict().keys() == stock.state_dict().keys()
    # torch pickles no parametrised convolution.
    for each in (copy.deepcopy(model) if kind == "wav2vec2" else loaded_again(model), model):
        assert_same_step(each, stock)
        assert unfuse(each) == norms
        assert {type(m) for m in each.modules()} == {type(m) for m in stock.modules()}


@pytest.mark.parametrize("options", [{"bias": False}, {"elementwise_affine": False}], ids=str)
def test_every_affine_form_of_a_layer_norm(device, options):
    model = encoder("vit", device).train()
    model.layernorm = nn.LayerNorm(32, eps=0.1, device=device, **options)
    stock = copy.deepcopy(model)
    assert fuse(model, only="norm").ops["layernorm"] == "layer_norm"
    assert_same_step(model, stock)


def test_layer_norms_that_stay_stock():
    class TwiceNorm(nn.LayerNorm):
        def forward(self, x):
            return 2 * super().forward(x)

    model = encoder("vit").eval()
    first, second = model.layers
    first.layernorm_before = TwiceNorm(32)
    first.layernorm_after.forward = first.layernorm_after.forward
    second.layernorm_before = nn.LayerNorm((197, 32))
    second.layernorm_after.bias = nn.Parameter(torch.zeros(32, dtype=torch.float64))
    report = fuse(model, only="norm", check=False)
    assert report.replaced == ["layernorm"]
    assert dict(report.skipped) == {
        "layers.0.layernorm_before": "TwiceNorm is none of the norms that fuse knows",
        "layers.0.layernorm_after": "its forward was replaced on the instance",
        "layers.1.layernorm_before": "it normalises 2 dimensions",
        "layers.1.layernorm_after": "mixed dtypes: weight float32, bias float64",
    }


def test_layer_norms_run_where_they_are_faster(monkeypatch):
    monkeypatch.undo()
    for dtype, replaced in ((torch.float32, 0), (torch.float16, 0), (torch.bfloat16, 5)):
        model = encoder("vit", dtype=dtype).eval()
        report = fuse(model, only="norm")
        assert len(report.replaced) == replaced and len(report.skipped) == 5 - replaced
        why = f"torch's layer_norm of {str(dtype)[6:]} is as fast on cpu"
        assert {reason for _, reason in report.skipped} == ({why} if not replaced else set())


def test_a_layer_norm_that_is_cast_after_fuse_runs_stock():
    model = encoder("vit", dtype=torch.bfloat16).eval()
    fuse(model, only="norm")
    norm = model.layernorm.double()
    x = torch.randn(2, 32, dtype=torch.float64)
    assert torch.equal(norm(x), nn.functional.layer_norm(x, (32,), norm.weight, norm.bias, 1e-12))
    with pytest.raises(RuntimeError, match="normalized_shape"):  # torch's sentence
        norm(x[:, :16])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norms_under_autocast_have_the_dtype_of_stock(device, dtype):
    model = encoder("vit", device).eval()
    stock = copy.deepcopy(model.layernorm)
    fuse(model, only="norm")
    x = torch.randn(4, 32, device=device, dtype=dtype)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        got, want = model.layernorm(x), stock(x)
    assert_close(got, want)


def test_a_hook_on_a_layer_norm_sees_stock_values():
    model = encoder("bert").eval()
    stock, seen = copy.deepcopy(model), []
    fuse(model, only="norm")
    for each in (model, stock):
        each.embeddings.LayerNorm.register_forward_hook(lambda m, args, out: seen.append(out))
        step(each)
    assert_close(*seen, rtol=1e-5, atol=1e-5)
