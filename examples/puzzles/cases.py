"""The twelve puzzles: each function in plain torch and by an op, at the notebook's sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import torchweld._library as library

# Positions of a word's eight codes; int32's sign bit belongs to the last of them.
_SHIFTS = tuple(range(0, 32, 4))


@dataclass(frozen=True)
class Puzzle:
    """One puzzle.

    Attributes:
        number: 1 to 12.
        title: The name of the puzzle.
        formula: The function.
        sizes: Shape of every input, by name.
        spec_text: The function in plain torch, as a learner would read it.
        op_text: The call that solves it.
        spec: `spec_text` as a function of the inputs in order.
        op: `op_text` as a function.
        result: The shape of the result.
        tile: The notebook's block sizes, in the order of `tile_names`.
        tile_names: The dim that each number of a tile cuts.
    """

    number: int
    title: str
    formula: str
    sizes: dict[str, tuple[int, ...]]
    spec_text: str
    op_text: str
    spec: Callable[..., Tensor]
    op: Callable[..., Tensor]
    result: tuple[int, ...]
    tile: tuple[int, ...]
    tile_names: tuple[str, ...]

    def inputs(self, device: torch.device | str = "cpu", seed: int = 0) -> dict[str, Tensor]:
        """Random inputs: normal float32 numbers, and words of random bits for packed codes."""
        generator = torch.Generator().manual_seed(seed + self.number)

        def make(name: str, shape: tuple[int, ...]) -> Tensor:
            if self.number == 12 and name in ("offset", "weight"):
                low, high = -(2**31), 2**31
                words = torch.randint(low, high, shape, generator=generator, dtype=torch.int64)
                return words.to(torch.int32)
            return torch.randn(shape, generator=generator)

        return {name: make(name, shape).to(device) for name, shape in self.sizes.items()}


def codes(words: Tensor) -> Tensor:
    """The eight 4-bit codes of every int32 word, lowest first: `(..., n)` to `(..., 8 n)`."""
    shifts = torch.tensor(_SHIFTS, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 15).flatten(-2)


def _zero_outside(x: Tensor, rows: int, cols: int) -> Tensor:
    return F.pad(x, (0, cols - 1, 0, rows - 1))


def _conv2d(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(_zero_outside(x, *weight.shape)[:, None], weight[None, None])[:, 0]


def _relu_gradient(x: Tensor, y: Tensor, dz: Tensor) -> Tensor:
    return dz * (x * y[:, None] > 0) * y[:, None]


def _int4_matmul(scale: Tensor, offset: Tensor, weight: Tensor, activation: Tensor) -> Tensor:
    group = codes(weight).shape[1] // scale.shape[1]
    zero = codes(offset[:, None])[:, : scale.shape[1]]
    wide = [t.repeat_interleave(group, 1) for t in (scale, zero)]
    return (wide[0] * (codes(weight) - wide[1])) @ activation


def _ops_int4(scale: Tensor, offset: Tensor, weight: Tensor, activation: Tensor) -> Tensor:
    return library.ops.int4_linear(activation.T, weight, scale, offset[:, None]).T


PUZZLES: tuple[Puzzle, ...] = (
    Puzzle(
        1,
        "constant add",
        "z[i] = x[i] + 10",
        {"x": (32,)},
        "x + 10.0",
        "torchweld.add_scalar(x, 10.0)",
        lambda x: x + 10.0,
        lambda x: library.ops.add_scalar(x, 10.0),
        (32,),
        (32,),
        ("i",),
    ),
    Puzzle(
        2,
        "constant add in blocks",
        "z[i] = x[i] + 10",
        {"x": (200,)},
        "x + 10.0",
        "torchweld.add_scalar(x, 10.0)",
        lambda x: x + 10.0,
        lambda x: library.ops.add_scalar(x, 10.0),
        (200,),
        (64,),
        ("i",),
    ),
    Puzzle(
        3,
        "outer add",
        "z[i, j] = x[j] + y[i]",
        {"x": (32,), "y": (32,)},
        "x + y[:, None]",
        "torchweld.outer_add(x, y)",
        lambda x, y: x + y[:, None],
        lambda x, y: library.ops.outer_add(x, y),
        (32, 32),
        (32, 32),
        ("j", "i"),
    ),
    Puzzle(
        4,
        "outer add in blocks",
        "z[i, j] = x[j] + y[i]",
        {"x": (100,), "y": (90,)},
        "x + y[:, None]",
        "torchweld.outer_add(x, y)",
        lambda x, y: x + y[:, None],
        lambda x, y: library.ops.outer_add(x, y),
        (90, 100),
        (64, 64),
        ("j", "i"),
    ),
    Puzzle(
        5,
        "fused outer multiplication",
        "z[i, j] = relu(x[j] * y[i])",
        {"x": (100,), "y": (90,)},
        "torch.relu(x * y[:, None])",
        "torchweld.outer_mul_relu(x, y)",
        lambda x, y: torch.relu(x * y[:, None]),
        lambda x, y: library.ops.outer_mul_relu(x, y),
        (90, 100),
        (64, 64),
        ("j", "i"),
    ),
    Puzzle(
        6,
        "its gradient",
        "dx[i, j] = dz[i, j] * y[i] where x[i, j] * y[i] > 0, else 0",
        {"x": (90, 100), "y": (90,), "dz": (90, 100)},
        "dz * (x * y[:, None] > 0) * y[:, None]",
        "torch.ops.torchweld.mul_relu_backward(dz, x, y)[0]",
        _relu_gradient,
        lambda x, y, dz: library.ops.mul_relu_backward(dz, x, y)[0],
        (90, 100),
        (64, 64),
        ("j", "i"),
    ),
    Puzzle(
        7,
        "long sum",
        "z[i] = sum_j x[i, j]",
        {"x": (4, 200)},
        "x.sum(1)",
        "torchweld.row_sum(x)",
        lambda x: x.sum(1),
        lambda x: library.ops.row_sum(x),
        (4,),
        (1, 32),
        ("i", "j"),
    ),
    Puzzle(
        8,
        "long softmax",
        "z[i, j] = exp(x[i, j]) / sum_k exp(x[i, k])",
        {"x": (4, 200)},
        "torch.softmax(x, 1)",
        "torchweld.softmax(x)",
        lambda x: torch.softmax(x, 1),
        lambda x: library.ops.softmax(x),
        (4, 200),
        (1, 32),
        ("i", "j"),
    ),
    Puzzle(
        9,
        "flash attention of scalars",
        "z[i] = sum_j softmax_j(q[i] * k[j]) * v[j]",
        {"q": (200,), "k": (200,), "v": (200,)},
        "torch.softmax(q[:, None] * k, 1) @ v",
        "torchweld.scalar_attention(q, k, v)",
        lambda q, k, v: torch.softmax(q[:, None] * k, 1) @ v,
        lambda q, k, v: library.ops.scalar_attention(q, k, v),
        (200,),
        (64, 32),
        ("i", "j"),
    ),
    Puzzle(
        10,
        "two-dimensional convolution",
        "z[b, i, j] = sum_pq weight[p, q] * x[b, i + p, j + q], 0 beyond the edge",
        {"x": (4, 8, 8), "weight": (4, 4)},
        "F.conv2d(F.pad(x, (0, 3, 0, 3))[:, None], weight[None, None])[:, 0]",
        "torchweld.conv2d(x, weight)",
        _conv2d,
        lambda x, weight: library.ops.conv2d(x, weight),
        (4, 8, 8),
        (1,),
        ("b",),
    ),
    Puzzle(
        11,
        "batched matmul",
        "z[b, i, j] = sum_l x[b, i, l] * y[b, l, j]",
        {"x": (4, 32, 32), "y": (4, 32, 32)},
        "x @ y",
        "torchweld.bmm(x, y)",
        lambda x, y: x @ y,
        lambda x, y: library.ops.bmm(x, y),
        (4, 32, 32),
        (16, 16, 1, 16),
        ("i", "j", "b", "l"),
    ),
    Puzzle(
        12,
        "quantised matmul",
        "z[i, j] = sum_l scale[i, g] * (code[i, l] - zero[i, g]) * activation[l, j], g = l // 8",
        {"scale": (32, 8), "offset": (32,), "weight": (32, 8), "activation": (64, 32)},
        "(scale.repeat_interleave(8, 1) * (codes(weight) - "
        "codes(offset[:, None]).repeat_interleave(8, 1))) @ activation",
        "torchweld.int4_linear(activation.T, weight, scale, offset[:, None]).T",
        _int4_matmul,
        _ops_int4,
        (32, 32),
        (16, 16, 64),
        ("i", "j", "l"),
    ),
)
