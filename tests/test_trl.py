"""TRL's SFTTrainer with packing, with attn_implementation="torchweld", on the CPU."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")

from tokenizers import Tokenizer, models  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402

from test_hf_masks import Calls, expect  # noqa: E402
from torchweld.integrations import register_attention  # noqa: E402

LENGTHS = [5, 12, 7, 20, 4, 3, 9, 6]
CASES = {
    "bfd": {"packing": True, "packing_strategy": "bfd"},
    "bfd_split": {"packing": True, "packing_strategy": "bfd_split"},
    "padding_free": {"padding_free": True, "max_length": None},
    "wrapped": {"packing": True, "packing_strategy": "wrapped"},
}


def tokenizer():
    vocab = {f"t{i}": i for i in range(98)} | {"<pad>": 98, "<eos>": 99}
    words = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def loss_and_norm(model, rows):
    """The mean loss over the predicted tokens of all rows, each alone, and its gradient's norm."""
    model.zero_grad()
    count = sum((labels[1:] != -100).sum().item() for _, labels, _ in rows)
    total = 0.0
    for tokens, labels, mask in rows:
        predicted = (labels[1:] != -100).sum().item()
        if predicted:
            inputs = {"input_ids": tokens[None], "labels": labels[None]}
            if mask is not None:
                inputs["attention_mask"] = mask[None]
            loss = model(**inputs, use_cache=False).loss * predicted / count
            loss.backward()
            total += loss.item()
    return total, torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()


def rows_of(batch):
    """(tokens, labels, mask) of each document, or of each row where documents are not kept."""
    if "attention_mask" in batch:
        return list(zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True))
    positions = batch["position_ids"][0]
    starts = (positions == 0).nonzero().flatten().tolist()
    lengths = [b - a for a, b in zip(starts, [*starts[1:], len(positions)], strict=True)]
    parts = (batch[name][0].split(lengths) for name in ("input_ids", "labels"))
    return [(tokens, labels, None) for tokens, labels in zip(*parts, strict=True)]


@pytest.mark.parametrize("case", CASES)
def test_losses_equal_those_of_documents_one_by_one(case, tmp_path):
    """Each step's loss and gradient; "wrapped" lets documents of a row see each other."""
    register_attention()
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(98, (n,), generator=generator).tolist() for n in LENGTHS]
    torch.manual_seed(0)
    stock = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=100,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=98,
            eos_token_id=99,
        )
    )
    for parameter in stock.parameters():  # with the usual 0.02 every key counts the same
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    model = copy.deepcopy(stock)
    model.set_attn_implementation("torchweld")
    batches = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: batches.append(dict(kwargs)), with_kwargs=True
    )
    config = trl.SFTConfig(
        **{"max_length": 24, **CASES[case]},
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        max_steps=2,
        learning_rate=0.0,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    with Calls() as calls, warnings.catch_warnings():
        warnings.filterwarnings("error", "torchweld:")  # a call that leaves the op
        trainer = trl.SFTTrainer(
            model,
            args=config,
            train_dataset=datasets.Dataset.from_dict({"input_ids": documents}),
            processing_class=tokenizer(),
        )
        trainer.train()
    expect(calls, 2 * len(batches))
    steps = [each for each in trainer.state.log_history if "loss" in each]
    assert len(batches) == len(steps) == 2
    assert all(("attention_mask" in batch) == (case == "wrapped") for batch in batches)
    for batch, step in zip(batches, steps, strict=True):
        loss, norm = loss_and_norm(stock, rows_of(batch))
        assert step["loss"] == pytest.approx(loss, rel=1e-5)
        assert float(step["grad_norm"]) == pytest.approx(norm, rel=1e-4)
