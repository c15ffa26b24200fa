"""torchweld.fuse of timm's models: attention through SDPA, norms and MLPs."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

pytest.importorskip("transformers")
timm = pytest.importorskip("timm", reason="pip install timm torchvision")

from test_fuse import Calls  # noqa: E402
from test_fuse_encoders import assert_same_step, ops_on_a_cpu, step  # noqa: E402, F401
from tiny_models import saved_and_loaded, with_random_vectors  # noqa: E402
from torchweld.integrations import fuse, unfuse  # noqa: E402
from torchweld.integrations.fusion.recognise.sdpa_layers import sample_of  # noqa: E402

SMALL = {"img_size": 32, "embed_dim": 64, "num_heads": 4, "depth": 2}
SWIN = {
    "img_size": 64,
    "embed_dim": 16,
    "window_size": 4,
    "depths": (1, 1),
    "num_heads": (1, 2),
    "drop_path_rate": 0.0,
}
BLOCKS = {"layer_norm": 1, "add_layer_norm": 2, "layer_norm_linears": 2}
ADDING = {"layer_norm": 3, "add_layer_norm": 2}  # another bias is added than that of the layer
# For each model: how it is made, and the ops of a step.
MODELS = {
    "vit_large_patch16_224": (SMALL, {**BLOCKS, "attention": 2, "linear": 2}),
    "deit3_small_patch16_224": (SMALL, {**BLOCKS, "attention": 2, "linear": 2}),
    "vit_base_patch16_siglip_224": (
        SMALL,
        {**BLOCKS, "layer_norm": 2, "attention": 3, "linear": 3},
    ),
    "eva_giant_patch14_224": (
        {**SMALL, "img_size": 28},
        {**ADDING, "attention": 2, "linear": 2},
    ),
    "eva02_tiny_patch14_224": (
        {**SMALL, "img_size": 28},
        {**ADDING, "attention": 2, "gated_linear": 2},
    ),
    "vit_small_patch16_dinov3": (SMALL, {**BLOCKS, "attention": 2, "linear": 2}),
    "vit_huge_plus_patch16_dinov3": (
        SMALL,
        {**BLOCKS, "attention": 2, "gated_linear_pair": 2},
    ),
    "vit_large_patch14_xp_224": ({**SMALL, "img_size": 28}, {"rms_norm": 8, "attention": 2}),
    "beit_base_patch16_224": (SMALL, {**ADDING, "linear": 2}),
    "swin_tiny_patch4_window7_224": (SWIN, {"layer_norm": 7, "linear": 2}),
}


def model_of(name, device="cpu", **changes):
    """A small model with random norms, layer scales and biases."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10, **{**MODELS[name][0], **changes})
    return with_random_vectors(model).to(device)


def vit(device="cpu", **changes):
    return model_of("vit_large_patch16_224", device, **changes)


def reasons(model, **options):
    return dict(fuse(model, **options).skipped)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_equals_that_of_stock(device, name):
    model = model_of(name, device).train()
    stock, batch, wanted = copy.deepcopy(model), sample_of(model), MODELS[name][1]
    report = fuse(model)
    assert Counter(op.split(" ")[0] for op in report.ops.values()) == wanted
    assert report.calls.items() >= {f"torchweld::{op}": n for op, n in wanted.items()}.items()
    assert report.max_abs_diff < 1e-4
    with Calls() as calls:
        assert_same_step(model, stock, batch)
    for op, count in wanted.items():
        for part in ("forward", "backward"):
            assert calls.names[f"torchweld::{op}_{part}"] == count
    assert model.state_dict().keys() == stock.state_dict().keys()
    for each in (saved_and_loaded(model), model):
        assert_same_step(each, stock, batch)
        assert {*unfuse(each)} == {*report.replaced} and not unfuse(each)
        assert {type(m) for m in each.modules()} == {type(m) for m in stock.modules()}


def test_attention_with_a_bias_stays_stock_and_is_listed():
    model = model_of("beit_base_patch16_224")
    stock, why = type(model.blocks[0].attn), "torch's scaled_dot_product_attention runs: attn_mask"
    assert reasons(model) == {f"blocks.{i}.attn": f"{why} is given" for i in (0, 1)}
    assert type(model.blocks[0].attn) is stock
    why = "its fused_attn is off, so that it computes the scores itself"
    stock = reasons(model_of("swin_tiny_patch4_window7_224"))
    assert stock == {f"layers.{i}.blocks.0.attn": why for i in (0, 1)}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("changes", "op"),
    [
        ({"drop_path_rate": 0.5, "init_values": 0.5}, "attention"),
        ({"proj_drop_rate": 0.25}, "attention"),
        ({"attn_drop_rate": 0.25}, None),
    ],
    ids=lambda value: str(value),
)
def test_dropouts_draw_as_in_stock(device, changes, op, training):
    model = vit(device, **changes).train(training)
    stock, batch = copy.deepcopy(model), sample_of(model)
    fuse(model)
    runs = []
    for each in (model, stock):
        torch.manual_seed(3)
        with Calls() as calls:
            runs.append(each(**batch))
        runs_op = each is model and not (training and op is None)
        assert calls.names["torchweld::attention_forward"] == 2 * runs_op
    if torch.device(device).type == "cpu" or op is not None or not training:
        assert_close(*runs, rtol=1e-4, atol=1e-4)


class Layer(timm.layers.Attention):
    """A layer that makes one call of SDPA with the arguments that it is given."""

    def forward(self, *args, **kwargs):
        return F.scaled_dot_product_attention(*args, **kwargs)


Q = torch.randn(2, 4, 8, 16, generator=torch.Generator().manual_seed(0))
SERVED = {
    "plain": ((Q, Q, Q), {}),
    "causal": ((Q, Q, Q), {"is_causal": True}),
    "scale": ((Q, Q, Q), {"scale": 0.3}),
    "cross": ((Q, Q[:, :, :5], Q[:, :, :5]), {}),
    "grouped": ((Q, Q[:, :2], Q[:, :2]), {"enable_gqa": True}),
    "named": ((), {"query": Q, "key": Q, "value": Q, "dropout_p": 0.0, "attn_mask": None}),
    "float64": ((Q.double(),) * 3, {}),
}
UNSERVED = {
    "attn_mask is given": ((Q, Q, Q, torch.zeros(8, 8)), {}),
    "dropout_p is above 0": ((Q, Q, Q), {"dropout_p": 0.5}),
    "a causal mask is aligned at the top left": (
        (Q, Q[:, :, :5], Q[:, :, :5]),
        {"is_causal": True},
    ),
    "a tensor is not 4-D": ((Q[0], Q[0], Q[0]), {}),
    "the shapes don't belong together": ((Q, Q[:1], Q[:1]), {}),
    "the heads differ without enable_gqa": ((Q, Q[:, :1], Q[:, :1]), {}),
}


def one_layer():
    model = nn.Sequential(Layer(64, 4))
    fuse(model, check=False)
    return model[0]


@pytest.mark.parametrize("case", SERVED)
def test_calls_of_sdpa_that_run_the_op(case):
    args, kwargs = SERVED[case]
    with Calls() as calls:
        got = one_layer()(*args, **kwargs)
    assert calls.names["torchweld::attention_forward"] == 1
    assert_close(got, F.scaled_dot_product_attention(*args, **kwargs))


@pytest.mark.filterwarnings("ignore:torchweld")
@pytest.mark.parametrize("reason", UNSERVED)
def test_calls_of_sdpa_that_run_torchs(reason):
    from torchweld.integrations import recorder

    args, kwargs = UNSERVED[reason]
    layer = one_layer()
    with recorder.recording() as calls:
        torch.manual_seed(0)
        got = layer(*args, **kwargs)
    assert calls == {layer: [f"torch's scaled_dot_product_attention runs: {reason}"]}
    torch.manual_seed(0)
    assert_close(got, F.scaled_dot_product_attention(*args, **kwargs))


def test_an_error_of_sdpa_is_torchs():
    with pytest.raises(RuntimeError) as stock:
        F.scaled_dot_product_attention(Q, Q[..., :8], Q)
    with pytest.raises(RuntimeError) as error:
        one_layer()(Q, Q[..., :8], Q)
    assert str(error.value) == str(stock.value)


def test_only_a_fused_layer_changes_sdpa():
    layer = one_layer()
    layer(Q, Q, Q)
    with Calls() as calls:
        F.scaled_dot_product_attention(Q, Q, Q)
    assert not any("torchweld" in name for name in calls.names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(device, dtype):
    """LayerNorms of query and key are float32 in it on a GPU, and the values are bfloat16."""
    torch.manual_seed(0)
    layer = timm.layers.Attention(64, 4, qk_norm=True, norm_layer=timm.layers.LayerNorm)
    model = nn.Sequential(layer).to(device)
    stock, x = copy.deepcopy(model), torch.randn(2, 8, 64, device=device, dtype=dtype)
    want = copy.deepcopy(model).double()(x.double())
    fuse(model, check=False)
    with torch.autocast(torch.device(device).type, torch.bfloat16), Calls() as calls:
        results = [model(x), stock(x)]
    assert calls.names["torchweld::attention_forward"] == 1
    assert results[0].dtype == results[1].dtype
    error, stock_error = ((result - want).square().mean() for result in results)
    assert error <= 1.5**2 * stock_error


@pytest.mark.parametrize("name", MODELS)
def test_a_fused_model_compiles_in_one_graph(device, name):
    model = model_of(name, device).eval()
    fuse(model)
    batch, graphs = sample_of(model), []
    torch._dynamo.reset()

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    with torch.no_grad():
        compiled = torch.compile(model, backend=keep, fullgraph=True)
        assert_close(compiled(**batch), model(**batch), rtol=1e-4, atol=1e-4)
    called = Counter(str(node.target) for node in graphs[0].graph.nodes)
    assert called["torchweld.attention"] == MODELS[name][1].get("attention", 0)


def test_an_exported_model_has_the_op():
    model = vit().eval()
    fuse(model)
    batch = sample_of(model)
    program = torch.export.export(model, (), batch)
    assert str(program.graph).count("torch.ops.torchweld.attention.default") == 2
    assert_close(program.module()(**batch), model(**batch), rtol=1e-4, atol=1e-4)


def test_checkpointed_blocks(device):
    model = vit(device).train()
    stock, batch = copy.deepcopy(model), sample_of(model)
    fuse(model)
    model.set_grad_checkpointing()
    with Calls() as calls:
        assert_same_step(model, stock, batch)
    assert calls.names["torchweld::attention_forward"] == 4  # two again in backward


def test_modules_that_stay_stock_for_a_reason():
    def reason(change, where, **options):
        model = vit()
        change(model.blocks[0])
        return reasons(model, check=False, **options).get(f"blocks.0.{where}")

    def set_norm(block):
        block.mlp.norm = nn.LayerNorm(256)

    def set_activation(block):
        block.mlp.act = timm.layers.create_act_layer("quick_gelu")

    def set_gate(block):
        block.mlp = timm.layers.GluMlp(64, 128, act_layer=nn.SiLU, gate_last=True)

    def fast_norm(block):
        timm.layers.set_fast_norm(True)
        block.norm1 = timm.layers.LayerNorm(64)
        timm.layers.set_fast_norm(False)

    def replace(block):
        block.attn.forward = block.attn.forward

    def switch_off(block):
        block.attn.fused_attn = False

    assert reason(lambda block: None, "attn") is None
    assert reason(set_norm, "mlp") == "Mlp is none of the MLPs that fuse knows"
    assert reason(set_activation, "mlp") == "no fused form of the activation QuickGELU"
    assert reason(set_gate, "mlp") == (
        "timm.layers.mlp.GluMlp has the parts of an MLP and computes something else"
    )
    assert reason(fast_norm, "norm1") == (
        "timm's fast norm is on, which computes in the dtype of autocast"
    )
    assert reason(replace, "attn") == "its forward was replaced on the instance"
    assert reason(switch_off, "attn") == (
        "its fused_attn is off, so that it computes the scores itself"
    )
    assert reason(lambda block: nn.utils.parametrizations.weight_norm(block.mlp.fc1), "mlp")


def test_a_layer_that_calls_no_sdpa_on_the_sample_is_listed():
    class Scores(timm.layers.Attention):
        """Calls F.scaled_dot_product_attention() if it is fused, which this one is not."""

        def forward(self, x, **kwargs):
            return x

    model = vit()
    model.blocks[0].attn = Scores(64, 4)
    assert reasons(model) == {"blocks.0.attn": "the stock forward runs: it called no SDPA"}


def test_hooks_see_what_they_see_in_stock():
    model = vit().eval()
    stock, batch, seen = copy.deepcopy(model), sample_of(model), []
    fuse(model)
    for each in (model, stock):
        for name in ("attn.qkv", "attn", "mlp.act", "norm2"):
            each.blocks[0].get_submodule(name).register_forward_hook(
                lambda module, args, out: seen.append((*args, out))
            )
        each(**batch)
    half = len(seen) // 2
    assert half == 4
    assert_close(seen[:half], seen[half:], rtol=1e-4, atol=1e-4)


def test_the_default_sample_has_the_size_of_the_model():
    assert sample_of(vit(in_chans=1))["x"].shape == (2, 1, 32, 32)
    bare = timm.models.VisionTransformer(img_size=48, embed_dim=32, depth=1, num_heads=2)
    assert sample_of(bare)["x"].shape == (2, 3, 48, 48)
    assert sample_of(nn.Linear(3, 3)) is None
    assert "no sample batch is known for Attention" in str(fuse(timm.layers.Attention(64, 4)))


def test_models_inside_of_others():
    transformers = pytest.importorskip("transformers")
    model = nn.Sequential(vit(), nn.Linear(10, 3)).eval()
    report = fuse(model)
    assert report.calls["torchweld::attention"] == 2 and "0.blocks.1.attn" in report.replaced
    options = {"model_args": {"depth": 2, "img_size": 32}, "num_labels": 5}
    config = transformers.TimmWrapperConfig(architecture="vit_tiny_patch16_224", **options)
    model = transformers.TimmWrapperForImageClassification(config).eval()
    report = fuse(model, sample={"pixel_values": torch.randn(2, 3, 32, 32)})
    assert report.calls["torchweld::attention"] == 2
    assert not any("blocks" in path for path, _ in report.skipped)


def test_a_step_in_bfloat16_is_no_worse_than_stock(device):
    stock = vit(device).train().bfloat16()
    exact, model = copy.deepcopy(stock).float(), copy.deepcopy(stock)
    fuse(model, check=False)
    batch = sample_of(stock)
    (want, want_grads), errors = step(exact, {"x": batch["x"].float()}), []
    for each in (model, stock):
        out, grads = step(each, batch)
        apart = [(grads[key].double() - w).square().sum() for key, w in want_grads.items()]
        errors.append(((out.double() - want).square().mean().sqrt(), sum(apart).sqrt()))
    for error, stock_error in zip(*errors, strict=True):
        assert error <= 1.5 * stock_error
