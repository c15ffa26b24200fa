"""Linear layers with 4-bit weights on a GPU, against the time to read the weight and cuBLAS."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweld._library import ops
from torchweld.bench.common import dtype_text, largest_error
from torchweld.bench.results import Row, make_row
from torchweld.bench.timer import Timing, interleaved
from torchweld.ops.int4_linear import Int4Linear

_CHECKED_ROWS = 64
_ROUNDS = 21
_GROUP = 128
_READ_BYTES = 1 << 30
_FLOOR_UP_TO = 16  # rows of x: beyond, the weight is not all that takes time


def _read_rate() -> float:
    """Bytes a microsecond of a long sum, which reads and does nothing else."""
    data = torch.randn(_READ_BYTES // 4, device="cuda")
    return _READ_BYTES / interleaved({"sum": data.sum}, device="cuda")["sum"].us


def _tinygemm(module: Int4Linear) -> tuple[Tensor, Tensor]:
    """Operands of torch's own kernel: other zeros, so that only its time is of use."""
    codes = ops.int4_unpack(module.qweight, module.in_features)
    pairs = codes[:, ::2] << 4 | codes[:, 1::2]
    packed = torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), 8)
    scale = module.scale.t().contiguous()
    return packed, torch.stack([scale, torch.zeros_like(scale)], -1).to(torch.bfloat16)


def _cases(
    m: int, k: int, n: int, dtype: torch.dtype, rate: float, targets: dict[str, float]
) -> Iterator[Row]:
    """One product; a row against each peer that it has a target for."""
    linear = torch.nn.Linear(k, n, bias=False, device="cuda", dtype=dtype)
    module = Int4Linear.from_linear(linear, _GROUP)
    dense, x = module.dequantise(), torch.randn(m, k, device="cuda").to(dtype)
    variants = {"ours": lambda: module(x), "cublas": lambda: F.linear(x, dense)}
    if dtype == torch.bfloat16:
        packed, scales = _tinygemm(module)
        variants["int4pack_mm"] = lambda: torch._weight_int4pack_mm(x, packed, _GROUP, scales)
    times = interleaved(variants, device="cuda", rounds=_ROUNDS)
    weight = (module.packed, module.packed_scale, module.packed_zero)
    floor = sum(t.numel() * t.element_size() for t in weight) / rate
    times["read floor"] = Timing(floor, floor, floor)
    part = x[:_CHECKED_ROWS]
    reference = part.double() @ dense.double().t()
    eager_error = largest_error(F.linear(part, dense), reference)
    case = f"int4 ({m}, {k}, {n}) {dtype_text(dtype)}"
    row = make_row(
        case,
        times,
        against="cublas",
        target=targets.get(case),
        error=largest_error(module(x)[:_CHECKED_ROWS], reference),
        eager_error=eager_error,
        allowed_error=3 * eager_error + 1e-6,
    )
    yield row
    others = ["int4pack_mm"] if "int4pack_mm" in times else []
    for peer in others + (["read floor"] if m <= _FLOOR_UP_TO else []):
        name = f"{case} over {peer}"
        ratio = None if row.ratio is None else round(row.ours_us / times[peer].us, 3)
        yield replace(row, case=name, against=peer, ratio=ratio, target=targets.get(name))


def rows(targets: dict[str, float]) -> Iterator[Row]:
    """Every case of the family, measured when it is asked for."""
    torch.manual_seed(0)
    rate = _read_rate()
    brain, half, single = torch.bfloat16, torch.float16, torch.float32
    for k, n in ((4096, 4096), (4096, 14336)):
        for m in (1, 4, 8, 16, 32, 64, 128, 256, 1024, 4096):
            yield from _cases(m, k, n, brain, rate, targets)
    yield from _cases(1, 14336, 4096, brain, rate, targets)
    yield from _cases(16, 4096, 14336, half, rate, targets)
    yield from _cases(256, 4096, 14336, half, rate, targets)
    yield from _cases(1, 4096, 14336, single, rate, targets)
    yield from _cases(256, 4096, 14336, single, rate, targets)
