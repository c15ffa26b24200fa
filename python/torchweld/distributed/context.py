"""Context parallelism: the tokens of each sequence on several processes.

Of n processes, process r has the chunks r and 2n - 1 - r of 2n equal ones (head and tail), so that
all have equal work under a causal mask. Three ways to see the keys of the others:

"all_gather"  every process gathers keys and values; each chunk gets those up to its own end
"ulysses"     an all-to-all turns shards of tokens into shards of heads, and the result back
"ring"        keys and values travel around; results of parts of the keys are joined by their lse

Source: Llama Team, "The Llama 3 Herd of Models", 2024, 3.3.2 (all-gather); Jacobs et al.,
"DeepSpeed Ulysses", 2023; Liu et al., "Ring Attention", 2023, with the zig-zag order of
zhuzilin/ring-flash-attention.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh

from torchweld._library import ops

from . import _active

METHODS = ("all_gather", "ulysses", "ring")
Group = dist.ProcessGroup | DeviceMesh | None


def _group(group: Group, who: str) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise RuntimeError(
            f"{who}: torch.distributed must be initialised, but it is not; use "
            "torch.distributed.init_process_group"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"{who}: group must have one dim, but got a mesh of {group.ndim}; use one of its "
                'dims, as mesh["cp"]'
            )
        return group.get_group()
    return dist.group.WORLD if group is None else group


def _chunk_order(size: int, device: torch.device) -> Tensor:
    """Where each of the 2 * size chunks stands, when all shards follow each other."""
    first = 2 * torch.arange(size, device=device)
    return torch.cat([first, (first + 1).flip(0)])


def local_positions(group: dist.ProcessGroup, length: int, device: torch.device) -> Tensor:
    """The positions in the sequence of a process's `length` tokens."""
    rank, size, chunk = group.rank(), group.size(), length // 2
    inside = torch.arange(chunk, device=device)
    return torch.cat([inside + rank * chunk, inside + (2 * size - 1 - rank) * chunk])


def shard_sequence(t: Tensor, group: Group = None, *, dim: int = 1) -> Tensor:
    """The tokens of this process: chunks r and 2n - 1 - r of 2n, of process r of n.

    Args:
        t: a tensor with all tokens along `dim`, the same in all processes: input_ids, labels that
            are shifted already, position_ids, attention_mask.
        group: the processes; a ProcessGroup, a DeviceMesh of one dim, all by default.
        dim: the dim of the tokens.

    Returns:
        A copy with `1 / n` of the tokens.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: the tokens can't be cut into 2n equal chunks.
    """
    group = _group(group, "shard_sequence")
    chunks = 2 * group.size()
    if t.shape[dim] % chunks:
        raise ValueError(
            f"shard_sequence: the tokens must be a multiple of {chunks} (two chunks a process), "
            f"but got {t.shape[dim]}; pad the sequences"
        )
    parts = t.chunk(chunks, dim)
    return torch.cat([parts[group.rank()], parts[chunks - 1 - group.rank()]], dim)


def gather_sequence(t: Tensor, group: Group = None, *, dim: int = 1) -> Tensor:
    """The whole sequence from the shards of :func:`shard_sequence`, in every process.

    Its gradient is the sum of what the processes have for each token.

    Args:
        t: this process's shard.
        group: the processes; a ProcessGroup, a DeviceMesh of one dim, all by default.
        dim: the dim of the tokens.

    Raises:
        RuntimeError: torch.distributed is not initialised.
    """
    group = _group(group, "gather_sequence")
    return _in_order(_gathered(t.movedim(dim, 0), group).unsqueeze(1), 2).squeeze(0).movedim(0, dim)


def _gathered(t: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`(processes, ...)`."""
    gather = collectives.all_gather_tensor_autograd if t.requires_grad else _plain_gather
    return gather(t.contiguous(), 0, group).view(group.size(), *t.shape)


def _plain_gather(t: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return collectives.wait_tensor(collectives.all_gather_tensor(t, dim, group))


def _in_order(shards: Tensor, dim: int) -> Tensor:
    """`(processes, ...)` with tokens along `dim` of it: the sequences, without the first dim."""
    size = shards.shape[0]
    chunks = shards.unflatten(dim, (2, -1)).movedim(0, dim - 1)  # (..., processes, 2, chunk, ...)
    chunks = chunks.flatten(dim - 1, dim)
    return chunks.index_select(dim - 1, _chunk_order(size, shards.device)).flatten(dim - 1, dim)


def _out_of_order(t: Tensor, dim: int, size: int) -> Tensor:
    """The inverse of :func:`_in_order`."""
    place = _chunk_order(size, t.device)
    chunks = t.unflatten(dim, (2 * size, -1)).index_select(dim, place.argsort())
    return chunks.unflatten(dim, (size, 2)).flatten(dim + 1, dim + 2).movedim(dim, 0)


@dataclass
class _Mask:
    """What is asked for; tensors are this process's shards, leftpad is whole."""

    causal: bool
    scale: float | None
    leftpad: Tensor | None
    key_start: Tensor | None
    window: int | None
    softcap: float | None
    sink: Tensor | None

    def first_keys(self, positions: Tensor, seqlen: int, batch: int) -> Tensor | None:
        """int32 `(batch, rows)`: the first key of rows at positions; seqlen hides all."""
        if self.leftpad is None and self.key_start is None and self.window is None:
            return None
        start = torch.zeros(batch, len(positions), dtype=torch.int32, device=positions.device)
        if self.key_start is not None:
            start = self.key_start.clamp(0, seqlen)
        if self.window is not None:
            start = start.maximum(positions - (self.window - 1))
        if self.leftpad is not None:
            padding = positions < self.leftpad[:, None]
            start = start.maximum(self.leftpad[:, None]).masked_fill(padding, seqlen)
        return start.to(torch.int32)


def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    leftpad: Tensor | None = None,
    group: Group = None,
    *,
    method: str = "all_gather",
    causal: bool = False,
    scale: float | None = None,
    key_start: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    check: bool = True,
) -> Tensor:
    """`torchweld.attention` of sequences whose tokens are on several processes.

    The tokens are those of :func:`shard_sequence`: of n processes, process r has chunks r and
    2n - 1 - r of 2n. Every process of the group makes the call.

    Args:
        query: `(batch, nheads, seqlen / n, head_dim)`.
        key: `(batch, nheads_kv, seqlen / n, head_dim)`.
        value: `(batch, nheads_kv, seqlen / n, head_dim_v)`.
        leftpad: int32 `(batch,)`: the first positions of each whole sequence that are padding, the
            same in all processes.
        group: the processes; a ProcessGroup, a DeviceMesh of one dim, all by default. With one
            process the call is `torchweld.attention`, and a warning says so.
        method: "all_gather" gathers keys and values and serves everything; "ulysses" exchanges
            heads for tokens, where n divides nheads_kv; "ring" keeps keys and values of two
            processes at a time, and computes while they travel.
        causal: each token sees those up to itself.
        scale: as `torchweld.attention`.
        key_start: int32 `(batch, seqlen / n)`, the shard of the whole sequence's: each token's
            first visible key, counted in the whole sequence. Not with leftpad.
        window: with causal: each token sees the `window` keys up to itself.
        softcap: as `torchweld.attention`.
        sink: `(nheads,)`, the same in all processes; its gradient is this process's part.
        check: whether the processes compare their shapes first, so that all of them raise where
            one has another. On CUDA the host waits for that; False never waits.

    Returns:
        `(batch, nheads, seqlen / n, head_dim_v)`, the same tokens. The gradients to key and value
        hold what all processes have for them.

    Raises:
        RuntimeError: torch.distributed is not initialised, or the op refuses its arguments.
        TypeError: an argument is a DTensor.
        ValueError: shapes differ between processes, or do not fit; in all processes.

    Limits: self-attention without key_end. torch.compile leaves its graph for "ring".

    Source: Llama Team, "The Llama 3 Herd of Models", 2024 (all-gather); Jacobs et al., "DeepSpeed
        Ulysses", 2023; Liu et al., "Ring Attention", 2023.
    """
    group = _group(group, "context_parallel_attention")
    mask = _Mask(causal, scale, leftpad, key_start, window, softcap, sink)
    reason = _refusal(query, key, value, method, mask, group.size())
    if check and group.size() > 1:
        _compare(query, key, value, mask, reason, group)
    if reason is not None:
        raise (TypeError if "DTensor" in reason else ValueError)(
            f"context_parallel_attention: {reason}"
        )
    if group.size() == 1:
        warnings.warn(
            "torchweld: context_parallel_attention has a group of one process, so it is "
            "torchweld.attention",
            stacklevel=2,
        )
    if method == "ulysses":
        return _ulysses(query, key, value, mask, group)
    if method == "ring":
        return _ring(query, key, value, mask, group)
    return _all_gather(query, key, value, mask, group)


def _refusal(
    query: Tensor, key: Tensor, value: Tensor, method: str, mask: _Mask, size: int
) -> str | None:
    """What is wrong in this process, as the end of a sentence, or None."""
    named = {"query": query, "key": key, "value": value}
    named |= {"leftpad": mask.leftpad, "key_start": mask.key_start, "sink": mask.sink}
    for name, t in named.items():
        if type(t).__name__ == "DTensor":
            return f"{name} must be a plain Tensor, but got a DTensor; use {name}.to_local()"
        if t is not None and t.device != query.device:
            return f"{name} must be on {query.device} like query, but got {t.device}"
    if method not in METHODS:
        return f"method must be one of {', '.join(METHODS)}, but got {method!r}"
    for name in ("query", "key", "value"):
        if named[name].dim() != 4:
            return (
                f"{name} must be (batch, heads, seqlen / {size}, head_dim), but got "
                f"{tuple(named[name].shape)}"
            )
    batch, heads, length, _ = query.shape
    kv_heads = key.shape[1]
    if key.shape[2] != length or value.shape[2] != length:
        return (
            f"key and value must have the {length} tokens of query, but got {key.shape[2]} and "
            f"{value.shape[2]}"
        )
    if length % 2:
        return f"query must have an even number of tokens (two chunks), but got {length}"
    if kv_heads == 0 or heads % kv_heads or value.shape[1] != kv_heads:
        return (
            f"the heads of key must divide those of query and be those of value, but got {heads}, "
            f"{kv_heads} and {value.shape[1]}"
        )
    if method == "ulysses" and kv_heads % size:
        return (
            f'the heads of key must be a multiple of the {size} processes for method="ulysses", '
            f'but got {kv_heads}; use method="all_gather"'
        )
    for name, shape in (("leftpad", (batch,)), ("key_start", (batch, length))):
        t = named[name]
        if t is not None and (t.dtype != torch.int32 or t.shape != shape):
            dtype = str(t.dtype).removeprefix("torch.")
            return f"{name} must be int32 {shape}, but got {dtype} {tuple(t.shape)}"
    if mask.leftpad is not None and mask.key_start is not None:
        return "leftpad and key_start must not both be given"
    if mask.window is not None and (not mask.causal or mask.window < 1):
        return f"window must be at least 1 and with causal=True, but got {mask.window}"
    return None


_FACTS = ("tokens", "batch", "query heads", "key heads", "head_dim", "head_dim_v", "bytes a number")


def _compare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: _Mask,
    reason: str | None,
    group: dist.ProcessGroup,
) -> None:
    """Raises in all processes where one of them was refused or has other shapes.

    Raises:
        ValueError: it names a process and what differs.
    """
    facts = [0] * len(_FACTS)
    if reason is None:
        batch, heads, length, width = query.shape
        facts = [length, batch, heads, key.shape[1], width, value.shape[3], query.itemsize]
    mine = torch.tensor([reason is not None, *facts], dtype=torch.int64, device=query.device)
    everyone = _plain_gather(mine, 0, group).view(group.size(), -1).tolist()
    if reason is not None:
        return  # this process has a sentence of its own
    for rank, (refused, *theirs) in enumerate(everyone):
        if refused:
            raise ValueError(f"context_parallel_attention: process {rank} of the group was refused")
        for name, a, b in zip(_FACTS, facts, theirs, strict=True):
            if a != b:
                raise ValueError(
                    f"context_parallel_attention: all processes must have the same {name}, but "
                    f"got {a} in this one and {b} in process {rank} of the group"
                )


def _all_gather(
    query: Tensor, key: Tensor, value: Tensor, mask: _Mask, group: dist.ProcessGroup
) -> Tensor:
    size, rank, half = group.size(), group.rank(), query.shape[2] // 2
    key, value = (_in_order(_gathered(t, group), 3) for t in (key, value))
    more = {"scale": mask.scale, "softcap": mask.softcap, "sink": mask.sink}
    if not mask.causal:
        positions = local_positions(group, 2 * half, query.device)
        start = mask.first_keys(positions, 2 * size * half, query.shape[0])
        return ops.attention(query, key, value, None, key_start=start, **more)
    # The keys end with the chunk's last one, so causal means its own positions.
    out = []
    for chunk, part in ((rank, slice(0, half)), (2 * size - 1 - rank, slice(half, None))):
        end = (chunk + 1) * half
        start = None if mask.key_start is None else mask.key_start[:, part].contiguous()
        one = ops.attention(
            query[:, :, part],
            key[:, :, :end],
            value[:, :, :end],
            mask.leftpad,
            causal=True,
            key_start=start,
            window=mask.window,
            **more,
        )
        out.append(one)
    return torch.cat(out, 2)


def _exchanged(t: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`t[i]` goes to process i; `[j]` of the result is from process j."""
    swap = collectives.all_to_all_single_autograd if t.requires_grad else _plain_exchange
    return swap(t.contiguous(), None, None, group)


def _plain_exchange(t: Tensor, out: Any, into: Any, group: dist.ProcessGroup) -> Tensor:
    return collectives.wait_tensor(collectives.all_to_all_single(t, out, into, group))


def _ulysses(
    query: Tensor, key: Tensor, value: Tensor, mask: _Mask, group: dist.ProcessGroup
) -> Tensor:
    size, rank = group.size(), group.rank()

    def all_tokens(t: Tensor) -> Tensor:  # (batch, heads, seqlen / n, ...): of some heads
        return _in_order(_exchanged(t.unflatten(1, (size, -1)).movedim(1, 0), group), 3)

    query, key, value = map(all_tokens, (query, key, value))
    leftpad, start = mask.leftpad, mask.key_start
    if start is not None:
        start = _in_order(_gathered(start, group), 2).contiguous()
    if leftpad is not None and not mask.causal:
        seqlen = query.shape[2]
        positions = torch.arange(seqlen, device=query.device)
        start = mask.first_keys(positions, seqlen, query.shape[0])
        leftpad = None
    out = ops.attention(
        query,
        key,
        value,
        leftpad,
        causal=mask.causal,
        scale=mask.scale,
        key_start=start,
        window=mask.window,
        softcap=mask.softcap,
        sink=None if mask.sink is None else mask.sink.chunk(size)[rank],
    )
    return _exchanged(_out_of_order(out, 2, size), group).movedim(0, 1).flatten(1, 2)


def _travels(t: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What the process before this one has; wait_tensor waits for it."""
    size, rank = group.size(), group.rank()
    into = [t.numel() if i == (rank + 1) % size else 0 for i in range(size)]
    out = [t.numel() if i == (rank - 1) % size else 0 for i in range(size)]
    return collectives.all_to_all_single(t.reshape(-1), out, into, group)


class _Steps:
    """The steps of a ring: which rows of query see which of the keys that are here."""

    def __init__(self, query: Tensor, mask: _Mask, group: dist.ProcessGroup) -> None:
        self.size, self.rank, self.half = group.size(), group.rank(), query.shape[2] // 2
        self.mask = mask
        positions = local_positions(group, 2 * self.half, query.device)
        self.first = mask.first_keys(positions, 2 * self.size * self.half, query.shape[0])

    def of(self, step: int) -> tuple[slice, slice, dict[str, Any]]:
        """Rows, keys, and the other arguments of attention."""
        half, size = self.half, self.size
        whole = slice(0, 2 * half)
        origin = (self.rank - step) % size
        chunks = [origin, 2 * size - 1 - origin]
        rows, keys = whole, whole
        if self.mask.causal and step > 0:
            # All chunks that are seen at all lie before the rows, and are seen whole.
            rows, keys = (
                (whole, slice(0, half)) if origin < self.rank else (slice(half, 2 * half), whole)
            )
            chunks = chunks[:1] if origin < self.rank else chunks
        start = None
        if self.first is not None:
            # The keys of both chunks follow each other: as many are hidden as lie before the first.
            hidden = [(self.first[:, rows] - c * half).clamp(0, half) for c in chunks]
            start = sum(hidden[1:], hidden[0]).contiguous()
        more = {
            "causal": self.mask.causal and step == 0,
            "scale": self.mask.scale,
            "key_start": start,
            "softcap": self.mask.softcap,
            "sink": self.mask.sink if step == 0 else None,  # once in each row's sum
        }
        return rows, keys, more


def _join(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Adds the result of more keys to that of others, in place; rows may be empty in both."""
    joined = torch.logaddexp(lse, part_lse)
    here, there = (
        (each - joined).exp().masked_fill(joined == float("-inf"), 0)[..., None]
        for each in (lse, part_lse)
    )
    out.copy_(out * here + part * there)
    lse.copy_(joined)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        mask: _Mask,
        group: dist.ProcessGroup,
    ) -> Tensor:
        steps = _Steps(query, mask, group)
        here = torch.cat([key.reshape(-1), value.reshape(-1)])
        out = lse = None
        for step in range(steps.size):
            there = _travels(here, group) if step + 1 < steps.size else here
            k, v = _parted(here, key, value)
            rows, keys, more = steps.of(step)
            part, part_lse = ops.attention_forward(
                query[:, :, rows], k[:, :, keys], v[:, :, keys], None, **more
            )
            if out is None:
                out, lse = part.to(part_lse.dtype), part_lse
            else:
                _join(out[:, :, rows], lse[:, :, rows], part, part_lse)
            here = collectives.wait_tensor(there)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.mask, ctx.group = mask, group
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        steps, group = _Steps(query, ctx.mask, ctx.group), ctx.group
        here = torch.cat([key.reshape(-1), value.reshape(-1)])
        dquery = torch.zeros_like(query, dtype=lse.dtype)
        dhere = torch.zeros_like(here, dtype=lse.dtype)
        dsink = None
        for step in range(steps.size):
            there = _travels(here, group) if step + 1 < steps.size else here
            k, v = _parted(here, key, value)
            rows, keys, more = steps.of(step)
            dq, dk, dv, ds = ops.attention_backward(
                dout[:, :, rows],
                query[:, :, rows],
                k[:, :, keys],
                v[:, :, keys],
                out[:, :, rows],
                lse[:, :, rows],
                None,
                **more,
            )
            dquery[:, :, rows] += dq
            dkey, dvalue = _parted(dhere, key, value)
            dkey[:, :, keys] += dk
            dvalue[:, :, keys] += dv
            dsink = ds if step == 0 else dsink
            # The gradients travel with their keys, and once more to get home.
            dhere = collectives.wait_tensor(_travels(dhere, group))
            here = collectives.wait_tensor(there)
        dkey, dvalue = _parted(dhere, key, value)
        dsink = None if ctx.mask.sink is None else dsink
        dtype = query.dtype
        return dquery.to(dtype), dkey.to(dtype), dvalue.to(dtype), dsink, None, None


def _parted(both: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value from one vector."""
    k, v = both.split([key.numel(), value.numel()])
    return k.view(key.shape), v.view(value.shape)


@torch.compiler.disable  # traced (torch 2.11), its gradients come out wrong without a word
def _ring(
    query: Tensor, key: Tensor, value: Tensor, mask: _Mask, group: dist.ProcessGroup
) -> Tensor:
    return _Ring.apply(query, key, value, mask.sink, mask, group)


class ContextParallel:
    """What :func:`context_parallel` tells the attention inside of it."""

    def __init__(self, group: dist.ProcessGroup, method: str, check: bool) -> None:
        self.group = group
        self.method = method
        self.check = check
        self.calls = 0
        self.leftpad: Tensor | None = None  # of the model that is running, see hf_context
        self.seen_positions: Tensor | None = None

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        self.calls += 1
        return context_parallel_attention(
            query,
            key,
            value,
            *args,
            group=self.group,
            method=self.method,
            check=self.check,
            **kwargs,
        )


@contextmanager
def context_parallel(
    group: Group = None, *, method: str = "all_gather", check: bool = True
) -> Iterator[None]:
    """Models inside the `with` block attend to the tokens of all processes.

    Followed by `torchweld.nn.CausalSelfAttention` and by transformers' models with torchweld's
    attention (`torchweld.fuse`, or `attn_implementation="torchweld"`). Everything that a model is
    given with a dim of tokens goes through :func:`shard_sequence` first, position_ids and
    attention_mask included; labels are to be shifted before. The backward pass belongs into the
    block where activations are recomputed. Parameters see the tokens of their process: sum their
    gradients over the group, as FSDP2 and DDP do.

    Args:
        group: the processes; a ProcessGroup, a DeviceMesh of one dim, all by default.
        method: as :func:`context_parallel_attention`.
        check: whether shapes are compared between the processes and position_ids are looked at. On
            CUDA the host waits for both; False never waits.

    Raises:
        RuntimeError: no attention followed, torch.distributed is not initialised, or it is inside
            of another one.
        ValueError: an unknown method; inside: what a model asks for and is not served, such as a
            cache of earlier tokens, attention dropout or packed documents, without falling back.
    """
    if method not in METHODS:
        raise ValueError(
            f"context_parallel: method must be one of {', '.join(METHODS)}, but got {method!r}"
        )
    if _active.current is not None:
        raise RuntimeError("context_parallel: it must not be inside of another context_parallel")
    _active.refuse_torchs_own("context_parallel")
    context = ContextParallel(_group(group, "context_parallel"), method, check)
    _active.current = context
    try:
        yield
    finally:
        _active.current = None
    if not context.calls:
        raise RuntimeError(
            "context_parallel: no attention followed it, so each process saw its own tokens alone; "
            'use torchweld.fuse(model) or attn_implementation="torchweld"'
        )
