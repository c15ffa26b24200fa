"""torchweld.fuse(model, loss=True): a GPT-2's head and loss as one op, in training mode."""

from __future__ import annotations

import copy
import inspect
import json

import pytest
import torch
from torch import nn
from torch.testing import assert_close

transformers = pytest.importorskip("transformers")

from test_fuse import Calls, batch, gpt2  # noqa: E402
from tiny_models import VOCAB, fuse_keeping_stock, saved_and_loaded  # noqa: E402
from torchweld.integrations import fuse, unfuse  # noqa: E402

GPT2LMHeadModel = transformers.GPT2LMHeadModel
DROPOUTS = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}


def pair(device="cpu", **changes):
    """A model with a fused loss and a stock one, of equal weights and in training mode."""
    model = gpt2(device, **DROPOUTS, **changes)
    stock, report = fuse_keeping_stock(model, loss=True)
    assert "lm_head" in report.replaced, report
    return model.train(), stock.train()


def losses(calls: Calls) -> int:
    """How often a call ran the op, by the internal ops that forward consists of."""
    return sum(n for name, n in calls.names.items() if "linear_cross_entropy" in name)


def labelled(device):
    inputs = batch(device)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    labels[1, 5:8] = -100
    return {**inputs, "labels": labels}


def step(model, **inputs):
    model.zero_grad()
    with Calls() as calls:
        out = model(**inputs)
    out.loss.backward()
    return out, {n: p.grad for n, p in model.named_parameters()}, losses(calls)


@pytest.mark.parametrize("case", ["mean", "items", "items as a number", "shifted"])
def test_loss_and_every_gradient_equal_stock(device, case):
    model, stock = pair(device)
    inputs = labelled(device)
    if case == "items":
        inputs["num_items_in_batch"] = torch.tensor(29, device=device)
    elif case == "items as a number":
        inputs["num_items_in_batch"] = 29
    elif case == "shifted":
        inputs["shift_labels"] = inputs["labels"].roll(-1, 1)
    out, grads, calls = step(model, **inputs)
    want, want_grads, none = step(stock, **inputs)
    assert calls > 0 and none == 0 and out.logits is None
    assert model.lm_head.weight is model.transformer.wte.weight
    assert_close(out.loss, want.loss, rtol=1e-5, atol=1e-5)
    assert grads.keys() == want_grads.keys()
    for name, grad in grads.items():
        assert_close(grad, want_grads[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: n + m)


def test_autocast(device):
    model, stock = pair(device)
    inputs = labelled(device)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        losses = [each(**inputs).loss for each in (model, stock)]
    assert losses[0].dtype == torch.float32
    assert_close(*losses, rtol=2e-2, atol=2e-2)


def test_evaluation_and_generation_return_logits(device):
    model, stock = pair(device)
    inputs = labelled(device)
    for each in (model, stock):
        each.eval()
    with torch.no_grad(), Calls() as calls:
        outs = [each(**inputs) for each in (model, stock)]
    assert losses(calls) == 0
    assert_close(outs[0].logits, outs[1].logits, rtol=1e-5, atol=1e-5)
    assert_close(outs[0].loss, outs[1].loss, rtol=1e-5, atol=1e-5)
    model.train()
    assert model(**batch(device)).logits.shape[-1] == VOCAB


@pytest.mark.parametrize("case", ["hook", "lora", "tuple", "some logits", "own loss"])
def test_calls_that_need_the_logits_run_stock(case):
    model, stock = pair()
    inputs = labelled("cpu")
    for each in (model, stock):
        if case == "hook":
            each.lm_head.register_forward_hook(lambda *_: None)
        elif case == "lora":
            each.lm_head = nn.Sequential(each.lm_head)
        elif case == "own loss":
            each.loss_function = lambda logits, labels, **_: logits.float().square().mean()
    if case == "tuple":
        inputs["return_dict"] = False
    elif case == "some logits":
        inputs["logits_to_keep"] = 12
    with Calls() as calls:
        outs = [each(**inputs) for each in (model, stock)]
    assert losses(calls) == 0
    results = [out[:2] if case == "tuple" else (out.loss, out.logits) for out in outs]
    for a, b in zip(*results, strict=True):
        assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_head_that_is_replaced_before_is_listed():
    model = gpt2()
    model.lm_head.register_forward_hook(lambda *_: None)
    report = fuse(model, loss=True)
    assert dict(report.skipped)["lm_head"].startswith("lm_head is not torch's Linear without hooks")
    assert type(model) is GPT2LMHeadModel


@pytest.mark.parametrize("given", ["labels", "nothing"])
def test_the_report_says_which_steps_run_the_loss(given):
    model = gpt2(**DROPOUTS)
    report = fuse(model, loss=True)
    assert report.ops["lm_head"].endswith(", run by training steps that give the model labels")
    assert any("trainers that compute the loss themselves" in note for note in report.notes)
    inputs = labelled("cpu")
    if given == "nothing":
        del inputs["labels"]
    with Calls() as calls:
        model.train()(**inputs)
    assert (losses(calls) > 0) == (given == "labels")


def test_a_model_without_a_head_says_so():
    report = fuse(gpt2(cls="GPT2Model"), loss=True)
    none = "loss=True: the model contains no language model whose head and loss are known"
    assert none in report.notes


@pytest.mark.parametrize("keep", ["gradients", "nothing"])
def test_what_the_loss_stores_is_chosen(keep):
    model, stock = pair()
    fuse(model, loss=keep)
    inputs = labelled("cpu")
    with Calls() as calls:
        loss = copy.deepcopy(model)(**inputs).loss
    stores_gradients = any("linear_cross_entropy_gradients" in name for name in calls.names)
    assert losses(calls) == 1 and stores_gradients == (keep == "gradients")
    assert_close(loss, stock(**inputs).loss)
    unfuse(model)
    assert vars(model).keys() == vars(stock).keys()


def test_a_loss_of_another_name_is_refused():
    with pytest.raises(ValueError, match="loss must be a bool or one of .*, but got 'none'"):
        fuse(gpt2(), loss="none")


def test_unfuse_copies_and_files(tmp_path):
    model, stock = pair()
    copied = copy.deepcopy(model)
    assert type(copied) is type(saved_and_loaded(model)) is type(model)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [
        "GPT2LMHeadModel"
    ]
    assert fuse(model, loss=True).replaced == []
    assert "lm_head" in unfuse(model)
    assert type(model) is GPT2LMHeadModel
    inputs = labelled("cpu")
    assert torch.equal(model(**inputs).logits, stock(**inputs).logits)


def test_the_signature_is_that_of_the_stock_forward():
    """transformers' Trainer drops columns that are no arguments of forward."""
    ours, stock = (
        list(inspect.signature(cls.forward).parameters)
        for cls in (type(pair()[0]), GPT2LMHeadModel)
    )
    assert ours == stock


def test_compiled_in_one_graph():
    model, _ = pair()
    inputs = labelled("cpu")
    want = model(**inputs).loss
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_close(compiled(**inputs).loss, want, rtol=1e-5, atol=1e-5)
