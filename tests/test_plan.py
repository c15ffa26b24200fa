"""`make plan`: the arithmetic against models and sums made another way, and its refusals."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import plan
from commands import run_command
from plan import MODELS, Machine, Sizes, layout, layouts, read_sizes
from test_quantize import LLAMA

SMALL = Sizes(2, 32, 4, 2, 8, 48, True, 61, False)
MACHINE = Machine(latency=1e-9)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "llama-tied"])
def test_sizes_count_the_parameters_of_the_model(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    if kind == "gpt2":
        config = transformers.GPT2Config(n_layer=3, n_embd=48, n_head=4, n_positions=20)
        config.architectures, cls = None, transformers.GPT2LMHeadModel
    else:
        config = transformers.LlamaConfig(**LLAMA, tie_word_embeddings=kind == "llama-tied")
        cls = transformers.LlamaForCausalLM
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = cls(config)
    model.tie_weights()
    assert read_sizes(str(tmp_path)).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name, billions", [("gpt2", 0.124), ("llama-3.1-8b", 8.03)])
def test_named_models_have_their_published_sizes(name, billions):
    assert MODELS[name].parameters / 1e9 == pytest.approx(billions, rel=5e-3)


def test_one_gpu_moves_nothing():
    alone = layout(SMALL, MACHINE, 1, 1, 1, 64, 4, True)
    assert set(alone.moved.values()) == {0} and alone.share == alone.share_without_overlap == 0
    states = alone.memory["parameters"] + alone.memory["gradients"] + alone.memory["optimizer"]
    assert states == 16 * SMALL.parameters


def test_every_dim_divides_what_it_shares():
    def of(**dims):
        return layout(SMALL, MACHINE, **{"fsdp": 1, "cp": 1, "tp": 1, **dims}, **sizes)

    sizes = {"seqlen": 64, "batch": 4, "recompute": True}
    alone = of()
    for dims in ({"fsdp": 2}, {"cp": 2}, {"tp": 2}):
        half = of(**dims)
        for name in ("parameters", "gradients", "optimizer"):
            assert half.memory[name] * 2 == alone.memory[name]
        assert half.seconds["compute"] * 2 == pytest.approx(alone.seconds["compute"])
    assert of(cp=2).memory["activations"] * 2 == alone.memory["activations"]
    assert of(fsdp=2).memory["activations"] == alone.memory["activations"]
    assert of(tp=2).memory["activations"] < alone.memory["activations"]


def test_one_pass_of_several_sequences_sends_parameters_once():
    def of(micro_batch, **dims):
        given = {"fsdp": 1, "cp": 1, "tp": 1, **dims}
        return layout(
            SMALL, MACHINE, **given, seqlen=64, batch=8, recompute=True, micro_batch=micro_batch
        )

    one, four = of(1, fsdp=2), of(4, fsdp=2)
    assert one.moved["fsdp"] == 4 * four.moved["fsdp"]
    assert one.memory["activations"] * 4 == four.memory["activations"]
    assert one.seconds["compute"] == pytest.approx(four.seconds["compute"])
    for dims, what in (({"tp": 2}, "tp"), ({"cp": 2}, "cp")):
        one, four = of(1, **dims), of(4, **dims)
        assert one.moved[what] == four.moved[what]
        assert one.seconds[what] > four.seconds[what]  # fewer collectives


def test_kept_activations_cost_memory_and_save_compute():
    kept, again = (layout(SMALL, MACHINE, 1, 1, 1, 64, 4, each) for each in (False, True))
    assert kept.memory["activations"] > again.memory["activations"]
    assert again.seconds["compute"] == pytest.approx(kept.seconds["compute"] * 8 / 6)


def test_time_in_communication_follows_the_bandwidth_that_is_used():
    machine = replace(MACHINE, latency=0.0)
    for tp, used, other in ((8, "link", "network"), (16, "network", "link")):
        sizes = replace(SMALL, heads=16, kv_heads=16)
        seconds = {
            name: layout(
                sizes,
                replace(machine, **{name: 10 * getattr(machine, name)}),
                1,
                1,
                tp,
                64,
                1,
                True,
            ).seconds["tp"]
            for name in ("link", "network")
        }
        before = layout(sizes, machine, 1, 1, tp, 64, 1, True).seconds["tp"]
        assert seconds[other] == before
        assert seconds[used] < before


def test_what_fits_comes_first_and_the_faster_of_it():
    sizes = MODELS["llama-3.1-70b"]
    found = layouts(sizes, Machine(memory=30e9), 64, 8192, 64, True)
    fits = [x.total <= 30e9 for x in found]
    assert fits == sorted(fits, reverse=True) and any(fits) and not all(fits)
    fast = [x.tokens for x in found[: sum(fits)]]
    assert fast == sorted(fast, reverse=True)
    assert all(x.fsdp * x.cp * x.tp == 64 and x.tp <= 8 for x in found)


def test_command_tells_what_is_assumed(capsys):
    code, out, _ = run_command(
        capsys,
        *["--model", "llama-3.1-8b", "--gpus", "16", "--link", "300", "--network", "40"],
        main=plan.main,
    )
    assert code == 0
    assert "A model, not a measurement" in out
    assert "Assumed, measure and give your own: --memory, --tflops, --latency." in out


def test_command_as_json(capsys):
    code, out, _ = run_command(
        capsys, *["--model", "gpt2", "--gpus", "4", "--seqlen", "512", "--json"], main=plan.main
    )
    rows = json.loads(out)["layouts"]
    assert code == 0 and {(r["fsdp"], r["cp"], r["tp"]) for r in rows} >= {(4, 1, 1), (1, 1, 4)}
    code, out, _ = run_command(
        capsys,
        *["--model", "gpt2", "--gpus", "4", "--seqlen", "512", "--tp", "2", "--json"],
        main=plan.main,
    )
    assert {r["tp"] for r in json.loads(out)["layouts"]} == {2}


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--model gpt3 --gpus 8", "--model must be one of gpt2, gpt2-xl, llama-3.1-8b"),
        ("--model gpt2 --gpus 0", "argument --gpus: must be at least 1, but got '0'"),
        ("--model gpt2 --gpus 8 --link -1", "argument --link: must be above 0, but got '-1'"),
        (
            "--model gpt2 --gpus 7 --batch 3 --seqlen 512",
            "no layout of 7 GPUs divides 12 key heads",
        ),
    ],
)
def test_bad_arguments(capsys, line, sentence):
    code, out, error = run_command(capsys, *line.split(), main=plan.main)
    assert code == 2 and out == ""
    assert error.count("\n") == 1 and sentence in error


def test_another_kind_of_model_is_refused(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    code, _, error = run_command(capsys, "--model", str(tmp_path), "--gpus", "8", main=plan.main)
    assert (
        code == 2 and "must be a gpt2, llama, mistral, qwen2 or qwen3, but got 'mixtral'" in error
    )
