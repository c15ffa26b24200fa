"""Every configuration of a call timed as a table, and the fastest remembered."""

from torchweld.tuning.result import TuneResult
from torchweld.tuning.search import tune

__all__ = ["TuneResult", "tune"]
