"""Training on 4-bit models: LoRA of PEFT on Int4Linear, saved, loaded and merged."""

from __future__ import annotations

import copy
import sys
import warnings

import pytest
import torch

import torchweld
from numerics import assert_same_bits
from test_quantize import GROUP, IDS, layers_of, logits, tiny_llama
from torchweld import Int4

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from torchweld.integrations import register_lora  # noqa: E402


def quantised(**changes):
    model = tiny_llama(**changes)
    torchweld.quantize_(model, Int4(GROUP))
    return model


def with_lora(model, **more):
    torch.manual_seed(0)
    more = {"target_modules": ["q_proj", "v_proj"], "r": 4, "init_lora_weights": False, **more}
    return peft.get_peft_model(model, register_lora(peft.LoraConfig(**more), model))


def loss_of(model, ids=IDS):
    return model(input_ids=ids, labels=ids).loss


def test_gradients_equal_those_on_the_dequantised_model():
    ours, stock = quantised(), quantised()
    torchweld.dequantize_(stock)
    ours, stock = with_lora(ours), with_lora(stock)
    adapters = peft.get_peft_model_state_dict(ours)
    peft.set_peft_model_state_dict(stock, adapters)
    for model in (ours, stock):
        loss_of(model.train()).backward()
    names = {name for name, p in ours.named_parameters() if p.requires_grad}
    assert len(names) == 8 and all("lora_" in name for name in names)
    wanted = dict(stock.named_parameters())
    for name in names:
        got = ours.get_parameter(name).grad
        torch.testing.assert_close(got, wanted[name].grad, rtol=1e-3, atol=1e-5)


def test_training_lowers_the_loss_and_the_adapter_saves(tmp_path):
    base = quantised()
    codes = {path: layer.qweight.clone() for path, layer in layers_of(base).items()}
    model = with_lora(base, init_lora_weights=True)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.05)
    first = loss_of(model).item()
    for _ in range(5):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    assert loss_of(model).item() < 0.9 * first
    for path, layer in layers_of(base).items():
        assert torch.equal(layer.qweight, codes[path.replace(".base_layer", "")])
    model.save_pretrained(tmp_path)
    config = register_lora(peft.PeftConfig.from_pretrained(tmp_path))
    loaded = peft.PeftModel.from_pretrained(quantised(), tmp_path, config=config)
    assert_same_bits(logits(loaded), logits(model.eval()))
    with model.disable_adapter():
        assert_same_bits(logits(model), logits(quantised()))


def test_all_linear_are_the_layers_but_the_head():
    model = quantised()
    model = with_lora(model, target_modules="all-linear")
    wrapped = {n for n, m in model.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)}
    assert len(wrapped) == 14 and not any("lm_head" in name for name in wrapped)


@pytest.mark.parametrize("more", [{}, {"modules_to_save": ["lm_head"]}], ids=["", "head"])
def test_all_linear_are_those_below_another_adapter(more):
    """Not the layers of that adapter, or a head that is trained whole."""
    model = with_lora(quantised(), target_modules="all-linear", **more)
    config = peft.LoraConfig(target_modules="all-linear", r=2)
    model.add_adapter("second", register_lora(config, model))
    assert len(config.target_modules) == 14
    model.set_adapter("second")
    loss_of(model.train()).backward()
    trained = {n for n, p in model.named_parameters() if p.grad is not None and "lora_" in n}
    assert len(trained) == 28 and all("second" in name for name in trained)


def test_adapters_have_the_dtype_of_the_scales_and_nothing_warns():
    model = quantised().to(torch.bfloat16)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Unsupported layer type", UserWarning)
        model = with_lora(model)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert type(layer).__name__ == "Int4LoraLinear"
    assert (layer.in_features, layer.out_features) == (64, 64)
    assert layer.lora_A["default"].weight.device == layer.base_layer.scale.device


def test_a_model_prepared_by_peft_trains_under_autocast():
    """peft casts the norms to float32, so that x is float32 without autocast."""
    model = peft.prepare_model_for_kbit_training(quantised().to(torch.bfloat16))
    assert model.model.norm.weight.dtype == torch.float32
    assert model.model.layers[0].mlp.up_proj.scale.dtype == torch.bfloat16
    model = with_lora(model).train()
    with torch.autocast("cpu", torch.bfloat16):
        loss_of(model).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 8 and all(p.grad.abs().sum() > 0 for p in trained)


def test_an_adapter_merges_into_the_dequantised_model():
    model = with_lora(quantised())
    expected = logits(model.eval())
    with pytest.raises(RuntimeError, match="must have float weights to merge an adapter, but got"):
        copy.deepcopy(model).merge_and_unload()
    torchweld.dequantize_(model)
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("task", ["SEQ_CLS", "TOKEN_CLS"])
def test_a_head_is_trained_whole(task):
    """peft puts it into modules_to_save."""
    kind = {"SEQ_CLS": "Sequence", "TOKEN_CLS": "Token"}[task]
    make = getattr(transformers, f"AutoModelFor{kind}Classification").from_config
    model = make(tiny_llama(pad_token_id=0).config)
    torchweld.quantize_(model, Int4(GROUP))
    model = with_lora(model, task_type=task, target_modules="all-linear")
    trained = {n for n, p in model.named_parameters() if p.requires_grad and "lora_" not in n}
    assert len(trained) and all("score.modules_to_save.default" in name for name in trained)
    model(input_ids=IDS).logits.sum().backward()
    assert all(model.get_parameter(name).grad.abs().sum() > 0 for name in trained)


@pytest.mark.parametrize(
    ("more", "path"),
    [
        ({"modules_to_save": ["up_proj"]}, "model.layers.0.mlp.up_proj"),
        ({"modules_to_save": ["layers.1"]}, "model.layers.1.self_attn.q_proj"),
        ({"task_type": "SEQ_CLS"}, "score"),
    ],
    ids=str,
)
def test_a_layer_of_codes_is_not_trained_whole(more, path):
    """PEFT would copy the layer for the adapter, and the copy would never change."""
    model = transformers.AutoModelForSequenceClassification.from_config(tiny_llama().config)
    torchweld.quantize_(model, Int4(GROUP, skip=()))
    text = f"modules_to_save must be float layers, but got {path}, an Int4Linear, which can't be tr"
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=text):
        with_lora(model, **more)
    assert before == {name: type(module) for name, module in model.named_modules()}


def test_refusals():
    with pytest.raises(ValueError, match='model must be given for "all-linear", but got None'):
        register_lora(peft.LoraConfig(target_modules="all-linear"))
    with pytest.raises(ValueError, match="use_dora must be False, but got True"):
        register_lora(peft.LoraConfig(use_dora=True))


def test_peft_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.delitem(sys.modules, "torchweld.integrations.peft_layer", raising=False)
    with pytest.raises(ImportError, match="register_lora needs peft; install it with"):
        register_lora(None)


def test_layers_below_an_adapter_are_not_quantised():
    """Their codes would change under adapters that were trained on floats."""
    model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(target_modules=["q_proj"]))
    report = torchweld.quantize_(model, Int4(GROUP))
    reasons = {path: reason for path, reason in report.skipped if path.endswith("base_layer")}
    assert len(reasons) == 2 and "base layer of an adapter" in next(iter(reasons.values()))
    assert all("lora_" not in path for path in report.replaced)
    left = {path.rpartition("self_attn.")[2]: reason for path, reason in report.skipped}
    assert "belongs to an adapter" in left["q_proj.lora_A.default"]


def test_a_trainer_accepts_the_model(tmp_path):
    """transformers refuses to train a quantised model without adapters."""
    from transformers import Trainer, TrainingArguments

    model = with_lora(quantised(), init_lora_weights=True)
    data = [{"input_ids": IDS[0], "labels": IDS[0]}] * 4
    arguments = TrainingArguments(
        tmp_path, max_steps=2, report_to=[], use_cpu=True, save_strategy="no", logging_strategy="no"
    )
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    Trainer(model, arguments, train_dataset=data).train()
    assert any(not torch.equal(p, before[n]) for n, p in model.named_parameters() if n in before)
    with pytest.raises(ValueError, match="quantized"):
        Trainer(quantised(), arguments, train_dataset=data)
