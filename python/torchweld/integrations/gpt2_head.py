"""A GPT2LMHeadModel whose training step computes head and loss as one op.

``fuse(model, loss=True)`` gives a model this class. In training mode with labels it runs
:func:`torchweld.linear_cross_entropy` on the last hidden state, so the logits are never whole in
memory and are not returned. Every other call is the stock forward.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel

from torchweld import _library
from torchweld.ops.stock import is_plain

from . import measure

OP = "linear_cross_entropy"


def refusal(model: GPT2LMHeadModel) -> str | None:
    """Why the loss of a model must stay stock, or None."""
    head = model._modules.get("lm_head")
    if not is_plain(head, nn.Linear):
        return "lm_head is not torch's Linear without hooks (LoRA, quantised or otherwise replaced)"
    if type(head.weight) is not nn.Parameter or type(head.weight.data) is not Tensor:
        return "lm_head.weight is not a plain parameter (sharded or quantised)"
    # NOTE: model.loss_function warns of an unknown loss_type, which torch.compile can't trace.
    found = LOSS_MAPPING.get(getattr(model, "loss_type", None), ForCausalLMLoss)
    if getattr(model, "_loss_function", found) is not ForCausalLMLoss:
        return "the model's loss is not transformers' ForCausalLMLoss"
    return None


def causal_loss(
    head: nn.Linear,
    hidden: Tensor,
    labels: Tensor,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """transformers' ForCausalLMLoss of ``head(hidden)``.

    Args:
        head: The language model's head, weight ``(N, K)``.
        hidden: ``(batch, seqlen, K)``.
        labels: ``(batch, seqlen)``, of the same positions as hidden.
        num_items_in_batch: The sum of the losses is divided by it; None: their mean.
        ignore_index: Labels without a loss.
        shift_labels: ``(batch, seqlen)`` labels of the next positions, in place of ``labels``.
        **kwargs: What transformers ignores too.
    """
    target = labels if shift_labels is None else shift_labels
    loss = _library.ops.linear_cross_entropy(
        hidden,
        head.weight,
        target.to(hidden.device),
        head.bias,
        reduction="mean" if num_items_in_batch is None else "sum",
        ignore_index=ignore_index,
        shift=int(shift_labels is None),
    )
    if measure.seen is not None:
        measure.note(head)
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


class FusedGPT2LMHeadModel(GPT2LMHeadModel):
    """A GPT2LMHeadModel that returns no logits in training mode with labels."""

    # NOTE: the stock forward's signature, by which transformers' Trainer chooses columns.
    def forward(
        self,
        input_ids: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> Any:
        inputs = {
            "past_key_values": past_key_values,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
            "encoder_hidden_states": encoder_hidden_states,
            "encoder_attention_mask": encoder_attention_mask,
            "use_cache": use_cache,
            **kwargs,
        }
        whole = isinstance(logits_to_keep, int) and logits_to_keep == 0
        # A tuple would have other results where the logits are expected.
        named = kwargs.get("return_dict")
        named = self.config.return_dict if named is None else named
        if labels is None or not (self.training and whole and named) or refusal(self) is not None:
            return GPT2LMHeadModel.forward(
                self, input_ids, labels=labels, logits_to_keep=logits_to_keep, **inputs
            )
        outputs = self.transformer(input_ids, **inputs)
        return CausalLMOutputWithCrossAttentions(
            loss=causal_loss(self.lm_head, outputs.last_hidden_state, labels, **kwargs),
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
        )


# transformers writes this name into config.json and looks the kind of model up by it. pickle finds
# the class by its __qualname__.
FusedGPT2LMHeadModel.__name__ = GPT2LMHeadModel.__name__


def switch_loss(model: GPT2LMHeadModel) -> None:
    """Has a model compute its head and loss as one op, from its next training step on."""
    model.__class__ = FusedGPT2LMHeadModel


def restore_loss(model: nn.Module) -> bool:
    """Undoes :func:`switch_loss`; False when there was nothing to undo."""
    if type(model) is not FusedGPT2LMHeadModel:
        return False
    model.__class__ = GPT2LMHeadModel
    return True
