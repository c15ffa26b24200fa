"""The attention of transformers' families runs the op: trained, compiled, exported and packed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

from attention_paths import FAMILIES, WAYS, attention_calls, encodes  # noqa: E402
from torchweld.integrations.attention import models as hf_models  # noqa: E402
from torchweld.integrations.fusion.layers import families  # noqa: E402

TABLE = Path(__file__).resolve().parent.parent / "docs" / "attention.part.md"
# The cells of a family: how many of its calls leave the op.
CELLS = {
    name: dict(zip(WAYS, cells.split(" | "), strict=True))
    for name, cells in re.findall(r"^\| `(\w+)` \| (.+) \|$", TABLE.read_text(), re.M)
}


def test_the_families_that_fuse_knows_are_among_them():
    known = {f"{family.prefix}ForCausalLM" for family in families.FAMILIES.values()}
    assert known <= FAMILIES.keys()


# Families whose masks differ; the others are traced for the table of the documentation.
TRACED = (
    "LlamaForCausalLM", "MistralForCausalLM", "Gemma2ForCausalLM", "GPT2LMHeadModel",
    "GptOssForCausalLM", "Llama4ForCausalLM", "BertForMaskedLM", "ModernBertForMaskedLM",
    "BartForConditionalGeneration", "T5ForConditionalGeneration",
)  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_attention_call_runs_the_op(name, way):
    if way == "packed" and encodes(name):
        pytest.skip("an encoder takes documents as rows of a padded batch")
    if way in ("compiled", "exported") and name not in TRACED:
        pytest.skip("traced for the table of the documentation alone")
    if (refusal := hf_models.refusal(getattr(transformers, name))) is not None:
        pytest.skip(refusal)  # in older versions of transformers
    calls = attention_calls(name, way)
    assert CELLS[name][way] == f"{calls.total() - calls['the op']} of {calls.total()}"
    assert calls.total() == (6 if name.endswith("ForConditionalGeneration") else 2)
    assert calls.total() == calls["the op"], calls
