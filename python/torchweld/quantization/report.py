"""The result of `torchweld.quantize_`, as an object and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from torchweld.integrations.fusion.report import fold_paths


@dataclass
class QuantizeReport:
    """The result of one `torchweld.quantize_` call.

    Attributes:
        model: class name of the model.
        replaced: paths of the layers that are now `Int4Linear`.
        skipped: `(path, reason)` of every linear layer, or module with stacked weights (experts),
            that stayed as it was.
        errors: by path, for every replaced layer that had values: the root mean square of the
            weight's rounding errors, divided by that of the weight.
        bytes_before, bytes_after: bytes of the model's parameters and buffers.
        notes: sentences that a user should read.

    Example::

        report = torchweld.quantize_(nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 30)))
        print(report)
        print(report.skipped, report.bytes_after / report.bytes_before)
    """

    model: str = ""
    replaced: list[str] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    bytes_before: int = 0
    bytes_after: int = 0
    notes: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether anything was replaced."""
        return bool(self.replaced)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data for JSON."""
        return {**asdict(self), "skipped": [list(entry) for entry in self.skipped]}

    def __str__(self) -> str:
        layers = f"{len(self.replaced)} layers to 4 bits, {len(self.skipped)} left as they were"
        lines = [f"torchweld.quantize_({self.model}): {layers}"]
        if self.replaced:
            lines.append(f"  Int4Linear: {fold_paths(self.replaced)}")
        reasons: dict[str, list[str]] = {}
        for path, reason in self.skipped:
            reasons.setdefault(reason, []).append(path)
        lines += [f"  left: {fold_paths(paths)}: {reason}" for reason, paths in reasons.items()]
        if self.errors:
            worst = max(self.errors, key=lambda path: self.errors[path])
            mean = sum(self.errors.values()) / len(self.errors)
            lines.append(
                f"  relative error of the weights: mean {mean:.3f}, largest "
                f"{self.errors[worst]:.3f} in {worst}"
            )
        lines.append(
            f"  memory: {self.bytes_before / 1e6:.1f} MB to {self.bytes_after / 1e6:.1f} MB"
        )
        lines.extend(f"  note: {note}" for note in self.notes)
        return "\n".join(lines)
