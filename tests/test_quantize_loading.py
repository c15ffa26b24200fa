"""4-bit models through from_pretrained: the layout of GPUs, offloading, floats that are rounded."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from torch import nn

import torchweld
from numerics import assert_equal, assert_same_bits
from test_quantize import GROUP, IDS, layers_of, logits, needs_gpu, tiny_llama
from torchweld import Int4

transformers = pytest.importorskip("transformers")

from torchweld.integrations import TorchweldInt4Config  # noqa: E402
from torchweld.integrations import version as hf_version  # noqa: E402
from torchweld.quantization import quantizer as hf_quantizer  # noqa: E402
from torchweld.quantization import upload  # noqa: E402

load = transformers.AutoModelForCausalLM.from_pretrained


@pytest.fixture
def saved(tmp_path):
    """A quantised model and the folder where it is saved in several files."""
    model = tiny_llama()
    torchweld.quantize_(model, Int4(GROUP))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    return model, tmp_path


@pytest.mark.parametrize("device_map", [None, "cpu"])
def test_the_layout_of_the_kernels_holds_the_weight_once(saved, device_map, monkeypatch):
    """On a CPU that has the layout of a GPU: loaded, saved, loaded again."""
    model, folder = saved
    monkeypatch.setattr("torchweld.ops.int4_module.is_repacked_on", lambda d: d.type != "meta")
    loaded, info = load(folder, device_map=device_map, output_loading_info=True)
    assert not any(info.values())
    for path, layer in layers_of(loaded).items():
        assert [t.dim() for t in layer.buffers()] == [3, 3, 3] and not list(layer.parameters())
        assert_equal(layer.portable(), layers_of(model)[path].portable())
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-4, atol=1e-4)
    loaded.save_pretrained(folder / "again")
    monkeypatch.undo()
    assert_same_bits(logits(load(folder / "again")), logits(model))


class NoEvent:
    """An event of a copy that has ended when the call returns."""

    def synchronize(self):
        pass

    record = synchronize


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (64, 64), (1000, 7)], ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int32, torch.bfloat16, torch.complex64], ids=str
)
def test_tensors_are_copied_through_two_buffers(shape, dtype):
    """Sizes below, at and above that of a buffer."""
    stages = itertools.cycle(
        upload.Stage(torch.empty(4096, dtype=torch.uint8), NoEvent()) for _ in range(2)
    )
    for _ in range(2):
        source = torch.randn(shape).to(dtype)
        target = torch.zeros_like(source)
        upload.copy_bytes(target, source, stages)
        assert_equal(target, source)


@pytest.mark.parametrize(
    ("device_map", "gpu"),
    [
        ({"": 0}, "cuda:0"),
        ({"model": "cuda:1", "lm_head": torch.device("cuda", 1)}, "cuda:1"),
        ({"": "cpu"}, None),
        ({"model": 0, "lm_head": "cpu"}, None),
        ({"model": 0, "lm_head": 1}, None),
    ],
    ids=str,
)
def test_a_model_for_one_gpu_is_read_on_the_cpu(device_map, gpu):
    """There a tensor is a view of its mapped file; models on several devices are left alone."""
    quantizer = hf_quantizer.TorchweldInt4Quantizer(TorchweldInt4Config(GROUP))
    read = quantizer.update_device_map(device_map)
    assert read == ({"": "cpu"} if gpu else device_map)
    assert quantizer.gpu == (torch.device(gpu) if gpu else None)
    floats = hf_quantizer.TorchweldInt4Quantizer(TorchweldInt4Config(GROUP), pre_quantized=False)
    assert floats.update_device_map(device_map) is device_map


def test_the_model_is_uploaded_when_it_is_whole(saved, monkeypatch):
    model, folder = saved
    calls = []

    def record(loaded, device):
        assert layers_of(loaded).keys() == layers_of(model).keys()
        assert_same_bits(logits(loaded), logits(model))
        calls.append(device)

    monkeypatch.setattr(hf_quantizer, "upload", record)
    loaded = load(folder, device_map={"": "cuda:0"})
    assert calls == [torch.device("cuda:0")]
    assert loaded.hf_quantizer.read_map == {"": torch.device("cuda:0")}


class Mixed(nn.Module):
    """A tied weight, a transposed one, none at all, and one above the size of a buffer."""

    def __init__(self):
        super().__init__()
        self.large = nn.Parameter(torch.randn(3, 2**21 + 1))
        self.other = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.other.weight
        self.transposed = nn.Parameter(torch.randn(5, 7).t())
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("flag", torch.tensor(True))


@needs_gpu
def test_a_model_is_uploaded():
    model = Mixed()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    upload.upload(model, torch.device("cuda"))
    assert model.tied.weight is model.other.weight
    for name, tensor in model.state_dict().items():
        assert tensor.is_cuda and tensor.stride() == before[name].stride()
        assert_equal(tensor.cpu(), before[name])


OFFLOADED = {
    **dict.fromkeys(["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"], "cpu"),
    **{"model.layers.0": "cpu", "model.layers.1": "disk"},
}


@pytest.mark.parametrize("buffers", [True, False])
def test_a_model_is_offloaded_to_the_disk(saved, buffers, monkeypatch):
    """The codes are buffers, which accelerate offloads when it is asked to."""
    hooks = pytest.importorskip("accelerate.hooks")
    stock = hooks.AlignDevicesHook.init_hook

    def init_hook(self, module):
        """As between two devices: copies have no mark of transformers."""
        module = stock(self, module)
        if self.offload and not buffers:
            module._buffers.update({k: t.clone() for k, t in module.named_buffers()})
        return module

    monkeypatch.setattr(hooks.AlignDevicesHook, "init_hook", init_hook)
    model, folder = saved
    how = {"device_map": OFFLOADED, "offload_folder": folder / "off", "offload_buffers": buffers}
    if buffers and hf_version.release() < (5, 14):
        with pytest.raises(ValueError, match="offload_buffers must be False .* got True; transf"):
            load(folder, **how)
        return
    if buffers:
        loaded = load(folder, **how)
    else:
        with pytest.warns(UserWarning, match="codes of 7 offloaded layers stay .* pass offload_b"):
            loaded = load(folder, **how)
    devices = {t.device.type for t in loaded.model.layers[1].mlp.up_proj.buffers()}
    assert devices == ({"meta"} if buffers else {"cpu"})
    assert_same_bits(logits(loaded), logits(model))
    assert loaded.generate(IDS, max_new_tokens=3).shape == (2, 9)
    loaded.save_pretrained(folder / "again")
    assert_same_bits(logits(load(folder / "again")), logits(model))


@pytest.fixture
def floats(tmp_path):
    """A float model with biases, and the folder where it is saved in several files."""
    model = tiny_llama(attention_bias=True, tie_word_embeddings=True)
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and layer.bias is not None:
            nn.init.normal_(layer.bias)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    return model, tmp_path


@pytest.mark.parametrize("skip", [("lm_head",), ()], ids=["head", "nothing"])
@pytest.mark.parametrize("device_map", [None, "cpu"])
def test_floats_are_quantised_as_they_are_read(floats, device_map, skip, monkeypatch):
    """Each weight alone, and none is left for later; a tied head stays."""
    model, folder = floats
    late = []
    quantize_layers = hf_quantizer.quantize_layers
    monkeypatch.setattr(
        hf_quantizer, "quantize_layers", lambda *args: late.append(quantize_layers(*args))
    )
    config = TorchweldInt4Config(GROUP, skip)
    loaded, info = load(
        folder, quantization_config=config, device_map=device_map, output_loading_info=True
    )
    assert not any(info.values()), info
    assert not late[0].replaced
    report = torchweld.quantize_(model, Int4(GROUP, skip))
    assert layers_of(loaded).keys() == set(report.replaced) and len(report.replaced) == 14
    for path, layer in layers_of(loaded).items():
        assert layer.quantisation_error == report.errors[path]
    assert_same_bits(logits(loaded), logits(model))
    loaded.save_pretrained(folder / "codes")
    recorded = json.loads((folder / "codes" / "config.json").read_text())
    assert recorded["quantization_config"]["left"] == ["lm_head"]
    assert_same_bits(logits(load(folder / "codes")), logits(model))


@pytest.mark.parametrize("size", ["1GB", "20KB"])
@pytest.mark.parametrize("quantised", [True, False], ids=["codes", "floats"])
def test_a_head_that_the_checkpoint_lacks_stays_float(tmp_path, quantised, size):
    """The missing head will be trained, as for a reward model; an existing head is quantised."""
    model = tiny_llama()
    if quantised:
        torchweld.quantize_(model, Int4(GROUP))
    model.save_pretrained(tmp_path / "causal", max_shard_size=size)
    how = {} if quantised else {"quantization_config": TorchweldInt4Config(GROUP)}
    classify = transformers.AutoModelForSequenceClassification.from_pretrained
    loaded = classify(tmp_path / "causal", pad_token_id=0, **how)
    assert type(loaded.score) is nn.Linear and len(layers_of(loaded)) == 14
    loaded.save_pretrained(tmp_path / "again")
    again, info = classify(tmp_path / "again", output_loading_info=True)
    assert not any(info.values()) and type(again.score) is nn.Linear
    assert_same_bits(logits(again), logits(loaded))
    torchweld.quantize_(loaded, Int4(GROUP, skip=()))
    loaded.save_pretrained(tmp_path / "head")
    assert "score" in layers_of(classify(tmp_path / "head"))


def test_a_config_refuses_what_it_does_not_know():
    """A file of a later version may have more."""
    with pytest.raises(TypeError, match="groupsize"):
        TorchweldInt4Config(groupsize=GROUP)
    made = TorchweldInt4Config.from_dict({"group_size": GROUP, "quant_method": "x", "later": 1})
    assert made.group_size == GROUP


def change_file(folder, name, change):
    """Changes the state_dict of the file that has a tensor."""
    from safetensors.torch import load_file, save_file

    for file in folder.glob("*.safetensors"):
        state = load_file(file)
        if name in state:
            change(state)
            save_file(state, file, {"format": "pt"})


@pytest.mark.parametrize("lost", ["mlp.up_proj.weight", "self_attn.q_proj.bias"])
def test_a_layer_that_the_checkpoint_lacks_is_quantised_too(floats, lost):
    """transformers initialises it, and says so."""
    model, folder = floats
    lost = f"model.layers.0.{lost}"
    change_file(folder, lost, lambda state: state.pop(lost))
    config = TorchweldInt4Config(GROUP)
    loaded, info = load(folder, quantization_config=config, output_loading_info=True)
    assert info["missing_keys"] == {lost}
    assert len(layers_of(loaded)) == 14 and logits(loaded).isfinite().all()


def test_floats_are_not_quantised_onto_the_disk(floats):
    """accelerate reads offloaded tensors from the checkpoint, which has no codes."""
    config = TorchweldInt4Config(GROUP)
    with pytest.raises(ValueError, match='device_map must not have "disk" while a float check'):
        load(floats[1], quantization_config=config, device_map=OFFLOADED)


@needs_gpu
def test_floats_are_quantised_onto_a_gpu(floats):
    model, folder = floats
    loaded = load(folder, quantization_config=TorchweldInt4Config(GROUP), device_map="cuda")
    torchweld.quantize_(model, Int4(GROUP))
    for path, layer in layers_of(loaded).items():
        assert [t.dim() for t in layer.buffers()][:3] == [3, 3, 3]
        assert_equal([got.cpu() for got in layer.portable()], layers_of(model)[path].portable())
    assert_same_bits(logits(loaded.cpu()), logits(model))


@needs_gpu
@pytest.mark.parametrize("buffers", [True, False])
def test_layers_are_offloaded_from_a_gpu(saved, buffers):
    pytest.importorskip("accelerate")
    model, folder = saved
    places = {name: 0 for name in OFFLOADED} | {"model.layers.1": "cpu"}
    loaded = load(folder, device_map=places, offload_buffers=buffers)
    there, away = (loaded.model.layers[i].mlp.up_proj for i in (0, 1))
    assert [t.dim() for t in there.buffers()] == [3, 3, 3]
    assert away.qweight.device.type == ("meta" if buffers else "cuda")
    with torch.no_grad():
        got = loaded(IDS.cuda()).logits.cpu()
    torch.testing.assert_close(got, logits(model), rtol=1e-3, atol=1e-3)
    loaded.save_pretrained(folder / "again")
    assert_same_bits(logits(load(folder / "again")), logits(model))


def test_a_weight_of_another_shape_is_refused(floats, caplog):
    """transformers logs the reason, and raises."""
    caplog.set_level("WARNING", "transformers")
    _, folder = floats
    name = "model.layers.0.mlp.up_proj.weight"
    change_file(folder, name, lambda state: state.update({name: torch.ones(64, 128)}))
    with pytest.raises(RuntimeError, match="issues during automatic conversion of the weights"):
        load(folder, quantization_config=TorchweldInt4Config(GROUP))
    assert "up_proj.weight must be (128, 64), but got (64, 128)" in caplog.text
