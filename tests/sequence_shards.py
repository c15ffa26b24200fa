"""Attention of sequences whose tokens are on several processes; run by meshes.py."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing import assert_close

import torchweld
from meshes import DEVICE, TIGHT, TOLERANCE, WIDE, refused
from torchweld.distributed import context_parallel_attention, gather_sequence, shard_sequence
from torchweld.distributed.context import METHODS

SEQLEN = 24


def starts_of_documents() -> Tensor:
    lengths = [[5, 9, 10], [24], [1, 2, 21]]
    documents = [sum(([i] * n for i, n in enumerate(row)), []) for row in lengths]
    return torchweld.key_start_from_documents(torch.tensor(documents))


# Keyword arguments by case. The second sequence has chunks of padding only.
PADS = torch.tensor([0, 24, 7], dtype=torch.int32)
MASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": {"leftpad": PADS},
    "causal": {"causal": True, "scale": 0.7},
    "causal_padded": {"causal": True, "leftpad": PADS},
    "out_of_range": {"causal": True, "leftpad": PADS * 3 - 9},
    "window": {"causal": True, "window": 5, "leftpad": PADS},
    "documents": {"causal": True, "key_start": starts_of_documents()},
    "everything": {
        "causal": True,
        "window": 9,
        "softcap": 1.5,
        "sink": True,
        "key_start": starts_of_documents(),
    },
    "sink": {"leftpad": PADS, "sink": True},
}


def equals_one_process(method: str, name: str, dtype: torch.dtype, mesh: DeviceMesh) -> None:
    """Result and gradients equal one process, with grouped heads and another head_dim_v."""
    draw = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(3, heads, SEQLEN, width, dtype=dtype, generator=draw).to(DEVICE)
        for heads, width in ((8, 6), (4, 6), (4, 5), (8, 5))
    ]
    *whole, dout = whole
    mask = {k: t.to(DEVICE) if isinstance(t, Tensor) else t for k, t in MASKS[name].items()}
    if "sink" in mask:
        mask["sink"] = torch.randn(8, dtype=dtype, generator=draw).to(DEVICE)
    mine = [shard_sequence(t, dim=2).requires_grad_() for t in whole]
    whole = [t.requires_grad_() for t in whole]
    given = dict(mask)
    if "sink" in mask:
        whole.append(mask["sink"].requires_grad_())
        given["sink"] = mask["sink"].detach().clone().requires_grad_()
        mine.append(given["sink"])
    if "key_start" in mask:
        given["key_start"] = shard_sequence(mask["key_start"])
    want = torchweld.attention(*whole[:3], **mask)
    ours = context_parallel_attention(*mine[:3], method=method, **given)
    tolerance = TOLERANCE[dtype]
    assert_close(gather_sequence(ours.detach(), dim=2), want.detach(), **tolerance)
    wanted = torch.autograd.grad(want, whole, dout)
    got = list(torch.autograd.grad(ours, mine, shard_sequence(dout, dim=2)))
    for name, a, b in zip(("query", "key", "value"), got, wanted, strict=False):
        a = gather_sequence(a, dim=2)
        assert_close(a, b, **tolerance, msg=lambda m, n=name: f"d{n}: {m}")
    if "sink" in mask:
        dist.all_reduce(got[3])
        assert_close(got[3], wanted[3], **tolerance)


def one_sequence(method: str, mesh: DeviceMesh) -> None:
    """A batch of one, whose gradients are not contiguous, equals one process."""
    draw = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, h, SEQLEN, 6, dtype=WIDE, generator=draw) for h in (8, 4, 4)]
    whole = [t.to(DEVICE) for t in whole]
    mine = [shard_sequence(t, dim=2).requires_grad_() for t in whole]
    whole = [t.requires_grad_() for t in whole]
    for causal in (False, True):
        want = torchweld.attention(*whole, causal=causal)
        ours = context_parallel_attention(*mine, method=method, causal=causal)
        wanted = torch.autograd.grad(want.square().sum(), whole)
        got = torch.autograd.grad(ours.square().sum(), mine)
        assert_close([gather_sequence(a, dim=2) for a in got], wanted, **TIGHT)


def shards(mesh: DeviceMesh) -> None:
    """shard_sequence selects head and tail chunks; gather_sequence inverts it, with gradients."""
    rank, size = dist.get_rank(), dist.get_world_size()
    t = torch.arange(2.0 * 4 * size, device=DEVICE).view(2, 4 * size)
    part = shard_sequence(t)
    ours = [2 * rank, 2 * rank + 1, 2 * (2 * size - 1 - rank), 2 * (2 * size - 1 - rank) + 1]
    assert part[0].tolist() == ours
    for dim in (0, 1, 2):
        wide = t.t()[:, None].movedim(0, dim)
        assert torch.equal(gather_sequence(shard_sequence(wide, dim=dim), dim=dim), wide)
    part.requires_grad_()
    (gather_sequence(part) * t * (rank + 1)).sum().backward()
    assert torch.equal(part.grad, part.detach() * size * (size + 1) / 2)
    with refused(ValueError, f"the tokens must be a multiple of {2 * size} (two chunks a process)"):
        shard_sequence(t[:, 1:])


def refusals(mesh: DeviceMesh) -> None:
    """All processes raise, whichever has the wrong argument."""
    rank, size = dist.get_rank(), dist.get_world_size()
    q, kv = torch.randn(2, 4, 6, 8, device=DEVICE), torch.randn(2, 1, 6, 8, device=DEVICE)
    pads = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    sharded = DTensor.from_local(q, mesh, [Replicate()] * mesh.ndim)
    for args, more, error, sentence in (
        (
            (q, q, q),
            {"method": "star"},
            ValueError,
            "method must be one of all_gather, ulysses, ring",
        ),
        (
            (q, kv, kv),
            {"method": "ulysses"},
            ValueError,
            f"must be a multiple of the {size} processes",
        ),
        ((sharded, q, q), {}, TypeError, "query must be a plain Tensor, but got a DTensor"),
        ((q, q, q, pads.long()), {}, ValueError, "leftpad must be int32 (2,), but got int64 (2,)"),
        ((q, q, q, pads[:1]), {}, ValueError, "leftpad must be int32 (2,), but got int32 (1,)"),
        ((q, q, q), {"window": 2}, ValueError, "window must be at least 1 and with causal=True"),
        ((q[:, :, :5],) * 3, {}, ValueError, "must have an even number of tokens (two chunks)"),
        ((q, q[:, :, :4], q), {}, ValueError, "key and value must have the 6 tokens of query"),
        ((q, q[:, :3], q[:, :3]), {}, ValueError, "the heads of key must divide those of query"),
        ((q[0], q, q), {}, ValueError, f"query must be (batch, heads, seqlen / {size}, head_dim)"),
    ):
        with refused(error, sentence):
            context_parallel_attention(*args, **more)
    # One process has other shapes; the others must raise rather than wait for it.
    unequal = q if rank else q[:, :, :4]
    with refused(ValueError, "all processes must have the same tokens, but got "):
        context_parallel_attention(unequal, unequal, unequal)
    other = q if rank else q.double()
    with refused(ValueError, "all processes must have the same bytes a number, but got "):
        context_parallel_attention(other, other, other)
    wrong = pads.long() if rank == 0 else pads
    sentence = "process 0 of the group was refused" if rank else "leftpad must be int32 (2,)"
    with refused(ValueError, sentence):
        context_parallel_attention(q, q, q, wrong)
    leaf = q.clone().requires_grad_()
    for args in ((leaf, q, q), (q, leaf, q), (q, q, leaf)):
        out = context_parallel_attention(*args, method="ring")
        with refused(RuntimeError, "create_graph must be False, because a second derivative"):
            torch.autograd.grad(out.sum(), leaf, create_graph=True)
    if mesh.ndim > 1:
        with refused(ValueError, "group must have one dim, but got a mesh of 2"):
            context_parallel_attention(q, q, q, group=mesh)


def part_of_a_mesh(mesh: DeviceMesh) -> None:
    """Each group of a 2-d mesh attends within its own batch."""
    inner = mesh[mesh.mesh_dim_names[1]]
    torch.manual_seed(mesh.get_local_rank(0))
    whole = torch.randn(2, 4, 8, 6, dtype=WIDE, device=DEVICE)
    want = torchweld.attention(whole, whole, whole, causal=True)
    part = shard_sequence(whole, inner, dim=2)
    for method in METHODS:
        ours = context_parallel_attention(part, part, part, None, inner, method=method, causal=True)
        assert_close(gather_sequence(ours, inner, dim=2), want, **TIGHT)


def one_process(mesh: DeviceMesh) -> None:
    group = dist.new_subgroups(1)[0]
    q = torch.randn(2, 4, 6, 8, dtype=WIDE, device=DEVICE, requires_grad=True)
    pads = torch.tensor([0, 3], dtype=torch.int32, device=DEVICE)
    want = torchweld.attention(q, q, q, pads, causal=True)
    for method in METHODS:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours = context_parallel_attention(q, q, q, pads, group, method=method, causal=True)
        assert [str(w.message) for w in caught][:1] == [
            "torchweld: context_parallel_attention has a group of one process, so it is "
            "torchweld.attention"
        ]
        assert_close(ours, want, **TIGHT)
        grads = [torch.autograd.grad(y.sum(), q, retain_graph=True) for y in (ours, want)]
        assert_close(*grads, **TIGHT)


def compiled(mesh: DeviceMesh) -> None:
    """All methods but the ring compile with fullgraph."""
    q = torch.randn(2, 4, 12, 6, dtype=WIDE, generator=torch.Generator().manual_seed(0))
    part = shard_sequence(q.to(DEVICE), dim=2).requires_grad_()

    def attend(method: str, t: Tensor) -> Tensor:
        return context_parallel_attention(t, t, t, method=method, causal=True, check=False)

    for method in METHODS:
        whole = method != "ring"
        quick = torch.compile(partial(attend, method), fullgraph=whole, backend="aot_eager")
        ours, want = quick(part), attend(method, part)
        assert_close(ours, want, **TIGHT)
        grads = [torch.autograd.grad(y.square().sum(), part) for y in (ours, want)]
        assert_close(*grads, **TIGHT)


def cases(mesh: str) -> dict[str, Callable[[DeviceMesh], None]]:
    every = [shards, refusals, one_process]
    every += [compiled] if mesh == "2" else [part_of_a_mesh]
    found: dict[str, Callable[[DeviceMesh], None]] = {case.__name__: case for case in every}
    for method, name in product(METHODS, MASKS):
        found[f"{method}-{name}"] = partial(equals_one_process, method, name, WIDE)
    for method in METHODS:
        one = partial(equals_one_process, method, "causal_padded", torch.float32)
        found[f"{method}-float32"] = one
        found[f"{method}-one_sequence"] = partial(one_sequence, method)
    return found
