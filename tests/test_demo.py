"""`make demo`: a tiny run from end to end, bad input, Ctrl-C, the tokenizer's cache."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from demo import generate, kinds, main, memory, model, report, text, train  # noqa: E402
from demo.options import UsageError, add_arguments, resolve  # noqa: E402
from demo.report import Results, write  # noqa: E402

TINY = ["--device", "cpu", "--layers", "1", "--dim", "32", "--heads", "2"]
TINY += ["--context", "24", "--batch", "2", "--vocab", "300"]
PNG = b"\x89PNG\r\n\x1a\n"
# Enough words for 300 tokens and some thousand tokens of text.
PROSE = "\n".join(f"line {i}: the {i * i} hares of {i % 7} hills ran home" for i in range(600))


@pytest.fixture(autouse=True)
def own_places(tmp_path, monkeypatch):
    """Caches and outputs under tmp_path, offline switches undone afterwards."""
    monkeypatch.setenv("TORCHWELD_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "1")
    # torch.compile takes 20 s to start; it has its own test below.
    monkeypatch.setattr(main, "_CPU_COMPILE_SECONDS", 0.0)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def prose(tmp_path):
    path = tmp_path / "prose.txt"
    path.write_text(PROSE, encoding="utf-8")
    return path


def demo(*argv):
    """Exit status of the demo with tiny sizes."""
    try:
        return main.main([*TINY, *map(str, argv)])
    except SystemExit as stop:
        return stop.code


def options(*argv):
    parser = ArgumentParser()
    add_arguments(parser)
    return resolve(parser.parse_args([*TINY, *map(str, argv)]))


def prepare(*argv):
    chosen = options(*argv)
    tokens = model.make_tokens(chosen, text.read_text(chosen.text), None)
    return chosen, tokens, model.make_pair(chosen, tokens, None)


def test_end_to_end(tmp_path, capsys, prose):
    out = tmp_path / "new" / "out"
    assert demo("--steps", 34, "--out", out, "--text", prose) == 0
    printed = capsys.readouterr().out
    assert sorted(p.name for p in out.iterdir()) == ["demo.json", "demo.png"]
    assert (out / "demo.png").read_bytes().startswith(PNG)

    found = json.loads((out / "demo.json").read_text())
    assert found["interrupted"] is False
    assert found["checks"] == {"losses agree": True, "tokens equal": True}
    assert found["fuse"]["skipped"] == []
    assert len(found["fuse"]["replaced"]) == 4
    assert found["model"]["title"] == "GPT-2"
    training = found["training"]
    assert training["steps"] == 34
    assert training["loss_difference"]["checked_steps"] == 32
    assert training["loss_difference"]["max_relative"] <= 1e-5
    assert training["loss_difference"]["weights_max_absolute"] <= 5e-3
    for name in ("stock", "fused"):
        variant = training[name]
        assert len(variant["losses"]) == 34
        assert variant["losses"][-1] < variant["losses"][0]
        assert variant["tokens_per_second"] > 0
        # Weights and AdamW state alone are three times the weights.
        assert variant["peak_bytes"] > 3 * 4 * found["model"]["parameters"]

    completions = found["generation"]["completions"]
    assert len(completions) >= 4
    lengths = {c["prompt_tokens"] for c in completions}
    assert len(lengths) == len(completions)
    assert {c["pads"] for c in completions} == {max(lengths) - n for n in lengths}

    rows = {row["op"]: row for row in found["ops"]["rows"]}
    assert len(rows) == 10
    for row in rows.values():
        assert row["ours_us"] > 0 and row["eager_us"] > 0 and row["compile_us"] is None
        assert row["error"] <= 4 * row["eager_error"] + 1e-6
        assert row["op"] in printed
    assert "torch.compile was left out" in found["ops"]["compile_note"]
    assert printed.count("PASS") == 2


@pytest.mark.parametrize(("kind", "title", "modules"), [("llama", "Llama", 7), ("moe", "OLMoE", 9)])
def test_a_decoder_and_its_checkpoint(tmp_path, capsys, prose, kind, title, modules):
    assert demo("--model", kind, "--steps", 33, "--out", "out", "--text", prose) == 0
    found = json.loads(Path("out/demo.json").read_text())
    assert found["model"]["title"] == title and found["options"]["model"] == kind
    assert found["checks"] == {"losses agree": True, "tokens equal": True}
    assert found["fuse"]["skipped"] == [] and len(found["fuse"]["replaced"]) == modules
    for name in ("stock", "fused"):
        losses = found["training"][name]["losses"]
        assert losses[-1] < losses[0]
    rows = found["ops"]["rows"]
    assert rows[0]["op"] == ("gated_mlp" if kind == "llama" else "experts")
    assert len(rows) == 7
    for row in rows:
        assert row["ours_us"] > 0 and row["eager_us"] > 0
        assert row["error"] <= 4 * row["eager_error"] + 1e-6
    assert f"{title}, 0." in capsys.readouterr().out

    _, _, pair = prepare("--model", kind, "--text", prose)
    pair.stock.save_pretrained(tmp_path / "checkpoint")
    chosen = options("--text", prose)
    chosen.checkpoint = tmp_path / "checkpoint"
    config = model.read_config(chosen)
    assert chosen.model == kind
    tokens = model.make_tokens(chosen, text.read_text(chosen.text), config)
    again = model.make_pair(chosen, tokens, config)
    assert type(again.stock) is type(pair.stock)
    for a, b in zip(again.stock.parameters(), pair.stock.parameters(), strict=True):
        assert torch.equal(a, b)


def test_standard_library_bfloat16_and_a_checkpoint(tmp_path, capsys):
    chosen, _, pair = prepare("--steps", 3, "--context", 16)
    checkpoint = tmp_path / "checkpoint"
    pair.stock.save_pretrained(checkpoint)
    argv = ["--device", "cpu", "--context", "16", "--batch", "2", "--vocab", "300"]
    argv += ["--steps", "3", "--dtype", "bf16", "--out", "out"]
    assert main.main([*argv, "--checkpoint", str(checkpoint)]) == 0
    found = json.loads(Path("out/demo.json").read_text())
    assert found["model"]["from"] == "checkpoint"
    assert found["model"]["parameters"] == pair.parameters
    assert found["options"]["dtype"] == "bfloat16"
    assert found["text"]["source"].startswith("standard library of Python")
    assert found["text"]["bytes"] > 3e6
    assert found["training"]["loss_difference"]["rtol"] == 1e-2
    assert found["text"]["tokenizer"] == "cached"
    # The other way round: a directory with its own tokenizer.
    tokenizer, _ = text.train_tokenizer(text.read_text([]), 300)
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    chosen.checkpoint = checkpoint
    config = model.read_config(chosen)
    assert model.make_tokens(chosen, text.read_text([]), config).origin == "checkpoint"
    capsys.readouterr()


def bad_inputs(tmp_path):
    files = {
        "empty.txt": b"",
        "blank.txt": b" \n\t\n",
        "binary.txt": b"abc\0def" * 100,
        "latin1.txt": "gr\u00fcn".encode("latin-1") * 100,
        "short.txt": b"two words",
        "prose.txt": PROSE.encode(),
        "model/config.json": b'{"model_type": "mistral"}',
        "no_weights/config.json": b'{"model_type": "gpt2"}',
        "no_json/config.json": b"[",
        "damaged/config.json": b'{"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_layer": 1}',
        "damaged/model.safetensors": b"rubbish",
        "bad_config/config.json": b'{"model_type": "gpt2", "n_embd": "wide"}',
        "bad_config/model.safetensors": b"rubbish",
        "nothing/readme": b"x",
    }
    for name, data in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)


CHECKPOINT = ["--device", "cpu", "--context", "16", "--steps", "1", "--checkpoint"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--steps", "0"], "--steps"),
        (["--steps", "many"], "'many'"),
        (["--steps", "-3"], "'-3'"),
        (["--layers", "0"], "--layers"),
        (["--batch", "1.5"], "'1.5'"),
        (["--context", "8"], "from 16"),
        (["--vocab", "256"], "from 257"),
        (["--seed", "-1"], "--seed"),
        (["--dtype", "int8"], "'int8'"),
        (["--device", "tpu"], "'tpu'"),
        (["--device", "cuda:99"], "cuda:99"),
        (["--heads", "5"], "--dim 32 and --heads 5"),
        (["--model", "llama", "--dim", "6"], "an even multiple"),
        (["--model", "bert"], "'bert'"),
        (["--colour", "red"], "--colour"),
        (["--text"], "--text"),
        (["--text", "absent.txt"], "absent.txt does not exist"),
        (["--text", "nothing"], "nothing is not a file"),
        (["--text", "empty.txt"], "empty.txt is empty"),
        (["--text", "blank.txt"], "blank.txt is empty"),
        (["--text", "prose.txt", "binary.txt"], "binary.txt is binary"),
        (["--text", "latin1.txt"], "latin1.txt is binary or not UTF-8"),
        (["--text", "short.txt"], "more than --context = 24 tokens"),
        (["--out", "prose.txt"], "prose.txt is a file"),
        (["--out", "prose.txt/below"], "can't be written"),
        (["--model", "gpt2", "--checkpoint", "nothing"], "--model can't be given"),
        (["--checkpoint", "nothing"], "--layers can't be given"),
        ([*CHECKPOINT, "absent"], "absent is not a directory"),
        ([*CHECKPOINT, "prose.txt"], "not a directory"),
        ([*CHECKPOINT, "nothing"], "has no config.json"),
        ([*CHECKPOINT, "no_json"], "no JSON"),
        ([*CHECKPOINT, "model"], "'mistral'"),
        ([*CHECKPOINT, "no_weights"], "has no weights"),
        ([*CHECKPOINT, "damaged"], "can't be loaded"),
        ([*CHECKPOINT, "bad_config"], "bad config.json"),
    ],
    ids=lambda value: "_".join(value[-2:]) if isinstance(value, list) else "",
)
def test_bad_input(tmp_path, capsys, argv, words):
    bad_inputs(tmp_path)
    before = sorted(p for p in tmp_path.rglob("*") if "cache" not in p.parts)
    if "--out" not in argv:
        argv = [*argv, "--out", "out"]
    if argv[: len(CHECKPOINT)] == CHECKPOINT:
        try:
            code = main.main([*argv, "--text", "prose.txt"])
        except SystemExit as stop:
            code = stop.code
    else:
        code = demo(*argv)
    err = capsys.readouterr().err
    assert code == 2
    assert err.startswith("demo: ")
    assert err.count("\n") == 1
    assert words in err
    assert sorted(p for p in tmp_path.rglob("*") if "cache" not in p.parts) == before


def test_ctrl_c_keeps_what_was_measured(tmp_path, prose):
    out = tmp_path / "out"
    argv = [*TINY, "--steps", "100000", "--text", str(prose), "--out", str(out)]
    with subprocess.Popen(
        [sys.executable, Path(main.__file__).parent, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job ignores SIGINT, and its children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        for line in process.stdout:
            if line.startswith("step 1/"):
                break
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "demo: interrupted; what was measured is kept\n"
    assert sorted(p.name for p in out.iterdir()) == ["demo.json", "demo.png"]
    found = json.loads((out / "demo.json").read_text())
    assert found["interrupted"] is True
    assert 1 <= found["training"]["steps"] < 100000
    assert len(found["training"]["stock"]["losses"]) == found["training"]["steps"]
    assert found["checks"]["losses agree"] is True
    assert found["generation"] is None


def interrupt(*_):
    raise KeyboardInterrupt


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def out_of_memory(*_):
    raise torch.OutOfMemoryError("long text")


def diverge(*_):
    return torch.tensor(float("nan"), requires_grad=True)


@pytest.mark.parametrize(
    ("warm_up", "backward", "status", "words"),
    [
        (interrupt, None, 130, "nothing was written"),
        (out_of_memory, None, 1, "a smaller --batch"),
        (lambda *_: None, diverge, 1, "the loss of the stock model is nan at step 1\n"),
    ],
)
def test_a_run_that_ends_at_once_writes_nothing(
    tmp_path, capsys, prose, monkeypatch, warm_up, backward, status, words
):
    monkeypatch.setattr(train.Trainer, "warm_up", warm_up)
    if backward is not None:
        monkeypatch.setattr(train.Trainer, "_backward", backward)
    assert demo("--text", prose, "--out", tmp_path / "out") == status
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_ctrl_c_in_a_later_part(tmp_path, capsys, prose, monkeypatch):
    monkeypatch.setattr(generate, "_explain", interrupt)
    monkeypatch.setattr("demo.optable.cases", interrupt)
    assert demo("--text", prose, "--steps", 2, "--out", tmp_path / "out") == 130
    found = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert found["generation"]["passed"] is True
    assert found["ops"]["rows"] == []
    capsys.readouterr()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_terminal_that_is_not_utf8(tmp_path, capsys, monkeypatch, encoding):
    """Characters that its encoding lacks are printed as ?; files and exit status do not change."""
    path = tmp_path / "prose.txt"
    path.write_text(PROSE.replace("hares", "зайцев"), encoding="utf-8")
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding=encoding))
    assert demo("--text", path, "--steps", 2, "--out", tmp_path) == 0
    assert b"?????? of" in printed.getvalue()
    found = json.loads((tmp_path / "demo.json").read_text())
    assert any("зайцев" in each["prompt"] for each in found["generation"]["completions"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("fails", ["print_training", "print_generation", "print_ops"])
def test_output_that_can_not_be_written_takes_no_results(
    tmp_path, capsys, prose, monkeypatch, fails
):
    monkeypatch.setattr(report, fails, full)
    assert demo("--text", prose, "--steps", 2, "--out", tmp_path / "out") == 1
    found = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert found["interrupted"] is True and found["training"]["steps"] == 2
    assert (found["ops"] is not None) == (fails == "print_ops")
    assert capsys.readouterr().err == (
        "demo: the output can't be written: No space left on device\n"
    )


def test_ctrl_c_writes_before_it_prints(tmp_path, capsys, prose, monkeypatch):
    monkeypatch.setattr(generate, "_explain", interrupt)
    monkeypatch.setattr("demo.generate.generate", interrupt)
    printed = report.print_training
    monkeypatch.setattr(
        report, "print_training", lambda *a: printed(*a) if not written.exists() else full()
    )
    written = tmp_path / "out" / "demo.json"
    assert demo("--text", prose, "--steps", 2, "--out", tmp_path / "out") == 1
    assert json.loads(written.read_text())["training"]["steps"] == 2
    capsys.readouterr()


def test_a_failed_check_is_exit_1(tmp_path, capsys, prose, monkeypatch):
    monkeypatch.setattr(train.Training, "converged", lambda self: False)
    assert demo("--text", prose, "--steps", 2, "--out", tmp_path / "out") == 1
    assert capsys.readouterr().err == "demo: failed: losses agree\n"
    assert (tmp_path / "out" / "demo.json").exists()


def test_tokenizer_is_cached(prose, monkeypatch):
    document = text.read_text([prose])
    first, origin = text.train_tokenizer(document, 300)
    assert origin == "trained"
    monkeypatch.setattr(text, "_train", lambda *_: pytest.fail("trained again"))
    second, origin = text.train_tokenizer(document, 300)
    assert origin == "cached"
    assert second.to_str() == first.to_str()


def test_tokenizer_cache_key(prose):
    document = text.read_text([prose])
    text.train_tokenizer(document, 300)
    assert text.train_tokenizer(document, 301)[1] == "trained"
    # Other document boundaries make another text of these characters.
    whole = document.documents[0]
    halves = text.Text("halves", [whole[:1000], whole[1000:]])
    assert text.train_tokenizer(halves, 300)[1] == "trained"


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"version": "1.0"}'])
def test_damaged_tokenizer_cache_is_replaced(prose, content):
    document = text.read_text([prose])
    text.train_tokenizer(document, 300)
    (path,) = text.cache_folder().iterdir()
    path.write_bytes(content)
    assert text.train_tokenizer(document, 300)[1] == "trained"
    assert text.train_tokenizer(document, 300)[1] == "cached"
    assert list(text.cache_folder().iterdir()) == [path]


def test_unwritable_tokenizer_cache(prose, monkeypatch):
    monkeypatch.setenv("TORCHWELD_CACHE_DIR", str(prose / "below"))
    assert text.train_tokenizer(text.read_text([prose]), 300)[1] == "trained"


def test_tokens_give_the_text_back(prose):
    _, tokens, _ = prepare("--text", prose)
    assert tokens.decode(tokens.ids.tolist()) == PROSE
    assert tokens.ids[-1] == tokens.end_id


def test_text_beyond_the_limit_is_cut_between_characters(tmp_path, monkeypatch):
    path = tmp_path / "umlauts.txt"
    path.write_text("\u00e4" * 100, encoding="utf-8")
    monkeypatch.setattr(text, "MAX_BYTES", 33)
    assert text.read_text([path]).documents == ["\u00e4" * 16]


@pytest.fixture(scope="module")
def cache_of_tokenizers(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenizers")


@pytest.mark.parametrize("context", [16, 17, 24, 64])
@pytest.mark.parametrize("own_text", [False, True])
def test_prompts_have_different_lengths_and_fit(
    prose, context, own_text, cache_of_tokenizers, monkeypatch
):
    monkeypatch.setenv("TORCHWELD_CACHE_DIR", str(cache_of_tokenizers))
    chosen, tokens, _ = prepare("--context", context, *(["--text", prose] if own_text else []))
    new = min(32, context // 2)
    rows = generate.prompts(chosen, tokens, new)
    lengths = [len(row) for row in rows]
    assert len(rows) >= 4
    assert len(set(lengths)) == len(rows)
    assert min(lengths) >= 1 and max(lengths) + new <= context


def test_a_wrong_fused_model_fails_the_checks(prose):
    chosen, tokens, pair = prepare("--text", prose, "--steps", 3)
    with torch.no_grad():
        pair.fused.transformer.wte.weight[: tokens.vocab // 2] += 0.05
    trainer = train.Trainer(chosen, pair, tokens)
    assert trainer.result.converged() is None
    assert list(trainer.steps()) == [1, 2, 3]
    assert trainer.result.converged() is False
    assert trainer.result.weights_match is False
    result = generate.Generation()
    # Break the fused code and not a weight, which the stock code would get too.
    pair.fused.transformer.ln_f.register_forward_hook(lambda module, args, out: -out)
    generate.generate(chosen, pair, tokens, result, lambda what: None)
    assert result.passed() is False
    assert "differs from stock at new token 1" in result.completions[0].difference


def test_compile_needs_a_compiler(capsys, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert demo("--compile") == 2
    assert "needs a C++ compiler" in capsys.readouterr().err


def test_nan_is_no_agreement():
    result = train.Training(1, 1e-5, 1)
    for name in ("stock", "fused"):
        result.variants[name] = Namespace(losses=[float("nan")], seconds=[])
    assert result.converged() is False


def test_slow_machine_takes_fewer_steps(prose, monkeypatch):
    monkeypatch.setattr(train, "_SLOW_CPU_SECONDS", 0.0)
    for argv, done in (([], 32), (["--steps", "33"], 33)):
        chosen, tokens, pair = prepare("--text", prose, *argv)
        trainer = train.Trainer(chosen, pair, tokens)
        assert len(list(trainer.steps())) == done
        assert (trainer.result.note is None) == bool(argv)


def test_peak_of_step_counts_bytes():
    kept = []

    def work():
        a = torch.empty(1000, dtype=torch.float32)
        b = torch.empty(3000, dtype=torch.float32)
        del a, b
        kept.append(torch.empty(500, dtype=torch.float32))

    work()
    assert memory.peak_of_step(work) == 16000


def test_model_bytes_counts_tied_weights_once(prose):
    _, _, pair = prepare("--text", prose)
    assert memory.model_bytes(pair.stock) >= 4 * pair.parameters
    assert memory.model_bytes(pair.stock) < 4 * pair.parameters + 10_000


def test_write_leaves_nothing_half_written(tmp_path, monkeypatch):
    results = Results(options("--out", tmp_path / "out"), "now")
    write(results, b"old")

    def fail(source, target):
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        write(results, b"new")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["demo.json", "demo.png"]
    assert (tmp_path / "out" / "demo.png").read_bytes() == b"old"


def test_checkpoint_that_lacks_weights(tmp_path, prose):
    from safetensors.torch import load_file, save_file

    _, _, pair = prepare("--text", prose, "--steps", 1)
    folder = tmp_path / "checkpoint"
    pair.stock.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    del weights["transformer.h.0.mlp.c_fc.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    chosen = options()
    chosen.checkpoint = folder
    config = model.read_config(chosen)
    with pytest.raises(UsageError, match="lacks 1 weights"):
        model._load(kinds.KINDS["gpt2"], folder, config)


def measure_ops(prose, seconds):
    from demo.optable import OpTable, measure

    table = OpTable()
    measure(options("--text", prose), 2, 32, table, seconds, lambda what: None)
    return table


def test_op_table_with_compile(prose, monkeypatch):
    monkeypatch.setattr("demo.optable.cpp_compiler", lambda: "c++")

    def compile_(function, **_):
        if function.__name__ == "attend":
            raise RuntimeError("no such luck\nand more")
        return function

    monkeypatch.setattr(torch, "compile", compile_)
    for row in measure_ops(prose, 1000.0).rows:
        if row.op == "attention":
            assert row.compile_us is None
            assert row.compile_note == "torch.compile failed: no such luck"
        else:
            assert row.compile_us > 0 and row.ours_us > 0


def test_op_table_without_a_compiler(prose, monkeypatch):
    monkeypatch.setattr("demo.optable.cpp_compiler", lambda: None)
    table = measure_ops(prose, 1000.0)
    assert table.compile_note == "torch.compile was left out: no C++ compiler was found"


def test_op_without_a_kernel_is_named(prose, monkeypatch):
    import torchweld

    def missing(*_, **__):
        raise NotImplementedError("torchweld::linear has no CUDA kernel in this build")

    monkeypatch.setattr(torchweld, "linear", missing)
    rows = {row.op: row for row in measure_ops(prose, 0.0).rows}
    assert rows["linear"].ours_us is None and rows["linear"].eager_us > 0
    assert rows["linear"].note == "torchweld::linear has no CUDA kernel in this build"
    assert rows["softmax"].note is None
