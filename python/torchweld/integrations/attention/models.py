"""Decides which transformers classes ``attn_implementation="torchweld"`` serves.

A class must take its attention from transformers' ``AttentionInterface``: only then does the result
of the mask function reach the attention function. The class must also support ``sdpa``, which runs
every call that torchweld's op can't. Or it may lack ``sdpa`` for attention sinks or soft-capped
scores alone: the op has both, and the class's own eager attention runs the other calls.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Iterator

import torch
import transformers

from .fallback import NAME


def refusal(cls: type[transformers.PreTrainedModel]) -> str | None:
    """Returns one sentence that says why a class is not served, or None."""
    reason = unsupported_reason(cls)
    return None if reason is None else _sentence(cls.__name__, reason)


def check_config(config_class: type) -> None:
    """Raises an error if the running model, known by its config alone, is not served.

    Raises:
        ValueError: no class of this config is served.
    """
    text = _refusal_of_config(config_class)
    if text is not None:
        raise ValueError(text)


def _sentence(who: str, reason: str) -> str:
    return (
        f'torchweld: attn_implementation must be "eager" for {who}, but got "{NAME}"; it {reason}'
    )


def unsupported_reason(cls: type[transformers.PreTrainedModel]) -> str | None:
    """Returns the reason why a class is not served, as a predicate, or None."""
    # transformers reads a class's source file. A class typed into a notebook has none, so its
    # parent decides.
    written = next(
        base
        for base in cls.__mro__
        if issubclass(base, transformers.PreTrainedModel)
        and hasattr(sys.modules[base.__module__], "__file__")
    )
    if written is transformers.PreTrainedModel:
        return "has no source file that shows where it takes its attention from"
    if not written._can_set_attn_implementation():
        return "does not take its attention from transformers' AttentionInterface"
    if not cls._supports_sdpa and not _has_sinks_or_softcap(written):
        return 'does not support "sdpa", which torchweld falls back to'
    return None


def _has_sinks_or_softcap(cls: type[transformers.PreTrainedModel]) -> bool:
    """Whether a class's attention has a feature of torchweld's op that SDPA lacks.

    Flash attention has both features and takes no dense masks: a class that supports flash
    attention lacks SDPA for no other reason, and does not change masks on their way.
    """
    return (
        getattr(cls, "_supports_attention_backend", False)
        and getattr(cls, "_supports_flash_attn", False)
        and hasattr(sys.modules[cls.__module__], "eager_attention_forward")
        and re.search(r"\b(s_aux|softcap)=self\.", _source(cls)) is not None
    )


def _source(cls: type) -> str:
    try:
        return inspect.getsource(sys.modules[cls.__module__])
    except (OSError, TypeError, KeyError):
        return ""


@functools.cache
def layer_source(cls: type) -> str:
    """Returns the source of the class that defines a layer's forward, "" without a source."""
    owner = next((base for base in cls.__mro__ if "forward" in vars(base)), cls)
    try:
        return inspect.getsource(owner)
    except (OSError, TypeError):
        return ""


def asks_for_attention(cls: type) -> bool:
    """Whether a layer class uses AttentionInterface; without a source its name decides."""
    source = layer_source(cls)
    return "ALL_ATTENTION_FUNCTIONS" in source if source else cls.__name__.endswith("Attention")


@torch.compiler.assume_constant_result
def wants_whole_masks(config_class: type) -> bool:
    """Whether a model of this config changes masks itself, or may, and so must get dense ones."""
    return _cached_whole_masks(config_class)


@functools.cache
def _cached_whole_masks(config_class: type) -> bool:
    sources = [_source(cls) for cls in _classes(config_class)]
    skips = ("allow_is_causal_skip", "allow_is_bidirectional_skip")
    return not (sources and all(sources)) or any(
        skip in source for source in sources for skip in skips
    )


@torch.compiler.assume_constant_result
def _refusal_of_config(config_class: type) -> str | None:
    return _cached_refusal(config_class)


@functools.cache
def _cached_refusal(config_class: type) -> str | None:
    # One served class is enough: another library's class may share the config.
    reasons = [unsupported_reason(cls) for cls in _classes(config_class)]
    if not reasons or None in reasons:
        return None
    return _sentence(f"a model of {config_class.__name__}", reasons[0])


def _classes(config_class: type) -> list[type]:
    """Returns the model classes that have this config."""
    return [
        cls
        for cls in _subclasses(transformers.PreTrainedModel)
        if getattr(cls, "config_class", None) is config_class
    ]


def _subclasses(cls: type) -> Iterator[type]:
    for below in cls.__subclasses__():
        yield below
        yield from _subclasses(below)
