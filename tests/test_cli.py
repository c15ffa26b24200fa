"""The `torchweld` command: its subcommands, and one sentence with exit status 2 for bad input."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import torchweld
from torchweld import cli

PACKAGE = Path(torchweld.__file__).parent


def run(capsys, *argv):
    """Exit status, stdout and stderr of one command line."""
    try:
        code = cli.main(list(argv))
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    return code, out, err


def test_info(capsys):
    code, out, err = run(capsys, "info")
    assert (code, err) == (0, "")
    assert out == f"{torchweld.info()}\n"


def test_info_json(capsys):
    code, out, _ = run(capsys, "info", "--json")
    assert code == 0
    values = json.loads(out)
    assert values["torchweld"] == torchweld.__version__
    assert "softmax" in values["ops"]


@pytest.mark.parametrize(
    ("op", "shape"),
    [
        ("softmax", "64,1024"),
        ("softmax_backward", "7"),
        ("causal_softmax", "2,3,16,16"),
        ("softmax_matmul", "2,3,5,7,8"),
        ("attention", "2,3,5,7,8"),
        ("attention_backward", "2,3,5,7,8"),
        ("linear", "8,16,32"),
        ("linear_backward", "8,16,32"),
        ("int4_linear", "8,16,32"),
        ("layer_norm_linear", "8,16,32"),
        ("rms_norm_linear", "8,16,32"),
        ("fold_layer_norm", "8,16"),
        ("folded_layer_norm_linear", "8,16,32"),
        ("gated_linear", "0,16,32"),
        ("bmm", "2,8,16,32"),
        ("scalar_attention", "4096"),
        ("row_sum", "2,3,5"),
        ("conv2d", "2,8,9,3,3"),
        ("add_scalar", "2,3,5"),
        ("outer_add", "8,16"),
        ("outer_mul_relu", "8,16"),
        ("mul_relu", "8,16"),
    ],
)
@pytest.mark.parametrize("on", ["cpu", "cuda"])
def test_explain_needs_no_gpu(capsys, op, shape, on):
    code, out, err = run(
        capsys, "explain", op, "--shape", shape, "--dtype", "bfloat16", "--device", on
    )
    assert (code, err) == (0, "")
    assert out.startswith(f"torchweld::{op}(bfloat16 (")
    assert ("kernel    CPU" in out) == (on == "cpu")


def test_explain_json(capsys):
    code, out, _ = run(capsys, "explain", "softmax", "--shape", "4,64", "--json")
    assert code == 0
    assert json.loads(out)["op"] == "softmax"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nonsense"], "'nonsense'"),
        (["info", "--yaml"], "--yaml"),
        (["explain"], "OP"),
        (["explain", "softmax"], "--shape"),
        (["explain", "softmin", "--shape", "4"], "OP must be one of"),
        (["explain", "softmax", "--shape", "4,x"], "'4,x'"),
        (["explain", "softmax", "--shape=-4"], "'-4'"),
        (["explain", "softmax", "--shape", ""], "''"),
        (["explain", "linear", "--shape", "4,5"], "M,K,N"),
        (["explain", "attention", "--shape", "4,5"], "seqlen_q"),
        (["explain", "causal_softmax", "--shape", "4"], "seqlen_k"),
        (["explain", "softmax", "--shape", "4", "--dtype", "int8"], "'int8'"),
        (["explain", "softmax", "--shape", "4", "--device", "tpu"], "'tpu'"),
        (["explain", "softmax", "--shape", "9999999999999,99999999999999"], "size"),
    ],
)
def test_bad_arguments(capsys, argv, words):
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("torchweld")
    assert words in err


@pytest.mark.parametrize(
    "argv",
    [[], ["--help"], *([name, "--help"] for name in ("explain", "tune", "demo", "puzzles"))],
)
def test_help(capsys, argv):
    code, out, err = run(capsys, *argv)
    assert (code, err) == (0, "")
    assert out.startswith("usage: torchweld")


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"torchweld {torchweld.__version__}\n", "")


def test_bench_gets_its_own_arguments(capsys, monkeypatch):
    import torchweld.bench

    seen = []
    monkeypatch.setattr(torchweld.bench, "main", lambda argv: seen.append(argv) or 3)
    assert run(capsys, "bench", "rows", "--check")[0] == 3
    assert seen == [["rows", "--check"]]


def without_library(tmp_path):
    """A copy of the package that lacks the operator library, and an environment that finds it."""
    ignore = shutil.ignore_patterns("_ops*", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "torchweld", ignore=ignore)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def test_with_a_broken_library(tmp_path):
    env = without_library(tmp_path)

    def command(*argv):
        return subprocess.run(
            [sys.executable, "-m", "torchweld", *argv],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )

    info = command("info", "--json")
    assert info.returncode == 0
    values = json.loads(info.stdout)
    assert values["available"] is False
    assert "library is missing" in values["unavailable_reason"]
    calls = (["explain", "softmax", "--shape", "4"], ["tune", "softmax", "--shape", "4"])
    for argv in (*calls, ["demo", "--out", "out"]):
        failed = command(*argv)
        assert failed.returncode == 1
        assert failed.stdout == ""
        assert failed.stderr.count("\n") == 1
        assert "library is missing" in failed.stderr
    assert not (tmp_path / "out").exists()
