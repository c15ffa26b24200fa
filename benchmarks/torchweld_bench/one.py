"""One call of an op against the same function in torch: `bench.py OP --shape SIZES`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import torchweld
from torchweld.ops.gated_linear import GATES
from torchweld.tuning.timer import interleaved
from torchweld_bench.cases import Function, checked, compared, drawn_like, gradients, leaves
from torchweld_bench.common import dtype_text, padded_conv2d
from torchweld_bench.results import Row

_VALUE = 1.5  # the scalar that add_scalar adds


def _causal_softmax(scores: Tensor) -> Tensor:
    rows, keys = scores.shape[-2:]
    hidden = torch.ones(rows, keys, dtype=torch.bool, device=scores.device).triu(1 + keys - rows)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1)


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    # NOTE: torch 2.11's CPU kernel divides by the number of heads, which may be 0
    if query.shape[1] == 0:
        return (query @ key.mT).softmax(-1) @ value
    return F.scaled_dot_product_attention(query, key, value)


def _gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    return GATES["geglu"](*F.linear(x, weight).chunk(2, -1))


# For each op: the same computation in torch, with the defaults of the op.
EAGER: dict[str, Callable[..., Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "causal_softmax": _causal_softmax,
    "softmax_matmul": lambda scores, value: scores.softmax(-1) @ value,
    "attention": _attention,
    "linear": F.linear,
    "layer_norm_linear": lambda x, w: F.linear(F.layer_norm(x, x.shape[-1:]), w),
    "rms_norm_linear": lambda x, w: F.linear(F.rms_norm(x, x.shape[-1:], None, 1e-6), w),
    "folded_layer_norm_linear": lambda x, w, sums: F.linear(F.layer_norm(x, x.shape[-1:]), w),
    "gated_linear": _gated_linear,
    "bmm": torch.bmm,
    "row_sum": lambda x: x.sum(-1),
    "conv2d": padded_conv2d,
    "add_scalar": lambda x: x + _VALUE,
    "outer_add": lambda x, y: y[:, None] + x,
    "outer_mul_relu": lambda x, y: (y[:, None] * x).relu(),
    "mul_relu": lambda x, y: (x * y[:, None]).relu(),
    "scalar_attention": lambda q, k, v: (q[:, None] * k).softmax(-1) @ v,
}
_GRADIENT_OF_X_ALONE = ("folded_layer_norm_linear",)
_SAMPLE_SECONDS = 0.005  # on a CPU a sample repeats a short call for this long


def rows(op: str, tensors: list[Tensor], peers: list[str]) -> Iterator[Row]:
    """The call, forward and with gradient, against the peers; ratios are to the first peer.

    Args:
        op: a key of `EAGER`.
        tensors: its tensors, on the device that is timed.
        peers: "eager", "compile" or both.
    """
    function = getattr(torchweld, op)
    ours = (lambda x: function(x, _VALUE)) if op == "add_scalar" else function
    eager = EAGER[op]
    out = ours(*tensors)
    errors = checked(out, eager, tensors, times=4)
    functions: dict[str, Function] = {"ours": ours, **dict.fromkeys(peers, eager)}
    if "compile" in functions:
        functions["compile"] = torch.compile(eager, dynamic=False)
    wanted = 1 if op in _GRADIENT_OF_X_ALONE else len(tensors)
    operands, dy = leaves(*tensors[:wanted]), drawn_like(out)
    timed = {
        "forward": {name: partial(f, *tensors) for name, f in functions.items()},
        "with gradient": {
            name: gradients(lambda *t, f=f: f(*t, *tensors[wanted:]), operands, dy)
            for name, f in functions.items()
        },
    }
    shapes, device = " ".join(str(tuple(t.shape)) for t in tensors), tensors[0].device.type
    for kind, variants in timed.items():
        times = interleaved(variants, device=device, sample_seconds=_SAMPLE_SECONDS)
        case = f"{op} {shapes} {dtype_text(tensors[0].dtype)} {kind}"
        yield from compared(case, times, errors, peers[0])
