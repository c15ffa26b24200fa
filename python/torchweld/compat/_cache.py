"""The cache of `flash_attn_with_kvcache`: its checks, the new tokens and their rotary embedding."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchweld.ops.rotary import rotary


class Cache(NamedTuple):
    """Holds keys and values `(sequences, seqlen_cache, nheads_kv, head_dim)` of a batch or more.

    lengths is an integer tensor `(batch,)`, or None if all slots hold tokens. rows is `(batch,)`:
    the sequence of the cache that belongs to each sequence of the batch; None for the same order.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor | None
    rows: Tensor | None

    @classmethod
    def of(
        cls,
        name: str,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cache_seqlens: int | Tensor | None,
        cache_batch_idx: Tensor | None,
    ) -> Cache:
        """Makes the cache of a call.

        Raises:
            ValueError: lengths or rows are no integers `(batch,)`, or without rows the cache has
                another batch.
        """
        batch = q.shape[0]
        lengths = cache_seqlens
        if isinstance(lengths, int):
            lengths = torch.full((batch,), lengths, dtype=torch.int32, device=q.device)
        for argument, t in (("cache_seqlens", lengths), ("cache_batch_idx", cache_batch_idx)):
            if t is not None and (t.shape != (batch,) or t.dtype not in (torch.int32, torch.int64)):
                raise ValueError(
                    f"{name}: {argument} must be int32 ({batch},), but got "
                    f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}"
                )
        if cache_batch_idx is None and k_cache.shape[0] != batch:
            raise ValueError(
                f"{name}: k_cache must be ({batch}, seqlen_cache, nheads_kv, head_dim) like q, but "
                f"got {tuple(k_cache.shape)}; say by cache_batch_idx which sequences are meant"
            )
        return cls(k_cache, v_cache, lengths, cache_batch_idx)

    def positions(self, count: int) -> Tensor:
        """Returns the `count` slots behind each sequence's tokens, `(batch, count)`."""
        return self.lengths[:, None] + torch.arange(count, device=self.lengths.device)

    def append(self, k: Tensor, v: Tensor) -> Cache:
        """Writes new tokens `(batch, seqlen_new, nheads_kv, head_dim)` into the cache, in place."""
        places = self.positions(k.shape[1])
        rows = self.rows
        if rows is None:
            rows = torch.arange(places.shape[0], device=places.device)
        # index_put_ would count a negative index from the end; make it out of bounds, an error
        rows, places = (
            t.masked_fill(t < 0, size)
            for t, size in zip((rows, places), self.k.shape, strict=False)
        )
        for cache, tokens in ((self.k, k), (self.v, v)):
            cache.index_put_((rows[:, None], places), tokens)
        return self._replace(lengths=self.lengths + k.shape[1])

    def of_batch(self) -> tuple[Tensor, Tensor]:
        """Returns keys and values of the batch; copies if there are rows."""
        if self.rows is None:
            return self.k, self.v
        return self.k.index_select(0, self.rows), self.v.index_select(0, self.rows)


def check_new(
    name: str, cache: Cache, cache_seqlens: int | Tensor | None, q: Tensor, k: Tensor, v: Tensor
) -> None:
    """Checks that new tokens fit the cache.

    Raises:
        ValueError: another shape or dtype than the cache, no cache_seqlens, or, as far as the host
            knows, too few free slots.
    """
    if cache.lengths is None:
        raise ValueError(f"{name}: cache_seqlens must be given with k and v; it says where")
    for argument, t, whole in (("k", k, cache.k), ("v", v, cache.v)):
        heads, dim = whole.shape[2:]
        good = t.dim() == 4 and (t.shape[0], *t.shape[2:]) == (q.shape[0], heads, dim)
        if not good or t.shape[1] != k.shape[1] or t.dtype != whole.dtype:
            raise ValueError(
                f"{name}: {argument} must be {str(whole.dtype).removeprefix('torch.')} "
                f"({q.shape[0]}, seqlen_new, {heads}, {dim}) like {argument}_cache, but got "
                f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}"
            )
    size, new = cache.k.shape[1], k.shape[1]
    for length in _known(cache_seqlens):
        if not 0 <= length <= size - new:
            raise ValueError(
                f"{name}: cache_seqlens must be from 0 to {size - new}, for {new} new tokens in "
                f"{size} places, but got {length}; use a larger cache"
            )
    sequences = cache.k.shape[0]
    for row in _known(cache.rows):
        if not 0 <= row < sequences:
            raise ValueError(
                f"{name}: cache_batch_idx must be from 0 to {sequences - 1}, a sequence of "
                f"k_cache, but got {row}"
            )


def _known(lengths: int | Tensor | None) -> list[int]:
    """Lists the lengths that the host knows without waiting."""
    if not isinstance(lengths, Tensor):
        return [] if lengths is None else [lengths]
    if lengths.device.type != "cpu" or torch.compiler.is_compiling():
        return []
    return lengths.tolist()


def rotated(
    cache: Cache, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, moves: bool, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Applies rotary embedding to q and k `(batch, seqlen, heads, head_dim)`.

    Args:
        cache: the cache before k is appended; k is rotated by the positions behind its tokens.
        q: the queries.
        k: the new keys.
        cos, sin: `(positions, rotary_dim / 2)`.
        moves: True: q is rotated by the positions of k. False: all queries of a sequence are
            rotated by the first of these positions.
        interleaved: whether a pair is two neighbours, and not values half of rotary_dim apart.
    """

    def tables(positions: Tensor) -> list[Tensor]:
        rows = [table[positions] for table in (cos, sin)]
        if interleaved:
            return [t.repeat_interleave(2, -1) for t in rows]
        return [torch.cat([t, t], -1) for t in rows]

    count = q.shape[1] if moves else 1
    positions = cache.positions(count).expand(-1, q.shape[1])
    heads_first = [t.transpose(1, 2) for t in (q, k)]
    outs = [
        rotary(t, t[:, :0], *tables(each), interleaved=interleaved)[0].transpose(1, 2)
        for t, each in zip(heads_first, (positions, cache.positions(k.shape[1])), strict=True)
    ]
    return outs[0], outs[1]
