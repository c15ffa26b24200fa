"""Reads packed documents as flash attention takes them: ``cu_seq_lens_q``, ``cu_seq_lens_k``.

``DataCollatorWithFlattening(return_flash_attn_kwargs=True)`` makes these tensors, and models hand
them to every layer's attention function. They apply beside any cache or mask, so this module uses
or refuses them, and never ignores them.

In eager mode the first layer of a forward pass computes each token's first key and checks the
documents' ends, and the later layers reuse the result. A pass ends if a model makes its mask, if a
layer asks again, or if the ends are another tensor or were written since. So no batch gets the
first keys of another one.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchweld.ops.key_start import key_start_from_cu_seqlens

from .mask_numbers import Numbers, assert_on_device, is_tracked, once

_NAMES = ("cu_seq_lens_q", "cu_seq_lens_k")


def _refusal(must: str, got: str, fix: str) -> ValueError:
    return ValueError(
        f'attn_implementation="torchweld": cu_seq_lens_q {must}, but got {got}; {fix}'
    )


def key_start(
    module: nn.Module, query: Tensor, seqlen_k: int, numbers: Numbers | None, kwargs: dict[str, Any]
) -> Tensor | None:
    """Returns the first key of each token's document, or None if nothing is packed.

    Args:
        module: The attention layer.
        query: ``(batch, nheads, seqlen_q, head_dim)``.
        seqlen_k: Number of keys.
        numbers: The layer's mask, or None if it is dense.
        kwargs: ``cu_seq_lens_q`` and ``cu_seq_lens_k`` are integers ``(documents + 1,)``: 0 and the
            ends of the documents, counted through the rows of the batch one behind the other.

    Returns:
        int32 ``(batch, seqlen_q)`` on the device of query. Nothing is read back from a GPU.

    Raises:
        ValueError: The documents can't be used: the attention is bidirectional or in chunks, there
            are keys of earlier tokens, or the tensors don't fit the batch or each other. If
            only values on a GPU show this, an assertion on the device fails.
        RuntimeError: Under torch.compile, if only the values show this.
    """
    ends, ends_k = (kwargs.get(name) for name in _NAMES)
    if ends is None and ends_k is None:
        return None
    for name, value in zip(_NAMES, (ends, ends_k), strict=True):
        good = isinstance(value, Tensor) and value.dim() == 1 and value.shape[0] > 1
        if not good or value.is_floating_point():
            got = f"{name} {tuple(value.shape)}" if isinstance(value, Tensor) else f"{name}={value}"
            raise _refusal(
                "and cu_seq_lens_k must be integer tensors (documents + 1,)",
                got,
                "use DataCollatorWithFlattening(return_flash_attn_kwargs=True)",
            )
    layer = type(module).__name__
    if numbers is not None and not numbers.causal:
        raise _refusal(
            "must be for causal attention",
            f"it in {layer}, which is not causal",
            "give the documents as rows of a padded batch",
        )
    if getattr(getattr(module, "config", None), "attention_chunk_size", None) is not None:
        raise _refusal(
            "must be for attention that is not in chunks",
            f"it in {layer}, whose config has attention_chunk_size",
            "give position_ids alone, without attention_mask and with use_cache=False",
        )
    seqlen_q = query.shape[2]
    cached = numbers is not None and numbers.key_end is not None  # it says how many keys are real
    if ends.shape != ends_k.shape or (seqlen_k != seqlen_q and not cached) or seqlen_k < seqlen_q:
        raise _refusal(
            "and cu_seq_lens_k must be equal, for as many keys as queries",
            f"{ends.shape[0] - 1} and {ends_k.shape[0] - 1} documents, {seqlen_q} queries and "
            f"{seqlen_k} keys in {layer}",
            "leave them out where keys are cached or come from another sequence",
        )
    return _start_of_pass(module, query, ends, ends_k)


class _Pass(NamedTuple):
    """Keeps the first keys of a forward pass for its later layers."""

    ends: weakref.ref[Tensor]
    ends_k: weakref.ref[Tensor]
    made_for: tuple[Any, ...]  # versions of ends and ends_k, shape, device and mode
    start: Tensor
    layers: weakref.WeakSet[nn.Module]


_last: _Pass | None = None


def end_pass() -> None:
    """Forgets the first keys of the last pass. The mask function calls this in each pass."""
    global _last
    _last = None


def _start_of_pass(module: nn.Module, query: Tensor, ends: Tensor, ends_k: Tensor) -> Tensor:
    """Returns the first keys ``(batch, seqlen_q)``, computed once in a forward pass."""
    global _last
    if torch.compiler.is_compiling() or not all(map(is_tracked, (ends, ends_k))):
        return _document_starts(query, ends, ends_k)
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        return _document_starts(query, ends, ends_k)
    last = _last  # another thread may set it meanwhile
    batch, _, seqlen_q, _ = query.shape
    versions = ends._version, ends_k._version
    made_for = versions, batch, seqlen_q, query.device, torch.is_inference_mode_enabled()
    if (
        last is not None
        and last.ends() is ends
        and last.ends_k() is ends_k
        and last.made_for == made_for
        and module not in last.layers
    ):
        last.layers.add(module)
        return last.start
    start = _document_starts(query, ends, ends_k)
    layers = weakref.WeakSet([module])
    _last = _Pass(weakref.ref(ends), weakref.ref(ends_k), made_for, start, layers)
    return start


def _document_starts(query: Tensor, ends: Tensor, ends_k: Tensor) -> Tensor:
    batch, _, seqlen_q, _ = query.shape
    same = ends is ends_k
    ends, ends_k = ends.to(query.device), ends_k.to(query.device)
    start = key_start_from_cu_seqlens(ends.to(torch.int32), batch * seqlen_q)
    start = start.view(batch, seqlen_q)
    row = torch.arange(batch, dtype=torch.int32, device=query.device)
    start = start - seqlen_q * row[:, None]
    # NOTE: not diff(): its size for one document is 1, and a graph compiled for 1 serves no others.
    ascending = (ends.cummax(0).values == ends).all()
    good = (ends[0] == 0) & (ends[-1] == batch * seqlen_q) & ascending
    if not same:
        good = good & (ends == ends_k).all()
    if batch > 1:  # no document may go on in the next row
        good = good & (start[:, 0] == 0).all()
    _require(good, batch, seqlen_q)
    return start


def _require(good: Tensor, batch: int, seqlen_q: int) -> None:
    traced = torch.compiler.is_compiling()
    # NOTE: a text with sizes would bind a traced graph to these sizes.
    tokens = "tokens" if traced else f"{batch} x {seqlen_q} tokens"
    error = _refusal(
        f"and cu_seq_lens_k must be equal and split the batch's {tokens} row by row, without "
        "cached tokens",
        "others",
        "use DataCollatorWithFlattening",
    )
    if type(good) is Tensor and good.device.type == "cpu" and not traced:
        if not good:
            raise error
    else:
        assert_on_device(good, str(error))


def apply(start: Tensor, numbers: Numbers, mask: Tensor | None) -> Numbers:
    """Returns a causal mask within documents as numbers, computed once for a pass's layers.

    ``start`` is the result of :func:`key_start`; ``numbers`` are those of ``mask``.

    Raises:
        ValueError: There are cached tokens before the documents.
        RuntimeError: Under torch.compile, for the same reason.
    """
    if numbers.hides_no_key:
        return Numbers(causal=True, key_start=start)
    return once(mask, "torchweld_packed", (start,), lambda: _apply(start, numbers))


def _apply(start: Tensor, numbers: Numbers) -> Numbers:
    if numbers.key_end is not None:
        _require((numbers.key_end == start.shape[1]).all(), *start.shape)
    if numbers.leftpad is not None:
        start = start.maximum(numbers.leftpad[:, None])
    if numbers.key_start is not None:
        start = start.maximum(numbers.key_start)
    return Numbers(causal=True, key_start=start, key_end=numbers.key_end)


def apply_dense(start: Tensor, mask: Tensor) -> Tensor:
    """Restricts a dense mask ``(batch, nheads or 1, seqlen_q, seqlen_k)`` to the documents."""
    together = (start[:, :, None] == start[:, None, :])[:, None]
    if mask.dtype == torch.bool:
        return mask & together
    return mask.masked_fill(~together, torch.finfo(mask.dtype).min)
