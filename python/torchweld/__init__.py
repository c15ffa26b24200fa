"""torchweld: fused transformer kernels for PyTorch, in C++ and CUDA."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torchweld import nn
from torchweld._library import is_available, unavailable_reason
from torchweld.explain import Explanation, explain
from torchweld.info import Info, info
from torchweld.ops.attention import attention
from torchweld.ops.bmm import bmm
from torchweld.ops.causal_softmax import causal_softmax
from torchweld.ops.folded_layer_norm_linear import fold_layer_norm, folded_layer_norm_linear
from torchweld.ops.gated_linear import gated_linear
from torchweld.ops.layer_norm_linear import layer_norm_linear
from torchweld.ops.leftpad import leftpad_from_mask
from torchweld.ops.linear import linear
from torchweld.ops.rms_norm_linear import rms_norm_linear
from torchweld.ops.softmax import softmax
from torchweld.ops.softmax_matmul import softmax_matmul

if TYPE_CHECKING:
    from torchweld.integrations import FuseReport, fuse, unfuse

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "FuseReport",
    "Info",
    "attention",
    "bmm",
    "causal_softmax",
    "explain",
    "fold_layer_norm",
    "folded_layer_norm_linear",
    "fuse",
    "gated_linear",
    "info",
    "is_available",
    "layer_norm_linear",
    "leftpad_from_mask",
    "linear",
    "nn",
    "rms_norm_linear",
    "softmax",
    "softmax_matmul",
    "unavailable_reason",
    "unfuse",
]


def __getattr__(name: str) -> Any:
    # The integrations import transformers only when they are used.
    if name in ("fuse", "unfuse", "FuseReport"):
        return getattr(importlib.import_module("torchweld.integrations"), name)
    raise AttributeError(f"module 'torchweld' has no attribute {name!r}")
