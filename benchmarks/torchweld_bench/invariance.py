"""Calls in the batch-invariant mode on a GPU against the same calls outside of it, bf16.

Products and models are also compared with the kernels of Thinking Machines' batch_invariant_ops
where it is on the path (github.com/thinking-machines-lab/batch_invariant_ops). Its models are stock
ones, and their attention is torch's SDPA, which it does not replace.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchweld
from torchweld._library import ops
from torchweld.ops.int4_module import Int4Linear
from torchweld.tuning.timer import interleaved
from torchweld_bench import int4
from torchweld_bench.attention import EAGER_ERRORS, reference
from torchweld_bench.attention_decode import drawn_caches
from torchweld_bench.cases import (
    CHECKED_ROWS,
    Call,
    captured,
    checked,
    compared,
    drawn,
    gradients,
    judged,
    judged_loss,
    leaves,
    measured,
    rotated,
    timed,
)
from torchweld_bench.common import free, installed, runs
from torchweld_bench.experts import drawn_layer, grouped_mm, routing
from torchweld_bench.generate import generator
from torchweld_bench.models import LLAMA, copy_of, language_loss, stepper
from torchweld_bench.results import Failure, Row

_DEVICE = "cuda"
_ROUNDS = 21
_MODEL_ROUNDS = 7
_DEFAULT = "default choice"
_PUBLIC = "batch_invariant_ops"
_LOSS_RTOL = 1e-2

_ROWS = (1, 16, 64, 128, 256, 1024, 4096)
_LINEAR = ((4096, 4096), (4096, 14336))  # K, N
# batch, nheads, nheads_kv, seqlen_k, head_dim
_PREFILL = ((4, 32, 8, 2048, 128), (1, 32, 8, 4096, 128))
_DECODE = ((1, 32, 8, 4096, 128), (8, 32, 8, 4096, 128), (64, 32, 8, 4096, 128),
           (1, 32, 8, 32768, 128))  # fmt: skip
_INT4_ROWS, _INT4 = (1, 16, 64), (4096, 14336)
_EXPERTS = (8192, 2048, 768, 128, 8)  # tokens, hidden, intermediate, experts, k
_STEP = (2, 4096)  # batch, seqlen
_BATCHES, _PROMPT, _TOKENS = (1, 8), 512, 64


def _both(call: Call) -> dict[str, Call]:
    """Returns a call in the mode and outside of it."""
    return {"ours": torchweld.batch_invariant()(call), _DEFAULT: call}


@contextlib.contextmanager
def _public_mode() -> Iterator[None]:
    """Runs torch's mm, addmm, mean and log_softmax on the public kernels."""
    # NOTE: the package's own context leaves its kernels on if a call raises.
    installed(_PUBLIC, "enable_batch_invariant_mode")()
    try:
        yield
    finally:
        installed(_PUBLIC, "disable_batch_invariant_mode")()


def _has_public_mode() -> bool:
    return installed(_PUBLIC, "enable_batch_invariant_mode") is not None


def _linear(m: int, k: int, n: int) -> Iterator[Row]:
    x, weight = drawn(m, k, device=_DEVICE), drawn(n, k, std=k**-0.5, device=_DEVICE)
    calls = _both(partial(ops.linear, x, weight))
    matmul = installed(_PUBLIC, "matmul_persistent")
    if matmul is not None:
        product = partial(matmul, x, weight.t())
        if runs(_PUBLIC, product):
            calls[_PUBLIC] = product
    out = calls["ours"]()[:CHECKED_ROWS]
    errors = checked(out, F.linear, [x[:CHECKED_ROWS], weight], times=3, plus=0)
    return measured(f"linear ({m}, {k}, {n}) bfloat16", calls, errors, _DEFAULT, rounds=_ROUNDS)


def _prefill(batch: int, nheads: int, nheads_kv: int, seqlen: int, dim: int) -> Iterator[Row]:
    qkv = [drawn(batch, n, seqlen, dim, device=_DEVICE) for n in (nheads, nheads_kv, nheads_kv)]
    calls = _both(partial(ops.attention, *qkv, causal=True))
    exact, eager = reference(qkv, True)
    out = calls["ours"]()[-1:, -1:, -exact.shape[2] :]
    errors = judged(out, eager, exact, EAGER_ERRORS)
    case = f"attention ({batch}, {nheads}/{nheads_kv}, {seqlen}, {dim}) bfloat16 causal"
    return measured(case, calls, errors, _DEFAULT, rounds=_ROUNDS)


def _decode(batch: int, nheads: int, nheads_kv: int, seqlen: int, dim: int) -> Iterator[Row]:
    q = drawn(batch, nheads, 1, dim, device=_DEVICE)
    caches, _ = drawn_caches(batch, nheads_kv, seqlen, dim, device=_DEVICE)
    variants = [_both(partial(ops.attention, q, *kv, causal=True)) for kv in caches]
    calls = {name: [each[name] for each in variants] for name in variants[0]}
    exact, eager = reference([q, *caches[0]], True)
    errors = judged(calls["ours"][0]()[-1:, -1:], eager, exact, EAGER_ERRORS)
    times = rotated(calls, len(caches), _ROUNDS)
    shape = (batch, nheads, nheads_kv, seqlen, dim)
    return compared(f"attention decode {shape} bfloat16, 1 query rows", times, errors, _DEFAULT)


def _int4(m: int, k: int, n: int) -> Iterator[Row]:
    linear = nn.Linear(k, n, bias=False, device=_DEVICE, dtype=torch.bfloat16)
    module, x = Int4Linear.from_linear(linear, int4.GROUP), drawn(m, k, device=_DEVICE)
    weight = (module.qweight, module.scale, module.zero)
    turns, times = int4.rotation(m, sum(t.nbytes for t in weight))
    variants = [_both(partial(copy.deepcopy(module), x)) for _ in range(turns)]
    calls = {name: [each[name] for each in variants] for name in variants[0]}
    few = [x[:CHECKED_ROWS], module.dequantise()]
    errors = checked(calls["ours"][0]()[:CHECKED_ROWS], F.linear, few, times=3, plus=1e-6)
    us = rotated(calls, times, _ROUNDS)
    return compared(f"int4_linear ({m}, {k}, {n}) bfloat16", us, errors, _DEFAULT)


def _experts(t: int, h: int, n: int, experts: int, k: int) -> Iterator[Row]:
    """Forward and backward of a layer, as a CUDA graph."""
    x, weight = drawn(t, h, device=_DEVICE), torch.rand(t, k, device=_DEVICE).bfloat16()
    index = routing(t, experts, k, device=_DEVICE)
    gate_up, down = drawn_layer(h, n, experts, device=_DEVICE)

    def layer(x: Tensor, gate_up: Tensor, down: Tensor, weight: Tensor) -> Tensor:
        return ops.experts(x, gate_up, down, index[: len(x)], weight)

    few = [x[:CHECKED_ROWS], gate_up, down, weight[:CHECKED_ROWS]]
    at = index[:CHECKED_ROWS]
    exact = grouped_mm(*(o.float() for o in few[:3]), at, few[3].float())
    eager, out = grouped_mm(*few[:3], at, few[3]), torchweld.batch_invariant()(layer)(*few)
    errors = judged(out, eager, exact, times=1.5)
    calls = _both(gradients(layer, leaves(x, gate_up, down, weight), torch.randn_like(x)))
    times = timed(captured(calls), rounds=_MODEL_ROUNDS)
    case = f"experts ({t}, {h}, {n}, {experts}, {k}) bfloat16, forward and backward"
    return compared(case, times, errors, _DEFAULT)


def _llama(dtype: torch.dtype) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**LLAMA)
    with torch.device(_DEVICE):
        return LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=dtype)


def _fused(stock: nn.Module, **options: Any) -> dict[str, nn.Module]:
    """Returns a model that runs in the mode and one that does not, which share its parameters."""
    models = {"ours": copy_of(stock), _DEFAULT: copy_of(stock)}
    for name, model in models.items():
        torchweld.fuse(model, check=False, batch_invariant=name == "ours", **options)
    return models


def _training_step(batch: int, seqlen: int) -> Iterator[Row]:
    stock = _llama(torch.bfloat16).train()
    tokens = torch.randint(stock.config.vocab_size, (batch, seqlen), device=_DEVICE)
    optimizer = torch.optim.AdamW(stock.parameters(), lr=1e-5, fused=True)
    models = _fused(stock, loss=True)  # with shared parameters, so no step comes before a loss
    losses = {name: language_loss(model, tokens).item() for name, model in models.items()}
    errors = judged_loss(losses["ours"], losses[_DEFAULT], _LOSS_RTOL)
    steps: dict[str, Call] = {
        name: stepper(partial(language_loss, model, tokens), optimizer)
        for name, model in models.items()
    }
    if _has_public_mode():
        step = stepper(partial(language_loss, stock, tokens), optimizer, _public_mode)
        if runs(_PUBLIC, step):
            steps[_PUBLIC] = step
    times = interleaved(steps, device=_DEVICE, rounds=_MODEL_ROUNDS, warmup=1)
    case = f"llama 1.2B training step ({batch}, {seqlen}) bfloat16"
    return compared(case, times, errors, _DEFAULT, (_PUBLIC,))


def _decoder(model: nn.Module, prompts: Tensor, token: Tensor) -> Callable[[], Tensor]:
    """Fills a static cache with the prompts and returns the function that adds a token to it.

    A cache has space for _TOKENS tokens, which is more than the number of timed calls.
    """
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=_PROMPT + _TOKENS)

    @torch.no_grad()
    def add(tokens: Tensor) -> Tensor:
        out = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1]

    add(prompts)
    return partial(add, token)


def _generation(batch: int) -> Iterator[Row]:
    """A step after the prompts as a CUDA graph, and the whole generation with its host."""
    exact = _llama(torch.float32).eval()
    stock = copy.deepcopy(exact).bfloat16()
    models = _fused(stock)
    tokens = torch.randint(1, stock.config.vocab_size, (batch, _PROMPT + 1), device=_DEVICE)
    prompts, token = tokens[:, :-1], tokens[:, -1:]
    with torch.no_grad():
        wanted = exact(tokens, use_cache=False, logits_to_keep=1).logits[:, -1].double()
    del exact
    steps: dict[str, Call] = {name: _decoder(each, prompts, token) for name, each in models.items()}
    errors = judged(*(steps[name]() for name in models), wanted, times=3, plus=0)
    if _has_public_mode():
        with _public_mode():
            step = _public_mode()(_decoder(stock, prompts, token))
        if runs(_PUBLIC, step):
            steps[_PUBLIC] = step
    times = timed(captured(steps), _ROUNDS)
    case = f"llama 1.2B generation step ({batch}, {_PROMPT}) bfloat16, in a CUDA graph"
    yield from compared(case, times, errors, _DEFAULT, (_PUBLIC,))
    inputs = {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}
    calls = {name: generator(each, inputs, _TOKENS) for name, each in models.items()}
    times = interleaved(calls, device=_DEVICE, rounds=_MODEL_ROUNDS, warmup=1)
    case = f"llama 1.2B generate {_TOKENS} tokens after ({batch}, {_PROMPT}) bfloat16, eager"
    yield from compared(case, times, errors, _DEFAULT)


def _cases() -> Iterator[tuple[str, Callable[[], Iterator[Row]]]]:
    for k, n in _LINEAR:
        yield from ((f"linear ({m}, {k}, {n})", partial(_linear, m, k, n)) for m in _ROWS)
    yield from ((f"attention {shape}", partial(_prefill, *shape)) for shape in _PREFILL)
    yield from ((f"attention decode {shape}", partial(_decode, *shape)) for shape in _DECODE)
    for m in _INT4_ROWS:
        yield f"int4_linear {(m, *_INT4)}", partial(_int4, m, *_INT4)
    yield f"experts {_EXPERTS}", partial(_experts, *_EXPERTS)
    yield f"llama 1.2B training step {_STEP}", partial(_training_step, *_STEP)
    for batch in _BATCHES:
        yield f"llama 1.2B generation ({batch}, {_PROMPT})", partial(_generation, batch)


def rows() -> Iterator[Row | Failure]:
    """Measures every case of the family lazily; a `Failure` if a case raises."""
    for case, measure in _cases():
        free()
        torch.manual_seed(0)
        try:
            yield from measure()
        except Exception as error:  # the other cases are of use although one raises
            yield Failure(case, f"{type(error).__name__}: {error}".splitlines()[0])
