"""quantize_ and dequantize_: which layers change, the report, and models that save and load."""

from __future__ import annotations

import copy
import json
import re

import pytest
import torch
from torch import nn

import torchweld
from numerics import assert_equal, assert_same_bits
from torchweld import Int4
from torchweld._library import build_facts
from torchweld.nn import Int4Linear

GROUP = 32


def layers_of(model):
    return {path: m for path, m in model.named_modules() if isinstance(m, Int4Linear)}


def bytes_of(model):
    """The bytes of parameters and buffers; a layer's codes are buffers."""
    return sum(tensor.nbytes for tensor in model.state_dict().values())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3))
        self.narrow = nn.Linear(24, 64)
        self.lm_head = nn.Linear(64, 10, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


def test_a_model_in_place():
    model, ids = Net(), torch.arange(10)[None]
    stock = {path: m for path, m in model.named_modules() if isinstance(m, nn.Linear)}
    calls, before = [], bytes_of(model)
    report = torchweld.quantize_(model, Int4(GROUP), progress=lambda *call: calls.append(call))
    assert report.replaced == ["blocks.0.0", "blocks.1.0", "blocks.2.0"]
    assert dict(report.skipped) == {
        "narrow": "groups of 32 do not divide in_features = 24",
        "lm_head": "skip has 'lm_head'",
    }
    assert calls == [(i + 1, 3, f"blocks.{i}.0") for i in range(3)]
    assert (report.bytes_before, report.bytes_after) == (before, bytes_of(model))
    assert report and report.bytes_after < report.bytes_before
    for path in report.replaced:
        expected = Int4Linear.from_linear(stock[path], GROUP)
        assert report.errors[path] == expected.quantisation_error
        assert model.get_submodule(path).training
        assert_equal(model.get_submodule(path).dequantise(), expected.dequantise())
    text = str(report)
    assert "Net): 3 layers to 4 bits, 2 left" in text and "MB" in text
    assert "blocks.{0-2}.0" in text and "left: narrow: groups" in text
    assert json.loads(json.dumps(report.to_dict()))["skipped"][1] == [
        "lm_head",
        "skip has 'lm_head'",
    ]
    assert not torchweld.quantize_(model, Int4(GROUP))
    quantised = model(ids)
    assert torchweld.dequantize_(model) == report.replaced
    assert not layers_of(model) and not model.blocks[0][0].weight.requires_grad
    torch.testing.assert_close(model(ids), quantised, rtol=1e-5, atol=1e-5)


def test_methods_and_whole_rows():
    errors = {}
    for method in ("rtn", "mse"):
        torch.manual_seed(0)
        model = Net()
        report = torchweld.quantize_(model, Int4(None, skip=(), method=method))
        assert "narrow" in report.replaced and model.narrow.group_size == 24
        errors[method] = sum(report.errors.values())
    assert errors["mse"] < errors["rtn"]


@pytest.mark.parametrize(
    ("skip", "replaced"),
    [
        ("blocks.1", ["blocks.0.0", "blocks.2.0", "lm_head"]),
        (("blocks",), ["lm_head"]),
        (("blo*", "head"), ["lm_head"]),
        (("*_head", "2"), ["blocks.0.0", "blocks.1.0"]),
    ],
    ids=str,
)
def test_names_to_skip(skip, replaced):
    model = Net()
    assert torchweld.quantize_(model, Int4(GROUP, skip)).replaced == replaced


HEADS = {
    "SequenceClassification": ["score"],
    "TokenClassification": ["score"],
    "QuestionAnswering": ["qa_outputs"],
    "CausalLM": ["lm_head"],
}


@pytest.mark.parametrize("task", HEADS)
def test_heads_are_left_unless_skip_is_given(task):
    """They are trained whole, as by peft, or are the output embeddings."""
    transformers = pytest.importorskip("transformers")
    config = tiny_llama().config
    for skip in (None, ("v_proj",), ()):
        model = getattr(transformers, f"AutoModelFor{task}").from_config(config)
        both = nn.ModuleDict({"inner": model})
        report = torchweld.quantize_(both, Int4(GROUP, skip))
        found = {path.removeprefix("inner.") for path in layers_of(both)}
        left = {path.removeprefix("inner.") for path, _ in report.skipped}
        assert found.isdisjoint(left) and (left == set(HEADS[task])) == (skip is None)
        assert found.issuperset(HEADS[task]) == (skip is not None)


@pytest.mark.parametrize(
    ("kind", "heads"), [("Bert", ["classifier"]), ("DistilBert", ["pre_classifier", "classifier"])]
)
def test_heads_of_encoders_are_left(kind, heads):
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 9}
    config = getattr(transformers, f"{kind}Config")(**sizes, num_attention_heads=4)
    model = getattr(transformers, f"{kind}ForSequenceClassification")(config)
    report = torchweld.quantize_(model, Int4(GROUP))
    reason = "it is a head, which may be trained; skip=() quantises heads too"
    assert report.replaced and report.skipped == [(path, reason) for path in heads]


def test_output_embeddings_of_any_name_are_left():
    """The model has no base model; its decoder has the embeddings."""
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 9}
    config = transformers.BertConfig(**sizes, num_attention_heads=4, tie_word_embeddings=False)
    encoder = transformers.BertModel(config)
    decoder = transformers.BertLMHeadModel(
        transformers.BertConfig(**config.to_dict() | {"is_decoder": True})
    )
    model = transformers.EncoderDecoderModel(encoder=encoder, decoder=decoder)
    report = torchweld.quantize_(model, Int4(GROUP))
    assert report.replaced and [path for path, _ in report.skipped] == [
        "decoder.cls.predictions.decoder"
    ]


def test_on_the_meta_device():
    """The layers have no values; a state_dict of a quantised model brings them."""
    model, ids = Net(), torch.arange(10)[None]
    torchweld.quantize_(model, Int4(GROUP))
    with torch.device("meta"):
        fresh = Net()
    report = torchweld.quantize_(fresh, Int4(GROUP))
    assert len(report.replaced) == 3 and not report.errors
    assert "load a state_dict" in str(report)
    fresh.load_state_dict(model.state_dict(), assign=True)
    assert_same_bits(fresh(ids), model(ids))


def test_a_quantised_model_is_scripted():
    model, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(3, 64)
    torchweld.quantize_(model, Int4(GROUP))
    assert_same_bits(torch.jit.script(model)(x), model(x))


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def hooked():
    layer = nn.Linear(64, 64)
    layer.register_forward_hook(lambda module, args, out: 2 * out)
    return layer


class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.base_layer = nn.Linear(64, 64)


def tied():
    model = nn.ModuleList([nn.Embedding(64, 64), nn.Linear(64, 64)])
    model[1].weight = model[0].weight
    return model


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(4, 64, 64))


LEFT = {
    "experts": (
        lambda: nn.ModuleDict({"experts": Experts(), "conv": nn.Conv1d(4, 4, 3)}),
        "experts",
        "gate_up_proj has the weights of several layers in one parameter",
    ),
    "subclass": (lambda: nn.ModuleList([Doubled(64, 64)]), "0", "a subclass of nn.Linear"),
    "hook": (lambda: nn.ModuleList([hooked()]), "0", "nn.Linear with a forward hook"),
    "tied": (tied, "1", "another module uses its weight"),
    "adapter": (Adapter, "base_layer", "the base layer of an adapter"),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(64, 2, 64),
        "linear1",
        "nn.TransformerEncoderLayer reads its weight",
    ),
    "attention": (lambda: nn.MultiheadAttention(64, 2), "out_proj", "a subclass of nn.Linear"),
    "dtype": (
        lambda: nn.ModuleList([nn.Linear(64, 64, dtype=torch.complex64)]),
        "0",
        "torch.complex64",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left(name):
    make, path, reason = LEFT[name]
    model = make()
    before = model.get_submodule(path)
    report = torchweld.quantize_(model, Int4(GROUP))
    assert reason in dict(report.skipped)[path]
    assert model.get_submodule(path) is before


def test_a_shared_layer_stays_shared():
    layer = nn.Linear(64, 64)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    assert torchweld.quantize_(model, Int4(GROUP)).replaced == ["0", "2"]
    assert model[0] is model[2]
    assert torchweld.dequantize_(model) == ["0", "2"] and model[0] is model[2]


REFUSED = {
    "group": (lambda: Int4(12), ValueError, "group_size must be a multiple of 8 or None"),
    "method": (lambda: Int4(method="gptq"), ValueError, "Int4: method must be one of"),
    "skip": (lambda: Int4(skip=(1,)), TypeError, "skip must be names of modules"),
    "config": (lambda: torchweld.quantize_(Net(), 64), TypeError, "config must be an Int4"),
    "model": (lambda: torchweld.quantize_("gpt2"), TypeError, "model must be an nn.Module"),
    "a layer": (
        lambda: torchweld.quantize_(nn.Linear(64, 64)),
        TypeError,
        "model must contain the layers to replace, but got one of them, Linear",
    ),
    "not a module": (lambda: torchweld.dequantize_(3), TypeError, "dequantize_: model must be an"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    call, error, text = REFUSED[name]
    with pytest.raises(error, match=re.escape(text)) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_dequantize_changes_nothing_if_it_refuses():
    model = Net()
    torchweld.quantize_(model, Int4(GROUP))
    model.blocks[2][0].register_forward_hook(lambda module, args, out: 2 * out)
    with pytest.raises(ValueError, match="blocks.2.0 must be Int4Linear, but got"):
        torchweld.dequantize_(model)
    assert len(layers_of(model)) == 3


# Models of transformers


LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
}


def tiny_llama(dtype=torch.float32, **changes):
    """As from_pretrained makes it: the rotary frequencies are float32 in every dtype."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**LLAMA, "initializer_range": 0.1, **changes})
    return transformers.LlamaForCausalLM._from_config(config, dtype=dtype).eval()


IDS = torch.arange(12).view(2, 6)


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_a_saved_model_loads_with_the_same_bits(tmp_path, tie, size):
    """In one file and in several; all linear layers but the head, which may be tied."""
    from transformers import AutoModel, AutoModelForCausalLM

    model = tiny_llama(tie_word_embeddings=tie)
    report = torchweld.quantize_(model, Int4(GROUP))
    assert len(report.replaced) == 14
    model.save_pretrained(tmp_path, max_shard_size=size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == (size == "20KB")
    recorded = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert recorded["quant_method"] == "torchweld_int4" and recorded["left"] == ["lm_head"]
    torchweld.integrations.register_quantizer()
    for more in ({}, {"device_map": "cpu"}, {"dtype": torch.float32}):
        loaded, info = AutoModelForCausalLM.from_pretrained(
            tmp_path, output_loading_info=True, **more
        )
        assert not any(info.values()), info
        assert layers_of(loaded).keys() == set(report.replaced)
        assert_same_bits(logits(loaded), logits(model))
    base = AutoModel.from_pretrained(tmp_path)
    assert_same_bits(base(IDS).last_hidden_state, model.model(IDS).last_hidden_state)
    again = tmp_path / "again"
    loaded.save_pretrained(again)
    assert_same_bits(logits(AutoModelForCausalLM.from_pretrained(again)), logits(model))


def test_from_pretrained_quantises(tmp_path):
    from transformers import AutoModelForCausalLM

    from torchweld.integrations import TorchweldInt4Config

    stock = tiny_llama()
    stock.save_pretrained(tmp_path / "floats")
    config = TorchweldInt4Config(64, skip=("lm_head", "o_proj"), method="mse")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "floats", quantization_config=config)
    torchweld.quantize_(stock, Int4(64, ("lm_head", "o_proj"), "mse"))
    assert layers_of(model).keys() == layers_of(stock).keys() and len(layers_of(model)) == 12
    assert_same_bits(logits(model), logits(stock))
    model.save_pretrained(tmp_path / "codes")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "codes", dtype=torch.bfloat16)
    assert layers_of(loaded).keys() == layers_of(model).keys()
    assert loaded.model.layers[0].mlp.up_proj.scale.dtype == torch.bfloat16
    assert loaded.config.quantization_config.method == "mse"


def test_a_model_inside_of_another_module_saves_too(tmp_path):
    from transformers import AutoModelForCausalLM

    both = nn.ModuleDict({"inner": tiny_llama(), "outer": nn.Linear(64, 64)})
    torchweld.quantize_(both, Int4(GROUP))
    both["inner"].save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_bits(logits(loaded), logits(both["inner"]))
    torchweld.dequantize_(both)
    assert not hasattr(both["inner"].config, "quantization_config")


def test_layers_with_other_groups_are_recorded(tmp_path):
    from transformers import AutoModelForCausalLM

    model = tiny_llama()
    model.model.layers[1].mlp.up_proj = Int4Linear.from_linear(model.model.layers[1].mlp.up_proj, 8)
    torchweld.quantize_(model, Int4(GROUP))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.model.layers[1].mlp.up_proj.group_size == 8
    assert_same_bits(logits(loaded), logits(model))


BROKEN = {
    "missing": (
        lambda state, key: state.pop(f"{key}.scale"),
        "the checkpoint must have the tensors of model.layers.1.mlp.up_proj",
    ),
    "dtype": (
        lambda state, key: state.update({f"{key}.zero": state[f"{key}.zero"].long()}),
        "model.layers.1.mlp.up_proj.zero of the checkpoint must be int32, but got torch.int64",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_checkpoint_with_other_codes_is_refused(tmp_path, name):
    """Otherwise a layer would have arbitrary values, and only a table would say so."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    change, text = BROKEN[name]
    model = tiny_llama()
    torchweld.quantize_(model, Int4(GROUP))
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    change(state, "model.layers.1.mlp.up_proj")
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RuntimeError, match=re.escape(text)):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_dequantize_gives_a_plain_model_back(tmp_path):
    from transformers import AutoModelForCausalLM

    model = tiny_llama()
    torchweld.quantize_(model, Int4(GROUP))
    expected = logits(model)
    for dequantize in (torchweld.dequantize_, lambda model: model.dequantize()):
        torchweld.quantize_(model, Int4(GROUP))
        dequantize(model)
        assert not layers_of(model)
        torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
        model.save_pretrained(tmp_path)
        assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert_same_bits(logits(loaded), logits(model))


@pytest.mark.parametrize("order", ["quantize, fuse", "fuse, quantize"])
def test_with_fuse(order):
    """fuse replaces the norms and the attention; products stay those of the 4-bit layers."""
    model = tiny_llama()
    stock = tiny_llama()
    torchweld.quantize_(stock, Int4(GROUP))
    steps = {
        "fuse": lambda: torchweld.fuse(model, check=False),
        "quantize": lambda: torchweld.quantize_(model, Int4(GROUP)),
    }
    for step in order.split(", "):
        steps[step]()
    assert len(layers_of(model)) == 14
    torch.testing.assert_close(logits(model), logits(stock), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["rtn", "mse", "hqq"])
def test_generation_equals_that_of_the_dequantised_model(method):
    model = tiny_llama()
    torchweld.quantize_(model, Int4(GROUP, method=method))
    quantised, before = logits(model), model.generate(IDS, max_new_tokens=8, do_sample=False)
    torchweld.dequantize_(model)
    torch.testing.assert_close(logits(model), quantised, rtol=1e-4, atol=1e-4)
    assert_equal(model.generate(IDS, max_new_tokens=8, do_sample=False), before)


needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or build_facts().get("cuda") is None,
    reason="the kernels run on a GPU",
)


@needs_gpu
def test_a_saved_model_loads_on_a_gpu(tmp_path):
    """The codes are there once, in the layout of the kernels; the file has the portable ones."""
    from transformers import AutoModelForCausalLM

    stock = tiny_llama(torch.bfloat16, hidden_size=256, intermediate_size=512)
    model = copy.deepcopy(stock).cuda()
    report = torchweld.quantize_(model, Int4(64))
    on_cpu = copy.deepcopy(stock)
    torchweld.quantize_(on_cpu, Int4(64))
    for path, layer in layers_of(model).items():
        assert_equal([got.cpu() for got in layer.portable()], layers_of(on_cpu)[path].portable())
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cuda")
    assert layers_of(loaded).keys() == set(report.replaced)
    for layer in layers_of(loaded).values():
        assert [t.dim() for t in layer.buffers()] == [3, 3, 3]
    ids = IDS.cuda()
    with torch.no_grad():
        assert_same_bits(loaded(ids).logits, model(ids).logits)
    assert loaded.generate(ids, min_new_tokens=4, max_new_tokens=4).shape == (2, 10)
    assert_same_bits(logits(loaded.cpu()), logits(on_cpu))
