"""Single-channel convolution on a GPU, against a copy of the images and torch's F.conv2d."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweld._library import ops
from torchweld.tuning.timer import interleaved
from torchweld_bench.common import dtype_text, judged
from torchweld_bench.results import Row, make_row

_CHECKED_IMAGES = 64
_SHAPES = ((4096, 64, 64), (256, 512, 512), (65536, 8, 8))


def _padded(x: Tensor, size: int) -> Tensor:
    return F.pad(x, (0, size - 1, 0, size - 1))[:, None]


def _eager(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(_padded(x, weight.shape[0]), weight[None, None])[:, 0]


def _forward(
    shape: tuple[int, int, int], size: int, dtype: torch.dtype, targets: dict[str, float]
) -> Iterator[Row]:
    """Two rows of one measurement: against a copy, and against torch's fastest variant."""
    x = torch.randn(shape, device="cuda", dtype=dtype)
    weight = torch.randn(size, size, device="cuda", dtype=dtype)
    z = torch.empty_like(x)
    padded, kernel = _padded(x, size), weight[None, None]
    part = x[:_CHECKED_IMAGES]
    reference = _eager(part.double(), weight.double())
    times = interleaved(
        {
            "ours": lambda: ops.conv2d(x, weight),
            "copy": lambda: z.copy_(x),
            # x is padded before the timed region, which is torch's best case.
            "F.conv2d": lambda: F.conv2d(padded, kernel),
        },
        device="cuda",
        rounds=11,
    )
    case = f"conv2d {shape} {size} x {size} {dtype_text(dtype)}"
    errors = judged(ops.conv2d(part, weight), _eager(part, weight), reference)
    row = make_row(case, times, against="copy", target=targets.get(case), **errors)
    yield row
    yield row.over("F.conv2d", targets)


def _backward(
    shape: tuple[int, int, int], size: int, dtype: torch.dtype, targets: dict[str, float]
) -> Row:
    """Both gradients."""
    x = torch.randn(shape, device="cuda", dtype=dtype)
    weight = torch.randn(size, size, device="cuda", dtype=dtype)
    dz = torch.randn_like(x)
    padded, kernel = _padded(x, size), weight[None, None]

    def eager(dz: Tensor, padded: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.aten.convolution_backward(
            dz[:, None], padded, kernel, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1,
            [True, True, False],
        )[:2]  # fmt: skip

    def ours() -> tuple[Tensor, Tensor]:
        return ops.conv2d_backward(dz, x, weight, output_mask=[True, True])

    # The weight gradient is a sum over all images, so only the gradient of x can be checked for
    # some of the images.
    part = slice(_CHECKED_IMAGES)
    inputs = (dz[part].double(), padded[part].double(), kernel.double())
    height, width = shape[1:]
    reference = eager(*inputs)[0][:, 0, :height, :width]
    theirs = eager(dz[part], padded[part], kernel)[0][:, 0, :height, :width]
    case = f"conv2d_backward {shape} {size} x {size} {dtype_text(dtype)}"
    return make_row(
        case,
        interleaved(
            {"ours": ours, "torch": lambda: eager(dz, padded, kernel)}, device="cuda", rounds=5
        ),
        against="torch",
        target=targets.get(case),
        **judged(ours()[0][part], theirs, reference),
    )


def rows(targets: dict[str, float]) -> Iterator[Row]:
    """Measures every case of the family, one per iteration."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        for dtype in (torch.float32, torch.bfloat16):
            for shape in _SHAPES:
                for size in (3, 4, 5, 7):
                    yield from _forward(shape, size, dtype, targets)
        for dtype in (torch.float32, torch.bfloat16):
            for shape in _SHAPES[:2]:
                yield _backward(shape, 5, dtype, targets)
