"""Hypothesis strategies: edge-biased sizes, strides, offsets, values."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

EDGES = (0, 1, 2, 3, 5, 7, 13, 31, 32, 33, 63, 64, 65, 127, 128, 129)
KINDS = ("normal", "integers", "huge", "tiny", "sparse")


def sizes(largest: int = 129, smallest: int = 0) -> st.SearchStrategy[int]:
    return st.sampled_from([e for e in EDGES if smallest <= e <= largest])


def values(shape: tuple[int, ...], kind: str, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    t = torch.randn(shape, generator=g, dtype=torch.float64)
    if kind == "integers":
        return t.mul(3).round()
    if kind == "huge":
        return t * 3e3
    if kind == "tiny":
        return t * 1e-4
    if kind == "sparse":
        return torch.where(torch.rand(shape, generator=g) < 0.2, t * 8, 0.0)
    return t


@st.composite
def layouts(draw: st.DrawFn, dims: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """A permutation of dims in memory, a step per dim, and a storage offset."""
    order = draw(st.permutations(range(dims)))
    steps = draw(st.tuples(*[st.sampled_from([1, 1, 2, 3])] * dims))
    return tuple(order), steps, draw(st.integers(0, 8))


def hole(t: Tensor) -> float | int:
    """The value that fills the gaps between t's values: NaN, or a huge integer."""
    return float("nan") if t.is_floating_point() else min(2**30, torch.iinfo(t.dtype).max)


def strided(t: Tensor, layout: tuple[tuple[int, ...], tuple[int, ...], int]) -> Tensor:
    """A tensor with t's values in the layout, whose storage has holes in every gap."""
    order, steps, offset = layout
    strides, place = [0] * t.dim(), 1
    for d in reversed(order):
        strides[d] = place * steps[d]
        place *= max(t.shape[d], 1) * steps[d]
    storage = torch.full((place + offset + 8,), hole(t), dtype=t.dtype, device=t.device)
    return storage.as_strided(t.shape, strides, offset).copy_(t)


seeds = st.integers(0, 2**16)
kinds = st.sampled_from(KINDS)
dtype_names = st.sampled_from(["float32", "float16", "bfloat16", "float64"])


def linear_cases(largest: int = 33, smallest_k: int = 0) -> dict[str, st.SearchStrategy]:
    """The sizes of a linear layer, the layouts of its matrices and vectors, a dtype and a seed."""
    return {
        "m": sizes(largest),
        "n": sizes(largest),
        "k": sizes(65, smallest_k),
        "matrix": layouts(2),
        "vector": layouts(1),
        "dtype": dtype_names,
        "seed": seeds,
    }
