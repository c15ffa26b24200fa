"""varlen_attention of packed sequences on a GPU, forward and backward: against one sequence of all
tokens, and against torch.nn.attention.varlen, FlashAttention 4 and FlexAttention where they are
there. Then a compiled training step of a Llama over packed batches.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torchweld
from torchweld.tuning.timer import Timing, interleaved
from torchweld_bench.attention_masks import live_share
from torchweld_bench.cases import Call, backward, compared, drawn, judged, judged_loss, timed
from torchweld_bench.common import free, installed
from torchweld_bench.results import Failure, Row

_DEVICE = "cuda"
_ROUNDS = 9
_TOKENS, _HEADS, _DIM = 16384, 16, 128
_DOCUMENT = 512
_WHOLE, _LIVE = "one sequence", "live tiles"
_OVER = ("torch varlen", "fa4", "flex", _LIVE)
Function = Callable[[Tensor, Tensor, Tensor], Tensor]  # of (tokens, nheads, head_dim)

_BACKEND = "inductor"  # tests compile with another one
_BATCHES = 50
_STEP_TOKENS = 8192
_LOSS_RTOL = 1e-2
_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}


def log_normal_lengths(tokens: int, least: int = 20, most: int = 4000, seed: int = 0) -> list[int]:
    """Lengths of documents as in a crawl, with a median of 400, that fill `tokens`."""
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        drawn = math.exp(6 + 1.1 * torch.randn((), generator=generator).item())
        lengths.append(min(max(int(drawn), least), most, left))
    return lengths


def _torch_varlen(ends: Tensor, longest: int, causal: bool) -> Function | None:
    varlen_attn = installed("torch.nn.attention.varlen", "varlen_attn")
    if varlen_attn is None:
        return None
    by_window = "window_size" in inspect.signature(varlen_attn).parameters
    mask = {"window_size": (-1, 0 if causal else -1)} if by_window else {"is_causal": causal}
    return lambda q, k, v: varlen_attn(q, k, v, ends, ends, longest, longest, **mask)


def _fa4(ends: Tensor, longest: int, causal: bool) -> Function | None:
    """FlashAttention 4, whose gradient adds atomically."""
    varlen = installed("flash_attn.cute.interface", "flash_attn_varlen_func")
    if varlen is None:
        return None

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = varlen(
            q,
            k,
            v,
            cu_seqlens_q=ends,
            cu_seqlens_k=ends,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            causal=causal,
        )
        return found[0] if isinstance(found, tuple) else found

    return run


def _flex(ends: Tensor, causal: bool) -> Function | None:
    """FlexAttention with its block mask ready."""
    module = "torch.nn.attention.flex_attention"
    flex = installed(module, "flex_attention")
    create_block_mask = installed(module, "create_block_mask")
    if flex is None or create_block_mask is None:
        return None
    ids = torch.searchsorted(ends[1:], torch.arange(_TOKENS, device=_DEVICE), right=True)

    def seen(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        same = ids[row] == ids[key]
        return same & (row >= key) if causal else same

    # Each mask compiles flex_attention twice, and torch stops compiling after eight: start anew.
    torch._dynamo.reset()
    block_mask = create_block_mask(seen, None, None, _TOKENS, _TOKENS, device=_DEVICE)
    compiled = torch.compile(flex, dynamic=False, backend=_BACKEND)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = [t.transpose(0, 1)[None] for t in (q, k, v)]
        return compiled(*heads_first, block_mask=block_mask)[0].transpose(0, 1)

    return run


def _errors(
    qkv: list[Tensor], dout: Tensor, lengths: list[int], causal: bool, mine: list[Tensor]
) -> Iterator[dict[str, float]]:
    """Our errors and eager torch's in the last head of the longest document, then of its gradients.

    Args:
        mine: our result and gradients, `(tokens, nheads, head_dim)`.
    """
    index = max(range(len(lengths)), key=lengths.__getitem__)
    place = slice(sum(lengths[:index]), sum(lengths[: index + 1]))
    count = lengths[index]
    hidden = torch.ones(count, count, device=_DEVICE, dtype=torch.bool).triu(1) & causal

    def eager(dtype: torch.dtype) -> list[Tensor]:
        q, k, v = leaves = [t[place, -1].to(dtype).requires_grad_() for t in qkv]
        scores = (q @ k.mT * _DIM**-0.5).masked_fill(hidden, -torch.inf)
        out = scores.softmax(-1) @ v
        return [out.detach(), *torch.autograd.grad(out, leaves, dout[place, -1].to(dtype))]

    exact, theirs = eager(torch.float64), eager(torch.bfloat16)
    for part in (slice(0, 1), slice(1, 4)):
        found = (
            judged(a[place, -1], c, b, times=3, plus=0)
            for a, b, c in zip(mine[part], exact[part], theirs[part], strict=True)
        )
        yield max(found, key=lambda each: each["error"] / max(each["eager_error"], 1e-9))


def _live(lengths: list[int]) -> float:
    """The share of tiles of one causal sequence that the documents need."""
    starts = [start for n, start in zip(lengths, _starts(lengths), strict=True) for _ in range(n)]
    return live_share([starts])


def _starts(lengths: list[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths))]


def _rows_of(name: str, lengths: list[int], causal: bool, compiled: bool = False) -> Iterator[Row]:
    """A row each for forward and backward, and for their peers.

    Args:
        compiled: beside those peers that take minutes to compile their kernels, too.
    """
    case = f"({_TOKENS}, {_HEADS}, {_DIM}) bfloat16 {'causal' if causal else 'both ways'} {name}"
    shape = (_TOKENS, _HEADS, _DIM)
    *qkv, dout = (drawn(*shape, device=_DEVICE) for _ in range(4))
    ends = torch.tensor([0, *lengths], device=_DEVICE).cumsum(0).int()
    functions: dict[str, Function | None] = {
        "ours": lambda q, k, v: torchweld.varlen_attention(q, k, v, ends, ends, causal=causal),
        _WHOLE: lambda q, k, v: torchweld.attention(
            *(t.transpose(0, 1)[None] for t in (q, k, v)), causal=causal
        )[0].transpose(0, 1),
        "torch varlen": _torch_varlen(ends, max(lengths), causal),
        "fa4": _fa4(ends, max(lengths), causal) if compiled else None,
        "flex": _flex(ends, causal) if compiled else None,
    }
    calls: dict[str, dict[str, Call]] = {"": {}, "_backward": {}}
    for peer, function in functions.items():
        if function is not None:
            calls[""][peer] = partial(function, *qkv)
            calls["_backward"][peer] = backward(function, qkv, dout)
    mine = [calls[""]["ours"](), *calls["_backward"]["ours"]()]
    all_errors = _errors(qkv, dout, lengths, causal, mine)
    for (end, variants), errors in zip(calls.items(), all_errors, strict=True):
        times = timed(variants, _ROUNDS, _DEVICE)
        if causal:
            whole, share = times[_WHOLE], _live(lengths)
            times[_LIVE] = Timing(whole.us * share, whole.low * share, whole.high * share)
        yield from compared(f"varlen_attention{end} {case}", times, errors, _WHOLE, _OVER)


def _batch(seed: int, vocab: int) -> dict[str, Any]:
    """A packed batch as transformers' DataCollatorWithFlattening makes it."""
    lengths = log_normal_lengths(_STEP_TOKENS, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (1, _STEP_TOKENS), generator=generator)
    starts = torch.tensor(_starts(lengths))
    labels = tokens.clone()
    labels[0, starts] = -100
    ends = torch.tensor([0, *lengths]).cumsum(0).int().to(_DEVICE)
    torch._dynamo.mark_dynamic(ends, 0)
    return {
        "input_ids": tokens.to(_DEVICE),
        "labels": labels.to(_DEVICE),
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None].to(_DEVICE),
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def _stepper(model: Any, optimizer: Any, batches: list[dict[str, Any]]) -> Callable[[], Tensor]:
    """A training step, of another batch each time."""
    compiled = torch.compile(model, fullgraph=True, backend=_BACKEND)
    count = 0

    def step() -> Tensor:
        nonlocal count
        batch, count = batches[count % len(batches)], count + 1
        optimizer.zero_grad(set_to_none=True)
        loss: Tensor = compiled(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _step_rows() -> Iterator[Row | Failure]:
    """A compiled Llama over packed batches: one graph and no host sync, or a failure."""
    import transformers

    from torchweld.integrations import register_attention

    register_attention()
    torch._dynamo.reset()
    name = f"llama of {_LLAMA['num_hidden_layers']} layers, compiled, packed training step"
    case = f"{name} (1, {_STEP_TOKENS}) bfloat16"
    batches = [_batch(seed, _LLAMA["vocab_size"]) for seed in range(_BATCHES)]
    steps: dict[str, Callable[[], Tensor]] = {}
    losses: dict[str, float] = {}
    for variant, attention in (("ours", "torchweld"), ("sdpa", "sdpa")):
        torch.manual_seed(0)
        with torch.device(_DEVICE):
            model = transformers.LlamaForCausalLM._from_config(
                transformers.LlamaConfig(**_LLAMA),
                attn_implementation=attention,
                dtype=torch.bfloat16,
            ).train()
        fused = {"fused": True} if _DEVICE == "cuda" else {}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, **fused)
        mine = batches
        if attention == "sdpa":  # transformers finds sdpa's documents by position_ids
            mine = [
                {k: v for k, v in batch.items() if not k.startswith(("cu_", "max_"))}
                for batch in batches
            ]
        steps[variant] = _stepper(model, optimizer, mine)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "torchweld:")  # raise if a call falls back
            losses[variant] = steps[variant]().item()
    try:
        with torch._dynamo.config.patch(error_on_recompile=True), _no_syncs():
            for _ in range(_BATCHES):
                steps["ours"]()
    except RuntimeError as error:
        yield Failure(case, str(error).splitlines()[0])
        return
    times = interleaved(steps, device=_DEVICE, rounds=_ROUNDS, warmup=1)
    errors = judged_loss(losses["ours"], losses["sdpa"], _LOSS_RTOL)
    yield from compared(case, times, errors, "sdpa")


@contextlib.contextmanager
def _no_syncs() -> Iterator[None]:
    """Raises where the host waits for the GPU."""
    if _DEVICE != "cuda":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def rows() -> Iterator[Row | Failure]:
    """Documents of 512 tokens, of log-normal lengths and one alone; then training steps."""
    torch.manual_seed(0)
    for causal in (True, False):
        alike = [_DOCUMENT] * (_TOKENS // _DOCUMENT)
        drawn = log_normal_lengths(_TOKENS)
        for name, lengths in (
            (f"documents of {_DOCUMENT}", alike),
            ("documents of 20 to 4000", drawn),
        ):
            yield from _rows_of(name, lengths, causal, compiled=causal)
            free()
    # a single document: the cost of cu_seqlens that hide nothing
    yield from _rows_of("one document", [_TOKENS], True)
    free()
    yield from _step_rows()
