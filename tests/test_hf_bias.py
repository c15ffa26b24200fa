"""The position bias of T5 and other models of transformers runs as the op's bias."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

transformers = pytest.importorskip("transformers")

from test_hf_attention import Calls, Layer, views  # noqa: E402
from test_hf_models import UNEQUAL, counterpart, stock_model  # noqa: E402
from tiny_models import assert_same_tokens, batch, own_warnings, static_cache_in_graphs  # noqa: E402
from torchweld.distributed import _active  # noqa: E402
from torchweld.integrations import fuse  # noqa: E402
from torchweld.integrations.attention import forward as hf_attention  # noqa: E402
from torchweld.integrations.attention import mask_numbers  # noqa: E402
from torchweld.integrations.attention import models as hf_models  # noqa: E402
from torchweld.integrations.sdpa.gpus import BIAS  # noqa: E402

# ---- the attention function


def dense_attention(qkv, bias, visible):
    query, key, value = qkv
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    added = bias if visible is None else bias.masked_fill(~visible, float("-inf"))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, added, scale=0.3)
    return out.transpose(1, 2)


@pytest.mark.parametrize("nheads_kv", [4, 2])
@pytest.mark.parametrize(
    "case", ["causal", "bidirectional", "left padding", "static cache", "step"]
)
def test_a_position_bias_goes_to_the_op(case, nheads_kv):
    seqlen_q, seqlen_k = {"static cache": (4, 9), "step": (1, 6)}.get(case, (6, 6))
    qkv = views("cpu", seqlen_q, seqlen_k, nheads_kv=nheads_kv)
    bias = torch.randn(1, seqlen_q, seqlen_k, 4).permute(0, 3, 1, 2).requires_grad_()  # as T5's
    mask, visible = None, torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril()
    if case in ("bidirectional", "step"):
        visible = None
    elif case == "left padding":
        numbers = mask_numbers.Numbers(True, torch.tensor([0, 2], dtype=torch.int32))
        mask, visible = mask_numbers.leftpad_mask(numbers.leftpad), numbers.dense(6, 6)
    layer = Layer(4 // nheads_kv, is_causal=case != "bidirectional")
    given = {"scaling": 0.3, "position_bias": bias}
    with own_warnings() as said, Calls() as calls:
        ours, weights = hf_attention.attention_forward(layer, *qkv, mask, **given)
    assert calls.names["torchweld::attention_forward"] == 1 and weights is None and not said
    real = slice(None) if visible is None else visible.any(-1).view(-1, seqlen_q).expand(2, -1)
    ours, stock = ours[real], dense_attention(qkv, bias, visible)[real]
    dout = torch.randn_like(stock)
    grads = [torch.autograd.grad(out, (*qkv, bias), dout) for out in (ours, stock)]
    assert_close(ours, stock, rtol=1e-5, atol=1e-5)
    assert_close(*grads, rtol=1e-5, atol=1e-5)


def test_a_bias_without_a_kernel_for_tensor_cores_runs_sdpa():
    """On fake tensors: no GPU is needed to see that the kernels are not asked."""
    why = f"{BIAS}, which no kernel for tensor cores has here"
    with FakeTensorMode(), torch.device("cuda"), pytest.warns(UserWarning, match=why):
        q, k, v = (torch.ones(2, 3, 5, 8) for _ in range(3))
        out, _ = hf_attention.attention_forward(
            Layer(), q, k, v, None, position_bias=torch.ones(1, 3, 5, 5)
        )
    assert out.shape == (2, 5, 3, 8)


def test_soft_capped_scores_with_a_bias_run_eager_attention(monkeypatch):
    def eager(module, query, key, value, mask, *, position_bias, softcap, **kwargs):
        return (position_bias, softcap), None

    monkeypatch.setattr(sys.modules[Layer.__module__], "eager_attention_forward", eager, False)
    bias = torch.randn(1, 4, 6, 6)
    with own_warnings() as said:
        out, _ = hf_attention.attention_forward(
            Layer(), *views("cpu", 6, 6), None, position_bias=bias, softcap=5.0
        )
    assert out == (bias, 5.0)
    assert len(said) == 1 and "a position bias is added to soft-capped scores" in said[0]


def test_context_parallelism_has_no_bias(monkeypatch):
    monkeypatch.setattr(_active, "current", object())
    with pytest.raises(ValueError, match=f"must see causal attention, but {BIAS}"):
        hf_attention.attention_forward(
            Layer(), *views("cpu", 6, 6), None, position_bias=torch.randn(1, 4, 6, 6)
        )


# ---- models: the class, how many of its layers run the op, config values

BOTH = "ForConditionalGeneration"
MODELS = {
    "t5": (f"T5{BOTH}", 6, {}),
    "mt5": (f"MT5{BOTH}", 6, {}),
    "umt5": (f"UMT5{BOTH}", 6, {}),
    "pop2piano": (f"Pop2Piano{BOTH}", 6, {}),
    "udop": (f"Udop{BOTH}", 6, {}),
    "layoutlmv3": ("LayoutLMv3ForTokenClassification", 2, {"coordinate_size": 6, "shape_size": 4}),
    "inkling_text": ("InklingForCausalLM", 2, {}),
}
DROPOUTS = ("dropout_rate", "attention_probs_dropout_prob", "hidden_dropout_prob")


def biased(kind):
    """A stock model without dropout, and its counterpart on torchweld's attention."""
    name, _, changes = MODELS[kind]
    cls = getattr(transformers, name, None)
    if cls is None or hf_models.refusal(cls) is not None:
        pytest.skip("it takes its attention from elsewhere in this transformers")
    if kind in UNEQUAL:
        pytest.skip("in this transformers its SDPA does not equal its eager attention")
    config = {each: 0.0 for each in DROPOUTS if hasattr(cls.config_class(), each)}
    config["is_decoder"] = kind == "inkling_text"
    if name.endswith(BOTH):
        config["decoder_start_token_id"] = 0
    stock = stock_model(kind, name, **config, **changes)
    return stock, counterpart(stock, kind, name, **config, **changes)


def inputs_of(model):
    values = batch("cpu", (0, 3), side="right")
    inputs = {name: values[name] for name in ("input_ids", "attention_mask")}
    labels = values["input_ids"].masked_fill(values["attention_mask"] == 0, -100)
    if model.config.model_type in ("udop", "layoutlmv3"):
        low = torch.randint(0, 500, (2, 12, 2), generator=torch.Generator().manual_seed(2))
        inputs["bbox"] = torch.cat([low, low + 9], -1)
        labels = labels.clamp_max(1)
        if model.config.model_type == "udop":
            inputs["bbox"] = inputs["bbox"] / 1000
    return {**inputs, "labels": labels}


def step(model, inputs):
    """Loss, logits at tokens and the gradients of all parameters."""
    model.zero_grad()
    out = model(**inputs)
    out.loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return out.loss, out.logits[inputs["labels"] >= 0], grads


@pytest.mark.parametrize("way", ["attn_implementation", "fuse"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_step_equals_stock(kind, way):
    stock, ours = (model.train() for model in biased(kind))
    inputs, layers = inputs_of(stock), MODELS[kind][1]
    if way == "fuse":
        ours = copy.deepcopy(stock)
        report = fuse(ours, sample=inputs, only="attention")
        assert len(report.replaced) == layers and not report.skipped
        assert report.max_abs_diff < 1e-4
    with own_warnings() as said, Calls() as calls:
        got = step(ours, inputs)
    assert calls.names["torchweld::attention_backward"] == layers and not said
    want = step(stock, inputs)
    assert_close(got, want, rtol=1e-4, atol=2e-5)
    if "t5" in kind:
        learned = [grad for name, grad in want[2].items() if "relative_attention_bias" in name]
        assert learned and all(grad.any() for grad in learned)


@pytest.mark.parametrize("case", ["holes", "weights"])
def test_what_runs_beside_the_op_gets_the_bias(case):
    stock, ours = biased("t5")
    inputs = inputs_of(stock)
    if case == "holes":  # of the encoder alone
        inputs["attention_mask"][0, 4] = 0
    else:
        inputs["output_attentions"] = True
    with own_warnings() as said, Calls() as calls:
        got = ours(**inputs)
    assert calls.names["torchweld::attention_forward"] == (2 if case == "holes" else 0)
    assert len(said) == 1
    assert_close(got.logits, stock(**inputs).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["t5", "umt5"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_equals_stock(kind, cache):
    stock, ours = biased(kind)
    inputs = inputs_of(stock)
    del inputs["labels"]
    options = {"cache_implementation": cache, "disable_compile": True, "eos_token_id": None}
    with own_warnings() as said, Calls() as calls:
        assert_same_tokens(ours, stock, **inputs, **options)
    assert calls.names["torchweld::attention"] == 2 + 6 * 4 and not said


def test_a_step_of_generation_compiles_in_one_graph():
    stock, ours = biased("umt5")
    inputs = inputs_of(stock)
    del inputs["labels"]
    graphs, settings = static_cache_in_graphs()
    torch._dynamo.reset()
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    tokens = ours.generate(**inputs, **options, **settings)
    assert torch.equal(tokens, stock.generate(**inputs, **options))
    assert len(graphs) == 1
    assert sum("torchweld.attention" in target for target in graphs[0]) == 4


def test_a_compiled_step_equals_stock():
    stock, ours = (model.train() for model in biased("t5"))
    inputs = inputs_of(stock)
    torch._dynamo.reset()
    got = step(ours, inputs)
    ours.compile(backend="aot_eager")
    assert_close(step(ours, inputs), got, rtol=1e-5, atol=1e-6)
    assert_close(got, step(stock, inputs), rtol=1e-4, atol=2e-5)
