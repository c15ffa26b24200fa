"""Models whose tokens are on several processes, run in those of a mesh (meshes.py)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel as torchs_own
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import torchweld
from meshes import DEVICE, TIGHT, WIDE, refused
from tiny_models import VOCAB, tiny_gpt2, tiny_grouped
from torchweld.distributed import context_parallel, gather_sequence, shard_sequence
from torchweld.distributed.context import METHODS

SEQLEN = 16


def batch(padded: bool = True) -> dict[str, Tensor]:
    """Two prompts; the padding of the second is longer than a process's first chunk."""
    ids = torch.randint(1, VOCAB, (2, SEQLEN), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids, "position_ids": torch.arange(SEQLEN).expand(2, -1)}
    if padded:
        given["attention_mask"] = (torch.arange(SEQLEN) >= torch.tensor([0, 6])[:, None]).long()
        given["position_ids"] = (given["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    return {name: t.to(DEVICE) for name, t in given.items()}


def loss_of(model: nn.Module, given: dict[str, Tensor], labels: Tensor) -> Tensor:
    logits = model(**given, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def labels_of(given: dict[str, Tensor]) -> Tensor:
    """Each position's next token; -100 at padding and at the end."""
    labels = F.pad(given["input_ids"][:, 1:], (0, 1), value=-100)
    mask = given.get("attention_mask")
    return labels if mask is None else labels.masked_fill(mask == 0, -100)


def sharded(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: shard_sequence(t) for name, t in given.items()}


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": tiny_gpt2,
    "llama": tiny_grouped,
    "mistral": partial(tiny_grouped, "Mistral", sliding_window=5),
}


def trained_alike(name: str, method: str, padded: bool, mesh: DeviceMesh) -> None:
    """The loss's parts and the gradients, summed over the processes, are those of one process."""
    stock = MODELS[name]().to(DEVICE, WIDE).train()
    ours = copy.deepcopy(stock)
    torchweld.fuse(ours, check=False)
    given = batch(padded)
    labels = labels_of(given)
    want = loss_of(stock, given, labels)
    want.backward()
    with context_parallel(method=method):
        loss = loss_of(ours, sharded(given), shard_sequence(labels))
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    assert_close(total, want.detach(), **TIGHT)
    for (key, a), b in zip(ours.named_parameters(), stock.parameters(), strict=True):
        dist.all_reduce(a.grad)
        assert_close(a.grad, b.grad, **TIGHT, msg=lambda m, k=key: f"d{k}: {m}")


def module(mesh: DeviceMesh) -> None:
    """CausalSelfAttention equals one process, with and without checkpointing."""
    attend = torchweld.nn.CausalSelfAttention(16, 4, dtype=WIDE, device=DEVICE)
    for parameter in attend.parameters():
        dist.broadcast(parameter.data, 0)
    x = torch.randn(2, SEQLEN, 16, dtype=WIDE, generator=torch.Generator().manual_seed(1))
    x = x.to(DEVICE).requires_grad_()
    leftpad = torch.tensor([0, 5], dtype=torch.int32, device=DEVICE)
    want = attend(x, leftpad)
    (dx,) = torch.autograd.grad(want.square().sum(), x)
    for method in METHODS:
        part = shard_sequence(x.detach()).requires_grad_()
        with context_parallel(method=method):
            for run in (attend, partial(checkpoint, attend, use_reentrant=False)):
                ours = run(part, leftpad)
                (mine,) = torch.autograd.grad(ours.square().sum(), part)
                assert_close(gather_sequence(ours.detach()), want.detach(), **TIGHT)
                assert_close(gather_sequence(mine), dx, **TIGHT)
    more = {"dtype": WIDE, "device": DEVICE, "kernel": "softmax_matmul"}
    other = torchweld.nn.CausalSelfAttention(16, 4, **more)
    with context_parallel():
        attend(part)
        with refused(ValueError, 'kernel must be "attention" inside of context_parallel'):
            other(part)


def right_padding(mesh: DeviceMesh) -> None:
    """Padding on the right hides no key under a causal mask; the tokens equal stock's."""
    model = tiny_grouped(implementation="torchweld").to(DEVICE, WIDE)
    given = batch(padded=False)
    mask = torch.arange(SEQLEN) < torch.tensor([SEQLEN, 9])[:, None]
    given["attention_mask"] = mask.long().to(DEVICE)
    want = model(**given, use_cache=False).logits
    with context_parallel(), torch.no_grad():
        ours = gather_sequence(model(**sharded(given), use_cache=False).logits)
    mask = given["attention_mask"].bool()
    assert_close(ours[mask], want.detach()[mask], **TIGHT)


def refusals(mesh: DeviceMesh) -> None:
    """All processes raise where attention would see the tokens of one process only."""
    model = tiny_grouped(implementation="torchweld").to(DEVICE, WIDE)
    given = batch(padded=False)
    local = {**sharded(given), "use_cache": False}
    padded = sharded(batch())
    holes = torch.ones(2, SEQLEN, dtype=torch.int64, device=DEVICE)
    holes[0, 3] = 0
    dropout = tiny_grouped(implementation="torchweld", attention_dropout=0.5).to(DEVICE).train()
    documents = torch.cat([torch.arange(6), torch.arange(SEQLEN - 6)]).expand(2, -1).to(DEVICE)

    def without(values: dict[str, Any], name: str) -> dict[str, Any]:
        return {key: value for key, value in values.items() if key != name}

    start = "context_parallel must see causal attention, but "
    for runner, kwargs, reason in (
        (model, without(local, "position_ids"), "position_ids are not this process's"),
        (
            model,
            without(padded, "position_ids") | {"use_cache": False},
            "position_ids are not this",
        ),
        (model, {**local, "position_ids": shard_sequence(documents)}, "position_ids "),
        (
            model,
            {**local, "attention_mask": holes},
            "attention_mask is (2, 16), not this process's",
        ),
        (
            model,
            {**local, "attention_mask": shard_sequence(holes)},
            "attention_mask has padding be",
        ),
        (model, {**local, "output_attentions": True}, "attention weights are asked for"),
        (
            model,
            {**local, "attention_mask": torch.ones(2, 1, 8, 8, device=DEVICE).bool()},
            "the attention mask is 4-D",
        ),
        (dropout, local, "attention dropout is on"),
    ):
        with refused(ValueError, start + reason), context_parallel():
            runner(**kwargs)
    cache = model(input_ids=given["input_ids"][:, :4], use_cache=True).past_key_values
    with refused(ValueError, start + "there is a cache of earlier tokens"), context_parallel():
        model(**{**local, "past_key_values": cache})
    with refused(RuntimeError, "no attention followed it"), context_parallel():
        tiny_grouped(implementation="sdpa").to(DEVICE)(**local)
    with context_parallel():
        model(**local)
        with refused(RuntimeError, "must not be inside of another"), context_parallel():
            pass
    with refused(ValueError, "but got 'star'"), context_parallel(method="star"):
        pass
    model(**batch())  # nothing of it stays


def in_torchs_own(mesh: DeviceMesh) -> None:
    """torchweld raises inside torch's context_parallel(), which replaces SDPA only."""
    model = tiny_grouped(implementation="torchweld").to(DEVICE)
    attend = torchweld.nn.CausalSelfAttention(16, 4, device=DEVICE)
    given = batch(padded=False)
    ids, positions = given["input_ids"], given["position_ids"].clone()
    x = torch.randn(2, SEQLEN, 16, device=DEVICE)
    sentence = "does not follow torch's context_parallel()"
    with torchs_own(mesh, buffers=[ids, positions, x], buffer_seq_dims=[1, 1, 1]):
        with refused(RuntimeError, f'attn_implementation="torchweld" {sentence}'):
            model(input_ids=ids, position_ids=positions)
        with refused(RuntimeError, f"CausalSelfAttention {sentence}"):
            attend(x)
        with refused(RuntimeError, f"context_parallel {sentence}"), context_parallel():
            pass
    attend(x)
    model(input_ids=ids, position_ids=positions)


def cases(mesh: str) -> dict[str, Callable[[DeviceMesh], None]]:
    found: dict[str, Callable[[DeviceMesh], None]] = {
        case.__name__: case for case in (module, right_padding, refusals, in_torchs_own)
    }
    for name in MODELS:
        for method in METHODS:
            for padded in (False, True):
                case = partial(trained_alike, name, method, padded)
                found[f"{name}-{method}-{'padded' if padded else 'whole'}"] = case
    return found
