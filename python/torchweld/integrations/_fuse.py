"""``fuse`` and ``unfuse``: rewire an existing model in place, and take it back."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchweld import _library

from . import measure
from .probes import Probes, device_of
from .report import FuseReport
from .sample import Sample, compare

_ATTENTION = "attention"
_LAYER_NORM_LINEAR = "layer_norm_linear"


def fuse(
    model: nn.Module, *, sample: Any = None, check: bool = True, loss: bool = False
) -> FuseReport:
    """Rewires a Hugging Face model in place to run torchweld's ops.

    Of every model it switches the attention (``attn_implementation="torchweld"``); of a GPT-2 it
    replaces ``ln_1 -> attn.c_attn`` and ``ln_2 -> mlp.c_fc -> mlp.act`` too (both
    :func:`torchweld.layer_norm_linear`, on the Conv1D weights as they are). Parameters, their
    names, state_dict, optimizers, save_pretrained and config.json stay as they were. What can't be
    replaced safely stays stock and is listed with the reason: a class that does not take its
    attention from transformers' AttentionInterface, layers that choose their keys, hooks
    (accelerate's offloading too), LoRA or quantised layers, sharded parameters, mixed dtypes,
    modules that the model uses in several places, an activation without a fused form, a device
    that this build has no kernel for.

    The report is measured: what the layers run on the sample batch counts. A layer that ran SDPA
    there is listed with the reason, and a model of which no layer runs an op stays stock.

    Args:
        model: A model of transformers or any module that contains one. It may be moved, cast,
            copied, pickled, compiled and trained afterwards.
        sample: Batch for the comparison with the stock model: ``input_ids``, or a dict of keyword
            arguments. By default a small random batch of what the model takes: tokens, padded on
            one side, images or audio. Where that does not fit, the report says so.
        check: Whether to run that comparison (two forward passes in eval mode, without gradients).
            Without it the report says what ought to run, and that no measurement was made.
        loss: Whether a GPT2LMHeadModel computes its head and loss as one op
            (:func:`torchweld.linear_cross_entropy`): in training mode with labels it then returns a
            loss and no logits. Evaluation and generation stay as they were.

    Returns:
        A report that prints itself. Calling fuse again replaces nothing that is replaced already.

    Raises:
        ImportError: transformers is missing or too old.
        TypeError: It contains no model of transformers.
        RuntimeError: The operator library can't be loaded, or the fused model gave NaN or inf where
            the stock model did not; the model is stock again then.

    Limits:
        Hooks added to a part of a block later make that part of the block run stock, and so does a
        norm that is cast alone.
        Attention dropout above 0 makes training steps use torch's SDPA, and calls that ask for
        attention weights use GPT-2's eager attention.
    """
    _library.require()
    _check_model(model, "torchweld.fuse")
    gpt2 = _gpt2_module()
    bases = [(path, m) for path, m in model.named_modules() if isinstance(m, gpt2.GPT2Model)]
    report = FuseReport(model=type(model).__name__)
    if not bases:
        if loss:
            report.notes.append("loss=True: the model contains no GPT2LMHeadModel")
        return _fuse_other(model, sample, check, report)
    stock, seen = None, None
    places, switches = _plan(model, bases, gpt2, report)
    if check and (places or switches):
        runner = Sample(model, [base for _, base in bases], sample, _batch_of_gpt2)
        stock = runner.run(report)
    elif places or switches:
        report.notes.append(_UNCHECKED)
    try:
        for block, site in dict.fromkeys(places.values()):
            gpt2.fuse_site(block, site)
        gpt2.rename_blocks(model)
        for _, base in switches:
            gpt2.switch_attention(model, base)
        if stock is not None:
            with measure.watching() as seen:
                compare(stock, runner.run(report), report)
        measured = [
            (where, block.get_submodule(site.path)) for where, (block, site) in places.items()
        ]
        _list(measured, seen, report)
        for path, base in switches:
            if not _list(_attention_layers(path, base), seen, report):
                gpt2.restore_attention(model, base)
        if loss:
            _fuse_losses(model, report)
    except BaseException:
        for block, _ in places.values():
            gpt2.unfuse_block(block)
        gpt2.rename_blocks(model)
        for _, base in bases:
            gpt2.restore_attention(model, base)
        _restore_losses(model)
        raise
    return report


def _fuse_losses(model: nn.Module, report: FuseReport) -> None:
    """Switches the loss of each GPT2LMHeadModel. The sample batch has no labels to run it with."""
    from . import gpt2_head as head

    found = False
    for path, module in model.named_modules():
        if not isinstance(module, head.GPT2LMHeadModel):
            continue
        found, where = True, f"{path}.lm_head" if path else "lm_head"
        if type(module) is head.FusedGPT2LMHeadModel:
            reason = "fused already"
        elif type(module) is not head.GPT2LMHeadModel:
            reason = f"the model is {type(module).__name__}, not transformers' GPT2LMHeadModel"
        else:
            reason = head.refusal(module) or Probes().loss(module.lm_head.weight)
        if reason is not None:
            report.skipped.append((where, reason))
            continue
        head.switch_loss(module)
        report.replaced.append(where)
        report.ops[where] = f"{head.OP} (lm_head -> loss), not run by the sample batch"
    text = "in training mode with labels the model returns a loss and no logits"
    report.notes.append(text if found else "loss=True: the model contains no GPT2LMHeadModel")


def _restore_losses(model: nn.Module) -> list[str]:
    """Gives every GPT2LMHeadModel its own forward back; returns their heads' paths."""
    from . import gpt2_head as head

    modules = list(model.named_modules())
    return [f"{path}.lm_head" if path else "lm_head" for path, m in modules if head.restore_loss(m)]


_UNCHECKED = "check=False: no sample batch ran, so what the layers run was not measured"


def _list(places: list[tuple[str, Any]], seen: Any, report: FuseReport) -> bool:
    """Puts places into the report by what they ran, and says whether any is replaced.

    Args:
        places: ``(path, what measure.note was given)``.
        seen: What was measured, None where nothing was.
        report: It has ``ops`` of the places already.
    """
    found, counted = False, set()
    for where, key in places:
        calls = (seen or {}).get(key)
        if calls is None and seen is not None:
            report.ops[where] += ", not run by the sample batch"
        for instead in calls or () if key not in counted else ():
            name = instead or f"torchweld::{report.ops[where].split(' ')[0]}"
            report.calls[name] = report.calls.get(name, 0) + 1
        counted.add(key)
        if calls is None or None in calls:
            report.replaced.append(where)
            found = True
        else:
            del report.ops[where]
            report.skipped.append((where, calls[0]))
    return found


def unfuse(model: nn.Module) -> list[str]:
    """Gives every module its stock forward and the model its attention back.

    Args:
        model: A model that went through :func:`fuse`, or a copy of one.

    Returns:
        Paths that were restored; empty when the model was stock.
    """
    _check_model(model, "torchweld.unfuse")
    gpt2 = _gpt2_module()
    from . import hf_switch

    everything = list(model.named_modules(remove_duplicate=False))
    fused = [(path, module, gpt2.fused_paths(module)) for path, module in everything]
    restored = [f"{path}.{below}" for path, _, paths in fused for below in paths]
    for _, module, paths in fused:
        if paths:
            gpt2.unfuse_block(module)
    gpt2.rename_blocks(model)
    for path, module in model.named_modules():
        if isinstance(module, gpt2.GPT2Model) and gpt2.restore_attention(model, module):
            restored.extend(where for where, _ in _attention_layers(path, module))
        elif hf_switch.restore(module):
            restored.extend(hf_switch.attention_paths(path, module))
    return restored + _restore_losses(model)


def _check_model(model: Any, asker: str) -> None:
    if isinstance(model, nn.Module):
        return
    fix = ""
    if isinstance(model, str):
        fix = f"; use transformers.AutoModelForCausalLM.from_pretrained({model!r})"
    raise TypeError(f"{asker}: model must be an nn.Module, but got {model!r}{fix}")


def _gpt2_module() -> Any:
    from .hf_version import check_version

    check_version("torchweld.fuse")
    from . import gpt2

    return gpt2


def _fuse_other(model: nn.Module, sample: Any, check: bool, report: FuseReport) -> FuseReport:
    """``fuse`` of models that are no GPT-2: their attention."""
    from . import hf_switch
    from .hf_attention import Unserved

    if not hf_switch.roots(model):
        raise TypeError(
            "torchweld.fuse: model must be or contain a model of transformers, but got "
            f"{type(model).__name__}; other models can use torchweld's ops and modules"
        )
    switches = hf_switch.plan(model, report)
    layers = {path: hf_switch.layers(path, root) for path, root in switches}
    runner = stock = seen = None
    if check and switches:
        runner = Sample(model, [root for _, root in switches], sample, hf_switch.sample_of)
        stock = runner.try_run(report)
    elif switches:
        report.notes.append(_UNCHECKED)
    try:
        for path, root in switches:
            report.ops.update((where, _ATTENTION) for where, _ in layers[path])
            hf_switch.switch(root)
        if stock:
            with measure.watching() as seen:
                compare(stock, runner.run(report), report)
    except Unserved as error:
        reason = str(error).partition(";")[0]
        report.compared = None
        for path, root in switches:
            hf_switch.restore(root)
            for where, _ in layers[path]:
                del report.ops[where]
                report.skipped.append((where, reason))
        return report
    except BaseException:
        for _, root in switches:
            hf_switch.restore(root)
        raise
    for path, root in switches:
        if not _list_layers(layers[path], seen, report):
            hf_switch.restore(root)
    if not report.replaced:
        report.max_abs_diff = report.compared = None
    return report


def _list_layers(layers: list[tuple[str, nn.Module]], seen: Any, report: FuseReport) -> bool:
    """:func:`_list` of attention layers: their sources tell of those that no sample ran."""
    from . import hf_switch

    unseen = [(where, layer) for where, layer in layers if layer not in (seen or {})]
    reasons = {where: hf_switch.unmeasured_refusal(layer) for where, layer in unseen}
    fatal = next((reason for reason, fails in filter(None, reasons.values()) if fails), None)
    listed = []
    for where, layer in layers:
        reason = fatal or (reasons.get(where) or (None, False))[0]
        if reason is None:
            listed.append((where, layer))
        else:
            del report.ops[where]
            report.skipped.append((where, reason))
    return _list(listed, seen, report)


def _attention_layers(path: str, base: Any) -> list[tuple[str, Any]]:
    prefix = f"{path}." if path else ""
    return [
        (f"{prefix}h.{index}.{name}", getattr(block, name))
        for index, block in enumerate(base.h)
        for name in ("attn", "crossattention")
        if hasattr(block, name)
    ]


def _plan(
    model: nn.Module, bases: list[tuple[str, Any]], gpt2: Any, report: FuseReport
) -> tuple[dict[str, tuple[nn.Module, Any]], list]:
    """What to replace, ``{path: (block, site)}`` and the attentions; what not to goes to report."""
    probes, used = Probes(), gpt2.uses(model)
    places, switches = {}, []
    for path, base in bases:
        prefix = f"{path}." if path else ""
        for index, block in enumerate(base.h):
            if not isinstance(block, gpt2.GPT2Block):
                reason = f"it is {type(block).__name__}, not transformers' GPT2Block"
                report.skipped.append((f"{prefix}h.{index}", reason))
                continue
            for site, reason in gpt2.sites(block, used):
                where = f"{prefix}h.{index}.{site.path}"
                if reason is None:
                    owner = getattr(block, site.owner)
                    act = site.act and getattr(owner, site.act)
                    activation = gpt2.activation_name(act) if site.act else "none"
                    weight = getattr(owner, site.linear).weight
                    reason = probes.layer_norm_linear(weight, activation)
                if reason is not None:
                    report.skipped.append((where, reason))
                    continue
                places[where] = block, site
                names = [site.norm, site.linear, *([activation] if site.act else [])]
                report.ops[where] = f"{_LAYER_NORM_LINEAR} ({' -> '.join(names)})"
        paths = [where for where, _ in _attention_layers(path, base)]
        reason = gpt2.attention_refusal(base)
        if reason is None and paths:
            for block in base.h:
                reason = reason or probes.attention(block.attn, base)
        if reason is not None:
            report.skipped.extend((where, reason) for where in paths)
        elif paths:
            switches.append((path, base))
            report.ops.update(dict.fromkeys(paths, _ATTENTION))
            dropout = base.config.attn_pdrop
            if dropout > 0:
                report.notes.append(
                    f"attn_pdrop is {dropout}: in training mode the attention uses torch's SDPA"
                )
    return places, switches


def _batch_of_gpt2(model: Any) -> dict[str, Any]:
    from . import hf_switch

    base = getattr(model, "transformer", model)
    length, generator = min(16, base.config.n_positions), torch.Generator().manual_seed(0)
    batch = hf_switch.tokens(base.config.vocab_size, length, generator)
    device = device_of(base.wte, base.wte.weight)
    return {**{name: value.to(device) for name, value in batch.items()}, "use_cache": False}
