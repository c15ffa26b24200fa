"""The tables of every family of kernels: host code, tested without a GPU."""

from __future__ import annotations

import random

import pytest

from choices_helpers import _C, DEVICES, H200, LINEAR, named, ops, problem

FAMILIES = ("matmul", "softmax", "attention", "attention_backward", "int4", "row_sum", "conv2d")
SIZES = (1, 2, 7, 8, 16, 33, 64, 100, 257, 1000, 1024, 4096, 70_000)
HEAD_DIMS = (1, 32, 64, 65, 128, 200, 256, 300)
KERNELS = (1, 3, 4, 5, 7, 9, 10, 31, 40)


def problems(family: str, seed: int = 0, count: int = 300):
    """Random problems within the limits of the kernels."""
    r = random.Random(seed)
    size = lambda: r.choice(SIZES)  # noqa: E731
    flags = lambda *names: {name: r.randint(0, 1) for name in names}  # noqa: E731
    for _ in range(count):
        fields = flags("bfloat16") | dict(elem_size=r.choice((2, 4)))
        if family == "matmul":
            fields = dict(m=size(), n=size(), k=size(), batch=r.choice((1, 3, 64)))
            fields |= flags("gated", "pointwise", "a_k_major", "b_k_major")
            fields |= dict(math=r.randint(0, 3))
        elif family == "softmax":
            fields |= dict(n=size(), rows=size())
            fields |= flags("aligned", "backward", "tiled", "in_phase", "masked")
        elif family.startswith("attention"):
            fields = dict(heads=size(), seqlen_q=size(), seqlen_k=size(), math=r.randint(0, 2))
            fields |= dict(head_dim=r.choice(HEAD_DIMS), head_dim_v=r.choice(HEAD_DIMS))
            fields |= dict(group=r.choice((1, 4))) | flags("causal", "padded", "bfloat16")
        elif family == "int4":
            groups = r.choice((1, 2, 3, 8))
            k = groups * r.choice((8, 24, 64, 128, 1024))
            fields |= dict(m=size(), n=size(), k=k, groups=groups)
        elif family == "row_sum":
            fields |= dict(rows=size(), n=size()) | flags("contiguous", "aligned")
        else:
            fields |= dict(batch=size(), height=size(), width=size()) | flags("flipped")
            fields |= dict(kernel_height=r.choice(KERNELS), kernel_width=r.choice(KERNELS))
            if r.randint(0, 1):
                fields["kernel_width"] = fields["kernel_height"]
        yield problem(family, r.choice(DEVICES), **fields)


def test_every_family_is_tested():
    assert tuple(_C.families()) == FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_problems_end_with_the_device(family):
    assert _C.families()[family][-len(H200) :] == list(H200)


@pytest.mark.parametrize("family", FAMILIES)
def test_own_choice_is_a_legal_candidate(family):
    for numbers in problems(family):
        own, source = ops._picked_choice("", family, numbers)
        assert source == "heuristic"
        candidates = _C.candidates(family, numbers)
        names = [c["choice"] for c in candidates]
        assert len(set(names)) == len(names), "a configuration is listed twice"
        (mine,) = [c for c in candidates if c["choice"] == own]
        assert mine["refusal"] == "", (numbers, own, mine)
        encoded = _C.choose(family, numbers)
        assert encoded.pop("kernel") and encoded == mine
        assert all(c == _C.candidate(family, numbers, c["choice"]) for c in candidates[:3])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_name_is_the_engine_and_its_tile(family):
    for numbers in problems(family, count=30):
        for c in _C.candidates(family, numbers):
            assert c["choice"] == f"{c['engine']} {c['tile']}".rstrip()
            splits = c["columns"].get("splits", 1)
            assert c["tile"].partition(" /")[2] == ("" if splits in (0, 1) else str(splits))


@pytest.mark.parametrize("family", FAMILIES)
def test_problems_of_a_shape_class_have_the_same_configurations(family):
    """The largest problem of a class allows the choices of all, so they can share one."""
    for numbers in problems(family, seed=1, count=100):
        wide = _C.shape_class(family, numbers)
        assert _C.shape_class(family, wide) == wide
        for candidate in _C.candidates(family, numbers):
            if candidate["refusal"]:
                continue
            if family == "row_sum" and candidate["columns"]["splits"] > 1:
                continue  # more than 16384 rows are not split
            shared = _C.candidate(family, wide, candidate["choice"])
            assert shared["refusal"] == "", (numbers, wide, candidate)


def test_splits_cover_the_split_dimension():
    for numbers in problems("int4", seed=2):
        for found in _C.candidates("int4", numbers):
            columns = found["columns"]
            if found["refusal"] or found["engine"] == "dense":
                continue
            chunks, per_k_block = -(-named("int4", numbers)["k"] // 64), columns["block_k"] // 64
            k_blocks, splits = -(-chunks // per_k_block), columns["splits"]
            assert (splits - 1) * -(-k_blocks // splits) < k_blocks
    for numbers in problems("row_sum", seed=2):
        for found in _C.candidates("row_sum", numbers):
            splits, n = found["columns"]["splits"], named("row_sum", numbers)["n"]
            if found["refusal"] or splits == 1:
                continue
            block = 16 // named("row_sum", numbers)["elem_size"] * 256 * 4
            split = -(-n // (splits * block)) * block
            assert (splits - 1) * split < n <= splits * split


@pytest.mark.parametrize(
    ("family", "numbers", "words"),
    [
        ("gemm", LINEAR, "no family"),
        ("matmul", LINEAR[:-1], "18 numbers"),
        ("matmul", [*LINEAR, *LINEAR], "18 numbers"),
        ("matmul", problem("matmul", m=0), "m from 1"),
        ("matmul", problem("matmul", m=2**41), "m from 1"),
        ("matmul", problem("matmul", math=4), "math from 0 to 3"),
        ("matmul", problem("matmul", sms=0), "sms from 1"),
        ("matmul", problem("matmul", wgmma=2), "wgmma from 0 to 1"),
        ("softmax", problem("softmax", elem_size=8), "elem_size from 2 to 4"),
        ("softmax", problem("softmax", aligned=2), "aligned from 0 to 1"),
    ],
)
def test_numbers_that_are_no_problem(family, numbers, words):
    calls = (_C.choose, _C.candidates, _C.shape_class)
    for call in (*calls, lambda *problem: _C.candidate(*problem, "general")):
        with pytest.raises(ValueError, match=words):
            call(family, numbers)
    with pytest.raises(RuntimeError, match="must be"):
        ops._picked_choice("", family, numbers)
