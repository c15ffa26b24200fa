"""The distributed benchmark: run by torchrun with tiny sizes, its files, picture and names."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import torchweld_bench as bench
from commands import run_command
from torchweld_bench import results

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this torch has no gloo", allow_module_level=True)

from torchweld_bench import distributed
from torchweld_bench.distributed import losses, ops, picture, steps
from torchweld_bench.distributed.decoder import Decoder
from torchweld_bench.distributed.setup import TINY, Cases

SECONDS = 300  # on a busy machine
TARGETS = Path(__file__).resolve().parent.parent / "benchmarks" / "targets.toml"


def started(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs two processes with torchrun, without GPUs."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [str(TARGETS.with_name("bench.py")), "distributed", *arguments]
    return subprocess.run(
        [sys.executable, *torchrun, *command],
        cwd=folder,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )


def test_two_processes_write_one_file(tmp_path):
    case = TINY.tensor_parallel(2)
    (tmp_path / "targets.toml").write_text(f'[distributed]\n"{case}" = 1e9\n')
    done = started(tmp_path, "--out", "out", "--targets", "targets.toml")
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "out").glob("*-x2/distributed.json")
    assert path.with_suffix(".png").stat().st_size > 0
    assert done.stdout.count("distributed on 2 x ") == 1
    report = json.loads(path.read_text())
    assert (report["family"], report["gpus"]) == ("distributed", 2)
    rows = {row["case"]: row for row in report["rows"]}
    step, sharded = TINY.tensor_parallel(2), TINY.fully_sharded(2)
    compiled = TINY.tensor_parallel(2, "compiled blocks")
    wide = TINY.tensor_parallel(2, wide=True)
    steps = (step, compiled, wide, sharded)
    ways = ({}, {"padded": True}, {"long": True})
    attention = [TINY.context_parallel(2, **way) for way in ways]
    linear, blocks = TINY.sequence_parallel(2), TINY.parallelized(2)
    loss = TINY.vocab_parallel(2)
    against = {
        **{each: "alone" for each in (*steps, blocks, *attention, loss)},
        f"{loss} over alone, nothing kept": "alone, nothing kept",
        f"{loss}, label_smoothing, over without": "without",
        **{f"{each} over {peer}": peer for each in steps for peer in ("stock", "plan")},
        linear: "matmul alone",
        f"{linear} over stock": "stock",
    }
    assert {case: row["against"] for case, row in rows.items()} == against
    for row in rows.values():
        times = [row["ours_us"], *row["spread_us"], *row["peers_us"].values()]
        assert all(math.isfinite(t) and t > 0 for t in times), row
        assert row["ratio"] > 0 and 0 <= row["error"] < 1e-4, row
    assert rows[step]["target"] == 1e9 and rows[sharded]["target"] is None
    tokens = {case: row["tokens"] for case, row in rows.items() if "tokens" in row}
    assert tokens == dict.fromkeys((*steps, blocks), 64)


@pytest.fixture
def one_process(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def row(case: str, **changes) -> results.Row:
    found = results.Row(case, 2.0, (1.0, 3.0), {"alone": 4.0}, "alone", 0.5, None, 0.0, 0.0)
    return replace(found, **changes)


CASES = {
    *(
        "tensor_parallel",
        "compiled_tensor_parallel",
        "captured_tensor_parallel",
        "wide_tensor_parallel",
        "captured_wide_tensor_parallel",
        "parallelized",
        "fully_sharded",
        "fully_sharded_pairs",
    ),
    *("attention", "padded_attention", "long_attention", "linear", "vocab_parallel"),
}


def test_a_case_that_raises_leaves_the_others(one_process, monkeypatch, capsys):
    def raises(setup):
        raise ValueError("no columns here")

    for module in (steps, ops, losses):
        for name in CASES & set(vars(module)):
            monkeypatch.setattr(module, name, lambda setup, name=name: iter([row(name)]))
    monkeypatch.setattr(steps, "tensor_parallel", raises)
    failure, *others = distributed.rows()
    assert failure == results.Failure("raises", "process 0: ValueError: no columns here")
    # The cases with pairs need four processes, those with graphs a GPU.
    captured = {"captured_tensor_parallel", "captured_wide_tensor_parallel"}
    without = {"tensor_parallel", "fully_sharded_pairs", *captured}
    assert {each.case for each in others} == CASES - without
    assert "in raises" in capsys.readouterr().err


def test_a_failure_is_reported_and_is_the_exit_status(monkeypatch, capsys, tmp_path):
    rows = [results.Failure("some case", "process 1: no"), row("another")]
    monkeypatch.setattr(distributed, "rows", lambda: iter(rows))
    parser = bench._parser()
    args = parser.parse_args(["distributed", "--out", str(tmp_path)])
    assert bench._measure(args, parser, "cpu", gpus=3, tells=False) == 0
    assert capsys.readouterr() == ("", "") and not any(tmp_path.iterdir())
    assert bench._measure(args, parser, "cpu", gpus=3) == 1
    assert "some case: failed: process 1: no" in capsys.readouterr().err
    assert len(list(tmp_path.glob("*-x3/distributed.json"))) == 1


@pytest.mark.parametrize(
    ("environment", "gpus", "sentence"),
    [
        ({}, 0, "distributed must be started by torchrun: torchrun --nproc-per-node 2 "),
        ({"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, 1, "2 processes, but there "),
    ],
)
def test_refusals(monkeypatch, capsys, environment, gpus, sentence):
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    code, out, error = run_command(capsys, "distributed", main=bench.main)
    assert (code, out, error.count("\n")) == (2, "", 1) and sentence in error


def test_targets_are_of_cases_that_there_are():
    cases = Cases()
    names = {
        name
        for size in (2, 4, 8)
        for name in (
            cases.tensor_parallel(size),
            cases.tensor_parallel(size, "compiled blocks"),
            cases.tensor_parallel(size, "in a CUDA graph"),
            cases.fully_sharded(size),
            cases.fully_sharded(size, recomputed=True),
            cases.fully_sharded_pairs(size),
            cases.fully_sharded_pairs(size, recomputed=True),
            cases.tensor_parallel(size, wide=True),
            cases.tensor_parallel(size, "in a CUDA graph", wide=True),
            cases.context_parallel(size),
            cases.context_parallel(size, padded=True),
            cases.context_parallel(size, long=True),
            cases.sequence_parallel(size),
            cases.vocab_parallel(size),
        )
    }
    peers = {"stock", *ops.BACK_ENDS}
    for case in results.load_targets(TARGETS, "distributed"):
        name, _, peer = case.partition(" over ")
        assert name in names and (not peer or peer in peers), case


@pytest.mark.parametrize("sizes", [TINY.gpt2, TINY.llama], ids=["gpt2", "llama"])
def test_decoder_has_its_sizes_and_one_loss_fused_and_not(sizes):
    torch.manual_seed(0)
    stock = Decoder(sizes).double()
    fused = copy.deepcopy(stock).fuse()
    again = Decoder(sizes, recompute=True).double()
    again.load_state_dict(stock.state_dict())
    assert sum(p.numel() for p in stock.parameters()) == sizes.parameters
    assert sum(p.numel() for p in fused.parameters()) == sizes.parameters
    ids = torch.randint(sizes.vocab, (2, 9))
    losses = [model(ids[:, :-1], ids[:, 1:]) for model in (stock, fused, again)]
    for loss, model in zip(losses, (stock, fused, again), strict=True):
        loss.backward()
        torch.testing.assert_close(loss, losses[0], rtol=0, atol=1e-6)
        grad = model.embed.weight.grad
        torch.testing.assert_close(grad, stock.embed.weight.grad, rtol=0, atol=1e-6)


def test_decoder_is_a_llama():
    """The decoder has the loss of transformers' model with the same weights."""
    transformers = pytest.importorskip("transformers")
    sizes = TINY.llama
    torch.manual_seed(0)
    ours = Decoder(sizes).double()
    config = steps.llama_config(
        sizes,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    model = transformers.LlamaForCausalLM(config).double()
    state = {"model.embed_tokens.weight": ours.embed.weight, "model.norm.weight": ours.norm.weight}
    for i, block in enumerate(ours.blocks):
        norm, qkv = block.attend_in
        groups = qkv.weight.unflatten(0, (sizes.kv_heads, -1, sizes.head_dim))
        query, key, value = groups.split([block.queries, 1, 1], 1)
        parts = {
            "input_layernorm": norm.weight,
            "self_attn.q_proj": query.flatten(0, 2),
            "self_attn.k_proj": key.flatten(0, 2),
            "self_attn.v_proj": value.flatten(0, 2),
            "self_attn.o_proj": block.attend_out.weight,
            "post_attention_layernorm": block.mlp_in[0].weight,
            "mlp.gate_proj": block.mlp_in[1].left.weight,
            "mlp.up_proj": block.mlp_in[1].right.weight,
            "mlp.down_proj": block.mlp_out.weight,
        }
        state |= {f"model.layers.{i}.{name}.weight": t for name, t in parts.items()}
    model.load_state_dict(state, strict=False)
    ids = torch.randint(sizes.vocab, (2, 17))
    logits = model(input_ids=ids[:, :-1]).logits.flatten(0, 1).float()
    want = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
    torch.testing.assert_close(ours(ids[:, :-1], ids[:, 1:]), want, rtol=0, atol=1e-6)


def test_picture_has_the_tokens_of_all_files_of_the_gpu(tmp_path):
    times = {"alone": 100.0, "stock": 80.0, "ideal": 50.0}
    reports = []
    for gpus in (2, 4):
        report = results.new_report("distributed", "cpu")
        report.gpus = gpus
        step = row(f"a step, sharded on {gpus} GPUs", ours_us=60.0, peers_us=times, tokens=600)
        report.rows = [step, replace(step, against="stock", tokens=None), row("an op on 2 GPUs")]
        reports.append(report)
    speeds = picture.speeds([report.to_dict() for report in reports])
    assert speeds == {
        "a step, sharded": {
            "ours": {1: 6e6, 2: 1e7, 4: 1e7},
            "stock": {2: 7.5e6, 4: 7.5e6},
            "ideal": {1: 6e6, 2: 1.2e7, 4: 1.2e7},
        }
    }
    paths = [results.save(report, tmp_path) for report in reports]
    distributed.draw(reports[1], paths[1].with_suffix(".png"))
    assert paths[1].parent.name.endswith("-x4")
    assert paths[1].with_suffix(".png").stat().st_size > 0
    assert "tokens" not in json.loads(paths[0].read_text())["rows"][2]
