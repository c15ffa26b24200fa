"""Generation by fused decoders gives the tokens of stock, with every cache and search."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")

import torchweld  # noqa: E402
from numerics import assert_same_bits  # noqa: E402
from test_fuse import Calls  # noqa: E402
from test_fuse_families import LAYERS, NAMES, RECOGNISED, tiny  # noqa: E402
from tiny_models import batch, fuse_keeping_stock, static_cache_in_graphs  # noqa: E402

# Greedy search ends at no token, so that every call makes as many.
OPTIONS = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def pair(name, device):
    model = tiny(name, device).eval()
    stock, _ = fuse_keeping_stock(model)
    return model, stock


def prompts(device, pads=(0, 3, 7)):
    inputs = batch(device, pads)
    del inputs["position_ids"]
    return inputs


@pytest.mark.parametrize("name", [*NAMES, *RECOGNISED])
@pytest.mark.parametrize("beams", [1, 3])
def test_left_padded_prompts(device, name, beams):
    model, stock = pair(name, device)
    options = {**OPTIONS, "num_beams": beams}
    want = stock.generate(**prompts(device), **options)
    for cache in ("dynamic", "static"):
        options.update(cache_implementation=cache, disable_compile=True)
        with Calls() as calls:
            assert torch.equal(model.generate(**prompts(device), **options), want), cache
        assert calls.names["torchweld::attention"] == LAYERS * OPTIONS["max_new_tokens"]
        # Each step projects one token, and the heads of its query, key and value need no
        # transposes.
        projecting = 0 if name == "Olmo2" else LAYERS
        assert calls.names["torchweld::rms_norm_linears"] == projecting * OPTIONS["max_new_tokens"]


@needs_gpu
@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Qwen3"])
@pytest.mark.parametrize("cache", ["offloaded", "offloaded_static"])
def test_caches_on_the_host(monkeypatch, name, cache):
    """transformers reads a copy on the host before it is complete, where others use the GPU too."""
    for move in ("offload", "prefetch"):
        stock_move = getattr(transformers.Cache, move)

        def complete(*args, stock_move=stock_move, **kwargs):
            torch.cuda.synchronize()
            stock_move(*args, **kwargs)
            torch.cuda.synchronize()

        monkeypatch.setattr(transformers.Cache, move, complete)
    model, stock = pair(name, "cuda")
    want = stock.generate(**prompts("cuda"), **OPTIONS)
    options = {**OPTIONS, "cache_implementation": cache, "disable_compile": True}
    assert torch.equal(model.generate(**prompts("cuda"), **options), want)


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_a_prompt_in_a_batch_and_alone(device, name):
    model, _ = pair(name, device)
    inputs = prompts(device)
    together = model.generate(**inputs, **OPTIONS)
    for row, mask in enumerate(inputs["attention_mask"]):
        alone = inputs["input_ids"][row : row + 1, mask.bool()]
        found = model.generate(input_ids=alone, **OPTIONS)[0, alone.shape[1] :]
        assert torch.equal(together[row, len(mask) :], found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mixtral"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_steps_of_the_mode_have_the_bits_of_one_forward(device, dtype, name, cache):
    """The prompts are padded on the left; one forward is over all sequences, one over one."""
    model = tiny(name, device).eval().to(dtype)
    report = torchweld.fuse(model, batch_invariant=True)
    assert any("batch_invariant" in note for note in report.notes)
    inputs = prompts(device)
    options = {"cache_implementation": cache, "disable_compile": True, **OPTIONS}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    out = model.generate(**inputs, **options)
    steps = torch.stack(out.logits, 1)
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(out.sequences[:, -8:])], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for rows in (slice(None), slice(1, 2)):
        whole = model(out.sequences[rows], attention_mask=mask[rows], position_ids=positions[rows])
        assert_same_bits(whole.logits[:, -9:-1].float(), steps[rows], f"{name}, {rows}")
    assert not torchweld.is_batch_invariant()
    assert torchweld.unfuse(model) and not model._forward_pre_hooks and not model._forward_hooks


def test_a_step_with_a_static_cache_compiles_in_one_graph(device):
    model, stock = pair("Llama", device)
    graphs, settings = static_cache_in_graphs()
    torch._dynamo.reset()
    ours = model.generate(**prompts(device), **OPTIONS, **settings)
    assert torch.equal(ours, stock.generate(**prompts(device), **OPTIONS))
    assert len(graphs) == 1
    for op in ("gated_mlp", "attention"):
        assert sum(f"torchweld.{op}" in target for target in graphs[0]) == LAYERS


def test_samples_with_the_same_seed(device):
    model, stock = pair("Llama", device)
    drawn = []
    for each in (model, stock):
        torch.manual_seed(3)
        options = {**OPTIONS, "do_sample": True, "top_k": 5, "num_return_sequences": 2}
        drawn.append(each.generate(**prompts(device), **options))
    assert torch.equal(*drawn)
