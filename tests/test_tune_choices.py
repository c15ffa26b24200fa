"""The tables of configurations, forced and remembered choices: host code, without a GPU."""

from __future__ import annotations

import itertools
import random
import threading

import pytest
import torch

import torchweld
from tuning import (  # noqa: F401
    GPU,
    H200,
    LINEAR,
    SMALL,
    nothing_is_left_behind,
    picked,
    refusal,
)

_C = pytest.importorskip("torchweld._C")

ops = torch.ops.torchweld

SIZES = (1, 2, 7, 8, 16, 33, 64, 100, 257, 1000, 1024, 4096, 70_000)


def problems(family: str, seed: int = 0, count: int = 300):
    """Random problems within what the kernels may meet."""
    r = random.Random(seed)
    size = lambda: r.choice(SIZES)  # noqa: E731
    flag = lambda: r.randint(0, 1)  # noqa: E731
    for _ in range(count):
        elem, limits = r.choice((2, 4)), r.choice((H200, SMALL))
        dims = [r.choice((1, 32, 64, 65, 128, 200, 256, 300)) for _ in range(2)]
        load = [r.choice((1, 4)), flag(), flag(), flag()]
        if family == "matmul":
            yield [
                size(),
                size(),
                size(),
                r.choice((1, 3, 64)),
                flag(),
                flag(),
                r.randint(0, 3),
                *limits,
            ] + [
                flag(),
                flag(),
            ]
        elif family == "softmax":
            flags = [flag() for _ in range(5)]
            yield [size(), elem, *flags, limits[1], size(), flag(), flag(), flag()]
        elif family == "attention":
            yield [size(), size(), size(), *dims, r.randint(0, 2), *load]
        elif family == "attention_backward":
            yield [size(), size(), size(), *dims, r.randint(0, 2), *load, limits[1]]
        elif family == "int4":
            groups = r.choice((1, 2, 3, 8))
            k = groups * r.choice((8, 24, 64, 128, 1024))
            yield [size(), size(), k, groups, elem, *limits, flag(), flag(), flag()]
        elif family == "row_sum":
            yield [size(), size(), elem, flag(), flag(), limits[0], flag()]
        else:
            kernel = [r.choice((1, 3, 4, 5, 7, 9, 10, 31, 40)) for _ in range(2)]
            if flag():
                kernel[1] = kernel[0]
            yield [size(), size(), size(), *kernel, elem, flag(), flag()]


def softmax_problem(n: int, elem_size: int = 4, **changes) -> list[int]:
    """Rows on an H200, in float32 or float16, with 1 or 0 for what is changed."""
    problem = dict(n=n, elem_size=elem_size, aligned=1, backward=0, tiled=1, clusters=1, in_phase=1)
    problem |= dict(shared_limit=H200[1], rows=64, masked=0, bfloat16=0, clusters_of_16=1) | changes
    return [int(number) for number in problem.values()]


FAMILIES = ("matmul", "softmax", "attention", "attention_backward", "int4", "row_sum", "conv2d")


# The tables


def test_every_family_is_tested():
    assert tuple(_C.families()) == FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_own_choice_is_a_legal_candidate(family):
    for problem in problems(family):
        own, source = ops._picked_choice("", family, problem)
        assert source == "heuristic"
        candidates = _C.candidates(family, problem)
        texts = [tuple(c["choice"]) for c in candidates]
        assert len(set(texts)) == len(texts), "a configuration is listed twice"
        (mine,) = [c for c in candidates if c["choice"] == own]
        assert mine["refusal"] == "", (problem, own, mine)
        assert all(c == _C.candidate(family, problem, c["choice"]) for c in candidates[:3])


@pytest.mark.parametrize("family", FAMILIES)
def test_problems_of_a_shape_class_have_the_same_configurations(family):
    """What one of them takes, the class's largest takes too, so that a choice can be shared."""
    for problem in problems(family, seed=1, count=100):
        wide = _C.shape_class(family, problem)
        assert _C.shape_class(family, wide) == wide
        legal = [c["choice"] for c in _C.candidates(family, problem) if not c["refusal"]]
        for choice in legal:
            if family == "row_sum" and choice[1] > 1:
                continue  # more than 16384 rows are not cut
            assert _C.candidate(family, wide, choice)["refusal"] == "", (problem, wide, choice)


def test_reasons_of_a_matmul():
    assert "another" not in refusal("matmul", LINEAR, 0, 1)
    assert "float32 alone" in refusal("matmul", LINEAR, 4, 1)
    single = [*LINEAR[:6], 3, *LINEAR[7:]]
    assert "pieces of float32" in refusal("matmul", single, 0, 1)
    small = [*LINEAR[:8], 65536, 1, 1]
    assert (
        refusal("matmul", small, 0, 1)
        == "too much shared memory: 147456 bytes a block, the GPU has 65536"
    )
    assert refusal("matmul", LINEAR, 1, 24) == "K has 32 steps, which leaves one of 24 parts empty"
    assert "1 to 32 parts" in refusal("matmul", LINEAR, 1, 33)
    assert "no tile 6" in refusal("matmul", LINEAR, 6, 1) and "no tile -1" in refusal(
        "matmul", LINEAR, -1, 1
    )
    huge = [2**40, 2**40, *LINEAR[2:]]
    assert "2^31" in refusal("matmul", huge, 1, 1)
    long_k = [1, 1, 2**33, *LINEAR[3:]]
    assert "2^24 steps" in refusal("matmul", long_k, 1, 4) and not refusal("matmul", long_k, 1, 8)


def test_a_tile_of_the_gradient_never_writes_beyond_its_scratch():
    """dQ's scratch has 64, 128 or 256 columns, as head dims ask for, and not as the tile does."""
    for dims in ((64, 64), (1, 8), (65, 64), (128, 3), (129, 8), (256, 256)):
        columns = next(c for c in (64, 128, 256) if max(dims) <= c)
        for math in range(3):
            problem = [8, 128, 128, *dims, math, 1, 1, 0, 0, H200[1]]
            legal = [c for c in _C.candidates("attention_backward", problem) if not c["refusal"]]
            assert {c["columns"]["head_dim"] for c in legal} <= {0, columns}
            assert len(legal) > 1


def test_softmax_tiles_and_rings_hold_the_row():
    for n, size in ((1000, 4), (1001, 2), (40_000, 2), (300_000, 4), (10**6, 2)):
        for backward, masked in itertools.product((False, True), repeat=2):
            aligned = n * size % 16 == 0
            changes = dict(aligned=aligned, backward=backward, masked=masked)
            *kept, stream = _C.candidates("softmax", softmax_problem(n, size, **changes))
            tiles = _C.softmax_tiles(size, backward, aligned, masked)
            rings = _C.softmax_rings(size, backward, aligned)
            for tile, found in zip(tiles + rings, kept, strict=True):
                holds = tile["capacity"] >= n and tile.get("suits", True)
                assert (found["refusal"] == "") == holds
            kinds = [found["columns"]["kind"] for found in kept]
            assert kinds == [0] * len(tiles) + [1] * len(rings)
            assert stream["refusal"] == "" and stream["columns"]["kind"] == 2


def test_reasons_of_a_softmax():
    tiles = len(_C.softmax_tiles(4, False, True))
    for number in (0, tiles):
        assert "scale is 0" in refusal("softmax", softmax_problem(64, tiled=False), number)
    assert refusal("softmax", softmax_problem(64, tiled=False), -1) == ""
    assert "registers" in refusal("softmax", softmax_problem(64, 2, backward=True), tiles - 1)
    assert refusal("softmax", softmax_problem(129), 0) == "holds 128 elements, the row has 129"
    number = [(t["threads"], t["loads"]) for t in _C.softmax_tiles(2, False, True)].index
    for size, changes in ((2, {}), (2, dict(masked=True, backward=True)), (4, dict(masked=True))):
        plain = softmax_problem(64, size, **changes)
        assert refusal("softmax", plain, number((64, 4))) == "for 16-bit scores under a mask"
    scores = softmax_problem(64, 2, masked=True)
    assert refusal("softmax", scores, number((64, 4))) == ""
    assert "have other tiles" in refusal("softmax", scores, number((64, 2)))
    long = dict(n=70_000, aligned=True)
    assert "holds 69632 elements" in refusal("softmax", softmax_problem(**long), tiles)
    assert refusal("softmax", softmax_problem(**long), tiles + 1) == ""
    assert "clusters" in refusal("softmax", softmax_problem(**long, clusters=False), tiles + 1)
    long_gradient = dict(n=262_144, backward=True)
    widest = tiles + 4
    assert refusal("softmax", softmax_problem(**long_gradient), widest) == ""
    assert "gradient" in refusal("softmax", softmax_problem(262_144), widest)
    none_fits = softmax_problem(**long_gradient, clusters_of_16=False)
    assert refusal("softmax", none_fits, widest) == "clusters of 16 do not fit on the GPU"
    assert refusal("softmax", none_fits, widest - 1) == ""
    assert "16-byte" in refusal("softmax", softmax_problem(**long, in_phase=False), tiles + 1)
    small = softmax_problem(**long, shared_limit=SMALL[1])
    assert "the GPU has 101376" in refusal("softmax", small, tiles + 1)


def test_a_softmax_remembers_tiles_rings_and_the_streaming_kernel():
    problem = softmax_problem(16_384)
    (own,), source = picked("softmax", problem, GPU)
    assert (_C.candidate("softmax", problem, [own])["columns"]["kind"], source) == (0, "heuristic")
    for number in (own + 1, len(_C.softmax_tiles(4, False, True)), -1):
        if not refusal("softmax", problem, number):
            ops._remember_choice(GPU, "softmax", problem, [number])
            assert picked("softmax", problem, GPU) == ([number], "tuned")
    assert picked("softmax", problem, GPU) == ([-1], "tuned")


def int4_problem(**changes) -> list[int]:
    """64 rows of bfloat16 on an H200, with 1 or 0 for what is changed."""
    problem = dict(m=64, n=4096, k=4096, groups=32, elem_size=2, sms=H200[0], shared_limit=H200[1])
    problem |= dict(clusters=1, warpgroups=1, bfloat16=1) | changes
    return [int(number) for number in problem.values()]


def test_reasons_of_a_4_bit_product():
    deep = _C.choose_int4(64, 4096, 4096, 32, 2, *H200, True, True)["tile"]
    wide = _C.choose_int4(4096, 4096, 4096, 32, 2, *H200, True, True)["tile"]
    for parts in (2, 3, 4, 8):
        assert not refusal("int4", int4_problem(), deep, parts)
    assert "1, 2, 3, 4 or 8 parts" in refusal("int4", int4_problem(), deep, 5)
    assert "leaves one of 3 parts empty" in refusal("int4", int4_problem(k=1024, groups=8), deep, 3)
    assert "fewer rows" in refusal("int4", int4_problem(m=4097), deep, 1)
    for changes in (dict(warpgroups=0), dict(clusters=0)):
        assert "Hopper" in refusal("int4", int4_problem(**changes), wide, 1)
    for changes in (dict(elem_size=4), dict(groups=128), dict(groups=1, k=4064)):
        assert "multiple of 64" in refusal("int4", int4_problem(**changes), wide, 1)
    assert "1, 2, 4 or 8 parts" in refusal("int4", int4_problem(), wide, 3)
    assert "leaves one of 8 parts empty" in refusal("int4", int4_problem(k=192, groups=1), wide, 8)
    assert "the GPU has 65536" in refusal("int4", int4_problem(shared_limit=65536), wide, 1)
    assert "2^31" in refusal("int4", int4_problem(m=2**40, n=2**40), wide, 1)


CONV2D = ("direct", "banded", "general", "cells", "small", "narrow")


def conv2d_problem(height: int, width: int, kernel: tuple[int, int], elem_size: int) -> list[int]:
    return [4096, height, width, *kernel, elem_size, 0, int(elem_size == 2)]


# Image, kernel, bytes of an element, and what was fastest on an H200: a kernel, and for cells and
# narrow images the kernels that the tile is for.
FASTEST_CONV2D = [
    (8, 8, 3, 4, "small", 0), (8, 8, 7, 4, "small", 0), (16, 16, 5, 4, "small", 0),
    (16, 16, 7, 4, "direct", 0), (17, 16, 5, 4, "direct", 0), (16, 17, 3, 4, "direct", 0),
    (16, 9, 7, 4, "direct", 0), (64, 64, 3, 4, "direct", 0), (512, 512, 7, 4, "direct", 0),
    (8, 8, 6, 4, "general", 0), (8, 8, 3, 2, "narrow", 3), (16, 16, 5, 2, "cells", 5),
    (64, 64, 4, 2, "cells", 5), (512, 512, 3, 2, "cells", 3), (512, 512, 5, 2, "cells", 5),
    (8, 8, 4, 2, "narrow", 5), (8, 8, 5, 2, "narrow", 5), (512, 512, 7, 2, "cells", 7),
    (64, 64, 9, 2, "cells", 9),
    (8, 8, 10, 2, "banded", 0), (64, 64, 31, 2, "banded", 0), (64, 64, 32, 2, "general", 0),
]  # fmt: skip


CELLS = (3, 5, 7, 9)  # the largest kernel of each tile


@pytest.mark.parametrize(("height", "width", "size", "elem", "fastest", "cells"), FASTEST_CONV2D)
def test_convolutions_take_what_was_measured_as_fastest(height, width, size, elem, fastest, cells):
    (kernel, tile), _ = picked("conv2d", conv2d_problem(height, width, (size, size), elem))
    assert CONV2D[kernel] == fastest and (not cells or CELLS[tile] == cells)


def test_cells_hold_the_kernel():
    """Also where it is not square: its larger size counts."""
    for kernel in ((1, 1), (3, 2), (2, 5), (7, 1), (6, 8), (9, 9), (9, 10), (10, 1)):
        problem = conv2d_problem(40, 24, kernel, 2)
        cells = [c for c in _C.candidates("conv2d", problem) if CONV2D[c["choice"][0]] == "cells"]
        assert [c["refusal"] == "" for c in cells] == [max(kernel) <= size for size in CELLS]
        (name, tile), _ = picked("conv2d", problem)
        if max(kernel) <= 9:
            assert CONV2D[name] == "cells" and max(kernel) <= CELLS[tile] <= max(kernel) + 2
        else:
            assert CONV2D[name] == "banded"


def test_images_of_8_columns_have_a_kernel_of_their_own():
    """Up to 8 rows, and kernels up to 7 x 7, square or not."""
    for height, width, kernel, tile in (
        (8, 8, (3, 3), 0), (1, 8, (1, 1), 0), (7, 8, (2, 4), 1), (8, 8, (7, 7), 2),
        (3, 8, (6, 1), 2), (9, 8, (3, 3), None), (8, 7, (3, 3), None), (8, 9, (5, 5), None),
        (8, 8, (8, 3), None),
    ):  # fmt: skip
        problem = conv2d_problem(height, width, kernel, 2)
        chosen, _ = picked("conv2d", problem)
        assert chosen == ([5, tile] if tile is not None else [3, chosen[1]])
        for i, size in enumerate(CELLS[:3]):
            fits = tile is not None and max(kernel) <= size
            assert (refusal("conv2d", problem, 5, i) == "") == fits
    assert "8 columns" in refusal("conv2d", conv2d_problem(8, 8, (3, 3), 4), 5, 0)
    assert "no tile 3" in refusal("conv2d", conv2d_problem(8, 8, (3, 3), 2), 5, 3)


def test_reasons_of_a_conv2d():
    small, large = (conv2d_problem(n, n, (7, 7), 4) for n in (8, 16))
    assert refusal("conv2d", small, 4, 0) == "" == refusal("conv2d", large, 0, 0)
    assert "8 columns" in refusal("conv2d", large, 4, 0)
    assert "16 x 16" in refusal("conv2d", conv2d_problem(17, 8, (3, 3), 4), 4, 0)
    half = conv2d_problem(8, 8, (4, 4), 2)
    assert "float32" in refusal("conv2d", half, 0, 0) and "float32" in refusal("conv2d", half, 4, 0)
    assert refusal("conv2d", half, 3, 0) == "16 bits and kernels of 3 x 3 at most"
    assert refusal("conv2d", half, 3, 1) == "" == refusal("conv2d", half, 1, 0)
    assert "no tile 4" in refusal("conv2d", half, 3, 4)
    assert refusal("conv2d", half, 4, 1) == "the kernel has one tile"
    for kernel in (-1, 6, 256, 2**40):
        assert refusal("conv2d", half, kernel, 0) == "there is no such kernel"


def test_parts_cover_what_is_cut():
    for problem in problems("int4", seed=2):
        for found in _C.candidates("int4", problem):
            if found["refusal"] or found["choice"][0] < 0:
                continue
            chunks, per_step = -(-problem[2] // 64), found["columns"]["block_k"] // 64
            steps, parts = -(-chunks // per_step), found["choice"][1]
            assert (parts - 1) * -(-steps // parts) < steps
    for problem in problems("row_sum", seed=2):
        for found in _C.candidates("row_sum", problem):
            parts, n = found["choice"][1], problem[1]
            if found["refusal"] or parts == 1:
                continue
            block = 16 // problem[2] * 256 * 4
            part = -(-n // (parts * block)) * block
            assert (parts - 1) * part < n <= parts * part


@pytest.mark.parametrize(
    ("family", "problem", "words"),
    [
        ("gemm", LINEAR, "no family"),
        ("matmul", LINEAR[:-1], "11 numbers"),
        ("matmul", [*LINEAR, *LINEAR], "11 numbers"),
        ("matmul", [0, *LINEAR[1:]], "m from 1"),
        ("matmul", [2**41, *LINEAR[1:]], "m from 1"),
        ("matmul", [*LINEAR[:6], 4, *LINEAR[7:]], "math from 0 to 3"),
        ("matmul", [*LINEAR[:7], 0, *LINEAR[8:]], "sms from 1"),
        ("softmax", [64, 8, 1, 0, 1, 1, 1, 0, 64, 1, 0, 1], "elem_size from 2 to 4"),
        ("softmax", [64, 4, 2, 0, 1, 1, 1, 0, 64, 1, 0, 1], "aligned from 0 to 1"),
    ],
)
def test_numbers_that_are_no_problem(family, problem, words):
    for call in (_C.candidates, _C.shape_class):
        with pytest.raises(ValueError, match=words):
            call(family, problem)
    with pytest.raises(RuntimeError, match="must be"):
        ops._picked_choice("", family, problem)


# Forced and remembered choices


def test_forced_choice_holds_for_its_shape_class_and_thread():
    ops._force_choice("matmul", LINEAR, [1, 2])
    assert picked() == ([1, 2], "forced")
    assert picked(problem=[513, *LINEAR[1:]]) == ([1, 2], "forced")
    assert picked(problem=[512, *LINEAR[1:]])[1] == "heuristic"
    for i in range(1, len(LINEAR)):
        other = list(LINEAR)
        other[i] += -1 if other[i] == 1 and i > 3 else 1
        assert picked(problem=other)[1] == "heuristic", "every number is part of the key"
    seen = []
    thread = threading.Thread(target=lambda: seen.append(picked()))
    thread.start()
    thread.join()
    assert seen[0][1] == "heuristic"
    ops._force_choice("matmul", LINEAR, [])
    assert picked()[1] == "heuristic"


def test_forced_choice_that_another_problem_of_the_class_refuses():
    """16384 rows may be cut, and so may not 16385, which stand for 32768."""
    few, many = [20_000, 2**20, 4, 1, 1, 132, 0], [16_384, 2**20, 4, 1, 1, 132, 0]
    with pytest.raises(RuntimeError, match="choice must be one that the problem allows, but got"):
        ops._force_choice("row_sum", few, [8, 2])
    ops._force_choice("row_sum", many, [8, 2])
    assert picked("row_sum", many) == ([8, 2], "forced")
    ops._force_choice("row_sum", many, [])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("gemm", LINEAR, [0, 1]), "family must be one of matmul, .*conv2d, but got 'gemm'"),
        (("matmul", LINEAR[1:], [0, 1]), "problem must be 11 numbers for matmul, but got"),
        (("matmul", [1] * 99, [0, 1]), "problem must be at most 12 numbers, but got 99"),
        (("matmul", LINEAR, [0]), "choice must be 2 numbers for matmul, but got"),
        (("matmul", LINEAR, [0] * 99), "choice must be at most 12 numbers, but got 99"),
        (("matmul", LINEAR, [6, 1]), "choice must be one that .*there is no tile 6, there are 6"),
        (("matmul", LINEAR, [-(2**62), 1]), "choice must be one that"),
        (("matmul", LINEAR, [0, 2**62]), "choice must be one that"),
        (("softmax", softmax_problem(64), [-2]), "choice must be one that"),
        (("softmax", softmax_problem(64), [99]), "choice .* no tile 99, there are"),
        (("attention", [8, 64, 64, 64, 64, 0, 1, 0, 0, 0], [3]), "choice .* for another dtype"),
    ],
)
def test_bad_choice_is_refused(args, words):
    with pytest.raises(RuntimeError, match=f"torchweld::_force_choice: {words}"):
        ops._force_choice(*args)
    with pytest.raises(RuntimeError, match=f"torchweld::_remember_choice: {words}"):
        ops._remember_choice(GPU, *args)
    assert picked(gpu=GPU)[1] == "heuristic"


def test_remembered_choice_holds_for_its_gpu_and_gives_way_to_a_forced_one():
    own = picked()[0]
    ops._remember_choice(GPU, "matmul", LINEAR, [2, 3])
    assert picked(gpu=GPU) == ([2, 3], "tuned")
    assert picked(gpu="another GPU") == (own, "heuristic")
    ops._force_choice("matmul", LINEAR, [1, 1])
    assert picked(gpu=GPU) == ([1, 1], "forced")
    ops._force_choice("matmul", LINEAR, [])
    ops._remember_choice(GPU, "matmul", LINEAR, [3, 1])
    assert picked(gpu=GPU) == ([3, 1], "tuned")
    ops._forget_choices()
    assert picked(gpu=GPU) == (own, "heuristic")


def test_threads_remember_and_look_up_at_once():
    wrong = []

    def work_on(thread: int) -> None:
        for i in range(100):
            ops._remember_choice(GPU, "matmul", [2**thread, *LINEAR[1:]], [i % 4, 1])
            choice, source = picked(problem=[2**thread, *LINEAR[1:]], gpu=GPU)
            if (choice, source) != ([i % 4, 1], "tuned"):
                wrong.append((thread, i, choice, source))

    threads = [threading.Thread(target=work_on, args=(t,)) for t in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_watch_ends():
    assert ops._watch_choices(True) == []
    torchweld.softmax(torch.ones(2, 3))  # the CPU has nothing to choose
    assert ops._watch_choices(False) == []
