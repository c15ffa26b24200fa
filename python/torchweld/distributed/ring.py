"""Ring attention: keys and values pass from process to process; partial results are combined."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from torchweld._autograd import once_differentiable
from torchweld._library import ops

from .mask import Mask
from .sequence import local_positions


def _send_recv_kv(t: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sends t to the next process, receives the previous one's; wait_tensor awaits the result."""
    size, rank = group.size(), group.rank()
    sent = [t.numel() if i == (rank + 1) % size else 0 for i in range(size)]
    received = [t.numel() if i == (rank - 1) % size else 0 for i in range(size)]
    return collectives.all_to_all_single(t.reshape(-1), received, sent, group)


class _Steps:
    """Selects the rows of query and the keys that meet in each step of a ring."""

    def __init__(self, query: Tensor, mask: Mask, group: dist.ProcessGroup) -> None:
        self.size, self.rank, self.half = group.size(), group.rank(), query.shape[2] // 2
        self.mask = mask
        positions = local_positions(group, 2 * self.half, query.device)
        self.first = mask.first_keys(positions, 2 * self.size * self.half, query.shape[0])

    def of(self, step: int) -> tuple[slice, slice, dict[str, Any]]:
        """Returns slices of rows and of keys, and the keyword arguments of attention."""
        half, size = self.half, self.size
        whole = slice(0, 2 * half)
        origin = (self.rank - step) % size
        chunks = [origin, 2 * size - 1 - origin]
        rows, keys = whole, whole
        if self.mask.causal and step > 0:
            # Every visible chunk lies before all of the rows, so no causal mask is needed.
            rows, keys = (
                (whole, slice(0, half)) if origin < self.rank else (slice(half, 2 * half), whole)
            )
            chunks = chunks[:1] if origin < self.rank else chunks
        start = None
        if self.first is not None:
            # The keys of this step are one or two chunks, in the sequence's order. A row sees no
            # key before its first one: key_start is the number of such keys in these chunks.
            hidden = [(self.first[:, rows] - c * half).clamp(0, half) for c in chunks]
            start = sum(hidden[1:], hidden[0]).contiguous()
        more = {
            "causal": self.mask.causal and step == 0,
            "scale": self.mask.scale,
            "key_start": start,
            "softcap": self.mask.softcap,
            # only step 0 adds the sink to the row's sum, so that it counts once
            "sink": self.mask.sink if step == 0 else None,
        }
        return rows, keys, more


def _combine(out: Tensor, lse: Tensor, step_out: Tensor, step_lse: Tensor) -> None:
    """Combines partial results by lse, in place in out and lse; rows may be empty in both."""
    total = torch.logaddexp(lse, step_lse)
    here, there = (
        (each - total).exp().masked_fill(total == float("-inf"), 0)[..., None]
        for each in (lse, step_lse)
    )
    out.copy_(out * here + step_out * there)
    lse.copy_(total)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        mask: Mask,
        group: dist.ProcessGroup,
    ) -> Tensor:
        steps = _Steps(query, mask, group)
        here = torch.cat([key.reshape(-1), value.reshape(-1)])
        out = lse = None
        for step in range(steps.size):
            there = _send_recv_kv(here, group) if step + 1 < steps.size else here
            k, v = _split_kv(here, key, value)
            rows, keys, more = steps.of(step)
            step_out, step_lse = ops.attention_forward(
                query[:, :, rows], k[:, :, keys], v[:, :, keys], None, **more
            )
            if out is None:
                out, lse = step_out.to(step_lse.dtype), step_lse
            else:
                _combine(out[:, :, rows], lse[:, :, rows], step_out, step_lse)
            here = collectives.wait_tensor(there)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.mask, ctx.group = mask, group
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        steps, group = _Steps(query, ctx.mask, ctx.group), ctx.group
        here = torch.cat([key.reshape(-1), value.reshape(-1)])
        dquery = torch.zeros_like(query, dtype=lse.dtype)
        dhere = torch.zeros_like(here, dtype=lse.dtype)
        dsink = None
        for step in range(steps.size):
            there = _send_recv_kv(here, group) if step + 1 < steps.size else here
            k, v = _split_kv(here, key, value)
            rows, keys, more = steps.of(step)
            dq, dk, dv, ds, _ = ops.attention_backward(
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
            dkey, dvalue = _split_kv(dhere, key, value)
            dkey[:, :, keys] += dk
            dvalue[:, :, keys] += dv
            dsink = ds if step == 0 else dsink
            # dK and dV are sent around the ring together with their keys. The last step returns
            # them to the process that owns the keys.
            dhere = collectives.wait_tensor(_send_recv_kv(dhere, group))
            here = collectives.wait_tensor(there)
        dkey, dvalue = _split_kv(dhere, key, value)
        dsink = None if ctx.mask.sink is None else dsink
        dtype = query.dtype
        return dquery.to(dtype), dkey.to(dtype), dvalue.to(dtype), dsink, None, None


def _split_kv(both: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Returns views of key and value in their concatenation."""
    k, v = both.split([key.numel(), value.numel()])
    return k.view(key.shape), v.view(value.shape)


# torch.compile of torch 2.11 traces this function without an error, but its gradients are wrong
@torch.compiler.disable
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, group: dist.ProcessGroup
) -> Tensor:
    return _Ring.apply(query, key, value, mask.sink, mask, group)
