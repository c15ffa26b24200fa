"""torchweld.fuse of models in no table: norms and MLPs are recognised, compared and listed."""

from __future__ import annotations

import copy
import importlib
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

transformers = pytest.importorskip("transformers")

from fused_parts import random_model  # noqa: E402
from test_fuse import Calls  # noqa: E402
from test_fuse_families import assert_same_logits  # noqa: E402
from tiny_models import (  # noqa: E402
    assert_same_tokens,
    causal_models,
    fuse_keeping_stock,
    saved_and_loaded,
    tiny_model,
    with_random_vectors,
)
from torchweld.integrations import fuse, unfuse  # noqa: E402
from torchweld.integrations.fusion.layers import decoder  # noqa: E402

VOCAB, WIDTH = 61, 32


class Norm(nn.Module):
    """An RMSNorm by other names."""

    def __init__(self, size=WIDTH):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size) / 4 + 0.7)
        self.epsilon = 1e-5

    def scale(self):
        return self.weight

    def forward(self, x, factor=1):
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.epsilon)
        return (self.scale() * factor * normed).to(x.dtype)


class OffsetNorm(Norm):
    def scale(self):
        return 1 + self.weight


class WeightlessNorm(Norm):
    def __init__(self):
        super().__init__()
        del self.weight

    def scale(self):
        return 1


class WeightlessTwiceNorm(WeightlessNorm):
    def scale(self):
        return 2


class DoubledNorm(Norm):
    def scale(self):
        return 2 * self.weight


class CentredNorm(Norm):
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


class CentredOffsetNorm(CentredNorm):
    def scale(self):
        return 1 + self.weight


class ShiftedNorm(CentredNorm):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return super().forward(x) + self.bias


class FixedEpsNorm(nn.Module):
    """Has no parameters, and eps in its forward."""

    def __init__(self):
        super().__init__()
        self.normalized_shape = (WIDTH,)

    def forward(self, x):
        return F.layer_norm(x.float(), self.normalized_shape, eps=1e-5).to(x.dtype)


class ClampedCentredNorm(CentredNorm):
    def forward(self, x):
        return super().forward(x).clamp(-1, 1)


class OuterEpsNorm(Norm):
    def forward(self, x):
        return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + self.epsilon)


class WideNorm(Norm):
    """Its result has another dtype than a bfloat16 x."""

    def forward(self, x):
        return super().forward(x.float())


class DetachedNorm(Norm):
    """Its gradient is not that of its result."""

    def forward(self, x):
        return super().forward(x.detach()) + 0 * x


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, 48), nn.Linear(WIDTH, 48)
        self.down_proj = nn.Linear(48, WIDTH, bias=False)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, x):
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class ClampedMLP(MLP):
    def forward(self, x):
        gate = self.gate_proj(x).clamp(max=7)
        return self.down_proj(self.act(gate) * self.up_proj(x))


class DroppingMLP(MLP):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, self.training)


class SwappedMLP(MLP):
    def forward(self, x):
        return self.down_proj(self.gate_proj(x) * self.act(self.up_proj(x)))


class PackedMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(WIDTH, 96), nn.Linear(48, WIDTH)
        self.act = nn.GELU()

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(self.act(gate) * up)


class InterleavedMLP(PackedMLP):
    """Its packed columns are not two halves."""

    def forward(self, x):
        both = self.gate_up_proj(x)
        return self.down_proj(self.act(both[..., ::2]) * both[..., 1::2])


class CallingMLP(nn.Module):
    """Calls silu, as LFM2's does."""

    def __init__(self):
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, 48), nn.Linear(WIDTH, 48, bias=False)
        self.w2 = nn.Linear(48, WIDTH)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SwappedCallingMLP(CallingMLP):
    def forward(self, x):
        return self.w2(self.w1(x) * F.silu(self.w3(x)))


class MadeUp(transformers.PreTrainedModel):
    """A model of one block that no table knows."""

    config_class = transformers.LlamaConfig

    def __init__(self, norm=Norm, mlp=MLP):
        super().__init__(transformers.LlamaConfig(vocab_size=VOCAB, hidden_size=WIDTH))
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.first, self.last, self.mlp = norm(), norm(), mlp()

    def forward(self, input_ids=None, **kwargs):
        x = self.embed(input_ids)
        x = x + self.mlp(self.first(x))
        return transformers.modeling_outputs.CausalLMOutput(logits=self.head(self.last(x=x)))


def made_up(device="cpu", dtype=torch.float32, **kinds):
    torch.manual_seed(0)
    return MadeUp(**kinds).to(device, dtype)


def step(model, first=0):
    ids = torch.arange(first, first + 24, device=model.device).view(2, 12)
    logits = model(input_ids=ids).logits
    model.zero_grad()
    F.cross_entropy(logits.float().flatten(0, 1), ids.flatten()).backward()
    return logits.detach(), [p.grad for p in model.parameters()]


def assert_same_step(model, stock, tolerance=1e-4):
    """Logits and gradients."""
    (logits, grads), (want, want_grads) = (step(each) for each in (model, stock))
    assert_close(logits, want, rtol=tolerance, atol=tolerance)
    assert_close(grads, want_grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("norm", "mlp", "op"),
    [
        (Norm, MLP, "rms_norm"),
        (OffsetNorm, MLP, "rms_norm"),
        (WeightlessNorm, MLP, "rms_norm"),
        (CentredNorm, MLP, "layer_norm"),
        (CentredOffsetNorm, MLP, "layer_norm"),
        (ShiftedNorm, MLP, "layer_norm"),
        (FixedEpsNorm, MLP, "layer_norm"),
        (Norm, PackedMLP, "rms_norm"),
        (Norm, CallingMLP, "rms_norm"),
    ],
)
def test_a_made_up_model_runs_the_ops_and_equals_stock(device, norm, mlp, op):
    model = made_up(device, norm=norm, mlp=mlp).train()
    model.last.forward = model.last.forward  # on the instance: stays stock
    stock, report = fuse_keeping_stock(model)
    assert {path: op.split(" ")[0] for path, op in report.ops.items()} == {
        "first": op,
        "mlp": "gated_mlp",
    }
    assert f"test_fuse_recognised.{norm.__name__}" in " ".join(report.notes)
    with Calls() as calls:
        assert_same_step(model, stock, 1e-5)
    assert calls.names[f"torchweld::{op}_forward"] == 1
    assert calls.names["torchweld::gated_mlp_backward"] == 1


@pytest.mark.parametrize("change", ["autocast", "float64", "one weight", "bfloat16 x"])
def test_a_layer_norm_of_another_class_runs_stock_where_the_op_may_differ(device, change):
    model = made_up(device, norm=ShiftedNorm)
    stock, _ = fuse_keeping_stock(model)
    x = torch.randn(2, 3, WIDTH, device=device)
    x = x.to({"float64": torch.float64, "bfloat16 x": torch.bfloat16}.get(change, x.dtype))
    autocast = torch.autocast(torch.device(device).type, torch.bfloat16, change == "autocast")
    for norm in (model.last, stock.last):
        if change == "one weight":
            norm.weight = nn.Parameter(norm.weight.detach()[:1])
        elif change == "float64":
            norm.double()
    with autocast, Calls() as calls:
        assert torch.equal(model.last(x), stock.last(x))
    assert not calls.names["torchweld::layer_norm"]


@pytest.mark.parametrize(
    "kind",
    [
        DoubledNorm,
        ClampedCentredNorm,
        OuterEpsNorm,
        DetachedNorm,
        WideNorm,
        WeightlessTwiceNorm,
    ],
)
def test_norms_that_compute_something_else_stay_stock(device, kind):
    model = made_up(device, torch.bfloat16, norm=kind)
    reasons = dict(fuse(model, check=False).skipped)
    has = f"test_fuse_recognised.{kind.__name__} has the parts of"
    assert reasons["first"].startswith(f"{has} an RMSNorm and c")
    assert type(model.first) is type(model.last) is kind


@pytest.mark.parametrize(
    "kind",
    [
        ClampedMLP,
        DroppingMLP,
        SwappedMLP,
        InterleavedMLP,
        SwappedCallingMLP,
    ],
)
def test_mlps_that_compute_something_else_stay_stock(device, kind):
    model = made_up(device, mlp=kind)
    reasons = dict(fuse(model, check=False).skipped)
    has = f"test_fuse_recognised.{kind.__name__} has the parts of"
    assert reasons["mlp"] == f"{has} a gated MLP and computes something else"
    assert type(model.mlp) is kind


def test_layers_of_an_mlp_that_calls_its_activation_are_called_for_lora(device):
    model = made_up(device, mlp=CallingMLP)
    model.mlp.w1 = nn.Sequential(model.mlp.w1, nn.Linear(48, 48, device=device))
    stock, report = fuse_keeping_stock(model)
    assert report.ops["mlp"].startswith("gated_activation (silu; ")
    with Calls() as calls:
        assert_same_step(model, stock, 1e-5)
    assert calls.names["torchweld::gated_activation_backward"] == 1


def test_an_attribute_of_one_module_counts():
    class Flagged(Norm):
        negated = False

        def scale(self):
            return -self.weight if self.negated else self.weight

    model = made_up(norm=Flagged)
    model.last.negated = True
    report = fuse(model, check=False)
    assert "first" in report.replaced and "last" in dict(report.skipped)


def test_a_norm_may_have_a_weight_or_none():
    """As Gemma 4's do, whose class has both."""

    class OptionalNorm(Norm):
        def scale(self):
            return self.weight if hasattr(self, "weight") else 1

    model = made_up(norm=OptionalNorm)
    del model.first.weight
    stock = copy.deepcopy(model)
    assert {"first", "last"} <= {*fuse(model, check=False).replaced}
    x = torch.randn(2, 3, WIDTH)
    for name in ("first", "last"):
        ours, theirs = (getattr(each, name)(x) for each in (model, stock))
        assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_other_calls_of_a_recognised_norm_are_stock_calls():
    model = made_up()
    fuse(model)
    x = torch.randn(2, 3, WIDTH)
    with Calls() as calls:
        assert_close(model.first(x=x), model.last.__class__.forward(model.first, x=x))
        doubled = model.first(x, factor=2)
    assert not calls.names["torchweld::rms_norm"]
    assert_close(doubled, 2 * model.first(x), rtol=1e-5, atol=1e-5)


def test_fuse_draws_no_random_numbers():
    model = made_up()
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    fuse(model, check=False)
    assert torch.equal(torch.rand(3), want)


def test_copies_pickles_and_unfuse():
    model = made_up()
    want = step(model)[0]
    replaced = fuse(model).replaced
    for each in (copy.deepcopy(model), saved_and_loaded(model), model):
        assert_close(step(each)[0], want, rtol=1e-5, atol=1e-5)
        assert sorted(unfuse(each)) == sorted(replaced)
        assert (type(each.first), type(each.mlp)) == (Norm, MLP)
        assert torch.equal(step(each)[0], want)


@pytest.mark.parametrize("name", ["Arcee", "Cohere"])
def test_models_of_transformers_that_no_table_has(device, name):
    model = tiny_of(name, device).train()
    stock, report = fuse_keeping_stock(model)
    kinds = {op.split(" ")[0] for op in report.ops.values()}
    block = {"attention", "rotary", "rms_norm", "add_rms_norm", "rms_norm_linears"}
    if device == "cuda":
        block.add("linear")  # with its activation, which gains nothing on a CPU
    parts = {"attention", "rotary", "gated_mlp", "layer_norm"}  # its norms subtract the mean
    assert kinds == (parts if name == "Cohere" else block)
    assert_same_step(model, stock)


# Attention and decoder layers


def tiny_of(name, device="cpu", dtype=torch.float32, **changes):
    if not hasattr(transformers, f"{name}ForCausalLM"):
        pytest.skip("not in this transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "pad_token_id": 0}
    counts = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(transformers, f"{name}Config")(**sizes, **counts, **changes)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    return with_random_vectors(model).to(device, dtype)


@pytest.mark.parametrize("name", ["Ministral", "Mixtral", "Glm"])
def test_decoder_layers_that_no_table_has(device, name):
    model = tiny_of(name, device, head_dim=8).train()
    stock, report = fuse_keeping_stock(model)
    assert report.max_abs_diff < 1e-4
    kinds = [op.split(" ")[0] for op in report.ops.values()]
    mlp = {"Glm": ["gated_linear"], "Ministral": ["gated_mlp"]}.get(name, [])
    for op in ("attention", "rotary", "add_rms_norm", "rms_norm_linears", *mlp):
        assert kinds.count(op) == 2, op
    with Calls() as calls:
        assert_same_step(model, stock)
    assert calls.names["torchweld::rotary"] == 2
    assert calls.names["torchweld::rms_norm_linears_forward"] == 2
    loaded = saved_and_loaded(model)
    assert_close(step(loaded)[0], step(model)[0], rtol=0, atol=0)
    unfuse(loaded)
    assert {type(m) for m in loaded.modules()} == {type(m) for m in stock.modules()}


@pytest.mark.parametrize(
    ("kind", "layers", "shared"),
    [("gemma3n_text", 2, 0), ("gemma4_text", 2, 0), ("gemma4_text", 4, 2)],
)
def test_query_and_key_are_rotated_one_by_one(kind, layers, shared):
    """The last layers of Gemma 4 may take the keys of others, and then project the query alone."""
    models = dict(causal_models())
    if kind not in models:
        pytest.skip("not in this transformers")
    torch.manual_seed(0)
    sizes = {"initializer_range": 0.2, "num_kv_shared_layers": shared}
    if layers > 2:
        types = ["sliding_attention", "full_attention"] * 2
        sizes |= {"num_hidden_layers": layers, "layer_types": types}
    model = tiny_model(kind, models[kind], "sdpa", **sizes).train()
    stock, report = fuse_keeping_stock(model)
    assert report.max_abs_diff < 1e-4
    assert [op for op in report.ops.values() if op == "rotary"] == ["rotary"] * layers
    if kind == "gemma4_text":
        for layer in range(layers):
            op = report.ops[f"model.layers.{layer}.input_layernorm"]
            names = "q_proj" if layer >= layers - shared else "q_proj, k_proj, v_proj"
            assert op == f"rms_norm_linears (input_layernorm -> {names})"
    # NOTE: token 0 has an embedding of zeros, at which Gemma 3n's gradient is NaN.
    with Calls() as calls:
        logits, grads = step(model, first=1)
    assert calls.names["torchweld::rotary"] == 2 * layers - shared
    exact = step(copy.deepcopy(stock).double(), first=1)[1]
    want, want_grads = step(stock, first=1)
    assert_close(logits, want, rtol=1e-4, atol=1e-4)
    # All parameters together: a vector of eight values may be lucky in the stock model.
    errors = []
    for grad, want_grad, exact_grad in zip(grads, want_grads, exact, strict=True):
        if want_grad is None:
            assert grad is None
        else:
            size = exact_grad.norm() + 1e-30
            errors.append([(g - exact_grad).norm() / size for g in (grad, want_grad)])
    error, allowed = torch.tensor(errors).square().mean(0).sqrt()
    assert error <= 2 * allowed + 1e-5
    assert_same_tokens(model, stock, torch.arange(2, 8)[None])


@pytest.mark.parametrize(
    ("shape", "dim"), [((2, 3, 5, 8), 1), ((2, 5, 3, 8), 2), ((2, 5, 8), -1), ((2, 5, 3, 8), -2)]
)
def test_a_rotary_function_of_one_tensor(shape, dim):
    gemma = pytest.importorskip("transformers.models.gemma4.modeling_gemma4")
    inner = inspect.unwrap(gemma.Gemma4TextAttention.forward)
    options = ("whole", False, False, False, "x cos sin unsqueeze_dim")
    row = decoder.Rotary("apply_rotary_pos_emb", *options)
    x, cos, sin = torch.randn(shape), torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    if len(shape) == 3:
        cos, sin = cos[..., 0], sin[..., 0]
    want = gemma.apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim=dim)
    with Calls() as calls:
        out = decoder.rotation(inner, row)(x, cos, sin, unsqueeze_dim=dim)
    assert calls.names["torchweld::rotary"] == (dim > 0)
    assert_close(out, want)


def test_a_rotary_function_with_tables_of_another_dtype_is_stock():
    llama = transformers.models.llama.modeling_llama
    inner = inspect.unwrap(llama.LlamaAttention.forward)
    row = decoder.Rotary("apply_rotary_pos_emb", "whole", False, False, False)
    heads = [torch.randn(2, n, 5, 8, dtype=torch.bfloat16) for n in (3, 1)]
    tables = [torch.randn(2, 5, 8) for _ in range(2)]
    found, want = (
        each(*heads, *tables) for each in (decoder.rotation(inner, row), llama.apply_rotary_pos_emb)
    )
    for x, y in zip(found, want, strict=True):
        assert x.dtype == torch.float32 and torch.equal(x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_a_rotary_function_of_rows_before_heads(batch, dtype):
    """As in vision towers, of a row of packed images or of a batch, with tables in float32."""
    qwen = transformers.models.qwen2_vl.modeling_qwen2_vl
    row = decoder.Rotary(
        *("apply_rotary_pos_emb_vision", "whole", False, False, False),
        rows_first=True,
        casts=True,
    )
    rotate = decoder.rotation(inspect.unwrap(qwen.VisionAttention.forward), row)
    tables = [torch.randn(*batch, 5, 8) for _ in range(2)]
    for rows in (5, 1):  # of another number of rows than the tables', the stock function runs
        heads = [torch.randn(*batch, rows, n, 8, dtype=dtype) for n in (3, 1)]
        want = qwen.apply_rotary_pos_emb_vision(*heads, *tables)
        with Calls() as calls:
            found = rotate(*heads, *tables)
        assert calls.names["torchweld::rotary"] == (rows == 5)
        assert_close(found, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["deepseek_v2", "llama4"])
def test_a_rotary_function_of_a_complex_table(kind, dtype):
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    forward = {"deepseek_v2": "DeepseekV2Attention", "llama4": "Llama4TextAttention"}[kind]
    inner, rows_first = inspect.unwrap(getattr(module, forward).forward), kind == "llama4"
    options = ("half as wide, neighbours", True, False, False, "xq xk freqs_cis", rows_first, True)
    rotate = decoder.rotation(inner, decoder.Rotary("apply_rotary_emb", *options))
    table = torch.polar(torch.ones(2, 5, 4), torch.randn(2, 5, 4))
    for rows in (5, 1):  # of another number of rows than the table's, the stock function runs
        heads = [torch.randn(2, n, rows, 8, dtype=dtype) for n in (3, 1)]
        heads = [x.transpose(1, 2) for x in heads] if rows_first else heads
        want = module.apply_rotary_emb(*heads, table)
        with Calls() as calls:
            found = rotate(*heads, table)
        assert calls.names["torchweld::rotary"] == (rows == 5)
        assert_close(found, want)


@pytest.mark.parametrize("kind", ["deepseek_v2", "llama4_text"])
def test_models_with_complex_tables(kind):
    torch.manual_seed(0)
    model = tiny_model(kind, dict(causal_models())[kind], "sdpa", initializer_range=0.2).train()
    stock, report = fuse_keeping_stock(model)
    assert report.max_abs_diff < 1e-4
    with Calls() as calls:
        assert_same_step(model, stock)
    assert calls.names["torchweld::rotary"] == 2
    assert calls.names["torchweld::rms_norm_linears_forward"] == 2


def of_llama(**overrides):
    """A class like Llama's attention or layer, in whose module the rotary function is."""
    module = transformers.models.llama.modeling_llama
    cls = {"attention": module.LlamaAttention, "layer": module.LlamaDecoderLayer}
    return {
        name: type(f"Other{cls[name].__name__}", (cls[name],), {"__module__": module.__name__, **d})
        for name, d in overrides.items()
    }


def with_class(cls, path):
    model = tiny_of("Llama").eval()
    for layer in model.model.layers:
        (layer.get_submodule(path) if path else layer).__class__ = cls
    return model


def like_llama(forward):
    """A forward of keywords that has the signature of Llama's attention."""
    stock = transformers.models.llama.modeling_llama.LlamaAttention.forward
    forward.__signature__ = inspect.signature(stock)
    return forward


@like_llama
def scaled(self, hidden_states, position_embeddings, attention_mask, **kwargs):
    for name in ("cache", "past_key_values"):  # the attention function is not given either
        kwargs.pop(name, None)
    kwargs["scaling"] = 0.1
    function = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.get_interface(
        self.config._attn_implementation, None
    )
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k, v = (
        getattr(self, name)(hidden_states).view(shape).transpose(1, 2)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    rotate = transformers.models.llama.modeling_llama.apply_rotary_pos_emb
    q, k = rotate(q, k, *position_embeddings)
    out, weights = function(self, q, k, v, attention_mask, **kwargs)
    return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights


@like_llama
def rotated_after_scaling(self, position_embeddings, **more):
    stock = transformers.models.llama.modeling_llama.LlamaAttention.forward
    tables = tuple(2 * table for table in position_embeddings)
    return stock(self, position_embeddings=tables, **more)


@pytest.mark.parametrize("forward", [scaled, rotated_after_scaling])
def test_attention_whose_forward_calls_no_rotary_function_stays_stock(forward):
    cls = of_llama(attention={"forward": forward})["attention"]
    model = with_class(cls, "self_attn")
    stock, report = fuse_keeping_stock(model)
    assert "model.layers.0.self_attn.rotary" in dict(report.skipped)
    assert_same_logits(model, stock)


def apply_rotary_pos_emb(q, k, cos, sin):
    """The place of a function that a test chooses."""


def rotated(self, hidden_states, position_embeddings, **kwargs):
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k, v = (
        getattr(self, name)(hidden_states).view(shape).transpose(1, 2)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    # ALL_ATTENTION_FUNCTIONS
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return self.o_proj(out.transpose(1, 2).flatten(2)), None


def half_rotated(q, k, cos, sin):
    """Tables narrower than the heads."""
    cos, sin = (table[:, None, :, :4] for table in (cos, sin))
    first = transformers.models.llama.modeling_llama.rotate_half
    return tuple(
        torch.cat((x[..., :4] * cos + first(x[..., :4]) * sin, x[..., 4:]), -1) for x in (q, k)
    )


def rotated_back(q, k, cos, sin):
    return transformers.models.llama.modeling_llama.apply_rotary_pos_emb(q, k, cos, -sin)


def test_an_attention_without_a_source_is_projected_behind_its_norm():
    llama = transformers.models.llama.modeling_llama
    text = inspect.getsource(inspect.unwrap(llama.LlamaAttention.forward))
    lines = [line for line in text.splitlines() if not line.strip().startswith("@")]
    names = dict(vars(llama))
    exec("class OtherAttention(LlamaAttention):\n" + "\n".join(lines), names)
    model = with_class(names["OtherAttention"], "self_attn")
    stock, report = fuse_keeping_stock(model)
    assert report.ops["model.layers.0.self_attn.rotary"] == "rotary"
    assert report.ops["model.layers.0.input_layernorm"] == "rms_norm"
    assert_same_logits(model, stock)


@pytest.mark.parametrize("name", ["apply_rotary_pos_emb", "half_rotated", "rotated_back"])
def test_rotary_functions_are_compared(monkeypatch, name):
    llama = transformers.models.llama.modeling_llama
    function = getattr(llama, name, None) or globals()[name]
    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", function)
    cls = type("OtherAttention", (llama.LlamaAttention,), {"forward": rotated})
    model = with_class(cls, "self_attn").train()
    stock, report = fuse_keeping_stock(model)
    runs = name == "apply_rotary_pos_emb"
    where = "model.layers.0.self_attn.rotary"
    assert (where in report.replaced) == runs, report
    if not runs:
        why = "OtherAttention has the parts of a rotary embedding and computes something else"
        assert dict(report.skipped)[where].endswith(why)
    assert_same_step(model, stock)


def first_result(self, hidden_states, **kwargs):
    """Takes attentions with any number of results."""
    h = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)[0]
    x = hidden_states + h
    return x + self.mlp(self.post_attention_layernorm(x))


def halved(self, hidden_states, **kwargs):
    h, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
    x = hidden_states + h / 2
    return x + self.mlp(self.post_attention_layernorm(x))


def parallel(self, hidden_states, **kwargs):
    h, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
    return hidden_states + h + self.mlp(self.post_attention_layernorm(hidden_states))


def repeated(self, hidden_states, **kwargs):
    """Uses its input and their sum in many ways."""
    normed = self.input_layernorm(hidden_states)
    with torch.no_grad():  # as an indexer of sparse attention
        self.mlp(normed)
    h, _ = self.self_attn(hidden_states=normed, **kwargs)
    x = h * 0.5 + hidden_states
    out = self.mlp(self.post_attention_layernorm(x)) + 2 * x - x[..., :1] + normed / 4
    return torch.add(out, hidden_states.sin(), alpha=0.5) + self.input_layernorm(x)


def passing(self, hidden_states, **kwargs):
    """Gives its input to a child that is no norm."""
    h, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
    x = hidden_states + h
    return x + self.mlp(self.post_attention_layernorm(x)) + self.mlp(hidden_states)


@pytest.mark.parametrize("forward", [first_result, halved, repeated, parallel, passing])
def test_a_layer_runs_its_own_forward(forward):
    cls = of_llama(layer={"forward": forward})["layer"]
    model = with_class(cls, "").train()
    stock, report = fuse_keeping_stock(model)
    adds = sum(op.startswith("add_rms_norm") for op in report.ops.values())
    reason = "OtherLlamaDecoderLayer is none of the decoder layers that fuse knows"
    assert [why for _, why in report.skipped] == ([reason] * 2 if forward is passing else [])
    assert adds == (0 if forward in (parallel, passing) else 2)
    assert_same_step(model, stock)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bits_are_compared_too(device, dtype):
    report = fuse(tiny_of("Ministral", device, dtype, head_dim=8), check=False)
    assert not report.skipped and len(report.replaced) == 11


# Heads and losses


def labelled_step(model, **given):
    ids = torch.arange(24, device=model.device).view(2, 12)
    model.zero_grad()
    out = model(input_ids=ids, labels=ids.masked_fill(ids == 5, -100), **given)
    out.loss.backward()
    return out, [p.grad for p in model.parameters()]


def assert_same_loss(model, stock, **given):
    """Loss and gradients of a model whose loss makes no logits; the outputs are returned."""
    with Calls() as calls:
        out, grads = labelled_step(model, **given)
    assert any("linear_cross_entropy" in name for name in calls.names)
    want, want_grads = labelled_step(stock, **given)
    assert out.logits is None and type(out) is type(want)
    assert_close(out.loss, want.loss, rtol=1e-5, atol=1e-5)
    assert_close(grads, want_grads, rtol=1e-4, atol=1e-4)
    return out, want


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Ministral", {"head_dim": 8}),
        ("Cohere", {"logit_scale": 0.25}),
        ("HyperCLOVAX", {"logits_scaling": 0.5}),
        ("VaultGemma", {"head_dim": 8, "final_logit_softcapping": 2.0}),
    ],
)
def test_losses_of_models_that_no_table_has(device, name, changes):
    model = tiny_of(name, device, **changes).train()
    stock, report = fuse_keeping_stock(model, loss=True)
    assert report.ops["lm_head"].startswith("linear_cross_entropy"), report
    for each in (model, saved_and_loaded(model)):
        for given in ({}, {"num_items_in_batch": 7}):
            assert_same_loss(each, stock, **given)
        unfuse(each)
        assert type(each) is type(stock)


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "gemma4_text", "mllama"])
def test_losses_of_models_with_more_arguments(kind):
    """Images, types of tokens and each layer's inputs go to the base model, with labels or not."""
    models = dict(causal_models())
    if kind not in models:
        pytest.skip("not in this transformers")
    model = random_model(kind, models[kind]).train()
    if "CrossEntropyLoss" in inspect.getsource(type(model).forward):
        pytest.skip("in this transformers the model computes a loss of its own")
    stock, report = fuse_keeping_stock(model, loss=True, check=False)
    assert report.ops["lm_head"].startswith("linear_cross_entropy"), report
    given = {"token_type_ids": torch.zeros(2, 12, dtype=torch.long)} if kind == "gemma3" else {}
    out, want = assert_same_loss(model, stock, **given)
    assert [*out] == [name for name in want if name != "logits"]


@pytest.mark.parametrize(
    ("kind", "name", "tower"),
    [
        ("lfm3_vl", "Lfm3VlForConditionalGeneration", "model.vision_tower.layers.1.self_attn"),
        # MuseGlimmer multiplies its logits in front of a softcap.
        ("muse_glimmer", "MuseGlimmerForConditionalGeneration", "model.vision_tower.layers.0.attn"),
    ],
)
def test_models_of_images_train_and_generate_as_stock(kind, name, tower):
    model = random_model(kind, name)
    if model is None:
        pytest.skip("not in this transformers")
    stock, report = fuse_keeping_stock(model, loss=True)
    assert report.max_abs_diff < 1e-4
    assert report.ops[f"{tower}.rotary"].startswith("rotary")
    assert_same_loss(model.train(), stock.train())
    assert_same_tokens(model, stock, torch.arange(5, 11)[None])


def test_a_recognised_loss_compiles_in_one_graph():
    model = tiny_of("Cohere", logit_scale=0.25).train()
    fuse(model, loss=True)
    want = labelled_step(model)[0].loss
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ids = torch.arange(24).view(2, 12)
    out = compiled(input_ids=ids, labels=ids.masked_fill(ids == 5, -100))
    assert out.logits is None
    assert_close(out.loss, want, rtol=1e-5, atol=1e-5)


def usual(self, hidden, labels, **kwargs):
    return self.loss_function(self.lm_head(hidden), labels, self.config.vocab_size, **kwargs)


def doubled(self, hidden, labels, **kwargs):
    return self.loss_function(2 * self.lm_head(hidden), labels, self.config.vocab_size, **kwargs)


def of_its_own(self, hidden, labels, **kwargs):
    """The mean, also where another divisor is given."""
    logits = self.lm_head(hidden)[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, labels[:, 1:].flatten())


def of_each_position(self, hidden, labels, **kwargs):
    kwargs["shift_labels"] = labels
    return self.loss_function(self.lm_head(hidden), labels, self.config.vocab_size, **kwargs)


def of_an_argument(self, hidden, labels, token_type_ids=None, **kwargs):
    logits = self.lm_head(hidden) * (1 if token_type_ids is None else 2)
    return self.loss_function(logits, labels, self.config.vocab_size, **kwargs)


@pytest.mark.parametrize("loss", [usual, doubled, of_its_own, of_each_position, of_an_argument])
def test_losses_that_no_table_has(loss):
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        token_type_ids=None,
        **kwargs,
    ):
        out = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            token_type_ids=token_type_ids,
            **kwargs,
        )
        types = {"token_type_ids": token_type_ids} if loss is of_an_argument else {}
        return transformers.modeling_outputs.CausalLMOutputWithPast(
            loss=loss(self, out.last_hidden_state, labels, **types, **kwargs),
            past_key_values=out.past_key_values,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
        )

    model = tiny_of("Llama").train()
    model.__class__ = type("OtherForCausalLM", (type(model),), {"forward": forward})
    stock, report = fuse_keeping_stock(model, loss=True)
    assert report.ops["lm_head"].startswith("linear_cross_entropy"), report
    types = {"token_type_ids": torch.ones(2, 12)} if loss is of_an_argument else {}
    for given in ({}, {"num_items_in_batch": 7}, types):
        assert_same_loss(model, stock, **given)
