"""torchweld.fuse of encoders: their LayerNorms, and MLPs without a gate."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

transformers = pytest.importorskip("transformers")

from fused_parts import choose_as_on_a_gpu  # noqa: E402
from test_fuse import Calls  # noqa: E402
from tiny_models import saved_and_loaded, tiny_model, with_random_vectors  # noqa: E402
from torchweld.integrations import fuse, unfuse  # noqa: E402
from torchweld.integrations.fusion import attention_switch  # noqa: E402
from torchweld.integrations.fusion.layers import heads  # noqa: E402

CLASSES = {
    "vit": "ViTModel",
    "siglip_vision_model": "SiglipVisionModel",
    "clip_vision_model": "CLIPVisionModel",
    "dinov2": "Dinov2Model",
    "dinov3_vit": "DINOv3ViTModel",
    "internvl_vision": "InternVLVisionModel",
    "whisper": "WhisperModel",
    "wav2vec2": "Wav2Vec2Model",
    "hubert": "HubertModel",
    "bert": "BertModel",
    "phi": "PhiModel",
    "gpt_neox": "GPTNeoXModel",
    "starcoder2": "Starcoder2Model",
    "opt": "OPTModel",
    "m2m_100": "M2M100Model",
    "moonshine": "MoonshineModel",
    "t5": "T5Model",
}
MORE = {
    "siglip_vision_model": {"vision_use_head": False},
    "internvl_vision": {"image_size": [32, 32], "patch_size": [16, 16]},
    "dinov3_vit": {"pos_embed_rescale": None},  # it is random in training mode
    "whisper": {"max_source_positions": 32},
    "wav2vec2": {"apply_spec_augment": False, "conv_dim": [32] * 7},
    "hubert": {"apply_spec_augment": False, "conv_dim": [32] * 7, "do_stable_layer_norm": True},
}
DECODERS = ("phi", "gpt_neox", "starcoder2", "opt")
# another activation; layers that hold the products
SPEECH = ("wav2vec2", "hubert")
NO_MLP = ("clip_vision_model", "whisper", "m2m_100", "moonshine", "opt")
# How many layers run add_layer_norm, and layer_norm_linears, where it is not two. Phi's norm feeds
# two modules, GPT-NeoX's layers add three tensors at once, OPT's change the shape of the sum, and
# Wav2Vec2's normalise behind the attention.
PARTS = {
    "whisper": (6, 4),  # two behind the two attentions of a decoder layer
    "m2m_100": (6, 4),
    "moonshine": (10, 8),  # of six encoder layers
    "wav2vec2": (0, 0),
    "bert": (4, 0),
    "phi": (0, 0),
    "gpt_neox": (0, 2),
    "opt": (0, 2),
}
# of older transformers, whose layers have more modules inside of one another
NESTED = {"vit": (0, 0), "dinov2": (2, 0)}


@pytest.fixture(autouse=True)
def ops_on_a_cpu(monkeypatch):
    """For exact comparisons on a CPU."""
    choose_as_on_a_gpu(monkeypatch)


def encoder(kind, device="cpu", dtype=torch.float32, **changes):
    """A model of two layers with random norms and biases, without dropout."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind]().to_dict()
    drops = {name: 0.0 for name, p in config.items() if "drop" in name and isinstance(p, float)}
    more = {"is_decoder": kind in DECODERS, **drops, **MORE.get(kind, {}), **changes}
    try:
        model = tiny_model(kind, CLASSES[kind], "sdpa", **more)
    except ValueError as error:
        pytest.skip(f"this transformers has no such model: {error}")
    return with_random_vectors(model).to(device, dtype)


def vit(device="cpu", **changes):
    model = encoder("vit", device, **changes)
    if not hasattr(model, "layers"):
        pytest.skip("a ViT of this transformers has other parts")
    return model


def step(model, batch=None):
    """The first result of a step on the default sample, and the gradients of all parameters."""
    model.zero_grad()
    out = model(**(batch or attention_switch.sample_of(model)))
    out = out if isinstance(out, torch.Tensor) else out[0]
    torch.manual_seed(1)
    out.backward(torch.randn(out.shape).to(out))
    return out.detach(), {name: p.grad for name, p in model.named_parameters()}


def assert_same_step(model, stock, batch=None):
    (out, grads), (want, want_grads) = step(model, batch), step(stock, batch)
    assert_close(out, want, rtol=1e-4, atol=1e-4)
    for key, grad in grads.items():
        if want_grads[key] is None or want_grads[key].numel() == 0:
            assert (grad is None) == (want_grads[key] is None), key
            continue
        atol = 2e-5 * max(1.0, want_grads[key].abs().max().item())
        assert_close(grad, want_grads[key], rtol=1e-4, atol=atol, msg=lambda m, n=key: n + m)


@pytest.mark.parametrize("kind", [kind for kind in CLASSES if kind != "t5"])
def test_layer_norms(device, kind):
    model = encoder(kind, device).train()
    stock = copy.deepcopy(model)
    report = fuse(model, only="norm")
    norms = [path for path, m in stock.named_modules() if type(m) is nn.LayerNorm]
    assert {*report.replaced} == {*norms}
    nested = any(path.endswith("attention.attention") for path, _ in stock.named_modules())
    adds, projections = NESTED.get(kind, (2, 2)) if nested else PARTS.get(kind, (2, 2))
    wanted = {
        "add_layer_norm": adds,
        "layer_norm_linears": projections,
        "layer_norm": len(norms) - adds - projections,
    }
    assert Counter(op.split(" ")[0] for op in report.ops.values()) == Counter(wanted)
    assert report.calls == {f"torchweld::{op}": n for op, n in wanted.items() if n}
    with Calls() as calls:
        assert_same_step(model, stock)
    for op, count in wanted.items():
        assert calls.names[f"torchweld::{op}_forward"] == count
        # CLIP's last norm is not in front of the first result.
        assert op == "layer_norm" or calls.names[f"torchweld::{op}_backward"] == count
    assert model.state_dict().keys() == stock.state_dict().keys()
    # torch pickles no parametrised convolution.
    for each in (copy.deepcopy(model) if kind in SPEECH else saved_and_loaded(model), model):
        assert_same_step(each, stock)
        assert {*unfuse(each)} == {*norms}
        assert {type(m) for m in each.modules()} == {type(m) for m in stock.modules()}


TOWERS = {
    "qwen2_vl": ("Qwen2VisionTransformerPretrainedModel", "embed_dim"),
    "qwen3_vl": ("Qwen3VLVisionModel", "hidden_size"),
    "siglip2_vision_model": ("Siglip2VisionModel", "hidden_size"),
}


@pytest.mark.parametrize("kind", TOWERS)
def test_vision_towers_of_packed_images(device, kind):
    name, width = TOWERS[kind]
    if kind not in transformers.CONFIG_MAPPING or not hasattr(transformers, name):
        pytest.skip("not in this transformers")
    config = transformers.CONFIG_MAPPING[kind]()
    config = getattr(config, "vision_config", config)
    sizes = {width: 32, "depth": 2, "num_hidden_layers": 2, "intermediate_size": 48}
    heads = {"num_heads": 4, "num_attention_heads": 4, "deepstack_visual_indexes": []}
    for key, value in {**sizes, **heads}.items():
        if hasattr(config, key):
            setattr(config, key, value)
    torch.manual_seed(0)
    model = getattr(transformers, name)._from_config(config, attn_implementation="sdpa")
    model = model.to(device).train()
    stock = copy.deepcopy(model)
    patch = config.patch_size**2 * 3 * getattr(config, "temporal_patch_size", 1)
    pixels, grid = torch.randn(24, patch, device=device), [[1, 2, 4], [1, 4, 4]]
    if kind.startswith("siglip2"):
        batch = {
            "pixel_values": pixels.view(2, 12, patch),
            "pixel_attention_mask": torch.ones(2, 12, dtype=torch.int64, device=device),
            "spatial_shapes": torch.tensor([[3, 4], [2, 6]]),
        }
    else:
        batch = {"hidden_states": pixels, "grid_thw": torch.tensor(grid, device=device)}
    report = fuse(model, sample=batch, only=["norm", "rotary"])
    assert report.calls["torchweld::add_layer_norm"] == 2
    assert report.calls["torchweld::layer_norm_linears"] == 2
    assert report.calls.get("torchweld::rotary", 0) == (0 if kind.startswith("siglip2") else 2)
    assert_same_step(model, stock, batch)


@pytest.mark.parametrize("kind", ["siglip_vision_model", "whisper", "starcoder2"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_recorded_outputs_of_layers_equal_stock(device, kind, checkpointing):
    model = encoder(kind, device).train()
    model.set_attn_implementation("eager")  # which returns weights
    stock = copy.deepcopy(model)
    fuse(model, only=["norm", "mlp"])
    batch, runs = attention_switch.sample_of(model), []
    wanted = {"output_hidden_states": True, "output_attentions": not checkpointing}
    for each in (model, stock):
        if checkpointing:
            each.gradient_checkpointing_enable({"use_reentrant": False})
        with Calls() as calls:
            leaves = tree_leaves(each(**batch, **wanted).to_tuple())
        runs.append([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
        assert (calls.names["torchweld::layer_norm_linears_forward"] > 0) == (each is model)
    assert_close(*runs, rtol=1e-4, atol=1e-4)
    assert_same_step(model, stock)


def test_whispers_attention_reads_the_heads_without_copies(device):
    model = encoder("whisper", device).train()
    stock = copy.deepcopy(model)
    report = fuse(model, only="attention")
    places = [path for path in report.replaced if path.endswith(".heads")]
    assert len(places) == 6 and len(report.replaced) == 12 and report.max_abs_diff < 1e-4
    assert {report.ops[path] for path in places} == {"attention (heads without copies)"}
    batch = {**attention_switch.sample_of(model), "use_cache": False}  # a cache has copies

    def copies(model):
        with Calls() as calls:
            step(model, batch)
        return calls.names["aten::clone"]

    assert copies(model) == 0 < copies(stock)
    for each in (model, saved_and_loaded(model), copy.deepcopy(model)):
        assert_same_step(each, stock)
    other = copy.deepcopy(model)
    other.set_attn_implementation("sdpa")
    assert copies(other) == copies(stock)
    assert {*places} <= {*unfuse(model)} and copies(model) == copies(stock)


def makes_copies(self, x):
    return x.transpose(1, 2).contiguous()


def names_its_attention(self):
    return self.config._attn_implementation


def test_a_forward_that_cannot_be_compiled_again_keeps_its_copies():
    made, offset = {}, 1
    exec("def forward(self, x):\n    return x.transpose(1, 2).contiguous()", made)

    def reads_another(self, x):
        return x.transpose(1, 2).contiguous() + offset

    for forward in (made["forward"], reads_another):
        assert heads._without_copies(forward) is forward
    x = torch.randn(2, 3, 4)
    assert not heads._without_copies(makes_copies)(None, x).is_contiguous()
    assert heads._without_copies(names_its_attention)(None) == "torchweld"


@pytest.mark.parametrize("kind", ["vit", "whisper", "hubert"])
def test_dropouts_of_layers_draw_as_in_stock(device, kind):
    config = transformers.CONFIG_MAPPING[kind]()
    names = ("hidden_dropout_prob", "hidden_dropout", "dropout", "activation_dropout")
    drops = {name: 0.25 for name in names if hasattr(config, name)}
    model = encoder(kind, device, **drops).train()
    stock, runs = copy.deepcopy(model), []
    adds = sum(op.startswith("add") for op in fuse(model, only="norm").ops.values())
    for each in (model, stock):
        torch.manual_seed(3)
        with Calls() as calls:
            runs.append(step(each))
        assert calls.names["torchweld::add_layer_norm_forward"] == (adds if each is model else 0)
    (out, grads), (want, want_grads) = runs
    assert_close(out, want, rtol=1e-4, atol=1e-4)
    for key, grad in grads.items():
        if grad is not None:
            assert_close(grad, want_grads[key], rtol=1e-3, atol=1e-4)


class Block(nn.Module):
    """A layer with its norms in front."""

    def __init__(self, attention):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attention, self.mlp = attention, MLP()
        self.mlp.drop = nn.Identity()

    def normed(self, x):
        return self.norm1(x)

    def summed(self, x, h):
        return x + h

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        h, _ = self.attention(self.normed(hidden_states), attention_mask, **kwargs)
        x = self.summed(hidden_states, h)
        return x + self.mlp(self.norm2(x))


class ScalingBlock(Block):
    """Other values than the norm's and the sum go on."""

    def normed(self, x):
        return 2 * self.norm1(x)

    def summed(self, x, h):
        return (x + h).clamp(-3, 3)


class ReadingBlock(Block):
    """Reads the shape of the norm's result, and the values of the sum."""

    def normed(self, x):
        n = self.norm1(x)
        self.seen = n.shape
        return n

    def summed(self, x, h):
        x = h + x
        self.seen = x.detach().abs().mean()
        return x


class TwiceNorm(nn.LayerNorm):
    def forward(self, x):
        return 2 * super().forward(x)


def with_blocks(kind, device="cpu"):
    model = vit(device)
    torch.manual_seed(2)
    for i, layer in enumerate(model.layers):
        model.layers[i] = kind(layer.attention).to(device)
    return model.train()


OPS = ("add_layer_norm", "layer_norm_linears")


@pytest.mark.parametrize(
    ("kind", "ops"), [(Block, (2, 2)), (ScalingBlock, (0, 0)), (ReadingBlock, (0, 2))]
)
def test_a_block_runs_its_own_forward(device, kind, ops):
    model = with_blocks(kind, device)
    stock = copy.deepcopy(model)
    fuse(model, only="norm")
    with Calls() as calls:
        assert_same_step(model, stock)
    assert tuple(calls.names[f"torchweld::{name}_forward"] for name in OPS) == ops


@pytest.mark.parametrize(
    ("change", "ops"),
    [
        ("norm1", (1, 1)),
        ("norm2", (1, 1)),
        ("attention", (2, 1)),
        ("attention.k_proj", (2, 1)),
        ("subclass", (2, 1)),
        ("cast", (2, 1)),
    ],
)
def test_changes_of_a_block_after_fuse_are_as_in_stock(device, change, ops):
    """A hook on one of its modules, and another class or dtype of its norm."""
    model, seen = with_blocks(Block, device).eval(), []
    stock = copy.deepcopy(model)
    fuse(model, only="norm")
    for each in (model, stock):
        block = each.layers[0]
        if change == "subclass":
            block.norm1 = TwiceNorm(32, device=device)
        elif change == "cast":
            block.norm1.bfloat16()
        else:
            hook = lambda m, args, out: seen.append((args[0], out))  # noqa: E731
            block.get_submodule(change).register_forward_hook(hook)
    batch, runs = attention_switch.sample_of(model), []
    for each in (model, stock):
        with Calls() as calls:
            try:
                runs.append(each(**batch)[0])
            except RuntimeError as error:  # torch's norm refuses two dtypes
                runs.append(str(error))
        if each is model and change != "cast":
            assert tuple(calls.names[f"torchweld::{name}_forward"] for name in OPS) == ops
    if change == "cast":
        assert runs[0] == runs[1]
        return
    assert_close(*runs, rtol=1e-4, atol=1e-4)
    assert len(seen) == (0 if change == "subclass" else 2)
    if seen:
        assert_close(*seen, rtol=1e-4, atol=1e-4)


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

    model = vit().eval()
    first, second = model.layers
    first.layernorm_before = TwiceNorm(32)
    first.layernorm_after.forward = first.layernorm_after.forward
    second.layernorm_before = nn.LayerNorm((197, 32))
    second.layernorm_after.bias = nn.Parameter(torch.zeros(32, dtype=torch.float64))
    report = fuse(model, only="norm", check=False)
    assert report.replaced == ["layernorm"]
    assert dict(report.skipped) == {
        "layers.0.layernorm_before": f"{TwiceNorm.__module__}.{TwiceNorm.__qualname__} has the "
        "parts of a LayerNorm and computes something else",
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
    assert torch.equal(norm(x), F.layer_norm(x, (32,), norm.weight, norm.bias, 1e-12))
    with pytest.raises(RuntimeError, match="normalized_shape"):  # torch's sentence
        norm(x[:, :16])


@pytest.mark.parametrize("affine", [False, True])
def test_torchs_rms_norm(device, affine):
    model = encoder("vit", device).train()
    model.layernorm = nn.RMSNorm(32, eps=0.1, elementwise_affine=affine, device=device)
    if affine:
        nn.init.normal_(model.layernorm.weight)
    stock = copy.deepcopy(model)
    assert fuse(model, only="norm").ops["layernorm"] == "rms_norm"
    with Calls() as calls:
        assert_same_step(model, stock)
    assert calls.names["torchweld::rms_norm_forward"] == 1
    assert_same_step(saved_and_loaded(model), stock)
    assert "layernorm" in unfuse(model) and type(model.layernorm) is nn.RMSNorm


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (lambda: nn.RMSNorm((4, 32), 1e-6), "it normalises 2 dimensions"),
        (lambda: nn.RMSNorm(32), "its eps depends on the dtype of the input"),
        (lambda: nn.RMSNorm(32, 1e-6, dtype=torch.float64), "it is float64"),
    ],
)
def test_torchs_rms_norms_that_stay_stock(norm, reason):
    model = encoder("vit")
    model.layernorm = norm()
    assert dict(fuse(model, only="norm", check=False).skipped)["layernorm"] == reason


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


class PostNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.norm, self.drop = nn.Linear(32, 32), nn.LayerNorm(32), nn.Dropout(0.25)

    def forward(self, x, residual):
        return self.norm(self.drop(self.dense(x)) + residual)


class LateDropout(PostNorm):
    def forward(self, x, residual):
        return self.norm(self.drop(self.dense(x) + residual))


class NormFirst(PostNorm):
    def forward(self, x, residual):
        return self.norm(self.drop(self.dense(x))) + residual


class Subtracting(PostNorm):
    def forward(self, x, residual):
        return self.norm(self.drop(self.dense(x)) - residual)


def with_post_norms(kind, device="cpu"):
    """A BERT with other modules behind its attention, and its second layer's."""
    model = encoder("bert", device)
    torch.manual_seed(2)
    for layer in model.encoder.layer:
        layer.attention.output = kind().to(device)
    return model, model.encoder.layer[1].attention.output


@pytest.mark.parametrize("kind", [LateDropout, NormFirst, Subtracting])
def test_additions_and_norms_that_compute_something_else_stay_stock(kind):
    model, module = with_post_norms(kind)
    report = fuse(model, only="norm", check=False)
    path = "encoder.layer.1.attention.output.norm"
    assert report.ops[path] == "layer_norm" and type(module) is kind
    assert dict(report.skipped)[path] == (
        f"test_fuse_encoders.{kind.__name__} has the parts of an addition and a norm and computes "
        "something else"
    )


def test_an_addition_and_a_norm_with_dropout_in_training_mode(device):
    model, module = with_post_norms(PostNorm, device)
    stock = copy.deepcopy(module).train()
    fuse(model, only="norm")
    runs, x = [], torch.randn(2, 2, 3, 32, device=device)
    for each in (module.train(), stock):
        torch.manual_seed(3)
        with Calls() as calls:
            runs.append(each(*x))
        assert calls.names["torchweld::add_layer_norm_forward"] == (each is module)
    assert_close(*runs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["hook", "double", "broadcast", "names", "autocast"])
def test_additions_and_norms_that_run_stock(case):
    model, module = with_post_norms(PostNorm)
    stock, seen = copy.deepcopy(module).eval(), []
    fuse(model.eval(), only="norm")
    x, residual = torch.randn(2, 2, 3, 32)
    for each in (module, stock):
        if case == "hook":
            each.norm.register_forward_hook(lambda m, args, out: seen.append(args[0]))
        elif case == "double":
            each.norm.double()
    residual = {"broadcast": residual[:, :1], "autocast": residual.bfloat16()}.get(case, residual)
    residual = residual.double() if case == "double" else residual
    call = {"x": x, "residual": residual} if case == "names" else {}
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"), Calls() as calls:
        got, want = (each(*(() if call else (x, residual)), **call) for each in (module, stock))
    assert not any("add_layer_norm" in name for name in calls.names)
    assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert len(seen) == 2 * (case == "hook")
    if seen:
        assert_close(*seen, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [kind for kind in CLASSES if kind not in NO_MLP])
def test_mlps_without_a_gate(device, kind):
    model = encoder(kind, device).train()
    stock = copy.deepcopy(model)
    report = fuse(model, only="mlp")
    mlps = report.replaced
    assert len(mlps) == (4 if kind == "t5" else 2) and not report.skipped
    assert all(op.startswith("linear (") for op in report.ops.values())
    with Calls() as calls:
        assert_same_step(model, stock)
    assert calls.names["torchweld::linear_forward"] == len(mlps)
    assert calls.names["torchweld::linear_backward"] == len(mlps)
    for each in (copy.deepcopy(model) if kind in SPEECH else saved_and_loaded(model), model):
        assert_same_step(each, stock)
        assert unfuse(each) == mlps
        assert {type(m) for m in each.modules()} == {type(m) for m in stock.modules()}


def test_the_gated_mlp_of_t5(device):
    model = encoder("t5", device, feed_forward_proj="gated-gelu").train()
    stock = copy.deepcopy(model)
    ops = fuse(model, only="mlp").ops
    assert [*ops.values()] == ["gated_linear_pair (wi_0, wi_1 -> act)"] * 4
    assert_same_step(model, stock)


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2", "silu"])
def test_every_activation_of_an_mlp(device, name):
    model = encoder("vit", device, hidden_act=name).train()
    stock = copy.deepcopy(model)
    assert len(fuse(model, only="mlp").replaced) == 2
    assert_same_step(model, stock)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.drop = nn.Linear(32, 48), nn.GELU(), nn.Dropout(0.25)
        self.down = nn.Linear(48, 32, bias=False)

    def forward(self, x):
        return self.down(self.drop(self.act(self.up(x))))


class ClampedMLP(MLP):
    def forward(self, x):
        return self.down(self.act(self.up(x).clamp(max=7)))


class AddingMLP(MLP):
    def forward(self, x):
        return x + super().forward(x)


class ActivationFirstMLP(MLP):
    def forward(self, x):
        return self.down(self.up(self.act(x)))


class DroppingMLP(MLP):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, self.training)


class LeftMLP(MLP):
    """The activation is that of the left half, which gates the right one."""

    act_class = nn.SiLU

    def __init__(self):
        super().__init__()
        self.up, self.act = nn.Linear(32, 96), self.act_class()

    def gated(self, left, right):
        return self.act(left) * right

    def forward(self, x):
        return self.down(self.drop(self.gated(*self.up(x).chunk(2, -1))))


class RightMLP(LeftMLP):
    def gated(self, left, right):
        return left * self.act(right)


class TwoLayersMLP(LeftMLP):
    """The branches are two layers; the last one is defined in between."""

    def __init__(self):
        super().__init__()
        self.up, self.other = nn.Linear(32, 48), nn.Linear(32, 48)

    def forward(self, x):
        return self.down(self.drop(self.gated(self.up(x), self.other(x))))


class AddedMLP(LeftMLP):
    def gated(self, left, right):
        return self.act(left) + right


def with_mlps(*mlps, device="cpu"):
    """A ViT with other MLPs in its two layers."""
    model = vit(device)
    torch.manual_seed(2)
    for layer, mlp in zip(model.layers, mlps, strict=True):
        layer.mlp = mlp().to(device)
    return model


@pytest.mark.parametrize("kind", [LeftMLP, RightMLP, TwoLayersMLP])
@pytest.mark.parametrize("act", [nn.SiLU, nn.GELU, nn.ReLU])
def test_mlps_with_a_gate(device, kind, act):
    names = {"act_class": act, "__module__": __name__}
    model = with_mlps(*[type(kind.__name__, (kind,), names)] * 2, device=device).eval()
    stock = copy.deepcopy(model)
    # the ops take SiLU of the left half and the others of the right one
    packed = kind is not TwoLayersMLP and (act is nn.SiLU) == (kind is LeftMLP)
    op = "gated_linear" if packed else "gated_linear_pair"
    layers = "up, other" if kind is TwoLayersMLP else "up"
    ops = fuse(model, only="mlp").ops
    assert ops == {f"layers.{i}.mlp": f"{op} ({layers} -> act)" for i in (0, 1)}
    with Calls() as calls:
        assert_same_step(model, stock)
    for part in ("forward", "backward"):
        assert calls.names[f"torchweld::{op}_{part}"] == 2


@pytest.mark.parametrize("kind", [ClampedMLP, AddingMLP, ActivationFirstMLP, DroppingMLP, AddedMLP])
def test_mlps_that_compute_something_else_stay_stock(kind):
    model = with_mlps(kind, MLP)
    report = fuse(model, only="mlp", check=False)
    assert report.replaced == ["layers.1.mlp"] and type(model.layers[0].mlp) is kind
    assert dict(report.skipped)["layers.0.mlp"] == (
        f"test_fuse_encoders.{kind.__name__} has the parts of an MLP and computes something else"
    )


def test_mlps_that_stay_stock_for_a_reason(monkeypatch):
    def reason(change=lambda mlp: None, **changes):
        model = vit(**changes)
        change(model.layers[0].mlp)
        return dict(fuse(model, only="mlp", check=False).skipped).get("layers.0.mlp")

    def hook(name):
        return lambda mlp: mlp.get_submodule(name).register_forward_hook(lambda *args: None)

    def wrap(mlp):
        mlp.fc1 = nn.utils.parametrizations.weight_norm(mlp.fc1)

    assert reason() is None
    act = "no fused form of the activation QuickGELUActivation"
    assert reason(hidden_act="quick_gelu") == act
    assert reason(hook("activation_fn")) == (
        "a module in it has hooks, which would see other values"
    )
    assert reason(hook("fc1")) == "fc1: it has hooks"
    assert reason(hook("fc2")) is None
    assert reason(lambda mlp: mlp.fc2.double()) == "its layers have different dtypes"
    assert reason(wrap).endswith("ParametrizedLinear, not torch's Linear")
    monkeypatch.undo()
    assert reason() == "torch's linear layer and activation are as fast on cpu"


def test_dropout_in_an_mlp_runs_stock_in_training_mode(device):
    model = with_mlps(MLP, MLP, device=device)
    stock = copy.deepcopy(model)
    report = fuse(model, only="mlp")
    assert report.replaced == ["layers.0.mlp", "layers.1.mlp"]
    for training in (False, True):
        runs = []
        for each in (model, stock):
            torch.manual_seed(3)
            with Calls() as calls:
                runs.append(each.train(training)(**attention_switch.sample_of(each))[0])
            assert calls.names["torchweld::linear_forward"] == 2 * (each is model and not training)
        assert_close(*runs, rtol=1e-4, atol=1e-4)
    model.eval()
    model.layers[0].mlp.drop.train()
    with Calls() as calls:
        step(model)
    assert calls.names["torchweld::linear_forward"] == 1


def test_the_report_says_that_a_dropout_keeps_an_mlp_stock():
    model = encoder("wav2vec2", activation_dropout=0.25)
    report = fuse(model, only="mlp")
    assert "in training mode: 2 x the stock forward runs: Dropout(0.25) is on" in report.notes


@pytest.mark.parametrize("name", ["up", "act", "drop", "down"])
def test_a_hook_in_an_mlp_after_fuse_sees_stock_values(name):
    model = with_mlps(MLP, MLP).eval()
    stock, seen = copy.deepcopy(model), []
    fuse(model, only="mlp")
    for each in (model, stock):
        each.layers[0].mlp.get_submodule(name).register_forward_hook(
            lambda m, args, out: seen.append((*args, out))
        )
        with Calls() as calls:
            step(each)
        assert calls.names["torchweld::linear_forward"] == (
            0 if each is stock else 1 + (name == "down")
        )
    for ours, want in zip(*seen, strict=True):
        assert_close(ours, want, rtol=1e-4, atol=1e-4)


def test_an_mlp_that_changes_after_fuse():
    """T5 keeps its second layer in float32 and casts in front of it."""
    model = encoder("t5", dtype=torch.bfloat16).eval()
    mlp = model.encoder.block[0].layer[1].DenseReluDense
    stock = copy.deepcopy(mlp)
    fuse(model, only="mlp")
    x = torch.randn(2, 3, 32)
    for change in (lambda m: m.wo.float(), lambda m: setattr(m, "act", nn.Tanh())):
        change(mlp), change(stock)
        assert torch.equal(mlp(x.bfloat16()), stock(x.bfloat16()))
    mlp.wi = stock.wi = nn.Sequential(stock.wi)
    assert torch.equal(mlp(x.bfloat16()), stock(x.bfloat16()))


def test_an_mlp_under_autocast(device):
    model = vit(device)
    stock = copy.deepcopy(model.layers[0].mlp)
    fuse(model, only="mlp")
    x = torch.randn(4, 32, device=device)
    with torch.autocast(torch.device(device).type, torch.bfloat16), Calls() as calls:
        got, want = model.layers[0].mlp(x), stock(x)
    assert calls.names["torchweld::linear_forward"] == 1
    assert_close(got, want)


def test_a_fused_encoder_compiles_in_one_graph(device):
    model = encoder("vit", device).eval()
    fuse(model)
    batch = attention_switch.sample_of(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert_close(compiled(**batch)[0], model(**batch)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["vit", "bert", "hubert", "whisper", "gpt_neox"])
def test_a_step_in_bfloat16_is_no_worse_than_stock(device, kind):
    stock = encoder(kind, device, torch.bfloat16).train()
    exact, model = copy.deepcopy(stock).float(), copy.deepcopy(stock)
    fuse(model, only=["norm", "mlp"], check=False)
    (want, want_grads), errors = step(exact), []
    for each in (model, stock):
        out, grads = step(each)
        apart = [
            (grads[key].double() - w).square().sum()
            for key, w in want_grads.items()
            if w is not None
        ]
        errors.append(((out.double() - want).square().mean().sqrt(), sum(apart).sqrt()))
    for error, stock_error in zip(*errors, strict=True):
        assert error <= 1.5 * stock_error


def test_a_config_without_a_longest_sequence():
    """XLNet's max_position_embeddings is -1."""
    model = tiny_model("xlnet", "XLNetLMHeadModel", "eager").eval()
    report = fuse(model, only="norm")
    assert report.calls["torchweld::layer_norm"] == len(report.replaced) == 4
    assert report.max_abs_diff < 1e-5


def test_a_model_that_draws_in_eval_mode_draws_the_same_twice():
    """ViT-MAE masks random patches."""
    model = tiny_model("vit_mae", "ViTMAEModel", "sdpa").eval()
    state = torch.get_rng_state()
    report = fuse(model, only="norm")
    assert torch.equal(torch.get_rng_state(), state)
    assert report.replaced and report.max_abs_diff < 1e-4
