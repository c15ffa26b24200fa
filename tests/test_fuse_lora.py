"""torchweld.fuse of models with PEFT's LoRA adapters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.autograd import functional
from torch.func import functional_call, grad, hessian, jacrev, vmap
from torch.testing import assert_close

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from test_fuse import Calls  # noqa: E402
from test_fuse_families import LAYERS, labelled, step, tiny  # noqa: E402
from tiny_models import batch, saved_and_loaded  # noqa: E402
from torchweld.integrations import fuse, unfuse  # noqa: E402

KEPT = ("rms_norm", "add_rms_norm", "rotary", "attention", "gated_activation")


def with_lora(model, **more):
    torch.manual_seed(1)
    more = {"target_modules": "all-linear", "r": 4, "init_lora_weights": False, **more}
    return peft.get_peft_model(model, peft.LoraConfig(**more))


def runs(calls, op):
    """How often an op ran, with gradients or without."""
    return calls.names[f"torchweld::{op}"] + calls.names[f"torchweld::{op}_forward"]


def same_step(model, stock, inputs, rtol=1e-4, atol=2e-5):
    """Loss and gradients of one training step, with one seed for the adapters' dropout."""
    results = []
    for each in (model, stock):
        torch.manual_seed(3)
        results.append(step(each.train(), inputs))
    (loss, grads), (want, want_grads) = results
    assert_close(loss, want, rtol=rtol, atol=atol)
    trained = [key for key, grad in grads.items() if grad is not None]
    assert any("lora_A" in key for key in trained) and any("lora_B" in key for key in trained)
    assert trained == [key for key, grad in want_grads.items() if grad is not None]
    for key in trained:
        assert_close(grads[key], want_grads[key], rtol=rtol, atol=atol, msg=lambda m, k=key: k + m)


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Gemma2", "Phi3"])
@pytest.mark.parametrize("order", ["lora first", "fuse first", "fuse twice"])
def test_every_site_that_can_be_served_runs(device, name, order):
    model = tiny(name, device, attention_dropout=0.0)
    stock = with_lora(copy.deepcopy(model))
    if order != "lora first":
        fuse(model, loss=True)
    model = with_lora(model)
    if order != "fuse first":
        report = fuse(model, loss=True)
        assert order == "fuse twice" or not report.skipped
        assert {reason for _, reason in report.skipped} <= {"fused already"}
        adapted = [op for op in report.ops.values() if op.startswith("aten::addmm_")]
        assert len(adapted) == LAYERS * (4 if name == "Phi3" else 7)
    inputs = labelled(device)
    with torch.no_grad():
        logits, want = (each.eval()(**batch(device)).logits for each in (model, stock))
    real = inputs["attention_mask"].bool()
    assert_close(logits[real], want[real], rtol=1e-4, atol=1e-4)
    with Calls() as calls:
        step(model.train(), inputs)
    for op in KEPT:
        assert runs(calls, op) >= LAYERS, op
    assert runs(calls, "linear_cross_entropy_gradients") == 1
    same_step(model, stock, inputs)
    assert unfuse(model) and not unfuse(model)
    assert {type(m) for m in model.modules()} == {type(m) for m in stock.modules()}


def test_the_report_says_which_layers_are_called():
    report = fuse(with_lora(tiny("Llama")))
    kind = "peft.tuners.lora.layer.Linear, not torch's Linear"
    layer = "base_model.model.model.layers.0."
    assert report.ops[f"{layer}mlp"] == f"gated_activation (act_fn; gate_proj, up_proj: {kind})"
    assert report.ops[f"{layer}input_layernorm"] == (
        f"rms_norm (input_layernorm; q_proj, k_proj, v_proj: {kind})"
    )
    assert report.calls["aten::addmm_"] == 7 * LAYERS
    assert not fuse(with_lora(tiny("Llama")), only=["mlp"]).calls.get("aten::addmm_")


def test_adapters_of_the_attention_alone(device):
    """The MLP and the loss stay whole ops, on frozen weights."""
    stock = with_lora(tiny("Llama", device), target_modules=["q_proj", "v_proj"])
    model = copy.deepcopy(stock)
    fuse(model, loss=True)
    with Calls() as calls:
        step(model.train(), labelled(device))
    assert calls.names["torchweld::gated_mlp_backward"] == LAYERS
    same_step(model, stock, labelled(device))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointing_dropout_and_trained_biases(device, dropout):
    stock = with_lora(tiny("Qwen2", device), lora_dropout=dropout, bias="all")
    model = copy.deepcopy(stock)
    fuse(model)
    for each in (model, stock):
        each.enable_input_require_grads()
        each.gradient_checkpointing_enable()
    same_step(model, stock, labelled(device))


def test_a_trained_base_layer(device):
    stock = with_lora(tiny("Llama", device))
    stock.requires_grad_(True)
    model = copy.deepcopy(stock)
    fuse(model)
    same_step(model, stock, labelled(device))


def test_float32_adapters_on_bfloat16_are_no_worse_than_stock(device):
    """peft keeps the adapters of a bfloat16 model in float32."""
    stock = with_lora(tiny("Llama", device, torch.bfloat16))
    assert {p.dtype for name, p in stock.named_parameters() if "lora" in name} == {torch.float32}
    model, exact = copy.deepcopy(stock), copy.deepcopy(stock).double()
    fuse(model)
    inputs = labelled(device)
    (loss, grads), (stock_loss, stock_grads), (want, want_grads) = (
        step(each.train(), inputs) for each in (model, stock, exact)
    )
    assert (loss - want).abs() <= 2 * (stock_loss - want).abs() + 1e-2
    errors = [
        sum((each[key] - grad).square().sum() for key, grad in want_grads.items() if "lora" in key)
        for each in (grads, stock_grads)
    ]
    assert errors[0] <= 4 * errors[1]  # squares
    assert {grads[key].dtype for key in grads if "lora" in key} == {torch.float32}


def test_autocast(device):
    stock = with_lora(tiny("Llama", device))
    model = copy.deepcopy(stock)
    fuse(model)
    with torch.autocast(torch.device(device).type, torch.bfloat16), Calls() as calls:
        losses = [each.train()(**labelled(device)).loss for each in (model, stock)]
    assert runs(calls, "gated_activation") == LAYERS
    assert_close(*losses, rtol=2e-2, atol=2e-2)
    losses[0].backward()


def one_layer(device, change=lambda model: None, **changes):
    """A LoRA layer of a Qwen2, whose base layer has a bias: fused and stock."""
    stock = with_lora(tiny("Qwen2", device), **changes)
    change(stock)
    model = copy.deepcopy(stock)
    fuse(model, check=False)
    layers = [each.base_model.model.model.layers[0].self_attn.q_proj for each in (model, stock)]
    assert type(layers[0]) is not type(layers[1])
    x = torch.randn(2, 3, layers[1].in_features, device=device)
    return *layers, x


ONCE = r"^torchweld.integrations.lora: create_graph must be False, because a second derivative is "


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda f, x: functional.hessian(f, x),
        lambda f, x: functional.hvp(f, x, torch.ones_like(x)),
        lambda f, x: functional.vhp(f, x, torch.ones_like(x)),
        lambda f, x: torch.autograd.grad(f(x), x, create_graph=True, allow_unused=True),
    ],
    ids=["hessian", "hvp", "vhp", "grad"],
)
@pytest.mark.parametrize("power", [1, 2])
def test_second_derivatives_raise(device, differentiate, power):
    """A sum's gradient is a constant, from which torch's once_differentiable has no edge."""
    layer, _, x = one_layer(device)
    with pytest.raises(RuntimeError, match=ONCE):
        differentiate(lambda x: (layer(x) ** power).sum(), x.requires_grad_())


@pytest.mark.parametrize(
    "transform",
    [
        lambda loss, values, x: grad(loss)(values, x),
        lambda loss, values, x: vmap(grad(loss), (None, 0))(values, x),
        lambda loss, values, x: jacrev(loss, argnums=1)(values, x),
        lambda loss, values, x: vmap(loss, (None, 0))(values, x),
        lambda loss, values, x: hessian(loss, argnums=1)(values, x),
    ],
    ids=["grad", "per_sample", "jacrev", "vmap", "hessian"],
)
def test_torch_func(device, transform):
    layer, stock, x = one_layer(device)

    def transformed(module):
        def loss(values, x):
            return functional_call(module, values, x).square().sum()

        return transform(loss, {k: v.detach() for k, v in module.named_parameters()}, x)

    assert_close(transformed(layer), transformed(stock), rtol=1e-4, atol=1e-5)


def test_per_sample_gradients_of_a_model(device):
    stock = with_lora(tiny("Qwen2", device))
    model = copy.deepcopy(stock)
    fuse(model)

    def gradients(model):
        names = {k: v for k, v in model.named_parameters() if v.requires_grad}

        def loss(values, ids):
            return functional_call(
                model, values, (), {"input_ids": ids[None], "labels": ids[None]}
            )[0]

        ids = torch.arange(24, device=device).view(3, 8)
        return vmap(grad(loss), (None, 0))(names, ids)

    assert_close(gradients(model), gradients(stock), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_layer_under_autocast(device, dtype):
    """A Qwen2's base layer has a bias."""
    layer, stock, x = one_layer(device)
    with torch.autocast(torch.device(device).type, dtype):
        y, eager = layer(x), stock(x)
    assert y.dtype == eager.dtype == dtype
    exact = copy.deepcopy(stock).double()(x.double())
    rounding = torch.finfo(dtype).eps / 2 * exact.abs().max()
    assert (y - exact).abs().max() <= 2 * (eager - exact).abs().max() + 2 * rounding


@pytest.mark.parametrize("change", ["disabled", "merged", "two", "dora", "bias", "hook"])
def test_other_adapters_run_stock(change):
    stock = with_lora(tiny("Llama"), use_dora=change == "dora", lora_bias=change == "bias")
    for name, parameter in stock.named_parameters():
        if "lora_B" in name and name.endswith("bias"):
            torch.nn.init.ones_(parameter)
    if change == "two":
        stock.add_adapter("other", peft.LoraConfig(target_modules="all-linear", r=2))
        stock.base_model.set_adapter(["default", "other"])
    model = copy.deepcopy(stock)
    report = fuse(model)
    refused = [path for path, reason in report.skipped if "one active LoRA" in reason]
    assert len(refused) == (7 * LAYERS if change in ("two", "dora", "bias") else 0)
    seen = []
    for each in (model, stock):
        if change == "disabled":
            each.base_model.disable_adapter_layers()
        elif change == "merged":
            each.merge_adapter()
        elif change == "hook":
            layer = each.base_model.model.model.layers[0].mlp.up_proj.lora_A["default"]
            layer.register_forward_hook(lambda m, args, out: seen.append(out))
    with torch.no_grad():
        outs = [each.eval()(**batch("cpu")).logits for each in (model, stock)]
    assert_close(*outs, rtol=1e-4, atol=1e-4)
    assert len(seen) == (2 if change == "hook" else 0)


def check_saved_and_merged(model, stock, inputs, folder, *others):
    """Loaded adapters and a merged model give the logits of the model; returns the merged one."""
    with torch.no_grad():
        want = model.eval()(**inputs).logits
    model.save_pretrained(folder)
    loaded = peft.PeftModel.from_pretrained(stock, folder)
    merged = copy.deepcopy(model).merge_and_unload()
    for each in (*others, loaded, merged):
        with torch.no_grad():
            assert_close(each.eval()(**inputs).logits, want, rtol=1e-4, atol=1e-4)
    return merged


def test_adapters_are_saved_merged_and_pickled(tmp_path):
    model = with_lora(tiny("Llama"))
    fuse(model)
    check_saved_and_merged(model, tiny("Llama"), batch("cpu"), tmp_path, saved_and_loaded(model))
