"""Rewires an existing model in place (``fuse``), and restores it (``unfuse``)."""

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

    In every model of transformers it switches the attention (``attn_implementation="torchweld"``)
    and replaces torch's LayerNorms: one alone by :func:`torchweld.layer_norm`, one after a residual
    addition by :func:`torchweld.add_layer_norm`, one in front of query, key and value by
    :func:`torchweld.layer_norm_linears` (on a CPU only in bfloat16). It also replaces RMSNorms,
    MLPs, experts of mixtures, rotary embeddings and residual additions of classes that it
    recognises by their submodules, if a small random copy of the module computes the same results
    and gradients with the op. An MLP without a gate runs its first layer and its activation as one
    op (:func:`torchweld.linear`, on a GPU). In Llama, Mistral, Qwen2, Qwen3, Gemma 1 to 3, Phi-3,
    OLMo-2, SmolLM3, Granite and GLM-4 the norms run as :func:`torchweld.rms_norm`,
    :func:`torchweld.add_rms_norm` and :func:`torchweld.rms_norm_linears` in the same way, the
    rotary embedding as :func:`torchweld.rotary`, and the MLP's products and gate as
    :func:`torchweld.gated_mlp`. In GPT-2 ``ln_1 -> attn.c_attn`` and ``ln_2 -> mlp.c_fc ->
    mlp.act`` run as :func:`torchweld.layer_norm_linear`, on the Conv1D weights as they are. PEFT's
    LoRA layers add the adapter's product to the base layer's in place, and the MLP around them runs
    its gate as :func:`torchweld.gated_activation`; adapters of the weights of experts run as
    :func:`torchweld.grouped_linear` beside them. Call fuse after ``get_peft_model``. Layers of timm
    and diffusers keep their forward, but its SDPA calls run :func:`torchweld.attention`.

    Parameters, their names, state_dict, optimizers, save_pretrained and config.json stay as they
    were. A module that can't be replaced safely keeps its own (stock) forward and is listed with
    the reason: a class that does not take its attention from transformers' AttentionInterface,
    sparse attention that selects keys for each query, hooks (accelerate's offloading too),
    quantised layers, parameters that are sharded otherwise than by ``parallelize`` or
    ``fully_shard``, mixed dtypes, blocks of GPT-2 whose submodules the model uses in several
    places, an activation without a fused form, a device that this build has no kernel for.

    The report is measured: it lists the ops that the layers ran on the sample batch. A layer that
    ran SDPA on it is listed with the reason. If every attention layer of a model did, the model's
    attention stays stock.

    Args:
        model: A model of these libraries or any module that contains one. It may be moved, cast,
            copied, pickled, compiled and trained afterwards.
        sample: Batch for the comparison with the stock model: ``input_ids``, or a dict of keyword
            arguments. By default a small random batch of the model's inputs: tokens, padded on one
            side, images or audio. If the default does not fit the model, or the model is one of
            diffusers, nothing is compared, and the report says so. If a given batch does not fit,
            the model's error is raised and the model stays as it was.
        check: Whether to run that comparison, in eval mode without gradients: on the whole batch
            and, if a decoder has a cache, in two calls and four more tokens over the cache. If
            layers have dropout, they run the batch once more as in training mode, and the report
            notes the code that ran instead of an op. If False, the report lists the ops that the
            layers ought to run, and says that nothing was measured.
        loss: Whether language models (causal, masked, encoder-decoder) compute their head and loss
            as one op (:func:`torchweld.linear_cross_entropy`): in training mode with labels they
            then return a loss and no logits. A model whose forward uses its logits otherwise than
            for a cross entropy computes them. Evaluation and generation stay as they were. A string
            means True and sets the op's ``keep`` ("auto" by default): "nothing" needs the least
            memory, and its backward computes the logits again.
        only: The kinds to replace: some of "attention", "norm", "mlp", "experts", "rotary", "lora".
            None: all. (In a GPT-2, ln_1 and c_attn are "norm"; ln_2, c_fc and the activation are
            "mlp".)
        batch_invariant: True: every call of the model runs in `torchweld.batch_invariant()`, where
            a token has the same bits in every batch, prefill or step (docs/invariance.md). False:
            calls run as they did before this fuse.

    Returns:
        A report to print. Calling fuse again changes no module that is replaced already.

    Raises:
        ImportError: transformers is missing or too old.
        TypeError: model contains no model of these libraries; sample is no Tensor and no dict.
        ValueError: ``only`` or ``loss`` has an unknown name.
        RuntimeError: The operator library can't be loaded, or the fused model gave NaN or inf where
            the stock model did not; the model is stock again then.

    Warns:
        UserWarning: The fused model differs from the stock one much more over a cache than without;
            or transformers is newer than the releases that the tests have run with.

    Limits:
        A module that is called with an argument that its fused forward does not know runs the stock
        forward, and a warning says so once.
        A hook that is added to a submodule after fuse makes the ops around it run stock, and so
        does a norm that is cast to another dtype than the rest.
        Attention dropout above 0 makes training steps use torch's SDPA, except in 16 bits on Hopper
        with head dims that are multiples of 8 up to 128, without a soft cap. Calls that ask for
        attention weights use eager attention.
        Under torch.compile norms and rotary embeddings run stock, and the compiler fuses them.

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
    """Fuses the losses of a model. The sample batch has no labels, so it does not run them."""
    from . import plan
    from .recognise import heads

    for replacement in plan.plan_losses(model, Probes(), report):
        plan.apply(replacement)
        if replacement.where not in report.replaced:  # a model may call another with its head
            report.replaced.append(replacement.where)
            report.ops[replacement.where] += WITH_LABELS
    heads.set_options(model, keep)


def unfuse(model: nn.Module) -> list[str]:
    """Gives every module its stock forward and the model its attention back.

    Args:
        model: A model that went through :func:`fuse`, or a copy of one.

    Returns:
        The paths of the modules that were restored; empty if the model was stock.

    Raises:
        ImportError: transformers is missing or too old.
        TypeError: model is not an nn.Module.

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
