"""torchweld.fuse of diffusers' models: attention by processors, norms and feed-forward layers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

pytest.importorskip("transformers")
diffusers = pytest.importorskip("diffusers", reason="pip install diffusers")

from test_fuse import Calls  # noqa: E402
from test_fuse_encoders import assert_same_step, ops_on_a_cpu  # noqa: E402, F401
from tiny_models import saved_and_loaded  # noqa: E402
from torchweld.integrations import fuse, unfuse  # noqa: E402

HEADS = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}
IMAGE = {"in_channels": 4, "out_channels": 4, "sample_size": 8}
JOINT = {"joint_attention_dim": 24, "pooled_projection_dim": 20}
TIME = torch.tensor([1, 2])


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


LATENTS = {"hidden_states": draw(2, 4, 8, 8), "timestep": TIME}
TEXT = draw(2, 5, 24)
# For each model: its config, a batch, and the ops of a step. DiT embeds one of its times twice.
MODELS = {
    "DiTTransformer2DModel": (
        {**HEADS, **IMAGE},
        {**LATENTS, "class_labels": torch.tensor([0, 1])},
        {"attention": 2, "layer_norm": 5, "linear": 5},
    ),
    "PixArtTransformer2DModel": (
        {**HEADS, **IMAGE, "cross_attention_dim": 32, "caption_channels": 24},
        {**LATENTS, "encoder_hidden_states": TEXT, "added_cond_kwargs": {}},
        {"attention": 4, "layer_norm": 5, "linear": 4},
    ),
    "SD3Transformer2DModel": (
        {**HEADS, **IMAGE, **JOINT, "caption_projection_dim": 32, "qk_norm": "rms_norm"},
        {**LATENTS, "encoder_hidden_states": TEXT, "pooled_projections": draw(2, 20)},
        {"attention": 2, "layer_norm": 8, "rms_norm": 8, "linear": 5},
    ),
    "FluxTransformer2DModel": (
        {**HEADS, **JOINT, "in_channels": 4, "num_single_layers": 1, "axes_dims_rope": (4, 4, 8)},
        {
            "hidden_states": draw(2, 16, 4),
            "encoder_hidden_states": TEXT,
            "pooled_projections": draw(2, 20),
            "timestep": TIME,
            "img_ids": torch.zeros(16, 3),
            "txt_ids": torch.zeros(5, 3),
        },
        {"attention": 3, "layer_norm": 10, "rms_norm": 10, "linear": 6},
    ),
    "WanTransformer3DModel": (
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 24,
            "freq_dim": 32,
            "ffn_dim": 48,
            "rope_max_seq_len": 32,
        },
        {"hidden_states": draw(2, 4, 1, 8, 8), "encoder_hidden_states": TEXT, "timestep": TIME},
        {"attention": 4, "rms_norm": 8, "linear": 4},
    ),
    "UNet2DConditionModel": (
        {
            **IMAGE,
            "layers_per_block": 1,
            "block_out_channels": (32, 64),
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "cross_attention_dim": 24,
            "attention_head_dim": 8,
        },
        {"sample": draw(2, 4, 8, 8), "timestep": TIME, "encoder_hidden_states": TEXT},
        {"attention": 8, "layer_norm": 12, "gated_linear": 4},
    ),
}


def model_of(name, device="cpu"):
    """A small model with random weights, also those that start at 0."""
    torch.manual_seed(0)
    model = getattr(diffusers, name)(**MODELS[name][0])
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.7, 0.2)
        elif not parameter.any():
            nn.init.normal_(parameter, 0.0, 0.1)
    return model.to(device)


def batch_of(name, device="cpu"):
    batch = MODELS[name][1]
    return {key: t.to(device) if torch.is_tensor(t) else t for key, t in batch.items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_step_equals_that_of_stock(device, name):
    model = model_of(name, device).eval()  # DiT drops labels in training mode
    stock, batch, wanted = copy.deepcopy(model), batch_of(name, device), MODELS[name][2]
    report = fuse(model, sample=batch)
    ran = {f"torchweld::{op}": count for op, count in wanted.items()}
    assert {op: count for op, count in report.calls.items() if op in ran} == ran
    assert report.max_abs_diff < 1e-3 * model(**batch).sample.abs().max()
    with Calls() as calls:
        assert_same_step(model, stock, batch)
    for op, count in wanted.items():
        assert calls.names[f"torchweld::{op}_forward"] == count
    for each in (saved_and_loaded(model), model):
        assert_same_step(each, stock, batch)
        assert {*unfuse(each)} >= {*report.replaced}
        assert {type(m) for m in each.modules()} == {type(m) for m in stock.modules()}


def test_calls_that_stay_stock_are_listed():
    model, batch = model_of("UNet2DConditionModel").eval(), batch_of("UNet2DConditionModel")
    reasons = dict(fuse(model, sample=batch).skipped)
    assert reasons["conv_norm_out"] == "GroupNorm is none of the norms that fuse knows"
    assert reasons["time_embedding"] == "the stock forward runs: it was called with more than x"
    name = "PixArtTransformer2DModel"
    model, batch = model_of(name).eval(), batch_of(name)
    batch["encoder_attention_mask"] = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    reasons = dict(fuse(model, sample=batch).skipped)
    why = "torch's scaled_dot_product_attention runs: attn_mask is given"
    assert reasons == {f"transformer_blocks.{i}.attn2": why for i in (0, 1)}


def test_a_processor_without_sdpa_stays_stock():
    from diffusers.models.attention_processor import AttnProcessor

    model = model_of("UNet2DConditionModel")
    model.set_attn_processor(AttnProcessor())
    reasons = dict(fuse(model, only="attention", check=False).skipped)
    assert {*reasons.values()} == {"AttnProcessor does not call scaled_dot_product_attention"}


def test_a_processor_that_is_set_after_fuse():
    from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0

    name = "UNet2DConditionModel"
    model, batch = model_of(name).eval(), batch_of(name)
    stock = model(**batch).sample
    fuse(model, sample=batch)
    for processor, count in ((AttnProcessor(), 0), (AttnProcessor2_0(), 8)):
        model.set_attn_processor(processor)
        with Calls() as calls:
            assert_close(model(**batch).sample, stock, rtol=1e-3, atol=1e-3)
        assert calls.names["torchweld::attention_forward"] == count


def test_a_model_without_a_sample():
    report = fuse(model_of("DiTTransformer2DModel"))
    assert any("no sample batch is known for DiTTransformer2DModel" in n for n in report.notes)


@pytest.mark.parametrize("name", MODELS)
def test_a_fused_model_compiles_in_one_graph(device, name):
    model, batch = model_of(name, device).eval(), batch_of(name, device)
    fuse(model, sample=batch)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert_close(compiled(**batch).sample, model(**batch).sample, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("activation", "op"),
    [
        ("gelu", "linear (proj -> gelu)"),
        ("gelu-approximate", "linear (proj -> gelu)"),
        ("geglu", "gated_linear (proj -> gelu)"),
        ("swiglu", "gated_linear_pair (proj -> activation)"),
        ("linear-silu", "linear (proj -> activation)"),
        ("geglu-approximate", None),  # x * sigmoid(1.702 * x)
    ],
)
def test_feed_forward_layers(device, activation, op):
    from diffusers.models.attention import FeedForward

    torch.manual_seed(0)
    model = FeedForward(32, activation_fn=activation).to(device)
    stock, batch = copy.deepcopy(model), {"hidden_states": draw(2, 4, 32).to(device)}
    report = fuse(model, sample=batch)
    assert report.ops == ({} if op is None else {"net.0": op})
    if op is None:
        why = "ApproximateGELU has the parts of an MLP and computes something else"
        assert dict(report.skipped)["net.0"].endswith(why)
    with Calls() as calls:
        assert_same_step(model, stock, batch)
    assert any("torchweld" in name for name in calls.names) == (op is not None)
