"""``fuse`` of a model that contains a GPT-2."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from transformers.models.gpt2.modeling_gpt2 import GPT2Model

from torchweld.integrations.fusion.layers import fsdp
from torchweld.integrations.fusion.layers.gpt2_block import ATTENTION
from torchweld.integrations.fusion.layers.modules import activation_name

from . import attention_switch, gpt2
from .probes import Probes, device_of
from .report import UNCHECKED, WAS_EAGER, FuseReport, list_places
from .sample import Sample


def _bases(model: nn.Module) -> list[tuple[str, GPT2Model]]:
    return [(path, m) for path, m in model.named_modules() if isinstance(m, GPT2Model)]


def fuse(
    model: nn.Module, sample: Any, check: bool, kinds: Collection[str], report: FuseReport
) -> bool:
    """Fuses the blocks and the attention of a model; False where it contains no GPT-2."""
    bases = _bases(model)
    if not bases:
        return False
    stock, seen = None, None
    places, switches = _plan(model, bases, kinds, report)
    if check and (places or switches):
        runner = Sample(model, [base for _, base in bases], sample, _batch_of_gpt2)
        stock = runner.try_run(report)
    elif places or switches:
        report.notes.append(UNCHECKED)
    try:
        for block, site in dict.fromkeys(places.values()):
            gpt2.fuse_site(block, site)
        for _, base in switches:
            gpt2.switch_attention(model, base)
        if stock is not None:
            seen = runner.compare(stock, report)
        measured = [
            (where, block.get_submodule(site.path)) for where, (block, site) in places.items()
        ]
        list_places(measured, seen, report)
        for path, base in switches:
            if not list_places(_attention_layers(path, base), seen, report):
                gpt2.restore_attention(model, base)
            elif gpt2.was_eager(base):
                report.notes.append(WAS_EAGER)
    except BaseException:
        for block, _ in places.values():
            gpt2.unfuse_block(block)
        for _, base in bases:
            gpt2.restore_attention(model, base)
        raise
    return True


def unfuse(model: nn.Module) -> list[str]:
    """Gives blocks and attention back; returns the paths that were restored."""
    everything = list(model.named_modules(remove_duplicate=False))
    fused = [(path, module, gpt2.fused_paths(module)) for path, module in everything]
    restored = [f"{path}.{below}" for path, _, paths in fused for below in paths]
    for _, module, paths in fused:
        if paths:
            gpt2.unfuse_block(module)
    for path, base in _bases(model):
        if gpt2.restore_attention(model, base):
            restored.extend(where for where, _ in _attention_layers(path, base))
    return restored


def _attention_layers(path: str, base: Any) -> list[tuple[str, Any]]:
    prefix = f"{path}." if path else ""
    return [
        (f"{prefix}h.{index}.{name}", getattr(block, name))
        for index, block in enumerate(base.h)
        for name in ("attn", "crossattention")
        if hasattr(block, name)
    ]


def _plan(
    model: nn.Module, bases: list[tuple[str, Any]], kinds: Collection[str], report: FuseReport
) -> tuple[dict[str, tuple[nn.Module, Any]], list]:
    """Returns the sites to replace, ``{path: (block, site)}``, and the models to switch."""
    probes, used, gathered = Probes(), gpt2.uses(model), fsdp.gathered(model)
    places, switches = {}, []
    for path, base in bases:
        prefix = f"{path}." if path else ""
        for index, block in enumerate(base.h):
            if not isinstance(block, gpt2.GPT2Block):
                reason = f"it is {type(block).__name__}, not transformers' GPT2Block"
                report.skipped.append((f"{prefix}h.{index}", reason))
                continue
            for site, reason in gpt2.sites(block, used, gathered):
                if ("norm" if site is ATTENTION else "mlp") not in kinds:
                    continue
                where = f"{prefix}h.{index}.{site.path}"
                if reason is None:
                    owner = getattr(block, site.owner)
                    act = site.act and getattr(owner, site.act)
                    activation = activation_name(act) if site.act else "none"
                    weight = getattr(owner, site.linear).weight
                    reason = probes.layer_norm_linear(weight, activation)
                if reason is not None:
                    report.skipped.append((where, reason))
                    continue
                places[where] = block, site
                names = [site.norm, site.linear, *([activation] if site.act else [])]
                report.ops[where] = f"layer_norm_linear ({' -> '.join(names)})"
        layers = _attention_layers(path, base) if "attention" in kinds else []
        paths = [where for where, _ in layers]
        reason = gpt2.attention_refusal(base)
        if reason is None and paths:
            for block in base.h:
                reason = reason or probes.attention(block.attn, base)
        if reason is not None:
            report.skipped.extend((where, reason) for where in paths)
        elif paths:
            switches.append((path, base))
            report.ops.update(dict.fromkeys(paths, "attention"))
    return places, switches


def _batch_of_gpt2(model: Any) -> dict[str, Any]:
    base = getattr(model, "transformer", model)
    length, generator = min(16, base.config.n_positions), torch.Generator().manual_seed(0)
    batch = attention_switch.tokens(base.config.vocab_size, length, generator)
    device = device_of(base.wte, base.wte.weight)
    return {**{name: value.to(device) for name, value in batch.items()}, "use_cache": False}
