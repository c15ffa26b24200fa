"""``register_experts``: the experts of mixtures, for transformers."""

from __future__ import annotations

from torchweld import _library
from torchweld.integrations.version import check_version

from .attention.fallback import NAME


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
