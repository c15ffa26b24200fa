"""Says which GPUs this build has code for, and which calls a kernel for tensor cores has."""

from __future__ import annotations

import functools
import re

import torch
from torch import Tensor

from torchweld._library import build_facts
from torchweld.info import recorded_archs

MAX_HEAD_DIM = 256  # of torch's flash back end, and of torchweld's kernels on all GPUs
_MAX_HOPPER_DIM = 512  # of Hopper's kernels that serve no soft cap in the backward
_MAX_FEATURE_DIM = 128  # of Hopper's kernels with dropout, a bias or ALiBi
DROPOUT = "attention dropout is on"
BIAS = "a position bias is added to the scores"
ALIBI = "ALiBi is on"
# NOTE: Dynamo can't trace the functions that read the build's facts.
_HAS_SM90A = "9.0a" in recorded_archs(build_facts())


def general_kernel(query: Tensor, *head_dims: int, softcap: float | None = None) -> str | None:
    """Returns why torchweld's attention would run its general kernel on a GPU, or None.

    The general kernel uses no tensor cores. torch's back ends use them for such head dims too and
    are faster. On a CPU the result is None.
    """
    largest = MAX_HEAD_DIM
    if not query.is_cuda or max(head_dims) <= largest:
        return None
    if softcap is None and _has_hopper_kernel(query, head_dims):
        largest = _MAX_HOPPER_DIM
    if max(head_dims) <= largest:
        return None
    return f"no kernel for tensor cores has a head dim above {largest}"


def no_kernel_with(
    feature: str, query: Tensor, *head_dims: int, softcap: float | None = None
) -> str | None:
    """Returns why no kernel for tensor cores runs a call with DROPOUT, BIAS or ALIBI, or None.

    torch's back ends are faster than torchweld's general kernel. On a CPU the result is None.
    """
    if not query.is_cuda:
        return None
    fits = max(head_dims) <= _MAX_FEATURE_DIM and softcap is None
    served = fits and _has_hopper_kernel(query, head_dims)
    return None if served else f"{feature}, which no kernel for tensor cores has here"


def _has_hopper_kernel(query: Tensor, head_dims: tuple[int, ...]) -> bool:
    """Whether Hopper's kernels take a call forward and backward, if its head dims are not large."""
    autocast = torch.is_autocast_enabled("cuda")  # the op casts its arguments
    dtype = torch.get_autocast_dtype("cuda") if autocast else query.dtype
    return (
        dtype in (torch.float16, torch.bfloat16)
        and all(dim % 8 == 0 for dim in head_dims)
        and _HAS_SM90A
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability(query.device) == (9, 0)
    )


def has_code(capability: tuple[int, int], archs: list[str]) -> bool:
    """Whether a library with GPU code for ``archs``, as "9.0a" or "8.0+PTX", runs on a GPU."""
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
