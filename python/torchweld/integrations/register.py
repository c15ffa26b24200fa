"""``register_attention`` and ``register_experts``: torchweld's functions, for transformers."""

from __future__ import annotations

from torchweld import _library

from .attention.fallback import NAME
from .version import check_version


def register_attention() -> None:
    """Makes ``attn_implementation="torchweld"`` known to transformers.

    Call it once, before a model is built with this name or switched to it; ``torchweld.fuse``
    calls it. It registers an attention function with ``AttentionInterface`` and a mask function
    with ``AttentionMaskInterface``: without the second one transformers would hand every layer no
    mask at all. Nothing of transformers is patched, so a class that does not use the two together
    is refused when it first runs. Calling it again changes nothing.

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
    :func:`torchweld.fuse` needs neither. Experts then run as :func:`torchweld.experts`. Those that
    the op can't compute run transformers' "grouped_mm", and a warning says why, once per reason.
    transformers 5.4 accepts no other names than its own. Calling it again changes nothing.

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
