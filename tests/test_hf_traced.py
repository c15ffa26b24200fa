"""Masks inside of compiled and exported graphs: their numbers, and the assertions on the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.testing import AotEagerAndRecordGraphs

transformers = pytest.importorskip("transformers")

from transformers import masking_utils  # noqa: E402

from test_hf_masks import (  # noqa: E402
    FUNCTIONS,
    LOCAL,
    PADDED,
    STATIC,
    TWO_WAY,
    Calls,
    assert_equal_at,
    assert_equal_gradients,
    bert,
    call_of,
    config_of,
    custom,
    dense,
    expect,
    pair,
)
from tiny_models import batch  # noqa: E402
from torchweld.integrations.attention import mask as hf_mask  # noqa: E402
from torchweld.integrations.attention import models as hf_models  # noqa: E402


def traced(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="eager")


# ---- the numbers of a mask


@pytest.mark.parametrize("pattern", ["full", "window", "chunk"])
def test_numbers_of_packed_sequences(pattern):
    positions = torch.tensor([[*range(5), *range(6), 0], [*range(12)], [7, 8, 9, *range(9)]])
    config = config_of(sliding_window=4)
    create = masking_utils.create_causal_mask
    if pattern == "chunk":
        config = config_of("Llama4Text", attention_chunk_size=4)
        create = masking_utils.create_chunked_causal_mask
    elif pattern == "window":
        create = masking_utils.create_sliding_window_causal_mask

    def mask(position_ids):
        return create(
            config,
            inputs_embeds=torch.zeros(3, 12, 0),
            attention_mask=None,
            past_key_values=None,
            position_ids=position_ids,
        )

    got = traced(mask)(positions)
    config._attn_implementation = "sdpa"
    assert torch.equal(dense(got, 12, 12), mask(positions))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("pattern", FUNCTIONS)
@pytest.mark.parametrize(
    ("q_length", "kv_length", "q_offset", "kv_offset"),
    [
        (9, 9, 0, 0),  # no cache
        (2, 16, torch.tensor(7), 0),  # a static cache
        (3, 6, 6, 3),  # a sliding cache
    ],
)
def test_numbers_equal_the_mask_of_sdpa(padded, pattern, q_length, kv_length, q_offset, kv_offset):
    config = config_of("Llama4Text", attention_chunk_size=4) if pattern == "chunk" else None
    sizes = {"causal": None, "window": 3, "chunk": 4}

    more = {"local_size": sizes[pattern], "config": config}

    def call(mask, offset):
        return call_of(pattern, mask, q_length, kv_length, offset, kv_offset, **more)

    mask = PADDED[:, : int(q_offset) + q_length] if padded else None
    got = traced(lambda *args: hf_mask.attention_mask(**call(*args)))(mask, q_offset)
    want = masking_utils.sdpa_mask(**{**call(mask, q_offset), "allow_is_causal_skip": False})
    position = torch.arange(q_length) + int(q_offset)
    tokens = PADDED[:, position] if padded else torch.ones(3, q_length, dtype=torch.bool)
    if got is None:
        assert pattern == "causal" and q_length == kv_length and not padded
        return
    assert torch.equal(dense(got, q_length, kv_length)[:, 0][tokens], want[:, 0][tokens])


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("padding", TWO_WAY)
def test_numbers_of_a_bidirectional_mask(padding, window):
    function = masking_utils.bidirectional_mask_function
    if window is not None:
        function = masking_utils.sliding_window_bidirectional_mask_function(window)
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True}
    call = dict(batch_size=3, q_length=9, kv_length=9, q_offset=0, mask_function=function, **skips)
    call.update(local_size=window, device="cpu")
    mask = torch.tensor(TWO_WAY[padding]).bool()

    def numbers(mask):
        return hf_mask.attention_mask(**call, attention_mask=mask)

    want = masking_utils.sdpa_mask(
        **{**call, "allow_is_bidirectional_skip": False}, attention_mask=mask
    )
    for got in (numbers(mask), traced(numbers)(mask)):
        if got is None:
            assert padding == "full" and window is None
        else:
            assert got.dtype == torch.uint32 and torch.equal(dense(got, 9, 9), want)


HOLE = torch.tensor([[1, 1, 0, 1, 1]], dtype=torch.bool)


@pytest.mark.parametrize("two_sided", [False, True])
def test_a_hole_fails_an_assertion(two_sided):
    function = masking_utils.causal_mask_function
    if two_sided:
        function = masking_utils.bidirectional_mask_function

    def mask(tokens):
        return hf_mask.attention_mask(
            batch_size=1,
            q_length=5,
            kv_length=5,
            q_offset=0,
            attention_mask=tokens,
            mask_function=function,
            allow_is_causal_skip=not two_sided,
            allow_is_bidirectional_skip=two_sided,
        )

    compiled = traced(mask)
    compiled(torch.ones_like(HOLE))
    with pytest.raises(RuntimeError, match="attention_mask has padding between tokens"):
        compiled(HOLE)


def test_a_function_that_is_no_range_of_keys_fails_an_assertion():
    """transformers says that no function of the caller is in it, and it holds one."""
    call = dict(batch_size=2, q_length=9, kv_length=9, q_offset=0, config=config_of())

    def mask(keys):
        function = masking_utils.and_masks(
            masking_utils.causal_mask_function, lambda b, h, q, kv: keys[b, kv]
        )
        return hf_mask.attention_mask(**call, mask_function=function, allow_is_causal_skip=False)

    compiled = traced(mask)
    visible = torch.ones(2, 9, dtype=torch.bool)
    compiled(visible)
    visible[1, 3] = False  # the rows behind it see the keys on both sides
    with pytest.raises(RuntimeError, match="the mask has a function that torchweld does not know"):
        compiled(visible)


def test_a_function_of_the_caller_keeps_its_mask():
    config = config_of()

    def mask(embeds):
        return masking_utils.create_causal_mask(
            config,
            inputs_embeds=embeds,
            attention_mask=None,
            past_key_values=None,
            and_mask_function=custom,
        )

    embeds = torch.zeros(2, 9, 0)
    got = traced(mask)(embeds)
    config._attn_implementation = "sdpa"
    assert torch.equal(got, mask(embeds))


# ---- whole models


needs_modernbert = pytest.mark.skipif(
    hf_models.unsupported_reason(transformers.ModernBertForMaskedLM) is not None,
    reason="ModernBERT takes its attention from elsewhere in this transformers",
)


@needs_modernbert
@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_windows_to_both_sides_equal_eager(attention_device, side, how):
    changes = {"is_decoder": False, "local_attention": 8}
    ours, stock = pair("modernbert", "ModernBertForMaskedLM", attention_device, **changes)
    inputs = batch(attention_device, (0, 0, 0) if side == "none" else (0, 3, 7), side=side)
    del inputs["position_ids"]
    tokens = inputs["attention_mask"].bool()
    if side == "none":
        del inputs["attention_mask"]
    with torch.no_grad():
        if how == "eager":
            with Calls() as calls:
                got = ours(**inputs).logits
            expect(calls, 2)
            arguments = calls.op
        else:  # under a dispatch mode, such as Calls, torch.compile would trace nothing
            graphs = AotEagerAndRecordGraphs()
            got = torch.compile(ours, fullgraph=True, backend=graphs)(**inputs).logits
            op = torch.ops.torchweld.attention.default
            nodes = graphs.fw_graphs[0].graph.find_nodes(op="call_function", target=op)
            arguments = [node.kwargs for node in nodes]
        assert_equal_at(tokens, got, stock(**inputs).logits)
    assert sorted(call.get("window") or 0 for call in arguments) == [0, 5]


@needs_modernbert
def test_gradients_through_windows_to_both_sides(attention_device):
    changes = {"is_decoder": False, "local_attention": 8}
    ours, stock = pair("modernbert", "ModernBertForMaskedLM", attention_device, **changes)
    inputs = batch(attention_device, side="right")
    del inputs["position_ids"]
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    gradients = []
    for model in (ours, stock):
        model.train()(**inputs, labels=labels).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert_equal_gradients(*gradients)


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        given = {"attention_mask": attention_mask, "position_ids": position_ids}
        given = {name: value for name, value in given.items() if value is not None}
        return self.model(input_ids=input_ids, **given).logits


EXPORTED = {
    "GPT-2": (STATIC["GPT-2"], ("attention_mask",)),
    "Llama": (("llama", "LlamaForCausalLM", {}), ("attention_mask", "position_ids")),
    "Mistral": (LOCAL["Mistral"], ("attention_mask",)),
    "Mistral, packed": (LOCAL["Mistral"], ("position_ids",)),
    "BERT": (None, ("attention_mask",)),
}


@pytest.mark.parametrize("model", EXPORTED)
def test_an_exported_model_runs_the_op(model):
    described, names = EXPORTED[model]
    ours, stock = bert("cpu") if described is None else pair(*described[:2], "cpu", **described[2])
    for each in (ours, stock):
        each.config.use_cache = False

    def inputs(length, pads):
        values = batch("cpu", pads, length, side="left" if described else "right")
        if model.endswith("packed"):
            values["position_ids"] %= 5
        return {name: values[name] for name in ("input_ids", *names)}

    dynamic = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=64)}
    example = inputs(12, (0, 3, 7))
    program = torch.export.export(
        Logits(ours), (), example, dynamic_shapes=dict.fromkeys(example, dynamic)
    )
    targets = [str(node.target) for node in program.graph.nodes]
    assert sum("torchweld.attention" in target for target in targets) == 2
    assert not any("scaled_dot_product" in target for target in targets)
    other = inputs(9, (2, 0))
    tokens = other.get("attention_mask", torch.ones(2, 9)).bool()
    with torch.no_grad():
        assert_equal_at(tokens, program.module()(**other), stock(**other).logits)
    if "attention_mask" in names:
        other["attention_mask"][1, 4] = 0
        with pytest.raises(RuntimeError, match="attention_mask has padding between tokens"):
            program.module()(**other)
