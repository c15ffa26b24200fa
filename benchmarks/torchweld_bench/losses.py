"""The loss of a language model's head on a GPU: times of forward and backward, as CUDA graphs,
against eager, torch.compile, the bare products, and Liger, Apple's CCE and quack where they are
installed; and the peak memory beyond the operands. The loss of given logits is compared with a copy
of them, and with Liger and quack.

pip install --no-deps liger-kernel cut-cross-entropy; pip install quack-kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchweld._library import ops
from torchweld.tuning.timer import Timing
from torchweld_bench.cases import (
    CHECKED_ROWS,
    Call,
    Function,
    captured,
    checked,
    compared,
    drawn,
    gradients,
    judged_dx,
    leaves,
    timed,
)
from torchweld_bench.common import dtype_text, free, installed, peak_memory, runs
from torchweld_bench.results import Row

_ROUNDS = 7
_LIGER = "liger_kernel.transformers.functional"
_PEERS = ("Liger", "CCE", "quack")
# (rows, features, vocabulary) of Llama 3.2 1B, Llama 3.1 8B, GPT-2 and Qwen 2.5.
_SIZES = (
    (8192, 2048, 128256),
    (4096, 4096, 128256),
    (16384, 768, 50257),
    (8192, 4096, 151936),
)
# (rows, vocabulary) of Llama 3 and GPT-2, for losses that take logits.
_LOGITS = ((8192, 128256), (16384, 50257))


def _eager(x: Tensor, weight: Tensor, target: Tensor, label_smoothing: float = 0) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), target, label_smoothing=label_smoothing)


def _eager_logprobs(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logprobs = F.log_softmax(F.linear(x, weight), -1, dtype=torch.float32)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, target[:, None])[:, 0], entropy


def _padded(weight: Tensor) -> Tensor:
    """Pads the weight for cuBLAS, which takes seven times as long for an odd vocabulary."""
    return F.pad(weight.detach(), (0, 0, 0, -weight.shape[0] % 64))


def _products(x: Tensor, weight: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.mm(x, weight.t()), torch.mm(logits, weight), torch.mm(logits.t(), x)


def _peers_of_logits() -> dict[str, Callable[..., Tensor]]:
    """Lists the installed losses of given logits."""
    peers: dict[str, Callable[..., Tensor]] = {}
    quack = installed("quack.cross_entropy", "cross_entropy")
    if quack is not None:
        peers["quack"] = lambda logits, target: quack(logits, target, reduction="mean")
    liger = installed(_LIGER, "liger_cross_entropy")
    if liger is not None:
        peers["Liger"] = liger
    return peers


def _peers_of_head() -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Lists the installed losses of a head, as functions of x, weight and target."""
    names = {
        "Liger": (_LIGER, "liger_fused_linear_cross_entropy"),
        "CCE": ("cut_cross_entropy", "linear_cross_entropy"),
        "quack": ("quack.linear_cross_entropy", "chunked_linear_cross_entropy"),
    }
    found = {name: installed(*where) for name, where in names.items()}
    return {name: loss for name, loss in found.items() if loss is not None}


def _captured(calls: dict[str, Call], but: tuple[str, ...] = _PEERS) -> dict[str, Call]:
    """Captures the calls as CUDA graphs, but for Liger and CCE, which read a count on the host, and
    quack's head, which tunes its kernels.
    """
    return captured(calls, but)


def _peak(calls: dict[str, Call]) -> dict[str, Timing]:
    return {name: peak_memory(call) for name, call in calls.items()}


def _training(case: str, operands: list[Tensor], target: Tensor) -> Iterator[Row]:
    x, weight = operands
    padded = _padded(weight)
    logits = drawn(x.shape[0], padded.shape[0])

    def of(loss: Function, **options: Any) -> Call:
        return gradients(lambda x, weight: loss(x, weight, target, **options), operands)

    calls = {
        "ours": of(ops.linear_cross_entropy),
        "nothing kept": of(ops.linear_cross_entropy, keep="nothing"),
        "eager": of(_eager),
        "torch.compile": of(torch.compile(_eager)),
        "products": lambda: _products(x.detach(), padded, logits),
    }
    for name, peer in _peers_of_head().items():
        call = of(peer)
        if runs(name, call):
            calls[name] = call
    free()
    errors = judged_dx(ops.linear_cross_entropy, _eager, [x, weight, target], cut=(0, 2))
    times = timed(_captured(calls), _ROUNDS)
    free()
    memory = _peak({name: call for name, call in calls.items() if name != "products"})
    yield from compared(case, times, errors, over=("eager", "torch.compile", "products", *_PEERS))
    yield from compared(f"{case} peak memory", memory, errors, over=["eager"], end=", MiB")
    smooth = {
        "ours": of(ops.linear_cross_entropy, label_smoothing=0.1),
        "eager": of(_eager, label_smoothing=0.1),
        "without": calls["ours"],
    }
    smooth_times = timed(_captured(smooth), _ROUNDS)
    yield from compared(
        f"{case}, label_smoothing,", smooth_times, errors, over=("eager", "without")
    )
    case += ", nothing kept,"
    kept = {"ours": times["nothing kept"], "products": times["products"]}
    yield from compared(case, kept, errors, over=["products"])
    kept = {"ours": memory["nothing kept"], "eager": memory["eager"]}
    yield from compared(f"{case} peak memory", kept, errors, over=["eager"], end=", MiB")


def _forward(case: str, operands: list[Tensor], target: Tensor) -> Iterator[Row]:
    x, weight = (t.detach() for t in operands)
    few = [x[:CHECKED_ROWS], weight, target[:CHECKED_ROWS]]
    errors = checked(
        ops.linear_token_logprobs(*few)[0], lambda *t: _eager_logprobs(*t)[0], few, times=1, plus=0
    )
    padded = _padded(weight)
    calls: dict[str, Call] = {
        "loss": lambda: ops.linear_cross_entropy(x, weight, target),
        "ours": lambda: ops.linear_token_logprobs(x, weight, target, entropy=True),
        "eager": lambda: _eager_logprobs(x, weight, target),
        "matmul alone": lambda: torch.mm(x, padded.t()),
    }
    times = timed(captured(calls), _ROUNDS)
    memory = _peak({name: call for name, call in calls.items() if name != "matmul alone"})
    for what, column in (("the loss", "loss"), ("log-probabilities and entropy", "ours")):
        both = {"ours": times[column], "matmul alone": times["matmul alone"]}
        name = f"{case}, {what} over one product"
        yield from compared(name, both, errors, "matmul alone")
    case += ", log-probabilities and entropy peak memory"
    yield from compared(case, memory, errors, over=["eager"], end=", MiB")


def _given_logits(m: int, n: int) -> Iterator[Row]:
    (logits,) = leaves(drawn(m, n))
    target = torch.randint(0, n, (m,), device="cuda")

    def of(loss: Function, x: Tensor = logits) -> Call:
        return gradients(lambda x: loss(x, target), [x])

    calls: dict[str, Call] = {
        "ours": of(ops.cross_entropy),
        "eager": of(F.cross_entropy),
        "torch.compile": of(torch.compile(F.cross_entropy)),
        "copy": lambda: logits.detach().clone(),
    }
    for name, peer in _peers_of_logits().items():
        # Liger writes the gradient over the logits, so it gets a copy.
        call = of(peer, leaves(logits.detach().clone())[0] if name == "Liger" else logits)
        one = {name: call}
        if runs(name, call) and runs(name, partial(_captured, one, but=("Liger",))):
            calls |= one
    errors = judged_dx(ops.cross_entropy, F.cross_entropy, [logits, target], cut=(0, 1), times=1)
    times = timed(_captured(calls, but=("Liger",)), _ROUNDS)
    memory = _peak({name: calls[name] for name in ("ours", "eager")})
    case = f"cross_entropy ({m}, {n}) {dtype_text(logits.dtype)}, forward and backward"
    peers = ("copy", "eager", "torch.compile", "quack", "Liger")
    yield from compared(case, times, errors, over=peers)
    yield from compared(f"{case} peak memory", memory, errors, over=["eager"], end=", MiB")


def rows() -> Iterator[Row]:
    """Measures every case of the family lazily. Peak memory is in MiB; the other rows are in
    microseconds.
    """
    for m, k, n in _SIZES:
        torch._dynamo.reset()
        free()
        torch.manual_seed(0)
        x, weight = leaves(drawn(m, k), drawn(n, k, std=k**-0.5))
        target = torch.randint(0, n, (m,), device="cuda")
        case = f"linear_cross_entropy ({m}, {k}, {n}) {dtype_text(x.dtype)}"
        yield from _training(f"{case}, forward and backward", [x, weight], target)
        free()
        yield from _forward(f"{case}, forward", [x, weight], target)
        del x, weight, target
    for m, n in _LOGITS:
        torch._dynamo.reset()
        free()
        torch.manual_seed(0)
        yield from _given_logits(m, n)
