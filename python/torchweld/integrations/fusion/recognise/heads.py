"""Fuses the heads and losses of language models: masked, causal, encoder-decoder.

A model is a candidate if its output embeddings are a linear layer and its forward takes labels.
Nothing else is guessed: the stock forward runs, with deferred logits (:mod:`..layers.logits`).
"""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchweld.integrations.attention.fallback import warn_once
from torchweld.integrations.fusion.layers import arguments
from torchweld.integrations.fusion.layers.fused_module import (
    KEEP,
    ROW,
    FusedModule,
    Fusion,
    Replacement,
    below,
    call_arguments,
    register,
    stock_class,
    stock_forward,
)
from torchweld.integrations.fusion.layers.linears import has_classes
from torchweld.integrations.fusion.layers.logits import Step
from torchweld.integrations.fusion.probes import Probes
from torchweld.ops.stock import is_plain, untouched

from .norms import PickledByRow

HEAD = "_torchweld_head"  # the path of a model's head


def find(module: nn.Module) -> Fusion | None:
    """Returns the fused class of a language model with a head and labels, else None."""
    if path_of(module) is None or difference(module) is not None:
        return None
    # A CrossEntropyLoss that a graph makes does not call __torch_function__ of deferred logits.
    traced = "CrossEntropyLoss" not in (_source(stock_class(module)) or "CrossEntropyLoss")
    return register(stock_class(module), (FusedLanguageModel, traced))


def difference(module: nn.Module) -> str | None:
    """Returns how a language model lacks arguments, or None."""
    if path_of(module) is None:
        return None
    return arguments.difference(stock_class(module), FusedLanguageModel.needs)


def path_of(module: nn.Module) -> str | None:
    """Returns the path of a model's head, or None."""
    if not isinstance(module, PreTrainedModel) or not hasattr(module.config, "return_dict"):
        return None
    head = module.get_output_embeddings()
    named = module.named_modules()
    return next((path for path, each in named if each is head), None)


def set_options(model: nn.Module, keep: str) -> None:
    """Tells a model's fused losses their option ``keep`` and the path of their head."""
    for module in model.modules():
        if isinstance(module, FusedLanguageModel):
            vars(module).update({KEEP: keep, HEAD: path_of(module)})


def _modules(model: nn.Module, path: str) -> list[nn.Module | None]:
    """Returns the modules of a path below a model, the head at the end."""
    found: list[nn.Module | None] = [model]
    for name in path.split("."):
        found.append(None if found[-1] is None else found[-1]._modules.get(name))
    return found[1:]


def _refusal(model: nn.Module, path: str) -> str | None:
    """Returns why the loss of a model must stay stock, or None."""
    *owners, head = _modules(model, path)
    if has_classes(head):
        if torch.compiler.is_compiling():
            return f"{path} is sharded, and a compiled graph gathers its logits"
    elif not is_plain(head, nn.Linear):
        return f"{path} is not torch's Linear without hooks (LoRA, quantised or otherwise replaced)"
    elif type(head.weight) is not nn.Parameter or type(head.weight.data) is not Tensor:
        return f"{path}.weight is not a plain parameter (sharded or quantised)"
    if not untouched(*owners) or any(each._compiled_call_impl for each in (*owners, head)):
        return f"{path} is inside of a module that has hooks or is compiled"
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return "torch.func transforms the model"
    return None


@functools.cache
def _source(stock: type[nn.Module]) -> str | None:
    """Returns the source of the class that defines a forward, or None without one."""
    owner = next(cls for cls in stock.__mro__ if "forward" in vars(cls))
    try:
        return inspect.getsource(owner)
    except (OSError, TypeError):  # it was made by type() or exec
        return None


class FusedLanguageModel(PickledByRow, FusedModule):
    """A language model that computes head and loss as one op, in training mode with labels.

    It returns no logits then. ``row`` says whether compiled graphs do so too.
    """

    kind = "loss"
    needs = ("labels",)

    @staticmethod
    def replacement(path: str, module: nn.Module, row: bool) -> Replacement:
        head = vars(module).get(HEAD) or path_of(module)
        return Replacement(below(path, head), _modules(module, head)[-1], (module,))

    @staticmethod
    def label(module: nn.Module, row: bool) -> str:
        op = "linear_cross_entropy"
        sharded = has_classes(module.get_output_embeddings())
        return f"{'vocab_parallel_' if sharded else ''}{op} ({path_of(module)} -> loss)"

    @staticmethod
    def probe(module: nn.Module, row: bool, weight: Tensor, probes: Probes) -> str | None:
        return probes.refusal("linear_cross_entropy", module.get_output_embeddings().weight)

    @staticmethod
    def refusal(module: nn.Module, row: bool) -> str | None:
        source = _source(stock_class(module))
        if source and not re.search("CrossEntropyLoss|cross_entropy|loss_function", source):
            return f"{stock_class(module).__qualname__} calls no cross entropy"
        return _refusal(module, path_of(module))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = call_arguments(self, args, kwargs)
        if given is None or not self._returns_loss_alone(given):
            return stock_forward(self, *args, **kwargs)
        head = _modules(self, vars(self)[HEAD])[-1]
        step = Step(head, vars(self)[KEEP])
        traced = torch.compiler.is_compiling()
        unknown = traced and getattr(self, "loss_type", "") is None
        if unknown:  # Dynamo can't trace the warning that ForCausalLM is the default
            self.loss_type = "ForCausalLM"
        out = step.run(lambda: stock_forward(self, *args, **kwargs))
        if unknown:
            self.loss_type = None
        if not traced and not step.has_loss and getattr(out, "loss", None) is not None:
            name, head = stock_class(self).__qualname__, vars(self)[HEAD]
            reason = f"{name} computes no cross entropy of the result of {head}"
            warn_once(reason, "whole logits", op="torchweld::linear_cross_entropy")
        return out

    def _returns_loss_alone(self, given: dict[str, Any]) -> bool:
        """Whether a call wants a loss and can do without logits."""
        named, to_keep = given.get("return_dict"), given.get("logits_to_keep", 0)
        # A tuple would have other results in the logits' place.
        named = self.config.return_dict if named is None else named
        whole = isinstance(to_keep, int) and to_keep == 0
        wanted = given.get("labels") is not None and self.training and named and whole
        if not wanted or torch.compiler.is_compiling() and not getattr(self, ROW):
            return False
        path = vars(self).get(HEAD)
        return path is not None and _refusal(self, path) is None
