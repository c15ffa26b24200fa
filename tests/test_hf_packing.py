"""Packed documents through transformers, compiled: each document gives its result alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.testing import assert_close

transformers = pytest.importorskip("transformers")

from torch._dynamo.backends.debugging import aot_eager  # noqa: E402

from cuda_graphs import cuda_graph  # noqa: E402
from test_hf_attention import Layer, views  # noqa: E402
from test_hf_masks import (  # noqa: E402
    FLATTENED,
    assert_equal_gradients,
    ends_of,
    flattened,
    misfit,
    pair,
    pair_of,
)
from tiny_models import VOCAB  # noqa: E402
from torchweld.integrations.attention import forward as hf_attention  # noqa: E402


def compiled(model, run=lambda graph, inputs: graph.forward, **options):
    """The model in one graph, and the graphs that are made of it."""
    graphs = []

    def keep(graph, example_inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return run(graph, example_inputs)

    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend=keep, **options), graphs


def expect_one_graph(graphs, layers):
    assert len(graphs) == 1
    assert sum("torchweld.attention" in target for target in graphs[0]) == layers
    assert not any("scaled_dot_product" in target for target in graphs[0])


def loss_of_each_alone(stock, documents):
    """The mean over the tokens of all documents, whose gradients it leaves in the parameters."""
    count = sum(document.shape[1] - 1 for document in documents)
    total = 0.0
    for document in documents:
        if document.shape[1] > 1:
            loss = stock(input_ids=document, labels=document, use_cache=False).loss
            loss = loss * (document.shape[1] - 1) / count
            loss.backward()
            total += loss.item()
    return total


CASES = {
    "positions alone": ("Llama", {"use_cache": False}),
    "positions alone, windows": ("Mistral", {"use_cache": False}),
    "cu_seq_lens, cache": ("Mistral", {}),
    "cu_seq_lens, ones": ("Llama", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_compiled_step_equals_each_document_alone(attention_device, case):
    name, more = CASES[case]
    ours, stock = pair_of(FLATTENED[name], attention_device)
    documents, packed = flattened(attention_device)
    if case.startswith("positions"):
        packed = {key: packed[key] for key in ("input_ids", "position_ids", "labels")}
    elif case.endswith("ones"):
        packed["attention_mask"] = torch.ones_like(packed["input_ids"])
    model, graphs = compiled(ours.train(), aot_eager)
    out = model(**packed, **more)
    expect_one_graph(graphs, ours.config.num_hidden_layers)
    out.loss.backward()
    want = [stock(input_ids=each, use_cache=False).logits[0] for each in documents]
    assert_close(out.logits[0], torch.cat(want), rtol=1e-4, atol=1e-5)
    assert_close(out.loss.item(), loss_of_each_alone(stock.train(), documents), rtol=1e-5, atol=0)
    got, want = ({n: p.grad for n, p in each.named_parameters()} for each in (ours, stock))
    assert_equal_gradients(got, want)


def multipack(documents, pad, counts_padding):
    """A row as Axolotl's collator makes it: numbers of documents as the mask, and padding."""
    lengths = [document.shape[1] for document in documents]
    numbers = [torch.full((n,), i + 1) for i, n in enumerate(lengths)]
    positions = [torch.arange(n) for n in lengths]
    padding = torch.arange(pad) if counts_padding else torch.zeros(pad, dtype=torch.int64)
    return {
        "input_ids": torch.cat([*(d[0].cpu() for d in documents), torch.zeros(pad).long()]),
        "attention_mask": torch.cat([*numbers, torch.zeros(pad, dtype=torch.int64)]),
        "position_ids": torch.cat([*positions, padding]),
        "labels": torch.cat([*(d[0].cpu() for d in documents), torch.full((pad,), -100)]),
    }


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("counts_padding", [False, True])
def test_rows_of_axolotl_without_their_mask(attention_device, counts_padding, how):
    """Two rows of documents; the padding behind one of them changes nothing."""
    ours, stock = pair_of(FLATTENED["Llama"], attention_device)
    generator = torch.Generator().manual_seed(2)
    rows = [
        [torch.randint(1, VOCAB, (1, n), generator=generator) for n in lengths]
        for lengths in ((3, 5, 4), (6, 2))
    ]
    made = [multipack(row, 12 - sum(d.shape[1] for d in row), counts_padding) for row in rows]
    batch = {
        name: torch.stack([row[name] for row in made]).to(attention_device) for name in made[0]
    }
    del batch["attention_mask"]
    model = ours if how == "eager" else compiled(ours)[0]
    with torch.no_grad():
        got = model(**batch, use_cache=False).logits
        for logits, row in zip(got, rows, strict=True):
            want = [stock(input_ids=d.to(attention_device)).logits[0] for d in row]
            want = torch.cat(want)
            assert_close(logits[: len(want)], want, rtol=1e-4, atol=1e-5)
            assert logits.isfinite().all()


class Ranges(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts how often key ranges are computed from cumulative lengths."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.torchweld._key_ranges.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("use_cache", [False, True])
def test_ends_are_read_once_in_a_forward_pass(attention_device, windows, use_cache):
    """Once for all layers, and again in the next pass, whatever has become of the ends."""
    ours, _ = pair_of(FLATTENED["Mistral" if windows else "Llama"], attention_device)
    _, packed = flattened(attention_device)
    several = packed["cu_seq_lens_q"]
    one = torch.where(several > 0, 12, 0)
    positions = torch.arange(12, device=attention_device)[None]

    def logits(ends, context=torch.no_grad, model=ours):
        with context(), Ranges() as ranges:
            out = model(
                input_ids=packed["input_ids"],
                position_ids=positions,
                cu_seq_lens_q=ends,
                cu_seq_lens_k=ends,
                use_cache=use_cache,
            ).logits
        assert ranges.count == 1
        return out

    want = {ends: logits(ends) for ends in (several, one)}
    assert not torch.allclose(*want.values())
    assert_close(logits(several, torch.inference_mode), want[several], rtol=0, atol=0)
    ends = several.clone()
    assert_close(logits(ends), want[several], rtol=0, atol=0)
    ends.copy_(one)
    assert_close(logits(ends), want[one], rtol=0, atol=0)
    ends.data.copy_(several)  # the version of ends does not tell
    assert_close(logits(ends), want[several], rtol=0, atol=0)
    ends.data.copy_(one)
    assert_close(logits(ends, model=copy.deepcopy(ours)), want[one], rtol=0, atol=0)


def test_ends_that_are_written_in_place_are_read_again(attention_device):
    """A next layer, for which no mask was made, must not get the documents of the one before."""
    qkv = views(attention_device, 6, 6, batch_size=1)

    def attend(ends, ends_k):
        given = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends_k}
        return hf_attention.attention_forward(Layer(), *qkv, None, **given)[0]

    before, after = (ends_of(0, middle, 6).to(attention_device) for middle in (2, 3))
    ends, ends_k = before.clone(), before.clone()
    want = attend(after, after)
    assert not torch.allclose(attend(ends, ends_k), want)
    for written in (ends, ends_k) if attention_device == "cpu" else ():
        attend(ends, ends_k)
        written.copy_(after)
        with pytest.raises(ValueError, match="must be equal"):  # on a GPU an assertion fails
            attend(ends, ends_k)
        written.copy_(before)
    attend(ends, ends_k)
    ends.copy_(after), ends_k.copy_(after)
    assert torch.equal(attend(ends, ends_k), want)


def test_a_recomputed_layer_reads_the_ends_again(attention_device):
    """Gradient checkpointing runs each layer twice."""
    ours, stock = pair_of(FLATTENED["Llama"], attention_device)
    documents, packed = flattened(attention_device)
    ours.train().gradient_checkpointing_enable({"use_reentrant": False})
    ours(**packed, use_cache=False).loss.backward()
    loss_of_each_alone(stock.train(), documents)
    got, want = ({n: p.grad for n, p in each.named_parameters()} for each in (ours, stock))
    assert_equal_gradients(got, want)


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_left_padding_that_the_ends_count_equals_eager(attention_device, how):
    """The first document begins with padding."""
    ours, stock = pair("llama", "LlamaForCausalLM", attention_device)
    documents, packed = flattened(attention_device)
    del packed["labels"]
    packed["attention_mask"] = torch.ones_like(packed["input_ids"])
    packed["attention_mask"][0, :2] = 0
    packed["position_ids"] = packed["position_ids"].clone()
    packed["position_ids"][0, :3] = 0
    model = ours if how == "eager" else compiled(ours)[0]
    with torch.no_grad():
        got = model(**packed).logits[0, 2:]
        want = [stock(input_ids=each, use_cache=False).logits[0] for each in documents[1:]]
        want.insert(0, stock(input_ids=documents[0][:, 2:], use_cache=False).logits[0])
    assert_close(got, torch.cat(want), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_ends_that_leave_out_left_padding_are_refused(how):
    ours, _ = pair("llama", "LlamaForCausalLM", "cpu")
    inputs = misfit(attention_mask=torch.ones(1, 12, dtype=torch.int64))
    inputs["attention_mask"][0, :2] = 0
    inputs["cu_seq_lens_q"] = inputs["cu_seq_lens_k"] = ends_of(0, 6, 10)  # of ten tokens
    model = ours if how == "eager" else compiled(ours)[0]
    with pytest.raises((ValueError, RuntimeError), match="split the batch's (1 x 12 )?tokens"):
        model(**inputs)


def packed_batch(step, length=24):
    """A row of documents whose number and lengths differ from step to step."""
    generator = torch.Generator().manual_seed(step)
    ends = torch.randperm(length - 1, generator=generator)[: 1 + step % 7].sort().values + 1
    lengths = torch.diff(ends, prepend=ends.new_zeros(1), append=ends.new_tensor([length]))
    tokens = torch.randint(1, VOCAB, (length,), generator=generator)
    collate = transformers.DataCollatorWithFlattening(
        return_tensors="pt", return_flash_attn_kwargs=True
    )
    parts = tokens.split(lengths.tolist())
    return collate([{"input_ids": part.tolist()} for part in parts]), parts


def test_a_compiled_step_serves_every_packing():
    """One graph for twenty batches of other documents."""
    ours, stock = pair("llama", "LlamaForCausalLM", "cpu")
    model, graphs = compiled(ours.train())
    for step in range(20):
        inputs, parts = packed_batch(step)
        for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
            torch._dynamo.mark_dynamic(inputs[name], 0)
        loss = model(**inputs, use_cache=False).loss
        loss.backward()
        documents = [part[None] for part in parts]
        if step in (0, 19):
            assert_close(loss.item(), loss_of_each_alone(stock, documents), rtol=1e-5, atol=0)
    expect_one_graph(graphs, 2)


@pytest.mark.parametrize("ends", [True, False])
def test_one_graph_serves_rows_of_other_lengths(ends):
    ours, stock = pair("llama", "LlamaForCausalLM", "cpu")
    model, graphs = compiled(ours.train(), dynamic=True)
    first = None
    for step in range(6):
        inputs, parts = packed_batch(step, length=24 + 3 * step)
        if not ends:
            inputs = {k: v for k, v in inputs.items() if not k.startswith(("cu_", "max_"))}
        loss = model(**inputs, use_cache=False).loss
        loss.backward()
        # torch may compile the first graph anew, with the module's floats as constants.
        first = first or graphs[-1]
    documents = [part[None] for part in parts]
    assert_close(loss.item(), loss_of_each_alone(stock, documents), rtol=1e-5, atol=0)
    assert graphs[-1] is first
    expect_one_graph(graphs[-1:], 2)


def test_a_step_compiled_for_one_document_serves_others():
    ours, stock = pair("llama", "LlamaForCausalLM", "cpu")
    model, graphs = compiled(ours)
    tokens = torch.randint(1, VOCAB, (1, 24), generator=torch.Generator().manual_seed(3))
    for lengths in ([24], [10, 14], [1, 20, 3]):
        ends = ends_of(0, *torch.tensor(lengths).cumsum(0).tolist())
        torch._dynamo.mark_dynamic(ends, 0)
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        with torch.no_grad():
            got = model(
                input_ids=tokens,
                position_ids=positions,
                cu_seq_lens_q=ends,
                cu_seq_lens_k=ends,
                use_cache=False,
            ).logits[0]
            want = [stock(input_ids=part).logits[0] for part in tokens.split(lengths, 1)]
        assert_close(got, torch.cat(want), rtol=1e-4, atol=1e-5)
    expect_one_graph(graphs, 2)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def on_gpu(step, documents):
    """A batch on the GPU, whose ends are filled up by empty documents."""
    inputs, _ = packed_batch(step)
    last = inputs["cu_seq_lens_q"][-1:].expand(documents + 1 - len(inputs["cu_seq_lens_q"]))
    ends = torch.cat([inputs["cu_seq_lens_q"], last])
    inputs["cu_seq_lens_q"] = inputs["cu_seq_lens_k"] = ends
    return {name: t.cuda() for name, t in inputs.items() if isinstance(t, torch.Tensor)}


@needs_gpu
def test_one_captured_step_serves_every_packing():
    """Loss and gradients of a CUDA graph, replayed with other documents."""
    ours, _ = pair("llama", "LlamaForCausalLM", "cuda")
    ours.train()
    parameters = list(ours.parameters())
    static = on_gpu(0, 8)

    def step():
        loss = ours(**static, use_cache=False).loss
        return [loss, *torch.autograd.grad(loss, parameters)]

    graph, results = cuda_graph(step)
    for other in range(1, 7):
        for name, t in on_gpu(other, 8).items():
            static[name].copy_(t)
        graph.replay()
        assert_close(results, step(), rtol=1e-5, atol=1e-6)


@needs_gpu
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_the_host_waits_for_nothing(how):
    """A training step with cu_seq_lens, after the first one."""
    ours, _ = pair("llama", "LlamaForCausalLM", "cuda")
    ours.train()
    model = ours if how == "eager" else compiled(ours)[0]
    batches = [on_gpu(step, 8) for step in range(3)]
    for batch in batches:
        if how == "eager":  # transformers itself reads the positions of a model without a cache
            del batch["position_ids"]
    model(**batches[0], use_cache=how == "eager").loss.backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches[1:]:
            model(**batch, use_cache=how == "eager").loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
