"""The sample batch of ``fuse``: how it runs, and how far two runs are apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .fsdp import is_fully_sharded
from .report import FuseReport


class Sample:
    """Runs the sample batch in eval mode without gradients, leaving the model's modes as found."""

    def __init__(self, model: nn.Module, parts: list[Any], sample: Any, batch_of: Any) -> None:
        self.model = model
        self.given, self.inside = sample is not None, False
        if self.given:
            self.targets = [model]
            self.kwargs = [dict(sample) if hasattr(sample, "keys") else {"input_ids": sample}]
            return
        # Models with other heads may need labels, pad ids or images. Unless the model is a GPT-2
        # with a language model head, the results of its base models are compared.
        head = "GPT2LMHeadModel" in {cls.__name__ for cls in type(model).__mro__}
        known = [(part, batch_of(part)) for part in ([model] if head else parts)]
        # NOTE: FSDP2 takes the first of its modules that runs for the outermost one.
        self.inside = any(_inside_fully_sharded(model, part) for part, _ in known)
        known = [(part, each) for part, each in known if each is not None and not self.inside]
        self.targets = [part for part, _ in known]
        self.kwargs = [each for _, each in known]

    def try_run(self, report: FuseReport) -> list[Tensor] | None:
        """:meth:`run` of what is stock, None and a note where the default batch does not fit."""
        name, fix = type(self.model).__name__, "pass sample= to measure what its layers run"
        if self.inside:
            report.notes.append(f"{name} must run as a whole, because fully_shard has it; {fix}")
            return None
        if not self.targets:
            report.notes.append(f"no sample batch is known for {name}; {fix}")
            return None
        try:
            return self.run(report)
        except Exception as error:
            if self.given:
                raise
            text = (str(error).strip().splitlines() or [""])[0]
            why = f"{type(error).__name__}: {text}"
            report.notes.append(f"the default sample batch does not fit {name} ({why}); {fix}")
            report.compared = None
            return None

    def run(self, report: FuseReport) -> list[Tensor]:
        modes = [(module, module.training) for module in self.model.modules()]
        outputs = []
        self.model.eval()
        try:
            with torch.no_grad():
                for target, kwargs in zip(self.targets, self.kwargs, strict=True):
                    name, out = _main_output(target(**kwargs))
                    shape = tuple(out.shape)
                    report.compared = f"{name} {shape} {str(out.dtype)[6:]}"
                    mask = kwargs.get("attention_mask")
                    if mask is not None and mask.shape == out.shape[:2]:
                        out = out[mask.to(out.device, torch.bool)]
                    outputs.append(out)
        finally:
            for module, training in modes:
                module.training = training
        return outputs


def _inside_fully_sharded(model: nn.Module, part: nn.Module) -> bool:
    """Whether fully_shard was called with a module of a model that contains another."""
    owners = filter(is_fully_sharded, model.modules())
    return any(part in owner.modules() for owner in owners if owner is not part)


def _main_output(output: Any) -> tuple[str, Tensor]:
    for name in ("logits", "last_hidden_state"):
        value = getattr(output, name, None)
        if isinstance(value, Tensor):
            return name, value
    if isinstance(output, Mapping):
        output = output.values()
    values = output if isinstance(output, Iterable) and not isinstance(output, Tensor) else [output]
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0:
            return "output", value
    raise TypeError(
        f"torchweld.fuse: sample must make the model return logits or hidden states, "
        f"but got {type(output).__name__}; pass check=False to skip the comparison"
    )


def compare(stock: list[Tensor], fused: list[Tensor], report: FuseReport) -> None:
    """Puts the largest difference of two runs into the report.

    Raises:
        RuntimeError: The fused model gave NaN or inf where the stock model did not.
    """
    worst = 0.0
    for before, after in zip(stock, fused, strict=True):
        if before.numel() == 0:
            continue
        good = before.isfinite()
        if not bool(after[good].isfinite().all()):
            raise RuntimeError(
                "torchweld.fuse: the fused model gave NaN or inf where the stock model did not; "
                "the model is stock again"
            )
        if bool(good.any()):
            worst = max(worst, (after[good].double() - before[good].double()).abs().max().item())
    report.max_abs_diff = worst if stock else None
