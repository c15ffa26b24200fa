"""4-bit checkpoints of AutoAWQ, GPTQ and compressed-tensors, packed here nibble by nibble."""

from __future__ import annotations

import json
import re

import pytest
import torch

import torchweld
from numerics import assert_equal, assert_same_bits
from test_quantize import IDS, LLAMA, layers_of, logits, tiny_llama
from torchweld.nn import Int4Linear

K, N, GROUP = 64, 16, 32
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def words(nibble, rows, cols):
    """int32 `(rows, cols)` whose nibble i is `nibble(row, col, i)`."""
    out = torch.zeros(rows, cols, dtype=torch.int64)
    for row in range(rows):
        for col in range(cols):
            word = sum(int(nibble(row, col, i)) << (4 * i) for i in range(8))
            out[row, col] = word - (word >> 31 << 32)
    return out.to(torch.int32)


class Layer:
    """Codes (N, K), zeros and scales (N, groups) of a random layer, and its weight."""

    def __init__(self, n=N, k=K, group=GROUP, symmetric=False, dtype=torch.float16):
        groups = -(-k // group)
        self.group, self.n, self.k, self.groups = group, n, k, groups
        self.codes = torch.randint(0, 16, (n, k))
        self.zeros = torch.randint(1, 16, (n, groups))
        if symmetric:
            self.zeros.fill_(8)
        self.scales = (torch.rand(n, groups) * 0.02 + 0.01).to(dtype)
        zeros, scales = (t.repeat_interleave(group, 1)[:, :k] for t in (self.zeros, self.scales))
        self.weight = scales * (self.codes - zeros).to(dtype)

    def awq(self):
        codes, zeros = self.codes, self.zeros
        return {
            "qweight": words(lambda k, j, i: codes[8 * j + AWQ_ORDER[i], k], self.k, self.n // 8),
            "qzeros": words(
                lambda g, j, i: zeros[8 * j + AWQ_ORDER[i], g], self.groups, self.n // 8
            ),
            "scales": self.scales.t().contiguous(),
        }

    def gptq(self, less=1):
        codes, zeros = self.codes, self.zeros
        return {
            "qweight": words(lambda j, n, i: codes[n, 8 * j + i], self.k // 8, self.n),
            "qzeros": words(lambda g, j, i: zeros[8 * j + i, g] - less, self.groups, self.n // 8),
            "scales": self.scales.t().contiguous(),
            "g_idx": torch.tensor([k // self.group for k in range(self.k)], dtype=torch.int32),
        }

    def compressed(self, symmetric=False):
        """Signed values plus 8; the zeros too, packed along the rows."""
        codes, zeros = self.codes, self.zeros
        tensors = {
            "weight_packed": words(lambda n, j, i: codes[n, 8 * j + i], self.n, self.k // 8),
            "weight_scale": self.scales,
            "weight_shape": torch.tensor([self.n, self.k]),
        }
        if not symmetric:
            rows = -(-self.n // 8)
            tensors["weight_zero_point"] = words(
                lambda j, g, i: zeros[8 * j + i, g] if 8 * j + i < self.n else 0, rows, self.groups
            )
        return tensors


def check(module, layer):
    assert module.group_size == min(layer.group, layer.k)
    assert module.scale.dtype == layer.scales.dtype
    assert_equal(module.dequantise(), layer.weight)


@pytest.mark.parametrize("size", [(16, 64, 32), (24, 128, 128), (8, 40, 8), (8, 64, 96)], ids=str)
def test_each_format_is_exact(size):
    torch.manual_seed(0)
    layer, even = Layer(*size), Layer(*size, symmetric=True, dtype=torch.bfloat16)
    stated = {"group_size": layer.group}
    check(Int4Linear.from_awq(**layer.awq(), **stated), layer)
    check(Int4Linear.from_gptq(**layer.gptq()), layer)
    check(Int4Linear.from_gptq(**layer.gptq(0), checkpoint_format="gptq_v2", **stated), layer)
    check(Int4Linear.from_compressed_tensors(**layer.compressed(), **stated), layer)
    check(Int4Linear.from_compressed_tensors(**even.compressed(symmetric=True), **stated), even)


def without_g_idx(layer):
    return {name: tensor for name, tensor in layer.gptq().items() if name != "g_idx"}


READERS = {
    "awq": (Int4Linear.from_awq, Layer.awq),
    "gptq": (Int4Linear.from_gptq, Layer.gptq),
    "gptq without g_idx": (Int4Linear.from_gptq, without_g_idx),
    "compressed-tensors": (Int4Linear.from_compressed_tensors, Layer.compressed),
}


@pytest.mark.parametrize("name", READERS)
def test_whole_rows_are_one_group(name):
    read, pack = READERS[name]
    layer = Layer(group=K)
    for stated in (None, -1, K, 2 * K):
        check(read(**pack(layer), group_size=stated), layer)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(("k", "group"), [(96, 40), (768, 512)])
def test_groups_that_do_not_divide_the_columns_are_refused(name, k, group):
    """There are as many as there would be of k / groups columns, with other borders."""
    read, pack = READERS[name]
    layer = Layer(8, k, group)
    text = f"group_size must divide the {k} columns, but got {group}; quantise with a size that"
    stated = [group, None] if "g_idx" in pack(layer) else [group]
    for size in stated:
        with pytest.raises(ValueError, match=text):
            read(**pack(layer), group_size=size)
    for size in (k // layer.groups // 2, 0, -1):
        text = f"group_size must make {layer.groups} groups of {k} columns, .* but got {size}$"
        with pytest.raises(ValueError, match=text):
            read(**pack(layer), group_size=size)


@pytest.mark.parametrize("name", ["awq", "gptq without g_idx", "compressed-tensors"])
def test_several_groups_need_a_size(name):
    read, pack = READERS[name]
    text = "group_size must be given, since 2 groups of 64 columns may be of several sizes, but got"
    with pytest.raises(ValueError, match=text):
        read(**pack(Layer()))


def test_rows_that_fill_no_word():
    layer = Layer(n=11)
    check(Int4Linear.from_compressed_tensors(**layer.compressed(), group_size=GROUP), layer)


def test_a_bias_goes_along():
    layer, bias = Layer(), torch.randn(N).half()
    module = Int4Linear.from_awq(**layer.awq(), bias=bias, group_size=GROUP)
    x = torch.randn(3, K).half()
    expected = torch.nn.functional.linear(x.float(), layer.weight.float(), bias.float())
    torch.testing.assert_close(module(x).float(), expected, rtol=2e-3, atol=2e-3)


def order_of_activations(tensors):
    tensors["g_idx"] = tensors["g_idx"].flip(0)
    return tensors


def with_15(tensors):
    tensors["qzeros"][0, 0] = -1
    return tensors


WRONG = {
    "act-order": (
        lambda layer: Int4Linear.from_gptq(**order_of_activations(layer.gptq())),
        "g_idx must put columns into groups in their order, but got another one (act-order",
    ),
    "act-order compressed": (
        lambda layer: Int4Linear.from_compressed_tensors(
            **layer.compressed(), weight_g_idx=torch.arange(K - 1, -1, -1) // GROUP
        ),
        "weight_g_idx must put columns into groups in their order",
    ),
    "other groups": (
        lambda layer: Int4Linear.from_compressed_tensors(
            **layer.compressed(), weight_g_idx=torch.arange(K) // 40, group_size=GROUP
        ),
        "weight_g_idx must have groups of 32 columns, but got others",
    ),
    "a scale of the tensor": (
        lambda layer: Int4Linear.from_compressed_tensors(
            **{**layer.compressed(symmetric=True), "weight_scale": torch.ones(1)}
        ),
        "weight_scale must have 2 dims, those of groups, but got (1,)",
    ),
    "a zero of 16": (
        lambda layer: Int4Linear.from_gptq(**with_15(layer.gptq())),
        "qzeros must be at most 14, since this format adds 1 and a zero has 4 bits, but got 15",
    ),
    "checkpoint_format": (
        lambda layer: Int4Linear.from_gptq(**layer.gptq(), checkpoint_format="marlin"),
        'checkpoint_format must be "gptq" or "gptq_v2", but got \'marlin\'',
    ),
    "dtype": (
        lambda layer: Int4Linear.from_awq(**{**layer.awq(), "qweight": layer.codes}),
        "qweight must be int32 with 2 dims, but got torch.int64",
    ),
    "shape": (
        lambda layer: Int4Linear.from_awq(**{**layer.awq(), "scales": layer.scales}),
        "qzeros must be (16, 2), but got (2, 2)",
    ),
    "8 bits": (
        lambda layer: Int4Linear.from_compressed_tensors(
            **{**layer.compressed(), "weight_shape": torch.tensor([N, K // 2])}
        ),
        "weight_packed must be (16, 4), but got (16, 8)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_layer_that_is_refused(name):
    call, text = WRONG[name]
    with pytest.raises(ValueError, match=re.escape(text)) as error:
        call(Layer())
    assert str(error.value).startswith("Int4Linear.from_") and "\n" not in str(error.value)


# Whole checkpoints

WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group"}
FORMATS = {
    "awq": (Layer.awq, {"quant_method": "awq", "bits": 4, "version": "gemm"}),
    "gptq": (Layer.gptq, {"quant_method": "gptq", "bits": 4, "desc_act": False}),
    "gptq_v2": (
        lambda layer: layer.gptq(0),
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
    ),
    "compressed-tensors": (
        Layer.compressed,
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]},
    ),
}


def settings_of(kind, groups):
    """A quantization_config with the group sizes of targets."""
    method = FORMATS[kind][1]
    if kind != "compressed-tensors":
        (group,) = groups.values()
        return {**method, "group_size": group}
    schemes = [
        {"targets": [target], "weights": {**WEIGHTS, "group_size": group}}
        for target, group in groups.items()
    ]
    return {**method, "config_groups": {f"group_{i}": s for i, s in enumerate(schemes)}}


def write_checkpoint(folder, kind, files=1, groups=None, model=None, names=(), **settings):
    """A model, a tiny Llama by default, with the layers of a format; returns it with their weights.

    `groups` has the group sizes of paths, parts of paths and "Linear", `names` the replacements of
    beginnings of keys.
    """
    from safetensors.torch import save_file

    pack, groups = FORMATS[kind][0], groups or {"Linear": GROUP}
    model = (tiny_llama() if model is None else model).half()
    state, drawn = dict(model.state_dict()), {}
    for path, linear in model.named_modules():
        if not isinstance(linear, torch.nn.Linear) or path == "lm_head":
            continue
        # Few layers are packed word by word; the others reuse theirs.
        named = (size for part, size in groups.items() if part in path)
        size = linear.out_features, linear.in_features, next(named, groups["Linear"])
        if size not in drawn:
            layer = Layer(*size)
            drawn[size] = layer, pack(layer)
        layer, tensors = drawn[size]
        linear.weight.data = layer.weight
        del state[f"{path}.weight"]
        state |= {f"{path}.{name}": tensor.clone() for name, tensor in tensors.items()}
    for ours, theirs in names:
        state = {re.sub(f"^{ours}", theirs, key): tensor for key, tensor in state.items()}
    model.config.save_pretrained(folder)
    text = json.loads((folder / "config.json").read_text())
    text |= {"architectures": [type(model).__name__], "dtype": "float16"}
    whole = ("Linear", "model.")
    targets = {p if p.startswith(whole) else f"re:.*{p}": groups[p] for p in reversed(groups)}
    text["quantization_config"] = settings_of(kind, targets) | settings
    (folder / "config.json").write_text(json.dumps(text))
    names = [f"model-{i}.safetensors" for i in range(files)] if files > 1 else ["model.safetensors"]
    placed = {key: names[i % files] for i, key in enumerate(state)}
    for name in names:
        part = {key: tensor for key, tensor in state.items() if placed[key] == name}
        save_file(part, folder / name, {"format": "pt"})
    if files > 1:
        index = {"metadata": {}, "weight_map": placed}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return model


def assert_same_weights(model, reference):
    """Every 4-bit layer has the reference's weights; returns those layers."""
    found = layers_of(model)
    for path, layer in found.items():
        assert_equal(layer.dequantise(), reference.get_submodule(path).weight.detach())
    return found


def refuses(folder, text):
    """load_quantized raises one sentence that has a text."""
    with pytest.raises(ValueError, match=re.escape(text)) as error:
        torchweld.load_quantized(folder)
    sentence = str(error.value)
    assert sentence.startswith("torchweld.load_quantized: ") and "\n" not in sentence


@pytest.mark.parametrize("kind", FORMATS)
def test_a_checkpoint_becomes_a_model(tmp_path, kind):
    """The tensors of a layer lie in several files; the loaded model saves in our own format."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    reference = write_checkpoint(tmp_path, kind, files=3)
    model = torchweld.load_quantized(tmp_path)
    assert type(model).__name__ == "LlamaForCausalLM" and model.dtype == torch.float16
    found = assert_same_weights(model, reference)
    assert len(found) == 14 and "lm_head" not in found and not model.training
    torch.testing.assert_close(logits(model), logits(reference), rtol=0.01, atol=0.02)
    model.save_pretrained(tmp_path / "ours")
    assert_same_bits(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "ours")), logits(model))
    assert model.generate(IDS, max_new_tokens=3).shape == (2, 9)


@pytest.mark.parametrize(
    ("kind", "groups"),
    [
        ("awq", {"Linear": 128}),  # rows of 64 columns are one group
        ("compressed-tensors", {"model.layers.1.mlp.up_proj": 8, "layers.1.mlp": 64, "Linear": 32}),
    ],
    ids=["awq", "compressed-tensors"],
)
def test_a_checkpoint_with_several_group_sizes(tmp_path, kind, groups):
    """Each layer has that of the targets that name it, of its class last."""
    reference = write_checkpoint(tmp_path, kind, groups=groups)
    found = assert_same_weights(torchweld.load_quantized(tmp_path), reference)
    assert len({layer.group_size for layer in found.values()}) == len({64, *groups.values()})


@pytest.mark.parametrize("kind", FORMATS)
def test_a_checkpoint_whose_groups_do_not_divide_the_columns(tmp_path, kind):
    write_checkpoint(tmp_path, kind, groups={"Linear": 40})
    text = r"model\.layers\.0\..*: group_size must divide the .* columns, but got 40; quantise"
    with pytest.raises(ValueError, match=text):
        torchweld.load_quantized(tmp_path)


@pytest.mark.parametrize(
    ("kind", "settings", "text"),
    [
        ("awq", {"version": "gemv"}, "version of the quantization_config must be 'gemm', but got"),
        ("gptq", {"bits": 8}, "bits of the quantization_config must be 4, but got 8"),
        (
            "compressed-tensors",
            {"format": "float-quantized"},
            "format of the quantization_config must be 'pack-quantized', but got 'float-quantized'",
        ),
        (
            "compressed-tensors",
            {"transform_config": {"config_groups": {"R1": {}}}},
            "transform_config of the quantization_config must be None or {}, but got {'config_grou",
        ),
        ("awq", {"quant_method": "bitsandbytes"}, 'quant_method must be "awq", "gptq" or "compre'),
        (
            "awq",
            {"quant_method": "torchweld_int4"},
            'quant_method must be "awq", "gptq" or "compressed-tensors", but got '
            "'torchweld_int4'; use register_quantizer, then from_pretrained",
        ),
    ],
)
def test_a_format_that_is_refused(tmp_path, kind, settings, text):
    method = settings_of(kind, {"Linear": GROUP}) | settings
    config = {"model_type": "llama", "quantization_config": method}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refuses(tmp_path, f"torchweld.load_quantized: {text}")


def change_config(folder, **settings):
    config = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(config))


def change_method(folder, change):
    method = json.loads((folder / "config.json").read_text())["quantization_config"]
    change(method)
    change_config(folder, quantization_config=method)


def change_state(folder, change):
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def rename(state):
    for key in [key for key in state if ".up_proj." in key]:
        state[key.replace("up_proj", "other_proj")] = state.pop(key)


def with_biases(value):
    """As AutoGPTQ writes them; the first layer's may be another."""

    def change(state):
        rows = {n: t.shape[1] for n, t in state.items() if n.endswith(".scales")}
        rows |= {n: t.shape[0] for n, t in state.items() if n.endswith(".weight_scale")}
        for i, (name, n) in enumerate(rows.items()):
            state[f"{name.rpartition('.')[0]}.bias"] = torch.full((n,), 0.0 if i else value)

    return change


@pytest.mark.parametrize("kind", FORMATS)
def test_biases_of_zeros_are_those_that_the_model_lacks(tmp_path, kind):
    write_checkpoint(tmp_path, kind)
    expected = logits(torchweld.load_quantized(tmp_path))
    change_state(tmp_path, with_biases(0.0))
    model = torchweld.load_quantized(tmp_path)
    assert all(layer.bias is None for layer in layers_of(model).values())
    assert_same_bits(logits(model), expected)


BROKEN = {
    "bias": (
        with_biases(-0.5),
        "down_proj.bias must be zero, since LlamaForCausalLM has no bias there, but got 0.5",
    ),
    "missing": (lambda s: s.pop("model.norm.weight"), "1 missing keys: model.norm.weight"),
    "unexpected": (lambda s: s.update({"x.y": torch.ones(1)}), "1 unexpected keys: x.y"),
    "no layer": (rename, "model.layers.0.mlp.other_proj of the checkpoint must be a linear layer"),
    "half a layer": (
        lambda s: s.pop("model.layers.1.mlp.up_proj.scales"),
        "model.layers.1.mlp.up_proj: ",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_checkpoint_that_does_not_fit(tmp_path, name):
    change, text = BROKEN[name]
    write_checkpoint(tmp_path, "awq")
    change_state(tmp_path, change)
    refuses(tmp_path, text)


def test_names_are_mapped_as_transformers_maps_them(tmp_path):
    """Checkpoints of Qwen2.5-VL have those of an older release."""
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**LLAMA, "rope_parameters": rope},
        vision_config={**vision, "out_hidden_size": 64},
    )
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).eval()
    names = [("model.visual.", "visual."), ("model.language_model.", "model.")]
    groups = {"Linear": GROUP, "up_proj": 8}
    reference = write_checkpoint(tmp_path, "compressed-tensors", 1, groups, model, names)
    ours = transformers.AutoModelForImageTextToText.from_pretrained
    for load, folder in ((torchweld.load_quantized, tmp_path), (ours, tmp_path / "ours")):
        loaded = load(folder)
        assert len(assert_same_weights(loaded, reference)) == 7 + 2 * 7
        assert_equal(loaded.lm_head.weight, reference.lm_head.weight)
        loaded.save_pretrained(tmp_path / "ours")


def test_a_class_may_be_given_by_an_auto_class(tmp_path):
    from transformers import AutoModelForCausalLM

    write_checkpoint(tmp_path, "awq")
    expected = logits(torchweld.load_quantized(tmp_path))
    assert_same_bits(logits(torchweld.load_quantized(tmp_path, AutoModelForCausalLM)), expected)
    change_config(tmp_path, architectures=None)
    assert_same_bits(logits(torchweld.load_quantized(tmp_path)), expected)


def test_an_architecture_of_remote_code_is_refused(tmp_path):
    from transformers import LlamaForCausalLM

    write_checkpoint(tmp_path, "awq")
    change_config(tmp_path, architectures=["MyRemoteForCausalLM"])
    text = "architectures of config.json must name a class of transformers, but got 'MyRemoteFor"
    refuses(tmp_path, text)
    assert len(layers_of(torchweld.load_quantized(tmp_path, LlamaForCausalLM))) == 14


def test_a_quantised_head_is_not_tied(tmp_path):
    write_checkpoint(tmp_path, "compressed-tensors")
    head = Layer(61, 64)

    def change(state):
        del state["lm_head.weight"]
        state |= {f"lm_head.{name}": tensor for name, tensor in head.compressed().items()}

    change_state(tmp_path, change)
    check(torchweld.load_quantized(tmp_path).lm_head, head)
    change_config(tmp_path, tie_word_embeddings=True)
    text = "lm_head must have float weights, which the config ties to others, but got 4-bit codes"
    refuses(tmp_path, text)


def test_layers_that_gptq_skips_are_floats(tmp_path):
    write_checkpoint(tmp_path, "gptq", dynamic={"-:.*lm_head": {}})
    assert len(layers_of(torchweld.load_quantized(tmp_path))) == 14
    change_method(tmp_path, lambda method: method.update(dynamic={"-:x": {}, "+:y": {"bits": 8}}))
    refuses(tmp_path, "dynamic of the quantization_config must be {}, but got")


class Counted(dict):
    """A dict that counts how often all of it is read."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        return super().__iter__()


def test_the_tensors_of_layers_are_found_in_one_pass():
    """Models of experts have tens of thousands of layers."""
    from torchweld.quantization.checkpoint import _converted

    tensors = Layer(group=K).awq()
    passes = set()
    for count in (2, 8):
        keys = {f"{i}.{name}": tensor for i in range(count) for name, tensor in tensors.items()}
        state = Counted(keys)
        convert = "qweight", lambda _, tensors: Int4Linear.from_awq(**tensors)
        assert len(dict(_converted(state, convert))) == count and not len(state)
        passes.add(state.passes)
    assert len(passes) == 1


@pytest.mark.parametrize("kind", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("stored", [7, 8])
def test_zeros_that_are_not_those_of_sym(tmp_path, kind, stored):
    """sym=True says that each is 8: 7 in a file of version 1, and 8 in one of version 2."""
    write_checkpoint(tmp_path, kind, sym=True)
    word = sum(stored << 4 * i for i in range(8)) - (stored // 8 << 32)
    change_state(tmp_path, lambda state: [t.fill_(word) for n, t in state.items() if "qzeros" in n])
    got = stored + (kind == "gptq")
    if got == 8:
        for layer in layers_of(torchweld.load_quantized(tmp_path)).values():
            zeros = torchweld.int4_unpack(layer.zero, layer.scale.shape[1])
            assert_equal(zeros, torch.full_like(zeros, 8))
        return
    other = "gptq" if kind == "gptq_v2" else "gptq_v2"
    text = (
        f"_proj: a zero must be 8, by sym=True and checkpoint_format={kind!r} of the "
        f"quantization_config, but got {got}; if the file stores it as {other!r} does, write that"
    )
    refuses(tmp_path, text)


def of_weights(**settings):
    return lambda method: method["config_groups"]["group_0"]["weights"].update(settings)


SETTINGS = {
    "asymmetric": (
        "compressed-tensors",
        of_weights(symmetric=True),
        "_proj: a zero must be 8, by symmetric=True of the quantization_config, but got ",
    ),
    "no zeros": (
        "compressed-tensors",
        of_weights(),
        "weight_zero_point must be there, by symmetric=False of the quantization_config, but got n",
    ),
    "no order": (
        "compressed-tensors",
        of_weights(actorder="group"),
        "weight_g_idx must be there, by actorder='group' of the quantization_config, but got none",
    ),
    "no g_idx": (
        "gptq",
        lambda method: method.update(desc_act=True),
        "g_idx must be there, by desc_act=True of the quantization_config, but got none",
    ),
    "strategy": (
        "compressed-tensors",
        of_weights(strategy="tensor"),
        "strategy of the quantization_config must be 'group' or 'channel', but got 'tensor'",
    ),
    "targets": (
        "compressed-tensors",
        lambda method: method["config_groups"]["group_0"].update(targets=["x"]),
        "_proj: targets of the quantization_config must name it, but got 'x'",
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_are_not_those_of_the_tensors(tmp_path, name):
    kind, change, text = SETTINGS[name]
    write_checkpoint(tmp_path, kind)
    change_method(tmp_path, change)
    lost = text.split()[0] if "must be there" in text else "no tensor"
    change_state(tmp_path, lambda s: [s.pop(n) for n in list(s) if n.endswith(f".{lost}")])
    refuses(tmp_path, text)


def test_a_float_checkpoint_is_refused(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    refuses(tmp_path, "config.json must have a quantization_config, but got no")


def test_missing_files_are_named(tmp_path):
    write_checkpoint(tmp_path, "awq")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="must have model.safetensors, but it is not there"):
        torchweld.load_quantized(tmp_path)


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="must have config.json, but it is not there"):
        torchweld.load_quantized(tmp_path / "absent")


def test_the_settings_of_older_gptq_files(tmp_path):
    """AutoGPTQ wrote them into a file of their own."""
    reference = write_checkpoint(tmp_path, "gptq")
    config = json.loads((tmp_path / "config.json").read_text())
    settings = config.pop("quantization_config")
    del settings["quant_method"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "quantize_config.json").write_text(json.dumps(settings))
    assert_same_weights(torchweld.load_quantized(tmp_path), reference)
