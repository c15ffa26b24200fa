"""What layers really run in a forward pass, for the report of ``fuse``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Hashable, Iterator

import torch

# Each call of a layer, or of one op of several that a layer runs: None where it ran torchweld's
# op, else what ran instead and why.
Seen = dict[Hashable, list[str | None]]

# None unless a sample batch is measured. Layers test it before they call `note`, which costs host
# time.
seen: Seen | None = None


def note(layer: Hashable, instead: str | None = None) -> None:
    """Says what a call of a layer runs."""
    seen.setdefault(layer, []).append(instead)


@contextlib.contextmanager
def watching() -> Iterator[Seen]:
    """Collects the calls. What is compiled runs eagerly meanwhile, so that it can be seen."""
    global seen
    before, seen = seen, {}
    # Nothing is compiled where Dynamo, which takes seconds to import, is not loaded.
    compiled = "torch._dynamo" in sys.modules
    eagerly = torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()
    try:
        with eagerly:
            yield seen
    finally:
        seen = before
