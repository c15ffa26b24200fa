"""attn_implementation="torchweld": which masks reach the op as numbers, and that they are right."""

from __future__ import annotations

import copy
import inspect
import re
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers")

from transformers import masking_utils  # noqa: E402

from tiny_models import VOCAB, batch, tiny_model  # noqa: E402
from torchweld.integrations.attention import context_parallel as hf_context  # noqa: E402
from torchweld.integrations.attention import (  # noqa: E402
    fallback,
    mask_numbers,
    mask_pattern,
    mask_ranges,
    traced_pattern,
)
from torchweld.integrations.attention import forward as hf_attention  # noqa: E402
from torchweld.integrations.attention import mask as hf_mask  # noqa: E402
from torchweld.integrations.attention import models as hf_models  # noqa: E402


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Calls(TorchDispatchMode):
    """Collects the arguments of torchweld's attention, and counts the calls of SDPA."""

    def __init__(self):
        super().__init__()
        self.op, self.sdpa = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if name in ("torchweld::attention", "torchweld::attention_forward"):
            names = [argument.name for argument in func._schema.arguments]
            self.op.append({**dict(zip(names, args, strict=False)), **(kwargs or {})})
        self.sdpa += "scaled_dot_product" in name
        return func(*args, **(kwargs or {}))


def expect(calls, layers):
    """Every layer ran the op."""
    assert len(calls.op) == layers and calls.sdpa == 0
    assert not fallback._warned


def pair(kind, name, device, **changes):
    """A model on torchweld's attention and the same one on eager attention."""
    torch.manual_seed(0)
    stock = tiny_model(kind, name, "eager", **changes).float()
    for parameter in stock.parameters():  # with the usual 0.02 every key counts the same
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    ours = tiny_model(kind, name, "torchweld", **changes).float()
    ours.load_state_dict(stock.state_dict())
    return ours.to(device).eval(), stock.to(device).eval()


def pair_of(case, device, **more):
    """The pair of a case of the tables below, with further changes."""
    kind, name, changes = case
    return pair(kind, name, device, **{**changes, **more})


CHUNKS = ((0, 6), (6, 7), (7, 10), (10, 11), (11, 12))


def in_chunks(model, inputs, cache=None):
    """The logits of the tokens, some at a time, over a cache; every layer runs the op."""
    mask, got = inputs["attention_mask"], []
    for start, end in CHUNKS:
        given = {name: value[:, start:end] for name, value in inputs.items()}
        given["attention_mask"] = mask[:, :end]
        with Calls() as calls:
            out = model(**given, past_key_values=cache, use_cache=True)
        expect(calls, layers_of(model))
        got.append(out.logits)
        cache = out.past_key_values
    return torch.cat(got, 1)


def assert_equal_at(tokens, got, want):
    scale = want[tokens].abs().max().item()
    assert_close(got[tokens], want[tokens], rtol=0, atol=2e-5 * max(scale, 1))


# ---- the pattern of a mask function


def dense(mask, q_length, kv_length):
    return mask_numbers.split(mask, q_length, mask.device).dense(q_length, kv_length)


def chunked(chunk, mask=None):
    pads = torch.zeros(3, dtype=torch.int64)
    if mask is not None:
        pads = (mask.cumsum(1) == 0).sum(1)
    return masking_utils.chunked_causal_mask_function(chunk, pads)


PADDED = torch.tensor([[1] * 9, [0, 0, 1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 0, 0, 0]]).bool()
FUNCTIONS = {
    "causal": lambda mask: masking_utils.causal_mask_function,
    "window": lambda mask: masking_utils.sliding_window_causal_mask_function(3),
    "chunk": lambda mask: chunked(4, mask),
}


def call_of(pattern, mask, q_length, kv_length, q_offset, kv_offset, **more):
    """The arguments of transformers' mask functions."""
    return dict(
        batch_size=3,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=FUNCTIONS[pattern](mask),
        attention_mask=mask,
        device="cpu",
        **more,
    )


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("pattern", FUNCTIONS)
@pytest.mark.parametrize(
    ("q_length", "kv_length", "q_offset", "kv_offset"),
    [
        (9, 9, 0, 0),  # no cache
        (9, 16, torch.tensor(0), 0),  # the prompt in a static cache
        (2, 16, torch.tensor(7), 0),  # the next tokens
        (1, 16, torch.tensor(8), 0),
        (4, 16, 5, 0),
        (3, 6, 6, 3),  # a sliding cache, full
        (2, 6, 5, 2),  # a sliding cache with free places
    ],
)
def test_numbers_equal_the_mask_of_sdpa(padded, pattern, q_length, kv_length, q_offset, kv_offset):
    mask = PADDED[:, : int(q_offset) + q_length] if padded else None
    call = call_of(pattern, mask, q_length, kv_length, q_offset, kv_offset)
    got = hf_mask.attention_mask(**call)
    want = masking_utils.sdpa_mask(**call, allow_is_causal_skip=False)
    if got is None:
        got = mask_numbers.leftpad_mask(torch.zeros(3))
    assert got.dtype == torch.int32
    position = torch.arange(q_length) + int(q_offset)
    tokens = PADDED[:, position] if padded else torch.ones(3, q_length, dtype=torch.bool)
    got = dense(got, q_length, kv_length)
    assert torch.equal(got[:, 0][tokens], want[:, 0][tokens])


TWO_WAY = {
    "full": [[1] * 9] * 3,
    "left": [[1] * 9, [0, 0, *[1] * 7], [0] * 9],
    "right": [[1] * 9, [1] * 7 + [0, 0], [0] * 9],
    "both": [[0, *[1] * 7, 0], [0, 0, *[1] * 7], [1] * 7 + [0, 0]],
}


@pytest.mark.parametrize("q_length", [9, 4, 1])
@pytest.mark.parametrize("padding", TWO_WAY)
def test_numbers_of_a_bidirectional_mask(padding, q_length):
    call = dict(
        batch_size=3,
        q_length=q_length,
        kv_length=9,
        q_offset=0,
        mask_function=masking_utils.bidirectional_mask_function,
        attention_mask=torch.tensor(TWO_WAY[padding]).bool(),
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=True,
        device="cpu",
    )
    got, want = hf_mask.attention_mask(**call), masking_utils.sdpa_mask(**call)
    if padding == "full":
        assert got is None and want is None
    else:
        assert got.dtype == torch.uint32 and torch.equal(dense(got, q_length, 9), want)


def config_of(name="Mistral", **changes):
    # A config without a model has an unknown use: it gets whole masks.
    assert hasattr(transformers, f"{name.removesuffix('Text')}PreTrainedModel")
    config = getattr(transformers, f"{name}Config")(**changes)
    config._attn_implementation = "torchweld"
    return config


@pytest.mark.parametrize("pattern", ["full", "window", "chunk"])
def test_numbers_of_packed_sequences(pattern):
    positions = torch.tensor([[*range(5), *range(6), 0], [*range(12)], [7, 8, 9, *range(9)]])
    if pattern == "chunk":
        config = config_of("Llama4Text", attention_chunk_size=4)
        create = masking_utils.create_chunked_causal_mask
    else:
        config = config_of(sliding_window=4)
        create = masking_utils.create_sliding_window_causal_mask
        if pattern == "full":
            create = masking_utils.create_causal_mask
    call = dict(
        inputs_embeds=torch.zeros(3, 12, 0),
        attention_mask=None,
        past_key_values=None,
        position_ids=positions,
    )
    got = create(config, **call)
    config._attn_implementation = "sdpa"
    want = create(config, **call)
    assert got.shape == (3, 13, 1, 1) and torch.equal(dense(got, 12, 12), want)


def custom(batch_idx, head_idx, q_idx, kv_idx):
    return kv_idx != 2


@pytest.mark.parametrize("combine", ["and_mask_function", "or_mask_function"])
@pytest.mark.parametrize("window", [False, True])
def test_a_function_of_the_caller_is_never_lost(combine, window):
    create = masking_utils.create_causal_mask
    if window:
        create = masking_utils.create_sliding_window_causal_mask
    config = config_of(sliding_window=4)
    call = dict(inputs_embeds=torch.zeros(2, 9, 0), attention_mask=None, past_key_values=None)
    got = create(config, **call, **{combine: custom})
    assert got.torchweld_reason == traced_pattern.UNKNOWN
    config._attn_implementation = "sdpa"
    assert torch.equal(got, create(config, **call, **{combine: custom}))


def test_unknown_functions():
    causal = masking_utils.causal_mask_function
    window = masking_utils.sliding_window_overlay(3)
    for function in (
        custom,
        masking_utils.and_masks(causal),
        masking_utils.and_masks(causal, custom),
        masking_utils.and_masks(window, custom),
        masking_utils.and_masks(window, window, causal),
        masking_utils.or_masks(causal, window),
        masking_utils.and_masks(window, masking_utils.bidirectional_mask_function),
        window,
    ):
        assert mask_pattern.of(function) is None


def test_documents_that_are_no_runs_are_unknown():
    documents = torch.tensor([[0, 0, 1, 1, 0]])
    function = masking_utils.and_masks(
        masking_utils.causal_mask_function, masking_utils.packed_sequence_mask_function(documents)
    )
    call = dict(batch_size=1, q_length=5, kv_length=5, q_offset=0, mask_function=function)
    call.update(config=config_of(), allow_is_causal_skip=False, device="cpu")
    got = hf_mask.attention_mask(**call)
    assert got.torchweld_reason == traced_pattern.UNKNOWN
    assert torch.equal(got, masking_utils.sdpa_mask(**call))


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("hole", mask_ranges.HOLES),
        ("short", mask_ranges.TOO_SHORT),
        ("two-sided window", mask_ranges.TWO_SIDED),
        ("whole", mask_ranges.WHOLE),
    ],
)
def test_what_numbers_can_not_say_goes_to_sdpa(case, reason):
    call = dict(batch_size=3, q_length=2, kv_length=16, q_offset=torch.tensor(7), device="cpu")
    call["attention_mask"] = PADDED
    if case == "hole":
        call["attention_mask"] = PADDED.clone()
        call["attention_mask"][0, 3] = False
    elif case == "short":
        call["attention_mask"] = PADDED[:, :8]
    elif case == "two-sided window":
        window = masking_utils.sliding_window_bidirectional_mask_function(3)
        call.update(mask_function=window, q_length=5, kv_length=9, q_offset=0)
    else:
        call["allow_is_causal_skip"] = False
    got = hf_mask.attention_mask(**call)
    assert got.dtype == torch.bool and got.torchweld_reason == reason


def test_a_mask_for_other_queries_is_refused():
    mask = torch.zeros(2, 4, 1, 1, dtype=torch.int32)
    q = torch.zeros(2, 1, 5, 4)
    with pytest.raises(ValueError, match="must be for 5 queries, but got one for 3"):
        hf_attention.attention_forward(nn.Identity(), q, q, q, mask)


def test_a_layer_of_one_query_takes_its_numbers_without_a_copy():
    key_end, key_start = torch.tensor([5, 4]), torch.tensor([[0], [2]])
    mask = mask_numbers.ranges(key_end, key_start)
    numbers = mask_numbers.split(mask, 1, mask.device)
    storage = mask.untyped_storage().data_ptr()
    for part, want in ((numbers.key_end, key_end), (numbers.key_start, key_start)):
        assert part.is_contiguous() and part.tolist() == want.tolist()
        assert part.untyped_storage().data_ptr() == storage


# ---- whole models


SOFTCAP = {"sliding_window": 4, "attn_logit_softcapping": 2.0}
LOCAL = {
    "Mistral": ("mistral", "MistralForCausalLM", {"sliding_window": 4}),
    "Phi-3": ("phi3", "Phi3ForCausalLM", {"sliding_window": 4}),
    "Gemma 2": ("gemma2", "Gemma2ForCausalLM", SOFTCAP),
    "Gemma 3": ("gemma3_text", "Gemma3ForCausalLM", {"sliding_window": 4}),
    "gpt-oss": ("gpt_oss", "GptOssForCausalLM", {"sliding_window": 4}),
    "Llama 4": ("llama4_text", "Llama4ForCausalLM", {"attention_chunk_size": 4}),
}


@pytest.fixture(params=LOCAL)
def local(request, attention_device):
    return pair_of(LOCAL[request.param], attention_device)


def layers_of(model):
    return model.config.num_hidden_layers


@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_windows_softcap_and_sinks_equal_eager(local, attention_device, padding):
    ours, stock = local
    pads = (0, 0, 0) if padding == "none" else (0, 3, 7)
    inputs = batch(attention_device, pads, side="right" if padding == "right" else "left")
    tokens = inputs["attention_mask"].bool()
    with torch.no_grad(), Calls() as calls:
        got = ours(**inputs, use_cache=False).logits
    expect(calls, layers_of(ours))
    with torch.no_grad():
        assert_equal_at(tokens, got, stock(**inputs, use_cache=False).logits)
    local_call = [call for call in calls.op if call.get("key_start") is not None][0]
    assert local_call["key_end"].tolist() == [12, 12, 12] and local_call["causal"]
    position = torch.arange(12)
    is_chunked = ours.config.model_type == "llama4_text"
    want = position // 4 * 4 if is_chunked else (position - 3).clamp_min(0)
    assert local_call["key_start"][0].tolist() == want.tolist()
    assert all(
        (call.get("softcap") == 2.0) == ("gemma2" in ours.config.model_type) for call in calls.op
    )
    has_sink = [call.get("sink") is not None for call in calls.op]
    assert all(has_sink) if ours.config.model_type == "gpt_oss" else not any(has_sink)


def test_windows_with_a_cache(local, attention_device):
    """The cache of a layer with a window keeps no more than the window."""
    ours, stock = local
    inputs = batch(attention_device, (0, 3, 5))
    del inputs["position_ids"]
    with torch.no_grad():
        want = stock(**inputs, use_cache=False).logits
        assert_equal_at(inputs["attention_mask"].bool(), in_chunks(ours, inputs), want)


def test_a_full_window_is_no_mask(attention_device):
    """One query sees all that a sliding cache holds: plain left padding."""
    ours, stock = pair_of(LOCAL["Mistral"], attention_device)
    inputs = batch(attention_device, (0, 1, 2))
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with torch.no_grad():
        first = ours(ids[:, :11], attention_mask=mask[:, :11], use_cache=True)
        with Calls() as calls:
            got = ours(ids[:, 11:], attention_mask=mask, past_key_values=first.past_key_values)
        want = stock(ids, attention_mask=mask).logits[:, 11:]
    assert len(calls.op) == 2 and calls.sdpa == 0
    assert all(call.get("key_start") is None for call in calls.op)
    assert_close(got.logits, want, rtol=1e-5, atol=1e-5)


POSITIONS = [[0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 0, 1], [*range(12)], [*range(7), *range(5)]]


def packed(device, changes):
    ours, stock = pair("llama", "LlamaForCausalLM", device, **changes)
    ids = batch(device)["input_ids"]
    return ours, stock, {"input_ids": ids, "position_ids": torch.tensor(POSITIONS, device=device)}


@pytest.mark.parametrize("rows", [slice(0, 3), slice(0, 1)])
def test_packed_sequences_equal_eager_and_each_alone(attention_device, rows):
    ours, stock, inputs = packed(attention_device, {})
    inputs = {name: value[rows] for name, value in inputs.items()}
    with torch.no_grad():
        with Calls() as calls:
            got = ours(**inputs, use_cache=False).logits
        expect(calls, 2)
        assert_close(got, stock(**inputs, use_cache=False).logits, rtol=1e-5, atol=1e-5)
        alone = ours(inputs["input_ids"][:1, 3:8], use_cache=False).logits
    assert_close(got[:1, 3:8], alone, rtol=1e-5, atol=1e-5)
    assert calls.op[0]["key_start"][0].tolist() == [0, 0, 0, 3, 3, 3, 3, 3, 8, 8, 10, 10]


def gradients(model, inputs, labels):
    model.zero_grad()
    model(**inputs, labels=labels, use_cache=False).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_equal_gradients(got, want):
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        atol = 2e-5 * gradient.abs().max().item()
        assert_close(got[name], gradient, rtol=1e-4, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def test_gradients_through_packed_sequences(attention_device):
    ours, stock, inputs = packed(attention_device, {})
    with Calls() as calls:
        got = gradients(ours.train(), inputs, inputs["input_ids"])
    expect(calls, 2)
    assert_equal_gradients(got, gradients(stock.train(), inputs, inputs["input_ids"]))


DOCUMENTS = (3, 5, 1, 3)
FLATTENED = {
    "GPT-2": ("gpt2", "GPT2LMHeadModel", {"n_embd": 32, "attn_pdrop": 0.0}),
    "Llama": ("llama", "LlamaForCausalLM", {}),
    "Mistral": ("mistral", "MistralForCausalLM", {"sliding_window": 2}),
    "Gemma 2": LOCAL["Gemma 2"],
    "gpt-oss": LOCAL["gpt-oss"],
}


def flattened(device):
    """The documents, and the batch that transformers makes of them for flash attention."""
    tokens = torch.randint(1, VOCAB, (sum(DOCUMENTS),), generator=torch.Generator().manual_seed(1))
    documents = [{"input_ids": part.tolist()} for part in tokens.split(DOCUMENTS)]
    collate = transformers.DataCollatorWithFlattening(
        return_tensors="pt", return_flash_attn_kwargs=True
    )
    packed = collate(documents)
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in packed.items()}
    return [torch.tensor([d["input_ids"]], device=device) for d in documents], moved


@pytest.mark.parametrize(
    "case", ["cache", "no cache", "ones", "static cache", "static cache, ones", "4-D", "holes"]
)
@pytest.mark.parametrize("model", FLATTENED)
def test_flattened_documents_equal_each_alone(attention_device, model, case):
    ours, stock = pair_of(FLATTENED[model], attention_device)
    documents, packed = flattened(attention_device)
    labels = packed.pop("labels")
    length = labels.shape[1]
    if "ones" in case:
        packed["attention_mask"] = torch.ones_like(labels)
    elif case == "holes":
        packed["attention_mask"] = torch.ones_like(labels)
        packed["attention_mask"][0, [3, 4]] = 0  # the first tokens of a document
    elif case == "4-D":
        if model in ("Mistral", "Gemma 2", "gpt-oss"):
            pytest.skip("such a mask stands for the window too")
        packed["attention_mask"] = torch.ones(
            1, 1, length, length, dtype=torch.bool, device=attention_device
        ).tril()
    if "static" in case:
        packed["past_key_values"] = transformers.StaticCache(ours.config, max_cache_len=20)
    packed["use_cache"] = case != "no cache"
    with torch.no_grad():
        with Calls() as calls:
            got = ours(**packed).logits[0]
        want = [stock(input_ids=each, use_cache=False).logits[0] for each in documents]
    if case in ("4-D", "holes"):
        assert not calls.op
    else:
        expect(calls, layers_of(ours))
    tokens = torch.ones(length, dtype=torch.bool)
    if case == "holes":
        tokens[3:5] = False
        mask = torch.tensor([[0, 0, 1, 1, 1]], device=attention_device)
        with torch.no_grad():
            want[1] = stock(
                input_ids=documents[1],
                attention_mask=mask,
                position_ids=torch.arange(5, device=attention_device)[None],
                use_cache=False,
            ).logits[0]
    assert_equal_at(tokens, got, torch.cat(want))


@pytest.mark.parametrize("dropout", [0.0, 1e-30])
def test_gradients_through_flattened_documents(attention_device, dropout):
    """The op, and SDPA with a dropout, give the gradients of single documents."""
    changes = {"attention_dropout": dropout}
    ours, stock = pair("llama", "LlamaForCausalLM", attention_device, **changes)
    documents, packed = flattened(attention_device)
    labels = packed.pop("labels")
    ours.train().zero_grad()
    ours(**packed, labels=labels).loss.backward()
    count = sum(len(each[0]) - 1 for each in documents)
    for each in documents:
        if each.shape[1] > 1:
            loss = stock(input_ids=each, labels=each, use_cache=False).loss
            (loss * (each.shape[1] - 1) / count).backward()
    got, want = ({name: p.grad for name, p in model.named_parameters()} for model in (ours, stock))
    assert_equal_gradients(got, want)


def test_flattened_documents_of_several_rows(attention_device):
    """The ends are counted through the rows, one behind the other."""
    ours, stock, inputs = packed(attention_device, {})
    starts = (inputs["position_ids"].flatten() == 0).nonzero().flatten()
    ends = torch.cat([starts, starts.new_tensor([36])]).to(torch.int32)
    with torch.no_grad():
        got = ours(**inputs, cu_seq_lens_q=ends, cu_seq_lens_k=ends).logits
        want = stock(**inputs, use_cache=False).logits
    assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_flattened_documents_in_a_compiled_model(attention_device, fullgraph):
    ours, stock = pair("llama", "LlamaForCausalLM", attention_device)
    documents, packed = flattened(attention_device)
    del packed["labels"]
    compiled = torch.compile(ours, fullgraph=fullgraph, backend="aot_eager")
    with torch.no_grad():
        got = compiled(**packed).logits[0]
        want = [stock(input_ids=each, use_cache=False).logits[0] for each in documents]
    assert_close(got, torch.cat(want), rtol=1e-5, atol=1e-5)


def misfit(**changes):
    _, packed = flattened("cpu")
    del packed["labels"]
    return {**packed, **changes}


def ends_of(*values):
    return torch.tensor(values, dtype=torch.int32)


def both_ends(*values):
    return dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), ends_of(*values))


GOOD = ends_of(0, 3, 8, 9, 12)
MISFITS = {
    "one of them": ({"cu_seq_lens_k": None}, "integer tensors .documents . 1,., but got cu_seq_le"),
    "no tensor": ({"cu_seq_lens_q": [0, 12]}, "must be integer tensors"),
    "2-D": ({"cu_seq_lens_q": GOOD[None]}, "must be integer tensors"),
    "other documents": ({"cu_seq_lens_k": ends_of(0, 4, 8, 9, 12)}, "must be equal and"),
    "other counts": ({"cu_seq_lens_k": ends_of(0, 12)}, "must be equal, for as many keys as quer"),
    "too short": (both_ends(0, 4), "split the batch"),
    "not from 0": (both_ends(1, 12), "split the batch"),
    "downwards": (both_ends(0, 9, 3, 12), "split"),
    "rows": ({"input_ids": torch.ones(2, 12, dtype=torch.int64), "position_ids": None}, "2 x 12"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_flattened_documents_that_do_not_fit_are_refused(case):
    changes, sentence = MISFITS[case]
    ours, _ = pair("llama", "LlamaForCausalLM", "cpu")
    with pytest.raises(ValueError, match=sentence) as error:
        ours(**misfit(**changes))
    assert "cu_seq_lens_q" in str(error.value) and "\n" not in str(error.value)


def test_flattened_documents_behind_cached_tokens_are_refused():
    for cache in ("dynamic", "static"):
        ours, _ = pair("llama", "LlamaForCausalLM", "cpu")
        past = transformers.DynamicCache()
        if cache == "static":
            past = transformers.StaticCache(ours.config, max_cache_len=24)
        inputs = misfit(past_key_values=past)
        first = {k: v for k, v in inputs.items() if k in ("input_ids", "past_key_values")}
        ours(**first)
        with pytest.raises(ValueError, match="cu_seq_lens_q and cu_seq_lens_k must be equal"):
            ours(**inputs)


def test_flattened_documents_of_other_attention_are_refused():
    encoder = bert("cpu")[0]
    with pytest.raises(ValueError, match="must be for causal attention, but got it in BertSelf"):
        encoder(input_ids=misfit()["input_ids"], cu_seq_lens_q=GOOD, cu_seq_lens_k=GOOD)
    chunks, _ = pair_of(LOCAL["Llama 4"], "cpu")
    with pytest.raises(ValueError, match="whose config has attention_chunk_size"):
        chunks(**misfit())
    with pytest.raises(ValueError, match="context_parallel must see .*, but cu_seq_lens_q is give"):
        numbers = mask_numbers.Numbers(causal=True)
        hf_context.attention(None, *[None] * 3, numbers, None, None, {"cu_seq_lens_q": GOOD})
    q, k = torch.zeros(1, 2, 12, 8), torch.zeros(1, 2, 7, 8)
    with pytest.raises(ValueError, match="12 queries and 7 keys in Identity; leave them out where"):
        hf_attention.attention_forward(
            nn.Identity(), q, k, k, None, cu_seq_lens_q=GOOD, cu_seq_lens_k=GOOD
        )


@pytest.mark.parametrize("model", ["gpt-oss", "Gemma 2"])
def test_gradients_of_sinks_and_through_softcap(attention_device, model):
    ours, stock = pair_of(LOCAL[model], attention_device, attention_dropout=0.0)
    inputs = batch(attention_device)
    # The first token of a prompt would be predicted from padding.
    counted = inputs["position_ids"] > 0
    labels = inputs["input_ids"].masked_fill(~counted, -100)
    with Calls() as calls:
        got = gradients(ours.train(), inputs, labels)
    expect(calls, layers_of(ours))
    assert_equal_gradients(got, gradients(stock.train(), inputs, labels))
    if model == "gpt-oss":
        sinks = [gradient for name, gradient in got.items() if name.endswith("sinks")]
        assert len(sinks) == 2 and all(gradient.abs().max() > 0 for gradient in sinks)


def bert(device):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
    counts = {"vocab_size": VOCAB, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BertConfig(**sizes, **counts)
    models = []
    for name in ("torchweld", "eager"):
        torch.manual_seed(0)
        make = transformers.BertForMaskedLM._from_config
        models.append(make(copy.deepcopy(config), attn_implementation=name).to(device).eval())
    return models


@pytest.mark.parametrize("side", ["left", "right"])
def test_bert_with_padding_equals_eager(attention_device, side):
    ours, stock = bert(attention_device)
    inputs = batch(attention_device, side=side)
    tokens = inputs["attention_mask"].bool()
    with torch.no_grad():
        with Calls() as calls:
            got = ours(**inputs).logits
        expect(calls, 2)
        assert_close(got[tokens], stock(**inputs).logits[tokens], rtol=1e-5, atol=1e-5)
    call = calls.op[0]
    assert not call.get("causal") and call.get("leftpad") is None
    assert call["key_end"].tolist() == ([12, 12, 12] if side == "left" else [12, 9, 5])
    starts = call.get("key_start")
    if side == "left":
        assert starts.tolist() == [[0] * 12, [3] * 12, [7] * 12]
    else:
        assert starts is None


@pytest.mark.parametrize("side", ["left", "right"])
def test_cross_attention_while_generating_equals_eager(attention_device, side):
    pair_of = pair("bart", "BartForConditionalGeneration", attention_device, is_decoder=False)
    inputs = batch(attention_device, side=side)
    del inputs["position_ids"]
    settings = dict(max_new_tokens=4, do_sample=False, eos_token_id=None)
    with Calls() as calls:
        got = pair_of[0].generate(**inputs, **settings)
    assert torch.equal(got, pair_of[1].generate(**inputs, **settings))
    assert len(calls.op) >= 2 + 4 * 4 and calls.sdpa == 0


@pytest.mark.parametrize("length", [5, 12])
@pytest.mark.parametrize("side", ["left", "right"])
def test_cross_attention_with_padding_equals_eager(attention_device, side, length):
    """Every token of the decoder counts; the decoder may have as many as the encoder."""
    ours, stock = pair("bart", "BartForConditionalGeneration", attention_device, is_decoder=False)
    inputs = batch(attention_device, side=side)
    del inputs["position_ids"]
    ids = torch.randint(1, VOCAB, (3, length), generator=torch.Generator().manual_seed(2))
    inputs["decoder_input_ids"] = ids.to(attention_device)
    with torch.no_grad():
        with Calls() as calls:
            got = ours(**inputs, use_cache=False).logits
        expect(calls, 6)
        want = stock(**inputs, use_cache=False).logits
    assert_close(got, want, rtol=1e-5, atol=1e-5)


# ---- static caches


STATIC = {
    "Llama": ("llama", "LlamaForCausalLM", {}),
    "GPT-2": ("gpt2", "GPT2LMHeadModel", {"n_embd": 32, "attn_pdrop": 0.0}),
    **{name: LOCAL[name] for name in ("Mistral", "Gemma 2", "Gemma 3", "gpt-oss")},
}


@pytest.mark.parametrize("model", STATIC)
@pytest.mark.parametrize("pads", [(0, 0, 0), (0, 3, 5)])
def test_static_caches_equal_eager(attention_device, model, pads):
    ours, stock = pair_of(STATIC[model], attention_device)
    inputs = batch(attention_device, pads)
    cache = transformers.StaticCache(config=ours.config, max_cache_len=16)
    with torch.no_grad():
        want = stock(**inputs, use_cache=False).logits
        assert_equal_at(inputs["attention_mask"].bool(), in_chunks(ours, inputs, cache), want)


GRAPHS = []


def keep_graph(module, inputs):
    GRAPHS.append(module)
    return module.forward


@pytest.mark.parametrize("model", ["Llama", "GPT-2", "Mistral", "Gemma 2", "Gemma 3"])
def test_generate_with_a_static_cache_compiles_one_graph(attention_device, model):
    inputs = batch(attention_device, (0, 4, 9))
    del inputs["position_ids"]
    compiled = transformers.CompileConfig(fullgraph=True, backend=keep_graph, mode=None)
    compiled._compile_all_devices = True
    settings = dict(max_new_tokens=8, do_sample=False, eos_token_id=None)
    settings.update(cache_implementation="static", compile_config=compiled)
    outs, graphs = [], []
    for each in pair_of(STATIC[model], attention_device):
        torch._dynamo.reset()
        GRAPHS.clear()
        outs.append(each.generate(**inputs, **settings))
        graphs.append(list(GRAPHS))
    assert outs[0].shape == (3, 20) and torch.equal(*outs)
    # transformers' own sliding caches count in Python: their first steps are graphs of their own.
    assert len(graphs[0]) == len(graphs[1])
    if model in ("Llama", "GPT-2"):
        assert len(graphs[0]) == 1
    for graph in graphs[0]:
        called = [str(node.target) for node in graph.graph.nodes]
        assert sum("torchweld.attention" in target for target in called) == 2
        assert not any("scaled_dot_product" in target for target in called)
    assert not fallback._warned


@pytest.mark.parametrize("cache", ["static", "dynamic"])
@pytest.mark.parametrize("model", ["GPT-2", "Llama", "Mistral", "gpt-oss"])
def test_generate_equals_eager(attention_device, model, cache):
    inputs = batch(attention_device, (0, 4, 9))
    del inputs["position_ids"]
    settings = dict(max_new_tokens=8, do_sample=False, eos_token_id=None, disable_compile=True)
    if cache == "static":
        settings["cache_implementation"] = "static"
    ours, stock = pair_of(STATIC[model], attention_device)
    got = ours.generate(**inputs, **settings)
    assert not fallback._warned
    assert torch.equal(got, stock.generate(**inputs, **settings))


@pytest.mark.parametrize("new_tokens", [1, 2])
def test_a_static_cache_that_the_prompt_fills(attention_device, new_tokens):
    """Its mask is plain left padding, and goes through the mask function twice."""
    ours, stock = pair("mistral", "MistralForCausalLM", attention_device, sliding_window=64)
    inputs = batch(attention_device, (0, 4, 9))
    settings = dict(max_new_tokens=new_tokens, do_sample=False, eos_token_id=None)
    settings.update(disable_compile=True, cache_implementation="static")
    outs = [model.generate(**inputs, **settings) for model in (ours, stock)]
    assert torch.equal(*outs)


@pytest.mark.parametrize("model", ["Llama", "Mistral"])
def test_a_compiled_model_with_a_static_cache(attention_device, model):
    """Without generate: the mask is made inside of the graph."""
    ours, stock = pair_of(STATIC[model], attention_device)
    ids = batch(attention_device)["input_ids"]
    cache = transformers.StaticCache(config=ours.config, max_cache_len=16)
    compiled = torch.compile(ours, fullgraph=True, backend=keep_graph)
    GRAPHS.clear()
    with torch.no_grad():
        got = [ours(ids[:, :8], past_key_values=cache).logits]
        for at in range(8, 12):
            got.append(compiled(ids[:, at : at + 1], past_key_values=cache).logits)
        want = stock(ids, use_cache=False).logits
    assert_close(torch.cat(got, 1), want, rtol=1e-5, atol=1e-5)
    assert not fallback._warned
    targets = [str(node.target) for graph in GRAPHS for node in graph.graph.nodes]
    assert sum("torchweld.attention" in target for target in targets) == 2 * len(GRAPHS)
    if model == "Llama":
        assert len(GRAPHS) == 1


# ---- other paths


@pytest.mark.parametrize("case", ["holes", "4-D", "dropout"])
@pytest.mark.parametrize("model", ["Gemma 2", "gpt-oss"])
def test_softcap_and_sinks_with_other_masks_run_eager(attention_device, model, case):
    ours, stock = pair_of(LOCAL[model], attention_device, attention_dropout=0.3)
    inputs = batch(attention_device, (0, 0, 0))
    if case == "holes":
        inputs["attention_mask"][1, 3:5] = 0
    elif case == "4-D":
        visible = torch.ones(12, 12, dtype=torch.bool, device=attention_device).tril()
        visible[5:, 1] = False
        hidden = torch.finfo(torch.float32).min
        dense_mask = torch.zeros(3, 1, 12, 12, device=attention_device)
        inputs["attention_mask"] = dense_mask.masked_fill(~visible, hidden)
    tokens = torch.ones(3, 12, dtype=torch.bool)
    if case == "holes":
        tokens = inputs["attention_mask"].bool()
    outs = []
    for each in (ours, stock):
        each.train(case == "dropout")
        torch.manual_seed(3)
        with torch.no_grad(), Calls() as calls:
            outs.append(each(**inputs, use_cache=False).logits)
        assert not calls.op and not calls.sdpa
    assert_equal_at(tokens, *outs)
    assert len(fallback._warned) == 1


def test_a_warning_says_which_attention_runs_instead(attention_device):
    ours, _ = pair_of(LOCAL["gpt-oss"], attention_device)
    inputs = batch(attention_device, (0, 0, 0))
    inputs["attention_mask"][1, 3:5] = 0
    sentence = "padding between tokens; such calls use the model's eager attention instead of torch"
    with pytest.warns(UserWarning, match=sentence), torch.no_grad():
        ours(**inputs, use_cache=False)


def test_attention_weights_of_windows_and_sinks(local, attention_device):
    ours, stock = local
    inputs = batch(attention_device)
    with torch.no_grad():
        got = ours(**inputs, output_attentions=True, use_cache=False)
        want = stock(**inputs, output_attentions=True, use_cache=False)
    tokens = inputs["attention_mask"].bool()
    for a, b in zip(got.attentions, want.attentions, strict=True):
        at = tokens[:, None].expand(-1, a.shape[1], -1)
        assert_close(a[at], b[at], rtol=1e-5, atol=1e-6)


def test_which_classes_without_sdpa_are_served():
    served = [transformers.GptOssForCausalLM]
    if not transformers.Gemma2ForCausalLM._supports_sdpa:
        served.append(transformers.Gemma2ForCausalLM)
    for cls in served:
        assert not cls._supports_sdpa and hf_models.refusal(cls) is None
    # The model adds keys to those that its mask is for.
    if hasattr(transformers, "DeepseekV4ForCausalLM"):
        refused = hf_models.refusal(transformers.DeepseekV4ForCausalLM)
        assert refused.endswith('it does not support "sdpa", which torchweld falls back to')


def test_models_that_change_masks_get_whole_ones():
    changing = 0
    names = ("T5Gemma2ForConditionalGeneration", "DogeForCausalLM", "FalconForCausalLM")
    for name in (*names, "LlamaForCausalLM"):
        cls = getattr(transformers, name)  # loads the model's module
        source = inspect.getsource(sys.modules[cls.__module__])
        changes = re.search("allow_is_(causal|bidirectional)_skip", source) is not None
        assert hf_models.wants_whole_masks(cls.config_class) == changes
        changing += changes
    assert changing > 0 and not changes  # Llama does not
    assert hf_models.wants_whole_masks(transformers.PreTrainedConfig)  # no model is known


def test_fuse_serves_softcap_and_sinks(attention_device):
    import torchweld

    for name in ("Gemma 2", "gpt-oss"):
        _, model = pair_of(LOCAL[name], attention_device)
        report = torchweld.fuse(model)
        assert report.replaced and report.max_abs_diff < 1e-4
        torchweld.unfuse(model)
        assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_left_padding_is_reported_at_once_and_nothing_else(dtype):
    def pads(rows, kv_length=4, kv_offset=0, last=4):
        mask = torch.tensor(rows, dtype=dtype)
        call = mask_ranges.Call(len(rows), 1, kv_length, last - 1, kv_offset, mask, "cpu")
        return mask_ranges._pads_of_suffixes(call, None if isinstance(last, torch.Tensor) else last)

    padded = [[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]]
    for last in (4, torch.tensor(4)):
        assert pads(padded, last=last).tolist() == [2, 0, 3]
        assert pads(padded, kv_length=9, last=last).tolist() == [2, 0, 3]
        assert pads(padded, kv_offset=1, last=last).tolist() == [1, 0, 2]
        assert pads(padded, kv_length=3, last=last) is None
        for other in ([1, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 1, 0]):
            assert pads([*padded, other], last=last) is None
    for last in (3, 5, torch.tensor(3), torch.tensor(5)):
        assert pads(padded, last=last) is None
    for last in torch.arange(1, 40):  # no position makes up for tokens that are not there
        for end in ([1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]):
            assert pads([end, end], last=last) is None
            assert pads([end, end], kv_offset=1, last=last) is None
    assert pads([[], []], last=0) is None
    call = mask_ranges.Call(0, 1, 4, None, 0, torch.ones(0, 4, dtype=dtype), "cpu")
    assert mask_ranges._pads_of_suffixes(call, 4) is None
