"""CUDA graphs of a test's calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Results = TypeVar("Results")


def cuda_graph(run: Callable[[], Results]) -> tuple[torch.cuda.CUDAGraph, Results]:
    """A graph of run(), which is called once before, and the results that each replay writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return graph, run()
