"""Trains the stock and the fused model step by step on the same batches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from demo.memory import model_bytes, peak_of_step
from demo.model import Pair
from demo.options import Options
from demo.text import Tokens

# The convergence promise: 32 steps, relative difference of the losses, and of the weights after.
CHECKED_STEPS = 32
LOSS_RTOL = {"float32": 1e-5, "bfloat16": 1e-2}
WEIGHT_TOL = 5e-3
# Longer than the checked steps. At the full rate a step of a fresh model overshoots now and then,
# and rounding decides by how much: two stock runs that differ in nothing else part by 1 % there.
_WARMUP = 40
_SLOW_CPU_SECONDS = 75.0


@dataclass
class Variant:
    """One of the two models with its optimizer and measurements."""

    name: str
    model: nn.Module
    call: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None


@dataclass
class Training:
    """Losses, times and peak memory of both models; grows while the training runs."""

    tokens_per_step: int
    loss_rtol: float
    planned: int
    variants: dict[str, Variant] = field(default_factory=dict)
    memory_is: str = ""
    weight_diff: float | None = None
    weights_match: bool | None = None
    note: str | None = None

    @property
    def steps(self) -> int:
        """Steps that both models have done."""
        return min((len(v.losses) for v in self.variants.values()), default=0)

    def differences(self) -> list[float]:
        """Relative difference of the losses, step by step."""
        stock, fused = (self.variants[name].losses for name in ("stock", "fused"))
        return [abs(b - a) / abs(a) if a else abs(b) for a, b in zip(stock, fused, strict=False)]

    def tokens_per_second(self, name: str) -> float | None:
        """Tokens per second of the median step, or None before the first."""
        seconds = self.variants[name].seconds
        return self.tokens_per_step / median(seconds) if seconds else None

    def checked(self) -> int:
        """Steps that the convergence check looks at."""
        return min(CHECKED_STEPS, self.steps)

    def converged(self) -> bool | None:
        """Whether losses and weights agree over the checked steps; None without a step."""
        differences = self.differences()[: self.checked()]
        if not differences:
            return None
        # `not (a <= b)`: a NaN fails.
        close = all(difference <= self.loss_rtol for difference in differences)
        return close and self.weights_match is not False

    def to_dict(self) -> dict[str, Any]:
        """The training as plain JSON-able data."""
        differences = self.differences()
        checked = differences[: self.checked()]
        return {
            "steps": self.steps,
            "steps_planned": self.planned,
            "note": self.note,
            "tokens_per_step": self.tokens_per_step,
            "memory_is": self.memory_is,
            "stock": self._variant("stock"),
            "fused": self._variant("fused"),
            "loss_difference": {
                "checked_steps": self.checked(),
                "rtol": self.loss_rtol,
                "max_relative": max(checked, default=None),
                "max_relative_of_all_steps": max(differences, default=None),
                "weights_max_absolute": self.weight_diff,
                "weights_tolerance": WEIGHT_TOL if self.loss_rtol < 1e-3 else None,
                "passed": self.converged(),
            },
        }

    def _variant(self, name: str) -> dict[str, Any]:
        variant = self.variants[name]
        return {
            "losses": variant.losses[: self.steps],
            "median_step_seconds": median(variant.seconds) if variant.seconds else None,
            "tokens_per_second": self.tokens_per_second(name),
            "peak_bytes": variant.peak_bytes,
        }


class Trainer:
    """Makes the batches and takes the steps; the caller draws the progress."""

    def __init__(self, options: Options, pair: Pair, tokens: Tokens) -> None:
        self.options = options
        self.ids = tokens.ids
        self.device = options.device
        self.generator = torch.Generator().manual_seed(options.seed)
        # A checkpoint is near its optimum: a rate for fresh weights would destroy it.
        gpu = self.device.type == "cuda"
        self.rate = 5e-5 if options.checkpoint else (2e-4 if gpu else 1e-3)
        self.result = Training(
            options.batch * options.context, LOSS_RTOL[options.dtype], options.steps
        )
        for name, model in (("stock", pair.stock), ("fused", pair.fused)):
            call = torch.compile(model) if options.compile else model
            optimizer = torch.optim.AdamW(
                model.parameters(), lr=self.rate, betas=(0.9, 0.95), weight_decay=0.1, fused=gpu
            )
            self.result.variants[name] = Variant(name, model, call, optimizer)

    def warm_up(self) -> None:
        """Runs both models forward and backward without an update; on a CPU measures the memory."""
        batch = self._batch(torch.Generator().manual_seed(self.options.seed + 1))
        for variant in self.result.variants.values():
            self._backward(variant, batch)
            variant.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            self.result.memory_is = (
                "torch.cuda.max_memory_allocated during training steps, less what belongs to the "
                "other model"
            )
            return
        self.result.memory_is = (
            "weights, AdamW state, and the peak of what torch's CPU allocator handed out "
            "during one forward and backward (torch.profiler)"
        )
        for variant in self.result.variants.values():
            # AdamW's state: two more copies of the weights.
            base = 3 * model_bytes(variant.model)
            variant.peak_bytes = base + peak_of_step(lambda v=variant: self._backward(v, batch))
            variant.optimizer.zero_grad(set_to_none=True)

    def steps(self) -> Iterator[int]:
        """Trains; yields the number of steps that both models have done.

        Ends early on a slow CPU where the user did not choose the number.
        """
        begin = time.monotonic()
        may_stop = self.device.type == "cpu" and not self.options.steps_given
        for index in range(self.result.planned):
            late = may_stop and time.monotonic() - begin > _SLOW_CPU_SECONDS
            if late and index >= CHECKED_STEPS:
                self.result.note = (
                    f"{index} steps instead of {self.result.planned}: this machine is slow, "
                    "and --steps was not given"
                )
                return
            batch = self._batch(self.generator)
            variants = list(self.result.variants.values())
            # Taking turns at being first: the second one finds the batch in the caches.
            for variant in variants if index % 2 == 0 else reversed(variants):
                self._step(variant, batch, index)
            if index + 1 == min(CHECKED_STEPS, self.result.planned):
                self._compare_weights()
            yield index + 1

    def _compare_weights(self) -> None:
        worst, close = 0.0, True
        stock, fused = (self.result.variants[name].model for name in ("stock", "fused"))
        with torch.no_grad():
            for a, b in zip(stock.parameters(), fused.parameters(), strict=True):
                worst = max(worst, (a - b).abs().max().item())
                close = close and torch.allclose(b, a, rtol=WEIGHT_TOL, atol=WEIGHT_TOL)
        self.result.weight_diff = worst
        # bfloat16 steps have no promise on the weights.
        if self.options.dtype == "float32":
            self.result.weights_match = close

    def _batch(self, generator: torch.Generator) -> Tensor:
        length = self.options.context + 1
        starts = torch.randint(
            self.ids.numel() - length + 1, (self.options.batch,), generator=generator
        )
        rows = starts[:, None] + torch.arange(length)
        return self.ids[rows].to(self.device)  # (batch, context + 1)

    def _autocast(self) -> AbstractContextManager:
        enabled = self.options.dtype == "bfloat16"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=enabled)

    def _backward(self, variant: Variant, batch: Tensor) -> Tensor:
        with self._autocast():
            # The labels are shifted already, so that the last position has one too.
            inputs, labels = batch[:, :-1], batch[:, 1:].contiguous()
            loss = variant.call(
                input_ids=inputs, labels=labels, shift_labels=labels, use_cache=False
            ).loss
        loss.backward()
        return loss.detach()

    def _step(self, variant: Variant, batch: Tensor, index: int) -> None:
        gpu = self.device.type == "cuda"
        if gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        for group in variant.optimizer.param_groups:
            group["lr"] = self.rate * min(1.0, (index + 1) / _WARMUP)
        start = self._now()
        loss = self._backward(variant, batch)
        nn.utils.clip_grad_norm_(variant.model.parameters(), 1.0)
        variant.optimizer.step()
        variant.optimizer.zero_grad(set_to_none=True)
        seconds = self._now() - start
        value = loss.item()
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the loss of the {variant.name} model is {value} at step {index + 1}"
            )
        variant.losses.append(value)
        variant.seconds.append(seconds)
        if gpu:
            others = [v for v in self.result.variants.values() if v is not variant]
            states = sum(model_bytes(v.model, v.optimizer) for v in others)
            peak = torch.cuda.max_memory_allocated(self.device) - states
            variant.peak_bytes = max(variant.peak_bytes or 0, peak)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
