"""TRL's SFTTrainer, with the fused model and its fused loss."""

from datasets import Dataset
from tiny import SETTINGS, check, llama, token_ids, tokenizer
from transformers import Trainer
from trl import SFTConfig, SFTTrainer

import torchweld


class FusedLoss(SFTTrainer):
    """Takes the model's loss. TRL's own also logs the entropy and the accuracy of the tokens."""

    def compute_loss(self, *args, **kwargs):
        return Trainer.compute_loss(self, *args, **kwargs)


def train(fused: bool) -> list[float]:
    model = llama()
    if fused:
        torchweld.fuse(model, loss=True)
    rows = Dataset.from_dict({"input_ids": token_ids()})
    trainer = (FusedLoss if fused else SFTTrainer)(
        model, SFTConfig(**SETTINGS), train_dataset=rows, processing_class=tokenizer()
    )
    trainer.train()
    return [step["loss"] for step in trainer.state.log_history if "loss" in step]


check(train, "attention", "rms_norm_linears", "gated_mlp", "linear_cross_entropy")
