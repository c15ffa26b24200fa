"""The model, the tokens and the comparison of the recipes: a small Llama with random weights."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

STEPS, VOCAB = 3, 64
FOLDER = tempfile.TemporaryDirectory()  # removed at exit
# For the arguments of any trainer of transformers or TRL.
SETTINGS = {
    "output_dir": FOLDER.name,
    "max_steps": STEPS,
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "per_device_train_batch_size": 4,
    "report_to": [],
    "disable_tqdm": True,
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).train()


def token_ids() -> list[list[int]]:
    """Four rows of 16 tokens for each step."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCAB, (4 * STEPS, 16), generator=generator).tolist()


def batches() -> Sequence[torch.Tensor]:
    """The rows of every step, `(4, 16)` int64."""
    return torch.tensor(token_ids()).split(4)


def tokenizer(size: int = VOCAB) -> PreTrainedTokenizerFast:
    """Makes token i of the word ti."""
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(size)}, unk_token="t1"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t2")


class Ops(TorchDispatchMode):
    """Collects the names of torchweld's ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "torchweld":
            self.names.add(func.name().partition("::")[2])
        return func(*args, **(kwargs or {}))


def check(train: Callable[[bool], list[float]], *ops: str) -> None:
    """Compares the numbers of stock steps with those of fused ones.

    Args:
        train: makes a model and trains it, fused if its argument is true. Returns the loss, or any
            other number, of each step.
        ops: the first words of the ops that the fused steps must have run backward.
    """
    stock = train(False)
    with Ops() as ran:
        fused = train(True)
    print("stock", stock, "fused", fused, "ops", sorted(ran.names), sep="\n")
    assert len(stock) >= STEPS and len(set(stock)) > 1
    torch.testing.assert_close(torch.tensor(fused), torch.tensor(stock), rtol=1e-4, atol=1e-4)
    backward = tuple(name for name in ran.names if name.endswith("_backward"))
    for op in ops:
        assert any(name.startswith(op) for name in backward), f"{op} did not run"
