"""Training steps of encoders and hybrid models on a GPU: stock, compiled blocks and `fuse`, bf16.

The models are SigLIP's So400m vision tower, ViT-L/16 of transformers and of timm, BERT-base,
T5-large with as many labels as tokens, Whisper-large-v3 with 128 tokens of 30 seconds, eight layers
of Qwen3.5-4B, and six layers of Gemma 4, the last of them with heads of 512. Their weights and
inputs are random.

The last two have no head: the logits of Qwen3.5's 16,384 tokens would need 57 GB beside 76 GB of
weights, optimizer and activations. The gated delta rule is transformers' in both variants.

All variants train the same parameters with the same optimizer, so one copy of them is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchweld
from torchweld.tuning.timer import interleaved
from torchweld_bench.cases import compared, drawn, judged_loss
from torchweld_bench.common import free, installed
from torchweld_bench.models import COMPILED, STOCK, compiled_copy, copy_of, stepper
from torchweld_bench.results import Failure, Row

_DEVICE, _BACKEND = "cuda", "inductor"
_ROUNDS = 5
_LOSS_RTOL = 1e-2
_NOISE = 0.5  # std of the target's noise: an error of a tenth of it changes the loss by _LOSS_RTOL


class _Case(NamedTuple):
    name: str
    model: str  # a class of transformers, or a model of timm
    batch: int
    seqlen: int
    sizes: dict[str, Any]
    inputs: Callable[[_Case], dict[str, Any]]
    compiled: bool = True
    end: str = ""

    @property
    def label(self) -> str:
        return f"{self.name} training step ({self.batch}, {self.seqlen}) bfloat16{self.end}"


def _tokens(case: _Case) -> Tensor:
    return torch.randint(case.sizes["vocab_size"], (case.batch, case.seqlen), device=_DEVICE)


def _pixels(case: _Case) -> dict[str, Any]:
    side = case.sizes["image_size"]
    return {"pixel_values": drawn(case.batch, 3, side, side, device=_DEVICE)}


def _pixels_of_timm(case: _Case) -> dict[str, Any]:
    side = case.sizes["img_size"]
    return {"x": drawn(case.batch, 3, side, side, device=_DEVICE)}


def _masked_tokens(case: _Case) -> dict[str, Any]:
    tokens = _tokens(case)
    return {"input_ids": tokens, "labels": tokens}


def _text_to_text(case: _Case) -> dict[str, Any]:
    return {"input_ids": _tokens(case), "labels": _tokens(case), "use_cache": False}


def _causal_tokens(case: _Case) -> dict[str, Any]:
    return {"input_ids": _tokens(case), "use_cache": False}


def _speech(case: _Case) -> dict[str, Any]:
    mels, frames = case.sizes["num_mel_bins"], 2 * case.sizes["max_source_positions"]
    features = drawn(case.batch, mels, frames, device=_DEVICE)
    return {"input_features": features, "labels": _tokens(case), "use_cache": False}


_SIGLIP = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 378,
    "patch_size": 14,
    "vision_use_head": False,
}
_VIT = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_BERT = {"vocab_size": 30522}
_BERT_WITHOUT = {**_BERT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_T5 = {
    "vocab_size": 32128,
    "d_model": 1024,
    "d_kv": 64,
    "d_ff": 4096,
    "num_layers": 24,
    "num_heads": 16,
    "decoder_start_token_id": 0,
}
_T5_WITHOUT = {**_T5, "dropout_rate": 0.0}
_WHISPER = {
    "vocab_size": 51866,
    "num_mel_bins": 128,
    "d_model": 1280,
    "encoder_layers": 32,
    "decoder_layers": 32,
    "encoder_attention_heads": 20,
    "decoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "decoder_ffn_dim": 5120,
    "max_source_positions": 1500,
}
_QWEN = {
    "vocab_size": 248320,
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
}
_GEMMA = {"vocab_size": 262144, "num_hidden_layers": 6, "hidden_size_per_layer_input": 0}
_TIMM = "vit_large_patch16_224"
_T5_MODEL = "T5ForConditionalGeneration"
_CASES = (
    _Case("siglip so400m", "SiglipVisionModel", 16, 729, _SIGLIP, _pixels),
    _Case("vit-l/16", "ViTModel", 64, 197, _VIT, _pixels),
    _Case("timm vit-l/16", _TIMM, 64, 197, {"img_size": 224}, _pixels_of_timm, False),
    _Case("bert-base", "BertForMaskedLM", 32, 512, _BERT_WITHOUT, _masked_tokens),
    _Case("bert-base", "BertForMaskedLM", 32, 512, _BERT, _masked_tokens, False, ", dropout 0.1"),
    _Case("t5-large", _T5_MODEL, 16, 512, _T5_WITHOUT, _text_to_text, False),
    _Case("t5-large", _T5_MODEL, 16, 512, _T5, _text_to_text, False, ", dropout 0.1"),
    _Case("whisper large-v3", "WhisperForConditionalGeneration", 4, 128, _WHISPER, _speech, False),
    _Case("qwen3.5 4B, 8 layers,", "Qwen3_5TextModel", 4, 4096, _QWEN, _causal_tokens, False),
    _Case("gemma4, 6 layers,", "Gemma4TextModel", 4, 4096, _GEMMA, _causal_tokens, False),
)


def _model(case: _Case) -> nn.Module | None:
    """A case's model with random weights, or None if it is not installed."""
    if case.model == _TIMM:
        create = installed("timm", "create_model")
        if create is None:
            return None
        with torch.device(_DEVICE):
            return create(case.model, **case.sizes).to(torch.bfloat16)
    cls = installed("transformers", case.model)
    if cls is None:
        return None
    config = cls.config_class(**case.sizes)
    with torch.device(_DEVICE):
        model = cls._from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    if case.model.startswith("Gemma4"):
        # Gemma 4 does not divide its scores by the root of the head dim, but its trained norms keep
        # them small. With random weights, each softmax would pick one key, and rounding errors
        # would pick another.
        for layer in model.layers:
            nn.init.constant_(layer.self_attn.q_norm.weight, layer.self_attn.head_dim**-0.5)
    return model


def _result(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    out = model(**inputs)
    return (out if isinstance(out, Tensor) else out.last_hidden_state).float()


def _loss(model: nn.Module, inputs: dict[str, Any], target: Tensor | None) -> Tensor:
    """The model's own loss, or without labels the mean squared distance from a target."""
    if target is None:
        return model(**inputs).loss
    return F.mse_loss(_result(model, inputs), target)


def _rows_of(case: _Case) -> Iterator[Row]:
    torch.manual_seed(0)
    stock = _model(case)
    if stock is None:
        return
    inputs, target = case.inputs(case), None
    if "labels" not in inputs:  # a target near the stock result lets the loss show our error
        with torch.no_grad():
            result = _result(stock.train(), inputs)
        target = result + _NOISE * torch.randn_like(result)
    ours = copy_of(stock.train())
    torchweld.fuse(ours, loss="labels" in inputs, check=False)
    models = {"ours": ours, STOCK: stock}
    if case.compiled:
        models[COMPILED] = compiled_copy(stock, _BACKEND)
    computed = {name: partial(_loss, model, inputs, target) for name, model in models.items()}
    losses = {}
    for name in ("ours", STOCK):
        torch.manual_seed(1)  # of the dropouts
        losses[name] = computed[name]().item()
    optimizer = torch.optim.AdamW(stock.parameters(), lr=1e-5, fused=True)
    steps = {name: stepper(loss, optimizer) for name, loss in computed.items()}
    times = interleaved(steps, device=_DEVICE, rounds=_ROUNDS, warmup=2)
    errors = judged_loss(losses["ours"], losses[STOCK], _LOSS_RTOL)
    yield from compared(case.label, times, errors, STOCK, (COMPILED,))


def rows() -> Iterator[Row | Failure]:
    """Rows of times in microseconds; a `Failure` if a case raises."""
    for case in _CASES:
        torch._dynamo.reset()
        free()
        try:
            yield from _rows_of(case)
        except Exception as error:  # in other versions of transformers a model may raise anything
            reason = f"{type(error).__name__}: {error}"
            yield Failure(case.label, reason.splitlines()[0])
