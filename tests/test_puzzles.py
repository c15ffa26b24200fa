"""The twelve puzzles: the specs, the accesses of the picture, the command; and testing.mad."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import puzzles
import torchweld
from commands import run_command
from puzzles import memory
from puzzles.cases import codes
from puzzles.main import main
from puzzles.picture import cells
from torchweld.testing import mad

ALL = [pytest.param(p, id=f"{p.number}_{p.title.replace(' ', '_')}") for p in puzzles.PUZZLES]


def test_numbers():
    assert [p.number for p in puzzles.PUZZLES] == list(range(1, 13))


@pytest.mark.parametrize("puzzle", ALL)
def test_op_solves_the_puzzle(puzzle, device):
    (result,) = puzzles.solve([puzzle.number], device)
    assert result.match, result
    assert result.error <= 1e-4


@pytest.mark.parametrize("puzzle", ALL)
def test_texts_say_what_is_computed(puzzle):
    """The printed spec and op, evaluated as Python, give the puzzle's result."""
    inputs = puzzle.inputs()
    names = {"torch": torch, "torchweld": torchweld, "F": F, "codes": codes, **inputs}
    for text in (puzzle.spec_text, puzzle.op_text):
        out = eval(text, names)
        assert tuple(out.shape) == puzzle.result
        torch.testing.assert_close(out, puzzle.spec(*inputs.values()), rtol=1e-5, atol=1e-4)


def test_specs_by_hand():
    """A few values straight from the formulas."""
    inputs = [p.inputs() for p in puzzles.PUZZLES]

    def value(number):
        puzzle = puzzles.PUZZLES[number - 1]
        return puzzle.spec(*(t.double() for t in inputs[number - 1].values()))

    x, y, dz = (t.double() for t in inputs[5].values())
    leaf = x.clone().requires_grad_()
    torch.relu(leaf * y[:, None]).backward(dz)
    assert mad(value(6), leaf.grad) == 0.0
    x, weight = (t.double() for t in inputs[9].values())
    corner = sum(weight[p, q] * x[2, 6 + p, 7 + q] for p in (0, 1) for q in (0,))
    assert mad(value(10)[2, 6, 7], corner) < 1e-12
    scale, offset, words, activation = inputs[11].values()

    def code(word, index):
        return (int(word) & 0xFFFFFFFF) >> (4 * index) & 15

    i, j = 5, 9
    expected = sum(
        float(scale[i, g])
        * (code(words[i, g], lane) - code(offset[i], g))
        * float(activation[8 * g + lane, j])
        for g, lane in itertools.product(range(8), range(8))
    )
    spec = puzzles.PUZZLES[11].spec(scale.double(), offset, words, activation.double())
    assert spec[i, j].item() == pytest.approx(expected, abs=1e-9)
    assert (words < 0).any(), "a code of 8 or more in the highest place makes a word negative"


def test_wrong_result_is_no_match(monkeypatch):
    wrong = dataclasses.replace(puzzles.PUZZLES[0], op=lambda x: x + 10.001)
    module = importlib.import_module("puzzles.solving")
    monkeypatch.setattr(module, "PUZZLES", (wrong, *puzzles.PUZZLES[1:]))
    (result,) = puzzles.solve([1])
    assert not result.match and "NO MATCH" in str(result)


@pytest.mark.parametrize("number", [0, 13, -1])
def test_number_that_is_none(number):
    with pytest.raises(ValueError, match="1 to 12, but got"):
        puzzles.solve([number])


# The access picture

TILES = {1: (16,), 2: (7,), 4: (32, 16), 6: (128, 1), 8: (3, 64), 9: (64, 200), 10: (3,)}


@pytest.mark.parametrize("puzzle", ALL)
@pytest.mark.parametrize("own_tile", [False, True])
def test_blocks_write_every_element_once_and_read_all(puzzle, own_tile):
    tile = TILES.get(puzzle.number) if own_tile else None
    touched = puzzles.accesses(puzzle, tile)
    shapes = {**puzzle.sizes, "z": puzzle.result}
    assert {a.tensor for a in touched} == set(shapes)
    for name, shape in shapes.items():
        count = torch.zeros(shape, dtype=torch.int64)
        lanes = masked = 0
        for a in (a for a in touched if a.tensor == name):
            assert a.shape == shape and a.write == (name == "z")
            # Slices drop elements beyond the end, as a mask does.
            part = count[tuple(slice(start, stop) for start, stop in a.ranges)]
            part += 1
            lanes += a.lanes
            masked += a.masked
        assert lanes - masked == count.sum()
        assert (count == 1).all() if name == "z" else (count >= 1).all()


def test_masked_lanes_of_the_notebook():
    """Puzzle 2: four blocks of 64 lanes, 200 elements. Puzzle 4: 128 x 128 lanes, 90 x 100."""
    second = [a for a in puzzles.accesses(puzzles.PUZZLES[1]) if a.write]
    assert [a.masked for a in second] == [0, 0, 0, 56]
    fourth = [a for a in puzzles.accesses(puzzles.PUZZLES[3]) if a.write]
    assert sum(a.masked for a in fourth) == 128 * 128 - 90 * 100
    halo = [a for a in puzzles.accesses(puzzles.PUZZLES[9]) if a.tensor == "x"]
    assert [a.masked for a in halo] == [11 * 11 - 8 * 8] * 4


def test_cells_of_a_panel():
    touched = [a for a in puzzles.accesses(puzzles.PUZZLES[3]) if a.tensor == "x"]
    grid, masked = cells(touched)
    assert (len(grid), len(grid[0])) == (1, 128)
    assert grid[0][0] == {0, 2} and grid[0][64] == {1, 3}
    assert masked[0] == [False] * 100 + [True] * 28


@pytest.mark.parametrize("tile", [(), (64,), (64, 64, 64), (0, 64), (64, -1)])
def test_tile_that_does_not_fit(tile):
    with pytest.raises(ValueError, match="the tile of puzzle 5 must be j,i"):
        puzzles.accesses(puzzles.PUZZLES[4], tile)


def test_picture(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    whole, tiled = tmp_path / "whole.png", tmp_path / "tiled.png"
    argv = ("--puzzle", "5", "--device", "cpu")
    assert run_puzzles(capsys, *argv, "--picture", str(whole))[0] == 0
    assert run_puzzles(capsys, *argv, "--picture", str(tiled), "--tile", "32,16")[0] == 0
    for path in (whole, tiled):
        assert path.read_bytes().startswith(b"\x89PNG")
    assert whole.read_bytes() != tiled.read_bytes()


# The command


def run_puzzles(capsys, *argv):
    return run_command(capsys, *argv, main=main)


def test_table(capsys, device):
    code, out, err = run_puzzles(capsys, "--device", device)
    assert (code, err) == (0, "")
    assert out.count("  match\n") == 12
    assert out.endswith(f"12 of 12 match on {device}\n")
    for puzzle in puzzles.PUZZLES:
        for text in (puzzle.title, puzzle.formula, puzzle.spec_text, puzzle.op_text):
            assert text in out


def test_one_puzzle(capsys):
    code, out, _ = run_puzzles(capsys, "--puzzle", "12", "--device", "cpu")
    assert code == 0
    assert out.startswith("12  quantised matmul") and "1 of 1 match" in out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--puzzle", "13"], "1 to 12"),
        (["--puzzle", "x"], "'x'"),
        (["--device", "tpu"], "'tpu'"),
        (["--picture", "a.png"], "--puzzle N"),
        (["--tile", "4"], "--picture"),
        (["--puzzle", "1", "--picture", "a.png", "--tile", "4,x"], "'4,x'"),
    ],
)
def test_bad_flags(capsys, argv, words):
    code, out, err = run_puzzles(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and err.startswith("puzzles: ") and words in err


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--tile", "4,4"], "must be i,"),
        (["--tile", "1000000000"], "at most 1,048,576 lanes in all blocks, but got 2,000,000,000"),
        ([], "can't be written"),
    ],
)
def test_picture_that_cannot_be_drawn(capsys, tmp_path, extra, words):
    pytest.importorskip("matplotlib")
    path = tmp_path / ("a.png" if extra else "none/a.png")
    argv = ["--puzzle", "1", "--device", "cpu", "--picture", str(path), *extra]
    code, _, err = run_puzzles(capsys, *argv)
    assert code == 2 and err.count("\n") == 1 and words in err
    assert not path.exists()


# The memory check


def test_memory_check_on_the_cpu_is_one_sentence(capsys):
    code, _, err = run_puzzles(capsys, "--puzzle", "1", "--device", "cpu", "--check-memory")
    assert code == 1 and err.count("\n") == 1 and "--device cuda" in err


def test_memory_check_without_the_tool_is_one_sentence(monkeypatch):
    monkeypatch.setattr(memory.shutil, "which", lambda name: None)
    with pytest.raises(memory.MemoryCheckError, match="needs compute-sanitizer, which is not"):
        memory.check_memory([1], "cuda")


BAD_REPORT = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at add_scalar_kernel+0x90 in add.cu:12
=========     by thread (32,0,0) in block (0,0,0)
========= Invalid __global__ read of size 4 bytes
=========     at add_scalar_kernel+0x90 in add.cu:12
 1  constant add                   max error 0.0e+00  match
========= ERROR SUMMARY: 2 errors
"""


def test_report_is_read():
    check = memory.read_report(1, BAD_REPORT)
    assert check.errors == 2
    assert check.accesses == ("Invalid __global__ read of size 4 bytes",)
    assert "2 errors" in str(check) and "Invalid" in str(check)
    clean = memory.read_report(3, "========= ERROR SUMMARY: 0 errors\n")
    assert clean.errors == 0 and str(clean) == " 3  no invalid access"
    with pytest.raises(memory.MemoryCheckError, match="no summary for puzzle 2.*segfault"):
        memory.read_report(2, "a line\nsegfault\n")


def test_check_runs_the_puzzle_under_the_tool(monkeypatch):
    seen = []

    def fake(command, **kwargs):
        seen.append((command, kwargs["env"]["PYTORCH_NO_CUDA_MEMORY_CACHING"]))
        return memory.subprocess.CompletedProcess(command, 9, stdout=BAD_REPORT)

    monkeypatch.setattr(memory.shutil, "which", lambda name: "/bin/" + name)
    monkeypatch.setattr(memory.subprocess, "run", fake)
    checks = memory.check_memory([4, 7], "cuda:0")
    assert [c.number for c in checks] == [4, 7]
    command, caching_off = seen[1]
    assert command[0] == "/bin/compute-sanitizer" and caching_off == "1"
    assert command[-4:] == ["--puzzle", "7", "--device", "cuda:0"]


# testing.mad


def test_mad():
    a = torch.tensor([1.0, 2.0, math.inf, -math.inf])
    assert mad(a, a.clone()) == 0.0
    assert mad(a, torch.tensor([1.5, 2.0, math.inf, -math.inf])) == 0.5
    assert mad(a, torch.tensor([1.0, 2.0, math.inf, math.inf])) == math.inf
    assert math.isnan(mad(a, torch.tensor([1.0, math.nan, math.inf, -math.inf])))
    assert mad(torch.empty(0, 3), torch.empty(0, 3)) == 0.0
    # The largest difference is computed before both numbers are rounded.
    assert mad(torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64) + 2.0**-40) == 2.0**-40
    assert mad(torch.tensor([2, -3]), torch.tensor([2, 4])) == 7.0
    leaf = torch.ones(2, requires_grad=True)
    assert mad(leaf, torch.zeros(2)) == 1.0


def test_mad_of_other_shapes_is_refused():
    with pytest.raises(ValueError, match=r"b must be \(2, 1\) like a, but got \(2,\)"):
        mad(torch.zeros(2, 1), torch.zeros(2))
