"""torchweld in torch.distributed: sharding rules of the ops, styles for tensor parallelism.

The rules are registered as soon as torch.distributed.tensor is imported. Nothing here imports it
until one of these names is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchweld._start import lazy

if TYPE_CHECKING:
    from ._parallelize import parallelize as parallelize
    from .styles import NormColwise as NormColwise
    from .tensors import full_tensor as full_tensor

__all__ = ["NormColwise", "full_tensor", "parallelize"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "NormColwise": "styles",
        "full_tensor": "tensors",
        "parallelize": "_parallelize",
    },
)
