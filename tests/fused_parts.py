"""Which parts of transformers' causal language models ``fuse`` replaces.

docs/generate.py makes a table of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from tiny_models import causal_models, tiny_model
from torchweld.integrations import FuseReport, fuse

# For each part: a pattern of the ops that run it.
PARTS = {
    "attention": "attention",
    "norm": ".*_norm.*",
    "add + norm": "add_.*_norm",
    "norm + qkv": ".*_norm_linears",
    "rotary": "rotary",
    "MLP": "gated_.*",
    "experts": "experts",
    "loss": "linear_cross_entropy",
}


class Parts(NamedTuple):
    """The parts of a fused model.

    Attributes:
        ops: How many modules run an op, by part.
        stock: Why others stay stock.
        max_abs_diff: The report's.
    """

    ops: dict[str, int]
    stock: list[str]
    max_abs_diff: float | None


def random_model(kind: str, name: str) -> nn.Module | None:
    """A tiny model whose norms have random weights; None if its config takes no small sizes."""
    torch.manual_seed(0)
    for implementation in ("sdpa", "eager"):
        try:
            model = tiny_model(kind, name, implementation, initializer_range=0.2)
        except Exception:  # each config checks its sizes with errors of its own
            continue
        for path, parameter in model.named_parameters():
            if path.endswith("norm.weight"):
                nn.init.normal_(parameter, 0.7, 0.2)
        return model.eval()
    return None


def parts_of(report: FuseReport) -> Parts:
    """Sorts a report by parts."""
    texts = [text for text in report.ops.values() if "not run" not in text]
    ops = [re.match(r"\w+", text)[0] for text in texts]
    counts = {part: sum(bool(re.fullmatch(p, op)) for op in ops) for part, p in PARTS.items()}
    why = [re.sub(r"transformers\.models\.[\w.]+\.", "", reason) for _, reason in report.skipped]
    return Parts(counts, list(dict.fromkeys(why)), report.max_abs_diff)


def fused_parts(models: Iterable[tuple[str, str]] = ()) -> dict[str, Parts]:
    """The parts of models by their model types; every causal language model by default."""
    found: dict[str, Any] = {}
    for kind, name in models or causal_models():
        model = random_model(kind, name)
        if model is not None:
            found[kind] = parts_of(fuse(model, loss=True))
    return found
