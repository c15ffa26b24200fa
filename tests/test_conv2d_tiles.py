"""Which kernel a convolution takes: host code, tested without a GPU."""

from __future__ import annotations

import pytest

from choices_helpers import _C, chosen, problem, refusal


def image(height: int, width: int, kernel: tuple[int, int], elem_size: int) -> dict[str, int]:
    sizes = dict(height=height, width=width, kernel_height=kernel[0], kernel_width=kernel[1])
    return sizes | dict(elem_size=elem_size, bfloat16=elem_size == 2)


# Image, kernel, bytes of an element, and the fastest choice on an H200: a kernel, and for cells and
# narrow images the kernel sizes of the tile.
FASTEST = [
    (8, 8, 3, 4, "small"), (8, 8, 7, 4, "small"), (16, 16, 5, 4, "small"),
    (16, 16, 7, 4, "direct"), (17, 16, 5, 4, "direct"), (16, 17, 3, 4, "direct"),
    (16, 9, 7, 4, "direct"), (64, 64, 3, 4, "direct"), (512, 512, 7, 4, "direct"),
    (8, 8, 6, 4, "general"), (8, 8, 3, 2, "narrow 3x3"), (16, 16, 5, 2, "cells 5x5"),
    (64, 64, 4, 2, "cells 5x5"), (512, 512, 3, 2, "cells 3x3"), (512, 512, 5, 2, "cells 5x5"),
    (8, 8, 4, 2, "narrow 5x5"), (8, 8, 5, 2, "narrow 5x5"), (512, 512, 7, 2, "cells 7x7"),
    (64, 64, 9, 2, "cells 9x9"),
    (8, 8, 10, 2, "banded"), (64, 64, 31, 2, "banded"), (64, 64, 32, 2, "general"),
]  # fmt: skip

CELLS = (3, 5, 7, 9)  # the largest kernel of each tile


@pytest.mark.parametrize(("height", "width", "size", "elem", "fastest"), FASTEST)
def test_convolutions_take_what_was_measured_as_fastest(height, width, size, elem, fastest):
    choice = chosen("conv2d", **image(height, width, (size, size), elem))
    assert fastest == (choice["engine"] if choice["engine"] == "banded" else choice["choice"])


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
            assert choice["engine"] == "banded"


def test_images_of_8_columns_have_a_kernel_of_their_own():
    """Up to 8 rows, and kernels up to 7 x 7, square or not."""
    for height, width, kernel, tile in (
        (8, 8, (3, 3), 3), (1, 8, (1, 1), 3), (7, 8, (2, 4), 5), (8, 8, (7, 7), 7),
        (3, 8, (6, 1), 7), (9, 8, (3, 3), 0), (8, 7, (3, 3), 0), (8, 9, (5, 5), 0),
        (8, 8, (8, 3), 0),
    ):  # fmt: skip
        fields = image(height, width, kernel, 2)
        choice = chosen("conv2d", **fields)
        if tile:
            assert choice["choice"] == f"narrow {tile}x{tile}"
        else:
            assert choice["engine"] == "cells"
        for size in CELLS[:3]:
            fits = tile != 0 and max(kernel) <= size
            reason = refusal("conv2d", problem("conv2d", **fields), f"narrow {size}x{size}")
            assert (reason == "") == fits
    single = problem("conv2d", **image(8, 8, (3, 3), 4))
    assert "8 columns" in refusal("conv2d", single, "narrow 3x3")


def test_reasons_of_a_conv2d():
    small, large = (problem("conv2d", **image(n, n, (7, 7), 4)) for n in (8, 16))
    assert refusal("conv2d", small, "small") == "" == refusal("conv2d", large, "direct")
    assert "8 columns" in refusal("conv2d", large, "small")
    tall = problem("conv2d", **image(17, 8, (3, 3), 4))
    assert "16 x 16" in refusal("conv2d", tall, "small")
    half = problem("conv2d", **image(8, 8, (4, 4), 2))
    for name in ("direct", "small"):
        assert "float32" in refusal("conv2d", half, name)
    assert refusal("conv2d", half, "cells 3x3") == "16 bits and kernels of 3 x 3 at most"
    assert refusal("conv2d", half, "cells 5x5") == "" == refusal("conv2d", half, "banded 512x8")
    for name in ("narrow 9x9", "cells 11x11", "small 3x3", "direct 3", "general 1", "winograd"):
        with pytest.raises(ValueError, match=f"conv2d has no configuration called '{name}'"):
            refusal("conv2d", half, name)
