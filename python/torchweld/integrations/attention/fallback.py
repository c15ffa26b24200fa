"""Names the attention that runs if torchweld's op does not serve a call, and warns of it."""

from __future__ import annotations

import warnings

import torch

from torchweld.integrations import recorder

NAME = "torchweld"

# Arguments that some models pass to attention, but neither torchweld's op nor SDPA supports, with a
# description of each. The op supports a sink for each head, which transformers calls s_aux.
UNSERVED = {
    "sinks": "an attention sink for each query",
    "indices": "keys chosen for each query",
    "block_indices": "blocks of keys chosen for each query",
}

# The reason for a mask that is not described any further.
GIVEN_4D = "the attention mask is 4-D (given so, or made so under torch.compile)"


class Unserved(ValueError):
    """Raised if a layer's attention gets an argument that neither torchweld's op nor SDPA has."""


_warned: set[str] = set()
_traced: set[str] = set()  # the mask function's reasons under torch.compile
SDPA = "torch's scaled_dot_product_attention"
EAGER = "the model's eager attention"


@torch.compiler.assume_constant_result
def warn_once(
    reason: str, instead: str = SDPA, traced: bool = False, op: str = "torchweld::attention"
) -> bool:
    """Warns once per reason that calls run ``instead``, not ``op``; returns whether it did."""
    if traced:
        _traced.add(reason)
    # A traced mask carries no reason (GIVEN_4D), but the mask function has warned with its own.
    if recorder.silent or reason in _warned or (reason == GIVEN_4D and _warned & _traced):
        return False
    _warned.add(reason)
    warnings.warn(
        f"torchweld: {reason}; such calls use {instead} instead of {op} (said once)", stacklevel=3
    )
    return True
