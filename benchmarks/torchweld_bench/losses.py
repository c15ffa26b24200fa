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
from torchweld.tuning.timer import interleaved
from torchweld_bench.common import (
    dtype_text,
    free,
    in_turn,
    installed,
    largest_error,
    peak_memory,
    runs,
)
from torchweld_bench.results import Row, make_row

_ROUNDS = 7
_LIGER = "liger_kernel.transformers.functional"
_PEERS = ("Liger", "CCE", "quack")
_CHECKED_ROWS = 64
# (rows, features, words) of Llama 3.2 1B, Llama 3.1 8B, GPT-2 and Qwen 2.5.
_SIZES = (
    (8192, 2048, 128256),
    (4096, 4096, 128256),
    (16384, 768, 50257),
    (8192, 4096, 151936),
)
# (rows, words) of logits that are given: Llama 3 and GPT-2.
_LOGITS = ((8192, 128256), (16384, 50257))


def _eager(x: Tensor, weight: Tensor, target: Tensor, label_smoothing: float = 0) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), target, label_smoothing=label_smoothing)


def _eager_logprobs(x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logprobs = F.log_softmax(F.linear(x, weight), -1, dtype=torch.float32)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, target[:, None])[:, 0], entropy


def _padded(weight: Tensor) -> Tensor:
    """The weight for cuBLAS, which takes seven times as long for an odd vocabulary."""
    return F.pad(weight.detach(), (0, 0, 0, -weight.shape[0] % 64))


def _products(x: Tensor, weight: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.mm(x, weight.t()), torch.mm(logits, weight), torch.mm(logits.t(), x)


def _peers_of_logits() -> dict[str, Callable[..., Tensor]]:
    """The losses of given logits that are installed."""
    peers: dict[str, Callable[..., Tensor]] = {}
    quack = installed("quack.cross_entropy", "cross_entropy")
    if quack is not None:
        peers["quack"] = lambda logits, target: quack(logits, target, reduction="mean")
    liger = installed(_LIGER, "liger_cross_entropy")
    if liger is not None:
        peers["Liger"] = liger
    return peers


def _peers_of_head() -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """The losses of a head that are installed, as functions of x, weight and target."""
    names = {
        "Liger": (_LIGER, "liger_fused_linear_cross_entropy"),
        "CCE": ("cut_cross_entropy", "linear_cross_entropy"),
        "quack": ("quack.linear_cross_entropy", "chunked_linear_cross_entropy"),
    }
    found = {name: installed(*where) for name, where in names.items()}
    return {name: loss for name, loss in found.items() if loss is not None}


def _errors(x: Tensor, weight: Tensor, target: Tensor) -> dict[str, float]:
    """Of dx for some rows: a loss of few rows needs the same statistics."""

    def dx(loss: Callable[..., Tensor], dtype: torch.dtype) -> Tensor:
        some = x[:_CHECKED_ROWS].detach().to(dtype).requires_grad_()
        return torch.autograd.grad(loss(some, weight.to(dtype), target[:_CHECKED_ROWS]), some)[0]

    exact, of_eager = dx(_eager, torch.float64), dx(_eager, x.dtype)
    eager_error = largest_error(of_eager, exact)
    return {
        "error": largest_error(dx(ops.linear_cross_entropy, x.dtype), exact),
        "eager_error": eager_error,
        "allowed_error": 3 * eager_error,
    }


def _captured(
    calls: dict[str, Callable[[], Any]], but: tuple[str, ...] = _PEERS
) -> dict[str, Callable[[], Any]]:
    """The calls as CUDA graphs. Liger and CCE read a count on the host, and quack's head tunes its
    kernels, which can't be captured.
    """
    return {n: call if n in but else in_turn([call], 1) for n, call in calls.items()}


def _training(
    case: str, operands: list[Tensor], target: Tensor, targets: dict[str, float]
) -> Iterator[Row]:
    x, weight = operands
    padded = _padded(weight)
    logits = torch.randn(x.shape[0], padded.shape[0], device="cuda", dtype=x.dtype)

    def gradients(loss: Callable[..., Tensor], **options: Any) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: torch.autograd.grad(loss(x, weight, target, **options), operands)

    calls: dict[str, Callable[[], Any]] = {
        "ours": gradients(ops.linear_cross_entropy),
        "nothing kept": gradients(ops.linear_cross_entropy, keep="nothing"),
        "eager": gradients(_eager),
        "torch.compile": gradients(torch.compile(_eager)),
        "products": lambda: _products(x.detach(), padded, logits),
    }
    for name, peer in _peers_of_head().items():
        call = gradients(peer)
        if runs(name, call):
            calls[name] = call
    free()
    errors = _errors(x, weight, target)
    times = interleaved(_captured(calls), device="cuda", rounds=_ROUNDS)
    free()
    memory = {name: peak_memory(call) for name, call in calls.items() if name != "products"}
    for peer in ("eager", "torch.compile", "products", *_PEERS):
        if peer in times:
            name = f"{case} over {peer}"
            yield make_row(name, times, against=peer, target=targets.get(name), **errors)
    name = f"{case} peak memory over eager, MiB"
    yield make_row(name, memory, against="eager", target=targets.get(name), **errors)
    smooth = {
        "ours": gradients(ops.linear_cross_entropy, label_smoothing=0.1),
        "eager": gradients(partial(_eager, label_smoothing=0.1)),
        "without": calls["ours"],
    }
    smooth_times = interleaved(_captured(smooth), device="cuda", rounds=_ROUNDS)
    for peer in ("eager", "without"):
        name = f"{case}, label_smoothing, over {peer}"
        yield make_row(name, smooth_times, against=peer, target=targets.get(name), **errors)
    for what, values, peer in (
        ("over products", times, "products"),
        ("peak memory over eager, MiB", memory, "eager"),
    ):
        name = f"{case}, nothing kept, {what}"
        kept = {"ours": values["nothing kept"], peer: values[peer]}
        yield make_row(name, kept, against=peer, target=targets.get(name), **errors)


def _forward(
    case: str, operands: list[Tensor], target: Tensor, targets: dict[str, float]
) -> Iterator[Row]:
    x, weight = (t.detach() for t in operands)
    some = x[:_CHECKED_ROWS], weight, target[:_CHECKED_ROWS]
    exact = _eager_logprobs(some[0].double(), weight.double(), some[2])[0]
    eager_error = largest_error(_eager_logprobs(*some)[0], exact)
    errors = {
        "error": largest_error(ops.linear_token_logprobs(*some)[0], exact),
        "eager_error": eager_error,
        "allowed_error": eager_error,
    }
    padded = _padded(weight)
    calls = {
        "loss": lambda: ops.linear_cross_entropy(x, weight, target),
        "ours": lambda: ops.linear_token_logprobs(x, weight, target, entropy=True),
        "eager": lambda: _eager_logprobs(x, weight, target),
        "matmul alone": lambda: torch.mm(x, padded.t()),
    }
    graphs = {name: in_turn([call], 1) for name, call in calls.items()}
    times = interleaved(graphs, device="cuda", rounds=_ROUNDS)
    memory = {name: peak_memory(call) for name, call in calls.items() if name != "matmul alone"}
    for what, column in (("the loss", "loss"), ("log-probabilities and entropy", "ours")):
        name = f"{case}, {what} over one product"
        both = {"ours": times[column], "matmul alone": times["matmul alone"]}
        yield make_row(name, both, against="matmul alone", target=targets.get(name), **errors)
    name = f"{case}, log-probabilities and entropy peak memory over eager, MiB"
    yield make_row(name, memory, against="eager", target=targets.get(name), **errors)


def _given_logits(m: int, n: int, targets: dict[str, float]) -> Iterator[Row]:
    logits = torch.randn(m, n, device="cuda").bfloat16().requires_grad_()
    target = torch.randint(0, n, (m,), device="cuda")

    def gradient(loss: Callable[..., Tensor], x: Tensor = logits) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(loss(x, target), x)

    calls: dict[str, Callable[[], Any]] = {
        "ours": gradient(ops.cross_entropy),
        "eager": gradient(F.cross_entropy),
        "torch.compile": gradient(torch.compile(F.cross_entropy)),
        "copy": lambda: logits.detach().clone(),
    }
    for name, peer in _peers_of_logits().items():
        # Liger writes the gradient over the logits.
        own = logits.detach().clone().requires_grad_() if name == "Liger" else logits
        call = gradient(peer, own)
        one = {name: call}
        if runs(name, call) and runs(name, partial(_captured, one, but=("Liger",))):
            calls |= one

    def dlogits(loss: Callable[..., Tensor], dtype: torch.dtype) -> Tensor:
        some = logits[:_CHECKED_ROWS].detach().to(dtype).requires_grad_()
        return torch.autograd.grad(loss(some, target[:_CHECKED_ROWS]), some)[0]

    exact = dlogits(F.cross_entropy, torch.float64)
    eager_error = largest_error(dlogits(F.cross_entropy, logits.dtype), exact)
    errors = {
        "error": largest_error(dlogits(ops.cross_entropy, logits.dtype), exact),
        "eager_error": eager_error,
        "allowed_error": eager_error,
    }
    times = interleaved(_captured(calls, but=("Liger",)), device="cuda", rounds=_ROUNDS)
    memory = {name: peak_memory(calls[name]) for name in ("ours", "eager")}
    case = f"cross_entropy ({m}, {n}) {dtype_text(logits.dtype)}, forward and backward"
    for peer in ("copy", "eager", "torch.compile", "quack", "Liger"):
        if peer in times:
            name = f"{case} over {peer}"
            yield make_row(name, times, against=peer, target=targets.get(name), **errors)
    name = f"{case} peak memory over eager, MiB"
    yield make_row(name, memory, against="eager", target=targets.get(name), **errors)


def rows(targets: dict[str, float]) -> Iterator[Row]:
    """Every case of the family, measured lazily. Peak memory is in MiB; the other rows are in
    microseconds.
    """
    for m, k, n in _SIZES:
        torch._dynamo.reset()
        free()
        torch.manual_seed(0)
        x = torch.randn(m, k, device="cuda").bfloat16().requires_grad_()
        weight = (torch.randn(n, k, device="cuda") * k**-0.5).bfloat16().requires_grad_()
        target = torch.randint(0, n, (m,), device="cuda")
        case = f"linear_cross_entropy ({m}, {k}, {n}) {dtype_text(x.dtype)}"
        yield from _training(f"{case}, forward and backward", [x, weight], target, targets)
        free()
        yield from _forward(f"{case}, forward", [x, weight], target, targets)
        del x, weight, target
    for m, n in _LOGITS:
        torch._dynamo.reset()
        free()
        torch.manual_seed(0)
        yield from _given_logits(m, n, targets)
