"""TRL's GRPOTrainer; one op computes the log-probabilities and the entropies."""

from datasets import Dataset
from tiny import SETTINGS, check, llama, tokenizer
from trl import GRPOConfig, GRPOTrainer

import torchweld


class TokenLogprobs(GRPOTrainer):
    """For models of text, trained in one process."""

    def _get_per_token_logps_and_entropies(
        self, model, ids, mask, length, batch_size=None, compute_entropy=False, **options
    ):
        model = self.accelerator.unwrap_model(model)
        hidden = model.get_decoder()(ids, attention_mask=mask, use_cache=False).last_hidden_state
        hidden, target = hidden[:, -length - 1 : -1], ids[:, -length:]
        settings = {"temperature": self.temperature, "entropy": compute_entropy}
        weight = model.get_output_embeddings().weight
        logprobs, entropy = torchweld.linear_token_logprobs(hidden, weight, target, **settings)
        return logprobs, entropy if compute_entropy else None, None


def train(fused: bool) -> list[float]:
    model = llama()
    if fused:
        torchweld.fuse(model)
    trainer = (TokenLogprobs if fused else GRPOTrainer)(
        model,
        lambda completion_ids, **_: [float(len(set(ids))) for ids in completion_ids],
        GRPOConfig(num_generations=4, max_completion_length=8, **SETTINGS),
        train_dataset=Dataset.from_dict({"prompt": ["t3 t4 t5", "t6 t7", "t8"]}),
        processing_class=tokenizer(),
    )
    trainer.train()
    return [float(step["grad_norm"]) for step in trainer.state.log_history if "loss" in step]


check(train, "attention", "rms_norm_linears", "gated_mlp", "linear_token_logprobs")
