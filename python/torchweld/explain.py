"""torchweld.explain(): which kernel a call takes, and why."""

from __future__ import annotations

import importlib
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

import torchweld._library as library
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
        rejected: (candidate, reason) of what was looked at before.
    """

    op: str
    call: str
    kernel: str
    tile: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    rejected: list[tuple[str, str]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"torchweld::{self.op}({self.call})", f"  kernel    {self.kernel}"]
        if self.tile:
            lines.append("  tile      " + ", ".join(f"{k}={v}" for k, v in self.tile.items()))
        lines.append(f"  why       {self.why}")
        lines += [f"  rejected  {name}: {reason}" for name, reason in self.rejected]
        return "\n".join(lines)


def _describe(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)} on {t.device}"


def _introspection() -> Any:
    try:
        return importlib.import_module("torchweld._C")
    except ImportError as error:
        raise RuntimeError(
            "torchweld.explain: torchweld._C, which knows the kernels' tiles, can't be imported "
            f"({error}); reinstall torchweld"
        ) from error


def _rows_of(t: Tensor) -> int:
    return t.numel() // t.shape[-1] if t.shape[-1] else 0


def _row_places(t: Tensor) -> tuple[int, int]:
    """Bytes from a 16-byte boundary to the first row of t, and from one row to the next."""
    size = t.element_size()
    if t.numel() and t.stride(-1) != 1 and t.shape[-1] > 1:
        return 0, t.shape[-1] * size % 16  # such a tensor is copied first
    strides = [s for s, n in zip(t.stride()[:-1], t.shape[:-1], strict=True) if n > 1]
    step = strides[-1] if strides else t.shape[-1]
    return t.storage_offset() * size % 16, step * size % 16


def _explain_rows(explanation: Explanation, tensors: list[Tensor], scale: float) -> Explanation:
    """The softmax family: the same choice as the launcher's, made by the same code."""
    _C = _introspection()
    n, size = tensors[0].shape[-1], tensors[0].element_size()
    backward = explanation.op.endswith("_backward")
    rows = _rows_of(tensors[0])
    # Masked rows are counted in 32 bits by the one-read kernels, and they want a scale with a sign.
    tiled = not explanation.op.startswith("causal") or (rows < 2**31 and scale != 0)
    # The result is contiguous and starts on a boundary.
    in_phase = all(_row_places(t) == (0, n * size % 16) for t in tensors)
    aligned = n * size % 16 == 0
    clusters = _has_clusters(tensors[0])
    kernel, chosen = _C.choose_softmax(
        n, size, aligned, backward, tiled, clusters, in_phase, _device_limits(tensors[0])[1]
    )
    tiles, rings = _C.softmax_tiles(size, backward, aligned), _C.softmax_rings(size, backward)
    for tile in tiles[: chosen if kernel == "tile" else len(tiles)]:
        if not tiled:
            reason = "the rows need 64-bit indices or the scale is 0"
        elif not tile["suits"]:
            reason = "too many registers for this dtype"
        elif tile["capacity"] < n:
            reason = f"holds {tile['capacity']} elements, the row has {n}"
        else:
            reason = f"rows of {_C.softmax_ring_from} elements and more take a ring"
        explanation.rejected.append((f"{tile['threads']} threads x {tile['loads']} x 16 B", reason))
    if kernel == "tile":
        explanation.kernel = "rows in registers (one read)"
        explanation.tile = {k: v for k, v in tiles[chosen].items() if k != "suits"}
        explanation.why = f"the first tile that holds a row of {n} elements"
        return explanation
    for ring in rings[: chosen if kernel == "ring" else len(rings)]:
        if not tiled:
            reason = "the rows need 64-bit indices or the scale is 0"
        elif not clusters:
            reason = "the GPU, or the code built for it, has no thread-block clusters"
        elif not in_phase:
            reason = "rows start at other distances from 16-byte boundaries than the result's"
        else:
            reason = f"holds {ring['capacity']} elements, a third of them spare; the row has {n}"
        explanation.rejected.append(
            (
                f"ring of {ring['blocks_per_row']} x {ring['pieces']} x {ring['piece_bytes']} B",
                reason,
            )
        )
    if kernel == "ring":
        explanation.kernel = "rows in shared memory (one read)"
        explanation.tile = dict(rings[chosen])
        explanation.why = f"the first ring that holds a row of {n} elements"
    else:
        explanation.kernel = "streaming rows (two reads)"
        explanation.tile = {
            "threads": _C.softmax_stream_threads,
            "access_bytes": 16 if aligned and in_phase else size,
        }
        explanation.why = f"no tile takes a row of {n} elements"
    return explanation


def _has_clusters(t: Tensor) -> bool:
    # Without a GPU the newest chips' choice is told.
    return not t.is_cuda or torch.cuda.get_device_capability(t.device) >= (9, 0)


# What a GPU offers, for calls on the meta device: (SMs, bytes of shared memory a block).
_HOPPER = (132, 232448)


def _device_limits(t: Tensor) -> tuple[int, int]:
    if not t.is_cuda:
        return _HOPPER
    properties = torch.cuda.get_device_properties(t.device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin


def _matmul_math(t: Tensor) -> str:
    if t.dtype != torch.float32:
        return str(t.dtype).removeprefix("torch.")
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "float32"


def _matmul_text(
    like: Tensor,
    m: int,
    n: int,
    k: int,
    batch: int = 1,
    gated: bool = False,
    pointwise: bool = False,
) -> str:
    """The tile of one product (m, k) x (n, k), as text."""
    _C = _introspection()
    if 0 in (m, n, batch):
        return "nothing to compute"
    math = _matmul_math(like)
    choice = _C.choose_gemm(m, n, k, batch, gated, pointwise, math, *_device_limits(like))
    tile = _C.gemm_tiles(math)[choice["tile"]]
    text = (
        f"({m}, {n}, {k}) {math} {tile['block_m']} x {tile['block_n']}, "
        f"{tile['threads']} threads, {tile['stages']} stages"
    )
    return text + (f", K in {choice['splits']} parts" if choice["splits"] > 1 else "")


def _explain_matmul(
    explanation: Explanation, tensors: list[Tensor], gated: bool, pointwise: bool
) -> Explanation:
    """The ops around one matmul: the products that they run, each with its tile."""
    op = explanation.op
    backward = op.endswith("_backward")
    if op.startswith("bmm"):
        dy, a, b = tensors if backward else (None, *tensors)
        batch, m, k, n = max(a.shape[0], b.shape[0]), a.shape[1], a.shape[2], b.shape[2]
        products = {"y": (a, m, n, k, batch)}
        if backward:
            products = {"da": (a, m, k, n, batch), "db": (b, k, n, m, batch)}
    else:
        x, weight = tensors[1:3] if backward else tensors[:2]
        m, n, k = _rows_of(x), weight.shape[0], x.shape[-1]
        products = {"y": (x, m, n // 2 if gated else n, k, 1, gated, pointwise)}
        if backward:
            products = {"dx": (x, m, k, n), "dweight": (x, n, k, m)}
    explanation.kernel = "matmul engine (mma.sync)"
    explanation.tile = {name: _matmul_text(*product) for name, product in products.items()}
    explanation.why = "the shortest time by the model in csrc/gemm/gemm_config.h"
    return explanation


def _explain_attention(explanation: Explanation, tensors: list[Tensor]) -> Explanation:
    _C = _introspection()
    backward = explanation.op.endswith("_backward")
    query, key, value = tensors[1:4] if backward else tensors[:3]
    math = _matmul_math(query)
    dims = (query.shape[-1], value.shape[-1])
    if backward:
        tile = _C.attention_backward_tile(*dims, math, _device_limits(query)[1])
    else:
        tile = _C.attention_tile(query.shape[2], key.shape[2], *dims, math)
    explanation.kernel = "tensor cores (mma.sync)" if tile else "general"
    explanation.tile = tile
    explanation.why = (
        f"the first tile that holds head dims {dims[0]} and {dims[1]}"
        if tile
        else f"no tile holds head dims {dims[0]} and {dims[1]}"
    )
    return explanation


def _explain_int4(explanation: Explanation, tensors: list[Tensor], kwargs: dict) -> Explanation:
    """Products with a 4-bit weight, the same choice as the launcher's."""
    x, first, scale = tensors[:3]
    backward = explanation.op.endswith("_backward")
    explanation.kernel = "weight dequantised, then the matmul engine"
    if backward:
        explanation.why = "the gradient to x is one product with the dense weight"
        return explanation
    m, k = _rows_of(x), x.shape[-1]
    repacked = explanation.op == "int4_linear_repacked"
    n = kwargs["out_features"] if repacked else first.shape[0]
    if 0 in (m, n, k):
        explanation.kernel, explanation.why = "none", "nothing to compute"
        return explanation
    _C = _introspection()
    groups, size = scale.shape[1], x.element_size()
    choice = _C.choose_int4(m, n, k, groups, size, *_device_limits(x), _has_clusters(x))
    if choice["tile"] < 0:
        explanation.why = (
            f"{m} rows of x, and x is float32 or a group of {k // groups} is no whole chunk of 64"
        )
        return explanation
    tile = _C.int4_tiles(size)[choice["tile"]]
    explanation.kernel = "4-bit tiles (mma.sync)"
    explanation.tile = {key: v for key, v in tile.items() if not key.startswith("suits")}
    explanation.tile["parts_of_k"] = choice["parts"]
    explanation.why = f"the smallest tile that holds {m} rows of x" + (
        "" if repacked else "; the weight is repacked first, int4_linear_repacked saves that"
    )
    return explanation


def _explain_scalar_attention(explanation: Explanation, q: Tensor) -> Explanation:
    """The same tiles and splits as the launcher's."""
    n = q.shape[0]
    if n == 0:
        explanation.kernel, explanation.why = "none", "nothing to compute"
        return explanation
    backward = explanation.op.endswith("_backward")
    sweeps = _introspection().scalar_attention_sweeps(n, backward, _device_limits(q)[0])
    explanation.kernel = "sweep over all pairs" if len(sweeps) == 1 else "two sweeps over all pairs"
    for sweep in sweeps:
        prefix = "" if len(sweeps) == 1 else f"{sweep['sweep']}_"
        explanation.tile.update({prefix + k: v for k, v in sweep.items() if k != "sweep"})
    explanation.why = "the tile and the split that are estimated to end first"
    return explanation


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
    family = _family(op)
    if family in ("softmax", "causal_softmax"):
        return _explain_rows(explanation, floating, kwargs.get("scale", 1.0))
    if family in _MATMULS:
        gated = family == "gated_linear"
        pointwise = gated or kwargs.get("activation", "none") != "none"
        return _explain_matmul(explanation, floating, gated, pointwise)
    if op.startswith("int4_linear"):
        return _explain_int4(explanation, tensors, kwargs)
    if family == "attention":
        return _explain_attention(explanation, floating)
    if family == "scalar_attention":
        return _explain_scalar_attention(explanation, floating[0])
    explanation.kernel = "CUDA"
    explanation.why = "the op has one kernel for every size"
    return explanation
