"""A sampler and a trainer that agree to the bit: generation against one forward of the batch."""

import torch
from tiny import VOCAB, llama

import torchweld


def logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The log-probability of each token, `(batch, length)`."""
    return logits.float().log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def sampled(model: torch.nn.Module, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens after the prompts, token by token over a cache, and their log-probabilities."""
    mask = prompts.ne(0)
    out = model.generate(
        prompts,
        attention_mask=mask,
        max_new_tokens=12,
        do_sample=True,
        eos_token_id=VOCAB,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = out.sequences[:, prompts.shape[1] :]
    return out.sequences, logprobs(torch.stack(out.logits, 1), tokens)


def trained(model: torch.nn.Module, sequences: torch.Tensor, start: int) -> torch.Tensor:
    """The log-probabilities of the same tokens, from one forward with gradients."""
    mask = sequences.ne(0)
    mask[:, start:] = True  # a sampled 0 is a token
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    out = model(sequences, attention_mask=mask, position_ids=positions, use_cache=False)
    return logprobs(out.logits[:, start - 1 : -1], sequences[:, start:])


device = "cuda" if torch.cuda.is_available() else "cpu"
model = llama().eval().to(device)
torchweld.fuse(model, batch_invariant=True)
prompts = torch.tensor([[0, 0, 0, 5, 6, 7], [3, 4, 5, 6, 7, 8], [0, 9, 8, 7, 6, 5]], device=device)
sequences, of_sampler = sampled(model, prompts)
of_trainer = trained(model, sequences, prompts.shape[1])
assert torch.equal(of_trainer, of_sampler), (of_trainer - of_sampler).abs().max()

# A row alone, and beside other rows.
alone = trained(model, sequences[1:2], prompts.shape[1])
assert torch.equal(alone, of_trainer[1:2])
of_trainer.sum().backward()
print(f"{of_sampler.numel()} log-probabilities of sampler and trainer are equal to the bit")
