"""The `torchweld` command: its subcommands, and one sentence with exit status 2 for bad input."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchweld
import torchweld_cli
from commands import python
from commands import run_command as run
from samples import as_tuple
from torchweld.info import has_cuda_kernel
from torchweld.tuning.main import filled

PACKAGE = Path(torchweld.__file__).parent
ROOT = Path(__file__).resolve().parent.parent
# Every command, without its flags.
TORCHWELD = ["-m", "torchweld_cli"]
PUZZLES = [str(ROOT / "examples" / "puzzles")]
DEMO = [str(ROOT / "examples" / "demo")]
BENCH = [str(ROOT / "benchmarks" / "bench.py")]
PLAN = [str(ROOT / "benchmarks" / "plan.py")]


def test_info(capsys):
    code, out, err = run(capsys, "info")
    assert (code, err) == (0, "")
    assert out == f"{torchweld.info()}\n"


def test_info_of_a_cpu_build_names_the_gpus():
    info = torchweld.info()
    info.built = {"torch": "2.11.0"}
    assert "\nops (each on GPUs too in a build with CUDA)\n" in str(info)
    info.built = {"torch": "2.11.0", "cuda": "13.0"}
    assert "\nops\n" in str(info)


def test_info_json(capsys):
    code, out, _ = run(capsys, "info", "--json")
    assert code == 0
    values = json.loads(out)
    assert values["torchweld"] == torchweld.__version__
    assert "softmax" in values["ops"]


# Ops by a shape that the command takes for them.
SHAPES = {
    "64,1024": "softmax",
    "7": "softmax_backward layer_norm",
    "4096": "scalar_attention",
    "8,16": "fold_layer_norm outer_add outer_mul_relu mul_relu",
    "2,3,5": "gated_activation rms_norm rms_norm_gated add_rms_norm add_layer_norm cross_entropy "
    "row_sum add_scalar",
    "8,16,32": "linear linear_backward int4_linear layer_norm_linear rms_norm_linear "
    "folded_layer_norm_linear rms_norm_linears layer_norm_linears gated_linear_pair gated_mlp "
    "linear_cross_entropy linear_token_logprobs",
    "0,16,32": "gated_linear",
    "2,3,16,16": "causal_softmax",
    "2,3,5,8": "rotary",
    "2,8,5": "causal_conv1d",
    "2,8,16,32": "bmm",
    "6,16,24,4": "grouped_linear grouped_gated_linear",
    "2,8,9,3,3": "conv2d",
    "2,3,5,7,8": "softmax_matmul attention attention_with_lse attention_backward",
    "6,16,24,4,2": "experts",
}


@pytest.mark.parametrize(
    ("op", "shape"), [(op, shape) for shape, ops in SHAPES.items() for op in ops.split()]
)
@pytest.mark.parametrize("on", ["cpu", "cuda"])
def test_explain_needs_no_gpu(capsys, op, shape, on):
    code, out, err = run(
        capsys, "explain", op, "--shape", shape, "--dtype", "bfloat16", "--device", on
    )
    assert (code, err) == (0, "")
    assert out.startswith(f"torchweld::{op}(bfloat16 (")
    assert ("kernel    CPU" in out) == (on == "cpu" or not has_cuda_kernel(op))


def test_every_op_with_a_function_is_known():
    functions = {op for op in torchweld.info().ops if op in torchweld.__all__}
    formats = {"int4_linear_repacked", "int4_pack", "int4_repack", "int4_unpack"}
    assert functions - set(torchweld_cli._CALLS) == formats


@pytest.mark.parametrize("op", torchweld_cli._CALLS)
def test_values_of_a_call_that_is_tuned(op):
    names, _ = torchweld_cli._CALLS[op]
    shapes = torchweld_cli.tensors(op, (16,) * len(names.split(",")), torch.float32, "cpu")
    others = {"add_scalar": {"value": 1.5}, "linear_backward": {"output_mask": [True] * 3}}
    results = getattr(torch.ops.torchweld, op)(*filled(shapes, op, "cpu"), **others.get(op, {}))
    for result in as_tuple(results):
        assert result.isfinite().all()


def test_explain_json(capsys):
    code, out, _ = run(capsys, "explain", "softmax", "--shape", "4,64", "--json")
    assert code == 0
    assert json.loads(out)["op"] == "softmax"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nonsense"], "'nonsense'"),
        (["info", "--yaml"], "--yaml"),
        (["explain"], "OP; --help lists them"),
        (["explain", "linear"], "--shape of linear must be M,K,N, but got 0 sizes"),
        (["explain", "softmax", "--shape", "4", "5"], "5; --help lists them"),
        (["explain", "softmin", "--shape", "4"], "but got 'softmin'; use 'softmax'"),
        (["explain", "nonsense", "--shape", "4"], "OP must be one of"),
        (["explain", "softmax", "--shape", "4,x"], "'4,x'"),
        (["explain", "softmax", "--shape=-4"], "'-4'"),
        (["explain", "softmax", "--shape", ""], "''"),
        (["explain", "linear", "--shape", "4,5"], "M,K,N"),
        (["explain", "attention", "--shape", "4,5"], "seqlen_q"),
        (["explain", "causal_softmax", "--shape", "4"], "seqlen_k"),
        (["explain", "softmax", "--shape", "4", "--dtype", "int8"], "'int8'"),
        (["explain", "softmax", "--shape", "4", "--device", "tpu"], "'tpu'"),
        (["explain", "softmax", "--shape", "9999999999999,99999999999999"], "size"),
        (["explain", "softmax", "--shape", "99999999999999999999,2"], "below 2**62"),
        (["tune", "softmax", "--shape", "99999999999999999999,2"], "below 2**62"),
        (["explain", "gated_linear", "--shape", f"2,2,{2**62}"], "below 2**62"),
    ],
)
def test_bad_arguments(capsys, argv, words):
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("torchweld")
    assert words in err


HELP = [[], ["--help"], *([name, "-h"] for name in ("info", "explain", "tune"))]


@pytest.mark.parametrize("argv", HELP)
def test_help(capsys, argv):
    code, out, err = run(capsys, *argv)
    assert (code, err) == (0, "")
    assert out.startswith("usage: torchweld")


@pytest.fixture
def no_torch(tmp_path):
    """An environment in which the package is found, and torch can't be imported."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch was asked for')\n")
    return {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{PACKAGE.parent}"}


@pytest.mark.parametrize("argv", [*HELP, ["--version"]])
def test_help_needs_no_torch(no_torch, capsys, argv):
    command = [sys.executable, *TORCHWELD, *argv]
    done = subprocess.run(command, env=no_torch, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(("usage: torchweld", f"torchweld {torchweld.__version__}\n"))


@pytest.mark.parametrize("command", [BENCH, DEMO, PLAN], ids=lambda command: Path(command[0]).stem)
def test_help_of_a_tool_needs_no_torch(no_torch, command):
    done = subprocess.run(
        [sys.executable, *command, "--help"], env=no_torch, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: {Path(command[0]).stem} ")


def test_help_of_python_dash_m():
    done = python("-m", "torchweld", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: torchweld ")


def test_the_package_reads_no_command_line():
    """Only torchweld_cli may: an import does the same in every program."""
    sources = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    assert len(sources) > 50
    words = ("sys.argv", "orig_argv", "import signal")
    assert [str(p) for p, text in sources.items() if any(word in text for word in words)] == []


def test_dir_lists_everything():
    names = dir(torchweld)
    public = {*torchweld.__all__, "testing", "integrations"}
    assert public - set(names) == set()
    assert [name for name in names if not hasattr(torchweld, name)] == []
    for package in (torchweld.distributed, torchweld.integrations, torchweld.tuning):
        assert set(package.__all__) <= set(dir(package))
        assert all(hasattr(package, name) for name in package.__all__)
    with pytest.raises(AttributeError, match="module 'torchweld' has no attribute 'softmin'"):
        _ = torchweld.softmin


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"torchweld {torchweld.__version__}\n", "")


COMMANDS = [
    [*TORCHWELD, "info"],
    [*TORCHWELD, "info", "--json"],
    [*TORCHWELD, "explain", "softmax", "--shape", "4,4", "--device", "cpu"],
    [*BENCH, "softmax", "--shape", "4,4", "--device", "cpu"],
    [*PUZZLES, "--puzzle", "1", "--device", "cpu"],
    [*PLAN, "--model", "gpt2", "--gpus", "4", "--seqlen", "512"],
]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize(
    ("argv", "unbuffered"),
    # Unbuffered, print fails in place of the end of the program; all programs share the handler.
    [pytest.param(argv, "", id=" ".join(argv).removeprefix(str(ROOT))) for argv in COMMANDS]
    + [pytest.param(COMMANDS[0], "1", id="unbuffered")],
)
def test_output_that_can_not_be_written(argv, unbuffered):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, *argv],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    program = "torchweld" if argv[:2] == TORCHWELD else Path(argv[0]).stem
    assert done.returncode == 1 and "Error" not in done.stderr and "Exception" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last == f"{program}: the output can't be written: No space left on device"


def test_a_reader_that_has_gone(capsys):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "torchweld", "info"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_what_the_encoding_lacks_is_printed_as_a_question_mark(tmp_path):
    path = tmp_path / "größe.png"
    argv = [*PUZZLES, "--puzzle", "1", "--device", "cpu", "--picture", str(path)]
    done = python(*argv, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert path.exists() and "gr??e.png" in done.stdout


@pytest.mark.parametrize("ours", [True, False])
def test_ctrl_c_while_torch_is_imported(tmp_path, ours):
    """The command ends with status 130 and no traceback; another program gets its own."""
    (tmp_path / "torch.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    )
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{PACKAGE.parent}"}
    command = [*TORCHWELD, "info"] if ours else ["-c", "import torchweld"]
    done = subprocess.run(
        [sys.executable, *command],
        env=env,
        capture_output=True,
        text=True,
        # Where the suite runs in the background, SIGINT is ignored by its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    if ours:
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    else:
        assert done.returncode != 130 and "KeyboardInterrupt" in done.stderr


def test_ctrl_c_of_a_command_is_130(capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(torchweld_cli, "_info", interrupted)
    assert run(capsys, "info") == (130, "", "")


def without_library(tmp_path):
    """A copy of the package that lacks the operator library, and an environment that finds it."""
    ignore = shutil.ignore_patterns("_ops*", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "torchweld", ignore=ignore)
    shutil.copy(torchweld_cli.__file__, tmp_path)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def test_with_a_broken_library(tmp_path):
    env = without_library(tmp_path)

    def command(*argv):
        return subprocess.run(
            [sys.executable, *argv], env=env, cwd=tmp_path, capture_output=True, text=True
        )

    info = command(*TORCHWELD, "info", "--json")
    assert info.returncode == 0
    values = json.loads(info.stdout)
    assert values["available"] is False
    assert "library is missing" in values["unavailable_reason"]
    call = ["softmax", "--shape", "4"]
    calls = ([*TORCHWELD, "explain", *call], [*TORCHWELD, "tune", *call])
    for argv in (*calls, [*DEMO, "--out", "out"], [*BENCH, "cpu"]):
        failed = command(*argv)
        assert failed.returncode == 1
        assert failed.stdout == ""
        assert failed.stderr.count("\n") == 1
        assert "library is missing" in failed.stderr
    assert not (tmp_path / "out").exists()
