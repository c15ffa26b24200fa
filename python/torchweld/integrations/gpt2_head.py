"""A GPT2LMHeadModel whose training step computes head and loss as one op."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

from .causal_lm import FusedHead, causal_loss, keep_of, returns_loss_alone
from .part import stock_forward


class FusedGPT2LMHead(FusedHead):
    """A GPT2LMHeadModel that returns no logits in training mode with labels."""

    # NOTE: the signature must be the stock one, because transformers' Trainer reads the names of
    # its arguments to choose the columns of a data set.
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
        if not returns_loss_alone(self, labels, logits_to_keep, kwargs.get("return_dict")):
            return stock_forward(
                self, input_ids, labels=labels, logits_to_keep=logits_to_keep, **inputs
            )
        outputs = self.transformer(input_ids, **inputs)
        return CausalLMOutputWithCrossAttentions(
            loss=causal_loss(
                self.lm_head,
                outputs.last_hidden_state,
                labels,
                **kwargs,
                keep=keep_of(self),
            ),
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
        )
