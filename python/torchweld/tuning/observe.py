"""The kernels of a call that have several configurations, and their choices."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import torchweld._library as library
from torchweld.explain import _DEVICE_FIELDS, tensors_of


@dataclass
class KernelChoice:
    """A kernel of the call that has several configurations."""

    family: str
    numbers: list[int]  # the problem, encoded as a list of integers
    problem: dict[str, int]  # the fields of the problem by name
    choice: str  # the configuration that runs if none is forced
    source: str

    def text(self) -> str:
        own = list(self.problem.items())[:-_DEVICE_FIELDS]
        return f"{self.family} ({', '.join(f'{k} {v}' for k, v in own)})"


def tables() -> Any:
    return library.introspection("torchweld.tune")


def observe(call: Callable[[], Any]) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Returns the call's results, and the records of its choices and launches."""
    library.ops._begin_observing()
    try:
        outputs = tensors_of(call())
    finally:
        records = [json.loads(text) for text in library.ops._end_observing()]
    # A record without a family holds the launches before the first choice.
    return outputs, [record for record in records if record["family"]]


def kernel_choices(records: list[dict[str, Any]]) -> list[KernelChoice]:
    """Lists the kernels of an observed call, one for each shape class."""
    _C = tables()
    fields = _C.families()
    found: dict[tuple[str, tuple[int, ...]], KernelChoice] = {}
    for record in records:
        family, numbers = record["family"], record["problem"]
        problem = dict(zip(fields[family], numbers, strict=True))
        key = family, tuple(_C.shape_class(family, numbers))
        kernel = KernelChoice(family, numbers, problem, record["choice"], record["source"])
        found.setdefault(key, kernel)
    return list(found.values())
