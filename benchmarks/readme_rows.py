"""The rows of the README's table: which cases they take, and which peer."""

from __future__ import annotations

from typing import NamedTuple

SUMMARY_FOLDER = "nvidia-h200"


class Summary(NamedTuple):
    """A row of the README's table: the lowest and the highest ratio of some cases to a peer.

    Attributes:
        what: The cases in words.
        family: The family of results that has them.
        cases: A pattern that matches whole cases.
        peer: A pattern of the peer's name in the results.
        name: The peer in words.
        folder: The folder of benchmarks/results that has the family.
        pictured: Whether the README's picture shows the row.
    """

    what: str
    family: str
    cases: str
    peer: str
    name: str
    folder: str = SUMMARY_FOLDER
    pictured: bool = False


# "16 bits" stands for float16 and bfloat16.
SUMMARY = [
    Summary(
        "Llama 1.2B and Qwen3 0.6B training steps, bfloat16",
        "models",
        r"(llama|qwen3) .* bfloat16(, recomputed)?",
        "stock sdpa",
        "Hugging Face model with SDPA, eager",
        pictured=True,
    ),
    Summary(
        "the same steps",
        "models",
        r"(llama|qwen3) .* bfloat16(, recomputed)?",
        "liger",
        "Liger 0.8.5 with SDPA",
        pictured=True,
    ),
    Summary(
        "GPT-2 124M training step, bfloat16",
        "gpt2",
        r"gpt2 training step .* bfloat16",
        "stock sdpa",
        "Hugging Face model with SDPA, eager",
        pictured=True,
    ),
    Summary(
        "4-layer Qwen3 MoE training step, bfloat16",
        "experts",
        r"qwen3 moe 4 layers training step .* bfloat16",
        "stock sdpa",
        "Hugging Face model with SDPA, eager",
        pictured=True,
    ),
    Summary(
        "attention forward and backward, bfloat16",
        "attention",
        r"attention(_backward)? .*float16( causal)?",
        "sdpa cudnn",
        "SDPA, cuDNN backend",
        pictured=True,
    ),
    Summary(
        "attention forward, backward; bfloat16, 2048 tokens or more",
        "attention",
        r"attention(_backward)? \(\d+, [\d/]+, (2048|4096|8192|16384), [\d/]+\) bfloat16( causal)?",
        "FlashAttention 4",
        "FlashAttention 4",  # its calls with fewer tokens wait for the host
        pictured=True,
    ),
    Summary(
        "attention with a bias, forward and backward, bfloat16",
        "attention_bias",
        r"attention .* bias, forward and backward",
        "sdpa efficient",
        "SDPA, memory-efficient backend",
    ),
    Summary(
        "attention forward and backward, float32",
        "attention",
        r"attention\w* .*float32 causal",
        "sdpa efficient",
        "SDPA, memory-efficient backend",
        pictured=True,
    ),
    Summary(
        "attention with 1 or 4 query rows (decoding), bfloat16",
        "attention",
        r"attention decode .*, \d query rows",
        "sdpa cudnn",
        "SDPA, cuDNN backend",
        pictured=True,
    ),
    Summary(
        "softmax(scores) @ V, bfloat16",
        "attention",
        r"softmax_matmul .*",
        "eager",
        "torch's softmax and matmul",
        pictured=True,
    ),
    Summary(
        "softmax forward and backward",
        "rows",
        r"softmax.*",
        "torch",
        "torch's softmax",
        pictured=True,
    ),
    Summary(
        "linear forward and backward, bmm; 16 bits",
        "matmul",
        r"(linear( dx| dweight)?|bmm) .*float16",
        "cublas|cublas bare",
        "cuBLAS",
        pictured=True,
    ),
    Summary(
        "linear forward; 16 bits",
        "matmul",
        r"linear \(.*float16",
        "quack",
        "quack 0.6.5, default tiles",
        pictured=True,
    ),
    Summary(
        "linear, gated linear; full float32 accuracy",
        "matmul",
        r"linear .*float32|gated_linear .*float32 \w+",
        "cublas bare",
        "cuBLAS, float32",
        pictured=True,
    ),
    Summary("linear, gated linear; TF32", "matmul", r".* tf32", "cublas bare", "cuBLAS, TF32"),
    Summary(
        "gated linear, LayerNorm + linear + GELU; 16 bits",
        "matmul",
        r"(layer_norm_linear|gated_linear) .*float16 \w+",
        "cublas bare",
        "cuBLAS, matmul alone",
    ),
    Summary(
        "gated linear, LayerNorm + linear + GELU; 16 bits",
        "matmul",
        r"(layer_norm_linear|gated_linear) .*float16 \w+",
        "eager",
        "eager torch",
        pictured=True,
    ),
    Summary(
        "linear layers, forward and backward; 16 bits",
        "matmul_training",
        r".*, forward and backward",
        "torch.compile",
        "torch.compile",
    ),
    Summary(
        "layer of experts, forward and backward; bfloat16",
        "experts",
        r"experts .* bfloat16, forward and backward",
        "grouped_mm",
        "transformers' grouped_mm experts",
        pictured=True,
    ),
    Summary(
        "4-bit linear, 1 to 16 tokens",
        "int4",
        r"int4 \((1|4|8|16), .*float16",
        "cublas",
        "cuBLAS, 16-bit weights",
        pictured=True,
    ),
    Summary(
        "4-bit linear, 256 tokens or more",
        "int4",
        r"int4 \((256|1024|4096), .*float16",
        "cublas",
        "cuBLAS, 16-bit weights",
        pictured=True,
    ),
    Summary(
        "attention forward and backward, context parallel on 2 H100s",
        "distributed",
        r"attention and its gradient .*",
        "alone",
        "one GPU",
        "nvidia-h100-80gb-hbm3-x2",
    ),
    Summary(
        "48-layer GPT-2 training step, tensor parallel on 2 H100s (lowest: in a CUDA graph)",
        "distributed",
        r"gpt2(-xl| of 48 layers,) training step .*",
        "alone",
        "one GPU",
        "nvidia-h100-80gb-hbm3-x2",
    ),
]
