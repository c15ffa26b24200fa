"""torchweld: fused transformer kernels for PyTorch, in C++ and CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"  # defined before the imports, because they read it

from torchweld import _flops, _functorch, nn
from torchweld._lazy_import import lazy as _lazy
from torchweld._library import is_available, unavailable_reason
from torchweld._on_import import when_imported as _when_imported
from torchweld.batch_invariance import batch_invariant, is_batch_invariant
from torchweld.distributed import rules as _sharding_rules
from torchweld.explain import Explanation, explain
from torchweld.info import Info, info
from torchweld.info import ops_of_library as _ops_of_library
from torchweld.ops.attention import attention, attention_with_lse
from torchweld.ops.causal_conv1d import causal_conv1d
from torchweld.ops.causal_softmax import causal_softmax
from torchweld.ops.cross_entropy import cross_entropy
from torchweld.ops.experts import experts
from torchweld.ops.gated_linear import (
    gated_activation,
    gated_linear,
    gated_linear_pair,
    gated_mlp,
)
from torchweld.ops.grouped_linear import grouped_gated_linear, grouped_linear
from torchweld.ops.int4_linear import (
    int4_linear,
    int4_linear_repacked,
    int4_pack,
    int4_repack,
    int4_unpack,
)
from torchweld.ops.key_start import (
    key_start_from_cu_seqlens,
    key_start_from_documents,
    key_start_from_position_ids,
)
from torchweld.ops.layer_norm_linear import (
    fold_layer_norm,
    folded_layer_norm_linear,
    layer_norm_linear,
)
from torchweld.ops.leftpad import leftpad_from_mask
from torchweld.ops.linear import bmm, linear
from torchweld.ops.linear_cross_entropy import linear_cross_entropy, linear_token_logprobs
from torchweld.ops.norm_linears import layer_norm_linears, rms_norm_linears
from torchweld.ops.norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm, rms_norm_gated
from torchweld.ops.puzzles import (
    add_scalar,
    conv2d,
    mul_relu,
    outer_add,
    outer_mul_relu,
    row_sum,
    scalar_attention,
)
from torchweld.ops.rms_norm_linear import rms_norm_linear
from torchweld.ops.rotary import rotary
from torchweld.ops.softmax import softmax
from torchweld.ops.softmax_matmul import softmax_matmul
from torchweld.ops.varlen import varlen_attention
from torchweld.quantization import Int4, QuantizeReport, dequantize_, load_quantized, quantize_
from torchweld.tuning import TuneResult, tune
from torchweld.tuning.cache import load as _load_choices

if TYPE_CHECKING:
    from torchweld import compat as compat
    from torchweld import testing as testing
    from torchweld.integrations import FuseReport, fuse, unfuse

# The earlier name, which code may still use.
key_start_from_positions = key_start_from_position_ids

_load_choices()
if is_available():
    is_batch_invariant()  # turns the mode on in this thread if TORCHWELD_BATCH_INVARIANT is 1
    _ops = _ops_of_library()
    _functorch.install(_ops)
    _when_imported("torch.utils.flop_counter", lambda: _flops.install(_ops))
    _when_imported("torch.distributed.tensor", lambda: _sharding_rules.install(_ops))
__all__ = [
    "Explanation",
    "FuseReport",
    "Info",
    "Int4",
    "QuantizeReport",
    "TuneResult",
    "add_layer_norm",
    "add_rms_norm",
    "add_scalar",
    "attention",
    "attention_with_lse",
    "batch_invariant",
    "bmm",
    "causal_conv1d",
    "causal_softmax",
    "conv2d",
    "cross_entropy",
    "dequantize_",
    "explain",
    "fold_layer_norm",
    "folded_layer_norm_linear",
    "fuse",
    "gated_activation",
    "experts",
    "gated_linear",
    "gated_linear_pair",
    "gated_mlp",
    "grouped_gated_linear",
    "grouped_linear",
    "info",
    "int4_linear",
    "int4_linear_repacked",
    "int4_pack",
    "int4_repack",
    "int4_unpack",
    "is_batch_invariant",
    "is_available",
    "key_start_from_cu_seqlens",
    "key_start_from_documents",
    "key_start_from_position_ids",
    "layer_norm",
    "layer_norm_linear",
    "layer_norm_linears",
    "leftpad_from_mask",
    "linear",
    "linear_cross_entropy",
    "linear_token_logprobs",
    "load_quantized",
    "mul_relu",
    "nn",
    "outer_add",
    "outer_mul_relu",
    "quantize_",
    "rms_norm",
    "rms_norm_gated",
    "rms_norm_linear",
    "rms_norm_linears",
    "rotary",
    "row_sum",
    "scalar_attention",
    "softmax",
    "softmax_matmul",
    "tune",
    "unavailable_reason",
    "unfuse",
    "varlen_attention",
]

# These names are imported at their first use: few programs need them, and fuse loads transformers.
__getattr__, __dir__ = _lazy(
    __name__,
    {
        "FuseReport": "integrations",
        "compat": "compat",
        "integrations": "integrations",
        "fuse": "integrations",
        "unfuse": "integrations",
        "testing": "testing",
    },
)
