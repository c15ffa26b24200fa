"""attn_implementation="torchweld": the attention function, the mask function, whole tiny models."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers")

from cuda_graphs import cuda_graph  # noqa: E402
from tiny_models import VOCAB, batch, own_warnings, tiny_config, tiny_gpt2, tiny_grouped, tiny_model  # noqa: E402
from torchweld.integrations import register_attention  # noqa: E402
from torchweld.integrations.attention import forward as hf_attention  # noqa: E402
from torchweld.integrations.attention import mask as hf_mask  # noqa: E402
from torchweld.integrations.attention import mask_numbers, mask_ranges, traced_pattern  # noqa: E402
from torchweld.integrations.attention import models as hf_models  # noqa: E402

_NAMES = ("torchweld", "sdpa")


def small(name, device, implementation="torchweld", **changes):
    """A tiny GPT2, or a model with grouped heads: Llama, Mistral."""
    if name == "GPT2":
        model = tiny_gpt2(implementation=implementation, **changes)
    else:
        model = tiny_grouped(name, implementation, **changes)
    return model.to(device).eval()


def gpt2(device, implementation="torchweld", **changes):
    return small("GPT2", device, implementation, **changes)


def test_both_interfaces_are_registered_and_registering_again_changes_nothing():
    register_attention()
    attention = transformers.AttentionInterface()["torchweld"]
    assert attention is hf_attention.attention_forward
    assert transformers.AttentionMaskInterface()["torchweld"] is hf_mask.attention_mask


# ---- the mask function


def mask_of(attention_mask, q_length, kv_length, q_offset=None, **more):
    rows = attention_mask.shape[0] if attention_mask is not None else 2
    return hf_mask.attention_mask(
        batch_size=rows,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=kv_length - q_length if q_offset is None else q_offset,
        attention_mask=attention_mask,
        **more,
    )


def pads_of(mask):
    """The leftpad in a mask."""
    assert mask.shape[1:] == (1, 1, 1) and mask.dtype == torch.int32
    return mask.view(-1).tolist()


@pytest.mark.parametrize(
    ("rows", "pads"),
    [
        ([[1, 1, 1, 1]], [0]),
        ([[0, 1, 1, 1], [0, 0, 0, 1]], [1, 3]),
        ([[0, 0, 0, 0], [1, 1, 1, 1]], [4, 0]),
        ([[1], [0]], [0, 1]),
        ([[1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 0]], [0, 1, 4]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_padding_around_the_tokens_becomes_leftpad(device, rows, pads, dtype):
    mask = torch.tensor(rows, device=device).to(dtype)
    got = mask_of(mask, q_length=mask.shape[1], kv_length=mask.shape[1])
    assert got.device == mask.device
    assert pads_of(got) == pads


def test_one_query_with_a_cache_gets_leftpad(device):
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], device=device)
    assert pads_of(mask_of(mask, q_length=1, kv_length=5)) == [2, 0]


def test_a_longer_mask_is_cut_to_the_keys(device):
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1]], device=device, dtype=torch.bool)
    got = mask_of(mask, q_length=2, kv_length=4, kv_offset=1, q_offset=3)
    assert pads_of(got) == [1]


def test_no_mask_means_none_unless_a_cache_shifts_the_diagonal(device):
    assert mask_of(None, q_length=5, kv_length=5, device=device) is None
    assert mask_of(None, q_length=1, kv_length=5, device=device) is None
    shifted = mask_of(None, q_length=3, kv_length=5, device=device)
    assert pads_of(shifted) == [0, 0]


def test_old_versions_pass_cache_position_instead_of_lengths(device):
    mask = torch.tensor([[0, 1, 1, 1]], device=device)
    got = hf_mask.attention_mask(
        batch_size=1,
        cache_position=torch.arange(4, device=device),
        kv_length=4,
        attention_mask=mask,
    )
    assert pads_of(got) == [1]


@pytest.mark.parametrize("case", ["hole", "mask shorter than the keys", "must be materialised"])
def test_other_patterns_get_the_mask_of_sdpa(case):
    from transformers.masking_utils import sdpa_mask

    mask = torch.tensor([[0, 1, 1, 1, 1]], dtype=torch.bool)
    call = dict(batch_size=1, q_length=5, kv_length=5, q_offset=0, attention_mask=mask)
    if case == "hole":
        call["attention_mask"] = torch.tensor([[1, 0, 0, 1, 1]], dtype=torch.bool)
    elif case == "mask shorter than the keys":
        call.update(q_length=5, kv_length=7, q_offset=2)
    else:
        call["allow_is_causal_skip"] = False
    got = hf_mask.attention_mask(**call)
    assert got.dtype == torch.bool and got.dim() == 4
    assert torch.equal(got, sdpa_mask(**call))


@pytest.mark.parametrize("kv_length", [5, 8])
def test_a_mask_without_values_becomes_leftpad(kv_length):
    """Fake CUDA tensors raise where a value would have to reach the host."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        mask = torch.ones(3, kv_length, dtype=torch.bool, device="cuda")
        got = mask_of(mask, q_length=5, kv_length=kv_length, device="cuda")
        with pytest.raises(Exception, match="(?i)data.dependent|_local_scalar_dense"):
            bool(mask.all())
    assert got.device.type == "cuda" and got.dtype == torch.int32
    assert got.shape == (3, 1, 1, 1)
    meta = mask_of(torch.ones(3, 5, device="meta"), 5, 5, device="meta")
    assert meta.shape == (3, 1, 1, 1) and meta.dtype == torch.int32


def test_without_a_mask_nothing_is_read(device):
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        assert mask_of(None, 5, 5, device=device) is None
        assert mask_of(None, 3, 5, device=device).shape == (2, 1, 1, 1)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


MASKS = [
    [[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]],
    [[1, 1, 1, 0, 0], [0, 0, 1, 1, 0]],
]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_cuda_graph_follows_the_mask():
    """A captured graph computes leftpad again at every replay."""
    mask = torch.tensor(MASKS[0], device="cuda")
    graph, got = cuda_graph(lambda: mask_of(mask, 5, 5, device="cuda"))
    assert got.shape == (2, 1, 1, 1)
    for rows in MASKS:
        mask.copy_(torch.tensor(rows))
        graph.replay()
        assert got.flatten().tolist() == [row.index(1) for row in rows]


def test_right_padding_is_exact_at_every_token(attention_device):
    inputs = batch(attention_device, side="right")
    real = inputs["attention_mask"].bool()
    pair = [gpt2(attention_device, name) for name in _NAMES]
    compare(*pair, inputs, real)
    with torch.no_grad():
        assert pair[0](**inputs).logits.isfinite().all()


@pytest.mark.parametrize("beams", [1, 2])
def test_a_prompt_that_holds_the_pad_token(attention_device, beams):
    """generate masks it: a hole, which no one asked for."""
    prompt = torch.tensor([[5, 3, 7, 8]], device=attention_device)
    settings = dict(max_new_tokens=6, do_sample=False, eos_token_id=None, num_beams=beams)
    answers = []
    for name in _NAMES:
        model = gpt2(attention_device, name, pad_token_id=3)
        answers.append(model.generate(prompt, **settings))
        # The device still answers.
        assert int(prompt.sum()) == 23
    assert torch.equal(*answers)


def with_a_hole(device):
    inputs = batch(device)
    inputs["attention_mask"][0, 4] = 0
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    return {**inputs, "labels": labels}


def test_training_on_holes_equals_sdpa(attention_device):
    inputs = with_a_hole(attention_device)
    grads = []
    for name in _NAMES:
        model = gpt2(attention_device, name).train()
        model(**inputs).loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert_close(*grads, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", ["GPT2", "Llama"])
def test_holes_fail_an_assertion_in_a_compiled_model(name, train):
    """The CPU alone: on a GPU a failed assertion ends the process."""
    model = small(name, "cpu").train(train)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    inputs = with_a_hole("cpu")
    del inputs["labels"]
    with pytest.raises(RuntimeError, match="attention_mask has padding between tokens, which a"):
        compiled(**inputs).logits.sum().backward()


def test_sentences_of_assertions_fit_a_device():
    """CUDA keeps 254 characters, and generated code takes no quotation mark."""
    said = []

    def keep(good, message):
        said.append(message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_assert_async", keep)
        for reason in (mask_ranges.HOLES, mask_ranges.TOO_SHORT, traced_pattern.UNKNOWN):
            mask_ranges.assert_holds(torch.tensor(True), reason)
    assert len(said) == 3
    assert all(len(message) < 255 and '"' not in message for message in said)


# ---- the attention function


class Layer(torch.nn.Module):
    def __init__(self, groups=1, is_causal=True):
        super().__init__()
        self.num_key_value_groups = groups
        self.is_causal = is_causal


def views(device, seqlen_q, seqlen_k, nheads=4, nheads_kv=4, dim=8, batch_size=2):
    """query, key, value as models pass them: transposed views of one projection each."""
    torch.manual_seed(2)
    shapes = [(seqlen_q, nheads), (seqlen_k, nheads_kv), (seqlen_k, nheads_kv)]
    tensors = [torch.randn(batch_size, s, h, dim, device=device) for s, h in shapes]
    return [t.transpose(1, 2).requires_grad_() for t in tensors]


def both(module, qkv, mask, stock_mask=None, **more):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    ours, weights = hf_attention.attention_forward(module, *qkv, mask, **more)
    assert weights is None
    stock, _ = sdpa_attention_forward(module, *qkv, stock_mask, **more)
    return ours, stock


@pytest.mark.parametrize("nheads_kv", [4, 2, 1])
@pytest.mark.parametrize("is_causal", [True, False, None])
def test_equals_sdpa_without_mask(attention_device, nheads_kv, is_causal):
    qkv = views(attention_device, 6, 6, nheads_kv=nheads_kv)
    layer = Layer(groups=4 // nheads_kv)
    ours, stock = both(layer, qkv, None, scaling=0.3, is_causal=is_causal)
    assert ours.shape == (2, 6, 4, 8)
    assert_close(ours, stock, rtol=1e-5, atol=1e-5)
    dout = torch.randn_like(ours)
    ours_grads = torch.autograd.grad(ours, qkv, dout)
    stock_grads = torch.autograd.grad(stock, qkv, dout)
    assert_close(ours_grads, stock_grads, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(6, 6), (1, 6), (3, 6)])
def test_leftpad_equals_the_dense_mask(attention_device, seqlen_q, seqlen_k):
    qkv = views(attention_device, seqlen_q, seqlen_k, nheads_kv=2)
    leftpad = torch.tensor([0, 2], dtype=torch.int32, device=attention_device)
    dense = mask_numbers.Numbers(True, leftpad).dense(seqlen_q, seqlen_k)
    ours, stock = both(Layer(groups=2), qkv, mask_numbers.leftpad_mask(leftpad), dense)
    position = torch.arange(seqlen_q, device=attention_device) + seqlen_k - seqlen_q
    real = position >= leftpad[:, None]
    assert_close(ours[real], stock[real], rtol=1e-5, atol=1e-5)
    assert not ours[~real].any()


@pytest.mark.parametrize(
    "numbers",
    [
        {"causal": True, "leftpad": [0, 2]},
        {"causal": True, "key_start": [[0, 0, 1, 2, 3], [1, 1, 2, 2, 4]], "key_end": [5, 5]},
        {"causal": True, "key_start": [[0, 0, 0, 1, 1]] * 2, "key_end": [6, 7]},
        {"causal": False, "key_end": [5, 3]},
        {"causal": False, "key_start": [[1] * 5, [0] * 5], "key_end": [5, 4]},
        *({"causal": False, "key_end": [5, 5], "window": window} for window in (1, 2, 4)),
    ],
    ids=str,
)
def test_the_dense_mask_of_numbers_means_what_they_do(attention_device, numbers):
    tensors = {
        name: torch.tensor(value, dtype=torch.int32, device=attention_device)
        for name, value in numbers.items()
        if isinstance(value, list)
    }
    numbers = mask_numbers.Numbers(**{**numbers, **tensors})
    seqlen_k = 5 if numbers.key_end is None else int(numbers.key_end.max())
    q, k, v = views(attention_device, 5, seqlen_k)
    ours = torch.ops.torchweld.attention(
        q, k, v, numbers.leftpad, causal=numbers.causal, **numbers.ranges()
    )
    dense = numbers.dense(5, seqlen_k)
    seen = dense.any(-1)[..., None].expand_as(ours)  # a row that sees no key is 0 here
    stock = torch.nn.functional.scaled_dot_product_attention(q, k, v, dense)
    assert_close(ours[seen], stock[seen], rtol=1e-5, atol=1e-5)


def test_float64_on_cuda_runs_sdpa():
    """On fake tensors: no GPU is needed to see that the kernels are not asked."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), pytest.warns(UserWarning, match="no float64; such calls use torch's"):
        q, k, v = (torch.ones(2, 3, 5, 8, dtype=torch.float64, device="cuda") for _ in range(3))
        leftpad = torch.ones(2, dtype=torch.int32, device="cuda")
        out, _ = hf_attention.attention_forward(
            Layer(), q, k, v, mask_numbers.leftpad_mask(leftpad)
        )
    assert out.shape == (2, 5, 3, 8) and out.dtype == torch.float64


def test_no_mask_with_spare_keys_is_aligned_at_the_top_left(attention_device):
    # transformers passes None after the prefill of a static cache.
    qkv = views(attention_device, 4, 9)
    ours, stock = both(Layer(), qkv, None)
    assert_close(ours, stock, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"dropout": 0.5}, "dropout"),
        ({"cache": object()}, "a paged cache is in use"),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_what_the_op_cannot_do_runs_sdpa_with_one_warning(more, said, masked):
    qkv = views("cpu", 6, 6)
    leftpad = torch.tensor([0, 2], dtype=torch.int32) if masked else None
    dense = mask_numbers.Numbers(True, leftpad).dense(6, 6) if masked else None
    mask = mask_numbers.leftpad_mask(leftpad) if masked else None
    outs = []
    with own_warnings() as said_so:
        for _ in range(2):
            torch.manual_seed(3)
            outs.append(hf_attention.attention_forward(Layer(), *qkv, mask, **more)[0])
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    torch.manual_seed(3)
    stock = sdpa_attention_forward(Layer(), *qkv, dense, **more)[0]
    assert torch.equal(outs[0], stock) and torch.equal(outs[1], stock)
    assert len(said_so) == 1 and said in said_so[0]


def test_features_of_no_path_are_refused():
    qkv = views("cpu", 3, 3)
    chosen = torch.zeros(2, 3, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="has no indices .keys chosen for each query."):
        hf_attention.attention_forward(Layer(), *qkv, None, indices=chosen)


# ---- who is causal


class LayerOfItsOwn(torch.nn.Module):
    """Says nothing of is_causal."""


class TextCrossAttention(LayerOfItsOwn):
    pass


@pytest.mark.parametrize(
    ("module", "given", "causal"),
    [
        (Layer(), None, True),
        (Layer(is_causal=False), None, False),
        (Layer(), False, False),
        (Layer(is_causal=False), True, True),
        (LayerOfItsOwn(), None, True),
        (TextCrossAttention(), None, False),
        (TextCrossAttention(), True, True),
    ],
)
@pytest.mark.parametrize("dropout", [0.0, 1e-30])
def test_who_is_causal_without_a_mask(module, given, causal, dropout):
    """With dropout SDPA runs and must get the mask."""
    qkv = views("cpu", 6, 6)
    got, _ = hf_attention.attention_forward(module, *qkv, None, is_causal=given, dropout=dropout)
    want = torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=causal)
    assert_close(got, want.transpose(1, 2), rtol=1e-5, atol=1e-5)


def test_mllama_without_a_cross_attention_mask_equals_eager():
    """Its cross attention has no is_causal, and SDPA takes it for causal."""
    from transformers.models.mllama.configuration_mllama import MllamaTextConfig

    config = tiny_config(
        MllamaTextConfig,
        cross_attention_layers=[1],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        initializer_range=0.3,
    )
    outs = []
    state = None
    for name in ("torchweld", "eager"):
        model = transformers.MllamaForCausalLM._from_config(
            copy.deepcopy(config), attn_implementation=name
        ).eval()
        state = state or model.state_dict()
        model.load_state_dict(state)
        for layer in model.model.layers:
            if hasattr(layer, "cross_attn_attn_gate"):  # 0 in a new model
                torch.nn.init.ones_(layer.cross_attn_attn_gate)
        torch.manual_seed(1)
        inputs = {
            "input_ids": torch.randint(1, VOCAB, (2, 6)),
            "cross_attention_states": torch.randn(2, 6, 32),
        }
        with torch.no_grad():
            outs.append(model(**inputs).logits)
    assert_close(*outs, rtol=1e-4, atol=1e-4)


BOTH_WAYS = {"no mask": None, "ones": (0, 0, 0), "left": (0, 3, 7)}


@pytest.mark.parametrize("name", ["GPT2", "Llama"])
@pytest.mark.parametrize("mask", BOTH_WAYS)
def test_a_decoder_made_bidirectional_by_its_layers(attention_device, name, mask):
    """As LLM2Vec does: each prompt sees itself in both directions, padded or not."""
    pads = BOTH_WAYS[mask]
    ours, stock = (small(name, attention_device, each) for each in _NAMES)
    layers = [m for model in (ours, stock) for m in model.modules() if hasattr(m, "is_causal")]
    assert len(layers) == 4
    for layer in layers:
        layer.is_causal = False
    inputs = batch(attention_device, pads or (0, 0, 0))
    if pads is None:
        del inputs["attention_mask"]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        together = ours(**inputs).logits
        for row, pad in enumerate(pads or (0, 0, 0)):
            alone = stock(input_ids=inputs["input_ids"][row : row + 1, pad:]).logits
            assert_close(together[row : row + 1, pad:], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", ["holes", "window", "static cache", "compiled"])
def test_a_layer_that_is_not_causal_refuses_a_mask_that_says_more(case):
    model = small("Mistral", "cpu", sliding_window=4 if case == "window" else 64)
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    inputs = batch("cpu", (0, 0, 0))
    if case == "holes":
        inputs["attention_mask"][0, 4] = 0
    elif case == "static cache":
        inputs["past_key_values"] = transformers.StaticCache(config=model.config, max_cache_len=16)
    elif case == "compiled":  # where position_ids may hold packed documents
        del inputs["attention_mask"]
        inputs["use_cache"] = False
    call = torch.compile(model, backend="aot_eager") if case == "compiled" else model
    with pytest.raises(Exception, match="set config.is_causal = False instead") as error:
        call(**inputs)
    assert "MistralAttention.is_causal must be True" in str(error.value)


# ---- masks that a caller may give


def test_one_row_of_a_mask_stands_for_the_batch(attention_device):
    ours = small("Llama", attention_device)
    inputs = batch(attention_device, (3, 3, 3))
    want = logits_of(ours, inputs)
    inputs["attention_mask"] = inputs["attention_mask"][:1]
    assert torch.equal(logits_of(ours, inputs), want)


def logits_of(model, inputs):
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(3,), (2, 12), (12,)])
def test_a_mask_of_another_batch_is_refused(dtype, shape):
    inputs = batch("cpu")
    inputs["attention_mask"] = torch.ones(shape, dtype=dtype)
    with pytest.raises(ValueError, match=r"attention_mask must be \(3, positions\), but got"):
        small("Llama", "cpu")(**inputs)


# ---- whole models


def compare(ours, stock, inputs, real=None, warn=0):
    real = slice(None) if real is None else real
    with own_warnings() as said:
        got = [logits_of(ours, inputs)[real] for _ in range(2)]
    want = logits_of(stock, inputs)[real]
    assert_close(got, [want, want], rtol=1e-5, atol=1e-5)
    assert len(said) == warn, said


@pytest.mark.parametrize("name", ["GPT2", "Llama", "Mistral"])
@pytest.mark.parametrize("pads", [(0, 0, 0), (0, 3, 7), (2, 11, 1)])
def test_left_padded_batch_equals_sdpa_and_each_prompt_alone(attention_device, name, pads):
    ours, stock = (small(name, attention_device, each) for each in _NAMES)
    inputs = batch(attention_device, pads)
    real = inputs["attention_mask"].bool()
    compare(ours, stock, inputs, real)
    with torch.no_grad():
        together = ours(**inputs).logits
        for row in range(len(pads)):
            ids = inputs["input_ids"][row : row + 1, pads[row] :]
            alone = ours(input_ids=ids).logits[0]
            assert_close(together[row, pads[row] :], alone, rtol=1e-5, atol=1e-5)


def test_nan_in_padding_never_reaches_a_token(attention_device):
    ours = gpt2(attention_device)
    inputs = batch(attention_device)
    real = inputs["attention_mask"].bool()
    embeds = ours.get_input_embeddings()(inputs.pop("input_ids")).detach()
    with torch.no_grad():
        clean = ours(inputs_embeds=embeds, **inputs).logits
        embeds[~real] = float("nan")
        dirty = ours(inputs_embeds=embeds, **inputs).logits
    assert torch.equal(dirty[real], clean[real])
    assert dirty[~real].isnan().any()


@pytest.mark.parametrize("case", ["hole", "custom 4-D"])
def test_other_masks_give_stock_results_with_one_warning(case):
    inputs = batch("cpu", (0, 0, 0))
    pair = [gpt2("cpu", name) for name in _NAMES]
    if case == "hole":
        inputs["attention_mask"][1, 3:5] = 0
    else:
        free = torch.rand(3, 1, 12, 12, generator=torch.Generator().manual_seed(4)) < 0.5
        inputs["attention_mask"] = free | torch.eye(12, dtype=torch.bool)
    compare(*pair, inputs, warn=1)


def test_a_window_wider_than_the_context_stays_with_torchweld(attention_device):
    inputs = batch(attention_device)
    pair = [small("Mistral", attention_device, name, sliding_window=32) for name in _NAMES]
    compare(*pair, inputs, inputs["attention_mask"].bool())


def test_each_reason_is_said_once():
    ours = gpt2("cpu")
    holes = batch("cpu", (0, 0, 0))
    holes["attention_mask"][0, 4] = 0
    custom = batch("cpu", (0, 0, 0))
    custom["attention_mask"] = torch.ones(3, 1, 12, 12, dtype=torch.bool)
    with own_warnings() as said, torch.no_grad():
        for inputs in (holes, custom, holes, custom):
            ours(**inputs)
    assert len(said) == 2 and said[0] != said[1]


def test_chunked_prefill_with_a_cache_equals_one_pass(attention_device):
    ours = gpt2(attention_device)
    ids = batch(attention_device, (0, 0))["input_ids"]
    with torch.no_grad():
        whole = ours(ids).logits
        first = ours(ids[:, :5], use_cache=True)
        second = ours(ids[:, 5:11], past_key_values=first.past_key_values, use_cache=True)
        third = ours(ids[:, 11:], past_key_values=second.past_key_values, use_cache=True)
    chunks = torch.cat([first.logits, second.logits, third.logits], 1)
    assert_close(chunks, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["GPT2", "Llama"])
@pytest.mark.parametrize("beams", [1, 3])
def test_generate_left_padded_equals_sdpa(attention_device, name, beams):
    inputs = batch(attention_device, (0, 4, 9))
    del inputs["position_ids"]
    settings = dict(max_new_tokens=8, do_sample=False, num_beams=beams, eos_token_id=None)
    models = [small(name, attention_device, each) for each in _NAMES]
    with own_warnings() as said:
        ours, stock = (model.generate(**inputs, **settings) for model in models)
    assert ours.shape == (3, 20)
    assert torch.equal(ours, stock)
    assert said == []


def test_cross_attention_and_encoders(attention_device):
    inputs = batch(attention_device, (0, 0, 0))
    torch.manual_seed(5)
    memory = torch.randn(3, 7, 32, device=attention_device)
    pair = [gpt2(attention_device, name, add_cross_attention=True) for name in _NAMES]
    compare(*pair, {**inputs, "encoder_hidden_states": memory})

    encoder, stock = (
        tiny_model("bert", "BertForMaskedLM", name, is_decoder=False) for name in _NAMES
    )
    stock.load_state_dict(encoder.state_dict())
    pair = [model.to(attention_device).eval() for model in (encoder, stock)]
    compare(*pair, {"input_ids": inputs["input_ids"]})


def test_training_with_dropout_equals_sdpa_with_one_warning():
    inputs = batch("cpu")
    losses = []
    with own_warnings() as said:
        for name in _NAMES:
            model = gpt2("cpu", name, attn_pdrop=0.2, resid_pdrop=0.1).train()
            torch.manual_seed(6)
            losses.append(model(**inputs, labels=inputs["input_ids"]).loss)
    assert torch.equal(*losses)
    assert len(said) == 1


class Calls(TorchDispatchMode):
    """Counts the calls that reach torch's dispatcher."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.name()] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("kind", "name", "changes"),
    [
        ("bert", "BertModel", {"is_decoder": False, "attention_probs_dropout_prob": 0.1}),
        ("llama", "LlamaForCausalLM", {"attention_dropout": 0.1}),
        ("mistral", "MistralForCausalLM", {"attention_dropout": 0.1, "sliding_window": 4}),
    ],
)
def test_a_layer_with_dropout_runs_no_op_that_stock_does_not(kind, name, changes, side, weights):
    """The mask is made once for all layers: in a model with a layer more, no op runs more often."""
    inputs = {**batch("cpu", side=side), "use_cache": False, "output_attentions": weights}
    if kind == "bert":
        del inputs["position_ids"]

    def of_a_layer(implementation):
        counts = []
        for layers in (1, 2):
            model = tiny_model(kind, name, implementation, num_hidden_layers=layers, **changes)
            with Calls() as calls:
                model.train()(**inputs)
            counts.append(calls.names)
        return counts[1] - counts[0]

    assert of_a_layer("torchweld") <= of_a_layer("eager" if weights else "sdpa")


@pytest.mark.parametrize(
    ("kind", "name", "changes"),
    [
        ("bert", "BertModel", {"is_decoder": False, "attention_probs_dropout_prob": 0.1}),
        ("llama", "LlamaForCausalLM", {"attention_dropout": 0.1}),
    ],
)
def test_a_mask_of_ones_is_no_mask_for_sdpa_on_a_gpu(kind, name, changes, device, monkeypatch):
    """Its fastest kernels there have none. On a CPU, a causal mask is one for all layers."""
    model = tiny_model(kind, name, "torchweld", **changes).to(device)
    given, sdpa = [], F.scaled_dot_product_attention

    def watched(*args, **kwargs):
        given.append((kwargs["attn_mask"], kwargs["is_causal"]))
        return sdpa(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    ids = torch.randint(10, (2, 6), device=device)
    model.train()(input_ids=ids, attention_mask=torch.ones_like(ids))
    masks = {id(mask): mask for mask, _ in given}
    assert len(given) == model.config.num_hidden_layers > 1 == len(masks)
    assert (None in masks.values()) == (device == "cuda" or kind == "bert")
    assert all(causal == (mask is None and kind == "llama") for mask, causal in given)


@pytest.mark.parametrize("sided", ["left", "two"])
def test_the_dense_mask_of_a_pass_is_never_that_of_another(sided):
    """The kept mask follows its sources, and is freed with them."""
    pads = [torch.tensor(each, dtype=torch.int32) for each in ([0, 2], [3, 1])]
    first, second = (
        mask_numbers.leftpad_mask(each) if sided == "left" else mask_numbers.bidirectional(6 - each)
        for each in pads
    )
    layer, qkv = Layer(is_causal=sided == "left"), views("cpu", 6, 6)

    def attend(mask, *tensors, **more):
        return hf_attention.attention_forward(layer, *tensors, mask, dropout=1e-30, **more)[0]

    def check(mask, *tensors, **more):
        got = attend(mask, *tensors, **more)
        assert_close(got, attend(mask.clone(), *tensors, **more), rtol=0, atol=0)
        return got

    before = check(first, *qkv)
    check(first, *views("cpu", 4, 6))
    with torch.inference_mode():
        check(first, *qkv)
    if sided == "left":
        check(first, *qkv, is_causal=False)
    first.copy_(second)
    assert not torch.equal(check(first, *qkv), before)
    alive, kept = weakref.ref(first), weakref.ref(vars(first)["torchweld_dense"][1])
    gc.disable()
    try:
        del first
        assert alive() is None and kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("side", ["left", "right"])
def test_compiles_in_one_graph(attention_device, side):
    ours = gpt2(attention_device)
    stock = gpt2(attention_device, "sdpa")
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for pads in ((0, 3, 7), (5, 0, 1)):  # one graph for both
        inputs = batch(attention_device, pads, side=side)
        compare(compiled, stock, inputs, inputs["attention_mask"].bool())
    unmasked = {"input_ids": inputs["input_ids"]}
    compare(torch.compile(ours, fullgraph=True, backend="aot_eager"), stock, unmasked)


# ---- attention weights


def weights_of(model, inputs):
    with torch.no_grad():
        return model(**inputs, output_attentions=True)


@pytest.mark.parametrize("name", ["GPT2", "Llama"])
@pytest.mark.parametrize("mask", ["none", "left padding", "holes", "4-D"])
def test_attention_weights_are_those_of_eager(attention_device, name, mask):
    inputs = batch(attention_device, (0, 0, 0) if mask == "none" else (0, 3, 7))
    if mask == "none":
        inputs = {"input_ids": inputs["input_ids"]}
    elif mask == "holes":
        inputs["attention_mask"][0, 4] = 0
    elif mask == "4-D":
        inputs["attention_mask"] = torch.zeros(3, 1, 12, 12, device=attention_device)
    with pytest.warns(UserWarning, match="attention weights are asked for; such calls use the mod"):
        ours = weights_of(small(name, attention_device), inputs)
    stock = weights_of(small(name, attention_device, "eager"), inputs)
    assert len(ours.attentions) == 2 and ours.attentions[0].shape == (3, 4, 12, 12)
    assert_close(ours.attentions, stock.attentions, rtol=0, atol=0)
    assert_close(ours.logits, stock.logits, rtol=0, atol=0)


def test_attention_weights_with_a_cache_and_while_generating(attention_device):
    inputs = batch(attention_device, (0, 4, 9))
    asked = {"return_dict_in_generate": True, "output_attentions": True}
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, **asked}
    outs = [gpt2(attention_device, name).generate(**inputs, **settings) for name in _EAGER]
    assert torch.equal(outs[0].sequences, outs[1].sequences)
    assert_close(outs[0].attentions, outs[1].attentions, rtol=1e-5, atol=1e-6)


_EAGER = ("torchweld", "eager")


def test_attention_weights_under_compile(attention_device):
    inputs = batch(attention_device)
    model = gpt2(attention_device)
    stock = weights_of(gpt2(attention_device, "eager"), inputs)
    weights_of(model, inputs)  # transformers can't install its hooks while a graph is traced
    ours = weights_of(torch.compile(model, fullgraph=True, backend="aot_eager"), inputs)
    assert_close(ours.attentions, stock.attentions, rtol=1e-5, atol=1e-6)


def test_attention_weights_of_a_layer_without_eager_attention_are_refused():
    with pytest.raises(ValueError, match="Layer has no eager attention of its own to ask"):
        hf_attention.attention_forward(Layer(), *views("cpu", 3, 3), None, output_attentions=True)


# ---- models that are not served: tests/test_hf_models.py has all of them


def test_a_class_that_is_not_served_is_refused_when_it_runs():
    config = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=4)
    model = transformers.BloomForCausalLM(config).eval()
    model.config._attn_implementation_internal = "torchweld"
    ids = batch("cpu", (0,))["input_ids"]
    sentence = 'must be "eager" for a model of BloomConfig, but got "torchweld"; it does not take'
    with pytest.raises(ValueError, match=sentence):
        model(ids)
    compiled = torch.compile(model, backend="aot_eager")
    with pytest.raises(Exception, match=sentence):
        compiled(ids)


def test_a_class_of_a_notebook_is_what_its_parent_is(monkeypatch):
    """There is no source file to look at."""
    import sys
    import types

    notebook = types.ModuleType("notebook")
    monkeypatch.setitem(sys.modules, "notebook", notebook)

    def typed_in(parent):
        return type("Mine", (parent,), {"__module__": "notebook"})

    assert hf_models.refusal(typed_in(transformers.LlamaForCausalLM)) is None
    assert hf_models.refusal(typed_in(transformers.LlamaPreTrainedModel)) is None
    assert "AttentionInterface" in hf_models.refusal(typed_in(transformers.BloomPreTrainedModel))
    unknown = hf_models.refusal(typed_in(transformers.PreTrainedModel))
    assert unknown.endswith("no source file that shows where it takes its attention from")
