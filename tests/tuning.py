"""What the tests of tuning share: a product, a GPU that is none, and a clean slate."""

from __future__ import annotations

import importlib

import pytest
import torch

import torchweld  # noqa: F401  (loads the ops)

ops = torch.ops.torchweld

H200 = (132, 232448)
SMALL = (24, 101376)  # the least that sm_80 and newer chips offer a block: 99 KiB
GPU = "NVIDIA Test"
LINEAR = [1024, 2048, 2048, 1, 0, 0, 1, *H200, 1, 1]  # a product in bfloat16


def picked(family: str = "matmul", problem: list[int] = LINEAR, gpu: str = ""):
    """What a problem takes on that GPU, and whose choice it is."""
    return ops._picked_choice(gpu, family, problem)


def refusal(family: str, problem: list[int], *choice: int) -> str:
    """Why a problem can't take a choice, "" where it can."""
    return importlib.import_module("torchweld._C").candidate(family, problem, list(choice))[
        "refusal"
    ]


@pytest.fixture(autouse=True)
def nothing_is_left_behind(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHWELD_TUNE", raising=False)
    ops._forget_choices()
    yield
    ops._forget_choices()
    assert picked()[1] == "heuristic", "a forced choice is left"
