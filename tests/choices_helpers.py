"""Helpers for the tests of tiles, tuning and explain: problems with named fields, invented devices,
dry runs, and a fixture that resets all choices.
"""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

import torchweld  # noqa: F401  (loads the ops)
from torchweld._library import build_facts

_C = pytest.importorskip("torchweld._C")

ops = torch.ops.torchweld
explains_kernels = pytest.mark.skipif(
    build_facts().get("cuda") is None, reason="a CPU-only build explains no CUDA kernel"
)

GPU = "NVIDIA Test"
H200 = dict(sms=132, shared_limit=232448, clusters=1, clusters_of_16=1, tma=1, wgmma=1)
# Every chip from sm_80 on gives a block at least 99 KiB of shared memory.
SMALL = dict(sms=24, shared_limit=101376, clusters=0, clusters_of_16=0, tma=0, wgmma=0)
NO_WGMMA = H200 | dict(wgmma=0)
DEVICES = (
    H200,
    SMALL,
    NO_WGMMA,
    H200 | dict(clusters_of_16=0),
    H200 | dict(clusters=0, clusters_of_16=0, tma=0, wgmma=0),
    SMALL | dict(clusters=1, tma=1),
)

# The numbers of a matmul's math by name; attention numbers the same maths differently.
MATHS = {"float16": 0, "bfloat16": 1, "tf32": 2, "float32": 3}
ATTENTION_MATHS = {"float16": 0, "bfloat16": 0, "tf32": 1, "float32": 2}

_HEADS = dict(heads=8, seqlen_q=1024, seqlen_k=1024, head_dim=64, head_dim_v=64, math=0, group=1)
_HEADS |= dict(
    causal=0,
    padded=0,
    bfloat16=1,
    window=0,
    packed=0,
    softcap=0,
    dropout=0,
    bias=0,
    invariant=0,
    packable=0,
    alibi=0,
)
_USUAL = {
    "matmul": dict(
        m=1024, n=2048, k=2048, batch=1, gated=0, pointwise=0, math=1, a_k_major=1, b_k_major=1,
        normed=0, grouped=0, invariant=0,
    ),
    "softmax": dict(
        n=1024, elem_size=4, aligned=1, backward=0, tiled=1, in_phase=1, rows=64, masked=0,
        bfloat16=0, capped=0,
    ),
    "attention": _HEADS,
    "attention_backward": _HEADS,
    "int4": dict(m=64, n=4096, k=4096, groups=32, elem_size=2, bfloat16=1, invariant=0),
    "row_sum": dict(rows=64, n=1024, elem_size=4, contiguous=1, aligned=1, bfloat16=0),
    "conv2d": dict(
        batch=4096, height=64, width=64, kernel_height=3, kernel_width=3, elem_size=4, flipped=0,
        bfloat16=0,
    ),
}  # fmt: skip
_FIELDS = _C.families()


def problem(family: str, device: dict[str, int] = H200, **fields: int) -> list[int]:
    """The numbers of a typical problem on a device, with the given fields replaced."""
    values = _USUAL[family] | device | fields
    assert set(values) == set(_FIELDS[family]), set(values) ^ set(_FIELDS[family])
    return [int(values[name]) for name in _FIELDS[family]]


def named(family: str, numbers: list[int]) -> dict[str, int]:
    """A problem's numbers by name."""
    return dict(zip(_FIELDS[family], numbers, strict=True))


def chosen(family: str, device: dict[str, int] = H200, **fields: int) -> dict:
    """The choice that `torchweld._C` makes for such a problem."""
    return _C.choose(family, problem(family, device, **fields))


def legal_engines(family: str, device: dict[str, int], **fields: int) -> tuple[set[str], str]:
    """The engines that have a configuration for such a problem, and the chosen one."""
    numbers = problem(family, device, **fields)
    legal = [c["choice"] for c in _C.candidates(family, numbers) if not c["refusal"]]
    return {name.split()[0] for name in legal}, _C.choose(family, numbers)["choice"].split()[0]


# A bfloat16 matmul on a device without wgmma, which only the mma.sync engine supports.
LINEAR = problem("matmul", NO_WGMMA)


def picked(family: str = "matmul", numbers: list[int] = LINEAR, gpu: str = "") -> tuple[str, str]:
    """The name of the choice for a problem on that GPU, and who made it."""
    return ops._picked_choice(gpu, family, numbers)


def refusal(family: str, numbers: list[int], choice: str) -> str:
    """The reason why a choice does not support a problem, or "" if it does."""
    return _C.candidate(family, numbers, choice)["refusal"]


explain_module = importlib.import_module("torchweld.explain")  # the function has its name


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def dry_records(op: str, *args, device: int = -1, **kwargs) -> list[dict]:
    """The records of a dry run on an assumed H100, or on the GPU with the given number."""
    return explain_module._dry_run(op, args, kwargs, device)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHWELD_TUNE", raising=False)
    ops._forget_choices()
    yield
    ops._forget_choices()
    assert picked()[1] == "heuristic", "a forced choice is left"
