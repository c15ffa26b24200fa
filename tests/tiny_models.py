"""Tiny configs of every causal language model of the installed transformers."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from torchweld.integrations import FuseReport, fuse, register_attention

register_attention()

VOCAB = 61

# The sizes that a config has are set to these.
SIZES = {
    VOCAB: "vocab_size vocab_size_per_layer_input entity_vocab_size shape_vocab_size",
    64: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions",
    48: "intermediate_size ffn_dim d_ff decoder_ffn_dim encoder_ffn_dim n_inner ffn_hidden_size",
    32: "hidden_size d_model n_embd embed_dim dim word_embed_proj_dim embedding_size hidden_dim",
    16: "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size "
    "q_lora_rank kv_lora_rank index_head_dim mamba_d_head mamba_head_dim",
    8: "qk_nope_head_dim qk_rope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim "
    "head_dim attention_head_dim hidden_size_per_layer_input laurel_rank mamba_d_state "
    "ssm_state_size state_size",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads "
    "encoder_attention_heads n_routed_experts num_local_experts num_experts moe_num_experts "
    "mamba_n_heads mamba_num_heads",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers "
    "num_decoder_layers num_encoder_layers",
}
SMALL: dict[str, Any] = {
    **{name: size for size, names in SIZES.items() for name in names.split()},
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "index_topk": 3,  # fewer keys than the sequence has
    "index_n_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    "use_mamba_kernels": False,
}

# Further config values of a model type.
FULL = ["full_attention"] * 2
MLA = {"num_key_value_heads": 4}  # latent attention has one key per query head
MORE: dict[str, dict[str, Any]] = {
    "axk1": MLA,
    "axk2": MLA,
    "bailing_hybrid": MLA,
    "bamba": {"attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {
        "layer_types": FULL,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": MLA,
    "deepseek_v3": MLA,
    "deepseek_v32": MLA,
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {**MLA, "per_layer_config": None, "head_dim": 16},
    "dory": {
        "layer_types": ["sliding_attention", "full_attention"],
        "num_hidden_layers": 2,
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 0,
    },
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [16, 16]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": FULL},
    "glm4_moe_lite": MLA,
    "glm_moe_dsa": MLA,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"num_layers_per_stack": 1, "H_cycles": 1, "L_cycles": 1},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {**MLA, "linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {
        **MLA,
        "head_dim": 8,
        "qk_head_dim": 16,
        "expert_ffn_hidden_size": 16,
        "moe_topk": 2,
        "zero_expert_num": 2,
    },
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2, "n_groups": 1},
    "minicpm3": MLA,
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_block_size": 2,
        "index_topk_blocks": 1,
    },
    "nemotron_h": {"n_groups": 1},
    "perceiver": {"d_latents": 32, "num_self_attends_per_block": 1},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds_dim": (8, 24), "axial_pos_shape": (8, 8)},
    "sarvam_mla": MLA,
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 1, "depths": [1] * 7},
    "xmod": {"default_language": "en_XX"},
    "youtu": MLA,
    "zamba": {"layer_types": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_hidden_layers": 4,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(config_class: type, **more: Any) -> Any:
    """A config of a few thousand parameters."""
    base = config_class()
    names = {**dict.fromkeys(base.to_dict()), **dict.fromkeys(config_class.attribute_map)}
    aliases = config_class.attribute_map
    settings = {
        name: SMALL[name] for name in names if name in SMALL and aliases.get(name) not in SMALL
    }
    for name in config_class.sub_configs:
        part = getattr(base, name)
        if part is not None and name not in MORE.get(base.model_type, {}):
            settings[name] = tiny_config(type(part)).to_dict()
    kinds = list(dict.fromkeys(base.to_dict().get("layer_types") or []))
    if len(kinds) > 1:  # a layer of each
        settings["layer_types"] = kinds
        settings[aliases.get("num_hidden_layers", "num_hidden_layers")] = len(kinds)
    settings.update(MORE.get(base.model_type, {}))
    settings.update(more)
    return config_class(**settings)


def tiny_model(
    kind: str, name: str, implementation: str, experts: str = "eager", **more: Any
) -> Any:
    """A random model of a class, with an implementation of its attention and its experts."""
    model_class = getattr(transformers, name)
    config = tiny_config(transformers.CONFIG_MAPPING[kind], **more)
    if not isinstance(config, model_class.config_class):
        config = config.get_text_config(decoder=True)
    return model_class._from_config(
        config, attn_implementation=implementation, experts_implementation=experts
    )


def fuse_keeping_stock(model: Any, **options: Any) -> tuple[Any, FuseReport]:
    """A stock copy of the model, and the report of fuse, which changes the model itself."""
    stock = copy.deepcopy(model)
    return stock, fuse(model, **options)


def with_random_vectors(model: Any) -> Any:
    """The model with weights of norms that are not 1 and biases that are not 0."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 0.7, 0.2)
    return model


def assert_same_tokens(model: Any, stock: Any, *args: Any, **inputs: Any) -> None:
    tokens = [
        each.eval().generate(*args, **inputs, max_new_tokens=6, do_sample=False)
        for each in (model, stock)
    ]
    assert torch.equal(*tokens)


@contextlib.contextmanager
def own_warnings() -> Iterator[list[str]]:
    """A list that holds every warning of torchweld's at the end."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [str(w.message) for w in caught if str(w.message).startswith("torchweld:")]


def saved_and_loaded(model: Any) -> Any:
    """A model that went through torch.save."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def causal_models() -> list[tuple[str, str]]:
    """(model type, class name) of transformers' MODEL_FOR_CAUSAL_LM_MAPPING."""
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    known = set(dir(transformers))  # hasattr would import the code of each model, which takes 5 s
    return [(kind, name) for kind, name in names.items() if name in known]


def encoder_models() -> list[tuple[str, str]]:
    """(model type, class name) of the masked and the encoder-decoder language models."""
    auto = transformers.models.auto.modeling_auto
    masked = auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    both = [*masked.items(), *auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.items()]
    known = set(dir(transformers))
    return sorted({(kind, name) for kind, name in both if name in known})


_TOKENS = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def tiny_gpt2(
    cls: str = "GPT2LMHeadModel", implementation: str = "sdpa", seed: int = 0, **changes: Any
) -> Any:
    """A GPT-2 of two layers and four heads, without dropout."""
    torch.manual_seed(seed)
    sizes = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    dropouts = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    config = transformers.GPT2Config(**{**_TOKENS, **sizes, **dropouts, **changes})
    return getattr(transformers, cls)._from_config(config, attn_implementation=implementation)


def tiny_grouped(name: str = "Llama", implementation: str = "sdpa", **changes: Any) -> Any:
    """A model of two layers with grouped heads: Llama, Mistral."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
    counts = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(transformers, f"{name}Config")(**{**_TOKENS, **sizes, **counts, **changes})
    cls = getattr(transformers, f"{name}ForCausalLM")
    return cls._from_config(config, attn_implementation=implementation)


def batch(
    device: str, pads: tuple[int, ...] = (0, 3, 7), length: int = 12, side: str = "left"
) -> dict[str, torch.Tensor]:
    """Prompts of different lengths, padded on one side."""
    ids = torch.randint(1, VOCAB, (len(pads), length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        hidden = slice(0, pad) if side == "left" else slice(length - pad, length)
        mask[row, hidden] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    values = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    return {name: value.to(device) for name, value in values.items()}


def static_cache_in_graphs() -> tuple[list[list[str]], dict[str, Any]]:
    """The settings with which ``generate`` compiles its steps whole, with a static cache, and a
    list that receives the targets of each graph.
    """
    graphs: list[list[str]] = []

    def keep(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    compiled = transformers.CompileConfig(fullgraph=True, backend=keep, mode=None)
    compiled._compile_all_devices = True
    return graphs, {"cache_implementation": "static", "compile_config": compiled}
