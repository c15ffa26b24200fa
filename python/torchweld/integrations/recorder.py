"""Records which ops the layers run in a forward pass, for the report of ``fuse``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Hashable, Iterator

import torch

# For each layer, or each op of a layer that runs several: one entry per call. The entry is None if
# torchweld's op ran, else a text that says what ran instead and why.
Calls = dict[Hashable, list[str | None]]

# None unless `recording` is active. Layers test `calls` before they call `record`, because the call
# costs host time.
calls: Calls | None = None
silent = False  # whether calls that run something else must not warn


def record(layer: Hashable, instead: str | None = None) -> None:
    """Records a call of a layer: ``instead`` names the code that ran in place of the op."""
    calls.setdefault(layer, []).append(instead)


@contextlib.contextmanager
def recording(silently: bool = False) -> Iterator[Calls]:
    """Collects recorded calls; compiled code runs eagerly. ``silently`` suppresses warnings."""
    global calls, silent
    before, calls, silent = (calls, silent), {}, silently
    # If Dynamo is not loaded, nothing is compiled. Importing Dynamo would take seconds.
    compiled = "torch._dynamo" in sys.modules
    eagerly = torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()
    try:
        with eagerly:
            yield calls
    finally:
        calls, silent = before
