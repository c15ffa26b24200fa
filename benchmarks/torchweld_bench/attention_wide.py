"""attention with head dims above 256 on a GPU, forward, backward and decoding: against SDPA's
memory-efficient back end, the only one of torch's with kernels for such heads.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchweld_bench.attention import Case, backward_rows, forward_rows
from torchweld_bench.attention_decode import decode_rows
from torchweld_bench.common import read_rate
from torchweld_bench.results import Row

_CASES = [Case(2, 8, 4096, 512), Case(2, 8, 4096, 512, causal=False), Case(8, 8, 1024, 512),
          Case(1, 4, 16384, 512), Case(2, 8, 4096, 320)]  # fmt: skip
# batch, nheads, nheads_kv, seqlen_k, head_dim
_CACHES = [(1, 8, 8, 4096, 512), (4, 8, 8, 8192, 512)]


def rows() -> Iterator[Row]:
    """Measures every case of the family, one per iteration."""
    for case in _CASES:
        yield from forward_rows(case)
    for case in _CASES:
        yield from backward_rows(case)
    rate = read_rate()
    for cache in _CACHES:
        yield from decode_rows(cache, 1, rate)
