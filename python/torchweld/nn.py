"""Drop-in modules: each names the torch code that it replaces."""

from torchweld._refusals import readable_constructor as _readable_constructor
from torchweld.ops.attention import CausalSelfAttention
from torchweld.ops.attention_module import Attention
from torchweld.ops.cross_entropy import CrossEntropyLoss
from torchweld.ops.gated_linear import GatedLinear
from torchweld.ops.int4_module import Int4Linear
from torchweld.ops.layer_norm_linear import FoldedLayerNormLinear, LayerNormLinear
from torchweld.ops.linear_cross_entropy import LinearCrossEntropy
from torchweld.ops.norms import LayerNorm, RMSNorm
from torchweld.ops.rms_norm_linear import RMSNormLinear
from torchweld.ops.softmax import Softmax

__all__ = [
    "Attention",
    "CausalSelfAttention",
    "CrossEntropyLoss",
    "FoldedLayerNormLinear",
    "GatedLinear",
    "Int4Linear",
    "LayerNorm",
    "LayerNormLinear",
    "LinearCrossEntropy",
    "RMSNorm",
    "RMSNormLinear",
    "Softmax",
]

for _name in __all__:
    _readable_constructor(globals()[_name])
