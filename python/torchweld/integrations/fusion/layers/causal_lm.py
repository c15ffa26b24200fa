"""Defines language models whose training step computes head and loss as one op.

``fuse(model, loss=True)`` gives a model a class whose forward, in training mode with labels, runs
:func:`torchweld.linear_cross_entropy` on the last hidden state: the logits are never whole in
memory and are not returned. Every other call is the stock forward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.modeling_outputs import (
    CausalLMOutputWithCrossAttentions,
    CausalLMOutputWithPast,
)
from transformers.utils import ModelOutput

from torchweld import _library
from torchweld.integrations import recorder
from torchweld.integrations.fusion.probes import Probes
from torchweld.ops.stock import is_plain

from .fused_module import (
    ARGUMENTS,
    KEEP,
    ROW,
    FusedModule,
    Replacement,
    below,
    call_arguments,
    is_fused,
    stock_forward,
)
from .linears import has_classes, sharded_loss


def base_results(output: type[ModelOutput]) -> tuple[str, ...]:
    """Returns the names of an output class's fields that the base model computes."""
    names = (each.name for each in dataclasses.fields(output))
    return tuple(name for name in names if name not in ("loss", "logits", "aux_loss"))


class Logits(NamedTuple):
    """Maps a number of a model's config to the option of the op that changes the logits so."""

    option: str | None = None  # None if the model leaves the logits as they are
    number: str = ""  # the number's name in the config
    inverse: bool = False  # whether the option is 1 over the number
    factor: str = ""  # the name of a number that multiplies the logits in front of a softcap

    def __call__(self, config: Any) -> dict[str, Any]:
        if self.option is None:
            return {}
        # NOTE: torch.compile does not trace get_text_config.
        owner = config if hasattr(config, self.number) else config.get_text_config()
        value = getattr(owner, self.number)
        if self.factor:  # c tanh(f z / c) is the cap c / f of z, times f
            factor = getattr(owner, self.factor)
            return {"softcap": value / factor, "temperature": 1 / factor}
        return {self.option: 1 / value if self.inverse else value}


class Head(NamedTuple):
    """Describes the head of a model family."""

    options: Logits
    base: str = "model"  # the name of the base model
    output: type[ModelOutput] = CausalLMOutputWithPast
    results: tuple[str, ...] = base_results(CausalLMOutputWithPast)  # computed by the base model
    router_loss: Callable[..., Tensor] | None = None  # balances the load of a mixture's experts
    router_factor: str = ""  # the model's attribute that multiplies router_loss's result
    passes: tuple[str, ...] = ()  # which of labels, logits_to_keep the base model also gets


GPT2_HEAD = Head(
    Logits(),
    "transformer",
    CausalLMOutputWithCrossAttentions,
    base_results(CausalLMOutputWithCrossAttentions),
)


def refusal(model: nn.Module) -> str | None:
    """Returns why the loss of a model must stay stock, or None."""
    head = model._modules.get("lm_head")
    if has_classes(head):
        if torch.compiler.is_compiling():
            return "lm_head is sharded, and a compiled graph gathers its logits"
    elif not is_plain(head, nn.Linear):
        return "lm_head is not torch's Linear without hooks (LoRA, quantised or otherwise replaced)"
    elif type(head.weight) is not nn.Parameter or type(head.weight.data) is not Tensor:
        return "lm_head.weight is not a plain parameter (sharded or quantised)"
    # NOTE: reading model.loss_function may emit a warning about an unknown loss_type, and
    # torch.compile can't trace the warning. So its lookup is repeated here.
    found = LOSS_MAPPING.get(getattr(model, "loss_type", None), ForCausalLMLoss)
    if getattr(model, "_loss_function", found) is not ForCausalLMLoss:
        return "the model's loss is not transformers' ForCausalLMLoss"
    return None


def returns_loss_alone(model: nn.Module, labels: Any, logits_to_keep: Any, named: Any) -> bool:
    """Whether a call of a model wants a loss and can do without logits.

    ``named`` is the call's ``return_dict``: a tuple would have other results in the logits' place.
    """
    whole = isinstance(logits_to_keep, int) and logits_to_keep == 0
    named = model.config.return_dict if named is None else named
    wanted = is_fused(model) and labels is not None and model.training and whole and named
    return bool(wanted) and refusal(model) is None


def causal_loss(
    head: nn.Linear,
    hidden: Tensor,
    labels: Tensor,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    *,
    keep: str = "auto",
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Tensor:
    """Computes transformers' ForCausalLMLoss of ``head(hidden)``; ignores other arguments too.

    Args:
        head: The language model's head, weight ``(N, K)``.
        hidden: ``(batch, seqlen, K)``.
        labels: ``(batch, seqlen)``, of the same positions as hidden.
        num_items_in_batch: Divides the sum of the losses; None for their mean.
        shift_labels: ``(batch, seqlen)`` labels of the next positions, in place of ``labels``.
        keep, options: Arguments of ``linear_cross_entropy``; ``options`` change the logits.
    """
    target = labels if shift_labels is None else shift_labels
    op = sharded_loss if has_classes(head) else _library.ops.linear_cross_entropy
    loss = op(
        hidden,
        head.weight,
        target.to(hidden.device),
        head.bias,
        reduction="mean" if num_items_in_batch is None else "sum",
        ignore_index=ignore_index,
        shift=int(shift_labels is None),
        keep=keep,
        **(options or {}),
    )
    if recorder.calls is not None:
        recorder.record(head)
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


def set_keep(model: nn.Module, keep: str) -> None:
    """Sets the option ``keep`` of a model's fused losses."""
    for module in model.modules():
        if isinstance(module, FusedCausalLM):
            vars(module)[KEEP] = keep


class FusedCausalLM(FusedModule):
    """A ``...ForCausalLM`` that returns no logits in training mode with labels.

    The base model gets all arguments but labels and logits_to_keep, unless ``Head.passes`` has one.
    """

    kind = "loss"
    needs = ("labels", "logits_to_keep")
    knows = (
        *("input_ids", "attention_mask", "position_ids", "cache", "inputs_embeds", "use_cache"),
        *needs,
    )

    @staticmethod
    def replacement(path: str, module: nn.Module, row: Head) -> Replacement:
        return Replacement(below(path, "lm_head"), module.lm_head, (module,))

    @staticmethod
    def label(module: nn.Module, row: Head) -> str:
        op = (
            "vocab_parallel_linear_cross_entropy"
            if has_classes(module.lm_head)
            else "linear_cross_entropy"
        )
        return f"{op} (lm_head -> loss)"

    @staticmethod
    def probe(module: nn.Module, row: Head, weight: Tensor, probes: Probes) -> str | None:
        return probes.refusal("linear_cross_entropy", module.lm_head.weight)

    @staticmethod
    def refusal(module: nn.Module, row: Head) -> str | None:
        return refusal(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = call_arguments(self, args, kwargs)
        if given is None:
            return stock_forward(self, *args, **kwargs)
        labels, to_keep = given.pop("labels", None), given.pop("logits_to_keep", 0)
        if not returns_loss_alone(self, labels, to_keep, given.get("return_dict")):
            return stock_forward(self, *args, **kwargs)
        row: Head = getattr(self, ROW)
        names = getattr(self, ARGUMENTS).names
        if "output_router_logits" in names and given.get("output_router_logits") is None:
            given["output_router_logits"] = self.config.output_router_logits
        passed = {"labels": labels, "logits_to_keep": to_keep}
        outputs = getattr(self, row.base)(**given, **{name: passed[name] for name in row.passes})
        loss = causal_loss(
            self.lm_head,
            outputs.last_hidden_state,
            labels,
            **{name: value for name, value in given.items() if name not in names},
            keep=getattr(self, KEEP, "auto"),
            options=row.options(self.config),
        )
        found = {name: getattr(outputs, name) for name in row.results}
        if row.router_loss is not None and given["output_router_logits"]:
            per_token, mask = self.num_experts_per_tok, given.get("attention_mask")
            aux = row.router_loss(outputs.router_logits, self.num_experts, per_token, mask)
            loss = loss + getattr(self, row.router_factor) * aux.to(loss.device)
            found["aux_loss"] = aux
        return row.output(loss=loss, **found)


class FusedGPT2LMHead(FusedCausalLM):
    """A GPT2LMHeadModel that returns no logits in training mode with labels."""

    knows = (
        *FusedCausalLM.knows,
        *("token_type_ids", "encoder_hidden_states", "encoder_attention_mask"),
    )
