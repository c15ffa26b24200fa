"""attention on a GPU, forward and backward, against the backends of torch's SDPA, and against
FlashAttention 4 where it is installed (pip install flash-attn-4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchweld._library import ops
from torchweld.tuning.timer import interleaved
from torchweld_bench import attention_decode
from torchweld_bench.common import (
    dtype_text,
    installed,
    largest_error,
    runs,
    sdpa,
    two_roundings,
)
from torchweld_bench.results import Row, make_row

_ROUNDS = 11
# The time of a call may exceed its share of live tiles by this fraction of the plain call's time.
_BEYOND = 0.05
_FA4 = "FlashAttention 4"
_BACK_ENDS = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
}


# A function of query, key and value (batch, nheads, seqlen, head_dim).
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


class _Case(NamedTuple):
    batch: int
    nheads: int
    seqlen: int
    dim: int
    causal: bool = True
    nheads_kv: int = 0  # 0 means nheads
    dim_v: int = 0  # 0 means dim
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        heads = f"{self.nheads}/{self.nheads_kv}" if self.nheads_kv else self.nheads
        dims = f"{self.dim}/{self.dim_v}" if self.dim_v else self.dim
        causal = " causal" if self.causal else ""
        return f"({self.batch}, {heads}, {self.seqlen}, {dims}) {dtype_text(self.dtype)}{causal}"

    @property
    def against(self) -> str:
        return "sdpa efficient" if self.dtype == torch.float32 else "sdpa cudnn"

    def qkv(self) -> list[Tensor]:
        kv = self.nheads_kv or self.nheads
        sizes = ((self.nheads, self.dim), (kv, self.dim), (kv, self.dim_v or self.dim))
        return [
            torch.randn(self.batch, heads, self.seqlen, dim, device="cuda").to(self.dtype)
            for heads, dim in sizes
        ]

    def back_ends(self) -> dict[str, SDPBackend]:
        """The backends that support the case: not all take float32, unequal or grouped heads."""
        names = list(_BACK_ENDS)
        if self.dtype == torch.float32 or self.dim_v:
            names = [self.against]
        elif self.nheads_kv:
            names.remove("sdpa efficient")
        return {name: _BACK_ENDS[name] for name in names}

    def peers(self) -> dict[str, Function]:
        """The calls of the peers that support the case."""
        causal = self.causal
        peers: dict[str, Function] = {
            name: lambda *qkv, backend=backend: sdpa(backend, *qkv, causal)
            for name, backend in self.back_ends().items()
        }
        fa4 = installed("flash_attn.cute.interface", "flash_attn_func")
        if fa4 is not None and self.dtype != torch.float32:
            peers[_FA4] = lambda *qkv: _flash_attention(fa4, qkv, causal)
        return peers


class _Gradients:
    """The backward of a peer, whose forward runs at the first call."""

    def __init__(self, peer: Function, qkv: list[Tensor], dout: Tensor) -> None:
        self.peer, self.qkv, self.dout = peer, qkv, dout
        self.out: Tensor | None = None

    def __call__(self) -> tuple[Tensor, ...]:
        if self.out is None:
            self.out = self.peer(*self.qkv)
        return torch.autograd.grad(self.out, self.qkv, self.dout, retain_graph=True)


def _flash_attention(function: Callable[..., Any], qkv: Sequence[Tensor], causal: bool) -> Tensor:
    """flash_attn_func, whose tensors are (batch, seqlen, nheads, head_dim)."""
    found = function(*(t.transpose(1, 2) for t in qkv), causal=causal)
    return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)


def _last_rows(qkv: list[Tensor], rows: int = 128) -> list[Tensor]:
    """The last head and its last queries, which see every key."""
    query, key, value = (t[-1:, -1:] for t in qkv)
    return [query[:, :, -rows:], key, value]


def _exact(qkv: list[Tensor], causal: bool) -> Tensor:
    """A causal case whose queries are at the end of the keys."""
    query, key, value = qkv
    rows, keys = query.shape[2], key.shape[2]
    seen = torch.ones(rows, keys, dtype=torch.bool, device="cuda")
    if causal:
        seen = seen.tril(keys - rows)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen)


def _reference(qkv: list[Tensor], causal: bool) -> tuple[Tensor, Tensor]:
    """The last rows in fp64, and in eager torch."""
    part = _last_rows(qkv)
    return _exact([t.double() for t in part], causal), _exact(part, causal)


def _errors(*results: tuple[Tensor, Tensor, Tensor]) -> dict[str, float]:
    """The largest errors of results, each given with torch's result and the one in fp64.

    The README states the limit: twice the error of torch's ops and two roundings of the
    largest result.
    """
    ours, eager, exact = zip(*results, strict=True)
    largest = max(x.abs().max().item() for x in exact)
    eager_error = max(map(largest_error, eager, exact))
    return {
        "error": max(map(largest_error, ours, exact)),
        "eager_error": eager_error,
        "allowed_error": 2 * eager_error + two_roundings(ours[0].dtype, largest),
    }


_NOT_JUDGED = {"error": 0.0, "eager_error": 0.0, "allowed_error": 0.0}


def _row(
    case: str,
    calls: dict[str, Callable[[], object]],
    against: str,
    errors: dict[str, float],
    target: float | None = None,
) -> Row:
    times = interleaved(calls, device="cuda", rounds=_ROUNDS)
    return make_row(case, times, against=against, target=target, **errors)


def _forward(at: _Case) -> Iterator[Row]:
    qkv, case, causal = at.qkv(), f"attention {at}", at.causal
    exact, eager = _reference(qkv, causal)
    out = ops.attention(*qkv, causal=causal)[-1:, -1:, -exact.shape[2] :]
    calls = {"ours": lambda: ops.attention(*qkv, causal=causal)}
    for name, peer in at.peers().items():
        call = partial(peer, *qkv)
        if name != _FA4 or runs(name, call):
            calls[name] = call
    row = _row(case, calls, at.against, _errors((out, eager, exact)))
    yield row
    if _FA4 in calls:
        yield row.over(_FA4)


def _backward(at: _Case) -> Iterator[Row]:
    case, causal = f"attention_backward {at}", at.causal
    qkv = [t.requires_grad_() for t in at.qkv()]
    plain = [t.detach() for t in qkv]
    out, lse = ops.attention_forward(*plain, causal=causal)
    dout = torch.randn_like(out)
    peers = {}
    for name, peer in at.peers().items():
        call = _Gradients(peer, qkv, dout)
        if name != _FA4 or runs(name, call):
            peers[name] = call

    def ours() -> tuple[Tensor, ...]:
        return ops.attention_backward(dout, *plain, out, lse, causal=causal)[:3]

    group = at.nheads // (at.nheads_kv or at.nheads)
    counts = (group, 1, 1)  # take the last KV head and the query heads that share it

    def last_head(*dtypes: torch.dtype) -> tuple[Tensor, ...]:
        """All query heads of a KV head, concatenated."""
        query, key, value = (t[-1:, -n:].to(*dtypes) for t, n in zip(plain, counts, strict=True))
        leaves = [t.detach().requires_grad_() for t in (query, key, value)]
        with sdpa_kernel(SDPBackend.MATH):
            graph = F.scaled_dot_product_attention(
                leaves[0], leaves[1].expand(-1, group, -1, -1), leaves[2].expand(-1, group, -1, -1),
                is_causal=causal,
            )  # fmt: skip
        return torch.autograd.grad(graph, leaves, dout[-1:, -group:].to(*dtypes))

    checks = at.seqlen <= 8192  # the fp64 scores of longer sequences need too much memory
    errors = _NOT_JUDGED
    if checks:
        exact, eager = last_head(torch.float64), last_head(at.dtype)
        mine = [g[-1:, -n:] for g, n in zip(ours(), counts, strict=True)]
        errors = _errors(*zip(mine, eager, exact, strict=True))
    row = _row(case, {"ours": ours, **peers}, at.against, errors)
    yield row
    if _FA4 in peers:
        yield row.over(_FA4)


def _live_tiles(seqlen: int, first_keys: Callable[[int, int], int], batch: int) -> tuple[int, int]:
    """Counts live tiles of 128 query rows and 64 keys, and all tiles, of causal sequences.

    Args:
        first_keys: The first key of a tile of rows, from the sequence and the tile's first row;
            the sequence's length where the tile is padding.
    """
    rows, keys = 128, 64
    live = everything = 0
    for b in range(batch):
        for row in range(0, seqlen, rows):
            last = min(row + rows, seqlen)
            everything += -(-last // keys)
            live += max(0, -(-last // keys) - first_keys(b, row) // keys)
    return live, everything


def _padded(at: _Case) -> Row:
    """Left padding up to half of the sequence, compared with no padding."""
    qkv, case = at.qkv(), f"attention {at} padded"
    pads = torch.linspace(0, at.seqlen // 2, at.batch).int()
    leftpad, starts = pads.cuda(), pads.tolist()

    def first(b: int, row: int) -> int:
        return at.seqlen if row + 128 <= starts[b] else starts[b]

    live, everything = _live_tiles(at.seqlen, first, at.batch)
    exact, eager = _reference([t[:1] for t in qkv], True)  # the first sequence has no padding
    out = ops.attention(*qkv, leftpad, causal=True)[:1, -1:, -exact.shape[2] :]
    calls = {
        "ours": lambda: ops.attention(*qkv, leftpad, causal=True),
        "unpadded": lambda: ops.attention(*qkv, causal=True),
    }
    target = round(live / everything + _BEYOND, 3)
    return _row(case, calls, "unpadded", _errors((out, eager, exact)), target)


def _windowed(at: _Case, window: int) -> Row:
    """A window, compared with no window."""
    qkv, case = at.qkv(), f"attention {at} window {window}"
    live, everything = _live_tiles(at.seqlen, lambda b, row: max(0, row - window + 1), 1)
    part = _last_rows(qkv, 1)
    near = [part[0], *(t[:, :, -window:] for t in part[1:])]
    exact, eager = _reference(near, False)
    out = ops.attention(*qkv, causal=True, window=window)[-1:, -1:, -1:]
    calls = {
        "ours": lambda: ops.attention(*qkv, causal=True, window=window),
        "unwindowed": lambda: ops.attention(*qkv, causal=True),
    }
    target = round(live / everything + _BEYOND, 3)
    return _row(case, calls, "unwindowed", _errors((out, eager, exact)), target)


def _softmax_matmul(at: _Case) -> Row:
    """softmax(scores) @ V, compared with torch's two ops."""
    case = f"softmax_matmul ({at.batch}, {at.nheads}, {at.seqlen}, {at.dim}) bfloat16"
    scores = torch.randn(at.batch, at.nheads, at.seqlen, at.seqlen, device="cuda").to(at.dtype)
    value = at.qkv()[2]
    part = scores[-1:, -1:], value[-1:, -1:]
    exact = part[0].double().softmax(-1) @ part[1].double()
    eager = part[0].softmax(-1) @ part[1]
    calls = {
        "ours": lambda: ops.softmax_matmul(scores, value),
        "eager": lambda: scores.softmax(-1) @ value,
    }
    errors = _errors((ops.softmax_matmul(*part), eager, exact))
    return _row(case, calls, "eager", errors)


_SHORT = [_Case(8, 12, 1024, 64), _Case(64, 12, 128, 64), _Case(16, 12, 512, 64)]
_LONG = [_Case(4, 16, 4096, 64), _Case(2, 16, 8192, 64), _Case(8, 16, 2048, 128),
         _Case(4, 16, 4096, 128), _Case(1, 16, 16384, 128), _Case(2, 8, 8192, 256)]  # fmt: skip
_FULL = [c._replace(causal=False) for c in (_LONG[0], *_LONG[2:])]
_OTHER = [_Case(1, 64, 8192, 128, nheads_kv=8), _Case(4, 16, 4096, 192, dim_v=128),
          _Case(4, 16, 4096, 64, dim_v=128), _Case(4, 16, 4096, 128, dim_v=64)]  # fmt: skip
_GROUPED = [_Case(8, 32, 2048, 128, nheads_kv=8), _Case(1, 28, 2048, 128, nheads_kv=4),
            _Case(1, 32, 8192, 128, nheads_kv=1)]  # fmt: skip
_FLOAT32 = _Case(4, 16, 2048, 64, dtype=torch.float32)


def rows() -> Iterator[Row]:
    """Measures every case of the family, one per iteration."""
    for case in (*_SHORT, *_LONG, *_FULL, *_OTHER, *_GROUPED, _FLOAT32):
        yield from _forward(case)
    for case in (*_SHORT, *_LONG, *_FULL, *_OTHER[:2], *_GROUPED, _FLOAT32):
        yield from _backward(case)
    for case in (_SHORT[0], _LONG[0], _LONG[3]):
        yield _padded(case)
    yield _windowed(_Case(2, 16, 16384, 128), 1024)
    for case in (_LONG[2], _LONG[0]):
        yield _softmax_matmul(case)
    yield from attention_decode.rows()
