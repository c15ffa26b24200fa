"""Recognises and compares heads and losses of language models that the table of families lacks.

A model is a candidate if it has a base model and an ``lm_head``, and a forward with the arguments
of Llama's. In its replica a stub with random results replaces the base model.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.utils import ModelOutput

from torchweld.integrations.fusion.layers import arguments
from torchweld.integrations.fusion.layers.causal_lm import (
    FusedCausalLM,
    Head,
    Logits,
    base_results,
)
from torchweld.integrations.fusion.layers.fused_module import (
    ROW,
    Fusion,
    stock_class,
    stock_forward,
)
from torchweld.integrations.fusion.probes import Probes

from . import compare
from .norms import Recognised, choose, fused_replica

_CLASSES = 20  # of a replica
_EXPERTS = 4
# The arguments that a comparison chooses; inputs_embeds would be given in place of input_ids.
_CHOSEN = (
    "input_ids",
    "inputs_embeds",
    "labels",
    "logits_to_keep",
    "use_cache",
    "output_router_logits",
)
# The attributes by which models multiply the loss of their routers.
_FACTORS = ("router_aux_loss_coef", "aux_loss_coef")


_CHANGES = (
    Logits("softcap", "final_logit_softcapping"),
    Logits("temperature", "logits_scaling"),
    Logits("temperature", "logits_scaling", inverse=True),
    Logits("temperature", "logit_scale", inverse=True),
    Logits("temperature", "lm_head_multiplier", inverse=True),
    Logits("softcap", "logits_soft_cap"),
    Logits("softcap", "final_logit_softcapping", factor="output_multiplier"),
)


def find(module: nn.Module) -> Fusion | None:
    """Guesses a model's fused class and settings from its structure, or returns None."""
    if not _has_children_of_head(module) or difference(module) is not None:
        return None
    return choose(module, _rows, RecognisedCausalLM)


def difference(module: nn.Module) -> str | None:
    """Returns how a module with a language model's children lacks arguments, or None."""
    if not _has_children_of_head(module):
        return None
    return arguments.difference(stock_class(module), FusedCausalLM.needs, is_open=True)


def _is_mixture(module: nn.Module) -> bool:
    return "output_router_logits" in arguments.of(stock_class(module)).names


def _has_children_of_head(module: nn.Module) -> bool:
    if set(module._modules) != {"model", "lm_head"} or module._parameters or module._buffers:
        return False
    config = getattr(module, "config", None)
    return hasattr(type(module), "loss_function") and hasattr(config, "return_dict")


def _rows(module: nn.Module) -> list[Head]:
    """Returns the settings that a model may have."""
    text = module.config.get_text_config()
    changes = [
        each
        for each in _CHANGES
        if all(hasattr(text, name) for name in filter(None, (each.number, each.factor)))
    ]
    output, results, passes = _of_stock(module)
    rows = [
        Head(each, output=output, results=results, passes=passes) for each in (*changes, Logits())
    ]
    loss = getattr(sys.modules[stock_class(module).__module__], "load_balancing_loss_func", None)
    if not _is_mixture(module) or loss is None:
        return rows
    factor = next((name for name in _FACTORS if hasattr(module, name)), "")
    return rows + [row._replace(router_loss=loss, router_factor=factor) for row in rows]


def _of_stock(module: nn.Module) -> tuple[type[ModelOutput], tuple[str, ...], tuple[str, ...]]:
    """Runs a replica of a model to learn what it returns.

    Returns:
        The class of its outputs, the names of the base model's results among them, and the
        arguments among labels and logits_to_keep that the base model gets.
    """
    random, ids = compare.Random(torch.device("cpu"), torch.float32), torch.zeros(4, 3).long()
    try:
        with compare.isolated(random.device):
            replica = _small(compare.bare_replica(module, stock_class(module)), module, random)
            replica.model = _Base(random.inputs(), None, module.config)
            alone = {"output_router_logits": False} if _is_mixture(module) else {}
            out = stock_forward(replica, ids, labels=ids, **alone)
            given = replica.model.facts[0][1]
            results = [name for name in base_results(type(out)) if out.get(name) is not None]
            return type(out), tuple(results), tuple(n for n in FusedCausalLM.needs if n in given)
    except Exception:  # the comparison says why
        return CausalLMOutputWithPast, (), ()


def _small(replica: nn.Module, module: nn.Module, random: compare.Random) -> nn.Module:
    """Gives a replica of a model a small head."""
    replica.config = copy.deepcopy(module.config)
    for owner in (replica.config, replica.config.get_text_config(), replica):
        if "vocab_size" in vars(owner):
            owner.vocab_size = _CLASSES
    replica.lm_head = random.linear(compare.WIDTH, _CLASSES, like=module.lm_head)
    return replica


class _Outputs(MoeModelOutputWithPast):
    """The results of a base model; a result that is not given is its own name."""

    def __getattr__(self, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return name


class _Base(nn.Module):
    """Replaces the base model; returns a given hidden state, and logits of a given router."""

    def __init__(self, hidden: Tensor, router: Tensor | None, config: Any) -> None:
        super().__init__()
        self.hidden, self.router, self.facts = hidden, router, []
        self.lm_head_multiplier = getattr(config, "lm_head_multiplier", None)

    def forward(self, input_ids: Tensor, **given: Any) -> MoeModelOutputWithPast:
        if given.get("return_dict"):  # stock may fill it in from the config; fused does not
            del given["return_dict"]
        texts = {name: str(value) for name, value in given.items() if value is not None}
        self.facts.append((str(input_ids), texts))
        names = base_results(CausalLMOutputWithPast)
        if self.router is None:
            return _Outputs(self.hidden, *names, "router_logits")
        routed = (self.hidden.flatten(0, 1) @ self.router,)
        routed = routed if given["output_router_logits"] else None
        return _Outputs(self.hidden, *names, routed)


def _replica(module: nn.Module, random: compare.Random) -> nn.Module:
    replica = _small(fused_replica(module), module, random)
    text = replica.config.get_text_config()
    for name in filter(None, {name for each in _CHANGES for name in (each.number, each.factor)}):
        value = getattr(text, name, None)
        if value is not None and not isinstance(getattr(type(text), name, 0), property):
            # A factor of 1 would hide whether it multiplies or divides.
            for owner in (text, *([replica] if name in vars(module) else [])):
                setattr(owner, name, 1.5 * value)
    if _is_mixture(module):
        if factor := getattr(replica, ROW).router_factor:
            setattr(replica, factor, 1.5)  # large enough to show in the sum with the loss
        replica.config.output_router_logits = True
    return replica


def _run(
    module: nn.Module, forward: compare.Forward, random: compare.Random
) -> tuple[list[Tensor], Any]:
    x, tensors, facts = random.inputs(), [], []
    labels = torch.randint(_CLASSES, x.shape[:2], generator=random.generator, device="cpu")
    labels[0, 1] = -100
    labels = labels.to(x.device)
    # Each argument's value is its name, so that _Base.facts shows which arguments it gets.
    names = arguments.of(stock_class(module)).names
    given = {name: name for name in names if name not in _CHOSEN}
    calls = [given, {"num_items_in_batch": 5}, {**given, "shift_labels": labels.flip(0)}]
    if mixture := _is_mixture(module):
        mask = (labels != labels[1, 1]).long()
        calls = [
            {**each, "attention_mask": mask} for each in (*calls, {"output_router_logits": False})
        ]
    experts = getattr(module, "num_experts", _EXPERTS)
    router = random(compare.WIDTH, experts) if mixture else None
    module.model = _Base(x, router, module.config)
    for options in calls:
        out = forward(module, labels, labels=labels, use_cache=False, marker=7, **options)
        names = base_results(type(out)) if not mixture else base_results(CausalLMOutputWithPast)
        facts.append((type(out), [out.get(name) for name in names], [*options]))
        tensors.extend(compare.with_gradients(module, out.loss, x, random))
        if mixture:
            facts.append((out.aux_loss is None, out.router_logits is None))
            tensors.extend(filter(torch.is_tensor, (out.aux_loss, *(out.router_logits or ()))))
    return tensors, facts + module.model.facts


class RecognisedCausalLM(Recognised, FusedCausalLM):
    """A language model of a class in no table; a mixture's loss includes its router's."""

    knows = None
    comparison = compare.Kind("a head and its loss", _replica, _run)

    @classmethod
    def probe(cls, module: nn.Module, row: Head, weight: Tensor, probes: Probes) -> str | None:
        return super().probe(module, row, module.lm_head.weight, probes)
