"""Which kernel a convolution takes: host code, tested without a GPU."""

from __future__ import annotations

import pytest

from choices_helpers import _C, chosen, problem, refusal


def image(height: int, width: int, kernel: tuple[int, int], elem_size: int) -> dict[str, int]:
    sizes = dict(height=height, width=width, kernel_height=kernel[0], kernel_width=kernel[1])
    return sizes | dict(elem_size=elem_size, bfloat16=elem_size == 2)


# Image, kernel, bytes of an element, and the choice.
CHOSEN = [
    (8, 8, 3, 4, "direct"), (16, 16, 7, 4, "direct"), (512, 512, 5, 4, "direct"),
    (8, 8, 6, 4, "general"), (64, 64, 9, 4, "general"), (8, 8, 3, 2, "cells 3x3"),
    (16, 16, 5, 2, "cells 5x5"), (64, 64, 4, 2, "cells 5x5"), (512, 512, 7, 2, "cells 7x7"),
    (64, 64, 9, 2, "cells 9x9"), (8, 8, 10, 2, "general"), (64, 64, 31, 2, "general"),
]  # fmt: skip

CELLS = (3, 5, 7, 9)  # the largest kernel of each tile


@pytest.mark.parametrize(("height", "width", "size", "elem", "expected"), CHOSEN)
def test_convolutions_take_the_engine_of_their_dtype_and_kernel(
    height, width, size, elem, expected
):
    assert chosen("conv2d", **image(height, width, (size, size), elem))["choice"] == expected


def test_cells_hold_the_kernel():
    """The larger size counts if the kernel is not square."""
    for kernel in ((1, 1), (3, 2), (2, 5), (7, 1), (6, 8), (9, 9), (9, 10), (10, 1)):
        fields = image(40, 24, kernel, 2)
        found = _C.candidates("conv2d", problem("conv2d", **fields))
        cells = {c["tile"]: c["refusal"] == "" for c in found if c["engine"] == "cells"}
        assert cells == {f"{size}x{size}": max(kernel) <= size for size in CELLS}
        choice = chosen("conv2d", **fields)
        if max(kernel) <= 9:
            size = int(choice["tile"].split("x")[0])
            assert choice["engine"] == "cells" and max(kernel) <= size <= max(kernel) + 2
        else:
            assert choice["engine"] == "general"


def test_reasons_of_a_conv2d():
    large = problem("conv2d", **image(16, 16, (7, 7), 4))
    assert refusal("conv2d", large, "direct") == "" == refusal("conv2d", large, "general")
    assert refusal("conv2d", large, "cells 7x7") == "16 bits and kernels of 7 x 7 at most"
    half = problem("conv2d", **image(8, 8, (4, 4), 2))
    assert refusal("conv2d", half, "direct") == "float32 and square kernels of 3, 4, 5 or 7"
    assert refusal("conv2d", half, "cells 3x3") == "16 bits and kernels of 3 x 3 at most"
    assert refusal("conv2d", half, "cells 5x5") == "" == refusal("conv2d", half, "general")
    for name in ("cells 11x11", "direct 3", "general 1", "winograd"):
        with pytest.raises(ValueError, match=f"conv2d has no configuration called '{name}'"):
            refusal("conv2d", half, name)
