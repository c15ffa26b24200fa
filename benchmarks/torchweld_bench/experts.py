"""A layer of experts on a GPU, forward and with its backward, against plain dense products of the
same FLOPs, against F.grouped_mm as transformers calls it, eager and compiled, and against Liger's
fused_moe. Other routings against a balanced one. Generation of a few tokens against the read of the
weights that they touch. Training steps of a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweld._library import ops
from torchweld_bench.cases import (
    CHECKED_ROWS,
    Call,
    captured,
    compared,
    drawn,
    gradients,
    judged,
    leaves,
    timed,
)
from torchweld_bench.common import free, installed
from torchweld_bench.models import QWEN3, Case, step_rows
from torchweld_bench.results import Row

# (tokens, hidden, intermediate, experts, k) of Qwen3-30B-A3B, OLMoE, gpt-oss-20b and Mixtral.
_SIZES = (
    (16384, 2048, 768, 128, 8),
    (16384, 2048, 1024, 64, 8),
    (8192, 2880, 2880, 32, 4),
    (8192, 4096, 14336, 8, 2),
)
_GENERATION = (1, 8, 64)
_FOUR_LAYERS = {  # of Qwen3-30B-A3B
    **QWEN3,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
_STEPS = [
    Case("qwen3 moe 4 layers", "Qwen3Moe", batch, 4096, False, _FOUR_LAYERS) for batch in (2, 8)
]


def routing(
    tokens: int, experts: int, k: int, kind: str = "balanced", device: str = "cuda"
) -> Tensor:
    if kind == "one expert":
        return torch.zeros(tokens, k, dtype=torch.int64, device=device)
    scores = torch.rand(tokens, experts, device=device)
    if kind == "Zipf":  # draws without replacement, expert i with weight 1 / i
        scores = scores.log() * torch.arange(1, experts + 1, device=device)
    if kind == "half empty":
        scores[:, : experts // 2] -= 1
    return scores.topk(k).indices


def drawn_layer(h: int, n: int, experts: int, device: str = "cuda") -> tuple[Tensor, Tensor]:
    gate_up = drawn(experts, 2 * n, h, std=h**-0.5, device=device)
    return gate_up, drawn(experts, h, n, std=n**-0.5, device=device)


def grouped_mm(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """Calls transformers' grouped_mm_experts_forward."""
    ids, order = torch.sort(index.reshape(-1))
    counts = torch.histc(ids.int(), bins=gate_up.shape[0], min=0, max=gate_up.shape[0] - 1)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    k = index.shape[1]
    gate, up = F.grouped_mm(x[order // k], gate_up.mT, offs=ends).chunk(2, -1)
    rows = F.grouped_mm(F.silu(gate) * up, down.mT, offs=ends)
    rows = rows * weight.reshape(-1)[order, None]
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return rows[places].view(*index.shape, -1).sum(1).to(x.dtype)


def _dense(x: Tensor, n: int, rows: int) -> tuple[Call, Call]:
    """Returns calls of a layer's products of dense matrices: without and with gradients."""
    h = x.shape[1]
    tokens, act, z = drawn(rows, h), drawn(rows, n), drawn(rows, 2 * n)
    first, second = drawn(2 * n, h), drawn(h, n)

    def forward() -> None:
        tokens @ first.T
        act @ second.T

    def both() -> None:
        forward()
        tokens @ second
        z @ first
        tokens.T @ act
        z.T @ tokens

    return forward, both


def _of_size(t: int, h: int, n: int, experts: int, k: int) -> Iterator[Row]:
    x, weight = drawn(t, h), torch.rand(t, k, device="cuda").bfloat16()
    index, (gate_up, down) = routing(t, experts, k), drawn_layer(h, n, experts)
    operands = leaves(x, gate_up, down, weight)

    def run(layer: Any, x: Tensor, gate_up: Tensor, down: Tensor, weight: Tensor) -> Tensor:
        return layer(x, gate_up, down, index[: len(x)], weight)

    functions = {
        "ours": partial(run, ops.experts),
        "grouped_mm": partial(run, grouped_mm),
        "torch.compile": partial(run, torch.compile(grouped_mm)),
    }
    liger = installed("liger_kernel.ops.fused_moe", "LigerFusedMoEFunction")
    if liger is not None and (t, h, n, experts, k) == _SIZES[0]:  # it tunes for each size
        functions["Liger"] = lambda x, gate_up, down, weight: liger.apply(
            x, gate_up, down, index, weight
        )
    few = [x[:CHECKED_ROWS], gate_up, down, weight[:CHECKED_ROWS]]
    exact = grouped_mm(*(t.float() for t in few[:3]), index[:CHECKED_ROWS], few[3].float())
    errors = judged(functions["ours"](*few), functions["grouped_mm"](*few), exact, times=1.5)
    case = f"experts ({t}, {h}, {n}, {experts}, {k}) bfloat16"
    dy = torch.randn_like(x)
    for kind, dense in zip(("forward", "forward and backward"), _dense(x, n, t * k), strict=True):
        calls: dict[str, Call] = {"dense products": dense}
        for name, function in functions.items():
            values = [o.detach() for o in operands]
            is_forward = kind == "forward"
            if name == "Liger" and not is_forward:  # it tunes its backward for minutes
                continue
            calls[name] = (
                partial(function, *values) if is_forward else gradients(function, operands, dy)
            )
        peers = [name for name in calls if name != "ours"]
        # Liger reads the number of its tiles on the host, so it can't be captured.
        times = timed(captured(calls, but=("torch.compile", "Liger")), rounds=7)
        yield from compared(f"{case}, {kind}", times, errors, over=peers)
    routings = {
        "ours" if kind == "balanced" else kind: gradients(
            partial(_routed, routing(t, experts, k, kind)), operands, dy
        )
        for kind in ("balanced", "Zipf", "one expert", "half empty")
    }
    times = timed(captured(routings), rounds=7)
    for kind in ("Zipf", "one expert", "half empty"):
        swapped = {"ours": times[kind], "balanced": times["ours"]}
        yield from compared(f"{case}, {kind}", swapped, errors, "balanced")


def _routed(index: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weight: Tensor) -> Tensor:
    return ops.experts(x, gate_up, down, index, weight)


def _generation(t: int, h: int, n: int, experts: int, k: int) -> Iterator[Row]:
    x, weight = drawn(t, h), torch.rand(t, k, device="cuda").bfloat16()
    index, (gate_up, down) = routing(t, experts, k), drawn_layer(h, n, experts)
    touched = gate_up[: index.unique().numel()].flatten()
    touched = torch.cat([touched, touched[: touched.numel() // 2]])
    args = x, gate_up, down, index, weight
    calls: dict[str, Call] = {
        "ours": partial(ops.experts, *args),
        "grouped_mm": partial(grouped_mm, *args),
        "read of the weights": partial(torch.sum, touched),
    }
    wide = [a.float() if a.is_floating_point() else a for a in args]
    errors = judged(calls["ours"](), grouped_mm(*args), grouped_mm(*wide), times=1.5)
    times = timed(captured(calls))
    case = f"experts ({t}, {h}, {n}, {experts}, {k}) bfloat16, forward"
    yield from compared(case, times, errors, over=["grouped_mm", "read of the weights"])


def rows() -> Iterator[Row]:
    """Measures every case of the family lazily."""
    for t in _GENERATION:
        free()
        torch.manual_seed(0)
        yield from _generation(t, *_SIZES[0][1:])
    for size in _SIZES:
        torch._dynamo.reset()
        free()
        torch.manual_seed(0)
        yield from _of_size(*size)
    for case in _STEPS:
        torch._dynamo.reset()
        free()
        yield from step_rows(case)
