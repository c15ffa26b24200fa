"""Registers torchweld's attention and experts functions with transformers."""

from __future__ import annotations

from torchweld import _library

from .attention.fallback import NAME
from .version import check_version


def register_attention() -> None:
    """Makes ``attn_implementation="torchweld"`` known to transformers.

    Call it once, before a model is built with this name or switched to it; ``torchweld.fuse``
    calls it. It registers an attention function with ``AttentionInterface`` and a mask function
    with ``AttentionMaskInterface``: without a mask function transformers would give the layers no
    mask at all. It patches nothing in transformers, so a model class that does not use both
    functions is refused when it first runs. Calling it again changes nothing.

    Raises:
        ImportError: transformers is missing or too old.
        RuntimeError: torchweld's operators can't be loaded.

    Example::

        torchweld.integrations.register_attention()
        model.set_attn_implementation("torchweld")
        logits = model(input_ids=tokens).logits
    """
    _library.require()
    check_version("torchweld.integrations")
    from transformers import AttentionInterface, AttentionMaskInterface

    from .attention.forward import attention_forward
    from .attention.mask import attention_mask

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def register_experts() -> None:
    """Makes ``experts_implementation="torchweld"`` known to transformers.

    Call it once, before a model is built with this name or switched to it;
    :func:`torchweld.fuse` does not need the call. Experts then run as :func:`torchweld.experts`. If
    the op can't compute them, they run transformers' "grouped_mm" or, in a dtype that it lacks, the
    model's eager loop, and a warning says why, once per reason. transformers 5.4 accepts only its
    own names. Calling it again changes nothing.

    Raises:
        ImportError: transformers is missing or too old.
        RuntimeError: torchweld's operators can't be loaded.

    Example::

        torchweld.integrations.register_experts()
        mixture.set_experts_implementation("torchweld")
        logits = mixture(input_ids=tokens).logits
    """
    _library.require()
    check_version("torchweld.integrations")
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    from .fusion.layers.experts import experts_forward

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
