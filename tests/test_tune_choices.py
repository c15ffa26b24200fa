"""Forced and remembered choices, and observation: host code, tested without a GPU."""

from __future__ import annotations

import threading

import pytest
import torch

import torchweld
from choices_helpers import (  # noqa: F401
    _C,
    GPU,
    LINEAR,
    NO_WGMMA,
    named,
    nothing_is_left_behind,
    ops,
    picked,
    problem,
)


def test_forced_choice_holds_for_its_shape_class_and_thread():
    ops._force_choice("matmul", LINEAR, "sync 128x128 /2")
    assert picked() == ("sync 128x128 /2", "forced")
    assert picked(numbers=problem("matmul", NO_WGMMA, m=513)) == ("sync 128x128 /2", "forced")
    assert picked(numbers=problem("matmul", NO_WGMMA, m=512))[1] == "heuristic"
    flags = {"gated", "pointwise", "a_k_major", "b_k_major"}
    flags |= {"clusters", "clusters_of_16", "tma", "wgmma"}
    for field, value in named("matmul", LINEAR).items():
        if field == "m":
            continue
        changed = {field: 1 - value if field in flags else value + 1}
        other = problem("matmul", NO_WGMMA | changed)
        assert picked(numbers=other)[1] == "heuristic", f"{field} is part of the key"
    seen = []
    thread = threading.Thread(target=lambda: seen.append(picked()))
    thread.start()
    thread.join()
    assert seen[0][1] == "heuristic"
    ops._force_choice("matmul", LINEAR, "")
    assert picked()[1] == "heuristic"


def test_forced_choice_that_another_problem_of_the_class_refuses():
    """16384 rows allow a split; 20000 rows do not, because their class is that of 32768."""
    few, many = (problem("row_sum", rows=rows, n=2**20) for rows in (20_000, 16_384))
    with pytest.raises(RuntimeError, match="choice must be"):
        ops._force_choice("row_sum", few, "tile 256x4 /2")
    ops._force_choice("row_sum", many, "tile 256x4 /2")
    assert picked("row_sum", many) == ("tile 256x4 /2", "forced")
    ops._force_choice("row_sum", many, "")


UNKNOWN = "choice must be the name of a configuration of"
REFUSED = "choice must be one that the problem allows, but got"


@pytest.mark.parametrize(
    ("family", "numbers", "choice", "words"),
    [
        ("gemm", LINEAR, "sync 256x128", "family must be one of matmul, .*conv2d, but got 'gemm'"),
        ("matmul", LINEAR[1:], "sync 256x128", "problem must be 18 numbers for matmul, but got"),
        ("matmul", [1] * 99, "sync 256x128", "problem must be at most 24 numbers, but got 99"),
        ("matmul", LINEAR, "sync", f"{UNKNOWN} matmul, but got 'sync'; .*candidates lists them"),
        ("matmul", LINEAR, "sync 96x96", f"{UNKNOWN} matmul, but got 'sync 96x96'"),
        ("matmul", LINEAR, "sync 128x128 /33", f"{UNKNOWN} matmul, but got"),
        ("matmul", LINEAR, "sync 128x128 ", f"{UNKNOWN} matmul, but got"),
        ("matmul", LINEAR, "x" * 10_000, f"{UNKNOWN} matmul, but got"),
        ("matmul", LINEAR, "tile 32x1", f"{UNKNOWN} matmul, but got"),
        ("matmul", LINEAR, "sync 128x128 /24", f"{UNKNOWN} matmul"),  # leaves a part empty
        ("matmul", LINEAR, "sm90 128x96", f"{REFUSED} .*has no wgmma"),
        ("matmul", LINEAR, "sync float32 64x128", f"{REFUSED} .*only for float32"),
        ("softmax", problem("softmax"), "ring 3", f"{UNKNOWN} softmax"),
        ("softmax", problem("softmax", n=70_000), "ring 1", f"{REFUSED} .*holds 69632 elements"),
        ("attention", problem("attention"), "sync tf32 128x32x64", f"{REFUSED} .*another dtype"),
    ],
)
def test_bad_choice_is_refused(family, numbers, choice, words):
    with pytest.raises(RuntimeError, match=f"torchweld::_force_choice: {words}"):
        ops._force_choice(family, numbers, choice)
    with pytest.raises(RuntimeError, match=f"torchweld::_remember_choice: {words}"):
        ops._remember_choice(GPU, family, numbers, choice)
    assert picked(gpu=GPU)[1] == "heuristic"


def test_an_empty_choice_takes_back_a_forced_one_alone():
    with pytest.raises(RuntimeError, match=f"_remember_choice: {UNKNOWN} matmul, but got ''"):
        ops._remember_choice(GPU, "matmul", LINEAR, "")
    ops._force_choice("matmul", LINEAR, "")
    assert picked()[1] == "heuristic"


def test_remembered_choice_holds_for_its_gpu_and_gives_way_to_a_forced_one():
    own = picked()[0]
    ops._remember_choice(GPU, "matmul", LINEAR, "sync 128x64 /3")
    assert picked(gpu=GPU) == ("sync 128x64 /3", "tuned")
    assert picked(gpu="another GPU") == (own, "heuristic")
    ops._force_choice("matmul", LINEAR, "sync 128x128")
    assert picked(gpu=GPU) == ("sync 128x128", "forced")
    ops._force_choice("matmul", LINEAR, "")
    ops._remember_choice(GPU, "matmul", LINEAR, "sync 64x64")
    assert picked(gpu=GPU) == ("sync 64x64", "tuned")
    ops._forget_choices()
    assert picked(gpu=GPU) == (own, "heuristic")


def test_a_softmax_remembers_tiles_rings_and_the_streaming_kernel():
    numbers = problem("softmax", n=16_384)
    own, source = picked("softmax", numbers, GPU)
    assert (own.split()[0], source) == ("tile", "heuristic")
    for name in ("tile 1024x8", "ring 1", "stream"):
        assert name != own
        ops._remember_choice(GPU, "softmax", numbers, name)
        assert picked("softmax", numbers, GPU) == (name, "tuned")


def test_threads_remember_and_look_up_at_once():
    names = ("sync 256x128", "sync 128x128", "sync 128x64", "sync 64x64")
    wrong = []

    def work_on(thread: int) -> None:
        numbers = problem("matmul", m=2**thread)
        for i in range(100):
            name = names[i % 4]
            ops._remember_choice(GPU, "matmul", numbers, name)
            found = picked(numbers=numbers, gpu=GPU)
            if found != (name, "tuned"):
                wrong.append((thread, i, found))

    threads = [threading.Thread(target=work_on, args=(t,)) for t in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_watch_ends():
    ops._begin_observing()
    torchweld.softmax(torch.ones(2, 3))  # the CPU has nothing to choose
    assert ops._end_observing() == []
    assert ops._end_observing() == [], "nothing is observed any more"
