"""Runs the sample batch of ``fuse``, and measures how far the fused model is from the stock one.

A decoder with a cache runs the batch twice: whole, and over the cache in two calls and four more
tokens. Layers with dropout run the batch once more, as they do in training mode.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchweld._refusals import describe
from torchweld.integrations import recorder
from torchweld.integrations.fusion.layers import arguments
from torchweld.integrations.fusion.layers.fsdp import is_fully_sharded
from torchweld.integrations.fusion.layers.fused_module import stock_class

from . import attention_switch
from .report import FuseReport, summary

_STEPS = 4  # tokens that follow the sample batch


class Sample:
    """Runs the sample batch in eval mode without gradients, then restores the model's modes."""

    def __init__(self, model: nn.Module, models: list[Any], sample: Any, batch_of: Any) -> None:
        self.model = model
        self.given, self.inside = sample is not None, False
        # For each target the result of `over_cache` before anything was fused.
        self.cached: list[tuple[list[Tensor], Tensor | None]] = []
        if self.given:
            if not isinstance(sample, Tensor) and not hasattr(sample, "keys"):
                raise TypeError(
                    "torchweld.fuse: sample must be the Tensor input_ids or a dict of arguments, "
                    f'but got {describe(sample)}; use tokenizer(text, return_tensors="pt")'
                )
            self.targets = [model]
            self.kwargs = [dict(sample) if hasattr(sample, "keys") else {"input_ids": sample}]
            return
        # Models with other heads may need labels, pad ids or images. Unless the model is a GPT-2
        # with a language model head, the results of its base models are compared.
        head = "GPT2LMHeadModel" in {cls.__name__ for cls in type(model).__mro__}
        known = [(target, batch_of(target)) for target in ([model] if head else models)]
        # NOTE: don't run a module inside of a sharded one first: FSDP2 would take it for the root.
        self.inside = any(_inside_fully_sharded(model, target) for target, _ in known)
        known = [(target, each) for target, each in known if each is not None and not self.inside]
        self.targets = [target for target, _ in known]
        self.kwargs = [each for _, each in known]

    def try_run(self, report: FuseReport) -> list[Tensor] | None:
        """Runs the stock model, whole and over a cache; returns the outputs of :meth:`run`.

        If the default batch does not fit, the report gets a note and the result is None.
        """
        name, fix = type(self.model).__name__, "pass sample= to measure what its layers run"
        if self.inside:
            report.notes.append(f"{name} must run as a whole, because fully_shard has it; {fix}")
            return None
        if not self.targets:
            report.notes.append(f"no sample batch is known for {name}; {fix}")
            return None
        try:
            outputs = self.run(report)
        except Exception as error:
            if self.given:
                raise
            why = summary(error)
            if any(parameter.is_meta for parameter in self.model.parameters()):
                fix = "load the weights, then call fuse again"
            report.notes.append(f"the default sample batch does not fit {name} ({why}); {fix}")
            report.compared = None
            return None
        self.try_over_cache(report)
        return outputs

    def run(self, report: FuseReport) -> list[Tensor]:
        outputs = []
        with self._evaluating():
            for target, kwargs in zip(self.targets, self.kwargs, strict=True):
                name, out = _main_output(target(**kwargs))
                report.compared = f"{name} {tuple(out.shape)} {str(out.dtype)[6:]}"
                mask = kwargs.get("attention_mask")
                if mask is not None and mask.shape == out.shape[:2]:
                    out = out[mask.to(out.device, torch.bool)]
                outputs.append(out)
        return outputs

    def try_over_cache(self, report: FuseReport) -> None:
        """Runs the stock model over a cache, if it has one; if that fails, a note says why."""
        try:
            with recorder.recording(), self._evaluating():
                pairs = zip(self.targets, self.kwargs, strict=True)
                self.cached = [over_cache(target, kwargs) for target, kwargs in pairs]
        except Exception as error:
            why = summary(error)
            report.notes.append(f"stock and fused were not compared over a cache ({why})")

    def compare(self, stock: list[Tensor], report: FuseReport) -> recorder.Calls:
        """Runs the fused model, and adds its largest difference from the stock one to the report.

        Returns:
            The recorded calls of the layers on the whole batch.

        Raises:
            RuntimeError: The fused model gave NaN or inf where the stock model did not.
        """
        with recorder.recording() as calls:
            whole = _difference(stock, self.run(report))
        report.max_abs_diff = whole if stock else None
        if any(outputs for outputs, _ in self.cached):
            self._compare_over_cache(whole, calls, report)
        self._list_training(calls, report)
        return calls

    def _list_training(self, calls: recorder.Calls, report: FuseReport) -> None:
        """Adds to the report the code that layers with dropout run in training mode."""
        dropouts = _dropouts(self.model)
        if not dropouts:
            return
        try:
            with recorder.recording(silently=True) as training, self._evaluating():
                # Only these layers train: modules around them may skip layers or change statistics.
                for layer in calls:
                    if isinstance(layer, nn.Module):
                        layer.training = True
                for target, kwargs in zip(self.targets, self.kwargs, strict=True):
                    target(**kwargs)
        except Exception as error:
            report.notes.append(f"in training mode its layers fail ({summary(error)})")
            return
        fused = [ran for layer, ran in training.items() if None in calls.get(layer, ())]
        for instead, count in Counter(filter(None, itertools.chain(*fused))).items():
            why = f" ({', '.join(dropouts)})" if "dropout" in instead else ""
            report.notes.append(f"in training mode: {count} x {instead}{why}")

    def _compare_over_cache(self, whole: float, calls: recorder.Calls, report: FuseReport) -> None:
        """Adds the difference over a cache to the report, and fallbacks of cached calls alone."""
        worst = 0.0
        with recorder.recording() as cached, self._evaluating():
            for target, kwargs, (outputs, tokens) in zip(
                self.targets, self.kwargs, self.cached, strict=True
            ):
                worst = max(worst, _difference(outputs, over_cache(target, kwargs, tokens)[0]))
        report.max_abs_diff = max(whole, worst)
        report.compared += ", whole and over a cache"
        of_whole, of_cached = (
            {call for ran in each.values() for call in ran if call} for each in (calls, cached)
        )
        report.notes.extend(f"over a cache {call}" for call in sorted(of_cached - of_whole))
        stock = [out for outputs, _ in self.cached for out in outputs]
        rounding = max(1e-3, *(10 * torch.finfo(out.dtype).eps for out in stock))
        if worst > 4 * whole + rounding * max(out.abs().max().item() for out in stock):
            text = f"over a cache the fused model is {worst:.3g} off, without one {whole:.3g}"
            report.notes.append(text)
            warnings.warn(f"torchweld.fuse: {text}; unfuse it before you generate", stacklevel=6)

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        modes = [(module, module.training) for module in self.model.modules()]
        cuda = {p.device for p in self.model.parameters() if p.is_cuda}
        self.model.eval()
        try:
            # A model that draws random numbers in eval mode draws the same ones in each run.
            with torch.no_grad(), torch.random.fork_rng(list(cuda)):
                yield
        finally:
            for module, training in modes:
                module.training = training


def over_cache(
    model: nn.Module, batch: dict[str, Any], tokens: Tensor | None = None
) -> tuple[list[Tensor], Tensor | None]:
    """Runs a batch of tokens in two calls over a cache, and four more tokens one by one.

    ``tokens`` ``(batch, length + 4)`` are the batch's tokens and the four that follow. By default
    the model's most likely tokens follow or, if it returns no logits, each sequence's first token.

    Returns:
        The outputs of the second call and of the four tokens, and ``tokens``. ([], None) if the
        model has no cache, or the batch has inputs beside tokens or padding at its end.
    """
    signature = arguments.of(stock_class(model))
    if not _fits_cache(signature, batch):
        return [], None
    ids = batch["input_ids"]
    length, more = ids.shape[1], ids.new_ones(len(ids), _STEPS)
    mask = torch.cat([batch.get("attention_mask", torch.ones_like(ids)), more], 1)
    position = (mask.cumsum(-1) - 1).clamp_min(0)
    spans = [(0, length // 2), (length // 2, length)]
    spans += [(i, i + 1) for i in range(length, length + _STEPS)]
    ids = ids if tokens is None else tokens
    outputs, cache, name = [], {}, ""
    for first, last in spans:
        if last > ids.shape[1]:
            likely = outputs[-1][:, -1:].argmax(-1).to(ids.device)
            ids = torch.cat([ids, likely if name == "logits" else ids[:, :1]], 1)
        given = {"attention_mask": mask[:, :last], "position_ids": position[:, first:last]}
        given = {key: value for key, value in given.items() if key in signature.names}
        out = model(input_ids=ids[:, first:last], **given, use_cache=True, **cache)
        cache = {signature.cache: getattr(out, signature.cache, None)}
        if cache[signature.cache] is None:
            return [], None
        name, found = _main_output(out)
        outputs.append(found)
    real = mask[:, length // 2 : length].to(outputs[1].device, torch.bool)
    return [outputs[1][real], *outputs[2:]], ids


def _fits_cache(signature: arguments.Arguments, batch: dict[str, Any]) -> bool:
    """Whether a model of this signature can run a batch over a cache."""
    known = {"input_ids", "attention_mask", "position_ids", "use_cache"}
    if signature.cache is None or "use_cache" not in signature.names or not batch.keys() <= known:
        return False
    ids = batch.get("input_ids")
    mask = batch.get("attention_mask", ids)
    if ids is None or ids.dim() != 2 or ids.shape[1] < 2 or mask.shape != ids.shape:
        return False
    return "attention_mask" not in batch or bool(mask[:, -1].all())


def _dropouts(model: nn.Module) -> list[str]:
    """Returns "name=p" of the dropouts in a model's configs: those of attention, else all."""
    roots = attention_switch.roots(model)
    configs = [each for _, root in roots for each in attention_switch.with_sub_configs(root.config)]
    values = [pair for each in configs for pair in each.to_dict().items() if "drop" in pair[0]]
    known = {f"{name}={p}": name for name, p in values if isinstance(p, float) and p > 0}
    return [text for text, name in known.items() if "att" in name] or list(known)


def _inside_fully_sharded(model: nn.Module, inner: nn.Module) -> bool:
    """Whether ``inner`` is inside another module of ``model`` that fully_shard has sharded."""
    owners = filter(is_fully_sharded, model.modules())
    return any(inner in owner.modules() for owner in owners if owner is not inner)


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


def _difference(stock: list[Tensor], fused: list[Tensor]) -> float:
    """Returns the largest absolute difference of two runs, where the stock model is finite.

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
    return worst
