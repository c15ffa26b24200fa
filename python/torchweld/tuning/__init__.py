"""Times every configuration of a call and remembers the fastest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchweld._lazy_import import lazy

if TYPE_CHECKING:
    from torchweld.tuning.result import TuneResult
    from torchweld.tuning.search import tune

__all__ = ["TuneResult", "tune"]

__getattr__, __dir__ = lazy(__name__, {"TuneResult": "result", "tune": "search"})
