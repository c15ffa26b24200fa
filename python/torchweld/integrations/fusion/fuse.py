"""``fuse`` and ``unfuse``: rewire an existing model in place, and take it back."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from torchweld import _library
from torchweld._refusals import describe
from torchweld.integrations.version import check_version

from . import batch_invariance as invariance
from .probes import Probes
from .report import WITH_LABELS, FuseReport

KINDS = ("attention", "norm", "mlp", "experts", "rotary", "lora")
_KEEPS = ("auto", "exponentials", "gradients", "nothing")  # of linear_cross_entropy


def fuse(
    model: nn.Module,
    *,
    sample: Any = None,
    check: bool = True,
    loss: bool | str = False,
    only: Collection[str] | None = None,
    batch_invariant: bool = False,
) -> FuseReport:
    """Rewires a model of transformers, timm or diffusers in place to run torchweld's ops.

    Of every model of transformers it switches the attention (``attn_implementation="torchweld"``)
    and replaces torch's LayerNorms (:func:`torchweld.layer_norm`, with the residual's sum
    :func:`torchweld.add_layer_norm`, with query, key and value
    :func:`torchweld.layer_norm_linears`; on a CPU in bfloat16 alone) and the RMSNorms, MLPs,
    experts of mixtures, rotary embeddings and residual additions that it recognises by their
    modules, if a small random copy of the module computes the same results and gradients. An MLP
    without a gate runs its first layer and its activation as one op (:func:`torchweld.linear`, on a
    GPU). Of Llama, Mistral, Qwen2, Qwen3, Gemma 1 to 3, Phi-3, OLMo-2, SmolLM3, Granite and GLM-4
    it replaces the norms (:func:`torchweld.rms_norm`, with the residual's sum
    :func:`torchweld.add_rms_norm`, with query, key and value :func:`torchweld.rms_norm_linears`),
    the rotary embedding (:func:`torchweld.rotary`) and the MLP's products and gate
    (:func:`torchweld.gated_mlp`); of GPT-2 ``ln_1 -> attn.c_attn`` and ``ln_2 -> mlp.c_fc ->
    mlp.act`` (both :func:`torchweld.layer_norm_linear`, on the Conv1D weights as they are). PEFT's
    LoRA layers add their adapter's product to that of the base layer, and the MLP around them keeps
    its gate (:func:`torchweld.gated_activation`); call fuse after ``get_peft_model``. Layers of
    timm and diffusers run their own forward, with its calls of SDPA as :func:`torchweld.attention`.

    Parameters, their names, state_dict, optimizers, save_pretrained and config.json stay as they
    were. A module that can't be replaced safely stays stock and is listed with the reason: a class
    that does not take its attention from transformers' AttentionInterface, layers that choose their
    keys, hooks (accelerate's offloading too), quantised layers, parameters that are sharded
    otherwise than by ``parallelize`` or ``fully_shard``, mixed dtypes, blocks of GPT-2 whose parts
    the model uses in several places, an activation without a fused form, a device that this build
    has no kernel for.

    The report is measured: it lists the ops that the layers run on the sample batch. A layer that
    ran SDPA there is listed with the reason, and a model without a layer that runs an op stays
    stock.

    Args:
        model: A model of these libraries or any module that contains one. It may be moved, cast,
            copied, pickled, compiled and trained afterwards.
        sample: Batch for the comparison with the stock model: ``input_ids``, or a dict of keyword
            arguments. By default a small random batch of the model's inputs: tokens, padded on one
            side, images or audio. If it does not fit, or the model is one of diffusers, the report
            says so.
        check: Whether to run that comparison, in eval mode without gradients: the batch whole and,
            where a decoder has a cache, in two calls and four more tokens over it. Layers with
            dropout run it once more as in training mode, and the report notes what runs there.
            Without it the report says what ought to run, and that no measurement was made.
        loss: Whether a language model of these families, or one recognised likewise, computes its
            head and loss as one op (:func:`torchweld.linear_cross_entropy`): in training mode with
            labels it then returns a loss and no logits. Evaluation and generation stay as they
            were. A string is the op's ``keep``: "nothing" needs the least memory and a product
            more, where blocks are recomputed too; True is "auto".
        only: The kinds to replace: some of "attention", "norm", "mlp", "experts", "rotary", "lora".
            By default all. (Of a GPT-2, ln_1 and c_attn are "norm", ln_2, c_fc and the activation
            "mlp".)
        batch_invariant: Whether every call of the model runs in `torchweld.batch_invariant()`: a
            token then has the same bits in every batch, prefill or step (docs/invariance.md).

    Returns:
        A report that prints itself. Calling fuse again replaces nothing that is replaced already.

    Raises:
        ImportError: transformers is missing or too old.
        TypeError: It contains no model of these libraries; sample is neither a Tensor nor a dict.
        ValueError: ``only`` or ``loss`` has an unknown name.
        RuntimeError: The operator library can't be loaded, or the fused model gave NaN or inf where
            the stock model did not; the model is stock again then.

    Warns:
        UserWarning: The fused model is off over a cache and not without one; or transformers is
            newer than the releases that the tests have run with.

    Limits:
        A call of a part with an argument that its fused forward does not know runs the stock
        forward, and a warning says so once.
        Hooks added to a part of a block later make that part of the block run stock, and so does a
        norm that is cast alone.
        Attention dropout above 0 makes training steps use torch's SDPA, except in 16 bits on Hopper
        with head dims up to 128. Calls that ask for attention weights use GPT-2's eager attention.
        Compiled models run norms and rotary embeddings as the compiler fuses them.

    Example::

        report = torchweld.fuse(model, loss=True)
        print(report)
        model(input_ids=tokens, labels=tokens).loss.backward()
    """
    _library.require()
    _check_model(model, "torchweld.fuse")
    kinds, keep = _kinds(only), _keep(loss)
    check_version("torchweld.fuse")
    from . import run

    report = FuseReport(model=type(model).__name__)
    held = invariance.release(model)  # a module with hooks would stay stock
    run.fuse(model, sample, check, kinds, report)
    if loss:
        _fuse_losses(model, report, keep)
    if batch_invariant or held:
        invariance.hold(model)
        report.notes.append(
            "every call runs in torchweld.batch_invariant(); what runs something else than an op "
            "keeps torch's own sums"
        )
    return report


def _fuse_losses(model: nn.Module, report: FuseReport, keep: str) -> None:
    """Switches the losses of a model, which the sample batch, without labels, does not run."""
    from torchweld.integrations.fusion.layers import causal_lm

    from . import plan

    for replacement in plan.plan_losses(model, Probes(), report):
        plan.apply(replacement)
        report.replaced.append(replacement.where)
        report.ops[replacement.where] += WITH_LABELS
    causal_lm.set_keep(model, keep)


def unfuse(model: nn.Module) -> list[str]:
    """Gives every module its stock forward and the model its attention back.

    Args:
        model: A model that went through :func:`fuse`, or a copy of one.

    Returns:
        Paths that were restored; empty when the model was stock.

    Example::

        torchweld.fuse(model)
        paths = torchweld.unfuse(model)
        assert "model.norm" in paths and not torchweld.unfuse(model)
    """
    _check_model(model, "torchweld.unfuse")
    check_version("torchweld.unfuse")
    from . import attention_switch, gpt2, plan

    invariance.release(model)
    restored = gpt2.unfuse(model)
    for path, module in model.named_modules():
        if attention_switch.restore(module):
            restored.extend(where for where, _ in attention_switch.layers(path, module))
    return restored + plan.unfuse(model)


def _kinds(only: Collection[str] | None) -> Collection[str]:
    if only is None:
        return KINDS
    given = [only] if isinstance(only, str) else list(only)
    for name in given:
        if name not in KINDS:
            known = ", ".join(f'"{kind}"' for kind in KINDS)
            raise ValueError(f"torchweld.fuse: only must be some of {known}, but got {name!r}")
    return given


def _keep(loss: bool | str) -> str:
    if isinstance(loss, bool):
        return "auto"
    if loss not in _KEEPS:
        known = ", ".join(f'"{keep}"' for keep in _KEEPS)
        raise ValueError(f"torchweld.fuse: loss must be a bool or one of {known}, but got {loss!r}")
    return loss


def _check_model(model: Any, caller: str) -> None:
    if isinstance(model, nn.Module):
        return
    fix = ""
    if isinstance(model, str):
        fix = f"; use transformers.AutoModelForCausalLM.from_pretrained({model!r})"
    raise TypeError(f"{caller}: model must be an nn.Module, but got {describe(model)}{fix}")
