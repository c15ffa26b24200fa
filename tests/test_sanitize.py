"""The calls of `make sanitize`, without the tools, which need a GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from samples import call


@pytest.fixture(scope="module")
def sanitize():
    path = Path(__file__).resolve().parent.parent / "benchmarks" / "sanitize.py"
    spec = importlib.util.spec_from_file_location("sanitize", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_attention_is_called_over_several_tiles(sanitize):
    """Forward and backward, and other ops in odd sizes, but not among the small calls."""
    calls = sanitize.sample_calls(["attention", "attention_backward", "linear"], small=False)
    large = [(sample, dtype) for sample, dtype in calls if sample.name.startswith("large")]
    assert {sample.op for sample, _ in large} == {"attention", "attention_backward"}
    for sample, dtype in large:
        args, kwargs = sample.make("cpu", dtype)
        call(sample.op)(*args, **kwargs)
    odd = [(sample, dtype) for sample, dtype in calls if sample.name.startswith("odd")]
    assert {sample.op for sample, _ in odd} == {"attention_backward", "linear"}
    for sample, dtype in odd:
        args, kwargs = sample.make("cpu", dtype)
        call(sample.op)(*args, **kwargs)
    small = sanitize.sample_calls(["attention", "attention_backward", "linear"], small=True)
    assert len(small) == len(calls) - len(large) - len(odd) > 0
