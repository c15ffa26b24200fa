"""4-bit layers in the place of GPT-2's Conv1D, whose weight is transposed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torchweld
from numerics import assert_equal, assert_same_bits
from test_quantize import layers_of, logits
from torchweld import Int4
from torchweld.nn import Int4Linear

transformers = pytest.importorskip("transformers")

from transformers.pytorch_utils import Conv1D  # noqa: E402

from tiny_models import tiny_gpt2  # noqa: E402

GROUP = 8


def gpt2():
    """With biases that are not 0."""
    model = tiny_gpt2().eval()
    for layer in model.modules():
        if isinstance(layer, Conv1D):
            nn.init.normal_(layer.bias)
    return model


def test_a_conv1d_is_rounded_as_the_linear_layer_that_it_is():
    stock, model = gpt2(), gpt2()
    model.load_state_dict(stock.state_dict())
    report = torchweld.quantize_(model, Int4(GROUP))
    assert len(report.replaced) == 8 and [path for path, _ in report.skipped] == ["lm_head"]
    for path, layer in layers_of(model).items():
        conv = stock.get_submodule(path)
        linear = nn.Linear(conv.nx, conv.nf)
        linear.weight, linear.bias = nn.Parameter(conv.weight.t()), conv.bias
        expected = Int4Linear.from_linear(linear, GROUP)
        assert_equal(layer.dequantise(), expected.dequantise())
        assert_equal(layer.bias, conv.bias.detach())
    quantised = logits(model)
    torchweld.dequantize_(model)
    convs = [m for m in model.modules() if isinstance(m, Conv1D)]
    assert len(convs) == 8 and not any(p.requires_grad for c in convs for p in c.parameters())
    torch.testing.assert_close(logits(model), quantised, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", ["saved", "quantised as it is read"])
def test_gpt2_loads_with_the_same_bits(tmp_path, how):
    from transformers import AutoModelForCausalLM

    from torchweld.integrations import TorchweldInt4Config

    model = gpt2()
    if how == "saved":
        torchweld.quantize_(model, Int4(GROUP))
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    else:
        model.save_pretrained(tmp_path)
        config = TorchweldInt4Config(GROUP)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
        torchweld.quantize_(model, Int4(GROUP))
    assert layers_of(loaded).keys() == layers_of(model).keys() and len(layers_of(loaded)) == 8
    assert_same_bits(logits(loaded), logits(model))
    torchweld.dequantize_(loaded)
    loaded.save_pretrained(tmp_path / "floats")
    floats = AutoModelForCausalLM.from_pretrained(tmp_path / "floats")
    assert_same_bits(logits(floats), logits(loaded))


@pytest.mark.parametrize("order", ["quantize, fuse", "fuse, quantize"])
def test_with_fuse(order):
    """The fused layers are those of floats; a block with 4-bit layers calls them."""
    model, stock = gpt2(), gpt2()
    stock.load_state_dict(model.state_dict())
    torchweld.quantize_(stock, Int4(GROUP))
    for step in order.split(", "):
        if step == "fuse":
            torchweld.fuse(model, check=False)
        else:
            torchweld.quantize_(model, Int4(GROUP))
    assert len(layers_of(model)) == 8
    torch.testing.assert_close(logits(model), logits(stock), rtol=1e-4, atol=1e-4)


def test_adapters_train_and_merge():
    peft = pytest.importorskip("peft")
    from torchweld.integrations import register_lora

    model = gpt2()
    torchweld.quantize_(model, Int4(GROUP))
    config = peft.LoraConfig(target_modules="all-linear", r=2, init_lora_weights=False)
    adapted = peft.get_peft_model(model, register_lora(config, model))
    adapted(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    trained = [p for p in adapted.parameters() if p.requires_grad]
    assert len(trained) == 16 and all(p.grad.abs().sum() > 0 for p in trained)
    expected = logits(adapted.eval())
    torchweld.dequantize_(adapted)
    merged = copy.deepcopy(adapted).merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)


class Halved(Conv1D):
    def forward(self, x):
        return super().forward(x) / 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda block: block.attn.c_attn.register_forward_hook(lambda *args: None), "forward hook"),
        (lambda block: setattr(block.attn, "c_attn", Halved(96, 32)), "a subclass of transformers"),
    ],
    ids=["hook", "subclass"],
)
def test_what_is_left(change, reason):
    model = gpt2()
    change(model.transformer.h[1])
    skipped = dict(torchweld.quantize_(model, Int4(GROUP)).skipped)
    assert reason in skipped["transformer.h.1.attn.c_attn"] and len(skipped) == 2
