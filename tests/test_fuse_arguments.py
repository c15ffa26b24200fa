"""Arguments that transformers adds, renames or reorders: a fused model computes what stock does."""

from __future__ import annotations

import copy
import importlib.metadata
import inspect
import warnings

import pytest
import torch
from torch.testing import assert_close

transformers = pytest.importorskip("transformers")

from test_fuse import Calls  # noqa: E402
from test_fuse_families import LAYERS, NAMES, assert_same_logits, labelled, tiny  # noqa: E402
from tiny_models import batch, fuse_keeping_stock, tiny_gpt2, tiny_model  # noqa: E402
from torchweld.integrations import fuse, register_attention  # noqa: E402
from torchweld.integrations import version as hf_version  # noqa: E402
from torchweld.integrations.attention import forward as hf_attention  # noqa: E402
from torchweld.integrations.fusion.layers import arguments, families  # noqa: E402

llama = transformers.models.llama.modeling_llama
gpt2 = transformers.models.gpt2.modeling_gpt2
CACHE = arguments.of(llama.LlamaAttention).cache


@pytest.fixture(autouse=True)
def _new_classes():
    """Fused classes are made anew of the stock classes that a test changes."""
    families._subclass.cache_clear()
    hf_version._warned = False
    yield
    families._subclass.cache_clear()


def with_strength(forward):
    """A forward with one more argument, a factor of its result."""

    def changed(self, *args, **kwargs):
        strength = kwargs.pop("strength", None)
        out = forward(self, *args, **kwargs)
        if strength is None:
            return out
        if isinstance(out, tuple):
            return out[0] * strength, *out[1:]
        if isinstance(out, torch.Tensor):
            return out * strength
        out.loss = out.loss * strength
        return out

    signature = inspect.signature(forward)
    *known, last = signature.parameters.values()
    strength = inspect.Parameter("strength", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
    changed.__signature__ = signature.replace(parameters=[*known, strength, last])
    return changed


def attention_call(model):
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(3))
    tables = model.model.rotary_emb(x, torch.arange(5)[None])
    given = {"hidden_states": x, "position_embeddings": tables, "attention_mask": None}
    return model.model.layers[0].self_attn, given


def layer_call(model):
    _, given = attention_call(model)
    return model.model.layers[0], given


def block_call(model):
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(3))
    return model.transformer.h[0], {"hidden_states": x}


def first(out):
    return out[0] if isinstance(out, tuple) else getattr(out, "loss", out)


@pytest.mark.parametrize(
    ("cls", "call", "op"),
    [
        (llama.LlamaAttention, attention_call, "torchweld::rotary"),
        (gpt2.GPT2Block, block_call, "torchweld::layer_norm_linear"),
    ],
)
def test_an_argument_that_is_not_known_runs_the_stock_forward(monkeypatch, cls, call, op):
    monkeypatch.setattr(cls, "forward", with_strength(cls.forward))
    model = (tiny_gpt2() if cls is gpt2.GPT2Block else tiny("Llama")).eval()
    stock, _ = fuse_keeping_stock(model, loss=True)
    ours, given = call(model)
    theirs, _ = call(stock)
    name = cls.__qualname__
    said = f"{name} was called with strength, which torchweld does not know; such calls use the st"
    with pytest.warns(UserWarning, match=said), Calls() as calls:
        found = first(ours(**given, strength=2.0))
    assert not any(name.startswith(op) for name in calls.names)
    assert_close(found, first(theirs(**given, strength=2.0)), rtol=1e-5, atol=1e-5)
    with warnings.catch_warnings(), Calls() as calls:
        warnings.simplefilter("error")
        assert_close(first(ours(**given, strength=2.0)), found, rtol=0, atol=0)
        plain = first(ours(**given, strength=None))
    assert any(name.startswith(op) for name in calls.names)
    assert_close(plain, first(theirs(**given)), rtol=1e-5, atol=1e-5)


def test_a_layer_hands_its_stock_forward_every_argument(monkeypatch):
    cls = llama.LlamaDecoderLayer
    monkeypatch.setattr(cls, "forward", with_strength(cls.forward))
    model = tiny("Llama").eval()
    stock, _ = fuse_keeping_stock(model)
    ours, given = layer_call(model)
    theirs, _ = layer_call(stock)
    with Calls() as calls:
        found = ours(**given, strength=2.0)
    assert any(name.startswith("torchweld::add_rms_norm") for name in calls.names)
    assert_close(found, theirs(**given, strength=2.0), rtol=1e-5, atol=1e-5)


def test_the_report_lists_what_the_sample_calls_with_an_argument_that_is_not_known(monkeypatch):
    monkeypatch.setattr(
        llama.LlamaAttention, "forward", with_strength(llama.LlamaAttention.forward)
    )
    layer = llama.LlamaDecoderLayer.forward

    def strengthened(self, *args, **kwargs):
        return layer(self, *args, **kwargs, strength=2.0)

    strengthened.__signature__ = inspect.signature(layer)
    monkeypatch.setattr(llama.LlamaDecoderLayer, "forward", strengthened)
    model = tiny("Llama").eval()
    stock = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="LlamaAttention was called with strength"):
        report = fuse(model, only=("attention", "rotary"))
    places = [f"model.layers.{i}.self_attn.rotary" for i in range(LAYERS)]
    why = "the stock forward runs: LlamaAttention was called with strength, which torchweld does "
    assert [where for where, _ in report.skipped] == places
    assert all(reason.startswith(why) for _, reason in report.skipped)
    with torch.no_grad():
        outs = [each(**batch("cpu")).logits for each in (model, stock)]
    real = batch("cpu")["attention_mask"].bool()
    assert_close(outs[0][real], outs[1][real], rtol=1e-4, atol=1e-4)


def renamed(forward, old, new):
    """A forward with another name for an argument."""

    def changed(self, *args, **kwargs):
        if new in kwargs:
            kwargs[old] = kwargs.pop(new)
        return forward(self, *args, **kwargs)

    signature = inspect.signature(forward)
    changed.__signature__ = signature.replace(
        parameters=[
            each.replace(name=new) if each.name == old else each
            for each in signature.parameters.values()
        ]
    )
    return changed


@pytest.mark.parametrize("old", [CACHE, "attention_mask"])
def test_a_renamed_argument_leaves_the_part_stock(monkeypatch, old):
    """As in transformers 5.24, which renamed past_key_values to cache in every forward."""
    for cls in (llama.LlamaAttention, llama.LlamaDecoderLayer):
        monkeypatch.setattr(cls, "forward", renamed(cls.forward, old, "memory"))
    stock = tiny("Llama").eval()
    model = copy.deepcopy(stock)
    reasons = dict(fuse(model).skipped)
    names = [name if name != old else "memory" for name in ("attention_mask", CACHE)]
    lacks = "cache" if old == CACHE else old
    assert reasons["model.layers.0.self_attn.rotary"] == (
        f"its arguments are (hidden_states, position_embeddings, {', '.join(names)}): it lacks "
        f"{lacks}"
    )
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    inputs = batch("cpu")
    del inputs["position_ids"]
    assert torch.equal(model.generate(**inputs, **options), stock.generate(**inputs, **options))


def test_an_attention_of_another_form_is_listed():
    forward = with_strength(llama.LlamaAttention.forward)
    cls = type(
        "OtherAttention",
        (llama.LlamaAttention,),
        {"__module__": llama.__name__, "forward": forward},
    )
    model = tiny("Llama").eval()
    for layer in model.model.layers:
        layer.self_attn.__class__ = cls
    reasons = dict(fuse(model).skipped)
    for layer in range(LAYERS):
        reason = reasons[f"model.layers.{layer}.self_attn.rotary"]
        known = "apply_rotary_pos_emb of a form that fuse knows"
        assert reason == f"OtherAttention calls no {known}"


def test_a_loss_takes_any_argument_of_the_stock_forward(monkeypatch):
    cls = llama.LlamaForCausalLM
    monkeypatch.setattr(cls, "forward", with_strength(cls.forward))
    model = tiny("Llama").train()
    stock, _ = fuse_keeping_stock(model, loss=True)
    inputs = labelled("cpu")
    with Calls() as calls:
        out = model(**inputs, strength=2.0)
    assert out.logits is None and any("linear_cross_entropy" in name for name in calls.names)
    assert_close(out.loss, stock(**inputs, strength=2.0).loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_fused_forwards_have_the_signatures_of_stock(name):
    model = tiny(name)
    stock, _ = fuse_keeping_stock(model, loss=True, check=False)
    fused = 0
    for ours, theirs in zip(model.modules(), stock.modules(), strict=True):
        fused += type(ours) is not type(theirs)
        assert inspect.signature(ours.forward) == inspect.signature(theirs.forward)
    assert fused > 3 * LAYERS


@pytest.mark.parametrize("call", [attention_call, layer_call])
def test_arguments_by_position(call):
    model = tiny("Llama").eval()
    stock, _ = fuse_keeping_stock(model)
    for each in (model, stock):
        module, given = call(each)
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        place = names.index("position_embeddings") + 1
        args = [given.get(name) for name in names[:place]]
        with torch.no_grad(), Calls() as calls:
            out = first(module(*args))
        if each is model:
            found = out
            assert calls.names["torchweld::rotary"] == 1
    assert_close(found, out, rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match="positional arguments"):
        call(model)[0](*[None] * 20)
    with pytest.raises(TypeError, match="multiple values for argument .hidden_states."):
        call(model)[0](*args, hidden_states=None)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_the_cache_by_both_of_its_names(kind, name):
    if name != CACHE and CACHE == "past_key_values":
        pytest.skip("this transformers has one name")
    seen = []

    class Recording(transformers.DynamicCache):
        def update(self, key, value, layer_idx, *args, **kwargs):
            seen.append((layer_idx, args, {k: sorted(v) for k, v in kwargs.items()}))
            return super().update(key, value, layer_idx, *args, **kwargs)

    model = (tiny("Llama") if kind == "Llama" else tiny_gpt2()).eval()
    stock, _ = fuse_keeping_stock(model)
    logits = []
    for each in (model, stock):
        cache = Recording()
        inputs = {"input_ids": batch("cpu")["input_ids"][:, :5], "use_cache": True}
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore", FutureWarning)
            each(**inputs, **{name: cache})
            logits.append(each(**inputs, **{name: cache}).logits)
        assert cache.get_seq_length() == 10
    assert_close(*logits, rtol=1e-4, atol=1e-4)
    assert len(seen) == 8 and seen[:4] == seen[4:]  # the other arguments are handed on


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize("call", [attention_call, layer_call, block_call])
def test_parts_that_are_called_alone_know_both_names(call, name):
    if name != CACHE and CACHE == "past_key_values":
        pytest.skip("this transformers has one name")
    model = (tiny_gpt2() if call is block_call else tiny("Llama")).eval()
    stock, _ = fuse_keeping_stock(model)
    outs = []
    for each in (model, stock):
        module, given = call(each)
        cache = transformers.DynamicCache()
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore", FutureWarning)
            outs.append(first(module(**given, **{name: cache})))
        assert cache.get_seq_length() == 5
    assert_close(*outs, rtol=1e-5, atol=1e-5)


def test_layers_without_a_rotary_table_run_stock():
    torch.manual_seed(0)
    kind = ("granitemoehybrid", "GraniteMoeHybridForCausalLM")
    model = tiny_model(*kind, "sdpa", layer_types=["full_attention"] * 2).eval()
    stock, report = fuse_keeping_stock(model)
    for where, reason in report.skipped:
        if where.endswith("rotary"):
            assert "the stock forward runs: no rotary table is given" in reason
    assert_same_logits(model, stock, {"input_ids": batch("cpu")["input_ids"]})


# The comparison over a cache


def test_a_cache_that_stays_empty_shows(monkeypatch):
    monkeypatch.setattr(
        arguments.Arguments, "update", lambda self, cache, key, value, *rest: (key, value)
    )
    with pytest.warns(UserWarning, match="over a cache the fused model is .* off, without one"):
        report = fuse(tiny("Llama"))
    assert report.max_abs_diff > 0.1 and report.compared.endswith(", whole and over a cache")
    assert any(note.startswith("over a cache the fused model is ") for note in report.notes)


def test_what_runs_over_a_cache_alone_is_noted(monkeypatch):
    real = hf_attention._why_not_the_op

    def why(query, seqlen_k, *rest):
        return (
            "there are earlier keys" if seqlen_k > query.shape[2] else real(query, seqlen_k, *rest)
        )

    monkeypatch.setattr(hf_attention, "_why_not_the_op", why)
    with pytest.warns(UserWarning, match="there are earlier keys"):
        report = fuse(tiny("Llama"))
    assert report.calls["torchweld::attention"] == LAYERS and report.max_abs_diff < 1e-4
    sdpa = "torch's scaled_dot_product_attention runs"
    assert report.notes == [f"over a cache {sdpa}: there are earlier keys"]


def test_a_model_that_can_not_go_on_over_a_cache_says_so(monkeypatch):
    forward = llama.LlamaForCausalLM.forward

    def whole(self, *args, **kwargs):
        if kwargs.get(CACHE) is not None:
            raise ValueError("one call only")
        return forward(self, *args, **kwargs)

    whole.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(llama.LlamaForCausalLM, "forward", whole)
    report = fuse(tiny("Llama"))
    assert report.max_abs_diff < 1e-4 and not report.compared.endswith("cache")
    why = "stock and fused were not compared over a cache (ValueError: one call only)"
    assert report.notes == [why]


@pytest.mark.parametrize("end", [[1, 1, 1, 1], [1, 1, 0, 0]])
def test_a_sample_of_the_user_runs_over_a_cache_unless_it_ends_with_padding(end):
    ids = torch.arange(3, 11).view(2, 4)
    sample = {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1, 1], end])}
    report = fuse(tiny("Llama"), sample=sample)
    assert report.compared.endswith(", whole and over a cache") == (end[-1] == 1)
    assert report.max_abs_diff < 1e-4


# Versions


def test_a_newer_transformers_is_said_once(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "5.99.1")
    oldest, newest = (".".join(map(str, v)) for v in (hf_version.OLDEST, hf_version.NEWEST))
    said = f"tested with transformers {oldest} to {newest}, but got 5.99.1; check the report"
    with pytest.warns(UserWarning, match=said):
        register_attention()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fuse(tiny("Llama"), check=False)
