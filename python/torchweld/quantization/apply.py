"""`quantize_` and `dequantize_`: 4-bit layers in an existing model, and back."""

from __future__ import annotations

from typing import Any

from torch import nn

from torchweld._library import require
from torchweld._refusals import describe
from torchweld.nn import Int4Linear

from .config import Int4
from .layers import Progress, dequantize_layers, pretrained_in, quantize_layers
from .report import QuantizeReport


def quantize_(
    model: nn.Module, config: Int4 | None = None, *, progress: Progress | None = None
) -> QuantizeReport:
    """Replaces the linear layers of a model by `torchweld.nn.Int4Linear`, in place.

    Linear layers are nn.Linear and transformers' Conv1D (GPT-2). A layer is replaced if the 4-bit
    layer can do all that it does. The others stay and are reported with a reason: names in
    `config.skip` (if it is None, heads), subclasses, hooks and parametrisations, a weight that
    other modules use (a tied head), base layers of LoRA, sharded weights, sizes that the group does
    not divide. The report also lists stacked experts.

    On the meta device the new layers have no values either; load a state_dict into them. At most
    one layer is in memory twice. `save_pretrained` of a quantised transformers model makes a
    checkpoint that `from_pretrained` loads (`torchweld.integrations.register_quantizer`).

    Args:
        model: any module that contains linear layers; it may be on any device.
        config: `Int4()` by default.
        progress: called as `progress(done, total, path)` after each layer.

    Returns:
        A report that prints itself.

    Raises:
        TypeError: model is not a module, or is a linear layer itself; config is not an Int4.
        RuntimeError: torchweld's operators can't be loaded.

    Example::

        model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
        report = torchweld.quantize_(model, torchweld.Int4(group_size=64))
        assert report.replaced == ["0", "2"]
    """
    require()
    config = Int4() if config is None else config
    if not isinstance(config, Int4):
        raise TypeError(f"torchweld.quantize_: config must be an Int4, but got {config!r}")
    _check_model(model, "quantize_")
    report = quantize_layers(model, config, progress)
    for root in pretrained_in(model) if report else ():
        from .quantizer import mark

        mark(root, config)
    return report


def dequantize_(model: nn.Module) -> list[str]:
    """Replaces every `Int4Linear` of a model by a float layer, in place.

    The float layer has the dequantised weight, not the original one, and its parameters are frozen.
    It is a Conv1D if `quantize_` replaced a Conv1D, else an nn.Linear.

    Args:
        model: any module that contains `Int4Linear` layers.

    Returns:
        The paths of the replaced layers.

    Raises:
        TypeError: model is not a module, or is an Int4Linear itself.
        ValueError: an Int4Linear has hooks or is of a subclass; nothing is replaced then.

    Example::

        model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
        torchweld.quantize_(model, torchweld.Int4(group_size=64))
        assert torchweld.dequantize_(model) == ["0", "2"]
    """
    _check_model(model, "dequantize_")
    replaced = dequantize_layers(model)
    for root in pretrained_in(model) if replaced else ():
        from .quantizer import unmark

        unmark(root)
    return replaced


def _check_model(model: Any, owner: str) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"torchweld.{owner}: model must be an nn.Module, but got {describe(model)}")
    if isinstance(model, (nn.Linear, Int4Linear)):
        raise TypeError(
            f"torchweld.{owner}: model must contain the layers to replace, but got one of them, "
            f"{type(model).__name__}; use Int4Linear.from_linear or to_torch"
        )
