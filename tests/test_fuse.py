"""torchweld.fuse on tiny random GPT-2 models: same numbers, same files, reversible, honest."""

from __future__ import annotations

import copy
import io
import json
import pickle
import re
import warnings
from collections import Counter

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

transformers = pytest.importorskip("transformers")

from transformers.models.gpt2.modeling_gpt2 import GPT2Block  # noqa: E402
from transformers.pytorch_utils import Conv1D  # noqa: E402

from attention_engines import on_hopper  # noqa: E402
from test_hf_attention import Calls  # noqa: E402
from tiny_models import (  # noqa: E402
    VOCAB,
    batch,
    fuse_keeping_stock,
    own_warnings,
    saved_and_loaded,
    static_cache_in_graphs,
    tiny_gpt2,
    tiny_grouped,
    tiny_model,
)
from torchweld.integrations import FuseReport, fuse, register_attention, unfuse  # noqa: E402
from torchweld.integrations.attention import fallback, mask_numbers  # noqa: E402
from torchweld.integrations.attention import forward as hf_attention  # noqa: E402
from torchweld.integrations.attention import models as hf_models  # noqa: E402
from torchweld.integrations.fusion import attention_switch  # noqa: E402
from torchweld.integrations.fusion.report import WAS_EAGER  # noqa: E402
from torchweld.integrations.sdpa.gpus import BIAS  # noqa: E402

gpt2_block = pytest.importorskip("torchweld.integrations.fusion.layers.gpt2_block")
compare = pytest.importorskip("torchweld.integrations.fusion.recognise.compare")

LAYERS = 2
BOTH = [gpt2_block.ATTENTION, gpt2_block.MLP]


@pytest.fixture
def fused_device(device):
    """A device on which this build has every op that fuse puts in."""
    report = fuse(gpt2(device), check=False)
    if not report.replaced:
        pytest.skip(report.skipped[0][1])
    return device


def gpt2(device="cpu", cls="GPT2LMHeadModel", implementation="sdpa", seed=0, **changes):
    model = tiny_gpt2(cls, implementation, seed, **changes)
    for name, parameter in model.named_parameters():
        # Biases and norms start at 0 and 1, where a forgotten one would not show.
        if name.endswith("bias") or ".ln_" in name:
            nn.init.normal_(parameter, mean=0.3, std=0.3)
    return model.to(device).eval()


def pair(device="cpu", **changes):
    """A fused and a stock model of equal weights."""
    model = gpt2(device, **changes)
    stock, report = fuse_keeping_stock(model)
    assert report.skipped == []
    return model, stock


def logits(model, **inputs):
    with torch.no_grad():
        return model(**inputs).logits


def assert_same_logits(model, stock, inputs=None):
    inputs = batch(stock.device, (0, 0)) if inputs is None else inputs
    assert_close(logits(model, **inputs), logits(stock, **inputs), rtol=1e-5, atol=1e-5)


def loss_and_grads(model, inputs):
    model.zero_grad()
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    loss = model(**inputs, labels=labels).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def places(layers=LAYERS, prefix="transformer.h"):
    below = ("attn", "attn.c_attn", "mlp")
    return {f"{prefix}.{layer}.{name}" for layer in range(layers) for name in below}


# ---- equal numbers


@pytest.mark.parametrize("pads", [(0, 0), (0, 3, 7)])
def test_logits_equal_stock_and_the_report_says_so(fused_device, pads):
    model = gpt2(fused_device)
    stock, report = fuse_keeping_stock(model)
    assert set(report.replaced) == places() and report.skipped == []
    assert 0 <= report.max_abs_diff < 1e-5
    assert report.compared == f"logits (2, 16, {VOCAB}) float32, whole and over a cache"
    inputs = batch(fused_device, pads)
    real = inputs["attention_mask"].bool()
    assert_close(logits(model, **inputs)[real], logits(stock, **inputs)[real], rtol=1e-5, atol=1e-5)


def test_the_ops_really_run(fused_device):
    model, stock = pair(fused_device)
    inputs = batch(fused_device)
    with Calls() as calls:
        logits(model, **inputs)
    welded = [name for name in calls.names.elements() if name.startswith("torchweld")]
    assert sum("layer_norm_linear" in name for name in welded) == 2 * LAYERS
    assert sum("attention" in name for name in welded) == LAYERS
    assert calls.names["aten::native_layer_norm"] == 1, "ln_f alone stays stock"
    with Calls() as calls:
        logits(stock, **inputs)
    assert not any(name.startswith("torchweld") for name in calls.names)


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        ("gelu_new", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("gelu_fast", "gelu_tanh"),
        ("gelu", "gelu"),
        ("relu", "relu"),
        ("silu", "silu"),
        ("linear", "none"),
    ],
)
def test_every_activation_with_a_fused_form(fused_device, activation, name):
    model, stock = pair(fused_device, activation_function=activation)
    assert gpt2_block.activation_name(model.transformer.h[0].mlp.act) == name
    assert_same_logits(model, stock)


def test_the_activation_object_counts_and_not_the_config(fused_device):
    model = gpt2(fused_device, activation_function="gelu_new")
    for block in model.transformer.h:
        block.mlp.act = nn.ReLU()
    stock = copy.deepcopy(model)
    assert fuse(model).skipped == []
    assert_same_logits(model, stock)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_worse_than_stock(fused_device, dtype):
    exact = gpt2(fused_device)
    model, stock = pair(fused_device)
    inputs = batch(fused_device, (0, 0))
    want = logits(exact, **inputs)
    scale = want.abs().max()
    ours = (logits(model.to(dtype), **inputs).float() - want).abs().max() / scale
    eager = (logits(stock.to(dtype), **inputs).float() - want).abs().max() / scale
    eps = torch.finfo(dtype).eps
    assert ours <= 2 * eager + 2 * eps


@pytest.mark.parametrize("pads", [(0, 0), (0, 3, 7)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_equal_stock(fused_device, pads, checkpointing):
    model, stock = pair(fused_device)
    if checkpointing:
        for each in (model, stock):
            newer = getattr(each, "activation_checkpointing_enable", None)
            (newer or each.gradient_checkpointing_enable)()
    inputs = batch(fused_device, pads)
    loss, grads = loss_and_grads(model.train(), inputs)
    stock_loss, stock_grads = loss_and_grads(stock.train(), inputs)
    assert_close(loss, stock_loss, rtol=1e-6, atol=1e-6)
    assert_close(grads, stock_grads, rtol=1e-4, atol=1e-6)


def test_a_cache_that_was_empty_is_not_kept_for_the_gradient(fused_device):
    """A model fills one in training too, with copies; the cached tensors still have a gradient."""
    model, stock = pair(fused_device)
    inputs = batch(fused_device)
    kept, given = set(), []

    def keep(t):
        kept.add(t.untyped_storage().data_ptr())
        return t

    for each in (model, stock):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            out = each.train()(**inputs, use_cache=True)
        layers = out.past_key_values.layers
        cached = [t for layer in layers for t in (layer.keys, layer.values)]
        if each is model:
            assert not kept & {t.untyped_storage().data_ptr() for t in cached}
        # The next tokens see the cached ones.
        late = each(input_ids=inputs["input_ids"][:, :2], past_key_values=out.past_key_values)
        (out.logits.square().sum() + late.logits.square().sum()).backward()
        given.append((cached, late.logits, [p.grad for p in each.parameters()]))
    (cached, late, grads), (stock_cached, stock_late, stock_grads) = given
    assert_close((*cached, late), (*stock_cached, stock_late), rtol=1e-5, atol=1e-5)
    assert_close(grads, stock_grads, rtol=1e-4, atol=1e-5)


def test_training_with_dropout_draws_what_stock_draws():
    model = gpt2(attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1)
    stock, report = fuse_keeping_stock(model)
    assert any("(attn_pdrop=0.1)" in note for note in report.notes)
    inputs = batch("cpu")
    with own_warnings() as said:
        torch.manual_seed(3)
        loss, _ = loss_and_grads(model.train(), inputs)
    torch.manual_seed(3)
    stock_loss, _ = loss_and_grads(stock.train(), inputs)
    assert_close(loss, stock_loss, rtol=1e-5, atol=1e-6)
    assert len(said) == 1 and "dropout" in said[0]


def test_32_training_steps_converge_as_stock(fused_device):
    model, stock = pair(fused_device)
    generator = torch.Generator().manual_seed(4)
    steps = torch.randint(1, 4, (32, 8, 1), generator=generator)
    starts = torch.randint(VOCAB, (32, 8, 1), generator=generator)
    data = ((starts + steps * torch.arange(24)) % 8).to(fused_device)
    curves = []
    for each in (model.train(), stock.train()):
        optimizer = torch.optim.AdamW(each.parameters(), lr=2e-3)
        curve = []
        for ids in data:
            loss = each(ids, attention_mask=torch.ones_like(ids), labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        curves.append(curve)
    ours, want = (torch.tensor(curve) for curve in curves)
    assert want[-1] < 0.8 * want[0]
    assert_close(ours, want, rtol=1e-5, atol=0)
    ours, want = (dict(each.named_parameters()) for each in (model, stock))
    assert_close(ours, want, rtol=5e-3, atol=5e-3)


def test_generation_of_a_left_padded_batch(fused_device):
    model, stock = pair(fused_device)
    pads = (0, 4, 9, 11)
    inputs = batch(fused_device, pads)
    del inputs["position_ids"]
    settings = dict(max_new_tokens=10, do_sample=False, eos_token_id=None)
    with own_warnings() as said:
        together = model.generate(**inputs, **settings)
    assert said == []
    assert torch.equal(together, stock.generate(**inputs, **settings))
    for row, pad in enumerate(pads):
        prompt = inputs["input_ids"][row : row + 1, pad:]
        alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
        assert torch.equal(together[row, pad:], alone[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_attention_of_a_block_gives_the_bits_of_the_stock_forward(fused_device, dtype):
    model = pair(fused_device)[0].to(dtype)
    inputs = batch(fused_device)
    step = dict(input_ids=inputs["input_ids"][:, :1], use_cache=True)

    def stock(ln_1, attn, x, signature, kwargs):
        """GPT2Attention's own forward behind the fused c_attn."""
        qkv = gpt2_block.norm_linear(x, ln_1, attn.c_attn, "none")
        handle = attn.c_attn.register_forward_hook(lambda *_: qkv)
        try:
            return attn(x, **kwargs)[0]
        finally:
            handle.remove()

    outs = []
    for replaced in (False, True):
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            if replaced:
                patch.setattr(gpt2_block, "_fused_attention", stock)
            first = model(**inputs, use_cache=True)
            second = model(**step, past_key_values=first.past_key_values)
        outs.append((first.logits, second.logits))
    assert torch.equal(outs[0][0], outs[1][0]) and torch.equal(outs[0][1], outs[1][1])


@pytest.mark.parametrize("name", ["ln_1", "attn", "attn.c_attn", "ln_2", "mlp", "mlp.c_fc"])
def test_a_part_of_a_fused_block_that_is_called_alone_equals_stock(fused_device, name):
    model, stock = pair(fused_device)
    x = torch.randn(2, 5, 32, device=fused_device)
    with torch.no_grad(), Calls() as calls:
        ours, want = (each.transformer.h[0].get_submodule(name)(x) for each in (model, stock))
    ours, want = (out[0] if name == "attn" else out for out in (ours, want))
    assert not calls.names["torchweld::layer_norm_linear"]
    assert_close(ours, want, rtol=1e-6, atol=1e-6)


def test_a_layer_of_a_step_calls_no_more_than_it_must(fused_device):
    """Every call costs the host, which a step of generation waits for."""
    block = pair(fused_device)[0].transformer.h[0]
    x = torch.randn(2, 1, 32, device=fused_device)
    cache = transformers.DynamicCache()
    mask = mask_numbers.leftpad_mask(torch.zeros(2, device=fused_device))
    with torch.no_grad():
        block(x, cache, mask)
        with Calls() as calls:
            block(x, cache, mask)
    works = {
        "torchweld::layer_norm_linear": 2,
        "torchweld::attention": 1,
        "aten::addmm": 2,
        "aten::add.Tensor": 2,
        "aten::cat": 2,
    }
    assert {name: calls.names[name] for name in works} == works
    assert calls.names.total() - sum(works.values()) <= 9, calls.names  # views


def test_autocast_keeps_the_cast_of_a_projection(device):
    layer, x = Conv1D(8, 8).to(device), torch.randn(2, 3, 8, device=device)
    with torch.autocast(x.device.type, torch.bfloat16):
        first = gpt2_block.project(layer, x)
        with Calls() as calls:
            assert torch.equal(gpt2_block.project(layer, x), first)
    assert calls.names["aten::_to_copy"] == 1  # x
    assert torch.equal(layer(x), gpt2_block.project(layer, x))


def test_a_dropout_in_training_mode_drops_in_a_model_in_eval_mode():
    model, stock = pair(resid_pdrop=0.5)
    inputs = batch("cpu", (0, 0))
    outs = []
    for each in (model, stock):
        each.transformer.h[0].attn.resid_dropout.train()
        each.transformer.h[1].mlp.dropout.train()
        torch.manual_seed(3)
        outs.append(logits(each, **inputs))
    assert_close(*outs, rtol=1e-5, atol=1e-5)


def two_caches():
    return transformers.EncoderDecoderCache(
        transformers.DynamicCache(), transformers.DynamicCache()
    )


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("cache", "crosses"),
    [
        (None, False),
        (None, True),
        (transformers.DynamicCache, False),
        (two_caches, False),
        (two_caches, True),
    ],
)
def test_a_block_of_any_call_equals_stock(fused_device, implementation, cache, crosses):
    """Under another implementation than torchweld's too, which unfuse of the attention leaves."""
    model, stock = pair(fused_device, add_cross_attention=True, implementation=implementation)
    model.set_attn_implementation(implementation)
    x, memory = (torch.randn(2, n, 32, device=fused_device) for n in (5, 7))
    outs = []
    for each in (model, stock):
        block, kept = each.transformer.h[0], cache and cache()
        more = {"encoder_hidden_states": memory} if crosses else {}
        with torch.no_grad(), Calls() as calls:
            first = block(x, kept, **more)
            outs.append((first, block(first[:, :1], kept, use_cache=cache is not None, **more)))
        assert calls.names["torchweld::layer_norm_linear"] == (4 if each is model else 0)
    assert_close(*outs, rtol=1e-5, atol=1e-5)


def test_cross_attention_without_its_layers_is_the_sentence_of_transformers():
    block = pair()[0].transformer.h[0]
    with pytest.raises(ValueError, match="cross-attention layers"):
        block(torch.randn(1, 2, 32), encoder_hidden_states=torch.randn(1, 2, 32))


@pytest.mark.parametrize(
    ("name", "shape"), [("attn.c_attn", (2, 5, 96)), ("attn", (2, 5, 32)), ("mlp", (2, 5, 32))]
)
def test_a_fused_block_runs_the_hooks_that_record_outputs(fused_device, name, shape):
    model, stock = pair(fused_device)
    x = torch.randn(2, 5, 32, device=fused_device)
    seen = []

    def record(module, args, out):
        seen.append(out[0] if isinstance(out, tuple) else out)

    record.__module__ = "transformers.utils.output_capturing"  # such ones leave a site fused
    with torch.no_grad(), Calls() as calls:
        for each in (model, stock):
            block = each.transformer.h[0]
            block.get_submodule(name).register_forward_hook(record)
            block(x)
    assert len(seen) == 2 and seen[0].shape == shape
    assert_close(*seen, rtol=1e-5, atol=1e-5)
    assert calls.names["torchweld::layer_norm_linear"] == 2


def test_another_attention_that_is_chosen_after_fuse_runs(fused_device):
    model, stock = pair(fused_device)
    model.set_attn_implementation("eager")
    with Calls() as calls:
        assert_same_logits(model, stock)
    assert calls.names["torchweld::layer_norm_linear"] and not calls.names["torchweld::attention"]


def test_compiles_in_one_graph(fused_device):
    model, stock = pair(fused_device)
    inputs = batch(fused_device, (0, 0))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same_logits(compiled, stock, inputs)
    loss = compiled(**inputs).logits.square().mean()
    loss.backward()
    stock_loss = stock(**inputs).logits.square().mean()
    stock_loss.backward()
    ours, want = ([p.grad for p in each.parameters()] for each in (model, stock))
    assert_close(ours, want, rtol=1e-4, atol=1e-6)


def test_a_step_with_a_static_cache_compiles_in_one_graph(fused_device):
    model, stock = pair(fused_device)
    inputs = batch(fused_device)
    del inputs["position_ids"]
    graphs, static = static_cache_in_graphs()
    settings = dict(max_new_tokens=6, do_sample=False, eos_token_id=None)
    torch._dynamo.reset()
    ours = model.generate(**inputs, **settings, **static)
    assert torch.equal(ours, stock.generate(**inputs, **settings))
    assert len(graphs) == 1
    for op, times in (("layer_norm_linear", 2 * LAYERS), ("attention", LAYERS)):
        assert sum(f"torchweld.{op}" in target for target in graphs[0]) == times


@pytest.mark.parametrize("train", [False, True])
def test_compiled_without_a_mask_runs_the_op(fused_device, train):
    """The op runs without a cache too, where transformers would make a mask for packed rows."""
    model, stock = pair(fused_device)
    model.train(train)
    ids = batch(fused_device, (0, 0))["input_ids"]
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    want = stock(input_ids=ids).logits
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="torchweld")
        for use_cache in (False, True):
            ours = compiled(input_ids=ids, use_cache=use_cache).logits
            assert_close(ours, want, rtol=1e-5, atol=1e-5)
        embeds = model.transformer.wte(ids).detach()
        embedded = compiled(inputs_embeds=embeds, use_cache=False).logits
        assert_close(embedded, want, rtol=1e-5, atol=1e-5)
    assert unfuse(model)
    assert_close(model(input_ids=ids).logits, want)


def test_compiled_packed_sequences_run_the_op(fused_device):
    model, stock = pair(fused_device)
    ids = batch(fused_device, (0, 0))["input_ids"]
    packed = torch.cat([torch.arange(5), torch.arange(7)]).to(fused_device)[None].expand(2, -1)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    inputs = {"input_ids": ids, "position_ids": packed, "use_cache": False}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="torchweld")
        ours = logits(compiled, **inputs)
    assert_close(ours, logits(stock, **inputs), rtol=1e-5, atol=1e-5)


def test_autocast(fused_device):
    model, stock = pair(fused_device)
    inputs = batch(fused_device, (0, 0))
    want = logits(stock, **inputs)
    kind = torch.device(fused_device).type
    with torch.autocast(kind, dtype=torch.bfloat16):
        ours, eager = logits(model, **inputs), logits(stock, **inputs)
    assert ours.dtype == eager.dtype == torch.bfloat16
    error = (ours.float() - want).abs().max()
    assert error <= 2 * (eager.float() - want).abs().max() + 2**-7 * want.abs().max()


# ---- nothing else changes


def test_parameters_names_and_storage_stay(fused_device):
    model = gpt2(fused_device)
    before = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    modules = [name for name, _ in model.named_modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fuse(model)
    assert {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()} == before
    assert [name for name, _ in model.named_modules()] == modules
    assert model.state_dict().keys() == state.keys()
    inputs = batch(fused_device, (0, 0))
    model.train()(**inputs, labels=inputs["input_ids"]).loss.backward()
    optimizer.step()
    changed = {n for n, v in model.state_dict().items() if not torch.equal(v, state[n])}
    assert changed == set(state)
    model.load_state_dict(state)
    assert all(torch.equal(v, state[n]) for n, v in model.state_dict().items())
    assert isinstance(model.transformer.h[0].ln_1, nn.LayerNorm)
    assert isinstance(model.transformer.h[0].attn.c_attn, Conv1D)


def test_saved_files_are_those_of_the_stock_model(fused_device, tmp_path):
    model, stock = pair(fused_device)
    model.save_pretrained(tmp_path / "fused")
    stock.save_pretrained(tmp_path / "stock")
    names = sorted(path.name for path in (tmp_path / "stock").iterdir())
    assert sorted(path.name for path in (tmp_path / "fused").iterdir()) == names
    for name in names:
        fused_bytes = (tmp_path / "fused" / name).read_bytes()
        assert fused_bytes == (tmp_path / "stock" / name).read_bytes(), name
    assert "torchweld" not in (tmp_path / "fused" / "config.json").read_text()
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "fused").to(fused_device)
    assert loaded.config._attn_implementation == "sdpa"
    inputs = batch(fused_device, (0, 0))
    assert torch.equal(logits(loaded, **inputs), logits(stock, **inputs))


def test_unfuse_gives_the_stock_model_back(fused_device):
    model = gpt2(fused_device)
    config = model.config
    inputs = batch(fused_device)
    before, shape = logits(model, **inputs), repr(model)
    classes = [type(module) for module in model.modules()]
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    fuse(model)
    assert repr(model) == shape and [type(module) for module in model.modules()] != classes
    assert set(unfuse(model)) == places()
    assert torch.equal(logits(model, **inputs), before)
    assert repr(model) == shape and [type(module) for module in model.modules()] == classes
    assert model.config is config and model.transformer.config is config
    assert config._attn_implementation == "sdpa"
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert unfuse(model) == []
    assert set(fuse(model).replaced) == places()


def test_a_layer_that_was_parametrised_after_fuse_runs_stock_and_unfuse_works():
    model, stock = pair()
    for each in (model, stock):
        nn.utils.parametrizations.weight_norm(each.transformer.h[1].attn.c_attn)
    inputs = batch("cpu", (0, 0))
    assert gpt2_block.fused_sites(model.transformer.h[1]) == [gpt2_block.MLP]
    assert_same_logits(model, stock, inputs)
    assert set(unfuse(model)) == places()
    assert torch.equal(logits(model, **inputs), logits(stock, **inputs))
    assert all(type(block) is GPT2Block for block in model.transformer.h)


def test_accelerate_finds_the_blocks_by_the_name_of_their_class():
    model = gpt2()
    before = set(model._no_split_modules)
    model.transformer.h[1].ln_1.register_forward_hook(lambda *_: None)
    model.transformer.h[1].ln_2.register_forward_hook(lambda *_: None)
    fuse(model)
    assert model._no_split_modules == before
    assert all(type(block).__name__ in before for block in model.transformer.h)
    assert type(model.transformer.h[0]) is not GPT2Block is type(model.transformer.h[1])


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_unfuse_restores_the_attention_that_was_chosen(implementation):
    model = gpt2(implementation=implementation)
    assert fuse(model).notes == [WAS_EAGER] * (implementation == "eager")
    assert model.transformer.h[0].attn.config._attn_implementation == "torchweld"
    unfuse(model)
    assert model.config._attn_implementation == implementation


def test_unfuse_keeps_edits_of_the_config():
    model = gpt2()
    fuse(model)
    model.config.use_cache = False
    assert model.transformer.config.use_cache is False
    unfuse(model)
    assert model.config.use_cache is False and model.transformer.config is model.config
    assert model.config._attn_implementation == "sdpa"


def test_a_model_of_the_same_config_object_stays_stock():
    model = gpt2()
    sibling = transformers.GPT2LMHeadModel(model.config)
    fuse(model)
    assert sibling.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "torchweld"


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_training_mode_and_random_state_stay(dropout):
    model = gpt2(attn_pdrop=dropout)
    model.train()
    model.transformer.h[1].mlp.eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    fuse(model)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


def test_fusing_twice_replaces_nothing_and_says_so():
    model = gpt2()
    fuse(model)
    want = logits(model, **batch("cpu"))
    again = fuse(model)
    assert again.replaced == [] and again.max_abs_diff is None and not again
    assert {path for path, _ in again.skipped} == places()
    assert {reason for _, reason in again.skipped} == {"fused already"}
    assert "nothing replaced" in str(again) and "fused already" in str(again)
    assert torch.equal(logits(model, **batch("cpu")), want)
    assert set(unfuse(model)) == places()


# ---- copies


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_fused_and_independent(fused_device, how):
    model, stock = pair(fused_device)
    if how == "deepcopy":
        copied = copy.deepcopy(model)
    elif how == "pickle":
        copied = pickle.loads(pickle.dumps(model))
    else:
        copied = saved_and_loaded(model)
    inputs = batch(fused_device, (0, 0))
    want = logits(model, **inputs)
    assert torch.equal(logits(copied, **inputs), want)
    assert not {id(module) for module in copied.modules()} & {id(each) for each in model.modules()}
    for block in copied.transformer.h:
        assert gpt2_block.fused_sites(block) == BOTH
    with torch.no_grad():
        for block in copied.transformer.h:
            block.ln_2.weight.mul_(2)
    assert not torch.allclose(logits(copied, **inputs), want)
    assert torch.equal(logits(model, **inputs), want)
    assert set(unfuse(copied)) == places()
    assert torch.equal(logits(model, **inputs), want)


def test_casts_follow():
    model, stock = pair()
    inputs = batch("cpu", (0, 0))
    got = logits(model.double(), **inputs)
    assert got.dtype == torch.float64
    assert_close(got, logits(stock.double(), **inputs), rtol=1e-10, atol=1e-10)


def test_replicas_run_stock_with_their_own_parameters():
    # DataParallel makes shallow copies.
    model, stock = pair()
    block, stock_block = model.transformer.h[0], stock.transformer.h[0]
    x = torch.randn(2, 5, 32)
    norm, mlp = copy.copy(block.ln_2), copy.copy(block.mlp)
    norm._parameters = {name: p.detach() * 2 for name, p in norm._parameters.items()}
    with torch.no_grad():
        stock_block.ln_2.weight.mul_(2)
        stock_block.ln_2.bias.mul_(2)
        assert torch.equal(mlp(norm(x)), stock_block.mlp(stock_block.ln_2(x)))


def test_replicas_of_the_attention_run_stock_too():
    model, stock = pair()
    block, stock_block = model.transformer.h[0], stock.transformer.h[0]
    x = torch.randn(2, 5, 32)
    norm, attn, c_attn = (copy.copy(m) for m in (block.ln_1, block.attn, block.attn.c_attn))
    c_attn._parameters = {name: p.detach() * 2 for name, p in c_attn._parameters.items()}
    attn._modules = {**attn._modules, "c_attn": c_attn}
    with torch.no_grad():
        stock_block.attn.c_attn.weight.mul_(2)
        stock_block.attn.c_attn.bias.mul_(2)
        want = stock_block.attn(stock_block.ln_1(x))[0]
        assert_close(attn(norm(x))[0], want, rtol=1e-5, atol=1e-5)


# ---- refusals


def hook_it(module, kind):
    return {
        "forward": lambda: module.register_forward_hook(lambda m, a, out: None),
        "pre": lambda: module.register_forward_pre_hook(lambda m, a: None),
        "backward": lambda: module.register_full_backward_hook(lambda m, gi, go: None),
        "backward_pre": lambda: module.register_full_backward_pre_hook(lambda m, go: None),
    }[kind]()


@pytest.mark.parametrize("kind", ["forward", "pre", "backward", "backward_pre"])
@pytest.mark.parametrize(
    ("hooked", "stays"),
    [
        ("ln_1", "attn.c_attn"),
        ("attn", "attn.c_attn"),
        ("attn.c_attn", "attn.c_attn"),
        ("ln_2", "mlp"),
        ("mlp", "mlp"),
        ("mlp.c_fc", "mlp"),
        ("mlp.act", "mlp"),
    ],
)
def test_hooks_are_refused_with_a_reason(hooked, stays, kind):
    model = gpt2()
    stock = copy.deepcopy(model)
    hook_it(model.transformer.h[1].get_submodule(hooked), kind)
    report = fuse(model)
    assert [path for path, _ in report.skipped] == [f"transformer.h.1.{stays}"]
    reason = report.skipped[0][1]
    assert hooked.split(".")[-1] in reason and "hooks" in reason
    assert set(report.replaced) == places() - {f"transformer.h.1.{stays}"}
    assert_same_logits(model, stock)


class LoraConv1D(nn.Module):
    """As LoRA libraries wrap a layer: the base layer stays inside."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.nx, 2, bias=False)
        self.up = nn.Linear(2, base.nf, bias=False)

    @property
    def weight(self):
        return self.base.weight

    @property
    def bias(self):
        return self.base.bias

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def wrap_in_lora(model, seed=7):
    torch.manual_seed(seed)
    block = model.transformer.h[0]
    block.mlp.c_fc = LoraConv1D(block.mlp.c_fc)
    block.attn.c_attn = LoraConv1D(block.attn.c_attn)
    return model


class Quantised(torch.Tensor):
    pass


class OtherNorm(nn.LayerNorm):
    pass


def quantised(block):
    weight = block.mlp.c_fc.weight.detach().as_subclass(Quantised)
    block.mlp.c_fc.weight = nn.Parameter(weight)


def with_a_lambda(block):
    del block.mlp.act
    block.mlp.act = lambda x: x


# The change of a block, the place below it that stays stock, and the reason.
UNSAFE = {
    "quantised": (quantised, "mlp", "Quantised"),
    "norm subclass": (
        lambda b: setattr(b.ln_1, "__class__", OtherNorm),
        "attn.c_attn",
        "OtherNorm",
    ),
    "mixed dtypes": (lambda b: b.ln_2.float(), "mlp", "mixed dtypes: ln_2.weight float32"),
    "activation": (
        lambda b: setattr(b.mlp, "act", transformers.activations.ACT2FN["quick_gelu"]),
        "mlp",
        "QuickGELUActivation",
    ),
    "lambda": (with_a_lambda, "mlp", "function"),
    "parametrised": (
        lambda b: nn.utils.parametrizations.weight_norm(b.mlp.c_fc),
        "mlp",
        "ParametrizedConv1D",
    ),
    "instance forward": (
        lambda b: setattr(b.ln_2, "forward", nn.LayerNorm.forward.__get__(b.ln_2)),
        "mlp",
        "ln_2.forward was replaced",
    ),
    "mlp subclass": (
        lambda b: setattr(b.mlp, "__class__", type("OtherMLP", (type(b.mlp),), {})),
        "mlp",
        "OtherMLP",
    ),
}


@pytest.mark.parametrize("case", UNSAFE)
def test_unsafe_places_are_refused_with_a_reason(case):
    model = gpt2()
    if case == "mixed dtypes":
        model.bfloat16()
    change, below, why = UNSAFE[case]
    change(model.transformer.h[1])
    report = fuse(model, check=False)
    path = f"transformer.h.1.{below}"
    assert [entry for entry, _ in report.skipped] == [path]
    assert why in report.skipped[0][1], report.skipped[0][1]
    assert set(report.replaced) == places() - {path}
    assert report.max_abs_diff is None


def test_lora_before_fuse_stays_stock():
    model = wrap_in_lora(gpt2())
    stock, report = fuse_keeping_stock(model)
    skipped = dict(report.skipped)
    assert skipped.keys() == {"transformer.h.0.mlp", "transformer.h.0.attn.c_attn"}
    assert all("LoraConv1D" in reason for reason in skipped.values())
    assert_same_logits(model, stock)


def test_lora_after_fuse_makes_the_place_stock():
    model, stock = pair()
    wrap_in_lora(model)
    wrap_in_lora(stock)
    assert_same_logits(model, stock)


CALLED = ["attn.c_proj", "attn.resid_dropout", "mlp.c_proj", "mlp.dropout"]


@pytest.mark.parametrize(
    "name", ["ln_1", "attn", "attn.c_attn", "ln_2", "mlp", "mlp.c_fc", *CALLED]
)
def test_a_hook_after_fuse_sees_stock_values(name):
    seen = []

    def look(module, args, out):
        seen.append([t.detach() for t in (*args, out) if isinstance(t, torch.Tensor)])

    inputs = batch("cpu", (0, 0))
    model, stock = pair()
    want = logits(stock, **inputs)
    for each in (model, stock):
        handle = each.transformer.h[1].get_submodule(name).register_forward_hook(look)
        assert_close(logits(each, **inputs), want, rtol=1e-5, atol=1e-5)
        handle.remove()
    assert len(seen) == 2 and len(seen[0]) == len(seen[1])
    assert_close(seen[0], seen[1], rtol=1e-5, atol=1e-5)
    assert gpt2_block.fused_sites(model.transformer.h[1]) == BOTH


def offload(module):
    """Wraps a module's forward as accelerate does: its parameters come, and go to meta again."""
    kept, stock = dict(module._parameters), module.forward

    def leave():
        for name, value in kept.items():
            module._parameters[name] = None if value is None else nn.Parameter(value.to("meta"))

    def forward(*args, **kwargs):
        module._parameters.update(kept)
        try:
            return stock(*args, **kwargs)
        finally:
            leave()

    module.forward = forward
    leave()

    def undo():
        module._parameters.update(kept)
        module.forward = stock  # accelerate leaves the bound method on the instance

    return undo


@pytest.mark.parametrize("name", ["ln_1", "attn", "attn.c_attn", "ln_2", "mlp", "mlp.c_fc"])
def test_parameters_that_come_and_go_are_read_by_their_module_alone(fused_device, name):
    model, stock = pair(fused_device)
    inputs = batch(fused_device, (0, 0))
    want = logits(stock, **inputs)
    block = model.transformer.h[1]
    first = name in ("ln_1", "attn", "attn.c_attn")
    undo = offload(block.get_submodule(name))
    assert gpt2_block.fused_sites(block) == [gpt2_block.MLP if first else gpt2_block.ATTENTION]
    assert_close(logits(model, **inputs), want, rtol=1e-5, atol=1e-5)
    undo()
    assert gpt2_block.fused_sites(block) == BOTH
    assert_close(logits(model, **inputs), want, rtol=1e-5, atol=1e-5)
    offload(block.get_submodule(name))
    assert set(unfuse(model)) == places()
    assert torch.equal(logits(model, **inputs), want)


@pytest.mark.parametrize("name", ["attn.c_proj", "mlp.c_proj"])
def test_a_wrapped_projection_is_called(fused_device, name):
    model, stock = pair(fused_device)
    offload(model.transformer.h[1].get_submodule(name))
    assert_same_logits(model, stock)


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("first", ["fuse", "offload"])
def test_offloading_of_accelerate(fused_device, tmp_path, where, first):
    accelerate = pytest.importorskip("accelerate")
    model = gpt2(fused_device)
    inputs = batch(fused_device)
    real = inputs["attention_mask"].bool()
    want = logits(model, **inputs)[real]
    if first == "fuse":
        assert set(fuse(model).replaced) == places()
    if where == "cpu":
        accelerate.cpu_offload(model, execution_device=fused_device)
    else:
        accelerate.disk_offload(model, tmp_path, execution_device=fused_device)
    if first == "offload":
        # The attention reads no parameters: it is switched, on the device that they are brought to.
        report = fuse(model)
        assert {path.split(".")[-1] for path in report.replaced} == {"attn"}
        assert len(report.replaced) == LAYERS and report.max_abs_diff < 1e-5
        assert all("has accelerate's hooks" in reason for _, reason in report.skipped)
    for _ in range(2):
        assert_close(logits(model, **inputs)[real], want, rtol=1e-5, atol=1e-5)
    unfuse(model)
    assert_close(logits(model, **inputs)[real], want, rtol=1e-5, atol=1e-5)


def test_a_hook_on_all_modules_sees_stock_values():
    model, stock = pair()
    inputs = batch("cpu", (0, 0))
    seen = []

    def look(module, args, out):
        if isinstance(module, (nn.LayerNorm, Conv1D)):
            seen.append(out.detach())

    for each in (model, stock):
        handle = nn.modules.module.register_module_forward_hook(look)
        try:
            logits(each, **inputs)
        finally:
            handle.remove()
    half = len(seen) // 2
    assert half == 6 * LAYERS + 1
    assert_close(seen[:half], seen[half:], rtol=1e-5, atol=1e-5)
    assert gpt2_block.fused_sites(model.transformer.h[1]) == BOTH


def test_recording_hidden_states_does_not_stop_the_fusion(fused_device):
    model, stock = pair(fused_device)
    inputs = batch(fused_device, (0, 0))
    with torch.no_grad():
        ours = model(**inputs, output_hidden_states=True).hidden_states
        want = stock(**inputs, output_hidden_states=True).hidden_states
    assert len(ours) == LAYERS + 1
    assert_close(ours, want, rtol=1e-5, atol=1e-5)
    assert all(gpt2_block.fused_sites(block) == BOTH for block in model.transformer.h)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("attentions", "output_attentions"),
        ("flash", "flash_attention_2"),
        ("other module", "Identity"),
        ("no record", "returns attention weights when asked"),
    ],
)
def test_attention_stays_stock_for_a_reason(case, why, monkeypatch):
    eager = case in ("attentions", "no record")
    model = gpt2(implementation="eager" if eager else "sdpa")
    monkeypatch.setattr(hf_attention, "_collector", None if case == "no record" else object())
    if case == "attentions":
        model.config.output_attentions = True
    elif case == "flash":
        model.config._attn_implementation_internal = "flash_attention_2"
    else:
        model.transformer.h[1].attn = nn.Identity()
        model.transformer.h[1].attn.c_attn = nn.Identity()
    report = fuse(model, check=False)
    reasons = {path: reason for path, reason in report.skipped if path.endswith(".attn")}
    assert reasons.keys() == {f"transformer.h.{layer}.attn" for layer in range(LAYERS)}
    assert all(why in reason for reason in reasons.values())
    assert model.config._attn_implementation != "torchweld"


@pytest.mark.parametrize(
    "model", [nn.Linear(3, 3), nn.Sequential()], ids=["a layer", "an empty model"]
)
def test_a_model_without_gpt2_is_one_sentence(model):
    with pytest.raises(TypeError, match="must be or contain a model of transformers") as error:
        fuse(model)
    assert "\n" not in str(error.value) and type(model).__name__ in str(error.value)
    assert "use_in_sdpa()" in str(error.value)


@pytest.mark.parametrize(
    ("version", "got"), [("4.44.2", "4.44.2"), ("5.3.0", "5.3.0"), (None, "none")]
)
def test_a_transformers_that_is_too_old_is_one_sentence(monkeypatch, version, got):
    import importlib.metadata

    def installed(name):
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    sentence = f"needs transformers 5.4 or newer, but (there is |got ){got}; install it with `pip"
    for caller, call in (("fuse", lambda: fuse(gpt2())), ("integrations", register_attention)):
        with pytest.raises(ImportError, match=f"torchweld.{caller} {sentence}"):
            call()


def test_meta_parameters_are_refused():
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1))
        llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=1))
    report = fuse(model)
    assert not report.replaced
    assert all("meta device" in reason for _, reason in report.skipped)
    (note,) = fuse(llama).notes
    assert note.endswith("; load the weights, then call fuse again")


def test_an_op_without_a_kernel_leaves_its_places_stock(monkeypatch):
    from torchweld import _library

    class Ops:
        def __getattr__(self, name):
            return getattr(torch.ops.torchweld, name)

        def layer_norm_linear(self, *args, **kwargs):
            raise NotImplementedError("torchweld::layer_norm_linear has no kernel here")

    monkeypatch.setattr(_library, "ops", Ops())
    model = gpt2()
    report = fuse(model)
    assert all(path.endswith(".attn") for path in report.replaced) and len(report.replaced) == 2
    assert {reason for _, reason in report.skipped} == {
        "torchweld::layer_norm_linear has no kernel here"
    }
    assert len(report.skipped) == 2 * LAYERS


def test_a_device_without_kernels_is_named_and_stays_stock(device):
    model = gpt2(device)
    stock, report = fuse_keeping_stock(model)
    assert {path for path, _ in report.skipped} | set(report.replaced) == places()
    if device == "cpu":
        assert report.skipped == []
    assert all("CUDA" in reason for _, reason in report.skipped)
    assert_same_logits(model, stock)


# ---- the sample


@pytest.mark.parametrize("kind", ["tensor", "dict"])
def test_a_sample_of_the_user(fused_device, kind):
    model = gpt2(fused_device)
    inputs = batch(fused_device)
    report = fuse(model, sample=inputs["input_ids"] if kind == "tensor" else inputs)
    assert report.compared == f"logits (3, 12, {VOCAB}) float32, whole and over a cache"
    assert report.max_abs_diff < 1e-5


def test_without_check_nothing_runs():
    model = gpt2()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    report = fuse(model, check=False)
    assert calls == [] and report.max_abs_diff is None and set(report.replaced) == places()
    assert "not measured" in str(report)


def test_the_difference_is_measured_and_not_assumed(monkeypatch):
    right = gpt2_block.norm_linear
    monkeypatch.setattr(gpt2_block, "norm_linear", lambda *args: right(*args) + 0.01)
    assert fuse(gpt2()).max_abs_diff > 1e-4


def test_a_failing_sample_leaves_the_model_stock():
    model = gpt2()
    classes = [type(module) for module in model.modules()]
    with pytest.raises(IndexError):
        fuse(model, sample=torch.full((1, 4), VOCAB + 5))
    for wrong, got in (("a text", "'a text'"), ([1, 2], "list")):
        with pytest.raises(TypeError, match=f"sample must be .*, but got {got}; use tokenizer"):
            fuse(model, sample=wrong)
    assert [type(module) for module in model.modules()] == classes
    assert model.config._attn_implementation == "sdpa"
    assert not model.training


def test_nan_from_the_fused_model_leaves_it_stock(monkeypatch):
    right = gpt2_block.norm_linear
    monkeypatch.setattr(gpt2_block, "norm_linear", lambda *args: right(*args) * float("nan"))
    model = gpt2()
    classes = [type(module) for module in model.modules()]
    with pytest.raises(RuntimeError, match="the model is stock again"):
        fuse(model)
    assert [type(module) for module in model.modules()] == classes
    assert model.config._attn_implementation == "sdpa"


# ---- other classes


@pytest.mark.parametrize(
    ("cls", "prefix"),
    [
        ("GPT2Model", "h"),
        ("GPT2LMHeadModel", "transformer.h"),
        ("GPT2DoubleHeadsModel", "transformer.h"),
        ("GPT2ForSequenceClassification", "transformer.h"),
        ("GPT2ForTokenClassification", "transformer.h"),
    ],
)
def test_every_class_that_holds_a_gpt2(fused_device, cls, prefix):
    model = gpt2(fused_device, cls=cls)
    stock, report = fuse_keeping_stock(model)
    assert set(report.replaced) == places(prefix=prefix)
    assert report.max_abs_diff < 1e-5
    ids = batch(fused_device, (0, 0))["input_ids"]
    with torch.no_grad():
        ours, want = model(ids), stock(ids)
    assert_close(ours[0], want[0], rtol=1e-5, atol=1e-5)
    unfuse(model)
    with torch.no_grad():
        assert torch.equal(model(ids)[0], want[0])


def test_inside_another_module(fused_device):
    outer = nn.ModuleDict({"student": gpt2(fused_device), "teacher": gpt2(fused_device, seed=1)})
    report = fuse(outer)
    wanted = places(prefix="student.transformer.h") | places(prefix="teacher.transformer.h")
    assert set(report.replaced) == wanted and report.max_abs_diff < 1e-5
    assert set(unfuse(outer)) == wanted


def test_cross_attention(fused_device):
    model = gpt2(fused_device, add_cross_attention=True)
    stock, report = fuse_keeping_stock(model)
    cross = {f"transformer.h.{layer}.crossattention" for layer in range(LAYERS)}
    assert set(report.replaced) == places() | cross and report.skipped == []
    inputs = batch(fused_device, (0, 0))
    memory = torch.randn(2, 7, 32, device=fused_device)
    ours = logits(model, **inputs, encoder_hidden_states=memory)
    want = logits(stock, **inputs, encoder_hidden_states=memory)
    assert_close(ours, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"reorder_and_upcast_attn": True}])
def test_attention_weights_of_an_eager_model_stay(fused_device, options):
    """Such calls run GPT-2's eager attention; the others run the op."""
    model, stock = pair(fused_device, implementation="eager", **options)
    inputs = batch(fused_device)
    with torch.no_grad(), pytest.warns(UserWarning, match="attention weights are asked for"):
        ours = model(**inputs, output_attentions=True)
    want = stock(**inputs, output_attentions=True)
    assert len(ours.attentions) == LAYERS
    assert_close(ours.attentions, want.attentions, rtol=1e-5, atol=1e-5)
    real = inputs["attention_mask"].bool()
    assert_close(ours.logits[real], want.logits[real], rtol=1e-5, atol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_close(logits(model, **inputs)[real], want.logits[real], rtol=1e-5, atol=1e-5)


def test_cross_attention_weights_of_an_eager_model_stay():
    model, stock = pair(implementation="eager", add_cross_attention=True)
    inputs = {**batch("cpu", (0, 0)), "encoder_hidden_states": torch.randn(2, 7, 32)}
    with torch.no_grad():
        ours = model(**inputs, output_attentions=True)
        want = stock(**inputs, output_attentions=True)
    assert len(ours.cross_attentions) == LAYERS
    assert_close(ours.cross_attentions, want.cross_attentions, rtol=1e-5, atol=1e-5)


def test_assisted_generation_with_attention_weights():
    """The settings are those of transformers' own test."""
    settings = dict(
        max_new_tokens=6,
        do_sample=False,
        eos_token_id=None,
        output_attentions=True,
        return_dict_in_generate=True,
    )
    prompt = batch("cpu", (0,))["input_ids"]
    outs = []
    for each in pair(implementation="eager"):
        assistant = gpt2(seed=1, implementation="eager")
        outs.append(each.generate(prompt, assistant_model=assistant, **settings))
    assert torch.equal(outs[0].sequences, outs[1].sequences)
    assert_close(outs[0].attentions, outs[1].attentions, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("option", ["scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"])
def test_attention_options(fused_device, option):
    model, stock = pair(fused_device, implementation="eager", **{option: True})
    assert_same_logits(model, stock)


# ---- the report


def test_report_as_text_dict_and_table():
    report = FuseReport(
        model="GPT2LMHeadModel",
        replaced=["h.0.mlp", "h.1.mlp", "h.3.mlp", "ln"],
        skipped=[("h.2.mlp", "c_fc has hooks")],
        max_abs_diff=1.25e-6,
        compared="logits (2, 16, 61) float32",
        ops={f"h.{i}.mlp": "layer_norm_linear" for i in (0, 1, 3)},
        notes=["attn_pdrop is 0.1"],
    )
    text = str(report)
    assert text.splitlines()[0] == (
        "torchweld.fuse(GPT2LMHeadModel): 4 places replaced, 1 left stock"
    )
    assert "layer_norm_linear  h.{0-1,3}.mlp" in text
    assert "left stock: h.2.mlp: c_fc has hooks" in text
    assert "1.25e-06 over logits (2, 16, 61) float32" in text
    assert "attn_pdrop is 0.1" in text
    assert bool(report) and not FuseReport()
    back = json.loads(json.dumps(report.to_dict()))
    assert back["replaced"] == report.replaced
    assert back["skipped"] == [["h.2.mlp", "c_fc has hooks"]]

    rich = pytest.importorskip("rich")
    console = rich.get_console().__class__(file=io.StringIO(), width=160)
    console.print(report)
    table = console.file.getvalue()
    assert "h.{0-1,3}.mlp" in table and "c_fc has hooks" in table and "1.25e-06" in table


# ---- modules in several places, and in other places


def put(model, place, source):
    """A module of the transformer at one more place, by their paths."""
    base = model.transformer
    base.set_submodule(place, base.get_submodule(source))


FIRST, SECOND = "transformer.h.0.attn.c_attn", "transformer.h.1.attn.c_attn"
# A place, the module that is put there, and the places that stay stock.
SEVERAL = {
    "block": ("h.1", "h.0", set()),
    "attn": ("h.1.attn", "h.0.attn", {FIRST, SECOND}),
    "attn.c_attn": ("h.1.attn.c_attn", "h.0.attn.c_attn", {FIRST, SECOND}),
    "ln_1": ("h.1.ln_1", "h.0.ln_1", {FIRST, SECOND}),
    "mlp": ("h.1.mlp", "h.0.mlp", {"transformer.h.0.mlp", "transformer.h.1.mlp"}),
    "ln_1 and ln_2": ("h.1.ln_2", "h.1.ln_1", {SECOND, "transformer.h.1.mlp"}),
    "ln_f": ("ln_f", "h.0.ln_1", {FIRST}),
}


@pytest.mark.parametrize("case", SEVERAL)
def test_modules_that_a_model_uses_in_several_places(case):
    place, source, stay = SEVERAL[case]
    model = gpt2()
    put(model, place, source)
    stock = copy.deepcopy(model)
    # A cache holds keys by the layer, which a shared attention has one of.
    inputs = {**batch("cpu", (0, 0)), "use_cache": False}
    want = logits(stock, **inputs)
    report = fuse(model)
    assert {path for path, _ in report.skipped} == stay
    assert all("is used in 2 places of the model" in why for _, why in report.skipped)
    assert set(report.replaced) == places() - stay
    # Every place runs once in a pass, also where several are one module.
    names = [report.ops[path].split(" ")[0] for path in report.replaced]
    assert report.calls == Counter(f"torchweld::{name}" for name in names)
    assert_close(logits(model, **inputs), want, rtol=1e-5, atol=1e-5)
    assert set(unfuse(model)) == places() - stay
    assert torch.equal(logits(model, **inputs), want)


MOVED = {
    **{n: (f"h.0.{n}", f"h.1.{n}") for n in ("attn", "mlp", "ln_1", "ln_2", "attn.c_attn")},
    "ln_1 to ln_2": ("h.1.ln_2", "h.1.ln_1"),
    "ln_1 to ln_f": ("ln_f", "h.1.ln_1"),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("case", MOVED)
def test_a_part_that_was_moved_after_fuse_computes_what_it_did(case, compiled):
    model, stock = pair()
    for each in (model, stock):
        put(each, *MOVED[case])
    # A cache holds keys by the layer, which a shared attention has one of.
    inputs = {**batch("cpu", (0, 0)), "use_cache": False}
    want = logits(stock, **inputs)
    if compiled:
        call = torch.compile(model, backend="aot_eager")
        assert_close(logits(call, **inputs), want, rtol=1e-5, atol=1e-5)
    else:
        with Calls() as calls:
            assert_close(logits(model, **inputs), want, rtol=1e-5, atol=1e-5)
        assert calls.names["torchweld::layer_norm_linear"] == 2 * LAYERS
    unfuse(model)
    assert torch.equal(logits(model, **inputs), want)
    fuse(model)
    assert_close(logits(model, **inputs), want, rtol=1e-5, atol=1e-5)


def test_whole_blocks_may_be_moved_after_fuse():
    model, stock = pair()
    for each in (model, stock):
        blocks = each.transformer.h
        each.transformer.h = nn.ModuleList(
            [blocks[1], blocks[0], blocks[1], copy.deepcopy(blocks[0])]
        )
    inputs = batch("cpu", (0, 0))
    ours = logits(model, **inputs, use_cache=False)
    assert_close(ours, logits(stock, **inputs, use_cache=False), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("autocast", [False, True])
def test_norms_that_are_cast_after_fuse(autocast):
    """ "For stability": torch's LayerNorm takes float32 weights beside 16 bits on a CPU."""
    model, stock = pair()
    for each in (model, stock):
        each.bfloat16()
        for module in each.modules():
            if isinstance(module, nn.LayerNorm):
                module.float()
    inputs = batch("cpu", (0, 0))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        with Calls() as calls:
            ours = logits(model, **inputs)
        want = logits(stock, **inputs)
    assert bool(calls.names["torchweld::layer_norm_linear"]) == autocast
    assert_close(ours, want, rtol=2e-2, atol=2e-2)
    model.float()
    with Calls() as calls:
        logits(model, **inputs)
    assert calls.names["torchweld::layer_norm_linear"] == 2 * LAYERS


# ---- models that are no GPT-2


def llama(implementation="sdpa", **changes):
    return tiny_grouped("Llama", implementation, **{"initializer_range": 0.2, **changes})


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_another_model_gets_the_attention_and_a_report(monkeypatch, implementation):
    model = llama(implementation).eval()
    stock = copy.deepcopy(model)
    seen = []
    real = torch.ops.torchweld.attention

    def counted(*args, **kwargs):
        seen.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.ops.torchweld, "attention", counted)
    report = fuse(model, only="attention")
    layers = [f"model.layers.{i}.self_attn" for i in range(LAYERS)]
    assert report.replaced == layers and report.skipped == []
    assert report.notes == [WAS_EAGER] * (implementation == "eager")
    # whole, in two calls, and four tokens
    assert len(seen) == 7 * LAYERS and report.max_abs_diff < 1e-5
    assert report.calls == {"torchweld::attention": LAYERS}
    assert "attention  model.layers.{0-1}.self_attn" in str(report)
    inputs = batch("cpu")
    real_tokens = inputs["attention_mask"].bool()
    ours, want = logits(model, **inputs), logits(stock, **inputs)
    assert_close(ours[real_tokens], want[real_tokens], rtol=1e-5, atol=1e-5)
    again = fuse(model, only="attention")
    assert again.replaced == [] and {why for _, why in again.skipped} == {"fused already"}
    other = copy.deepcopy(model)
    for each in (model, other):
        assert unfuse(each) == layers and unfuse(each) == []
        assert each.config._attn_implementation == implementation
        assert torch.equal(logits(each, **inputs), want)


def with_a_copied_layer(name, implementation):
    """A model whose second layer is a copy, with a config of its own, and that layer's config."""
    torch.manual_seed(0)
    if name == "gpt2":
        model = gpt2(implementation=implementation)
        layers = model.transformer.h
    elif name == "bert":
        model = tiny_model("bert", "BertForMaskedLM", implementation, is_decoder=False).eval()
        layers = model.bert.encoder.layer
    else:
        model = llama(implementation).eval()
        layers = model.model.layers
    layers[1] = copy.deepcopy(layers[1])
    owner = layers[1].attention.self if name == "bert" else layers[1]
    return model, getattr(owner, "attn", getattr(owner, "self_attn", owner)).config


@pytest.mark.parametrize("pads", [None, (0, 0, 0), (0, 3, 7)])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_layers_with_a_config_of_their_own_are_switched(name, implementation, pads):
    model, config = with_a_copied_layer(name, implementation)
    assert config is not model.config
    stock, report = fuse_keeping_stock(model, only="attention")
    assert report.skipped == [] and report.calls == {"torchweld::attention": LAYERS}
    inputs = {"input_ids": batch("cpu")["input_ids"]} if pads is None else batch("cpu", pads)
    if name == "bert":
        inputs.pop("position_ids", None)
    real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    want = logits(stock, **inputs)
    assert_close(logits(model, **inputs)[real], want[real], rtol=1e-5, atol=1e-5)
    unfuse(model)
    assert config._attn_implementation == model.config._attn_implementation == implementation
    assert torch.equal(logits(model, **inputs), want)


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_a_layer_whose_own_config_has_another_attention_is_listed(name):
    model, config = with_a_copied_layer(name, "eager")
    config._attn_implementation = "sdpa"
    stock, report = fuse_keeping_stock(model, only="attention")
    assert not report and len(report.skipped) == LAYERS
    for _, reason in report.skipped:
        assert 'has a config of its own with attn_implementation="sdpa"' in reason
    inputs = {key: value for key, value in batch("cpu").items() if key != "position_ids"}
    assert torch.equal(logits(model, **inputs), logits(stock, **inputs))


def test_a_class_that_is_not_served_stays_stock_with_the_reason():
    config = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=4)
    model = transformers.BloomForCausalLM(config)
    before = model.config._attn_implementation
    report = fuse(model, only="attention")
    assert not report and model.config._attn_implementation == before
    assert [path for path, _ in report.skipped] == ["transformer.h.0.self_attention"]
    reason = "does not take its attention from transformers' AttentionInterface"
    assert report.skipped[0][1] == f"BloomForCausalLM {reason}"


def test_another_model_that_fails_its_sample_stays_stock():
    model = llama()
    with pytest.raises(IndexError):
        fuse(model, sample=torch.full((1, 4), VOCAB + 5))
    assert model.config._attn_implementation == "sdpa" and unfuse(model) == []


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def clip():
    parts = {**SIZES, "intermediate_size": 48}
    text = {**parts, "vocab_size": VOCAB, "max_position_embeddings": 20, "eos_token_id": 2}
    vision = {**parts, "image_size": 32, "patch_size": 8}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision)
    return transformers.CLIPModel._from_config(config, attn_implementation="sdpa").eval()


def test_a_model_without_a_default_sample_is_not_measured():
    report = fuse(clip())
    assert len(report.replaced) == 4 and report.max_abs_diff is None and report.calls == {}
    note = "no sample batch is known for CLIPModel; pass sample= to measure what its layers run"
    assert report.notes == [note] and "not measured" in str(report)
    inputs = {
        "input_ids": batch("cpu", (0, 0))["input_ids"],
        "pixel_values": torch.randn(2, 3, 32, 32),
    }
    report = fuse(clip(), sample=inputs)
    assert report.calls == {"torchweld::attention": 4} and report.notes == []
    assert report.compared == "output (2, 2) float32" and report.max_abs_diff < 1e-4


def test_a_layer_that_the_sample_does_not_run_is_listed():
    sample = {"pixel_values": torch.randn(2, 3, 32, 32)}
    model = clip()
    report = fuse(nn.ModuleDict({"clip": model}), check=False)
    assert "check=False: no sample batch ran" in str(report) and len(report.replaced) == 4
    unfuse(model)
    model.forward = lambda **inputs: model.vision_model(**inputs)
    report = fuse(model, sample=sample)
    runs = {path: report.ops[path] for path in report.replaced}
    assert len(runs) == 4
    for path, what in runs.items():
        seen = "vision_model" in path
        assert what == ("attention" if seen else "attention, not run by the sample batch")


def masked_models():
    """(kind, class, changes, layers that run the op, (layers that don't, why))"""
    encoder = {"is_decoder": False}
    dense = f"torch's scaled_dot_product_attention runs: {fallback.GIVEN_4D}"
    return {
        "BERT": ("bert", "BertForMaskedLM", encoder, 2, 0, None),
        "T5": ("t5", "T5ForConditionalGeneration", encoder, 6, 0, None),
        "UMT5": ("umt5", "UMT5ForConditionalGeneration", encoder, 6, 0, None),
        "BART": ("bart", "BartForConditionalGeneration", encoder, 6, 0, None),
        "ModernBERT": ("modernbert", "ModernBertForMaskedLM", {"local_attention": 8}, 2, 0, None),
        "LayoutLM": ("layoutlm", "LayoutLMForMaskedLM", encoder, 0, 2, dense),
    }


@pytest.mark.parametrize("name", masked_models())
def test_the_report_says_what_really_runs(name):
    kind, cls, changes, runs, others, why = masked_models()[name]
    if hf_models.unsupported_reason(getattr(transformers, cls)) is not None:
        pytest.skip("it takes its attention from elsewhere in this transformers")
    model = tiny_model(kind, cls, "sdpa", **changes).float().eval()
    report = fuse(model, only="attention")
    assert len(report.replaced) == runs and len(report.skipped) == others
    reasons = {reason for _, reason in report.skipped}
    assert reasons == ({why} if others else set())
    want = {"torchweld::attention": runs, why: others}
    assert report.calls == {what: count for what, count in want.items() if count}
    assert bool(report) == (runs > 0)
    # A model that runs no op of torchweld is stock again.
    assert (model.config._attn_implementation == "torchweld") == (runs > 0)
    assert (report.max_abs_diff is None) == (runs == 0)


@pytest.mark.parametrize(
    ("kind", "cls", "others"),
    [
        ("bert", "BertModel", {"norm": 1 + 2 * LAYERS, "mlp": LAYERS}),
        ("vit", "ViTModel", {"norm": 1 + 2 * LAYERS, "mlp": LAYERS}),
        ("esm", "EsmModel", {"norm": 1 + 2 * LAYERS, "mlp": LAYERS}),
        ("bart", "BartModel", {"norm": 2 + 6 * LAYERS, "mlp": 0}),  # its layers hold the products
    ],
)
def test_norms_and_mlps_that_stay_stock_are_listed(kind, cls, others):
    model = tiny_model(kind, cls, "sdpa", is_decoder=False).float().eval()
    for part, count in others.items():
        report = fuse(model, only=part, check=False)
        assert len(report.skipped) == count
        assert f"{count} left stock" in str(report) or f"{count} places left" in str(report)
        for path, reason in report.skipped:
            name = type(model.get_submodule(path)).__name__
            unknown = {"EsmIntermediate": "MLPs", "BartDecoderLayer": "decoder layers"}
            expected = "torch's linear layer and activation are as fast on cpu"
            if name in unknown:
                expected = f"{name} is none of the {unknown[name]} that fuse knows"
            elif name == "LayerNorm":
                expected = "torch's layer_norm of float32 is as fast on cpu"
            assert reason == expected


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    ("kind", "cls", "name"),
    [
        ("bert", "BertModel", "attention_probs_dropout_prob"),
        ("roberta", "RobertaForSequenceClassification", "attention_probs_dropout_prob"),
        ("wav2vec2", "Wav2Vec2Model", "attention_dropout"),
        ("bart", "BartForConditionalGeneration", "attention_dropout"),
        ("llama", "LlamaForCausalLM", "attention_dropout"),
        ("gpt2", "GPT2LMHeadModel", "attn_pdrop"),
        ("t5", "T5ForConditionalGeneration", "dropout_rate"),
    ],
)
def test_the_report_says_what_runs_in_training_mode(kind, cls, name, dropout):
    if hf_models.unsupported_reason(getattr(transformers, cls)) is not None:
        pytest.skip("it takes its attention from elsewhere in this transformers")
    changes = {name: dropout, "is_decoder": kind in ("llama", "gpt2")}
    model = tiny_model(kind, cls, "sdpa", **changes).float().train()
    with own_warnings() as said:
        report = fuse(model, only="attention")
    assert not said  # the steps that really drop warn
    runs = "torch's scaled_dot_product_attention runs: attention dropout is on"
    places = len(report.replaced)
    note = f"in training mode: {places} x {runs} ({name}={dropout})"
    assert report.calls == {"torchweld::attention": places} and places > 0
    assert report.notes == ([note] if dropout else [])
    with Calls() as calls:
        model(**attention_switch.sample_of(model))
    assert any(op.startswith("torchweld::attention") for op in calls.names) == (not dropout)


@on_hopper
@pytest.mark.parametrize(
    ("kind", "cls", "dropout"),
    [
        ("bert", "BertModel", {"attention_probs_dropout_prob": 0.5}),
        ("t5", "T5Model", {"dropout_rate": 0.0}),
        ("t5", "T5Model", {"dropout_rate": 0.5}),
    ],
)
def test_dropout_and_a_bias_run_the_op_where_a_kernel_has_them(kind, cls, dropout):
    """In 16 bits for the head dims of Hopper's kernels; SDPA elsewhere."""
    for dtype, served in ((torch.bfloat16, True), (torch.float32, False)):
        model = tiny_model(kind, cls, "sdpa", is_decoder=False, **dropout)
        model = model.to("cuda", dtype).train()
        report = fuse(model, only="attention", check=False)
        given = {k: v.cuda() for k, v in attention_switch.sample_of(model).items()}
        with Calls() as calls:
            model(**given)[0].float().sum().backward()
        count = calls.names["torchweld::attention_backward"]
        assert count == (len(report.replaced) if served else 0)


def test_a_model_that_fails_in_training_mode_says_so(monkeypatch):
    def fail(*args, dropout=0.0, **kwargs):
        assert dropout == 0.0, "no dropout here"
        return attend(*args, **kwargs)

    model, attend = llama(attention_dropout=0.1), hf_attention.attention_forward
    monkeypatch.setattr(hf_attention, "attention_forward", fail)
    register_attention()
    try:
        report = fuse(model, only="attention")
    finally:
        monkeypatch.undo()
        register_attention()
    assert report.notes == ["in training mode its layers fail (AssertionError: no dropout here)"]


@pytest.mark.parametrize(
    ("kind", "cls"),
    [
        ("llama", "LlamaForSequenceClassification"),
        ("qwen3", "Qwen3ForSequenceClassification"),
        ("bert", "BertForSequenceClassification"),
    ],
)
def test_a_classifier_is_compared_at_its_tokens(kind, cls):
    """The classifier looks for the pad id, to find the last token of a sequence."""
    changes = {"is_decoder": kind != "bert", "initializer_range": 0.2}
    model = tiny_model(kind, cls, "sdpa", **changes).float().eval()
    report = fuse(model)
    assert report.compared == "logits (2, 2) float32" and report.max_abs_diff < 1e-5


def test_without_a_sample_the_source_shows_a_position_bias():
    """On fake tensors: no GPU is needed for the reason."""
    if not transformers.T5ForConditionalGeneration._supports_sdpa:
        pytest.skip("it takes its attention from elsewhere in this transformers")
    for device, replaced in (("cpu", 6), ("cuda", 0)):
        with FakeTensorMode(), torch.device(device):
            model = tiny_model("t5", "T5ForConditionalGeneration", "sdpa", is_decoder=False)
            report = fuse(model, check=False, only="attention")
        assert len(report.replaced) == replaced and len(report.skipped) == 6 - replaced
        assert all(BIAS in why for _, why in report.skipped)
        assert model.config._attn_implementation == ("torchweld" if replaced else "sdpa")


@pytest.mark.parametrize("check", [False, True])
def test_a_model_that_chooses_its_keys_stays_stock(check):
    if not hasattr(transformers, "DeepseekV32ForCausalLM"):
        pytest.skip("not in this transformers")
    model = tiny_model("deepseek_v32", "DeepseekV32ForCausalLM", "eager").float().eval()
    report = fuse(model, check=check, only="attention")
    assert report.replaced == [] and len(report.skipped) == 2
    assert all("indices (keys chosen for each query)" in why for _, why in report.skipped)
    assert model.config._attn_implementation == "eager"


def test_layers_of_linear_attention_are_not_counted():
    model = tiny_model("minimax", "MiniMaxForCausalLM", "sdpa").float().eval()
    report = fuse(model, only="attention")
    assert report.replaced == ["model.layers.0.self_attn"]
    assert report.skipped[0][0] == "model.layers.1.self_attn"
    assert report.skipped[0][1].startswith("MiniMaxLightningAttention does not take its attention")


def test_a_sample_that_runs_sdpa_is_said():
    inputs = batch("cpu", (0, 0))
    inputs["attention_mask"][0, 4] = 0
    why = "torch's scaled_dot_product_attention runs: attention_mask has padding between tokens"
    for model in (llama(), gpt2()):
        report = fuse(model, sample=inputs, only="attention")
        skipped = {path: reason for path, reason in report.skipped}
        assert len(skipped) == LAYERS and set(skipped.values()) == {why}
        assert all(path.endswith(("self_attn", "attn")) for path in skipped)
        assert model.config._attn_implementation == "sdpa"
        assert report.calls[why] == LAYERS


def test_a_compiled_model_is_measured_too():
    model = llama().eval()
    model.compile(backend="aot_eager")
    model(torch.ones(1, 4, dtype=torch.int64))
    report = fuse(model, only="attention")
    assert len(report.replaced) == LAYERS and report.calls == {"torchweld::attention": LAYERS}


def test_a_default_sample_that_does_not_fit_is_said(monkeypatch):
    model = llama()
    stock = type(model).forward

    def forward(self, *args, **kwargs):
        raise ValueError("it wants something else\nand more")

    monkeypatch.setattr(type(model), "forward", forward)
    report = fuse(model, only="attention")
    monkeypatch.setattr(type(model), "forward", stock)
    assert len(report.replaced) == LAYERS and report.max_abs_diff is None
    fits = "the default sample batch does not fit LlamaForCausalLM (ValueError: it wants something "
    assert report.notes == [fits + "else); pass sample= to measure what its layers run"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("gpt2", "GPT2LMHeadModel"),
        ("llama", "LlamaForCausalLM"),
        ("ernie4_5", "Ernie4_5ForCausalLM"),
        ("whisper", "WhisperForConditionalGeneration"),
        ("siglip_vision_model", "SiglipVisionModel"),
    ],
)
def test_another_default_device_changes_nothing(kind, name):
    model = tiny_model(kind, name, "sdpa").eval()
    want = fuse(copy.deepcopy(model), loss=True)
    compare._strict.clear()
    with torch.device("meta"):
        report = fuse(model, loss=True)
    assert report.max_abs_diff is not None
    assert report.to_dict() == want.to_dict()


def test_musicgen_has_a_sample():
    config = transformers.models.musicgen.MusicgenDecoderConfig(
        **SIZES, vocab_size=VOCAB, pad_token_id=0, ffn_dim=48, max_position_embeddings=64
    )
    model = transformers.MusicgenForCausalLM._from_config(config, attn_implementation="sdpa")
    report = fuse(model.eval())
    assert report.calls == {"torchweld::attention": 2} and report.max_abs_diff < 1e-4


def sam(**changes):
    vision = {"image_size": 64, "patch_size": 8, "output_channels": 16, "mlp_dim": 48}
    config = transformers.SamVisionConfig(**SIZES, **vision, global_attn_indexes=[1], window_size=4)
    return transformers.SamVisionModel._from_config(config, **changes).eval()


def test_the_image_encoder_of_sam_stays_stock():
    model = sam(attn_implementation="sdpa")
    report = fuse(model, only="attention")
    assert report.replaced == [] and [path for path, _ in report.skipped] == [
        f"vision_encoder.layers.{layer}.attn" for layer in range(LAYERS)
    ]
    images = torch.randn(1, 3, 64, 64)
    want = model(images).last_hidden_state
    model.set_attn_implementation("torchweld")
    assert torch.equal(model(images).last_hidden_state, want)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("falcon", "FalconForCausalLM"),
        ("gpt_neo", "GPTNeoForCausalLM"),
        ("git", "GitForCausalLM"),
        ("data2vec-vision", "Data2VecVisionModel"),
        ("sam_vision_model", "SamVisionModel"),
    ],
)
def test_layers_from_a_table_of_transformers_stay_stock(kind, name):
    """They can't be built with torchweld either; docs/refused.md says so."""
    with pytest.raises(KeyError, match="^'torchweld'$"):
        tiny_model(kind, name, "torchweld")
    model = tiny_model(kind, name, "eager").eval()
    report = fuse(model, only="attention")
    assert not report and len(report.skipped) >= LAYERS
    for _, reason in report.skipped:
        assert re.search('AttentionInterface$|^GitForCausalLM does not support "sdpa"', reason)
    assert model.config._attn_implementation == "eager"


def test_a_model_inside_of_a_sharded_one_is_not_run():
    dist = torch.distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for model in (gpt2(), llama()):
            outer = nn.Sequential(model)
            fully_shard(outer, mesh=mesh)
            report = fuse(outer)
            assert report.replaced and report.max_abs_diff is None
            assert any("Sequential must run as a whole" in note for note in report.notes)
            assert outer(torch.zeros(1, 4, dtype=torch.int64)).logits.isfinite().all()
    finally:
        dist.destroy_process_group()
