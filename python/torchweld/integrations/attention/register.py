"""``register_attention``: the mask function and the attention function, for transformers."""

from __future__ import annotations

from torchweld import _library
from torchweld.integrations.version import check_version

from .fallback import NAME


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

    from .forward import attention_forward
    from .mask import attention_mask

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
