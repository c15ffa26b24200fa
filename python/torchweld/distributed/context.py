"""Context parallelism: the tokens of each sequence on several processes.

Of n processes, process r has the chunks r and 2n - 1 - r of 2n equal ones (head and tail), so that
all have equal work under a causal mask. Three ways to see the keys of the others:

"all_gather"  every process gathers keys and values; each chunk gets those up to its own end
"ulysses"     an all-to-all exchanges shards of tokens for shards of heads, and back for the result
"ring"        each process sends its keys and values on; partial results are combined by their lse

Source: Llama Team, "The Llama 3 Herd of Models", 2024, 3.3.2 (all-gather); Jacobs et al.,
"DeepSpeed Ulysses", 2023; Liu et al., "Ring Attention", 2023, with the zig-zag order of
zhuzilin/ring-flash-attention.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from torchweld._library import ops

from . import _active
from .mask import Mask
from .ring import ring_attention
from .sequence import (
    Group,
    gathered,
    group_of,
    in_order,
    local_positions,
    out_of_order,
    plain_gather,
)

METHODS = ("all_gather", "ulysses", "ring")


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
    """Computes `torchweld.attention` of sequences whose tokens are on several processes.

    The tokens are those of :func:`shard_sequence`: of n processes, process r has chunks r and
    2n - 1 - r of 2n. Every process of the group makes the call.

    Args:
        query: `(batch, nheads, seqlen / n, head_dim)`.
        key: `(batch, nheads_kv, seqlen / n, head_dim)`.
        value: `(batch, nheads_kv, seqlen / n, head_dim_v)`.
        leftpad: int32 `(batch,)`: the number of padding positions at the start of each whole
            sequence, the same in all processes.
        group: a ProcessGroup, a DeviceMesh of one dim, or None for all processes. With one process
            the call is `torchweld.attention`, and a warning says so.
        method: "all_gather" gathers keys and values, and has no restrictions; "ulysses" exchanges
            heads for tokens, and n must divide nheads_kv; "ring" keeps keys and values of two
            processes at a time, and computes while the next ones are sent.
        causal: whether each token sees only tokens up to itself.
        scale: as in `torchweld.attention`.
        key_start: int32 `(batch, seqlen / n)`, this process's shard: each token's first visible
            key, counted in the whole sequence. Not with leftpad.
        window: only with causal: each token sees the `window` keys that end at itself.
        softcap: as in `torchweld.attention`.
        sink: `(nheads,)`, the same in all processes; its gradient is this process's term alone.
        check: whether the processes compare their shapes first, so that all of them raise if
            one differs. On CUDA the host waits for that; with False it never waits.

    Returns:
        `(batch, nheads, seqlen / n, head_dim_v)`, the same tokens. The gradients of key and value
        are sums over all processes.

    Raises:
        RuntimeError: torch.distributed is not initialised, or the op refuses its arguments.
        TypeError: an argument is a DTensor; with check, the other processes raise ValueError.
        ValueError: shapes that do not fit or, with check, differ between processes (then in all
            processes); another method; a window without causal; a mesh of more dims.

    Limits: self-attention without key_end. torch.compile breaks its graph at "ring".

    Source: Llama Team, "The Llama 3 Herd of Models", 2024 (all-gather); Jacobs et al., "DeepSpeed
        Ulysses", 2023; Liu et al., "Ring Attention", 2023.

    Example::

        q, k, v = (torch.randn(2, 4, 16, 32) for _ in range(3))  # this process's tokens
        out = torchweld.distributed.context_parallel_attention(q, k, v, causal=True)
    """
    group = group_of(group, "context_parallel_attention")
    mask = Mask(causal, scale, leftpad, key_start, window, softcap, sink)
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
        return ring_attention(query, key, value, mask, group)
    return _all_gather(query, key, value, mask, group)


def _refusal(
    query: Tensor, key: Tensor, value: Tensor, method: str, mask: Mask, size: int
) -> str | None:
    """Returns why this process refuses the call, as the end of a sentence, or None."""
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
    mask: Mask,
    reason: str | None,
    group: dist.ProcessGroup,
) -> None:
    """Raises in all processes if one of them refuses the call or has other shapes.

    Raises:
        ValueError: names a process and the difference.
    """
    facts = [0] * len(_FACTS)
    if reason is None:
        batch, heads, length, width = query.shape
        facts = [length, batch, heads, key.shape[1], width, value.shape[3], query.itemsize]
    mine = torch.tensor([reason is not None, *facts], dtype=torch.int64, device=query.device)
    everyone = plain_gather(mine, 0, group).view(group.size(), -1).tolist()
    if reason is not None:
        return  # the caller raises an error with the reason of this process
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
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, group: dist.ProcessGroup
) -> Tensor:
    size, rank, half = group.size(), group.rank(), query.shape[2] // 2
    key, value = (in_order(gathered(t, group), 3) for t in (key, value))
    more = {"scale": mask.scale, "softcap": mask.softcap, "sink": mask.sink}
    if not mask.causal:
        positions = local_positions(group, 2 * half, query.device)
        start = mask.first_keys(positions, 2 * size * half, query.shape[0])
        return ops.attention(query, key, value, None, key_start=start, **more)
    # The keys passed to the op end at the last token of the chunk. Therefore the bottom-right
    # aligned causal mask is right for the rows of the chunk.
    out = []
    for chunk, rows in ((rank, slice(0, half)), (2 * size - 1 - rank, slice(half, None))):
        end = (chunk + 1) * half
        start = None if mask.key_start is None else mask.key_start[:, rows].contiguous()
        one = ops.attention(
            query[:, :, rows],
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


def _all_to_all(t: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-to-all: `t[i]` goes to process i; `[j]` of the result comes from process j."""
    swap = collectives.all_to_all_single_autograd if t.requires_grad else _plain_all_to_all
    return swap(t.contiguous(), None, None, group)


def _plain_all_to_all(t: Tensor, out: Any, into: Any, group: dist.ProcessGroup) -> Tensor:
    return collectives.wait_tensor(collectives.all_to_all_single(t, out, into, group))


def _ulysses(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, group: dist.ProcessGroup
) -> Tensor:
    size, rank = group.size(), group.rank()

    def all_tokens(t: Tensor) -> Tensor:
        # (batch, heads, seqlen / n, ...) to (batch, heads / n, seqlen, ...)
        return in_order(_all_to_all(t.unflatten(1, (size, -1)).movedim(1, 0), group), 3)

    query, key, value = map(all_tokens, (query, key, value))
    leftpad, start = mask.leftpad, mask.key_start
    if start is not None:
        start = in_order(gathered(start, group), 2).contiguous()
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
    return _all_to_all(out_of_order(out, 2, size), group).movedim(0, 1).flatten(1, 2)


class ContextParallel:
    """Settings, state and attention of the active :func:`context_parallel` block."""

    def __init__(self, group: dist.ProcessGroup, method: str, check: bool) -> None:
        self.group = group
        self.method = method
        self.check = check
        self.calls = 0
        # leftpad of the model that is running; integrations.attention.context_parallel sets it
        self.leftpad: Tensor | None = None
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
    """Lets models inside the `with` block attend to the tokens of all processes.

    It applies to `torchweld.nn.CausalSelfAttention` and to transformers' models with torchweld's
    attention (`torchweld.fuse`, or `attn_implementation="torchweld"`). Pass every input that has a
    dim of tokens through :func:`shard_sequence` first, position_ids and attention_mask included;
    shift labels before that. With activation checkpointing, run the backward pass inside the block.
    The gradients of parameters come from the tokens of one process: sum them over the group. DDP
    and FSDP2 divide that sum by the number of processes.

    Args:
        group: a ProcessGroup, a DeviceMesh of one dim, or None for all processes.
        method: as in :func:`context_parallel_attention`.
        check: whether shapes are compared between the processes and position_ids are checked. On
            CUDA the host waits for both; with False it never waits.

    Raises:
        RuntimeError: no such attention ran in the block, torch.distributed is not initialised, or
            the block is inside of another one or of torch's own `context_parallel`.
        ValueError: an unknown method or a mesh of more dims; inside: a model needs an unsupported
            feature, such as a cache of earlier tokens, attention dropout or packed documents.

    Example::

        attention = torchweld.nn.CausalSelfAttention(64, num_heads=4)
        x = torch.randn(2, 16, 64)
        with torchweld.distributed.context_parallel():
            out = attention(torchweld.distributed.shard_sequence(x))
    """
    if method not in METHODS:
        raise ValueError(
            f"context_parallel: method must be one of {', '.join(METHODS)}, but got {method!r}"
        )
    if _active.current is not None:
        raise RuntimeError("context_parallel: it must not be inside of another context_parallel")
    _active.refuse_torchs_own("context_parallel")
    context = ContextParallel(group_of(group, "context_parallel"), method, check)
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
