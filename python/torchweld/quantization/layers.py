"""Replaces layers for `quantize_` and `dequantize_`, and gives reasons for the others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from torchweld.nn import Int4Linear
from torchweld.ops.int4_checks import check_float
from torchweld.ops.stock import refuse_other

from .config import Int4
from .float_layers import (
    as_linear,
    features_of,
    float_layer,
    heads_of,
    is_adapter,
    linear_classes,
    quantized,
)
from .report import QuantizeReport

Progress = Callable[[int, int, str], None]
Plan = dict[str, list[str]]  # all paths of each layer to replace, by the first


def quantize_layers(
    model: nn.Module, config: Int4, progress: Progress | None = None
) -> QuantizeReport:
    """Does `quantize_` without the records in a transformers model."""
    report = QuantizeReport(type(model).__name__, bytes_before=_bytes_of(model))
    plan = plan_layers(model, config, report)
    for done, (first, paths) in enumerate(plan.items(), 1):
        new = replace_layer(model, paths, config)
        report.replaced += paths
        if not new.scale.is_meta:
            report.errors |= dict.fromkeys(paths, new.quantisation_error)
        if progress is not None:
            progress(done, len(plan), first)
    report.bytes_after = _bytes_of(model)
    if report and not report.errors:
        report.notes.append("the layers are on the meta device; load a state_dict next")
    return report


def dequantize_layers(model: nn.Module) -> list[str]:
    """Does `dequantize_` without those records."""
    groups = _by_module(model, Int4Linear)
    for paths in groups:
        layer = model.get_submodule(paths[0])
        refuse_other("torchweld.dequantize_", paths[0], "Int4Linear", layer, Int4Linear)
    for paths in groups:
        layer = model.get_submodule(paths[0])
        _replace(model, paths, float_layer(layer).train(layer.training))
    return [path for paths in groups for path in paths]


def plan_layers(model: nn.Module, config: Int4, report: QuantizeReport | None = None) -> Plan:
    """Finds the layers to replace; adds the reasons of the others to the report."""
    report = QuantizeReport() if report is None else report
    users: dict[int, set[int]] = {}  # of each parameter
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                users.setdefault(id(parameter), set()).add(id(module))
    heads = heads_in(model) if config.skip is None else set()
    found: Plan = {}
    for paths in _by_module(model, *linear_classes()):
        reasons = [_refusal(model, path, config, users) for path in paths]
        reason = next((reason for reason in reasons if reason is not None), None)
        if reason is None and model.get_submodule(paths[0]) in heads:
            reason = "it is a head, which may be trained; skip=() quantises heads too"
        if reason is None:
            found |= dict.fromkeys(paths[:1], paths)
        else:
            report.skipped += [(path, reason) for path in paths]
    for path, module in model.named_modules():
        if (stacked := _stacked(module)) is not None:
            reason = f"{stacked} has the weights of several layers in one parameter"
            report.skipped.append((path, reason))
    return found


def _stacked(module: nn.Module) -> str | None:
    """Returns the first parameter with the matrices of several layers, as of experts, or None."""
    if not isinstance(module, _ConvNd):
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.dim() == 3 and min(parameter.shape) > 1:
                return name
    return None


def _refusal(model: nn.Module, path: str, config: Int4, users: dict[int, set[int]]) -> str | None:
    """Returns why a linear layer stays as it is, or None."""
    name = config.skipped_by(path)
    if name is not None:
        return f"skip has {name!r}"
    layer = model.get_submodule(path)
    parent = model.get_submodule(path.rpartition(".")[0])
    if path.rpartition(".")[2] == "base_layer":
        return "it is the base layer of an adapter; quantise first, then add the adapter"
    if _in_adapter(model, path):
        return "it belongs to an adapter, which is trained"
    if isinstance(parent, nn.TransformerEncoderLayer):
        return "nn.TransformerEncoderLayer reads its weight"
    try:
        refuse_other("", "", "linear", layer, *linear_classes())
        if type(layer.weight) is not nn.Parameter:
            kind = type(layer.weight).__name__
            return f"its weight is a {kind}; quantise before it is sharded or wrapped"
        check_float("", layer)
    except ValueError as error:
        return str(error).rpartition("but got ")[2]
    if len(users[id(layer.weight)]) > 1:
        return "another module uses its weight"
    in_features, _ = features_of(layer)
    group = config.group_size or in_features
    if in_features % group or group % 8 or not group:
        return f"groups of {group} do not divide in_features = {in_features}"
    return None


def _in_adapter(model: nn.Module, path: str) -> bool:
    """Whether a module is inside of a layer of PEFT, as lora_A is."""
    names = path.split(".")[:-1]
    outer = (model.get_submodule(".".join(names[:i])) for i in range(1, len(names) + 1))
    return any(is_adapter(module) for module in outer)


def replace_layer(
    model: nn.Module, paths: list[str], config: Int4, weight: Tensor | None = None
) -> Int4Linear:
    """Replaces a float layer at all its paths by an Int4Linear; returns it.

    Args:
        weight: the layer's weight, if the layer does not have it yet.
    """
    module = model.get_submodule(paths[0])
    new = quantized(module, as_linear(module, weight), config.group_size, config.method)
    _replace(model, paths, new.train(module.training))
    return new


def _by_module(model: nn.Module, *classes: type[nn.Module]) -> list[list[str]]:
    """Lists the paths of each module of some classes or subclasses; a shared module has several."""
    found: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, classes):
            found.setdefault(id(module), []).append(path)
    return list(found.values())


def _replace(model: nn.Module, paths: list[str], new: nn.Module) -> None:
    for path in paths:
        head, _, name = path.rpartition(".")
        setattr(model.get_submodule(head), name, new)


def _bytes_of(model: nn.Module) -> int:
    return sum(t.nbytes for t in [*model.parameters(), *model.buffers()])


def pretrained_in(model: nn.Module) -> Iterator[Any]:
    """Yields the transformers models in a module, without models inside of others."""
    transformers = sys.modules.get("transformers")
    inside: set[int] = set()
    for module in model.modules() if transformers is not None else ():
        if isinstance(module, transformers.PreTrainedModel) and id(module) not in inside:
            inside |= {id(part) for part in module.modules()}
            yield module


def heads_in(model: nn.Module) -> set[nn.Module]:
    """Returns the linear layers of the heads of all transformers models in a module."""
    return {root.get_submodule(path) for root in pretrained_in(model) for path in heads_of(root)}
