"""transformers' Trainer and TRL's SFTTrainer train a fused Llama as they train the stock one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.testing import assert_close

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from recipes.tiny import tokenizer  # noqa: E402
from test_fuse import Calls  # noqa: E402
from test_fuse_families import LAYERS, tiny  # noqa: E402
from tiny_models import VOCAB  # noqa: E402
from torchweld.integrations import fuse  # noqa: E402

STEPS, ROWS = 6, 24


def documents(lengths=(5, 12, 8, 16)):
    """Token ids of documents of several lengths."""
    generator = torch.Generator().manual_seed(2)
    count = -(-ROWS // len(lengths))
    return [
        torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        for length in lengths * count
    ]


def arguments(cls, folder, **changes):
    return cls(
        folder,
        **{
            "max_steps": STEPS,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "report_to": [],
            "use_cpu": True,
            "save_strategy": "no",
            "seed": 5,
            **changes,
        },
    )


def losses(trainer):
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def pair(loss, adapted=lambda model: model):
    stock = adapted(tiny("Llama", attention_dropout=0.0))
    model = copy.deepcopy(stock)
    fuse(model, loss=loss)
    return model, stock


def assert_same(model, stock):
    for (name, ours), want in zip(model.named_parameters(), stock.parameters(), strict=True):
        assert_close(ours, want, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("loss", [False, True])
def test_trainer(tmp_path, loss):
    """Accumulated gradients, clipping, evaluation, a checkpoint, and going on from it."""
    rows = [{"input_ids": ids} for ids in documents()]

    def collate(batch):
        length = max(len(row["input_ids"]) for row in batch)
        ids = torch.zeros(len(batch), length, dtype=torch.int64)
        labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
        for index, row in enumerate(batch):
            kept = slice(0, len(row["input_ids"]))
            ids[index, kept] = labels[index, kept] = torch.tensor(row["input_ids"])
            mask[index, kept] = 1
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    found, trainers = [], []
    for index, model in enumerate(pair(loss)):
        options = arguments(
            transformers.TrainingArguments,
            tmp_path / str(index),
            eval_strategy="steps",
            eval_steps=STEPS,
            save_strategy="steps",
            save_steps=STEPS // 2,
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(
            model, options, train_dataset=rows, eval_dataset=rows[:4], data_collator=collate
        )
        with Calls() as calls:
            found.append(losses(trainer))
        evaluated = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
        found[-1] += evaluated
        trainers.append(trainer)
        heads = [name for name in calls.names if "linear_cross_entropy" in name]
        assert bool(heads) == (loss and index == 0)
    assert len(found[0]) == STEPS + 1
    assert_close(*(torch.tensor(each) for each in found), rtol=1e-4, atol=1e-4)
    model, stock = (trainer.model for trainer in trainers)
    assert_same(model, stock)

    # The checkpoint of the fused model is one of transformers, and training goes on from it.
    folder = tmp_path / "0" / f"checkpoint-{STEPS // 2}"
    again = transformers.LlamaForCausalLM.from_pretrained(folder)
    assert type(again) is transformers.LlamaForCausalLM
    last = [parameter.detach().clone() for parameter in model.parameters()]
    trainers[0].train(resume_from_checkpoint=str(folder))
    assert_close([*model.parameters()], last, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", ["padded", "packed, recomputed", "lora", "peft_config"])
def test_sft_trainer(tmp_path, case):
    """TRL computes its own loss of the last hidden states, so the head stays stock."""
    trl = pytest.importorskip("trl")
    peft = pytest.importorskip("peft")
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"input_ids": documents()})
    packing = case.startswith("packed")
    lora = None
    if case in ("lora", "peft_config"):
        lora = peft.LoraConfig(r=4, target_modules="all-linear")
    before = (lambda model: peft.get_peft_model(model, lora)) if case == "lora" else (lambda m: m)
    found, models, trained = [], pair(True, before), []
    for index, model in enumerate(models):
        options = arguments(
            trl.SFTConfig,
            tmp_path / str(index),
            max_steps=2,
            packing=packing,
            max_length=32,
            bf16=False,
            gradient_checkpointing=packing,
        )
        torch.manual_seed(5)  # for the adapters
        late = lora if case == "peft_config" else None
        trainer = trl.SFTTrainer(
            model, options, train_dataset=rows, processing_class=tokenizer(VOCAB), peft_config=late
        )
        trained.append(trainer.model)
        with Calls() as calls:
            found.append(losses(trainer))
        if index == 0:
            # Two steps of two batches, computed twice with gradient checkpointing.
            count = 4 * LAYERS * (1 + packing)
            whole = ["gated_linear_pair_forward", "rms_norm_linears_forward"]
            ops = ["attention_forward", *(["gated_activation"] if lora else whole)]
            assert {op: calls.names[f"torchweld::{op}"] for op in ops} == dict.fromkeys(ops, count)
    assert_close(*(torch.tensor(each) for each in found), rtol=1e-4, atol=1e-4)
    assert_same(*trained)
