"""Connects torchweld to other libraries: transformers, PEFT, timm, diffusers and torch's SDPA.

``attention`` has the functions that transformers calls for ``attn_implementation="torchweld"``,
and ``register`` registers them. ``fusion`` implements ``fuse``: its steps are in ``fusion.run``,
the fused forwards and the table of model families in ``fusion.layers``, and the recognition of
classes that the table lacks in ``fusion.recognise``. ``sdpa`` replaces the kernels of torch's own
attention. This package imports transformers only when one of the names below is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchweld._lazy_import import lazy

if TYPE_CHECKING:
    from torchweld.quantization.quantizer import TorchweldInt4Config as TorchweldInt4Config
    from torchweld.quantization.quantizer import register_quantizer as register_quantizer

    from .fusion.fuse import fuse as fuse
    from .fusion.fuse import unfuse as unfuse
    from .fusion.report import FuseReport as FuseReport
    from .peft_lora import register_lora as register_lora
    from .register import register_attention as register_attention
    from .register import register_experts as register_experts
    from .sdpa.kernels import use_in_sdpa as use_in_sdpa

_HOMES = {
    "fuse": "fusion.fuse",
    "unfuse": "fusion.fuse",
    "FuseReport": "fusion.report",
    "TorchweldInt4Config": ".quantization.quantizer",
    "register_attention": "register",
    "register_experts": "register",
    "register_lora": "peft_lora",
    "register_quantizer": ".quantization.quantizer",
    "use_in_sdpa": "sdpa.kernels",
}
__all__ = list(_HOMES)
__getattr__, __dir__ = lazy(__name__, _HOMES)
