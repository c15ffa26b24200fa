"""The ops of hybrid models, rms_norm_gated and causal_conv1d, on a GPU as CUDA graphs, against a
copy with the same traffic, torch's own ops and torch.compile.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweld._library import ops
from torchweld_bench.cases import (
    CHECKED_ROWS,
    Call,
    Function,
    captured,
    checked,
    drawn,
    gradients,
    leaves,
    measured,
)
from torchweld_bench.common import dtype_text, free
from torchweld_bench.results import Row

_EPS = 1e-6
# (shape of x, gate first) of Qwen3-Next, and of Mamba-2 without and with groups; 16,384 tokens.
_NORMS = (((16384, 32, 128), False), ((16384, 4096), True), ((16384, 8, 512), True))
# (batch, seqlen, channels) of Qwen3-Next, of Falcon-H1 and of a generation step.
_CONVOLUTIONS = ((4, 4096, 8192), (1, 16384, 2048), (64, 1, 8192))


def _gated(gate_first: bool) -> Function:
    def norm(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        factor = F.silu(gate)
        rows = x * factor if gate_first else x
        y = F.rms_norm(rows, x.shape[-1:], weight, _EPS)
        return y if gate_first else y * factor

    return norm


def _convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Runs the code of transformers."""
    z = F.conv1d(x, weight[:, None], bias, padding=weight.shape[1] - 1, groups=x.shape[1])
    return F.silu(z[..., : x.shape[-1]])


def _rows_of(
    case: str,
    ours: Function,
    eager: Function,
    operands: list[Tensor],
    few: list[Tensor],
    reads: int,
) -> Iterator[Row]:
    """The forward reads `reads` matrices, the backward one more; each gradient is a matrix too."""
    x = operands[0]
    errors = checked(ours(*few), eager, few)

    def copy(matrices: int) -> Call:
        source, result = (torch.empty(matrices * x.numel() // 2, dtype=x.dtype, device="cuda")
                          for _ in range(2))  # fmt: skip
        return partial(result.copy_, source)

    functions = {"ours": ours, "torch.compile": torch.compile(eager, dynamic=False), "eager": eager}
    dy = torch.randn_like(x)
    for what, calls, matrices in (
        ("forward", {n: partial(f, *operands) for n, f in functions.items()}, reads + 1),
        (
            "forward and backward",
            {n: gradients(f, leaves(*operands), dy) for n, f in functions.items()},
            3 * reads + 2,
        ),
    ):
        calls["copy"] = copy(matrices)
        over = ["copy", "torch.compile"]
        yield from measured(f"{case}, {what}", captured(calls), errors, over=over)


def rows() -> Iterator[Row]:
    """Measures every case of the family lazily."""
    for shape, gate_first in _NORMS:
        torch._dynamo.reset()
        free()
        operands = [drawn(*shape), drawn(*shape), drawn(shape[-1])]
        few = [*(t[:CHECKED_ROWS] for t in operands[:2]), operands[2]]
        case = f"rms_norm_gated {shape} {dtype_text(operands[0].dtype)}"
        case += ", gate first" * gate_first
        ours = partial(ops.rms_norm_gated, eps=_EPS, gate_first=gate_first)
        yield from _rows_of(case, ours, _gated(gate_first), operands, few, 2)
    for batch, seqlen, channels in _CONVOLUTIONS:
        torch._dynamo.reset()
        free()
        x = drawn(batch, seqlen, channels).transpose(1, 2)
        operands = [x, drawn(channels, 4), drawn(channels)]
        few = [x[:1, :, :CHECKED_ROWS], *operands[1:]]
        case = f"causal_conv1d ({batch}, {channels}, {seqlen}) width 4 {dtype_text(x.dtype)}, silu"
        ours = partial(ops.causal_conv1d, activation="silu")
        yield from _rows_of(case, ours, _convolution, operands, few, 1)
