"""torchweld in torch.distributed: sharding rules of the ops, tensor and context parallelism.

The rules are registered when ``torch.distributed.tensor`` is imported. The modules here are
imported when one of their names is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchweld._lazy_import import lazy

if TYPE_CHECKING:
    from ._parallelize import parallelize as parallelize
    from ._parallelize import parameter_groups as parameter_groups
    from .context import context_parallel as context_parallel
    from .context import context_parallel_attention as context_parallel_attention
    from .int4_parameters import codes_as_parameters as codes_as_parameters
    from .sequence import gather_sequence as gather_sequence
    from .sequence import shard_sequence as shard_sequence
    from .styles import NormColwise as NormColwise
    from .styles import Rowwise as Rowwise
    from .tensors import full_tensor as full_tensor
    from .vocabulary import VocabParallel as VocabParallel
    from .vocabulary import (
        vocab_parallel_linear_cross_entropy as vocab_parallel_linear_cross_entropy,
    )

_HOMES = {
    "NormColwise": "styles",
    "Rowwise": "styles",
    "VocabParallel": "vocabulary",
    "codes_as_parameters": "int4_parameters",
    "context_parallel": "context",
    "context_parallel_attention": "context",
    "full_tensor": "tensors",
    "gather_sequence": "sequence",
    "parallelize": "_parallelize",
    "parameter_groups": "_parallelize",
    "shard_sequence": "sequence",
    "vocab_parallel_linear_cross_entropy": "vocabulary",
}
__all__ = list(_HOMES)
__getattr__, __dir__ = lazy(__name__, _HOMES)
