"""What the kernels here share: GPUs with code, torch's layouts, torch's dispatcher."""

from __future__ import annotations

import functools
import math
import re
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchweld._library import build_facts
from torchweld.info import recorded_archs

FLASH_DTYPES = (torch.float16, torch.bfloat16)  # of torch's flash back end
MAX_HEAD_DIM = 256  # of torch's flash back end, and of torchweld's kernels for tensor cores


def refusal(
    tensors: tuple[Tensor, Tensor, Tensor],
    dtypes: tuple[torch.dtype, ...],
    dims: int,
    heads: int,
    scale: float | None,
) -> str | None:
    """Why query, key and value run torch's own kernel, or None.

    Args:
        tensors: query, key and value, which must have ``dims`` dims.
        dtypes: those that torch's kernel takes.
        dims: how many dims they have.
        heads: the dim of the heads; those of key may divide those of query.
        scale: factor of the scores.
    """
    query, key, value = tensors
    if any(t.is_nested for t in tensors):
        return "nested tensors"
    if query.dtype not in dtypes or not key.dtype == value.dtype == query.dtype:
        names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        return f"the dtype is not {', '.join(names[:-1])} or {names[-1]}"
    if any(t.dim() != dims for t in tensors):
        return f"a tensor is not {dims}-D"
    if not key.device == value.device == query.device:
        return "the devices differ"
    if key.shape != value.shape or key.shape[-1] != query.shape[-1]:
        return "the shapes don't belong together"
    if any(0 in t.shape for t in tensors):
        return "a size is 0"
    if query.shape[heads] % key.shape[heads]:
        return "the heads of key don't divide those of query"
    if scale is not None and not math.isfinite(scale):
        return "scale is not finite"
    return None


def gradient_refusal(grad_out: Tensor, query: Tensor, out: Tensor, lse: Tensor) -> str | None:
    """Why a gradient runs torch's own kernel for what its forward pass has saved, or None."""
    if any(t.shape != query.shape or t.dtype != query.dtype for t in (grad_out, out)):
        return "grad_out or out is not like query"
    if any(t.device != query.device for t in (grad_out, out, lse)):
        return "the devices differ"
    return None


def general_kernel(*head_dims: int) -> str | None:
    """Why torchweld's attention would run its general kernel on a GPU, or None.

    That one uses no tensor cores. torch's back ends for such head dims do, and are faster.
    """
    if max(head_dims) <= MAX_HEAD_DIM:
        return None
    return f"no kernel for tensor cores has a head dim above {MAX_HEAD_DIM}"


def head_dim_refusal(tensors: tuple[Tensor, Tensor, Tensor]) -> str | None:
    """Why a head dim runs torch's own kernel, or None."""
    head_dim = tensors[0].shape[-1]
    if reason := general_kernel(head_dim):
        return reason
    if head_dim % 8:
        return "the head dim is not a multiple of 8"
    if any(t.stride(-1) != 1 for t in tensors):
        return "the last dim is not contiguous"
    return None


def has_code(capability: tuple[int, int], archs: list[str]) -> bool:
    """Whether a library with GPU code for these, "9.0a" or "8.0+PTX", runs on a GPU."""
    for arch in archs:
        number = re.fullmatch(r"(\d+)\.(\d)(a?)(\+PTX)?", arch)
        if number is None:
            # the architecture is unknown here; a launch reports an error if there is no code
            return True
        built = (int(number[1]), int(number[2]))
        exact, ptx = bool(number[3]), bool(number[4])
        if capability == built or (ptx and not exact and capability > built):
            return True
        if not exact and capability[0] == built[0] and capability[1] > built[1]:
            return True
    return not archs


@functools.cache
def runs_on(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    archs = recorded_archs(build_facts())
    return has_code(torch.cuda.get_device_capability(device), archs)


def laid_out(result: Tensor, like: Tensor) -> Tensor:
    """The result with the strides of torch's kernels, on which compiled graphs and views rely."""
    wanted = torch.empty_like(like, device="meta").stride()
    return result if result.stride() == wanted else torch.empty_like(like).copy_(result)


def unused_random_state(device: torch.device) -> tuple[Tensor, Tensor]:
    """Seed and offset of dropout, uninitialised without it, as in torch's kernels."""
    seed, offset = (torch.empty(size, dtype=torch.uint64, device=device) for size in ((2,), ()))
    return seed, offset


def replace(library: torch.library.Library, op: str, kernel: Callable[..., Any], key: str) -> None:
    with warnings.catch_warnings():
        # torch warns that a kernel is overridden, which is the purpose of this call.
        warnings.filterwarnings("ignore", r"[\s\S]*Overriding a previously registered kernel")
        library.impl(op, kernel, key, with_keyset=True, allow_override=True)


class Pair:
    """An op of torch and its gradient, whose kernels for a dispatch key are replaced.

    ``torchs_forward`` and ``torchs_backward`` are the kernels that were there before.
    """

    FORWARD: ClassVar[str]
    BACKWARD: ClassVar[str]
    forward: Callable[..., Any]
    backward: Callable[..., Any]

    def __init__(self, key: str) -> None:
        self.torchs_forward = torch.library.get_kernel(f"aten::{self.FORWARD}", key)
        self.torchs_backward = torch.library.get_kernel(f"aten::{self.BACKWARD}", key)

    def install(self, library: torch.library.Library, key: str) -> None:
        replace(library, self.FORWARD, self.forward, key)
        replace(library, self.BACKWARD, self.backward, key)
