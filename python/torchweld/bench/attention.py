"""attention on a GPU, forward and backward, against the back ends of torch's SDPA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchweld._library import ops
from torchweld.bench import attention_decode
from torchweld.bench.common import dtype_text, largest_error
from torchweld.bench.results import Row, make_row
from torchweld.bench.timer import interleaved

_ROUNDS = 11
_BACK_ENDS = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def _back_ends(dtype: torch.dtype) -> dict[str, SDPBackend]:
    """Those that take the dtype; only one of them takes float32."""
    names = ["sdpa efficient"] if dtype == torch.float32 else list(_BACK_ENDS)
    return {name: _BACK_ENDS[name] for name in names}


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def _qkv(batch: int, heads: int, seqlen: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(batch, heads, seqlen, dim, device="cuda").to(dtype) for _ in range(3)]


def _reference(qkv: list[Tensor], causal: bool) -> tuple[Tensor, float]:
    """The last head in fp64, and the error of torch's own math there."""
    part = [t[-1:, -1:] for t in qkv]
    exact = _sdpa(SDPBackend.MATH, *(t.double() for t in part), causal)
    return exact, largest_error(_sdpa(SDPBackend.MATH, *part, causal), exact)


class _Case(NamedTuple):
    shape: tuple[int, int, int, int]  # batch, nheads, seqlen, head_dim
    dtype: torch.dtype
    causal: bool
    against: str


def _row(
    case: str,
    calls: dict[str, Callable[[], object]],
    against: str,
    target: float | None,
    error: float,
    eager_error: float,
) -> Row:
    return make_row(
        case,
        interleaved(calls, device="cuda", rounds=_ROUNDS),
        against=against,
        target=target,
        error=error,
        eager_error=eager_error,
        allowed_error=3 * eager_error,
    )


def _forward(at: _Case, targets: dict[str, float]) -> Row:
    shape, dtype, causal, against = at
    qkv = _qkv(*shape, dtype)
    case = f"attention {shape} {dtype_text(dtype)}" + (" causal" if causal else "")
    peers: dict[str, Callable[[], object]] = {
        name: lambda backend=backend: _sdpa(backend, *qkv, causal)
        for name, backend in _back_ends(dtype).items()
    }
    exact, eager_error = _reference(qkv, causal)
    error = largest_error(ops.attention(*qkv, causal=causal)[-1:, -1:], exact)
    calls = {"ours": lambda: ops.attention(*qkv, causal=causal), **peers}
    return _row(case, calls, against, targets.get(case), error, eager_error)


def _backward(at: _Case, targets: dict[str, float]) -> Row:
    shape, dtype, causal, against = at
    qkv = [t.requires_grad_() for t in _qkv(*shape, dtype)]
    case = f"attention_backward {shape} {dtype_text(dtype)}" + (" causal" if causal else "")
    plain = [t.detach() for t in qkv]
    out, lse = ops.attention_forward(*plain, causal=causal)
    dout = torch.randn_like(out)
    peers = {}
    for name, backend in _back_ends(dtype).items():
        graph = _sdpa(backend, *qkv, causal)
        peers[name] = lambda graph=graph: torch.autograd.grad(graph, qkv, dout, retain_graph=True)

    def ours() -> tuple[Tensor, ...]:
        return ops.attention_backward(dout, *plain, out, lse, causal=causal)

    def last_head(*dtypes: torch.dtype) -> tuple[Tensor, ...]:
        part = [t[-1:, -1:].to(*dtypes).detach().requires_grad_() for t in plain]
        graph = _sdpa(SDPBackend.MATH, *part, causal)
        return torch.autograd.grad(graph, part, dout[-1:, -1:].to(*dtypes))

    exact, eager = last_head(torch.float64), last_head(dtype)
    eager_error = max(largest_error(e, x) for e, x in zip(eager, exact, strict=True))
    error = max(largest_error(g[-1:, -1:], x) for g, x in zip(ours()[:3], exact, strict=True))
    return _row(case, {"ours": ours, **peers}, against, targets.get(case), error, eager_error)


def _padded(shape: tuple[int, int, int, int], targets: dict[str, float]) -> Row:
    """Left padding up to half of the sequence, against no padding. The target is made of the live
    tiles of 128 query rows and 64 keys.
    """
    batch, _, seqlen, _ = shape
    qkv = _qkv(*shape, torch.bfloat16)
    pads = torch.linspace(0, seqlen // 2, batch).int()
    leftpad = pads.cuda()
    case = f"attention {shape} bfloat16 causal padded"
    rows, keys = 128, 64
    live = everything = 0
    for pad in pads.tolist():
        for row in range(0, seqlen, rows):
            last = min(row + rows, seqlen)
            everything += -(-last // keys)
            if last > pad:
                live += -(-last // keys) - pad // keys
    reference, eager_error = _reference([t[:1] for t in qkv], True)  # the first has no padding
    error = largest_error(ops.attention(*qkv, leftpad, causal=True)[:1, -1:], reference)
    calls = {
        "ours": lambda: ops.attention(*qkv, leftpad, causal=True),
        "unpadded": lambda: ops.attention(*qkv, causal=True),
    }
    target = round(live / everything + targets.get("padding beyond live tiles", 0.1), 3)
    return _row(case, calls, "unpadded", target, error, eager_error)


def rows(targets: dict[str, float]) -> Iterator[Row]:
    """Every case of the family, measured when it is asked for."""
    flash, efficient = "sdpa flash", "sdpa efficient"
    shapes = [(8, 12, 1024, 64), (4, 16, 4096, 64), (4, 16, 4096, 128), (2, 8, 8192, 256)]
    for run in (_forward, _backward):
        for shape in shapes:
            yield run(_Case(shape, torch.bfloat16, True, flash), targets)
        yield run(_Case((4, 16, 4096, 128), torch.bfloat16, False, flash), targets)
        yield run(_Case((4, 16, 2048, 64), torch.float32, True, efficient), targets)
    for shape in shapes[:3]:
        yield _padded(shape, targets)
    yield from attention_decode.rows(targets)
