"""torchweld.explain(): which kernel a call runs, and why.

The op's own CUDA code runs on meta tensors without launching kernels, and reports its choice.
This module does not repeat any part of the choice.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import torchweld._library as library
from torchweld._flops import LAYERS, LISTS
from torchweld._refusals import unknown_op
from torchweld._types import is_dtensor
from torchweld.info import has_cuda_kernel, ops_of_library, public_op

_TUNED = "the fastest of its configurations when torchweld.tune timed this shape class"
_ASSUMED = "NVIDIA H100 (assumed: there is no GPU here)"
_ASYNC = (
    "torch.compile overlaps collectives with torch's own mm alone (async tensor parallelism, "
    "_micro_pipeline_tp), not with this op; where that gains more than the fusion use nn.Linear"
)
_DEVICE_FIELDS = 6  # the number of device fields at the end of every encoded problem


@dataclass
class Explanation:
    """The kernel that a call would run; `str()` formats it.

    Attributes:
        op: the op's name.
        call: the tensors, and the keyword arguments that are no tensors, as text.
        kernel: the kernel that runs.
        tile: the kernel's configuration, {} if it has none; if the call has several parts, for
            example `dx` and `dweight`, one configuration per part.
        why: one sentence.
        source: the origin of the tile: "heuristic", "tuned" (remembered by torchweld.tune) or
            "forced"; "" if there is nothing to choose.
        gpu: the GPU that this holds for, "" on the CPU.
        rejected: `(candidate, reason)` of the candidates before the chosen one, or of the other
            engines; if the call has several parts, of the first one.
        parallel: a note on tensor parallelism if the tensors are DTensors or inductor's async
            tensor parallelism is on; else "".

    Example::

        explanation = torchweld.explain("softmax", torch.empty(64, 1000, device="meta"))
        print(explanation.kernel, explanation.tile)
        explanation.to_dict()
    """

    op: str
    call: str
    kernel: str
    tile: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    source: str = ""
    gpu: str = ""
    rejected: list[tuple[str, str]] = field(default_factory=list)
    parallel: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"torchweld::{self.op}({self.call})", f"  kernel    {self.kernel}"]
        if self.tile:
            lines.append("  tile      " + ", ".join(f"{k}={v}" for k, v in self.tile.items()))
        lines.append(f"  why       {self.why}")
        if self.source:
            lines.append(f"  source    {self.source}{self._where()}")
        if self.gpu:
            lines.append(f"  gpu       {self.gpu}")
        if self.parallel:
            lines.append(f"  parallel  {self.parallel}")
        lines += [f"  rejected  {name}: {reason}" for name, reason in self.rejected]
        return "\n".join(lines)

    def _where(self) -> str:
        from torchweld.tuning import cache

        return f": {cache.path()}" if "tuned" in self.source else ""


def tensors_of(value: Any) -> list[Tensor]:
    """Lists the tensors among arguments or results, those of lists too."""
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


def _describe(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)} on {t.device}"


def _meta(value: Any) -> Any:
    """Returns a meta tensor with the layout of a tensor; any other value as it is."""
    if not isinstance(value, Tensor):
        return value
    extent = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    elements = value.storage_offset() + (extent if value.numel() else 0)
    base = torch.empty(elements, dtype=value.dtype, device="meta")
    return base.as_strided(value.shape, value.stride(), value.storage_offset())


def _dry_run(op: str, args: tuple[Any, ...], kwargs: dict[str, Any], device: int) -> list[dict]:
    """Returns the choices of a call's CUDA code, in the order of its kernels."""
    overload = getattr(library.ops, op).default
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    metas, values = tree_map(_meta, (args, kwargs))
    for argument in overload._schema.arguments[len(args) :]:
        if argument.name == "output_mask":  # request all gradients if the call does not say which
            values.setdefault("output_mask", [True] * argument.N)
    library.ops._begin_dry_run(device)
    try:
        overload.redispatch(cuda, *metas, **values)
    finally:
        records = library.ops._end_observing()
    return [json.loads(text) for text in records]


def _sizes(record: dict[str, Any]) -> str:
    fields = library.introspection().families()[record["family"]][:-_DEVICE_FIELDS]
    return ", ".join(f"{k} {v}" for k, v in zip(fields, record["problem"], strict=False))


def _unique(texts: list[str]) -> str:
    return "; ".join(dict.fromkeys(texts))


def _fill_in(explanation: Explanation, records: list[dict[str, Any]]) -> None:
    """Fills in the records of the library."""
    if not records:
        explanation.kernel, explanation.why = "none", "nothing to compute"
        return
    chosen = [record for record in records if record["family"]]
    if not chosen:
        explanation.kernel = "CUDA"
        explanation.why = "the op has one kernel for every size"
        return
    explanation.kernel = _unique([record["kernel"] for record in chosen])
    explanation.source = _unique([record["source"] for record in chosen])
    tuned = [_TUNED if r["source"] != "heuristic" else r["why"] for r in chosen]
    explanation.why = _unique(tuned)
    explanation.rejected = [(name, reason) for name, reason in chosen[0]["rejected"]]
    if len(chosen) == 1:
        explanation.tile = {"name": chosen[0]["choice"]}
        explanation.tile |= {k: v for k, v in chosen[0]["columns"].items() if v}
        return
    for i, record in enumerate(chosen):
        text = f"{record['choice']} ({_sizes(record)})"
        explanation.tile[record["part"] or f"part {i + 1}"] = text


def _parallel(op: str, sharded: bool) -> str:
    config = sys.modules.get("torch._inductor.config")
    overlaps = getattr(config, "_micro_pipeline_tp", False)
    texts = ["DTensors: this process's parts as they are placed"] if sharded else []
    if public_op(op) in (*LAYERS, *LISTS) and (sharded or overlaps):
        texts.append(_ASYNC)
    return "; ".join(texts)


def explain(op: str, *args: Any, **kwargs: Any) -> Explanation:
    """Tells which kernel `torchweld.<op>(*args, **kwargs)` would run, and why.

    Nothing runs, so no GPU is needed and tensors may be on the meta device. Meta tensors are
    explained as tensors on the current GPU, or on an H100 if there is no GPU, or on the CPU if the
    build has no CUDA kernel. DTensors are explained as this process's shards.

    Args:
        op: the name of an op, e.g. "softmax".
        *args: its arguments.
        **kwargs: its keyword arguments.

    Returns:
        An `Explanation`; print it, or take `.to_dict()`.

    Raises:
        ValueError: there is no such op, or the call has no tensor.
        RuntimeError: the library is missing; the introspection module is missing and the call has
            several tiles to name; or the CUDA op refuses the arguments.

    Example::

        x = torch.empty(4096, 5000, device="meta")
        print(torchweld.explain("softmax", x))
    """
    library.require()
    if op not in ops_of_library():
        raise ValueError(f"explain: {unknown_op('op', op, ops_of_library())}")
    sharded = any(map(is_dtensor, tree_leaves((args, kwargs))))
    if sharded:
        args, kwargs = tree_map(lambda t: t.to_local() if is_dtensor(t) else t, (args, kwargs))
    tensors = tensors_of((args, kwargs))
    if not tensors:
        raise ValueError(f"explain: {op} must be given its tensors, but got none")
    options = [f"{k}={v!r}" for k, v in kwargs.items() if not isinstance(v, Tensor)]
    explanation = Explanation(op, ", ".join([_describe(t) for t in tensors] + options), kernel="")
    explanation.parallel = _parallel(op, sharded)
    device = tensors[0].device
    lacking = not has_cuda_kernel(op)
    no_cuda = "this build has no CUDA kernel for it; on a GPU the call raises NotImplementedError"
    if device.type == "cpu" or (device.type == "meta" and lacking):
        explanation.kernel = "CPU"
        where = "the tensors are on the CPU" if device.type == "cpu" else no_cuda
        explanation.why = f"{where}; {torch.get_num_threads()} threads"
        return explanation
    if lacking:
        explanation.kernel, explanation.why = "none", no_cuda
        return explanation
    number = -1
    if device.type == "cuda" or torch.cuda.is_available():
        number = torch.cuda.current_device() if device.index is None else device.index
    records = _dry_run(op, args, kwargs, number)
    if any(t.dtype == torch.float64 for t in tensors):
        explanation.kernel, explanation.why = "none", "float64 runs on the CPU alone"
        return explanation
    explanation.gpu = _ASSUMED if number < 0 else torch.cuda.get_device_name(number)
    _fill_in(explanation, records)
    return explanation
