"""attn_implementation="torchweld" on every language model of transformers, causal or with an
encoder: it gives what eager attention gives, or is refused in one sentence.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from tiny_models import VOCAB, causal_models, encoder_models, tiny_model  # noqa: E402
from torchweld.integrations.attention import fallback  # noqa: E402
from torchweld.integrations.attention import models as hf_models  # noqa: E402

LENGTH = 9
# First token and number of tokens of each row; None: no mask is given.
BATCHES = {"no mask": None, "left and right padding": [(0, 9), (3, 6), (7, 2), (0, 4)]}

# Model types that can't be built tiny, and why.
UNBUILT = {
    "blt": "bytes are grouped into patches by a second model",
    "dots3_note": "its config is not read back; dots3_note_text has the class",
    "gemma3n": "needs timm; gemma3n_text has the attention",
    "gemma4_assistant": "shares the keys of another model",
    "gemma4_unified_assistant": "shares the keys of another model",
    "musicgen": "input_ids are the tokens of several codebooks",
    "musicgen_melody": "input_ids are the tokens of several codebooks",
}
RELEASE = tuple(int(v) for v in transformers.__version__.split(".")[:2])
if RELEASE < (5, 23):
    UNBUILT["cohere_compass_text"] = "its rotary embedding fails in this transformers"
if RELEASE < (5, 15):
    UNBUILT["dbrx"] = "its experts have another width in this transformers"
if RELEASE < (5, 20):
    UNBUILT["zamba"] = "its config is refused by this transformers"
# Model types whose own SDPA attention differs from their eager attention.
UNEQUAL = ("doge", "moshi", "umt5") if RELEASE < (5, 20) else ()


# Model types whose attention runs something else than the op, and why.
ANOTHER_PATH = {
    "doge": "it makes 4-D masks",
    "exaone": "it has no model class, so that it gets whole masks",
    "gemma4_unified": "its mask has a function of its own",
    "internlm3": "it has no model class, so that it gets whole masks",
    "iquestcoder": "it has no model class, so that it gets whole masks",
    "layoutlm": "it makes 4-D masks",
    "qwen4_exp": "it makes 4-D masks",
    "qwen4_exp_text": "it makes 4-D masks",
    "sarvam_mla": "it has no model class, so that it gets whole masks",
    "sarvam_moe": "it has no model class, so that it gets whole masks",
    "switch_transformers": "it makes 4-D masks",
    "t5gemma2": "its mask has a function of its own",
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # nothing here is worth a second one
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(before)


def build(kind: str, name: str, implementation: str, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    return tiny_model(kind, name, implementation, **more).float().eval()


def inputs(rows: list[tuple[int, int]] | None) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(1)
    count = 2 if rows is None else len(rows)
    ids = torch.randint(3, VOCAB, (count, LENGTH), generator=generator)
    tokens = torch.ones(count, LENGTH, dtype=torch.bool)
    if rows is None:
        return {"input_ids": ids}, tokens
    position = torch.arange(LENGTH)
    for row, (first, length) in enumerate(rows):
        tokens[row] = (position >= first) & (position < first + length)
    return {"input_ids": ids.where(tokens, 0), "attention_mask": tokens.long()}, tokens


def logits(model: nn.Module, values: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        if model.config.is_encoder_decoder:
            values = {**values, "decoder_input_ids": values["input_ids"]}
        out = model(**values, use_cache=False) if model.can_generate() else model(**values)
        return out.logits


def batches(model: nn.Module) -> Iterator[tuple[str, dict[str, Tensor], Tensor]]:
    for batch, rows in BATCHES.items():
        yield batch, *inputs(rows)
    if "position_ids" in inspect.signature(model.forward).parameters and model.can_generate():
        values, tokens = inputs(None)
        positions = torch.tensor([[*range(5), *range(LENGTH - 5)], range(LENGTH)])
        yield "packed documents", {**values, "position_ids": positions}, tokens


def assert_equal_to_eager(ours: nn.Module, stock: nn.Module) -> None:
    for batch, values, tokens in batches(ours):
        want = logits(stock, values)[tokens]
        torch.testing.assert_close(
            logits(ours, values)[tokens],
            want,
            rtol=0,
            atol=1e-4 * want.abs().max().item(),
            msg=lambda text, batch=batch: f"{batch}: {text}",
        )


def stock_model(kind: str, name: str, **changes: Any) -> nn.Module:
    stock = build(kind, name, "eager", **changes)
    for parameter in stock.parameters():
        if parameter.dim() == 2:  # with the usual 0.02 every key counts the same
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return stock


def counterpart(stock: nn.Module, kind: str, name: str, **changes: Any) -> nn.Module | None:
    """The stock model on torchweld's attention; None if transformers itself refuses it."""
    try:
        ours = build(kind, name, "torchweld", **changes)
    except (KeyError, ValueError) as error:
        assert "torchweld" in str(error)
        return None
    ours.load_state_dict(stock.state_dict())
    return ours


@pytest.mark.parametrize(("kind", "name"), causal_models(), ids=lambda v: v)
def test_equals_eager_or_is_refused(kind, name):
    if kind in UNBUILT:
        pytest.skip(f"can't be built tiny: {UNBUILT[kind]}")
    if kind in UNEQUAL:
        pytest.skip("in this transformers its SDPA does not equal its eager attention")
    stock = stock_model(kind, name)
    ours, refusal = counterpart(stock, kind, name), hf_models.refusal(type(stock))
    assert refusal is None or "\n" not in refusal
    if ours is None:
        assert refusal is not None
        return
    try:
        assert_equal_to_eager(ours, stock)
    except ValueError as error:
        if refusal is None:  # the class's requests are known when a layer runs
            assert str(error).startswith('attn_implementation="torchweld" has no ')
        else:
            assert str(error).partition(";")[2] == refusal.partition(";")[2]
    assert kind in ANOTHER_PATH or refusal is not None or not fallback._warned


@pytest.mark.parametrize(("kind", "name"), encoder_models(), ids=lambda v: v)
def test_with_an_encoder_equals_eager_or_is_refused(kind, name):
    if kind in UNEQUAL:
        pytest.skip("in this transformers its SDPA does not equal its eager attention")
    try:
        stock = stock_model(kind, name, is_decoder=False)
        assert_equal_to_eager(stock, stock)
    except Exception as error:
        pytest.skip(f"can't be built tiny: {type(error).__name__}")
    ours = counterpart(stock, kind, name, is_decoder=False)
    if ours is None:
        return
    try:
        assert_equal_to_eager(ours, stock)
    except ValueError as error:  # the class or one of its parts
        assert str(error).startswith("torchweld: attn_implementation must be")
    assert kind in ANOTHER_PATH or not fallback._warned
