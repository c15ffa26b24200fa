"""Single-channel convolution on a GPU, against a copy of the images and torch's F.conv2d."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweld._library import ops
from torchweld_bench.cases import CHECKED_ROWS, Call, checked, drawn, measured
from torchweld_bench.common import dtype_text, padded_conv2d
from torchweld_bench.results import Row

_SHAPES = ((4096, 64, 64), (256, 512, 512), (65536, 8, 8))


def _padded(x: Tensor, size: int) -> Tensor:
    return F.pad(x, (0, size - 1, 0, size - 1))[:, None]


def _forward(shape: tuple[int, int, int], size: int, dtype: torch.dtype) -> Iterator[Row]:
    """Two rows of one measurement: against a copy, and against torch's fastest variant."""
    x, weight = drawn(*shape, dtype=dtype), drawn(size, size, dtype=dtype)
    z = torch.empty_like(x)
    padded, kernel, part = _padded(x, size), weight[None, None], x[:CHECKED_ROWS]
    calls: dict[str, Call] = {
        "ours": lambda: ops.conv2d(x, weight),
        "copy": lambda: z.copy_(x),
        # x is padded outside of the timed call, in torch's favour.
        "F.conv2d": lambda: F.conv2d(padded, kernel),
    }
    errors = checked(ops.conv2d(part, weight), padded_conv2d, [part, weight])
    case = f"conv2d {shape} {size} x {size} {dtype_text(dtype)}"
    return measured(case, calls, errors, "copy", ["F.conv2d"], rounds=11)


def _backward(shape: tuple[int, int, int], size: int, dtype: torch.dtype) -> Iterator[Row]:
    """Both gradients."""
    x, weight, dz = (
        drawn(*shape, dtype=dtype),
        drawn(size, size, dtype=dtype),
        drawn(*shape, dtype=dtype),
    )
    padded = _padded(x, size)

    def eager(dz: Tensor, padded: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.aten.convolution_backward(
            dz[:, None], padded, weight[None, None], None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1,
            [True, True, False],
        )[:2]  # fmt: skip

    def ours() -> tuple[Tensor, Tensor]:
        return ops.conv2d_backward(dz, x, weight, output_mask=[True, True])

    # The weight gradient is a sum over all images, so only the gradient of x can be checked for
    # some of the images.
    errors = checked(
        ours()[0][:CHECKED_ROWS],
        lambda *few: eager(*few)[0][:, 0, : shape[1], : shape[2]],
        [dz[:CHECKED_ROWS], padded[:CHECKED_ROWS], weight],
    )
    calls: dict[str, Call] = {"ours": ours, "torch": lambda: eager(dz, padded, weight)}
    case = f"conv2d_backward {shape} {size} x {size} {dtype_text(dtype)}"
    return measured(case, calls, errors, "torch", rounds=5)


def rows() -> Iterator[Row]:
    """Measures every case of the family, one per iteration."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        for dtype in (torch.float32, torch.bfloat16):
            for shape in _SHAPES:
                for size in (3, 4, 5, 7):
                    yield from _forward(shape, size, dtype)
            yield from _forward(_SHAPES[0], 11, dtype)
        for dtype in (torch.float32, torch.bfloat16):
            for shape in _SHAPES[:2]:
                yield from _backward(shape, 5, dtype)
