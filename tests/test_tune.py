"""tune: the search over a call's configurations, its result, its command."""

from __future__ import annotations

import sys
import types

import pytest
import torch

import torchweld
import torchweld._library as library
from choices_helpers import (  # noqa: F401
    _C,
    GPU,
    LINEAR,
    named,
    nothing_is_left_behind,
    ops,
    picked,
    problem,
    refusal,
)
from commands import run_command
from cuda_graphs import cuda_graph
from samples import BF16, F16, F32, sample
from torchweld.tuning import TuneResult, cache, search, work
from torchweld.tuning.observe import kernel_choices, observe
from torchweld.tuning.progress import Progress

TILES = ("256x128", "128x128", "128x64", "64x64")  # of the engine on mma.sync, in their order
BEST = "sync 256x128"  # with the clock below

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or library.build_facts().get("cuda") is None,
    reason="every configuration runs on a GPU",
)


# The search, with a clock that is made up


def tile_and_splits() -> tuple[str, int]:
    """The tile and the number of splits of the matmul's current choice."""
    tile, _, splits = picked()[0].removeprefix("sync ").partition(" /")
    return tile, int(splits or 1)


class FakeOps:
    """The library, but that `linear` goes wrong where a wrong tile is forced."""

    def __init__(self, wrong: tuple[str, ...] = (), broken: tuple[str, ...] = ()) -> None:
        self.wrong, self.broken = wrong, broken

    def __getattr__(self, name):
        return getattr(ops, name)

    def linear(self, *args, **kwargs):
        tile = tile_and_splits()[0] if args[0].dtype != torch.float64 else ""
        if tile in self.broken:
            raise RuntimeError("torchweld::matmul: the kernel could not be launched: too bad\nmore")
        y = ops.linear(*args, **kwargs)
        return y + (1.0 if tile in self.wrong else 0.0)


class FakeRounds:
    """Takes more microseconds for later tiles and more splits, and 1000 more for the last tile."""

    stop_after = 10**9
    rounds_run = 0

    def __init__(self, variants, before=None):
        self.variants, self.before, self.rounds = variants, before, []

    def run(self):
        times = {}
        for name, call in self.variants.items():
            if FakeRounds.rounds_run == FakeRounds.stop_after and len(self.variants) > 1:
                raise KeyboardInterrupt
            self.before(name)
            call()
            tile, splits = tile_and_splits()
            slow = 1000 if tile == TILES[-1] else 0
            times[name] = 10.0 + TILES.index(tile) + splits + slow
        FakeRounds.rounds_run += len(self.variants) > 1
        self.rounds.append(times)

    def timings(self):
        from torchweld.tuning.timer import Timing

        return {n: Timing(t, t - 1, t + 1) for n, t in (self.rounds or [{}])[-1].items()}


@pytest.fixture
def fake_gpu(monkeypatch):
    """search.tune on CPU tensors, as if they were on a GPU. Returns its set-up function."""

    def fake_observe(call):
        out = call()
        choice, source = picked()
        record = {"family": "matmul", "problem": LINEAR, "choice": choice, "source": source}
        registers = 40 + TILES.index(tile_and_splits()[0])
        return [out], [{**record, "kernels": [[registers, 1000, 128, 0, 0]]}]

    def setup(wrong=(), broken=(), stop_after=10**9):
        monkeypatch.setattr(search.library, "ops", FakeOps(wrong, broken))
        FakeRounds.stop_after, FakeRounds.rounds_run = stop_after, 0

    monkeypatch.setattr(search, "observe", fake_observe)
    monkeypatch.setattr(search, "_gpu_name", lambda t: GPU)
    monkeypatch.setattr(search, "_gpu_works", lambda: True)
    monkeypatch.setattr("torchweld.tuning.timer.CudaRounds", FakeRounds)
    setup()
    return setup


def linear_call():
    return [torch.randn(6, 16), torch.randn(8, 16)]


def by_choice(result: TuneResult) -> dict[str, dict]:
    return {row["choice"]: row for row in result.rows if row["choice"]}


def test_table_is_best_first_and_keeps_what_is_illegal(fake_gpu):
    fake_gpu(wrong=("128x128",), broken=("128x64",))
    result = torchweld.tune("linear", *linear_call())
    rows = by_choice(result)
    assert set(rows) == {c["choice"] for c in _C.candidates("matmul", LINEAR)}
    times = [row["us"] for row in result.rows]
    timed = [t for t in times if t is not None]
    assert timed == sorted(timed) and times[: len(timed)] == timed, "best first, then the others"
    assert result.best is result.rows[0] and result.best["choice"] == BEST
    assert result.best["us"] == 11.0 and result.best["low_us"] == 10.0
    assert result.best["registers"] == 40 and result.best["shared_bytes"] == 1000
    assert "wrong answer: error 1.0e+00, at most" in rows["sync 128x128 /2"]["reason"]
    assert rows["sync 128x64"]["reason"].endswith("could not be launched: too bad")
    assert "only for float32" in rows["sync float32 64x128"]["reason"]
    assert all((row["us"] is None) == bool(row["reason"]) for row in result.rows)
    assert [row["source"] for row in result.rows].count("heuristic") == 1
    assert rows[picked()[0]]["source"] == "heuristic"
    assert not result.interrupted and result.against == "the op in float64"


def test_rates_follow_from_the_work(fake_gpu):
    result = torchweld.tune("linear", *linear_call(), rounds=3)
    best = result.best
    sizes = named("matmul", LINEAR)
    flops = 2 * sizes["m"] * sizes["n"] * sizes["k"]
    assert best["tflop_s"] == pytest.approx(flops / (best["us"] * 1e-6) / 1e12)
    moved = 4 * (6 * 16 + 8 * 16 + 6 * 8)
    assert best["gb_s"] == pytest.approx(moved / (best["us"] * 1e-6) / 1e9)


def test_a_slow_configuration_is_timed_once(fake_gpu):
    result = torchweld.tune("linear", *linear_call(), rounds=4)
    assert by_choice(result)["sync 64x64"]["us"] == 1014.0
    assert FakeRounds.rounds_run == 4


def test_without_a_right_answer_there_is_no_best(fake_gpu):
    assert tile_and_splits()[0] != "128x64"
    fake_gpu(broken=("128x64",))
    tile = [{"block_m": 128, "block_n": 64}]
    result = torchweld.tune("linear", *linear_call(), configs=tile, remember=True)
    assert "too bad" in result.rows[0]["reason"] and all(row["reason"] for row in result.rows)
    assert result.best is None and "nothing was remembered" in str(result)
    assert picked(gpu=GPU)[1] == "heuristic" and not cache.path().exists()


def test_interrupted_search_keeps_what_it_has(fake_gpu):
    fake_gpu(stop_after=2)
    result = torchweld.tune("linear", *linear_call(), remember=True)
    assert result.interrupted and "interrupted" in result.note
    assert "nothing was remembered" in result.note and not cache.path().exists()
    assert result.best["us"] == 11.0, "two rounds were complete"
    assert picked(gpu=GPU)[1] == "heuristic"


def test_interrupt_before_the_first_round_keeps_the_checks(fake_gpu, monkeypatch):
    checked = []

    def judge(self, outputs):
        if len(checked) == 3:
            raise KeyboardInterrupt
        checked.append(outputs)
        return 0.0, ""

    monkeypatch.setattr(work.Answers, "judge", judge)
    result = torchweld.tune("linear", *linear_call())
    assert result.interrupted and sum(row["us"] is not None for row in result.rows) == 3
    reasons = {row["reason"] for row in result.rows if row["us"] is None}
    assert "not timed: the search was interrupted" in reasons


def test_configs_choose_rows(fake_gpu):
    wanted = [{"block_m": 64, "block_n": 64, "splits": 1}, {"block_m": 32, "block_n": 32}]
    result = torchweld.tune("linear", *linear_call(), configs=wanted)
    timed = [row for row in result.rows if row["us"] is not None]
    assert [(row["block_m"], row["block_n"], row["splits"]) for row in timed] == [(64, 64, 1)]
    (missing,) = [row for row in result.rows if row["reason"] == "not built"]
    assert (missing["block_m"], missing["block_n"]) == (32, 32)
    assert "not built" in str(result)
    with pytest.raises(ValueError, match="dicts of choice, block_m, .*, but one has 'BLOCK_M'"):
        torchweld.tune("linear", *linear_call(), configs=[{"BLOCK_M": 64}])


def test_two_kernels_are_searched_one_after_the_other(fake_gpu, monkeypatch):
    second = problem("matmul", m=512)
    forced = []

    def fake_observe(call):
        record = {"family": "matmul", "choice": "sync 128x128", "source": "heuristic"}
        record["kernels"] = []
        return [call()], [{**record, "problem": p} for p in (LINEAR, second, LINEAR)]

    class Both(FakeRounds):
        def run(self):
            super().run()
            forced.append((picked()[0], picked(numbers=second)))

    monkeypatch.setattr(search, "observe", fake_observe)
    monkeypatch.setattr("torchweld.tuning.timer.CudaRounds", Both)
    result = torchweld.tune("linear", *linear_call(), rounds=1)
    assert {row["part"] for row in result.rows} == {0, 1}
    assert result.best_of_part(0)["choice"] == BEST
    assert all(first == BEST for first, (_, source) in forced if source == "forced")
    assert any(source == "forced" for _, (_, source) in forced)
    assert picked(numbers=second)[1] == "heuristic"
    assert str(result).count("configurations") == 2


# Without a GPU, and bad calls


def test_nothing_to_tune_on_the_cpu():
    result = torchweld.tune("softmax", torch.ones(3, 4))
    assert result.rows == [] and result.best is None
    assert str(result) == (
        "torchweld.tune: there is nothing to tune for softmax on the CPU, whose kernels have one "
        "configuration; tune it on a CUDA GPU"
    )


def test_an_op_of_one_configuration(fake_gpu, monkeypatch):
    monkeypatch.setattr(search, "observe", lambda call: ([call()], []))
    result = torchweld.tune("mul_relu", torch.ones(3, 4), torch.ones(3), remember=True)
    assert "mul_relu has one configuration for these arguments" in str(result)
    assert not cache.path().exists()


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "words"),
    [
        ("sofmax", [torch.ones(2)], {}, "but got 'sofmax'; use 'softmax'"),
        ("_forget_choices", [torch.ones(2)], {}, "op must be one of"),
        ("softmax", [], {}, "must be given its tensors, but got none"),
        ("softmax", [torch.ones(2, device="meta")], {}, "must hold values"),
        ("softmax", [torch.ones(2)], {"rounds": 0}, "rounds must be at least 1, but got 0"),
    ],
)
def test_bad_call(op, args, kwargs, words):
    with pytest.raises(ValueError, match=f"tune: .*{words}"):
        torchweld.tune(op, *args, **kwargs)


# The answer's check


def test_difference_of_inf_and_nan():
    inf, nan = torch.inf, torch.nan
    right = torch.tensor([1.0, inf, -inf, nan, 70000.0], dtype=torch.float64)
    same = torch.tensor([1.0, inf, -inf, nan, inf], dtype=F16)  # 70000 is inf in half precision
    assert work.difference(same, right) == 0.0
    for i, value in ((0, nan), (1, 3.0), (2, inf), (3, 0.0), (4, 65504.0), (0, inf)):
        wrong = same.clone()
        wrong[i] = value
        assert work.difference(wrong, right) > 1e3, (i, value)
    near = same.clone()
    near[0] += 2**-10
    assert work.difference(near, right) == 2**-10
    assert work.difference(torch.empty(0), torch.empty(0)) == 0.0


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("limit", [4e10, 0.0])
def test_answers_allow_another_order_of_sums_and_no_more(monkeypatch, dtype, limit):
    monkeypatch.setattr(work, "_REFERENCE_FLOPS", limit)
    x, weight = torch.randn(40, 300).to(dtype), torch.randn(20, 300).to(dtype)
    default = ops.linear(x, weight)
    answers = work.Answers(ops.linear, (x, weight), {}, [default], 1.0, 300)
    assert answers.against == ("the op in float64" if limit else "the default configuration")
    flipped = ops.linear(x.flip(1), weight.flip(1))
    error, reason = answers.judge([flipped])
    assert reason == "" and error < 0.3
    short = ops.linear(x[:, :-8], weight[:, :-8])  # a step of K is missing
    assert "wrong answer" in answers.judge([short])[1]
    hole = default.clone()
    hole[3, 4] = torch.nan
    assert "wrong answer: error inf" in answers.judge([hole])[1]


def test_flops_of_causal_attention_count_the_pairs():
    for rows, keys in ((5, 5), (3, 7), (1, 4), (6, 6)):
        pairs = sum(min(keys, i + keys - rows + 1) for i in range(rows))
        fields = dict(heads=3, seqlen_q=rows, seqlen_k=keys, head_dim=8, head_dim_v=4, causal=1)
        sizes = named("attention", problem("attention", **fields))
        assert work.flops("attention", sizes) == 2 * 3 * pairs * 12
        assert work.flops("attention_backward", sizes) == 2 * 3 * pairs * (3 * 8 + 2 * 4)
    assert work.flops("softmax", {}) is None


# The result


def made_result(fake_gpu) -> TuneResult:
    fake_gpu(wrong=("128x128",))
    return torchweld.tune("linear", *linear_call(), rounds=1)


def test_table_as_text(fake_gpu):
    lines = str(made_result(fake_gpu)).splitlines()
    assert lines[0].startswith("torchweld::linear(float32 (6, 16), float32 (8, 16)) on NVIDIA Test")
    sizes = "m 1024, n 2048, k 2048, batch 1, gated 0, pointwise 0, math 1"
    layouts = "a_k_major 1, b_k_major 1, normed 0, grouped 0, invariant 0"
    assert lines[1].startswith(f"matmul ({sizes}, {layouts}): "), "not the device"
    heads = lines[2].split()
    assert heads[:4] == ["choice", "block_m", "block_n", "block_k"] and "TFLOP/s" in heads
    first = dict(zip(heads, lines[3].replace(BEST, "best").split(), strict=False))
    assert [first[head] for head in ("choice", "block_m", "us")] == ["best", "256", "11.0"]
    assert any("wrong answer" in line for line in lines)
    assert sum("default" in line.split() for line in lines) == 1


def test_save_and_load(fake_gpu, tmp_path):
    result = made_result(fake_gpu)
    result.save(tmp_path / "x.json")
    again = TuneResult.load(tmp_path / "x.json")
    assert again == result and str(again) == str(result)
    (tmp_path / "x.json").write_text('{"rows": []}')
    with pytest.raises(ValueError, match="is no saved TuneResult"):
        TuneResult.load(tmp_path / "x.json")


def test_picture(fake_gpu, tmp_path):
    pytest.importorskip("matplotlib")
    made_result(fake_gpu).plot(tmp_path / "tune.png")
    assert (tmp_path / "tune.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no timed configuration"):
        TuneResult("linear", "").plot(tmp_path / "none.png")


def test_data_frame_has_a_row_a_configuration(fake_gpu, monkeypatch):
    """A stub records the call, because pandas is optional for the tests too."""
    result = made_result(fake_gpu)
    stand_in = types.SimpleNamespace(DataFrame=lambda rows, columns: (rows, columns))
    monkeypatch.setitem(sys.modules, "pandas", stand_in)
    rows, columns = result.to_pandas()
    assert rows is result.rows and rows[0] is result.best
    assert {"block_m", "stages", "warps", "us", "tflop_s", "gb_s", "error"} <= set(columns)
    assert {"registers", "shared_bytes", "reason"} <= set(columns)
    assert set(columns) == set(rows[0]) and len(set(columns)) == len(columns)


def test_what_is_not_installed_is_named(fake_gpu, monkeypatch, tmp_path):
    result = made_result(fake_gpu)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="to_pandas needs pandas, which is not installed"):
        result.to_pandas()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="plot needs matplotlib"):
        result.plot(tmp_path / "x.png")


def test_progress_tells_the_time_that_is_left(capsys):
    now = [0.0]
    bar = Progress("tune x", shown=True, stream=sys.stdout, clock=lambda: now[0])
    bar.plan(10)
    assert "0%" in bar.text() and "left" not in bar.text()
    now[0] = 30.0
    bar.step(2)
    assert "20%" in bar.text() and "2 min 00 s left" in bar.text()
    now[0] = 45.0
    bar.step(7)
    assert "90%" in bar.text() and " 5 s left" in bar.text()
    bar.close()
    assert capsys.readouterr().out.count("\r") == 4
    quiet = Progress("tune x")
    quiet.plan(1)
    quiet.step()
    quiet.close()
    captured = capsys.readouterr()
    assert captured.out == captured.err == "", "not a terminal"


# Remembered choices


@pytest.fixture
def cuda_build(monkeypatch):
    monkeypatch.setattr(library, "build_facts", lambda: {"cuda": "13.0"})


def loaded() -> tuple[str, str]:
    """The matmul's choice after reading the file as a new process does."""
    ops._forget_choices()
    cache.load()
    return picked(gpu=GPU)


def test_a_remembered_choice_is_back_in_the_next_process(cuda_build, fake_gpu):
    result = torchweld.tune("linear", *linear_call(), remember=True)
    assert str(cache.path()) in result.note
    assert picked(gpu=GPU) == (BEST, "tuned")
    assert loaded() == (BEST, "tuned")
    (entry,) = cache.read()
    assert entry["op"] == "linear" and entry["shape_class"]["m"] == 1024
    assert entry["columns"]["block_m"] == 256 and cache.flaw(entry) == ""
    again = torchweld.tune("linear", *linear_call(), remember=True)
    assert len(cache.read()) == 1, "one entry a key"
    assert by_choice(again)[BEST]["source"] == "tuned" or picked()[1] == "heuristic"


def test_the_switch(cuda_build, fake_gpu, monkeypatch):
    torchweld.tune("linear", *linear_call(), remember=True)
    monkeypatch.setenv("TORCHWELD_TUNE", "0")
    assert loaded()[1] == "heuristic"
    before = cache.path().read_bytes()
    result = torchweld.tune("linear", *linear_call(), remember=True)
    assert "TORCHWELD_TUNE switches it off" in result.note
    assert cache.path().read_bytes() == before and picked(gpu=GPU)[1] == "heuristic"
    monkeypatch.setenv("TORCHWELD_TUNE", "1")
    assert loaded() == (BEST, "tuned")


# The command


def test_command_on_the_cpu(capsys):
    code, out, err = run_command(
        capsys,
        "tune",
        "gated_linear",
        "--shape",
        "8,16,32",
        "--gate",
        "sigmoid_tanh",
        "--device",
        "cpu",
    )
    assert (code, err) == (0, "") and out.count("\n") == 1
    assert out.startswith("torchweld.tune: there is nothing to tune for gated_linear on the CPU")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["softmax", "--shape", "4", "--gate", "geglu"], "--gate must go with an op"),
        (["gated_linear", "--shape", "4,5"], "M,K,N"),
        (["softmin", "--shape", "4"], "but got 'softmin'; use 'softmax'"),
        (["softmax", "--shape", "4", "--rounds", "0"], "'0'"),
        (["int4_linear", "--shape", "4,12,8"], "multiple of 8 that divides K = 12"),
        (["int4_linear", "--shape", "4,64,8", "--group", "24"], "but got 24"),
    ],
)
def test_bad_command(capsys, argv, words):
    code, out, err = run_command(capsys, "tune", *argv)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


# On a GPU

CALLS = {
    "linear": lambda d: [torch.randn(70, 300, dtype=d), torch.randn(48, 300, dtype=d)],
    "gated_linear": lambda d: [torch.randn(64, 256, dtype=d), torch.randn(128, 256, dtype=d)],
    "bmm": lambda d: [torch.randn(3, 40, 520, dtype=d), torch.randn(3, 520, 24, dtype=d)],
    "softmax": lambda d: [torch.randn(9, 1000, dtype=d)],
    "causal_softmax": lambda d: [torch.randn(2, 3, 64, 64, dtype=d)],
    "attention": lambda d: [torch.randn(2, 3, 100, 64, dtype=d) for _ in range(3)],
    "row_sum": lambda d: [torch.randn(5, 20_000, dtype=d)],
    "conv2d": lambda d: [torch.randn(3, 40, 50, dtype=d), torch.randn(3, 3, dtype=d)],
}


def on_gpu(tensors):
    return [t.cuda() for t in tensors]


SMALL_IMAGES = {
    f"conv2d {side} x {side}, {size}": lambda d, side=side, size=size: [
        torch.randn(37, side, side, dtype=d), torch.randn(size, size, dtype=d)
    ]
    for side, size in ((8, 3), (8, 5), (8, 7), (16, 5), (13, 4))
}  # fmt: skip


@needs_gpu
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("op", [*CALLS, *SMALL_IMAGES])
def test_every_legal_configuration_is_right(op, dtype):
    make = (CALLS | SMALL_IMAGES)[op]
    args = on_gpu(make(dtype))
    parts = kernel_choices(observe(lambda: getattr(ops, op.split()[0])(*args))[1])
    result = torchweld.tune(op.split()[0], *args, rounds=2)
    refused = {
        row["choice"]
        for row in result.rows
        if refusal(row["family"], parts[row["part"]].numbers, row["choice"])
    }
    timed = {row["choice"] for row in result.rows if row["us"] is not None}
    assert timed and not timed & refused
    wrong = [row for row in result.rows if row["choice"] not in timed | refused]
    assert not wrong, [(row["choice"], row["reason"]) for row in wrong]
    assert result.best["registers"] is None or 16 <= result.best["registers"] <= 255


@needs_gpu
@pytest.mark.parametrize(
    ("op", "name", "dtype"),
    [
        ("softmax_backward", "matrix", BF16),
        ("attention_backward", "plain", BF16),
        ("linear_backward", "relu", BF16),
        ("int4_linear", "whole_chunks", F32),
        ("int4_linear", "whole_chunks", BF16),
    ],
)
def test_gradients_and_int4_are_tuned_too(op, name, dtype):
    args, kwargs = sample(op, name).make("cuda", dtype)
    result = torchweld.tune(op, *args, rounds=2, **kwargs)
    assert result.best is not None
    assert not any("wrong" in row["reason"] for row in result.rows)


@needs_gpu
def test_a_forced_choice_runs_and_an_illegal_one_raises_a_sentence():
    x = torch.randn(3, 1000, device="cuda")
    _, (record,) = observe(lambda: ops.softmax(x))
    ops._force_choice("softmax", record["problem"], "stream")
    try:
        out, (forced,) = observe(lambda: ops.softmax(x))
    finally:
        ops._force_choice("softmax", record["problem"], "")
    assert forced["choice"] == "stream" and forced["source"] == "forced"
    assert forced["kernels"] and forced["kernels"] != record["kernels"]
    torch.testing.assert_close(out[0], torch.softmax(x, -1))


@needs_gpu
def test_remembered_choice_is_what_runs():
    x, weight = on_gpu(CALLS["linear"](BF16))
    _, (record,) = observe(lambda: ops.linear(x, weight))
    gpu = torch.cuda.get_device_name()
    other = next(
        c["choice"]
        for c in _C.candidates("matmul", record["problem"])
        if not c["refusal"] and c["choice"] != record["choice"]
    )
    ops._remember_choice(gpu, "matmul", record["problem"], other)
    out, (tuned,) = observe(lambda: ops.linear(x, weight))
    assert (tuned["choice"], tuned["source"]) == (other, "tuned")
    assert torchweld.explain("linear", x, weight).source == "tuned"
    graph, captured = cuda_graph(lambda: ops.linear(x, weight))
    graph.replay()
    assert torch.equal(captured, out[0])


@needs_gpu
def test_command_prints_the_notebooks_grid(capsys, tmp_path):
    code, out, _ = run_command(
        capsys, "tune", "gated_linear", "--shape", "1024,2048,2048", "--dtype", "float32", "--gate",
        "sigmoid_tanh", "--rounds", "2", "--save", str(tmp_path / "x.json")
    )  # fmt: skip
    assert code == 0
    result = TuneResult.load(tmp_path / "x.json")
    assert str(result) + "\n" == out
    tiles = {(r["block_m"], r["block_n"]) for r in result.rows if r["us"] is not None}
    assert {(64, 128), (64, 64)} <= tiles
