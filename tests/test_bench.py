"""The benchmarks' command line, and a call of one op on the CPU."""

from __future__ import annotations

import re
import sys

import pytest
import torch

import torchweld_bench
from commands import run_command
from torchweld.tuning.timer import Timing, interleaved
from torchweld_bench import losses, one
from torchweld_bench.cases import compared, judged
from torchweld_bench.common import installed
from torchweld_bench.results import Row, target_of


def run(capsys, *argv):
    return run_command(capsys, *argv, main=torchweld_bench.main)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "FAMILY|OP"),
        (["softmax"], "an op needs --shape"),
        (["softmin", "--shape", "4"], "but got 'softmin'; use 'softmax'"),
        (["linear", "--shape", "4,5"], "M,K,N"),
        (["softmax", "--shape", "4", "--against", "cudnn"], "'cudnn'"),
        (["softmax", "--shape", "99999999999999999999,2"], "below 2**62"),
        (["softmax", "--shape", "4", "--device", "cpu", "--out", "/dev/null"], "--out"),
        (["cpu", "--targets", "no/such.toml"], "no/such.toml"),
    ],
)
def test_bad_arguments(capsys, argv, words):
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and err.startswith("bench: ") and words in err


def test_a_family_without_a_gpu_names_what_runs_on_the_cpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = run(capsys, "attention")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "attention needs a CUDA GPU, but there is none; use the family cpu" in err


SMALL = {
    "attention": "1,2,5,7,8",
    "bmm": "2,3,4,5",
    "causal_softmax": "2,4,5",
    "conv2d": "2,8,9,3,3",
    "outer_add": "3,4",
    "outer_mul_relu": "3,4",
    "mul_relu": "3,4",
    "scalar_attention": "9",
    "softmax_matmul": "1,2,3,4,5",
    **dict.fromkeys(("softmax", "row_sum", "add_scalar"), "3,5"),
}


@pytest.fixture
def one_call_a_sample(monkeypatch):
    monkeypatch.setattr(one, "_SAMPLE_SECONDS", 0.0)


@pytest.mark.parametrize("op", one.EAGER)
def test_bench_of_one_call(capsys, one_call_a_sample, op):
    """The code that an op is timed against computes the same."""
    argv = [op, "--shape", SMALL.get(op, "3,16,8"), "--device", "cpu"]
    code, out, err = run(capsys, *argv)
    assert code == 0
    rows = out.splitlines()[2:]
    assert [row.split("  ")[0].rsplit(" ", 1)[1] for row in rows] == ["forward", "gradient"]
    assert all(row.startswith(f"{op} (") and "float32" in row for row in rows)
    assert all(re.search(r"\d\.\d{3} eager ", row) for row in rows), out
    assert err.count(f"{op} (") == 2


@pytest.mark.parametrize("op", one.EAGER)
def test_bench_of_empty_tensors(capsys, one_call_a_sample, op):
    """Every size may be 0, as the op's may."""
    sizes = SMALL.get(op, "3,16,8").split(",")
    for i in range(len(sizes)):
        shape = ",".join([*sizes[:i], "0", *sizes[i + 1 :]])
        code, out, _ = run(capsys, op, "--shape", shape, "--device", "cpu")
        assert code == 0 and len(out.splitlines()) == 4, shape


@pytest.mark.parametrize(
    ("case", "target"),
    [
        ("attention (2, 3)", 0.5),
        ("attention (2, 3) over flex", 0.8),
        ("attention (2, 3) sink", 1.1),
        ("softmax (3, 5)", 2.0),
    ],
)
def test_target_of_the_longest_name_counts(case, target):
    targets = {"* over flex": 0.8, "attention (2, 3)": 0.5, "attention*": 0.9, "* (2, 3) sink": 1.1}
    row = Row(case, 1.0, (1.0, 1.0), {}, "", 1.0, 2.0, 0.0, 0.0)
    assert target_of(row, targets) == target


def test_a_result_that_is_nan_is_wrong():
    exact = [torch.ones(2, dtype=torch.float64) for _ in range(2)]
    right, nan = torch.ones(2), torch.full((2,), torch.nan)
    times = {"ours": Timing(1, 1, 1), "eager": Timing(2, 2, 2)}
    for ours, ratio in (([right, right], 0.5), ([right, nan], None), ([nan, right], None)):
        (row,) = compared("x", times, judged(ours, [right, right], exact), "eager")
        assert row.ratio == ratio


@pytest.mark.parametrize("disturbed", range(8))
def test_equal_calls_take_equal_time(monkeypatch, disturbed):
    """Although a call costs more after another variant, and one call waits for the processor."""
    now, calls = 0.0, []

    def call(name):
        nonlocal now
        now += 1e-3 + (4e-3 if calls and calls[-1] != name else 0)
        now += 8e-3 if len(calls) == disturbed else 0
        calls.append(name)

    monkeypatch.setattr("torchweld.tuning.timer.time.perf_counter", lambda: now)
    variants = {name: (lambda name=name: call(name)) for name in ("ours", "eager")}
    times = interleaved(variants, device="cpu", warmup=1, sample_seconds=5e-3)
    assert [t.us for t in times.values()] == pytest.approx([1000, 1000])


def test_ctrl_c_of_a_benchmark(capsys, monkeypatch):
    def rows(*_):
        yield from list(real("softmax", [torch.randn(3, 5)], ["eager"]))[:1]
        raise KeyboardInterrupt

    real = one.rows
    monkeypatch.setattr(one, "rows", rows)
    code, out, err = run(capsys, "softmax", "--shape", "3,5", "--device", "cpu")
    assert code == 130 and "interrupted; the rows so far:" in err
    assert "softmax (3, 5) float32 forward" in out


def test_bench_against_compile(capsys, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda f, **_: compiled.append(f) or f)
    argv = ["softmax", "--shape", "3,5", "--device", "cpu", "--against", "compile,eager"]
    code, out, _ = run(capsys, *argv, "--dtype", "bfloat16")
    assert code == 0 and compiled == [one.EAGER["softmax"]]
    head, row = out.splitlines()[1:3]
    assert "compile us" in head and "eager us" in head
    assert " compile " in row and "bfloat16" in row


def test_a_peer_whose_import_fails_is_left_out(capsys, monkeypatch, tmp_path):
    """As quack 0.6.5, whose head raises a TypeError while it is imported; its loss does not."""
    package = tmp_path / "quack"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "cross_entropy.py").write_text("def cross_entropy(): ...\n")
    (package / "linear_cross_entropy.py").write_text("raise TypeError('no semantic key\\nmore')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "quack"]:
        monkeypatch.delitem(sys.modules, name)
    installed.cache_clear()
    try:
        for _ in range(2):  # one line, however many cases ask
            assert "quack" not in losses._peers_of_head()
        assert "quack" in losses._peers_of_logits()
        assert installed("quack.cross_entropy", "no_such_loss") is None
    finally:
        installed.cache_clear()
        for name in [name for name in sys.modules if name.split(".")[0] == "quack"]:
            del sys.modules[name]
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("quack")]
    head, missing = lines
    name = "quack.linear_cross_entropy.chunked_linear_cross_entropy"
    assert head == f"{name} is left out: TypeError: no semantic key"
    assert missing.startswith("quack.cross_entropy.no_such_loss is left out: AttributeError: ")
