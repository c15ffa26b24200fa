"""torchweld.fuse of Llama-like families: every part equals stock, and stays stock where it must."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.testing import assert_close

transformers = pytest.importorskip("transformers")

from fused_parts import parts_of, random_model  # noqa: E402
from test_fuse import Calls  # noqa: E402
from tiny_models import (  # noqa: E402
    VOCAB,
    assert_same_tokens,
    batch,
    fuse_keeping_stock,
    saved_and_loaded,
    tiny_model,
    with_random_vectors,
)
from torchweld.integrations import fuse, unfuse  # noqa: E402
from torchweld.integrations.version import NEWEST, release  # noqa: E402

families = pytest.importorskip("torchweld.integrations.fusion.layers.families")
LAYERS = 2
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
CHANGES = {
    "Qwen3": {"head_dim": 16},
    "Gemma": {"head_dim": 16},
    "Gemma2": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "Gemma3": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "Mistral": {"sliding_window": 8},
    "Phi3": {"sliding_window": None},
    "Granite": {"residual_multiplier": 0.5, "logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "Glm4": {"head_dim": 16, "partial_rotary_factor": 0.5},
    "SmolLM3": {"no_rope_layers": [1, 0]},
}
NAMES = [family.prefix for family in families.FAMILIES.values()]
# Decoders whose layers differ by their mixers, their norms or their mixtures: for each model type
# the class, and the parts that run as ops.
OTHERS = {
    "bamba": ("BambaForCausalLM", "attention, norm, add + norm, rotary, MLP, loss"),
    "cohere2": ("Cohere2ForCausalLM", "attention, norm, rotary, MLP, loss"),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "attention, add + norm, norm + qkv, rotary, MLP, loss",
    ),
    "dots3_note_text": ("Dots3NoteForCausalLM", "norm, add + norm, norm + qkv, rotary, experts"),
    "exaone4": ("Exaone4ForCausalLM", "attention, norm, rotary, MLP, loss"),
    "falcon_h1": ("FalconH1ForCausalLM", "attention, norm, add + norm, rotary, MLP, loss"),
    "gemma4_text": ("Gemma4ForCausalLM", "attention, norm, add + norm, MLP"),
    "gpt_oss": ("GptOssForCausalLM", "attention, add + norm, norm + qkv, rotary, experts, loss"),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        "attention, norm, add + norm, MLP, experts",
    ),
    "hyperclovax": ("HyperCLOVAXForCausalLM", "norm, add + norm, norm + qkv, rotary, MLP, loss"),
    "jamba": ("JambaForCausalLM", "attention, norm, add + norm, MLP, experts, loss"),
    "kimi_linear": ("KimiLinearForCausalLM", "attention, norm, add + norm, MLP, experts, loss"),
    "lfm2_moe": ("Lfm2MoeForCausalLM", "attention, norm, add + norm, MLP, experts, loss"),
    "llama4_text": ("Llama4ForCausalLM", "attention, norm, add + norm, MLP, loss"),
    "afmoe": ("AfmoeForCausalLM", "attention, add + norm, norm + qkv, rotary, MLP, experts, loss"),
    "minicpm3": ("MiniCPM3ForCausalLM", "add + norm, norm + qkv, rotary, MLP, loss"),
    "nemotron": ("NemotronForCausalLM", "attention, add + norm, norm + qkv, rotary, loss"),
    "olmo": ("OlmoForCausalLM", "attention, add + norm, norm + qkv, rotary, MLP, loss"),
    "ministral3": ("Ministral3ForCausalLM", "attention, add + norm, norm + qkv, rotary, MLP, loss"),
    "olmo_hybrid": ("OlmoHybridForCausalLM", "attention, norm, add + norm, rotary, MLP, loss"),
    "qwen3_next": ("Qwen3NextForCausalLM", "add + norm, norm + qkv, rotary, MLP, experts, loss"),
}
# Decoders that no table has, by their model types.
RECOGNISED = {
    "Arcee": "arcee",
    "Cwm": "cwm",
    "Dots1": "dots1",
    "Ernie4_5": "ernie4_5",
    "Glm": "glm",
    "Helium": "helium",
    "Ministral": "ministral",
    "Mixtral": "mixtral",
    "Olmoe": "olmoe",
    "Qwen3Moe": "qwen3_moe",
}


def tiny(name, device="cpu", dtype=torch.float32, implementation="sdpa", **changes):
    """A model of a family with random weights, the norms' too."""
    torch.manual_seed(0)
    if name in RECOGNISED:
        more = {"initializer_range": 0.2, **changes}
        model = tiny_model(RECOGNISED[name], f"{name}ForCausalLM", implementation, **more)
        return model.to(device, dtype)
    config_class = f"{name}TextConfig" if name == "Gemma3" else f"{name}Config"
    config = getattr(transformers, config_class)(**{**SIZES, **CHANGES.get(name, {}), **changes})
    if name == "Gemma2":
        implementation = "eager"
    cls = getattr(transformers, f"{name}ForCausalLM")
    model = cls._from_config(config, attn_implementation=implementation)
    return with_random_vectors(model).to(device, dtype)


class LoraLinear(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.lora_a = nn.Linear(base.in_features, 4, bias=False)
        self.lora_b = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.lora_b(self.lora_a(x))


def wrap_in_lora(owner, name):
    torch.manual_seed(7)
    setattr(owner, name, LoraLinear(getattr(owner, name)))


def labelled(device, **kwargs):
    """A padded batch; the first token has no label, for an arbitrary padding row predicts it."""
    inputs = batch(device, **kwargs)
    labels = inputs["input_ids"].masked_fill(inputs["position_ids"] == 0, -100)
    return {**inputs, "labels": labels}


def step(model, inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def assert_same_step(model, stock, inputs):
    """Loss and gradients; an expert without tokens has none in both."""
    (loss, grads), (want, want_grads) = (step(each, inputs) for each in (model, stock))
    assert_close(loss, want, rtol=1e-5, atol=1e-5)
    assert_close(grads, want_grads, rtol=1e-4, atol=2e-5)


def assert_same_logits(model, stock, inputs=None):
    with torch.no_grad():
        outs = [each(**(inputs or batch("cpu"))).logits for each in (model, stock)]
    assert_close(*outs, rtol=1e-4, atol=1e-4)


def parts(report):
    """The ops of a report, without the attention."""
    return {path: op.split(" ")[0] for path, op in report.ops.items() if op != "attention"}


def expected(name):
    """The places of a family's model and their ops."""
    family = next(f for f in families.FAMILIES.values() if f.prefix == name)
    norms = {"Gemma2": 4, "Gemma3": 4, "Glm4": 4}.get(name, 2)
    found = {"model.norm": "rms_norm"}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        found[f"{prefix}mlp"] = "gated_linear" if family.packed else "gated_mlp"
        if (name, layer) != ("SmolLM3", 1):
            found[f"{prefix}self_attn.rotary"] = "rotary"
        if family.head_norm:
            found |= dict.fromkeys([f"{prefix}self_attn.{n}_norm" for n in "qk"], "rms_norm")
        if family.layer is not None and (name, layer) != ("SmolLM3", 1):
            found[f"{prefix}input_layernorm"] = "rms_norm_linears"
    adds = LAYERS if family.layer is not None else 0
    projecting = list(found.values()).count("rms_norm_linears")
    return found, adds, LAYERS * norms - adds - projecting


@pytest.mark.parametrize("name", NAMES)
def test_the_report_lists_what_runs(device, name):
    model = tiny(name, device).eval()
    report = fuse(model)
    assert report.max_abs_diff < 1e-4
    found = parts(report)
    named, adds, norms = expected(name)
    assert named.items() <= found.items()
    others = [op for path, op in found.items() if path not in named]
    assert others.count("add_rms_norm") == adds
    assert others.count("rms_norm") + others.count("rms_norm_linears") == norms
    assert not any("not run" in op for op in report.ops.values())
    without = {
        "SmolLM3": [("model.layers.1.self_attn.rotary", "the layer has no rotary embedding")],
        "Olmo2": [
            (f"model.layers.{i}", "Olmo2DecoderLayer is none of the decoder layers that fuse knows")
            for i in range(LAYERS)
        ],
    }
    assert report.skipped == without.get(name, [])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", [*NAMES, *RECOGNISED])
def test_loss_and_every_gradient_equal_stock(device, name, checkpointing):
    model = tiny(name, device, attention_dropout=0.0)
    stock, _ = fuse_keeping_stock(model, loss=True)
    for each in (model, stock):
        each.train()
        if checkpointing:
            each.gradient_checkpointing_enable()
    inputs = labelled(device)
    with Calls() as calls:
        assert_same_step(model, stock, inputs)
    ran = " ".join(calls.names)
    ops = ["torchweld::attention", "rms_norm", "rotary"]
    if name in NAMES:
        ops += [expected(name)[0]["model.layers.0.mlp"], "linear_cross_entropy"]
    for op in ops:
        assert op in ran, op
    assert ("rms_norm_linears" in ran) == (name != "Olmo2")


@pytest.mark.parametrize("kind", OTHERS)
def test_other_decoders_train_and_generate_as_stock(kind):
    name, wanted = OTHERS[kind]
    model = random_model(kind, name)
    if model is None:
        pytest.skip("not in this transformers")
    stock, report = fuse_keeping_stock(model, loss=True)
    ran = [part for part, count in parts_of(report).ops.items() if count]
    # Older versions have parts of other forms, which stay stock.
    assert set(wanted.split(", ")) <= set(ran) or release() < NEWEST, report
    assert report.max_abs_diff < 1e-4, report
    inputs = labelled("cpu")
    assert_same_step(model.train(), stock.train(), inputs)
    prompts = {key: inputs[key] for key in ("input_ids", "attention_mask")}
    assert_same_tokens(model, stock, **prompts)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "relu", "silu"])
@pytest.mark.parametrize("name", ["Llama", "Phi3", "Glm4", "Glm"])
def test_every_activation_of_a_gated_mlp(device, name, activation, biased):
    model = tiny(name, device, hidden_act=activation)
    for layer in model.model.layers if biased else ():
        for linear in layer.mlp.children():
            if isinstance(linear, nn.Linear):
                linear.bias = nn.Parameter(torch.randn(linear.out_features, device=device))
    stock = copy.deepcopy(model)
    op = parts(fuse(model, only="mlp"))["model.layers.0.mlp"]
    packed = hasattr(model.model.layers[0].mlp, "gate_up_proj")
    assert op == ("gated_linear" if packed and activation == "silu" else "gated_mlp")
    inputs = labelled(device)
    with Calls() as calls:
        assert_same_step(model, stock, inputs)
    assert calls.names[f"torchweld::{op}_backward"] == LAYERS


@pytest.mark.parametrize("name", [*NAMES, *RECOGNISED])
def test_saved_and_loaded(tmp_path, name):
    """A fused model is saved as stock, and the loaded model computes the same, fused and stock."""
    model = tiny(name).eval()
    stock, report = fuse_keeping_stock(model, loss=True)
    assert report.compared.endswith("whole and over a cache") and report.max_abs_diff < 1e-4
    model.save_pretrained(tmp_path)
    implementation = stock.config._attn_implementation
    loaded = type(stock).from_pretrained(tmp_path, attn_implementation=implementation)
    assert loaded.state_dict().keys() == stock.state_dict().keys()
    inputs = batch("cpu")
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        want = stock(**inputs).logits[real]
        assert torch.equal(loaded.eval()(**inputs).logits[real], want)
        assert fuse(loaded)
        assert_close(loaded(**inputs).logits[real], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_is_no_worse_than_stock(device, name):
    stock = tiny(name, device, torch.bfloat16).eval()
    exact, model = copy.deepcopy(stock).float(), copy.deepcopy(stock)
    fuse(model, check=False)
    inputs = batch(device)
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        want = exact(**inputs).logits[real]
        error, stock_error = (
            (each(**inputs).logits[real].double() - want).square().mean().sqrt()
            for each in (model, stock)
        )
    assert error <= 1.5 * stock_error


@pytest.mark.parametrize("name", ["Llama", "Phi3"])
def test_unfuse_copies_and_files(tmp_path, name):
    model = tiny(name)
    stock, report = fuse_keeping_stock(model, loss=True)
    copied = copy.deepcopy(model)
    loaded = saved_and_loaded(model)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [
        f"{name}ForCausalLM"
    ]
    inputs = labelled("cpu")
    want = step(model.train(), inputs)[0]
    stock_loss = step(stock.train(), inputs)[0]
    again = fuse(model, loss=True)
    assert again.replaced == [] and {why for _, why in again.skipped} == {"fused already"}
    for each in (model, copied, loaded):
        assert torch.equal(step(each.train(), inputs)[0], want)
        assert sorted(unfuse(each)) == sorted(report.replaced) and unfuse(each) == []
        assert {type(m) for m in each.modules()} == {type(m) for m in stock.modules()}
        assert torch.equal(step(each, inputs)[0], stock_loss)
    assert model.state_dict().keys() == stock.state_dict().keys()


@pytest.mark.parametrize("kind", ["attention", "norm", "mlp", "rotary"])
def test_only_some_kinds(kind):
    report = fuse(tiny("Llama"), only=[kind])
    ops = {op.split(" ")[0] for op in report.ops.values()}
    norms = {"rms_norm", "add_rms_norm", "rms_norm_linears"}
    assert ops == {"norm": norms, "mlp": {"gated_mlp"}}.get(kind, {kind})


def test_an_unknown_kind_is_one_sentence():
    with pytest.raises(ValueError, match='only must be some of "attention", .*, but got .norms.'):
        fuse(tiny("Llama"), only="norms")


def test_layers_of_others_are_called_before_and_after_fuse():
    for first in (False, True):
        model = tiny("Llama")
        stock = copy.deepcopy(model)
        for each in (model, stock):
            if each is model and not first:
                fuse(model)
            wrap_in_lora(each.model.layers[0].mlp, "gate_proj")
            wrap_in_lora(each.model.layers[1].self_attn, "q_proj")
            wrap_in_lora(each.model.layers[1].mlp, "down_proj")
        if first:
            report = fuse(model)
            op = report.ops["model.layers.0.mlp"]
            assert op.startswith("gated_activation (act_fn; gate_proj: test_fuse_families.Lora")
            norm = report.ops["model.layers.1.input_layernorm"]
            assert norm.startswith("rms_norm (input_layernorm; q_proj: test_fuse_families.Lora")
            assert not report.skipped
            assert report.ops["model.layers.1.mlp"].startswith("gated_linear_pair")
        with Calls() as calls:
            assert_same_step(model, stock, labelled("cpu"))
        assert calls.names["torchweld::gated_activation"] == 1
        assert any("lora" in key for key, _ in model.named_parameters())


@pytest.mark.parametrize("rows", [1, 12])
@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("Llama", "mlp.up_proj"),
        ("Llama", "mlp.act_fn"),
        ("Llama", "mlp.down_proj"),
        ("Llama", "post_attention_layernorm"),
        ("Llama", "input_layernorm"),
        ("Llama", "self_attn.k_proj"),
        ("Qwen3", "self_attn.q_norm"),
        ("Gemma3", "self_attn.k_norm"),
        ("Olmo2", "self_attn.q_norm"),
    ],
)
def test_a_hook_after_fuse_sees_stock_values(name, path, rows):
    model = tiny(name).eval()
    stock, _ = fuse_keeping_stock(model)
    seen = []
    for each in (model, stock):
        module = each.model.layers[0].get_submodule(path)
        module.register_forward_hook(lambda m, args, out: seen.append((args[0], out)))
    assert_same_logits(model, stock, batch("cpu", (0, 0), rows))
    assert len(seen) == 2
    assert_close(*seen, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("change", ["hook", "lora", "double", "quantised"])
def test_projections_that_another_layer_makes_stay_stock(change):
    """A change to attention after fuse keeps the norm and the projections apart."""
    model = tiny("Qwen2").eval()
    stock, _ = fuse_keeping_stock(model)
    seen = []

    def hook(module, args, kwargs, out):
        seen.append(kwargs["hidden_states"])

    class Half(nn.Linear):
        def forward(self, x):
            return super().forward(x) / 2

    for each in (model, stock):
        attn = each.model.layers[0].self_attn
        if change == "hook":
            attn.register_forward_hook(hook, with_kwargs=True)
        elif change == "lora":
            wrap_in_lora(attn, "v_proj")
        elif change == "double":
            attn.q_proj.double()
        else:
            attn.k_proj.__class__ = Half
    with torch.no_grad():
        if change == "double":
            for each in (model, stock):
                with pytest.raises(RuntimeError, match="dtype"):
                    each(**batch("cpu"))
            return
        with Calls() as calls:
            got = model(**batch("cpu")).logits
        want = stock(**batch("cpu")).logits
    assert calls.names["torchweld::rms_norm_linears"] == LAYERS - 1
    assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert len(seen) == (2 if change == "hook" else 0)
    if seen:
        assert_close(*seen, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_a_hook_on_all_modules_sees_stock_values(name):
    model = tiny(name).eval()
    stock, _ = fuse_keeping_stock(model)
    seen = []

    def hook(module, args, out):
        if isinstance(out, torch.Tensor):
            seen.append((type(module).__name__, out))

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        with torch.no_grad():
            for each in (model, stock):
                each(**batch("cpu"))
    finally:
        handle.remove()
    count = len(seen) // 2
    for (cls, ours), (same, want) in zip(seen[:count], seen[count:], strict=True):
        assert cls == same
        assert_close(ours, want, rtol=1e-4, atol=1e-5)
    classes = [cls for cls, _ in seen[:count]]
    norms = sum(type(each).__name__ == f"{name}RMSNorm" for each in model.modules())
    assert classes.count(f"{name}RMSNorm") == norms > 2 * LAYERS
    assert classes.count(type(model.model.layers[0].mlp.act_fn).__name__) == LAYERS


def test_a_norm_that_is_cast_alone_runs_stock():
    model = tiny("Llama").eval()
    stock, _ = fuse_keeping_stock(model)
    for each in (model, stock):
        each.model.layers[0].post_attention_layernorm.double()
        each.model.norm.double()
        each.lm_head.double()
    with torch.no_grad(), pytest.raises(RuntimeError):  # its float64 meets the MLP's float32
        stock(**batch("cpu"))
    with torch.no_grad(), pytest.raises(RuntimeError):
        model(**batch("cpu"))


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize(
    "path",
    [
        "model.norm",
        "model.layers.0.input_layernorm",
        "model.layers.0.post_attention_layernorm",
        "model.layers.0.self_attn.q_norm",
        "model.layers.0.mlp.down_proj",
        "lm_head",
    ],
)
@pytest.mark.parametrize("name", ["Qwen3", "Qwen3Moe"])
def test_unfuse_keeps_a_parametrization(name, path):
    model = tiny(name, tie_word_embeddings=False).eval()
    if not hasattr(model.model.layers[0].mlp, "down_proj") and path.endswith("down_proj"):
        path = "model.layers.0.mlp.gate"
    stock, inputs = copy.deepcopy(model), {"input_ids": batch("cpu")["input_ids"]}
    fuse(model, loss=True)
    for each in (model, stock):
        parametrize.register_parametrization(each.get_submodule(path), "weight", Doubled())
    with torch.no_grad():
        want = stock(**inputs).logits
        assert_close(model(**inputs).logits, want, rtol=1e-4, atol=1e-4)
        unfuse(model)
        assert torch.equal(model(**inputs).logits, want)
        names, wanted = ({type(m).__name__ for m in each.modules()} for each in (model, stock))
        assert names == wanted
        for each in (model, stock):
            parametrize.remove_parametrizations(each.get_submodule(path), "weight")
        assert torch.equal(model(**inputs).logits, stock(**inputs).logits)
    assert [type(each) for each in model.modules()] == [type(each) for each in stock.modules()]


def test_a_norm_of_another_library_stays():
    class OtherNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(32))

        def forward(self, x):
            return 3 * x * self.weight

    model = tiny("Llama").eval()
    layer = model.model.layers[0]
    layer.input_layernorm = layer.post_attention_layernorm = OtherNorm()
    stock = copy.deepcopy(model)
    reasons = dict(fuse(model).skipped)
    assert "OtherNorm, not transformers' norm" in reasons["model.layers.0.post_attention_layernorm"]
    assert_same_logits(model, stock)


def test_a_norm_with_the_parts_of_another_stays():
    class TwiceNorm(transformers.models.llama.modeling_llama.LlamaRMSNorm):
        def forward(self, x):
            return 2 * super().forward(x)

    model = tiny("Llama").eval()
    layer = model.model.layers[0]
    layer.post_attention_layernorm.__class__ = layer.input_layernorm.__class__ = TwiceNorm
    stock = copy.deepcopy(model)
    reasons = dict(fuse(model).skipped)
    for name in ("input_layernorm", "post_attention_layernorm"):
        assert "TwiceNorm has the parts of an RMSNorm and" in reasons[f"model.layers.0.{name}"]
    assert_same_logits(model, stock)


def test_mixed_dtypes_are_listed():
    model = tiny("Llama")
    model.model.layers[0].mlp.up_proj.double()
    reasons = dict(fuse(model, check=False).skipped)
    assert reasons["model.layers.0.mlp"] == (
        "mixed dtypes: gate_proj.weight float32, up_proj.weight float64"
    )


def with_buffers(module):
    """Makes the parameters of a module buffers."""
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            delattr(owner, name)
            owner.register_buffer(name, parameter.data)


def test_an_attention_whose_weights_are_buffers_is_listed():
    model = tiny("Llama").eval()
    with_buffers(model.model.layers[0].self_attn)
    report = fuse(model)
    why = "it has no floating-point parameters"
    assert report.skipped == [("model.layers.0.self_attn.rotary", why)]
    assert report.ops["model.layers.0.input_layernorm"] == "rms_norm"
    assert report.max_abs_diff < 1e-5


def test_a_model_without_parameters_gets_the_attention():
    model = tiny("Llama").eval()
    with_buffers(model)
    report = fuse(model, loss=True)
    assert {report.ops[path] for path in report.replaced} == {"attention"}
    assert report.max_abs_diff < 1e-5


@pytest.mark.parametrize("wrapped", [False, True])
def test_flat_parameters_of_fsdp_are_listed(wrapped):
    dist = torch.distributed
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = tiny("Llama").eval()
    layers = ModuleWrapPolicy({type(model.model.layers[0])})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        outer = FullyShardedDataParallel(
            model, auto_wrap_policy=layers, device_id=torch.device("cpu")
        )
        report = fuse(outer if wrapped else model)
    finally:
        dist.destroy_process_group()
    assert {report.ops[path].split(" ")[0] for path in report.replaced} == {
        "attention",
        "add_rms_norm",  # of the layer, which holds the flat parameter
    }
    assert {why for _, why in report.skipped} == {"it has no floating-point parameters"}
    assert report.max_abs_diff < 1e-5


@pytest.mark.parametrize("mask", [False, True])
def test_compiled_in_one_graph(mask):
    model = tiny("Llama").eval()
    fuse(model)
    inputs = batch("cpu")
    if not mask:
        inputs = {"input_ids": inputs["input_ids"]}
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        want = model(**inputs, use_cache=False).logits
        got = compiled(**inputs, use_cache=False).logits
    if mask:
        real = inputs["attention_mask"].bool()
        want, got = want[real], got[real]
    assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_autocast(device):
    model = tiny("Llama", device)
    stock, _ = fuse_keeping_stock(model, loss=True)
    inputs = labelled(device)
    with torch.autocast(torch.device(device).type, torch.bfloat16), Calls() as calls:
        losses = [each.train()(**inputs).loss for each in (model, stock)]
    assert "rms_norm" in " ".join(calls.names)
    assert_close(*losses, rtol=2e-2, atol=2e-2)


def test_an_unknown_class_of_the_same_shape_stays_stock():
    class OtherMLP(transformers.models.llama.modeling_llama.LlamaMLP):
        def forward(self, x):
            return 2 * super().forward(x)

    model = tiny("Llama").eval()
    model.model.layers[0].mlp.__class__ = OtherMLP
    stock, report = fuse_keeping_stock(model)
    assert "model.layers.0.mlp" not in report.ops
    assert_same_logits(model, stock)
