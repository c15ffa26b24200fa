"""Single ops with tensors on several processes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.experimental import context_parallel as torchs_own
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

import torchweld
from torchweld.distributed import (
    NormColwise,
    context_parallel_attention,
    shard_sequence,
)
from torchweld.distributed.context import METHODS
from torchweld.nn import LayerNormLinear
from torchweld_bench.cases import compared, judged
from torchweld_bench.distributed.processes import complaint, device, highest, measured, say
from torchweld_bench.distributed.setup import Setup, divided
from torchweld_bench.results import Row

_LONG_ROUNDS = 3
_ROUNDS = 7
_CALLS = 10  # the number of calls of a short op per sample
_EXACT_ROWS = 128
BACK_ENDS = {
    "torch's own, flash": SDPBackend.FLASH_ATTENTION,
    "torch's own, cudnn": SDPBackend.CUDNN_ATTENTION,
}

Call = Callable[[], tuple[Tensor, ...]]


def _with_gradients(attend: Callable[..., Tensor], qkv: list[Tensor], dout: Tensor) -> Call:
    leaves = [t.detach().clone().requires_grad_() for t in qkv]

    def call() -> tuple[Tensor, ...]:
        out = attend(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    return call


def _difference(ours: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
    """The largest relative error of out, dq, dk and dv, in any process."""
    errors = [
        ((a.float() - b.float()).norm() / b.float().norm()).item()
        for a, b in zip(ours, want, strict=True)
    ]
    return highest(max(errors))


def _torchs_own(backend: SDPBackend) -> Callable[..., Tensor]:
    """SDPA inside torch's context_parallel, which needs as many KV heads as query heads."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(heads, 1) for t in (key, value))
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    return attend


@contextmanager
def _inside_torchs_own(setup: Setup, seqlen: int) -> Iterator[None]:
    stock, tokens = F.scaled_dot_product_attention, torch.arange(seqlen, device=device())
    try:
        with torchs_own(setup.mesh, buffers=[tokens], buffer_seq_dims=[0]):
            yield
    finally:
        # torch's context_parallel does not restore the function after an error
        F.scaled_dot_product_attention = stock


def _working(calls: dict[str, Call], needed: tuple[str, ...]) -> dict[str, tuple[Tensor, ...]]:
    """The results of all calls; calls that raise are removed in all processes.

    Raises:
        RuntimeError: one of those that are needed raised.
    """
    given: dict[str, tuple[Tensor, ...]] = {}
    for name, call in list(calls.items()):
        if reason := complaint(lambda name=name, call=call: given.update({name: call()})):
            if name in needed:
                raise RuntimeError(f"{name}: {reason}")
            say(f"{name} is left out: {reason}")
            given.pop(name, None)
            del calls[name]
    return given


def _attention(setup: Setup, padded: bool = False, long: bool = False) -> Iterator[Row]:
    """Forward and backward of a causal attention: by each method, alone, and by torch's own."""
    batch, nheads, nheads_kv, seqlen, dim = setup.cases.attention_of(padded, long)
    leftpad = None
    if padded:
        leftpad = torch.zeros(batch, dtype=torch.int32, device=device())
        leftpad[1::2] = seqlen // 4
    torch.manual_seed(0)
    *whole, dout = (
        torch.randn(batch, heads, seqlen, dim, device=device()).to(setup.cases.dtype)
        for heads in (nheads, nheads_kv, nheads_kv, nheads)
    )
    *part, dout_part = (shard_sequence(t, dim=2) for t in (*whole, dout))

    def by(method: str) -> Call:
        attend = partial(
            context_parallel_attention, leftpad=leftpad, method=method, causal=True, check=False
        )
        return _with_gradients(attend, part, dout_part)

    alone = partial(torchweld.attention, leftpad=leftpad, causal=True)
    calls = {"alone": _with_gradients(alone, whole, dout)}
    calls |= {"ours" if method == "all_gather" else method: by(method) for method in METHODS}
    back_ends = BACK_ENDS if device() == "cuda" and not padded and not long else {}
    for name, backend in back_ends.items():
        calls[name] = _with_gradients(_torchs_own(backend), part, dout_part)
    inside = _inside_torchs_own(setup, seqlen) if back_ends else nullcontext()
    with warnings.catch_warnings(), inside:
        warnings.filterwarnings("ignore", "torchweld: context_parallel_attention has a group of")
        given = _working(calls, ("ours", "alone"))
        times = measured(calls, rounds=_LONG_ROUNDS if long else _ROUNDS)
    want = tuple(shard_sequence(t, dim=2) for t in given.pop("alone"))
    errors = {name: _difference(each, want) for name, each in given.items()}
    case = setup.cases.context_parallel(setup.size, padded, long)
    times["ideal"] = divided(times["alone"], setup.size)
    judged_here = {
        "error": errors["ours"],
        "eager_error": max((errors[n] for n in BACK_ENDS if n in errors), default=0.0),
        "allowed_error": setup.cases.rtol,
    }
    yield from compared(case, times, judged_here, "alone", back_ends)


def attention(setup: Setup) -> Iterator[Row]:
    return _attention(setup)


def long_attention(setup: Setup) -> Iterator[Row]:
    """Seconds of work alone, so without torch's own."""
    return _attention(setup, long=True)


def padded_attention(setup: Setup) -> Iterator[Row]:
    """Half of the sequences have 25 % padding."""
    return _attention(setup, padded=True)


def linear(setup: Setup) -> Iterator[Row]:
    """`layer_norm_linear` of sharded tokens, with its columns divided over the processes."""
    rows, k, n = setup.cases.linear
    torch.manual_seed(0)
    with torch.device(device()):
        stock = nn.Sequential(nn.LayerNorm(k), nn.Linear(k, n), nn.GELU("tanh"))
        stock = stock.to(setup.cases.dtype)
        x = torch.randn(1, rows, k).to(setup.cases.dtype)
    ours = LayerNormLinear.from_torch(copy.deepcopy(stock))
    sequence = Shard(1)
    styles = {"0": SequenceParallel(), "1": ColwiseParallel(input_layouts=sequence)}
    parallelize_module(stock, setup.mesh, styles, src_data_rank=None)
    style = NormColwise(input_layouts=sequence)
    parallelize_module(ours, setup.mesh, style, src_data_rank=None)
    part = x.chunk(setup.size, 1)[dist.get_rank()].contiguous()
    mine = [p.detach().to_local() for p in (ours.weight, ours.bias, ours.ln_weight, ours.ln_bias)]
    weight, bias, *affine = mine
    calls = {
        "ours": lambda: (ours(part),),
        "matmul alone": lambda: (F.linear(x, weight),),
        "gathered already": lambda: (
            torchweld.layer_norm_linear(x, *mine, activation="gelu_tanh"),
        ),
        "stock": lambda: (stock(part),),
    }
    with torch.no_grad():
        given = _working(calls, ("ours", "matmul alone", "stock"))
        times = measured(calls, rounds=_ROUNDS, calls=_CALLS)
        first = F.layer_norm(x[:, :_EXACT_ROWS].double(), (k,), *(t.double() for t in affine))
        exact = F.gelu(F.linear(first, weight.double(), bias.double()), approximate="tanh")
        errors = judged(*(given[name][0][:, :_EXACT_ROWS] for name in ("ours", "stock")), exact)
    case = setup.cases.sequence_parallel(setup.size)
    errors = {name: highest(value) for name, value in errors.items()}
    yield from compared(case, times, errors, "matmul alone", ["stock"])
