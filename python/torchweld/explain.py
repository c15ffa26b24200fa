"""torchweld.explain(): which kernel a call takes, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

import torchweld._library as library
from torchweld import explain_ops
from torchweld.info import has_cuda_kernel, ops_of_library


@dataclass
class Explanation:
    """Which kernel a call would take; `str()` is the text.

    Attributes:
        op: the op's name.
        call: the tensors, as text.
        kernel: what runs.
        tile: the kernel's configuration, {} where there is none.
        why: one sentence.
        source: whose choice the tile is: "heuristic", "tuned" (remembered by torchweld.tune) or
            "forced", "" where there is none to make.
        rejected: (candidate, reason) of what was looked at before.
    """

    op: str
    call: str
    kernel: str
    tile: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    source: str = ""
    rejected: list[tuple[str, str]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"torchweld::{self.op}({self.call})", f"  kernel    {self.kernel}"]
        if self.tile:
            lines.append("  tile      " + ", ".join(f"{k}={v}" for k, v in self.tile.items()))
        lines.append(f"  why       {self.why}")
        if self.source:
            lines.append(f"  source    {self.source}{self._where()}")
        lines += [f"  rejected  {name}: {reason}" for name, reason in self.rejected]
        return "\n".join(lines)

    def _where(self) -> str:
        from torchweld.tuning import cache

        return f": {cache.path()}" if "tuned" in self.source else ""


def _describe(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)} on {t.device}"


_MATMULS = (
    "linear",
    "layer_norm_linear",
    "rms_norm_linear",
    "folded_layer_norm_linear",
    "gated_linear",
    "bmm",
)


def _family(op: str) -> str:
    return op.removesuffix("_backward").removesuffix("_forward")


def explain(op: str, *args: Any, **kwargs: Any) -> Explanation:
    """Which kernel `torchweld.<op>(*args, **kwargs)` would take, and why.

    Nothing runs, so tensors on the meta device do, and no GPU is needed: meta tensors are explained
    as CUDA tensors.

    Args:
        op: the name of an op, e.g. "softmax".
        *args: its arguments.
        **kwargs: its keyword arguments.

    Returns:
        An `Explanation`; print it, or take `.to_dict()`.

    Raises:
        ValueError: there is no such op, or the call has no tensor.
        RuntimeError: the library is not there, or its introspection module is not.
    """
    library.require()
    if op not in ops_of_library():
        raise ValueError(
            f"explain: op must be one of {', '.join(ops_of_library())}, but got {op!r}"
        )
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    if not tensors:
        raise ValueError(f"explain: {op} must be given its tensors, but got none")
    others = [f"{k}={v!r}" for k, v in kwargs.items() if not isinstance(v, Tensor)]
    explanation = Explanation(op, ", ".join([_describe(t) for t in tensors] + others), kernel="")
    device = tensors[0].device.type
    if device == "cpu":
        explanation.kernel = "CPU"
        explanation.why = f"the tensors are on the CPU; {torch.get_num_threads()} threads"
        return explanation
    if not has_cuda_kernel(op):
        explanation.kernel = "none"
        explanation.why = (
            "this build has no CUDA kernel for it; the call raises NotImplementedError"
        )
        return explanation
    floating = [t for t in tensors if t.is_floating_point()]
    if any(t.dtype == torch.float64 for t in floating):
        explanation.kernel, explanation.why = "none", "float64 runs on the CPU alone"
        return explanation
    family = _family(op)
    if family in ("softmax", "causal_softmax"):
        return explain_ops.rows(explanation, floating, kwargs.get("scale", 1.0))
    if family in _MATMULS:
        return explain_ops.matmul(explanation, floating, family == "gated_linear", kwargs)
    if op.startswith("int4_linear"):
        return explain_ops.int4(explanation, tensors, kwargs)
    if family == "attention":
        padded = len(floating) < len(tensors)
        return explain_ops.attention(explanation, floating, padded, bool(kwargs.get("causal")))
    if family == "row_sum":
        return explain_ops.row_sum(explanation, floating[0])
    if family == "conv2d":
        return explain_ops.conv2d(explanation, floating[-2], floating[-1])
    if family == "scalar_attention":
        return explain_ops.scalar_attention(explanation, floating[0])
    explanation.kernel = "CUDA"
    explanation.why = "the op has one kernel for every size"
    return explanation
