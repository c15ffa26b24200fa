"""Experts of transformers' mixtures on torchweld's op: by name, under fuse, and what stays stock.

The oracle is transformers' own eager loop over the experts.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad
from torch.testing import assert_close

transformers = pytest.importorskip("transformers")

from test_fuse_families import assert_same_step, labelled, step  # noqa: E402
from test_hf_attention import Calls  # noqa: E402
from tiny_models import (  # noqa: E402
    SMALL,
    assert_same_tokens,
    batch,
    fuse_keeping_stock,
    saved_and_loaded,
    tiny_config,
    tiny_model,
)
from torchweld.integrations import fuse, recorder, register_experts, unfuse  # noqa: E402

layers = pytest.importorskip("torchweld.integrations.fusion.layers.experts")

register_experts()
MODELS = Path(transformers.__file__).parent / "models"
EXPERTS, TOKENS, PER_TOKEN = 4, 12, 2
CLASSES = [
    (path, name)
    for path in sorted(MODELS.glob("*/modeling_*.py"))
    for name in re.findall(r"^@use_experts_impl.*\nclass (\w+)", path.read_text("utf8"), re.M)
]
REFUSED = {
    "Inkling2Experts": "no fused form of the activation Inkling2SoftcappedSwiGLU",
    "Inkling2LoopExperts": "no fused form of the activation Inkling2LoopSoftcappedSwiGLU",
}
NORMED = ("MuseSparkExperts",)  # a norm follows each expert
# Their eager forward computes in float32.
IN_FLOAT32 = ("BeamExperts", "MuseSparkExperts", "OpenAIPrivacyFilterExperts")
GROUPED, EAGER = "transformers' grouped_mm runs: ", "the model's eager loop runs: "


def configs_of(path):
    """Tiny configs of the classes beside a modeling file."""
    name = (
        f"transformers.models.{path.parent.name}.{path.stem.replace('modeling', 'configuration')}"
    )
    for cls in vars(importlib.import_module(name)).values():
        if inspect.isclass(cls) and cls.__module__ == name and hasattr(cls, "model_type"):
            try:
                yield tiny_config(cls)
            except Exception:  # the class validates the sizes against its defaults
                config = cls()
                for key in SMALL.keys() & vars(config).keys():
                    setattr(config, key, SMALL[key])
                yield config


def experts_of(path, name):
    """Experts of a class with random weights in float64."""
    cls = getattr(
        importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}"), name
    )
    # Ernie-VL's config has one size for text and one for images.
    size = (
        {"intermediate_size": 16}
        if "intermediate_size" in inspect.signature(cls).parameters
        else {}
    )
    for config in configs_of(path):
        config._experts_implementation_internal = "torchweld"
        try:
            module = cls(config, **size)
        except Exception:  # a config of another part of the model
            continue
        torch.manual_seed(0)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.4)
        return module.double()
    raise AssertionError(f"no config of {path.parent.name} fits {name}")


def made(name="Qwen3MoeExperts"):
    return experts_of(*next(each for each in CLASSES if each[1] == name))


def width(module):
    return module.down_proj.shape[-1 if module.is_transposed else -2]


def routing(kind, generator):
    """``(index, weight)`` of tokens to experts; an id of EXPERTS or more is a sentinel."""
    index = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(-1)[:, :PER_TOKEN]
    if kind == "skewed":
        index = torch.tensor([1, 3]).expand(TOKENS, -1).clone()
        index[0] = torch.tensor([0, 1])
    elif kind == "sentinels":
        index[::3, 1] = EXPERTS
        index[5] = EXPERTS + 3
    return index, torch.rand(index.shape, generator=generator, dtype=torch.float64)


def run(module, x, index, weight, dy):
    """Result, and gradients of x, the router's weights and the parameters."""
    y = module(x, index, weight)
    leaves = [x, weight, *module.parameters()]
    return [y, *torch.autograd.grad(y, leaves, dy)]


def eager(module, x, index, weight, dy):
    """`run` of transformers' loop, which knows no sentinels but an expert that counts nothing."""
    stock = copy.deepcopy(module)
    stock.config._experts_implementation_internal = "eager"
    off = index >= EXPERTS
    y = stock(x, index.masked_fill(off, 0), weight.masked_fill(off, 0))
    leaves = [x, weight, *stock.parameters()]
    return [y, *torch.autograd.grad(y, leaves, dy)]


def inputs(module, kind="random"):
    generator = torch.Generator().manual_seed(1)
    index, weight = routing(kind, generator)
    x = torch.randn(TOKENS, width(module), generator=generator, dtype=torch.float64)
    # Some rows reach the limits of a gate.
    x *= torch.logspace(-1, 1, TOKENS, dtype=torch.float64)[:, None]
    dy = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    dtype = module.down_proj.dtype
    return x.to(dtype).requires_grad_(), index, weight.to(dtype).requires_grad_(), dy.to(dtype)


def reasons(module, given):
    """The recorded reasons of one call."""
    with recorder.recording(silently=True) as calls:
        y = module(*given[:3])
    return y, calls[module]


@pytest.mark.parametrize(("path", "name"), CLASSES, ids=[name for _, name in CLASSES])
def test_every_class_equals_its_eager_forward(path, name):
    module = experts_of(path, name)
    module = module.float() if name in (*IN_FLOAT32, *REFUSED) else module
    for kind in ("random", "skewed", "sentinels"):
        if kind == "sentinels" and name in REFUSED:
            continue
        given = inputs(module, kind)
        ran = reasons(module, given)[1]
        assert ran == [GROUPED + REFUSED[name] if name in REFUSED else None]
        with Calls() as calls:
            got = run(module, *given)
        assert calls.names["torchweld::experts_forward"] == (name not in (*REFUSED, *NORMED))
        assert calls.names["torchweld::grouped_linear_forward"] == 2 * (name in NORMED)
        for ours, want in zip(got, eager(module, *given), strict=True):
            # Sums of at most 64 products, added in another order.
            rounding = 64 * torch.finfo(want.dtype).eps * want.abs().max().item()
            assert_close(ours, want, rtol=0, atol=rounding)


def test_a_norm_behind_each_expert():
    """The report, and what torch.func and a hook of the norm change."""
    if "MuseSparkExperts" not in [name for _, name in CLASSES]:
        pytest.skip("this transformers lacks Muse Spark")
    model = tiny_model("muse_spark_text", "MuseSparkTextModel", "eager", moe_hidden_size=32)
    report = fuse(model, only="experts", check=False)
    label = "grouped_linear (gate_up_proj -> swiglu -> down_proj -> post_expert_norm)"
    assert report.ops == dict.fromkeys(paths_of(model), label)
    module = model.layers[0].mlp.experts
    given = [t.detach() for t in inputs(module)][:3]
    y, ran = reasons(module, given)
    assert ran == [None]
    assert_close(y, eager(module, *inputs(module))[0])
    with recorder.recording(silently=True) as calls:
        gradient = grad(lambda x: module(x, *given[1:]).square().sum())(given[0])
    assert gradient.abs().sum() > 0
    assert calls[module][0].startswith("the stock forward runs: torch.func transforms the call")
    module.post_expert_norm.register_forward_hook(lambda *args: None)
    assert reasons(module, given)[1] == ["the stock forward runs: a module inside has hooks"]


def test_ids_of_32_bits():
    module = made()
    x, index, weight, dy = inputs(module)
    for ours, want in zip(
        run(module, x, index.int(), weight, dy), run(module, x, index, weight, dy), strict=True
    ):
        assert torch.equal(ours, want)


def test_a_sentinel_gets_no_gradient():
    module = made()
    x, index, weight, dy = inputs(module, "sentinels")
    _, dx, dweight, *_ = run(module, x, index, weight, dy)
    off = index >= EXPERTS
    assert off.any() and (dweight[off] == 0).all() and (dweight[~off] != 0).all()
    assert (dx[off.all(-1)] == 0).all()


@pytest.mark.parametrize("name", ["Qwen3MoeExperts", "GptOssExperts", "NemotronHExperts"])
def test_bfloat16_is_no_worse_than_eager(name):
    exact = made(name).to(torch.bfloat16).double()
    module = copy.deepcopy(exact).to(torch.bfloat16)
    x, index, weight, _ = (t.detach() for t in inputs(module))
    want = eager(exact, x.double().requires_grad_(), index, weight.double().requires_grad_(), 0 * x)
    stock = copy.deepcopy(module)
    stock.config._experts_implementation_internal = "eager"
    for router in (weight, weight.float()):
        error, stock_error = (
            (each(x, index, router).double() - want[0]).square().mean().sqrt()
            for each in (module, stock)
        )
        assert error <= 1.5 * stock_error


def test_autocast_casts_float32_weights():
    module = made().float()
    x, index, weight, _ = (t.detach() for t in inputs(module))
    with torch.autocast("cpu", torch.bfloat16):
        y, ran = reasons(module, (x, index, weight))
        half, ran_half = reasons(module, (x.bfloat16(), index, weight))
    assert ran == ran_half == [None]
    assert y.dtype == torch.bfloat16 and torch.equal(y, half)


class Own(nn.Module):
    """Experts of another library under transformers' decorator."""

    def __init__(self, config):
        super().__init__()
        self.num_experts, self.act_fn, self.bound = EXPERTS, nn.SiLU(), 2.0
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 32, 8, dtype=torch.float64))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, 8, 16, dtype=torch.float64))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        y = torch.zeros_like(hidden_states)
        for e in range(EXPERTS):
            weight = torch.where(top_k_index == e, top_k_weights, 0).sum(-1, keepdim=True)
            z = self._apply_gate(hidden_states @ self.gate_up_proj[e].T)
            y = y + weight * (z @ self.down_proj[e].T)
        return y


def own(apply_gate=None, base=Own):
    """Experts with an ``_apply_gate`` of their own."""
    from transformers.integrations.moe import use_experts_implementation

    members = {} if apply_gate is None else {"_apply_gate": apply_gate}
    cls = use_experts_implementation(type("Own", (base,), members))
    config = tiny_config(transformers.Qwen3MoeConfig)
    config._experts_implementation_internal = "torchweld"
    return cls(config)


def swapped(self, z):
    gate, up = z.chunk(2, -1)
    return self.act_fn(up) * gate


def clamped(self, z):
    gate, up = z.chunk(2, -1)
    return self.act_fn(gate.clamp(max=900)) * up


def clamped_late(self, z):
    gate, up = z.chunk(2, -1)
    return self.act_fn(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


def reads_more(self, z):
    gate, up = z.chunk(2, -1)
    return self.act_fn(gate).clamp(max=self.bound) * up


def raises(self, z):
    raise TypeError


def test_a_gate_of_another_class_is_recognised():
    module = own(lambda self, z: F.gelu(z[..., ::2]) * z[..., 1::2])
    given = inputs(module)
    assert layers.gate_of(module) == layers.Gate("geglu", interleaved=True)
    got, (ran,) = reasons(module, given)
    assert ran is None
    assert_close(got, eager(module, *given)[0])


@pytest.mark.parametrize(
    ("gate", "reason"),
    [
        (swapped, "swapped is none of the op's gates"),
        (clamped, "clamped is none of the op's gates"),
        (clamped_late, "clamped_late is none of the op's gates"),
        (reads_more, "its gate reads bound"),
        (raises, r"its gate can't be compared \(TypeError\)"),
    ],
)
def test_other_gates_run_grouped_mm(gate, reason):
    module = own(gate)
    module.limit = 1.5
    if gate is raises:
        assert re.fullmatch(reason, layers.gate_of(module))
        return
    module = module.float()
    given = inputs(module)
    with pytest.warns(UserWarning, match=reason):
        got = run(module, *given)
    assert_close(got, eager(module, *given))


def test_a_limit_counts_from_the_next_call():
    module = made("GptOssExperts")
    for limit in (7.0, 0.5, 3):
        module.limit = limit
        given = inputs(module)
        got, (ran,) = reasons(module, given)
        assert ran is None
        assert_close(got, eager(module, *given)[0])


def hook(module):
    module.act_fn.register_forward_hook(lambda *args: None)


def other_activation(module):
    module.act_fn = nn.Mish()


def replaced_gate(module):
    module._apply_gate = lambda z: z.chunk(2, -1)[0]


def mixed(module):
    module.down_proj.data = module.down_proj.data.bfloat16()


class Tagged(torch.Tensor):
    pass


def subclass(module):
    weight = module.down_proj.data.as_subclass(Tagged)
    del module.down_proj
    module.down_proj = weight


CHANGES = {
    hook: "a module inside has hooks",
    other_activation: "no fused form of the activation Mish",
    replaced_gate: "its gate was replaced on the instance",
    mixed: "mixed dtypes: ",
    subclass: "down_proj is Tagged",
}


@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__ for change in CHANGES])
def test_what_the_op_cannot_do_is_stock_with_the_reason(change):
    module = made().float()
    change(module)
    given = [t.detach() for t in inputs(module)][:3]
    got, (ran,) = reasons(module, given)
    assert ran.startswith(GROUPED + CHANGES[change])
    module.config._experts_implementation_internal = "grouped_mm"
    assert torch.equal(got, module(*given))


def test_grouped_mm_lacks_float64():
    module = own(swapped)
    given = inputs(module)
    got, (ran,) = reasons(module, given)
    assert ran == EAGER + "swapped is none of the op's gates"
    assert torch.equal(got, eager(module, *given)[0])
    x, index, weight, _ = inputs(made())
    module = made()
    _, (ran,) = reasons(module, (x, index, weight.float()))
    assert ran.startswith(EAGER + "the router's weights are no plain tensor of")


def test_other_arguments_are_stock_with_the_reason():
    module = made().bfloat16()
    x, index, weight, _ = (t.detach() for t in inputs(module))
    for given, reason in (
        ((x.float(), index, weight), "mixed dtypes: hidden_states float32, gate_up_proj bfloat16"),
        ((x, index.short(), weight), "the ids of the experts are no plain int64 or int32 tensor"),
        ((x, index, weight.double()), "the router's weights are no plain tensor of"),
        ((x, index, weight[:, None]), r"its arguments are not \(T, H\), \(T, k\)"),
    ):
        _, (ran,) = reasons(module, given)
        assert re.match(GROUPED + reason, ran)
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        assert "hooks on all modules" in reasons(module, (x, index, weight))[1][0]
    finally:
        handle.remove()


MIXTURES = {
    "deepseek_v3": ("DeepseekV3ForCausalLM", {"first_k_dense_replace": 1}),
    "dots1": ("Dots1ForCausalLM", {}),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", {}),
    "gemma4_text": ("Gemma4ForCausalLM", {"enable_moe_block": True, "top_k_experts": 2}),
    "glm4_moe": ("Glm4MoeForCausalLM", {}),
    "gpt_oss": ("GptOssForCausalLM", {}),
    "granitemoe": ("GraniteMoeForCausalLM", {}),
    "hunyuan_v1_moe": ("HunYuanMoEV1ForCausalLM", {}),
    "lfm2_moe": ("Lfm2MoeForCausalLM", {}),
    "minimax_m2": ("MiniMaxM2ForCausalLM", {}),
    "mixtral": ("MixtralForCausalLM", {}),
    "nemotron_h": ("NemotronHForCausalLM", {}),
    "olmoe": ("OlmoeForCausalLM", {}),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", {}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {}),
}


def mixture(kind, **more):
    """A tiny mixture with random weights, its attention and its experts eager."""
    torch.manual_seed(0)
    name, changes = MIXTURES[kind]
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers lacks {name}")
    return tiny_model(kind, name, "eager", initializer_range=0.2, **changes, **more)


def has_router_loss(kind):
    """Some releases of granitemoe raise where their router's loss is asked for."""
    try:
        mixture(kind)(**labelled("cpu"), output_router_logits=True)
    except AttributeError:
        return False
    return True


def paths_of(model):
    return [path for path, module in model.named_modules() if layers.is_experts(module)]


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_fused_mixture_trains_and_generates_as_stock(kind):
    model = mixture(kind)
    stock = copy.deepcopy(model)
    paths = paths_of(model)
    if not paths:
        pytest.skip("this transformers gives the experts another class")
    report = fuse(model)
    ops = {path for path, op in report.ops.items() if op.startswith("experts (")}
    assert ops == set(paths) <= set(report.replaced)
    assert report.max_abs_diff < 1e-4
    assert report.calls["torchweld::experts"] == len(paths)
    inputs = labelled("cpu")
    if hasattr(model.config, "output_router_logits") and has_router_loss(kind):
        inputs["output_router_logits"] = True
    with Calls() as calls:
        assert_same_step(model.train(), stock.train(), inputs)
    assert calls.names["torchweld::experts_forward"] == len(paths)
    prompts = {key: value for key, value in batch("cpu").items() if key != "position_ids"}
    assert_same_tokens(model, stock, **prompts)


@pytest.mark.parametrize("kind", ["gpt_oss", "mixtral"])
def test_unfuse_copies_and_files(kind, tmp_path):
    model = mixture(kind)
    stock, paths = copy.deepcopy(model), paths_of(model)
    report = fuse(model, only="experts")
    assert report.replaced == paths
    loaded = saved_and_loaded(model)
    model.save_pretrained(tmp_path)
    saved = type(stock).from_pretrained(tmp_path, attn_implementation="eager")
    saved.config._experts_implementation = "torchweld"
    inputs = labelled("cpu")
    want = step(model.train(), inputs)[0]
    assert torch.equal(step(saved.train(), inputs)[0], want)
    again = fuse(model, only="experts")
    assert not again and {why for _, why in again.skipped} == {"fused already"}
    for each in (model, copy.deepcopy(model), loaded):
        assert torch.equal(step(each.train(), inputs)[0], want)
        assert unfuse(each) == paths and unfuse(each) == []
        assert {type(m) for m in each.modules()} == {type(m) for m in stock.modules()}
        assert torch.equal(step(each, inputs)[0], step(stock.train(), inputs)[0])


def test_the_name_for_a_whole_model():
    model = mixture("qwen3_moe")
    stock = copy.deepcopy(model)
    try:
        model.set_experts_implementation("torchweld")
    except ValueError as error:
        pytest.skip(f"this transformers knows no registered names: {error}")
    with Calls() as calls:
        got = step(model.train(), labelled("cpu"))[0]
    assert calls.names["torchweld::experts_forward"] == len(paths_of(model))
    assert_close(got, step(stock.train(), labelled("cpu"))[0])
    assert_same_step(model, stock, labelled("cpu"))
    report = fuse(model, only="experts")
    assert not report and {why for _, why in report.skipped} == {"fused already"}


@pytest.mark.parametrize("kind", ["gpt_oss", "granitemoe", "mixtral", "qwen3_moe"])
def test_the_fused_loss_of_a_mixture_has_the_loss_of_its_router(kind):
    model = mixture(kind, output_router_logits=True).train()
    if not paths_of(model):
        pytest.skip("this transformers gives the experts another class")
    if not has_router_loss(kind):
        pytest.skip("this transformers cannot give the router's loss")
    stock = copy.deepcopy(model)
    # NOTE: once a model has run, transformers' hooks for router_logits can't be pickled.
    report = fuse(model, loss=True, check=False)
    assert report.ops["lm_head"].startswith("linear_cross_entropy (lm_head -> loss)"), report
    padded = labelled("cpu")
    whole = {"input_ids": padded["input_ids"], "labels": padded["input_ids"]}
    for each in (model, saved_and_loaded(model)):
        for given in (padded, whole, {**padded, "num_items_in_batch": 7}):
            for router in (None, False):
                with Calls() as calls:
                    out = each(**given, output_router_logits=router)
                assert any("linear_cross_entropy" in name for name in calls.names)
                want = stock(**given, output_router_logits=router)
                assert out.logits is None and type(out) is type(want)
                assert (out.aux_loss is None) == (out.router_logits is None) == (router is False)
                assert_close(out.loss, want.loss, rtol=1e-5, atol=1e-5)
                if router is None:
                    assert_close(out.aux_loss, want.aux_loss)
                if router is None and given is whole:  # padding attends to arbitrary keys
                    assert_close(out.router_logits, want.router_logits, rtol=1e-4, atol=1e-5)
        assert_same_step(each, stock, padded)


def test_a_mixture_with_its_loss_compiles_in_one_graph():
    model = mixture("mixtral", output_router_logits=True).train()
    fuse(model, loss=True)
    inputs = labelled("cpu")
    want = model(**inputs)
    out = torch.compile(model, backend="aot_eager", fullgraph=True)(**inputs)
    assert out.logits is None
    assert_close((out.loss, out.aux_loss), (want.loss, want.aux_loss), rtol=1e-5, atol=1e-5)


def test_a_router_loss_of_another_model():
    model = mixture("mixtral", output_router_logits=True).train()
    stock = type(model)

    def forward(self, *args, **kwargs):
        out = stock.forward(self, *args, **kwargs)
        out.loss = out.loss if out.aux_loss is None else out.loss + out.aux_loss
        return out

    forward.__signature__ = inspect.signature(stock.forward)
    names = {"forward": forward, "__module__": stock.__module__}
    model.__class__ = type("OtherForCausalLM", (stock,), names)
    theirs, report = fuse_keeping_stock(model, loss=True, check=False)
    assert "lm_head" in report.replaced
    inputs = labelled("cpu")
    out, want = model(**inputs), theirs(**inputs)
    assert (
        out.logits is None and out.loss > 1.01 * theirs(**inputs, output_router_logits=False).loss
    )
    assert_close(out.loss, want.loss, rtol=1e-5, atol=1e-5)
    assert_same_step(model, theirs, inputs)


def with_lora(model, adapters=1):
    """PEFT's adapters of the experts' weights, all active; the other weights are frozen."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2,
        target_modules=[],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,
    )
    torch.manual_seed(1)
    model = peft.get_peft_model(model, config)
    for i in range(1, adapters):
        model.add_adapter(f"adapter {i}", config)
    model.base_model.set_adapter(list(model.peft_config))
    return model


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("adapters", [1, 2])
@pytest.mark.parametrize("order", ["fused first", "LoRA first", "by name"])
def test_lora_on_the_weights_of_experts(kind, adapters, order):
    model = mixture(kind)
    stock = with_lora(copy.deepcopy(model), adapters)
    if order == "fused first":
        fuse(model, only="experts")
    model = with_lora(model, adapters)
    if order == "LoRA first":
        assert fuse(model, only="experts").max_abs_diff < 1e-4
    elif order == "by name":
        model.config._experts_implementation = "torchweld"
    inputs = labelled("cpu")
    with Calls() as calls:
        loss, grads = step(model.train(), inputs)
    assert calls.names["torchweld::experts_forward"] == 2
    want, want_grads = step(stock.train(), inputs)
    assert_close(loss, want, rtol=1e-5, atol=1e-5)
    trained = [key for key, grad in grads.items() if grad is not None]
    assert len(trained) == 8 * adapters and all(want_grads[key].any() for key in trained)
    for key in trained:
        assert_close(grads[key], want_grads[key], rtol=1e-4, atol=2e-5)
    before = want
    for change in ("merge_adapter", "unmerge_adapter", "disable_adapter_layers"):
        for each in (model, stock):
            getattr(each.base_model, change)()
        with torch.no_grad():
            loss, want = (each(**inputs).loss for each in (model, stock))
        assert_close(loss, want, rtol=1e-5, atol=1e-5)
    assert (want - before).abs() > 1e-3  # without adapters
    assert len(unfuse(model)) == (0 if order == "by name" else 2)


def other_forward(cls):
    """Adds to the stock forward what an implementation of the experts would not do."""
    stock = cls.forward

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return stock(self, hidden_states, top_k_index, top_k_weights) + hidden_states

    forward.__wrapped__ = stock.__wrapped__
    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def test_what_fuse_leaves_stock_is_listed():
    def residual(model, module):
        module.__class__ = other_forward(type(module))

    def hooks(model, module):
        hook(module)

    def chosen(model, module):
        model.config._experts_implementation_internal = "sonicmoe"

    def wrapped(model, module):
        module.forward = module.forward

    def half(model, module):
        module.down_proj.data = module.down_proj.data.bfloat16()

    for change, reason in (
        (residual, "has the parts of a mixture's experts and computes something else"),
        (hooks, "a module inside has hooks"),
        (chosen, 'experts_implementation="sonicmoe" was chosen; call model.set_experts_impl'),
        (wrapped, "its forward was replaced on the instance"),
        (half, "mixed dtypes: gate_up_proj float32, down_proj bfloat16"),
    ):
        model = mixture("mixtral")
        path = paths_of(model)[0]
        change(model, model.get_submodule(path))
        skipped = dict(fuse(model, only="experts", check=False).skipped)
        assert reason in skipped[path], change.__name__
        assert (len(skipped) == 1) == (change is not chosen)


def test_experts_without_the_decorator_are_listed():
    model = tiny_model("dbrx", "DbrxForCausalLM", "sdpa")
    names = [path for path, module in model.named_modules() if path.endswith(".experts")]
    reason = "DbrxExperts is none of the experts that fuse knows"
    assert fuse(model, only="experts").skipped == [(name, reason) for name in names]
    assert len(names) == 2


def test_a_hook_after_fuse_runs_stock():
    model = mixture("mixtral")
    stock, _ = fuse_keeping_stock(model, only="experts")
    module = model.get_submodule(paths_of(model)[0])
    seen = []
    module.act_fn.register_forward_hook(lambda m, args, out: seen.append(out))
    with pytest.warns(UserWarning, match="hooks; such calls use the stock forward"):
        got = step(model.train(), labelled("cpu"))[0]
    assert seen
    assert_close(got, step(stock.train(), labelled("cpu"))[0])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["gpt_oss", "lfm2_moe", "nemotron_h", "qwen3_moe"])
def test_compiled_experts_are_one_op(kind, fused):
    model = mixture(kind)
    if fused:
        fuse(model, only="experts", check=False)
    else:
        model.config._experts_implementation = "torchweld"
    module = model.get_submodule(paths_of(model)[0])
    graphs = []

    def keep(graph, example_inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    compiled = torch.compile(module, fullgraph=True, backend=keep)
    for limit in (7.0, 0.5, 1.0) if kind == "gpt_oss" else (None,):
        if limit is not None:
            module.limit = limit
        given = inputs(module)[:3]
        assert_close(compiled(*given), module(*given))
    for graph in graphs:
        ops = [each for each in graph if each.startswith("torchweld")]
        assert ops == ["torchweld.experts"]
        assert not any("mm" in each for each in graph)
