"""The settings of `quantize_`."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from torchweld.ops.int4_checks import check_method


@dataclass(frozen=True)
class Int4:
    """The settings of `quantize_`, which makes `torchweld.nn.Int4Linear` layers.

    Args:
        group_size: columns that share a scale and a zero: a multiple of 8, or None for whole rows.
            A layer stays as it is if this does not divide its in_features.
        skip: names of layers that stay as they are, or one name. A name stands for a module and all
            within it, by its path or a part of one between dots: "lm_head", "mlp.gate",
            "model.layers.0". `*` stands for any characters. None stands for "lm_head" and the heads
            of a transformers model: its output embeddings, and the layers beside its base model
            ("score", "classifier"). A list replaces this default: `skip=()` quantises heads too.
        method: "rtn", "mse" or "hqq", as in `Int4Linear.from_linear`.

    Raises:
        ValueError: a group_size or method other than these.
        TypeError: skip is not a collection of str.

    Example::

        config = torchweld.Int4(group_size=64, method="hqq", skip=["lm_head", "mlp.gate"])
        model = nn.ModuleDict({"up": nn.Linear(128, 64), "lm_head": nn.Linear(128, 1000)})
        assert torchweld.quantize_(model, config).replaced == ["up"]
    """

    group_size: int | None = 128
    skip: Collection[str] | None = None
    method: str = "rtn"

    def __post_init__(self) -> None:
        check_method("Int4", self.method)
        group = self.group_size
        if group is not None and (not isinstance(group, int) or group < 8 or group % 8):
            raise ValueError(
                f"Int4: group_size must be a multiple of 8 or None, but got {self.group_size!r}"
            )
        if self.skip is None:
            return
        names = (self.skip,) if isinstance(self.skip, str) else tuple(self.skip)
        if not all(isinstance(name, str) for name in names):
            raise TypeError(f"Int4: skip must be names of modules, but got {self.skip!r}")
        object.__setattr__(self, "skip", names)

    def skipped_by(self, path: str) -> str | None:
        """Returns the name in `skip` ("lm_head" if it is None) that matches a path, or None."""
        for name in ("lm_head",) if self.skip is None else self.skip:
            pattern = re.escape(name).replace(r"\*", ".*")
            if re.search(rf"(^|\.){pattern}(\.|$)", path):
                return name
        return None
