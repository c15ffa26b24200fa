"""Rounding a weight to 4 bits on the CPU with two threads; on a GPU also a model of 8 B weights:
the time to quantise it, the memory that it keeps, and the time to load it.

Some peers are limits: 8 minutes for a billion weights on the CPU, 60 s for the model, 0.55 bytes a
weight. A row's error is the relative one of the weights, and the eager error that of "rtn".
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import torchweld
from torchweld.ops.int4_weight import METHODS, round_weight
from torchweld.tuning.timer import Timing, interleaved, summary
from torchweld_bench.cases import compared, exactly
from torchweld_bench.common import free, installed
from torchweld_bench.results import Row

_GROUP = 128
_LIMIT = "8 min a billion"
_LIMIT_US = 8 * 60e6 / 1e9  # a weight
_READ = "reading the files"
_LOADS = 3


class Shape(NamedTuple):
    """Sizes of a Llama's blocks."""

    name: str
    hidden: int
    intermediate: int
    kv: int
    layers: int
    vocab: int


_8B = Shape("8 B", 4096, 14336, 1024, 32, 128256)


def rows() -> Iterator[Row]:
    """Measures every case of the family, one per iteration."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.manual_seed(0)
        normal = torch.randn(256, 4096)
        heavy = torch.distributions.StudentT(3.0).sample((256, 4096))
        for name, weight in (("normal", normal), ("heavy tails", heavy)):
            yield from _cases(name, weight.bfloat16())
    finally:
        torch.set_num_threads(before)
    if torch.cuda.is_available():
        yield from model_rows(_8B, "cuda")


def model_rows(shape: Shape, device: str) -> Iterator[Row]:
    """The rows of a whole model on a device."""
    yield from _quantised(shape, device)
    yield from _loaded(shape, device)


def _rows_of(
    case: str, ours: Timing, limit: str, allowed: Timing, error: float = 0.0, rtn: float = 0.0
) -> Iterator[Row]:
    errors = {"error": error, "eager_error": rtn, "allowed_error": rtn}
    return compared(case, {"ours": ours, limit: allowed}, errors, limit)


def _cases(name: str, weight: torch.Tensor) -> Iterator[Row]:
    errors = {m: round_weight(weight, _GROUP, m).quantisation_error for m in METHODS}
    calls = {m: lambda m=m: round_weight(weight, _GROUP, m) for m in METHODS}
    limit = exactly(_LIMIT_US * weight.numel())
    for method, us in interleaved(calls, device="cpu", rounds=5).items():
        case = f"quantise {method} {name} {tuple(weight.shape)} bfloat16"
        yield from _rows_of(case, us, _LIMIT, limit, errors[method], errors["rtn"])


def _blocks(shape: Shape, device: str) -> nn.ModuleList:
    """The linear layers of a model, without embeddings and head."""
    sizes = {
        "q": (shape.hidden, shape.hidden),
        "k": (shape.hidden, shape.kv),
        "v": (shape.hidden, shape.kv),
        "o": (shape.hidden, shape.hidden),
        "gate": (shape.hidden, shape.intermediate),
        "up": (shape.hidden, shape.intermediate),
        "down": (shape.intermediate, shape.hidden),
    }
    new = {"bias": False, "device": device, "dtype": torch.bfloat16}
    return nn.ModuleList(
        nn.ModuleDict({name: nn.Linear(*size, **new) for name, size in sizes.items()})
        for _ in range(shape.layers)
    )


def _timed(call: Callable[[], Any], device: str) -> tuple[Any, float]:
    """The result of a call, and its microseconds with the work that it has queued on a GPU."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    found = call()
    wait()
    return found, (time.perf_counter() - start) * 1e6


def _bytes_in_use(model: nn.Module, device: str) -> int:
    free()
    if device == "cuda":
        return torch.cuda.memory_allocated()
    return sum(t.nbytes for t in [*model.parameters(), *model.buffers()])


def _quantised(shape: Shape, device: str) -> Iterator[Row]:
    torch.manual_seed(0)
    rtn = 0.0
    for method in METHODS:  # "rtn" is the first
        empty = _bytes_in_use(nn.Module(), device)
        model = _blocks(shape, device)
        weights = sum(p.numel() for p in model.parameters())
        config = torchweld.Int4(_GROUP, skip=(), method=method)
        report, us = _timed(lambda m=model, c=config: torchweld.quantize_(m, c), device)
        error = sum(report.errors.values()) / len(report.errors)
        rtn = rtn or error
        case = f"quantise {method} {shape.name} on {device}"
        yield from _rows_of(case, exactly(us), "60 s", exactly(60e6), error, rtn)
        if method == "rtn":
            kept = (_bytes_in_use(model, device) - empty) / weights
            case = f"quantised {shape.name} on {device}, bytes a weight"
            yield from _rows_of(case, exactly(kept), "0.55 bytes", exactly(0.55))
        del model


def _loaded(shape: Shape, device: str) -> Iterator[Row]:
    """from_pretrained of a quantised model over reading its files to the device."""
    load = installed("transformers", "AutoModelForCausalLM")
    if load is None or installed("accelerate", "dispatch_model") is None:
        return
    from safetensors.torch import load_file

    torchweld.integrations.register_quantizer()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _save(shape, device, folder)
        files = sorted(folder.glob("*.safetensors"))

        def read() -> list[dict[str, torch.Tensor]]:
            return [load_file(file, device=device) for file in files]

        calls = {"ours": lambda: load.from_pretrained(folder, device_map=device), _READ: read}
        samples: dict[str, list[float]] = {call: [] for call in calls}
        for call in calls.values():
            call()
        for _ in range(_LOADS):
            for what, call in calls.items():
                free()
                samples[what].append(_timed(call, device)[1])
    times = {what: summary(each) for what, each in samples.items()}
    case = f"load quantised {shape.name} on {device}"
    yield from _rows_of(case, times["ours"], _READ, times[_READ])


def _save(shape: Shape, device: str, folder: Path) -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=max(1, shape.hidden // 128),
        num_key_value_heads=max(1, shape.kv // 128),
        head_dim=min(128, shape.kv),
    )
    with torch.device(device):
        model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    torchweld.quantize_(model, torchweld.Int4(_GROUP))
    model.save_pretrained(folder)
