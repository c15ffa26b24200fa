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
from torchweld_bench import attention_decode
from torchweld_bench.attention_masks import live_share
from torchweld_bench.cases import Call, Errors, checked, drawn, judged, leaves, measured
from torchweld_bench.common import dtype_text, installed, runs, sdpa
from torchweld_bench.results import Row

_ROUNDS = 11
EAGER_ERRORS = 2  # the README states the limit: twice the error of torch's ops and two roundings
_NOT_JUDGED = {"error": 0.0, "eager_error": 0.0, "allowed_error": 0.0}
# A masked call's target, as a fraction of the plain call's time: its share of live tiles plus this.
_BEYOND = 0.05
_FA4 = "FlashAttention 4"
_BACK_ENDS = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
}


# A function of query, key and value (batch, nheads, seqlen, head_dim).
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


class Case(NamedTuple):
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
        efficient = self.dtype == torch.float32 or self.dim > 256
        return "sdpa efficient" if efficient else "sdpa cudnn"

    def qkv(self) -> list[Tensor]:
        kv = self.nheads_kv or self.nheads
        sizes = ((self.nheads, self.dim), (kv, self.dim), (kv, self.dim_v or self.dim))
        return [
            drawn(self.batch, heads, self.seqlen, dim, dtype=self.dtype) for heads, dim in sizes
        ]

    def back_ends(self) -> dict[str, SDPBackend]:
        """Lists backends that support the case: not all take float32, unequal or grouped heads."""
        names = list(_BACK_ENDS)
        if self.dtype == torch.float32 or self.dim_v or self.dim > 256:
            names = [self.against]
        elif self.nheads_kv:
            names.remove("sdpa efficient")
        return {name: _BACK_ENDS[name] for name in names}

    def peers(self) -> dict[str, Function]:
        """Lists the calls of the peers that support the case."""
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
    """Calls the backward of a peer; the first call runs its forward too."""

    def __init__(self, peer: Function, qkv: list[Tensor], dout: Tensor) -> None:
        self.peer, self.qkv, self.dout = peer, qkv, dout
        self.out: Tensor | None = None

    def __call__(self) -> tuple[Tensor, ...]:
        if self.out is None:
            self.out = self.peer(*self.qkv)
        return torch.autograd.grad(self.out, self.qkv, self.dout, retain_graph=True)


def _flash_attention(function: Callable[..., Any], qkv: Sequence[Tensor], causal: bool) -> Tensor:
    """Calls flash_attn_func, whose tensors are (batch, seqlen, nheads, head_dim)."""
    found = function(*(t.transpose(1, 2) for t in qkv), causal=causal)
    return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)


def _last_rows(qkv: list[Tensor], rows: int = 128) -> list[Tensor]:
    """Selects the last head and its last queries, which see every key."""
    query, key, value = (t[-1:, -1:] for t in qkv)
    return [query[:, :, -rows:], key, value]


def _exact(qkv: list[Tensor], causal: bool) -> Tensor:
    """Computes a causal case whose queries are at the end of the keys."""
    query, key, value = qkv
    rows, keys = query.shape[2], key.shape[2]
    seen = torch.ones(rows, keys, dtype=torch.bool, device=query.device)
    if causal:
        seen = seen.tril(keys - rows)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen)


def reference(qkv: list[Tensor], causal: bool) -> tuple[Tensor, Tensor]:
    """Computes the last rows in fp64, and in eager torch."""
    part = _last_rows(qkv)
    return _exact([t.double() for t in part], causal), _exact(part, causal)


def _working(peers: dict[str, Call]) -> dict[str, Call]:
    return {name: f for name, f in peers.items() if name != _FA4 or runs(name, f)}


def forward_rows(at: Case) -> Iterator[Row]:
    qkv, causal = at.qkv(), at.causal
    exact, eager = reference(qkv, causal)
    out = ops.attention(*qkv, causal=causal)[-1:, -1:, -exact.shape[2] :]
    calls: dict[str, Call] = {"ours": lambda: ops.attention(*qkv, causal=causal)}
    calls |= _working({name: partial(peer, *qkv) for name, peer in at.peers().items()})
    errors = judged(out, eager, exact, EAGER_ERRORS)
    return measured(f"attention {at}", calls, errors, at.against, [_FA4], _ROUNDS)


def backward_rows(at: Case) -> Iterator[Row]:
    qkv, causal = leaves(*at.qkv()), at.causal
    plain = [t.detach() for t in qkv]
    out, lse = ops.attention_forward(*plain, causal=causal)
    dout = torch.randn_like(out)
    peers = _working({name: _Gradients(peer, qkv, dout) for name, peer in at.peers().items()})

    def ours() -> tuple[Tensor, ...]:
        return ops.attention_backward(dout, *plain, out, lse, causal=causal)[:3]

    group = at.nheads // (at.nheads_kv or at.nheads)
    counts = (group, 1, 1)  # take the last KV head and the query heads that share it

    def last_head(*dtypes: torch.dtype) -> tuple[Tensor, ...]:
        """Concatenates all query heads of a KV head."""
        query, key, value = (t[-1:, -n:].to(*dtypes) for t, n in zip(plain, counts, strict=True))
        q, k, v = given = leaves(query, key, value)
        with sdpa_kernel(SDPBackend.MATH):
            graph = F.scaled_dot_product_attention(
                q, k.expand(-1, group, -1, -1), v.expand(-1, group, -1, -1), is_causal=causal
            )
        return torch.autograd.grad(graph, given, dout[-1:, -group:].to(*dtypes))

    errors = _NOT_JUDGED
    if at.seqlen <= 8192:  # the fp64 scores of longer sequences need too much memory
        mine = [g[-1:, -n:] for g, n in zip(ours(), counts, strict=True)]
        errors = judged(mine, last_head(at.dtype), last_head(torch.float64), EAGER_ERRORS)
    calls = {"ours": ours, **peers}
    return measured(f"attention_backward {at}", calls, errors, at.against, [_FA4], _ROUNDS)


def _masked(
    case: str, qkv: list[Tensor], plain: str, share: float, errors: Errors, **mask: Any
) -> Iterator[Row]:
    """A masked call, which has a share of live tiles, compared with the plain one."""
    calls: dict[str, Call] = {
        "ours": partial(ops.attention, *qkv, causal=True, **mask),
        plain: partial(ops.attention, *qkv, causal=True),
    }
    target = round(share + _BEYOND, 3)
    return measured(case, calls, errors, plain, rounds=_ROUNDS, target=target)


def _padded(at: Case) -> Iterator[Row]:
    """Left padding up to half of the sequence."""
    qkv, n = at.qkv(), at.seqlen
    pads = torch.linspace(0, n // 2, at.batch).int()
    share = live_share([[n] * start + [start] * (n - start) for start in pads.tolist()])
    exact, eager = reference([t[:1] for t in qkv], True)  # the first sequence has no padding
    out = ops.attention(*qkv, pads.cuda(), causal=True)[:1, -1:, -exact.shape[2] :]
    errors = judged(out, eager, exact, EAGER_ERRORS)
    return _masked(f"attention {at} padded", qkv, "unpadded", share, errors, leftpad=pads.cuda())


def _windowed(at: Case, window: int) -> Iterator[Row]:
    qkv = at.qkv()
    share = live_share([[max(0, row - window + 1) for row in range(at.seqlen)]])
    part = _last_rows(qkv, 1)
    exact, eager = reference([part[0], *(t[:, :, -window:] for t in part[1:])], False)
    out = ops.attention(*qkv, causal=True, window=window)[-1:, -1:, -1:]
    errors = judged(out, eager, exact, EAGER_ERRORS)
    case = f"attention {at} window {window}"
    return _masked(case, qkv, "unwindowed", share, errors, window=window)


def _softmax_matmul(at: Case) -> Iterator[Row]:
    """softmax(scores) @ V, compared with torch's two ops."""

    def eager(scores: Tensor, value: Tensor) -> Tensor:
        return scores.softmax(-1) @ value

    scores, value = drawn(at.batch, at.nheads, at.seqlen, at.seqlen, dtype=at.dtype), at.qkv()[2]
    part = scores[-1:, -1:], value[-1:, -1:]
    errors = checked(ops.softmax_matmul(*part), eager, part, EAGER_ERRORS)
    calls = {
        "ours": lambda: ops.softmax_matmul(scores, value),
        "eager": lambda: eager(scores, value),
    }
    case = f"softmax_matmul ({at.batch}, {at.nheads}, {at.seqlen}, {at.dim}) bfloat16"
    return measured(case, calls, errors, "eager", rounds=_ROUNDS)


_SHORT = [Case(8, 12, 1024, 64), Case(64, 12, 128, 64), Case(16, 12, 512, 64)]
_LONG = [Case(4, 16, 4096, 64), Case(2, 16, 8192, 64), Case(8, 16, 2048, 128),
         Case(4, 16, 4096, 128), Case(1, 16, 16384, 128), Case(2, 8, 8192, 256)]  # fmt: skip
_FULL = [c._replace(causal=False) for c in (_LONG[0], *_LONG[2:])]
_OTHER = [Case(1, 64, 8192, 128, nheads_kv=8), Case(4, 16, 4096, 192, dim_v=128),
          Case(4, 16, 4096, 64, dim_v=128), Case(4, 16, 4096, 128, dim_v=64)]  # fmt: skip
_GROUPED = [Case(8, 32, 2048, 128, nheads_kv=8), Case(1, 28, 2048, 128, nheads_kv=4),
            Case(1, 32, 8192, 128, nheads_kv=1)]  # fmt: skip
_FLOAT32 = Case(4, 16, 2048, 64, dtype=torch.float32)


def rows() -> Iterator[Row]:
    """Measures every case of the family, one per iteration."""
    for case in (*_SHORT, *_LONG, *_FULL, *_OTHER, *_GROUPED, _FLOAT32):
        yield from forward_rows(case)
    for case in (*_SHORT, *_LONG, *_FULL, *_OTHER[:2], *_GROUPED, _FLOAT32):
        yield from backward_rows(case)
    for case in (_SHORT[0], _LONG[0], _LONG[3]):
        yield from _padded(case)
    yield from _windowed(Case(2, 16, 16384, 128), 1024)
    for case in (_LONG[2], _LONG[0]):
        yield from _softmax_matmul(case)
    yield from attention_decode.rows()
