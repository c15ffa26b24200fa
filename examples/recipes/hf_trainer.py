"""transformers' Trainer, with the fused model and its fused loss."""

from tiny import SETTINGS, check, llama, token_ids
from transformers import Trainer, TrainingArguments

import torchweld


def train(fused: bool) -> list[float]:
    model = llama()
    if fused:
        print(torchweld.fuse(model, loss=True))
    rows = [{"input_ids": ids, "labels": ids} for ids in token_ids()]
    trainer = Trainer(model, TrainingArguments(**SETTINGS), train_dataset=rows)
    trainer.train()
    return [step["loss"] for step in trainer.state.log_history if "loss" in step]


check(train, "attention", "rms_norm_linears", "gated_mlp", "linear_cross_entropy")
