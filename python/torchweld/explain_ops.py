"""What explain says of each kind of kernel: the same choice as the launchers', by the same code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import torchweld._library as library
from torchweld._library import introspection

if TYPE_CHECKING:
    from torchweld.explain import Explanation


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


# What a GPU offers, for calls on the meta device where there is none: (SMs, bytes of shared memory
# a block).
_HOPPER = (132, 232448)


def _gpu(t: Tensor) -> int | None:
    """The GPU that a call is explained for: the tensor's, or the current one for a meta tensor."""
    if t.is_cuda:
        return t.device.index
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def _device_limits(t: Tensor) -> tuple[int, int]:
    gpu = _gpu(t)
    if gpu is None:
        return _HOPPER
    properties = torch.cuda.get_device_properties(gpu)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin


def _has_clusters(t: Tensor) -> bool:
    """Without a GPU the newest chips' choice is told."""
    gpu = _gpu(t)
    return gpu is None or torch.cuda.get_device_capability(gpu) >= (9, 0)


def _fits_clusters_of_16(t: Tensor) -> bool:
    gpu = _gpu(t)
    if gpu is None:
        return True
    with torch.cuda.device(gpu):
        return library.ops._fits_clusters_of_16()


def _has_warpgroups(t: Tensor) -> bool:
    """Hopper's alone, in code for sm_90a."""
    gpu = _gpu(t)
    if gpu is None:
        return True
    built = "9.0a" in (library.build_facts().get("arch_list") or "")
    return built and torch.cuda.get_device_capability(gpu) == (9, 0)


def _picked(family: str, problem: list[int], t: Tensor) -> tuple[dict[str, Any], str]:
    """What a problem takes, by the library's own code: a candidate of torchweld._C, and whose
    choice it is.
    """
    gpu = _gpu(t)
    name = "" if gpu is None else torch.cuda.get_device_name(gpu)
    choice, source = library.ops._picked_choice(name, family, [int(number) for number in problem])
    return introspection().candidate(family, [int(number) for number in problem], choice), source


_TUNED = "the fastest of its configurations when torchweld.tune timed this shape class"


_RING = 1  # the kind of a softmax that keeps rows in shared memory


def rows(explanation: Explanation, tensors: list[Tensor], scale: float) -> Explanation:
    """The softmax family: the same choice as the launcher's, made by the same code."""
    _C = introspection()
    n, size = tensors[0].shape[-1], tensors[0].element_size()
    backward = explanation.op.endswith("_backward")
    rows = _rows_of(tensors[0])
    if 0 in (n, rows):
        explanation.kernel, explanation.why = "none", "nothing to compute"
        return explanation
    masked = explanation.op.startswith("causal")
    # Masked rows are counted in 32 bits by the one-read kernels, and they want a scale with a sign.
    tiled = not masked or (rows < 2**31 and scale != 0)
    # The result is contiguous and starts on a boundary.
    in_phase = all(_row_places(t) == (0, n * size % 16) for t in tensors)
    aligned = n * size % 16 == 0
    clusters = _has_clusters(tensors[0]) and rows < 2**31
    shared_limit = _device_limits(tensors[0])[1]
    bfloat16 = tensors[0].dtype == torch.bfloat16
    problem = [n, size, aligned, backward, tiled, clusters, in_phase, shared_limit]
    problem += [rows, masked, bfloat16, clusters and _fits_clusters_of_16(tensors[0])]
    chosen, explanation.source = _picked("softmax", problem, tensors[0])
    own = explanation.source == "heuristic"
    held = False  # by a tile or ring that something faster was preferred to
    for found in _C.candidates("softmax", [int(number) for number in problem]):
        if found["choice"] == chosen["choice"]:
            break
        tile = found["columns"]
        name = f"{tile['threads']} threads x {tile['loads']} x 16 B"
        ring = tile["kind"] == _RING
        held = held or not found["refusal"]
        if found["refusal"] or own:
            faster = "reading twice" if chosen["choice"][0] < 0 else "a ring"
            faster = "a larger cluster" if ring and chosen["columns"]["kind"] == _RING else faster
            reason = found["refusal"] or f"{faster} is faster for rows of {n} elements"
            name = f"ring of {tile['cluster']} x {name}" if ring else name
            explanation.rejected.append((name, reason))
    tile, number = chosen["columns"], chosen["choice"][0]
    if number < 0:
        explanation.kernel = "streaming rows (two reads)"
        explanation.tile = {
            "threads": tile["threads"],
            "access_bytes": 16 if aligned and in_phase else size,
        }
        explanation.why = (
            f"a row of {n} elements would leave an SM one block in registers"
            if held
            else f"no tile and no ring takes a row of {n} elements"
        )
    elif tile["kind"] == _RING:
        tiles = len(_C.softmax_tiles(size, backward, aligned))
        ring = _C.softmax_rings(size, backward, aligned)[number - tiles]
        reads = "one read" if n <= ring["read_once_to"] else "a part is read twice"
        explanation.kernel = f"rows in shared memory ({reads})"
        explanation.tile = {k: v for k, v in tile.items() if k != "kind"}
        explanation.tile["capacity"] = ring["capacity"]
        explanation.why = f"the smallest cluster that takes rows of {n} elements well"
    else:
        explanation.kernel = "rows in registers (one read)"
        explanation.tile = {
            "threads": tile["threads"],
            "loads": tile["loads"],
            "capacity": _C.softmax_tiles(size, backward, aligned)[number]["capacity"],
        }
        explanation.why = f"the first tile that holds a row of {n} elements"
    if not own:
        explanation.why = _TUNED
    return explanation


def _matmul_math(t: Tensor) -> str:
    if t.dtype != torch.float32:
        return str(t.dtype).removeprefix("torch.")
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "float32"


def _k_major(t: Tensor, halves: int = 1, interleaved: bool = False) -> bool:
    """Whether the matmul engine reads an operand (..., rows, K) along K, copied or as it is."""
    (rows, k), piece = t.shape[-2:], 16 // t.element_size()
    row_stride, k_stride = t.stride()[-2:]
    base = t.storage_offset() % piece == 0
    if t.dim() == 3 and t.shape[0] > 1:
        base = base and t.stride(0) % piece == 0
    if base and k % piece == 0 and k_stride == 1 and (rows == 1 or row_stride % piece == 0):
        return True
    whole = rows % piece == 0 if halves == 1 else not interleaved and rows // 2 % 8 == 0
    return not (base and whole and row_stride == 1 and (k == 1 or k_stride % piece == 0))


def _matrix(t: Tensor) -> Tensor:
    """(..., K) as (rows, K); on the meta device where that would be a copy."""
    try:
        return t.view(_rows_of(t), t.shape[-1])
    except RuntimeError:
        return t.new_empty(_rows_of(t), t.shape[-1], device="meta")


def _matmul_text(
    like: Tensor,
    a: Tensor,
    b: Tensor,
    gated: bool = False,
    pointwise: bool = False,
    interleaved: bool = False,
) -> tuple[str, str]:
    """The tile of one product a (..., m, k) x b (..., n, k), as text, and whose choice it is; on
    the device of `like`.
    """
    _C = introspection()
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-2] // (2 if gated else 1)
    batch = max(a.shape[0], b.shape[0]) if a.dim() == 3 else 1
    if 0 in (m, n, batch):
        return "nothing to compute", ""
    math = _matmul_math(a)
    layouts = [_k_major(a), _k_major(b, 2 if gated else 1, interleaved)]
    kind = ("float16", "bfloat16", "tf32", "float32").index(math)
    limits = _device_limits(like)
    problem = [m, n, k, batch, gated, pointwise, kind, *limits, *layouts]
    chosen, source = _picked("matmul", problem, like)
    tile = _C.gemm_tiles(math)[chosen["choice"][0]]
    splits = chosen["columns"]["splits"]
    text = (
        f"({m}, {n}, {k}) {math} {tile['block_m']} x {tile['block_n']}, "
        f"{tile['threads']} threads, {tile['stages']} stages"
    )
    return text + (f", K in {splits} parts" if splits > 1 else ""), source


def matmul(
    explanation: Explanation, tensors: list[Tensor], gated: bool, kwargs: dict[str, Any]
) -> Explanation:
    """The ops around one matmul: the products that they run, each with its tile."""
    op = explanation.op
    backward = op.endswith("_backward")
    products: dict[str, tuple[Any, ...]]
    if op.startswith("bmm"):
        dy, a, b = tensors if backward else (None, *tensors)
        products = {"y": (a, b.mT)}
        if b.shape[0] == 1 and a.stride(0) == a.shape[1] * a.stride(1):
            products = {"y": (_matrix(a), b[0].mT)}  # one tall product
        if backward:
            products = {"da": (dy, b), "db": (a.mT, dy.mT)}
    else:
        x, weight = tensors[1:3] if backward else tensors[:2]
        normed = not op.startswith(("linear", "gated_linear"))
        x = _matrix(x.new_empty(x.shape, device="meta") if normed else x)
        pointwise = gated or kwargs.get("activation", "none") != "none"
        products = {"y": (x, weight, gated, pointwise, kwargs.get("interleaved", False))}
        if backward:
            dy = x.new_empty(x.shape[0], weight.shape[0], device="meta")
            products = {"dx": (dy, weight.t()), "dweight": (dy.t(), x.t())}
    like = tensors[0]
    texts = {name: _matmul_text(like, *product) for name, product in products.items()}
    explanation.kernel = "matmul engine (mma.sync)"
    explanation.tile = {name: text for name, (text, _) in texts.items()}
    explanation.source = ", ".join(dict.fromkeys(source for _, source in texts.values() if source))
    explanation.why = "the shortest time by the model in csrc/gemm/gemm_config.h"
    if explanation.source not in ("heuristic", ""):
        explanation.why = _TUNED
    return explanation


def attention(
    explanation: Explanation, tensors: list[Tensor], padded: bool, causal: bool
) -> Explanation:
    backward = explanation.op.endswith("_backward")
    query, key, value = tensors[1:4] if backward else tensors[:3]
    maths = {"tf32": 1, "float32": 2}
    dims = (query.shape[-1], value.shape[-1])
    heads = query.shape[0] * query.shape[1]
    if 0 in (heads, query.shape[2], key.shape[1]) or (backward and key.shape[2] == 0):
        explanation.kernel, explanation.why = "none", "nothing to compute"
        return explanation
    problem = [
        heads,
        query.shape[2],
        key.shape[2],
        *dims,
        maths.get(_matmul_math(query), 0),
        query.shape[1] // key.shape[1],
        causal,
        padded,
        query.dtype == torch.bfloat16,
    ]
    if backward:
        problem.append(_device_limits(query)[1])
    family = "attention_backward" if backward else "attention"
    chosen, explanation.source = _picked(family, problem, query)
    tiled = chosen["choice"][0] >= 0
    explanation.kernel = "tensor cores (mma.sync)" if tiled else "general"
    explanation.tile = chosen["columns"] if tiled else {}
    explanation.why = (
        f"the first tile that holds head dims {dims[0]} and {dims[1]}"
        if tiled
        else f"no tile holds head dims {dims[0]} and {dims[1]}"
    )
    if explanation.source != "heuristic":
        explanation.why = _TUNED
    return explanation


def int4(explanation: Explanation, tensors: list[Tensor], kwargs: dict) -> Explanation:
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
    groups, size = scale.shape[1], x.element_size()
    limits = _device_limits(x)
    bfloat16 = x.dtype == torch.bfloat16
    problem = [m, n, k, groups, size, *limits, _has_clusters(x), _has_warpgroups(x), bfloat16]
    chosen, explanation.source = _picked("int4", problem, x)
    if chosen["choice"][0] < 0:
        explanation.why = (
            f"{m} rows of x, and x is float32 or a group of {k // groups} is no whole chunk of 64"
        )
    else:
        tiles = introspection().int4_tiles(size)
        rings = len(tiles)
        tiles += introspection().int4_decode_tiles(m, n, k, groups, limits[0])
        wide = len(tiles)
        tiles += introspection().int4_wide_tiles()
        tile = tiles[chosen["choice"][0]]
        explanation.kernel = "4-bit tiles (mma.sync)"
        explanation.why = f"the smallest tile that holds {m} rows of x"
        if chosen["choice"][0] >= wide:
            explanation.kernel = "4-bit tiles (wgmma)"
            explanation.why = f"the fastest tile for {m} rows of 16-bit x on Hopper"
        elif chosen["choice"][0] >= rings:
            explanation.kernel = "4-bit decoding (mma.sync, the weight straight to registers)"
            explanation.why = f"{m} rows of 16-bit x that shared memory holds whole"
        hidden = ("suits", "suits_any_group", "refusal")
        explanation.tile = {key: v for key, v in tile.items() if key not in hidden}
        explanation.tile["parts_of_k"] = chosen["columns"]["parts"]
        explanation.why += (
            "" if repacked else "; the weight is repacked first, int4_linear_repacked saves that"
        )
    if explanation.source != "heuristic":
        explanation.why = _TUNED
    return explanation


def row_sum(explanation: Explanation, x: Tensor) -> Explanation:
    n, rows = x.shape[-1], _rows_of(x)
    if 0 in (n, rows):
        explanation.kernel, explanation.why = "none", "nothing to compute"
        return explanation
    stride = x.stride(-2) if x.dim() > 1 and x.stride(-1) == 1 and rows > 1 else n
    aligned = x.storage_offset() * x.element_size() % 16 == 0
    aligned = aligned and stride * x.element_size() % 16 == 0
    sms, bfloat16 = _device_limits(x)[0], x.dtype == torch.bfloat16
    problem = [rows, n, x.element_size(), stride == n, aligned, sms, bfloat16]
    chosen, explanation.source = _picked("row_sum", problem, x)
    explanation.kernel = "staged rows" if chosen["choice"][0] < 0 else "rows by groups of threads"
    explanation.tile = chosen["columns"]
    tuned = explanation.source != "heuristic"
    own = f"the first tile that reads rows of {n} at one go, or cuts them into parts"
    explanation.why = _TUNED if tuned else own
    return explanation


def conv2d(explanation: Explanation, x: Tensor, weight: Tensor) -> Explanation:
    if 0 in x.shape or 0 in weight.shape:
        explanation.kernel, explanation.why = "none", "nothing to compute"
        return explanation
    flipped = explanation.op.endswith("_backward")
    bfloat16 = x.dtype == torch.bfloat16
    problem = [*x.shape, *weight.shape, x.element_size(), flipped, bfloat16]
    chosen, explanation.source = _picked("conv2d", problem, x)
    kinds = (
        "direct, in registers",
        "banded, on tensor cores",
        "general",
        "cells, on tensor cores",
        "small images, through shared memory",
        "images of 8 columns, on tensor cores",
    )
    explanation.kernel = kinds[chosen["choice"][0]]
    explanation.tile = {k: v for k, v in chosen["columns"].items() if k != "kernel" and v}
    tuned = explanation.source != "heuristic"
    explanation.why = _TUNED if tuned else "what the dtype and the sizes allow"
    return explanation


def scalar_attention(explanation: Explanation, q: Tensor) -> Explanation:
    """The same tiles and splits as the launcher's."""
    n = q.shape[0]
    if n == 0:
        explanation.kernel, explanation.why = "none", "nothing to compute"
        return explanation
    backward = explanation.op.endswith("_backward")
    sweeps = introspection().scalar_attention_sweeps(n, backward, _device_limits(q)[0])
    explanation.kernel = "sweep over all pairs" if len(sweeps) == 1 else "two sweeps over all pairs"
    for sweep in sweeps:
        prefix = "" if len(sweeps) == 1 else f"{sweep['sweep']}_"
        explanation.tile.update({prefix + k: v for k, v in sweep.items() if k != "sweep"})
    explanation.why = "the tile and the split that are estimated to end first"
    return explanation
