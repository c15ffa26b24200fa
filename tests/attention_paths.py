"""Which attention calls of transformers' families run another implementation than torchweld's op.

docs/generate.py makes a table of it, and test_attention_paths.py checks it.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tiny_models import batch, tiny_model
from torchweld.integrations import recorder
from torchweld.integrations.attention import fallback

# The families that fuse knows stand first.
DECODERS = {
    "Llama": ("llama", {}),
    "Mistral": ("mistral", {"sliding_window": 8}),
    "Qwen2": ("qwen2", {}),
    "Qwen3": ("qwen3", {}),
    "Gemma": ("gemma", {}),
    "Gemma2": ("gemma2", {"sliding_window": 8}),
    "Gemma3": ("gemma3_text", {"sliding_window": 8}),
    "Phi3": ("phi3", {"sliding_window": 8}),
    "Granite": ("granite", {}),
    "Glm4": ("glm4", {}),
    "Olmo2": ("olmo2", {}),
    "SmolLM3": ("smollm3", {}),
    "GPT2": ("gpt2", {}),
    "Cohere": ("cohere", {}),
    "Cohere2": ("cohere2", {"sliding_window": 8}),
    "DeepseekV3": ("deepseek_v3", {}),
    "Exaone4": ("exaone4", {"sliding_window": 8}),
    "GPTNeoX": ("gpt_neox", {}),
    "GptOss": ("gpt_oss", {"sliding_window": 8}),
    "GraniteMoe": ("granitemoe", {}),
    "Llama4": ("llama4_text", {"attention_chunk_size": 8}),
    "Ministral": ("ministral", {"sliding_window": 8}),
    "Mixtral": ("mixtral", {}),
    "Olmo3": ("olmo3", {"sliding_window": 8}),
    "OPT": ("opt", {}),
    "Phi": ("phi", {}),
    "Qwen3Moe": ("qwen3_moe", {}),
    "SeedOss": ("seed_oss", {}),
    "Starcoder2": ("starcoder2", {"sliding_window": 8}),
}
ENCODERS = {
    "Bert": ("bert", {}),
    "DistilBert": ("distilbert", {}),
    "ModernBert": ("modernbert", {"local_attention": 8}),
    "Roberta": ("roberta", {}),
}
BOTH = {"Bart": ("bart", {}), "MBart": ("mbart", {}), "T5": ("t5", {})}
FAMILIES = {
    **{f"{name}ForCausalLM": values for name, values in DECODERS.items()},
    **{f"{name}ForMaskedLM": values for name, values in ENCODERS.items()},
    **{f"{name}ForConditionalGeneration": values for name, values in BOTH.items()},
}
FAMILIES["GPT2LMHeadModel"] = FAMILIES.pop("GPT2ForCausalLM")

# Attention dropout has no kernel, so it is off here.
_DROPOUTS = dict.fromkeys(
    ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "dropout_rate"), 0.0
)


def family(name: str) -> nn.Module:
    """A tiny model of a class, in training mode, on torchweld's attention."""
    kind, changes = FAMILIES[name]
    config_class = type(tiny_model(kind, name, "eager").config)
    off = {key: value for key, value in _DROPOUTS.items() if hasattr(config_class(), key)}
    more = {"is_decoder": False} if encodes(name) else {}
    torch.manual_seed(0)
    model = tiny_model(kind, name, "torchweld", "batched_mm", **off, **more, **changes)
    model.config.use_cache = False
    return model.float().train()


def encodes(name: str) -> bool:
    """Whether there is an encoder, which has no packed documents."""
    return not name.endswith(("ForCausalLM", "LMHeadModel"))


def _inputs(model: nn.Module, *names: str) -> dict[str, Tensor]:
    side = "left" if model.can_generate() and not model.config.is_encoder_decoder else "right"
    values = batch("cpu", (0, 3), side=side)
    values = {name: values[name] for name in ("input_ids", *names)}
    if model.config.is_encoder_decoder:
        values["decoder_input_ids"] = values["input_ids"]
    return values


class _Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor | None = None
    ) -> Tensor:
        more = {} if decoder_input_ids is None else {"decoder_input_ids": decoder_input_ids}
        return self.model(input_ids=input_ids, attention_mask=attention_mask, **more).logits


def _eager(model: nn.Module, inputs: dict[str, Tensor]) -> Counter[str]:
    with recorder.recording() as seen:
        model(**inputs).logits.sum().backward()
    return Counter(instead or "the op" for calls in seen.values() for instead in calls)


def _calls(graph: torch.fx.Graph) -> Counter[str]:
    targets = [str(node.target) for node in graph.nodes]
    calls = Counter({"the op": sum("torchweld.attention" in target for target in targets)})
    others = sum("scaled_dot_product_attention" in target for target in targets)
    if others:
        calls["; ".join(sorted(fallback._warned))] = others
    return calls


def _training(model: nn.Module) -> Counter[str]:
    return _eager(model, _inputs(model, "attention_mask"))


def _packed(model: nn.Module) -> Counter[str]:
    inputs = _inputs(model, "position_ids")
    inputs["position_ids"] = torch.tensor([[*range(7), *range(5)]] * 2)
    return _eager(model, inputs)


def _compiled(model: nn.Module) -> Counter[str]:
    calls: Counter[str] = Counter()

    def count(graph: torch.fx.GraphModule, example_inputs: Any) -> Callable:
        calls.update(_calls(graph.graph))
        return graph.forward

    torch._dynamo.reset()
    if model.config.is_encoder_decoder:  # older ones draw a number for each layer in training
        model.eval()
    fullgraph = model.config.model_type != "t5"  # whose configs are copied while it runs
    torch.compile(model, fullgraph=fullgraph, backend=count)(**_inputs(model, "attention_mask"))
    return calls


def _exported(model: nn.Module) -> Counter[str]:
    inputs = _inputs(model, "attention_mask")
    dynamic = dict.fromkeys((0, 1), torch.export.Dim.AUTO)
    program = torch.export.export(
        _Logits(model.eval()), (), inputs, dynamic_shapes=dict.fromkeys(inputs, dynamic)
    )
    return _calls(program.graph)


WAYS: dict[str, Callable[[nn.Module], Counter[str]]] = {
    "training": _training,
    "compiled": _compiled,
    "exported": _exported,
    "packed": _packed,
}


def attention_calls(name: str, way: str) -> Counter[str]:
    """How many attention calls ran "the op", and how many something else, with the reason."""
    fallback._warned.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return WAYS[way](family(name))
