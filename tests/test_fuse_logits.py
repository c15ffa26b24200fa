"""torchweld.fuse(model, loss=True) with deferred logits: masked and encoder-decoder models."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

transformers = pytest.importorskip("transformers")

from fused_parts import choose_as_on_a_gpu  # noqa: E402
from test_fuse import Calls  # noqa: E402
from tiny_models import (  # noqa: E402
    VOCAB,
    fuse_keeping_stock,
    saved_and_loaded,
    tiny_config,
    tiny_model,
    with_random_vectors,
)
from torchweld.integrations import fuse, unfuse  # noqa: E402

logits_of = pytest.importorskip("torchweld.integrations.fusion.layers.logits")

MODELS = {
    "bert": ("BertForMaskedLM", "cls.predictions.decoder"),
    "roberta": ("RobertaForMaskedLM", "lm_head.decoder"),
    "distilbert": ("DistilBertForMaskedLM", "vocab_projector"),
    "electra": ("ElectraForMaskedLM", "generator_lm_head"),
    "albert": ("AlbertForMaskedLM", "predictions.decoder"),
    "esm": ("EsmForMaskedLM", "lm_head.decoder"),
    "modernbert": ("ModernBertForMaskedLM", "decoder"),
    "whisper": ("WhisperForConditionalGeneration", "proj_out"),
    "t5": ("T5ForConditionalGeneration", "lm_head"),
    "bart": ("BartForConditionalGeneration", "lm_head"),
    "marian": ("MarianMTModel", "lm_head"),
    "gptj": ("GPTJForCausalLM", "lm_head"),
}
MORE = {
    "modernbert": {"cls_token_id": 1, "sep_token_id": 2},
    "whisper": {"max_source_positions": 16, "decoder_start_token_id": 1},
    "t5": {"decoder_start_token_id": 0},
    "bart": {"decoder_start_token_id": 1},
    "marian": {"decoder_start_token_id": 1, "decoder_vocab_size": VOCAB},
    "gptj": {"is_decoder": True, "rotary_dim": 8},
}


def stock_model(kind, device="cpu", dtype=torch.float32, **changes):
    """A model of two layers in training mode, without dropout, with biases that are not 0."""
    name, _ = MODELS[kind]
    if kind not in transformers.CONFIG_MAPPING or not hasattr(transformers, name):
        pytest.skip("not in this transformers")
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind]().to_dict()
    drops = {key: 0.0 for key, p in config.items() if "drop" in key and isinstance(p, float)}
    more = {"is_decoder": False, **drops, **MORE.get(kind, {}), **changes}
    implementation = "sdpa" if getattr(transformers, name)._supports_sdpa else "eager"
    model = with_random_vectors(tiny_model(kind, name, implementation, **more))
    if hasattr(model, "final_logits_bias"):
        nn.init.normal_(model.final_logits_bias)
    return model.to(device, dtype).train()


def pair(kind, device="cpu", dtype=torch.float32, **changes):
    """A model whose loss alone is fused, and a stock copy."""
    model = stock_model(kind, device, dtype, **changes)
    stock, report = fuse_keeping_stock(model, loss=True, only=[], check=False)
    head = MODELS[kind][1]
    assert report.replaced == [head], report
    assert report.ops[head].startswith(f"linear_cross_entropy ({head} -> loss), run by training")
    return model, stock


def inputs_of(model, ignored=0.3):
    """A batch with labels; a part of them is ignored."""
    device, dtype = model.device, model.dtype
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (2, 12), generator=generator)
    hidden = torch.rand(ids.shape, generator=generator) < ignored
    inputs = {"input_ids": ids, "labels": ids.masked_fill(hidden, -100)}
    if model.main_input_name == "input_features":
        del inputs["input_ids"]
        shape = (2, model.config.num_mel_bins, 32)
        inputs["input_features"] = torch.randn(shape, generator=generator).to(dtype)
    return {name: value.to(device) for name, value in inputs.items()}


def runs(calls):
    return sum(n for name, n in calls.names.items() if "linear_cross_entropy" in name)


def step(model, inputs):
    """The outputs of a training step, all gradients, and how often the op ran."""
    model.zero_grad()
    with Calls() as calls:
        out = model(**inputs)
    out.loss.backward()
    return out, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, runs(calls)


def assert_same_step(model, stock, inputs, fused=True, **close):
    (out, grads, ran), (want, want_grads, none) = (step(each, inputs) for each in (model, stock))
    assert (ran, none) == (int(fused), 0) and type(out) is type(want)
    assert [*out] == [name for name in want if name != "logits" or not fused]
    assert_close(out.loss, want.loss, equal_nan=True, **close)
    assert_close(grads, want_grads, equal_nan=True, **close)
    if not fused:
        assert_close(out.logits, want.logits, **close)
    assert "forward" not in vars(model.get_output_embeddings())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", MODELS)
def test_loss_and_every_gradient_equal_stock(device, kind, dtype):
    if dtype == torch.float64 and device != "cpu":
        pytest.skip("the op has no float64 kernel")
    model, stock = pair(kind, device, dtype)
    inputs = inputs_of(model)
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {}
    for each in (model, copy.deepcopy(model), saved_and_loaded(model)):
        assert_same_step(each, stock, inputs, **close)
    assert unfuse(model) == [MODELS[kind][1]] and type(model) is type(stock)
    assert vars(model).keys() == vars(stock).keys()
    assert_same_step(model, stock, inputs, fused=False, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["bert", "whisper", "marian"])
def test_the_other_parts_are_fused_too(monkeypatch, device, kind):
    choose_as_on_a_gpu(monkeypatch)
    model = stock_model(kind, device)
    stock, report = fuse_keeping_stock(model, loss=True, check=False)
    assert len(report.replaced) > 4
    assert_same_step(model, stock, inputs_of(model), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["bert", "modernbert", "bart"])
def test_all_labels_are_ignored(device, kind):
    model, stock = pair(kind, device)
    inputs = inputs_of(model, ignored=1.0)
    out, grads, ran = step(model, inputs)
    want, want_grads, _ = step(stock, inputs)
    assert ran == 1 and out.loss.isnan() and want.loss.isnan()
    assert grads.keys() == want_grads.keys()


@pytest.mark.parametrize("ignored", [0.5, 1.0])
def test_sparse_prediction(device, ignored):
    """The hidden states of the masked tokens alone reach the head; there may be none."""
    model, stock = pair("modernbert", device, sparse_prediction=True)
    inputs = inputs_of(model, ignored)
    assert_same_step(model, stock, inputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_checkpointing_and_items_in_batch(device, kind):
    model, stock = pair(kind, device)
    for each in (model, stock):
        each.gradient_checkpointing_enable()
    assert_same_step(model, stock, inputs_of(model), rtol=1e-4, atol=1e-5)
    model, stock = pair("modernbert", device)
    inputs = {**inputs_of(model), "num_items_in_batch": 7}
    assert_same_step(model, stock, inputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "modernbert", "bart", "marian"])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_loss_of_16_bits_has_the_dtype_of_stock(device, kind, autocast):
    dtype = torch.float32 if autocast else torch.bfloat16
    model, stock = pair(kind, device, dtype)
    inputs = inputs_of(model)
    with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast):
        (out, grads, ran), (want, want_grads, _) = (step(each, inputs) for each in (model, stock))
    assert ran == 1 and out.loss.dtype == want.loss.dtype
    assert_close(out.loss, want.loss, rtol=2e-2, atol=2e-2)
    for name, grad in grads.items():
        error, size = (grad - want_grads[name]).norm(), want_grads[name].norm()
        assert error <= 0.1 * size + 1e-3, name


@pytest.mark.parametrize("kind", MODELS)
def test_evaluation_and_calls_without_labels_have_logits(kind):
    model, stock = pair(kind)
    inputs = inputs_of(model)
    for training, labelled in ((False, True), (False, False), (True, False)):
        given = {k: v for k, v in inputs.items() if labelled or k != "labels"}
        if not labelled and model.config.is_encoder_decoder:
            given["decoder_input_ids"] = inputs["labels"].clamp_min(0)
        with Calls() as calls:
            out, want = (each.train(training)(**given) for each in (model, stock))
        assert runs(calls) == 0 and torch.equal(out.logits, want.logits)
        assert (out.loss is None) if not labelled else torch.equal(out.loss, want.loss)


def nothing(*_):
    return None


def hook(model):
    model.get_output_embeddings().register_forward_hook(nothing)


def hook_of_the_owner(model):
    model.cls.register_forward_hook(nothing)


def compiled_owner(model):
    model.cls.compile(backend="eager")


def adapter(model):
    head = model.get_output_embeddings()
    model.cls.predictions.decoder = nn.Sequential(head)


def double(model):
    class Double(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model.get_output_embeddings().__class__ = Double


def own_forward(model):
    head = model.get_output_embeddings()
    head.forward = lambda x: 2 * F.linear(x, head.weight, head.bias)


class Codes(torch.Tensor):
    pass


def quantised(model):
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.data.as_subclass(Codes))


NO_LINEAR = "is not torch's Linear without hooks (LoRA, quantised or otherwise replaced)"
INSIDE = "is inside of a module that has hooks or is compiled"
CHANGES = {
    hook: NO_LINEAR,
    hook_of_the_owner: INSIDE,
    compiled_owner: INSIDE,
    adapter: NO_LINEAR,
    double: NO_LINEAR,
    own_forward: NO_LINEAR,
    quantised: ".weight is not a plain parameter (sharded or quantised)",
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_heads_run_stock(change):
    model, stock = pair("bert")
    inputs = inputs_of(model)
    for each in (model, stock):
        change(each)
    with Calls() as calls:
        out, want = (each(**inputs) for each in (model, stock))
    assert runs(calls) == 0
    assert torch.equal(out.logits, want.logits) and torch.equal(out.loss, want.loss)
    reasons = dict(fuse(stock, loss=True, only=[], check=False).skipped)
    path = "cls.predictions.decoder"
    assert reasons == {path: f"{path}{'' if CHANGES[change][0] == '.' else ' '}{CHANGES[change]}"}
    assert type(stock) is transformers.BertForMaskedLM


def test_tuples_and_functional_calls_run_stock():
    model, stock = pair("bert")
    inputs = inputs_of(model)
    with Calls() as calls:
        tuples = [each(**inputs, return_dict=False) for each in (model, stock)]
        parameters = dict(model.named_parameters())

        def loss(parameters):
            return torch.func.functional_call(model, parameters, (), inputs).loss

        grads = torch.func.grad(loss)(parameters)
    assert runs(calls) == 0 and all(isinstance(each, torch.Tensor) for each in tuples[0])
    assert_close(*tuples)
    _, want, _ = step(stock, inputs)
    assert_close({name: grads[name] for name in want}, want)
    embedded = model.get_input_embeddings()(inputs["input_ids"]).detach()
    given = {"labels": inputs["labels"]}
    with Calls() as calls:
        found, want = (
            torch.func.grad(lambda x, each=each: each(inputs_embeds=x, **given).loss)(embedded)
            for each in (model, stock)
        )
    assert runs(calls) == 0
    assert_close(found, want)


def test_a_resized_vocabulary_and_keep():
    model, stock = pair("bert")
    for each in (model, stock):
        torch.manual_seed(2)
        each.resize_token_embeddings(VOCAB + 3)
    assert_same_step(model, stock, inputs_of(model), rtol=1e-4, atol=1e-5)
    fuse(model, loss="nothing", only=[], check=False)
    with Calls() as calls:
        model(**inputs_of(model))
    assert calls.names["torchweld::linear_cross_entropy_forward"] == 1
    assert calls.names["torchweld::linear_cross_entropy_gradients_forward"] == 0


def test_a_model_on_the_meta_device_makes_no_logits():
    model, _ = pair("bert")
    inputs = {name: value.to("meta") for name, value in inputs_of(model).items()}
    with Calls() as calls:
        out = model.to("meta")(**inputs)
    assert out.logits is None and out.loss.shape == () and runs(calls) == 1


def test_an_error_leaves_the_model_as_it_was():
    model, stock = pair("bert")
    inputs = inputs_of(model)
    errors = {
        ValueError: inputs["labels"][:, :5].contiguous(),  # of torch
        RuntimeError: inputs["labels"] + 99,  # of the op
    }
    for error, labels in errors.items():
        with pytest.raises(error):
            model(**{**inputs, "labels": labels})
        assert "forward" not in vars(model.get_output_embeddings())
    assert_same_step(model, stock, inputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_compiled_in_one_graph(kind):
    """A loss that a graph makes of nn.CrossEntropyLoss stays stock."""
    model, stock = pair(kind)
    inputs = inputs_of(model)
    torch._dynamo.reset()
    out = torch.compile(model, backend="aot_eager", fullgraph=True)(**inputs)
    assert (out.logits is None) == (kind == "modernbert")
    assert_close(out.loss, stock(**inputs).loss, rtol=1e-5, atol=1e-5)


def test_a_graph_that_breaks_inside_of_the_step():
    model, stock = pair("modernbert")
    inputs, loss = inputs_of(model), model.loss_function

    def broken(*args, **kwargs):
        torch._dynamo.graph_break()
        return loss(*args, **kwargs)

    model.loss_function = broken
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        assert_close(compiled(**inputs).loss, stock(**inputs).loss, rtol=1e-5, atol=1e-5)
        assert "forward" not in vars(model.decoder)


def test_a_loss_of_its_own_returns_the_logits():
    model, stock = pair("modernbert")
    for each in (model, stock):
        each.loss_function = lambda logits, labels, **_: logits.float().square().mean()
    said = (
        "ModernBertForMaskedLM computes no cross entropy of the result of decoder; such calls use"
    )
    with pytest.warns(UserWarning, match=said):
        model(**inputs_of(model))
    assert_same_step(model, stock, inputs_of(model), fused=False, rtol=1e-4, atol=1e-5)


def test_a_model_that_calls_another_is_listed_once():
    part = tiny_config(transformers.BertConfig, is_decoder=False)
    try:
        made = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(part, part)
    except Exception as error:  # 5.4 refuses a default of its own
        pytest.skip(f"this transformers makes no such config: {type(error).__name__}")
    torch.manual_seed(0)
    model = transformers.EncoderDecoderModel(made)
    model.config.decoder_start_token_id, model.config.pad_token_id = 1, 0
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    stock, report = fuse_keeping_stock(model.train(), loss=True, only=[], check=False)
    head = "decoder.cls.predictions.decoder"
    assert report.replaced == [head] and report.ops[head].count("run by") == 1
    assert_same_step(model, stock, inputs_of(model), rtol=1e-4, atol=1e-5)
    assert unfuse(model) == [head]


def test_models_without_labels_or_cross_entropy_are_listed():
    class WithoutLabels(transformers.BertForMaskedLM):
        def forward(self, input_ids=None):
            return super().forward(input_ids)

    class OtherLoss(transformers.BertForMaskedLM):
        def forward(self, input_ids=None, labels=None, **kwargs):
            out = super().forward(input_ids, **kwargs)
            out["loss"] = out.logits.square().mean()
            return out

    reasons = {
        WithoutLabels: "its arguments are (input_ids): it lacks labels",
        OtherLoss: f"{OtherLoss.__qualname__} calls no cross entropy",
    }
    for cls, reason in reasons.items():
        model = stock_model("bert")
        model.__class__ = cls
        report = fuse(model, loss=True, only=[], check=False)
        assert report.skipped == [("cls.predictions.decoder", reason)]
        assert not any("returns a loss and no logits" in note for note in report.notes)
        assert type(model) is cls


# For each use of logits (2, 6, N): a loss, and whether the op computes it.
N, K = 11, 8


def flat(logits, target, **options):
    return F.cross_entropy(logits.view(-1, N), target.view(-1), **options)


USES = {
    "view": (flat, True),
    "reshape": (lambda z, t: flat(z.reshape((-1, z.size(-1))), t), True),
    "flatten": (lambda z, t: F.cross_entropy(z.flatten(0, 1), t.flatten()), True),
    "module": (lambda z, t: nn.CrossEntropyLoss()(z.view(-1, z.shape[-1]), t.view(-1)), True),
    "sum": (lambda z, t: flat(z, t, reduction="sum"), True),
    "none": (lambda z, t: flat(z, t, reduction="none").square().sum(), True),
    "smooth": (lambda z, t: flat(z, t, label_smoothing=0.2, ignore_index=3), True),
    "casts": (lambda z, t: flat(z.contiguous().to(z.dtype).to(z.device), t), True),
    "float": (lambda z, t: flat(z.float(), t), True),
    "shift": (lambda z, t: flat(z[..., :-1, :].contiguous(), t[:, 1:].contiguous()), True),
    "rows": (lambda z, t: flat(z[:, :-1].contiguous(), t[:, 1:].contiguous()), True),
    "mask": (lambda z, t: flat(z[t > 4], t[t > 4]), True),
    "shift and mask": (
        lambda z, t: flat(z[..., 1:, :][t[:, 1:] > 4], t[:, 1:][t[:, 1:] > 4]),
        True,
    ),
    "scaled": (lambda z, t: flat(0.5 * z / 3, t), True),
    "cap": (lambda z, t: flat(torch.tanh(z / 3.0) * 3.0, t), True),
    "scaled cap": (lambda z, t: flat((2 * z / 3).tanh() * 5, t), True),
    "bias": (lambda z, t: flat(z + BIAS, t), True),
    "two biases": (lambda z, t: flat(BIAS[0] + (z + BIAS), t), True),
    "twice": (lambda z, t: flat(z, t) + flat(z * 2, t), True),
    "no_grad": (lambda z, t: flat(z, t) + no_grad_loss(z, t), None),
    "scaled bias": (lambda z, t: flat(2 * z + BIAS, t), False),
    "matrix": (lambda z, t: flat(z + torch.ones(6, N), t), False),
    "negative": (lambda z, t: flat(z * -1, t), False),
    "two caps": (lambda z, t: flat(z.tanh().tanh(), t), False),
    "weight": (lambda z, t: flat(z, t, weight=torch.arange(N) + 1.0), False),
    "some classes": (
        lambda z, t: F.cross_entropy(z[..., :9].flatten(0, 1), t.flatten() % 9),
        False,
    ),
    "classes in the middle": (lambda z, t: F.cross_entropy(z.transpose(1, 2), t), False),
    "three dims": (lambda z, t: F.cross_entropy(z, z.softmax(1)), False),
    "one row": (lambda z, t: F.cross_entropy(z[0, 0], t[0, 0]), False),
    "probabilities": (lambda z, t: F.cross_entropy(z.view(-1, N), torch.ones(12, N) / N), False),
    "log_softmax": (lambda z, t: F.nll_loss(z.log_softmax(-1).view(-1, N), t.view(-1)), False),
    "in place": (lambda z, t: changed_in_place(z, t), False),
    "item": (lambda z, t: changed_item(z, t), False),
    "operators": (lambda z, t: (1 - z).relu().mean() + (z > 0).sum() + (z**2)[0].mean(), False),
    "in a list": (lambda z, t: torch.cat([z, z], 1).square().mean() + len(z), False),
}
BIAS = torch.linspace(-1, 1, N)[None]


def no_grad_loss(z, t):
    with torch.no_grad():
        return flat(z, t)


def changed_in_place(z, t):
    before, copied = z.view(-1, N), z.float()
    z *= 2
    z.mul_(3)
    return F.cross_entropy(before, t.view(-1)) + flat(copied, t)


def changed_item(z, t):
    z[..., 2] = -5.0
    return flat(z, t)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("bias", [False, True])
def test_every_use_of_logits_is_that_of_stock(use, bias):
    torch.manual_seed(0)
    head = nn.Linear(K, N, bias=bias)
    x, target = torch.randn(2, 6, K), torch.randint(N, (2, 6))
    loss_of, served = USES[use]
    leaves = [*head.parameters()]
    found = []
    for deferred in (False, True):
        hidden = x.clone().requires_grad_()
        made = logits_of.Step(head, "auto")
        with Calls() as calls:
            forward = lambda hidden=hidden: (loss_of(head(hidden), target),)  # noqa: E731
            (loss,) = made.run(forward) if deferred else forward()
        found.append((loss, torch.autograd.grad(loss, [hidden, *leaves])))
        if served is not None:
            assert (runs(calls) > 0) == (deferred and served)
    assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
    assert "forward" not in vars(head)


def test_the_logits_of_a_step_can_be_kept():
    """A model that keeps its logits elsewhere than in its outputs has them after the step too."""
    head, x = nn.Linear(K, N), torch.randn(2, 6, K)
    kept = []

    def forward():
        kept.append(head(x).float())
        return kept[0].shape

    assert logits_of.Step(head, "auto").run(forward) == (2, 6, N)
    assert torch.equal(kept[0] + 0, head(x)) and kept[0].dtype == torch.float32


def test_a_head_that_another_thread_calls_returns_tensors():
    head, x = nn.Linear(K, N), torch.randn(2, 6, K)
    found = []

    def forward():
        thread = threading.Thread(target=lambda: found.append(head(x)))
        thread.start(), thread.join()
        found.append(head(x))

    logits_of.Step(head, "auto").run(forward)
    assert torch.equal(found[0], head(x)) and isinstance(found[1], logits_of.Logits)


@pytest.mark.parametrize("inside", [False, True])
def test_logits_that_leave_autocast_are_those_of_stock(inside):
    """The loss is computed in another mode than the logits, so torch computes both."""
    head, x, target = nn.Linear(K, N), torch.randn(2, 6, K), torch.randint(N, (2, 6))

    def forward():
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            logits = head(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
            return (flat(logits, target),)

    with Calls() as calls:
        (loss,) = logits_of.Step(head, "auto").run(forward)
    assert runs(calls) == 0
    assert_close(loss, forward()[0], rtol=0, atol=0)
