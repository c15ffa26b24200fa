"""PEFT's LoRA on the weights of a mixture's experts, computed beside the experts' products.

The oracle is PEFT's own forward around transformers' eager loop over the experts.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad
from torch.nn.utils import parametrize
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from test_fuse_families import labelled, step  # noqa: E402
from test_fuse_lora import check_saved_and_merged, same_step  # noqa: E402
from test_hf_attention import Calls  # noqa: E402
from test_hf_experts import EXPERTS, inputs, made, mixture, with_lora  # noqa: E402
from tiny_models import saved_and_loaded  # noqa: E402
from torchweld.integrations import fuse, recorder, register_experts, unfuse  # noqa: E402

layer = pytest.importorskip("peft.tuners.lora.layer")
lora_experts = pytest.importorskip("torchweld.integrations.lora_experts")
families = pytest.importorskip("torchweld.integrations.fusion.layers.families")
if not hasattr(layer, "ParamWrapper") or not hasattr(layer.ParamWrapper, "get_delta_factors"):
    pytest.skip("this peft gives no factors", allow_module_level=True)

register_experts()
CLASSES = ["Qwen3MoeExperts", "MixtralExperts", "GptOssExperts", "NemotronHExperts"]


def wrapped(name, adapters=1, weights=None, r=3):
    """Experts of a class in float64 under adapters: in PEFT's own wrappers, and in fused ones."""
    experts = made(name)
    experts.requires_grad_(False)
    names = weights or [each for each, _ in experts.named_parameters() if each.endswith("_proj")]
    config = peft.LoraConfig(
        r=r,
        lora_alpha=5,
        target_modules=[],
        target_parameters=[f"experts.{each}" for each in names],
        init_lora_weights=False,
    )
    stock = nn.ModuleDict({"experts": experts})
    for i in range(adapters):
        peft.inject_adapter_in_model(config, stock, f"adapter {i}")
    stock = stock["experts"]
    for parameter in stock.parameters():
        if parameter.requires_grad or adapters > 1 and parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.4)
    for each in wrappers(stock):
        each.set_adapter([f"adapter {i}" for i in range(adapters)])
    fused = copy.deepcopy(stock)
    stock.get_base_layer().config._experts_implementation_internal = "eager"
    fused.get_base_layer().config._experts_implementation_internal = "torchweld"
    for each in wrappers(fused):
        each.__class__ = families.fused_class(layer.ParamWrapper)
    return fused, stock


def wrappers(module):
    return [each for each in module.modules() if isinstance(each, layer.ParamWrapper)]


def trained(module):
    return {key: p for key, p in module.named_parameters() if p.requires_grad}


def run(module, x, index, weight, dy):
    """Result and gradients of x, the router's weights and the adapters; none of the base."""
    module.zero_grad()
    x, weight = (each.detach().requires_grad_() for each in (x, weight))
    y = module(x, index, weight)
    y.backward(dy)
    assert all(p.grad is None for p in module.parameters() if not p.requires_grad)
    grads = {key: p.grad for key, p in trained(module).items()}
    return {"y": y.detach(), "x": x.grad, "weight": weight.grad, **grads}


def eager(module, x, index, weight, dy):
    """`run` of PEFT's forward; the eager loop knows no sentinels, but weights of zero."""
    off = index >= EXPERTS
    out = run(module, x, index.masked_fill(off, 0), weight.masked_fill(off, 0), dy)
    return {**out, "weight": out["weight"].masked_fill(off, 0)}


def given(module, kind="random"):
    return inputs(module.get_base_layer(), kind)


@pytest.fixture
def never_whole(monkeypatch):
    """PEFT must neither compute a whole delta nor parametrise a weight."""

    def fail(*args, **kwargs):
        raise AssertionError("the delta is computed")

    def forbid():
        monkeypatch.setattr(layer.ParamWrapper, "get_delta_weight", fail)
        monkeypatch.setattr(parametrize, "register_parametrization", fail)

    return forbid


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("kind", ["random", "skewed", "sentinels"])
@pytest.mark.parametrize("adapters", [1, 2])
def test_results_and_gradients_are_pefts(name, kind, adapters, never_whole):
    fused, stock = wrapped(name, adapters)
    arguments = given(stock, kind)
    want = eager(stock, *arguments)
    never_whole()
    got = run(fused, *arguments)
    assert len(got) == 3 + 4 * adapters
    assert_close(got, want, rtol=1e-10, atol=1e-10)
    assert all(value.any() for value in want.values())
    if kind == "skewed":
        for key, value in got.items():
            if "lora_A" in key:  # expert 2 has no token
                assert not value.view(EXPERTS, -1)[2].any()
            if "lora_B" in key:
                assert not value.view(len(value), -1, EXPERTS)[..., 2].any()
    if kind == "sentinels":
        assert not got["weight"][arguments[1] >= EXPERTS].any()


@pytest.mark.parametrize("weight", ["gate_up_proj", "down_proj"])
def test_an_adapter_of_one_weight(weight):
    fused, stock = wrapped("GptOssExperts", weights=[weight])
    arguments = given(stock)
    with recorder.recording() as calls:
        got = run(fused, *arguments)
    assert calls == {fused: [None]}
    assert_close(got, eager(stock, *arguments), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["GptOssExperts", "NemotronHExperts"])
def test_a_trained_base(name):
    fused, stock = wrapped(name)
    arguments = given(stock, "skewed")
    for each in (fused, stock):
        each.requires_grad_(True)
    got, want = run(fused, *arguments), eager(stock, *arguments)
    assert any("down_proj" in key for key in got)
    assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_no_tokens():
    fused, stock = wrapped("MixtralExperts")
    none = run(fused, *(each[:0] for each in given(stock)))
    assert none["y"].shape == none["x"].shape == (0, stock.out_features)
    assert not any(value.any() for value in none.values())


def test_ids_below_zero_are_sentinels():
    fused, stock = wrapped("Qwen3MoeExperts")
    x, index, weight, dy = given(stock, "sentinels")
    below = torch.where(index >= EXPERTS, -index, index)
    assert below.min() < 0
    want = run(fused, x, index, weight, dy)
    assert_close(run(fused, x, below, weight, dy), want, rtol=0, atol=0)
    nothing = run(fused, x, torch.full_like(index, -1), weight, dy)
    assert not any(value.any() for value in nothing.values())


def test_what_no_route_reaches_counts_nothing():
    """NaN in the weights of sentinels, and in a token and its gradient that have only sentinels."""
    fused, stock = wrapped("GptOssExperts")
    x, index, weight, dy = given(stock, "sentinels")
    index[1] = EXPERTS
    want = run(fused, x, index, weight, dy)
    only = (index >= EXPERTS).all(1)[:, None]
    x, dy = (each.detach().masked_fill(only, float("nan")) for each in (x, dy))
    weight = weight.detach().masked_fill(index >= EXPERTS, float("nan"))
    assert_close(run(fused, x, index, weight, dy), want, rtol=0, atol=0)


def moved(arguments, *to):
    """The arguments of a call on a device, the floating-point ones in a dtype."""
    return [each.to(*to[: 2 if each.is_floating_point() else 1]) for each in arguments]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_runs_have_equal_bits(device, dtype):
    fused, stock = wrapped("Qwen3MoeExperts")
    arguments = moved(given(stock, "sentinels"), device, dtype)
    fused.to(device, dtype)
    first, second = (run(fused, *arguments) for _ in range(2))
    assert_close(first, second, rtol=0, atol=0)


class Largest(TorchDispatchMode):
    """The number of elements of the largest result that is no view."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            outs = out if isinstance(out, (tuple, list)) else (out,)
            sizes = [t.numel() for t in outs if isinstance(t, torch.Tensor)]
            self.size = max(self.size, *sizes, 0)
        return out


@pytest.mark.parametrize("name", ["Qwen3MoeExperts", "GptOssExperts"])
def test_no_tensor_is_as_large_as_a_weight(name):
    fused, stock = wrapped(name, r=2)
    x, index, weight, dy = given(stock)
    arguments = x[:3], index[:3], weight[:3], dy[:3]
    sizes = []
    for each in (fused, stock):
        with Largest() as largest:
            run(each, *arguments)
        sizes.append(largest.size)
    down = stock.get_base_layer().down_proj.numel()
    assert sizes[0] < down <= sizes[1]


@pytest.mark.parametrize("name", CLASSES)
def test_factors_are_those_of_pefts_delta(name):
    fused, _ = wrapped(name)
    transposed = fused.get_base_layer().is_transposed
    for each in wrappers(fused):
        ((first, second, scaling),) = lora_experts._factors([each], transposed)[each.parameter_name]
        delta = second @ first * scaling
        want = each.get_delta_weight("adapter 0")
        assert_close(delta.mT if transposed else delta, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("name", CLASSES)
def test_bfloat16_is_no_worse_than_peft(device, name, cast):
    """PEFT keeps the adapters of a bfloat16 model in float32."""
    fused, stock = wrapped(name)
    arguments = given(stock)
    want = eager(stock, *arguments)
    for each in (fused, stock):
        for key, parameter in each.named_parameters():
            parameter.data = parameter.data.to(
                device, torch.float32 if "lora" in key else torch.bfloat16
            )
    arguments = moved(arguments, device, torch.bfloat16)
    kind = torch.device(device).type
    with recorder.recording() as calls, torch.autocast(kind, torch.bfloat16, enabled=cast):
        got, pefts = (run(each, *arguments) for each in (fused, stock))
    assert set(map(tuple, calls.values())) == {(None,)}
    for key in want:
        assert got[key].dtype == (torch.float32 if "lora" in key else torch.bfloat16)
        error, allowed = ((each[key].cpu() - want[key]).norm() for each in (got, pefts))
        assert error <= 2 * allowed + 1e-2 * want[key].norm(), key


def test_float32_under_autocast(device):
    fused, stock = wrapped("MixtralExperts")
    arguments = given(stock)
    want = eager(stock, *arguments)
    x, index, weight, dy = moved(arguments, device, torch.float32)
    with recorder.recording() as calls, torch.autocast(torch.device(device).type, torch.bfloat16):
        got = run(fused.to(device, torch.float32), x, index, weight, dy.bfloat16())
    assert set(map(tuple, calls.values())) == {(None,)}
    assert got["y"].dtype == torch.bfloat16 and got["x"].dtype == torch.float32
    for key in want:
        assert (got[key].cpu() - want[key]).norm() <= 0.05 * want[key].norm(), key


@pytest.mark.parametrize("name", ["Qwen3MoeExperts", "GptOssExperts"])
def test_compiled_experts_are_one_graph(name):
    fused, stock = wrapped(name)
    arguments = given(stock)
    want = run(fused, *arguments)
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    got = {key.removeprefix("_orig_mod."): v for key, v in run(compiled, *arguments).items()}
    assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_a_second_derivative_raises():
    fused, stock = wrapped("Qwen3MoeExperts")
    x, index, weight, _ = given(stock)
    y = fused(x, index, weight)
    with pytest.raises(RuntimeError, match="a second derivative is not implemented"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


def reason(module, arguments, **keywords):
    with recorder.recording(silently=True) as calls:
        y = module(*arguments, **keywords)
    (text, *_) = calls[module]
    return y, text and text.removeprefix("PEFT's forward runs: ")


def test_calls_that_run_pefts_forward():
    def merged(module):
        for each in wrappers(module):
            each.merge()

    def disabled(module):
        for each in wrappers(module):
            each.enable_adapters(False)

    def inactive(module):
        for each in wrappers(module):
            each.set_adapter([])

    def hooked(module):
        module.get_base_layer().register_forward_hook(lambda *args: None)

    def inner_hooked(module):
        module.base_layer.register_forward_hook(lambda *args: None)

    def replaced(module):
        experts = module.get_base_layer()
        experts.forward = experts.forward

    def parametrised(module):
        experts = module.get_base_layer()
        parametrize.register_parametrization(experts, "down_proj", nn.Identity())

    def eager_experts(module):
        module.get_base_layer().config._experts_implementation_internal = "eager"

    def gate(module):
        experts = module.get_base_layer()
        experts._apply_gate = experts._apply_gate

    def mixed(module):
        module.lora_A.float()

    for change, why in (
        (merged, "its adapters are disabled or merged"),
        (disabled, "its adapters are disabled or merged"),
        (inactive, "it has no active adapter"),
        (hooked, "a module inside has hooks"),
        (inner_hooked, "a module inside has hooks"),
        (replaced, "its forward was replaced on the instance"),
        (parametrised, "the weights of its experts are parametrised"),
        (eager_experts, "its experts are not fused"),
        (gate, "its gate was replaced on the instance"),
        (mixed, "the adapter adapter 0 has no plain tensors of one dtype"),
    ):
        fused, stock = wrapped("Qwen3MoeExperts")
        x, index, weight, _ = arguments = given(stock)
        for each in (fused, stock):
            change(each)
        y, text = reason(fused, arguments[:3])
        assert text == why, change.__name__
        assert_close(y, stock(x, index, weight), rtol=1e-10, atol=1e-10)
    fused, stock = wrapped("Qwen3MoeExperts")
    x, index, weight, _ = given(stock)
    _, text = reason(fused, (x, index), top_k_weights=weight)
    assert text == "it was called with other arguments than its experts have"
    with nn.modules.module.register_module_forward_hook(lambda *args: None):
        _, text = reason(fused, (x, index, weight))
    assert text == "there are hooks on all modules"

    values = {key: p.detach() for key, p in trained(fused).items()}
    in_place = pytest.raises(RuntimeError, match="in-place operation")  # PEFT's of the weight
    with recorder.recording(silently=True) as calls, in_place:
        grad(lambda values: functional_call(fused, values, (x, index, weight)).sum())(values)
    assert calls[fused] == ["PEFT's forward runs: torch.func transforms the call"]


def test_an_adapter_of_a_bias_runs_pefts_forward():
    fused, stock = wrapped("GptOssExperts", weights=["gate_up_proj_bias", "down_proj"])
    arguments = given(stock)
    with recorder.recording(silently=True) as calls:
        got = run(fused, *arguments)
    assert "gate_up_proj_bias is no weight of several experts" in calls[fused][0]
    assert_close(got, eager(stock, *arguments), rtol=1e-10, atol=1e-10)


def test_peft_without_factors(monkeypatch):
    fused, _ = wrapped("Qwen3MoeExperts")
    assert fused.refusal(fused, None) is None
    monkeypatch.delattr(layer.ParamWrapper, "get_delta_factors")
    text = fused.refusal(fused, None)
    assert text == "this version of peft does not give the factors of an adapter"


def test_adapters_change_after_fuse():
    fused, stock = wrapped("Qwen3MoeExperts", adapters=2)
    arguments = given(stock)

    def same(why=None):
        y, text = reason(fused, arguments[:3])
        assert text == why
        assert_close(y, stock(*arguments[:3]), rtol=1e-10, atol=1e-10)
        return y.detach()

    def each_wrapper(change):
        for each in wrappers(fused) + wrappers(stock):
            change(each)

    both = same()
    each_wrapper(lambda w: w.set_adapter("adapter 1"))
    one = same()
    each_wrapper(lambda w: w.merge())
    assert_close(same("its adapters are disabled or merged"), one)
    each_wrapper(lambda w: w.unmerge())
    same()
    each_wrapper(lambda w: w.enable_adapters(False))
    bare = same("its adapters are disabled or merged")
    each_wrapper(lambda w: w.enable_adapters(True))
    each_wrapper(lambda w: w.set_adapter(["adapter 0", "adapter 1"]))
    assert_close(same(), both)
    assert (both - one).abs().max() > 0.1 < (one - bare).abs().max()
    fused.merge()  # the outer wrapper alone: the inner one runs the factors
    stock.merge()
    same("its adapters are disabled or merged")
    assert reason(fused.base_layer, arguments[:3])[1] is None


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("order", ["LoRA first", "fused first", "by name"])
def test_models_train_as_with_peft(kind, order, never_whole):
    model = mixture(kind)
    stock = with_lora(copy.deepcopy(model))
    if order == "fused first":
        fuse(model, only="experts", check=False)
    elif order == "by name":
        model.config._experts_implementation = "torchweld"
    model = with_lora(model)
    report = fuse(model, only=["experts", "lora"])
    places = {path: op for path, op in report.ops.items() if "lora_A" in op}
    assert {op for op in places.values()} == {
        "grouped_linear (gate_up_proj + lora_A -> lora_B)",
        "grouped_linear (down_proj + lora_A -> lora_B)",
    }
    assert len(places) == 4 and set(places) <= set(report.replaced)
    assert report.calls == {"torchweld::grouped_linear": 4} and report.max_abs_diff < 1e-4
    loaded, copied = saved_and_loaded(model), copy.deepcopy(model)
    for each in (model, stock):
        each.enable_input_require_grads()
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable()
        same_step(model, stock, labelled("cpu"))
    want = step(model, labelled("cpu"))
    never_whole()
    for each in (model, copied, loaded):
        with Calls() as calls:
            got = step(each, labelled("cpu"))
        assert calls.names["torchweld::experts_forward"] == 0
        assert_close(got, want, rtol=0, atol=0)
        restored = unfuse(each)
        assert set(places) <= set(restored) and not unfuse(each)
        assert {type(m) for m in each.modules()} == {type(m) for m in stock.modules()}


def test_adapters_are_saved_and_merged(tmp_path):
    model = with_lora(mixture("mixtral"))
    report = fuse(model, only=["experts", "lora"], check=False)
    assert sum("lora_A" in op for op in report.ops.values()) == 4
    merged = check_saved_and_merged(model, mixture("mixtral"), labelled("cpu"), tmp_path)
    assert not [m for m in merged.modules() if isinstance(m, layer.ParamWrapper)]


def test_the_report_lists_what_keeps_pefts_forward():
    config = peft.LoraConfig(
        r=2,
        target_modules=[],
        target_parameters=["mlp.gate.weight", "mlp.experts.gate_up_proj"],
        init_lora_weights=False,
    )
    model = peft.get_peft_model(mixture("qwen3_moe"), config)
    report = fuse(model, only=["experts", "lora"], check=False)
    layers = [f"base_model.model.model.layers.{i}.mlp" for i in range(2)]
    assert dict(report.skipped) == {
        f"{path}.gate": "Qwen3MoeTopKRouter is none of the experts that fuse knows"
        for path in layers
    }
    model = with_lora(mixture("qwen3_moe"))
    report = fuse(model, only="lora")
    assert not report.replaced
    reasons = {why for _, why in report.skipped}
    assert reasons == {
        "PEFT's forward runs: its experts are not fused",
        "PEFT's forward runs: the weights of its experts are parametrised",
    }
    model = with_lora(mixture("qwen3_moe"))
    model.merge_adapter()
    report = fuse(model, only=["experts", "lora"])
    reasons = {why for _, why in report.skipped}
    assert reasons == {"PEFT's forward runs: its adapters are disabled or merged"}
    assert report.calls["torchweld::experts"] == 2
    model.unmerge_adapter()
    with Calls() as calls:
        step(model, labelled("cpu"))
    assert calls.names["torchweld::experts_forward"] == 0
    model = with_lora(mixture("qwen3_moe"))
    model.config._experts_implementation_internal = "sonicmoe"
    report = fuse(model, only=["experts", "lora"], check=False)
    assert len(report.skipped) == 6 and not report.replaced
    assert all('experts_implementation="sonicmoe" was chosen' in why for _, why in report.skipped)
