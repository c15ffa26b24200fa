"""torchweld's attention under ``F.scaled_dot_product_attention`` on CUDA, for as long as is wished.

torch keeps a registry of flash attention implementations (``torch.nn.attention``); one that is
active replaces CUDA kernels of aten ops. Two are replaced here, those that SDPA's flash back end
calls, each by a function that runs torchweld's kernel where ``refusal`` finds nothing against it,
and else the kernel that was there before::

    F.scaled_dot_product_attention            torch chooses a back end, in its order of preference
     -> aten::_scaled_dot_product_flash_attention            out, lse
         -> torchweld::attention_forward, or torch's own flash kernel
    the gradient: aten::_scaled_dot_product_flash_attention_backward
         -> torchweld::attention_backward, or torch's own

What a graph has saved means the same to both: lse is the natural logarithm in float32,
(batch, nheads, seqlen_q), and causal masks are aligned at the bottom right. They differ in rows
that see no key (lse is -inf here, inf there), which are left to torch in both directions. So a
graph that was recorded with one runs backward with the other. ``aten::_flash_attention_forward``,
where nested and packed sequences, windows and alibi go, stays torch's, and so do the overloads for
fp8.

On Hopper torch prefers its cuDNN back end to flash, so that SDPA would never get here: flash is put
first in torch's order for as long.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention

from torchweld._library import build_facts, ops, require
from torchweld.info import has_cuda_kernel, recorded_archs

NAME = "torchweld"
FORWARD = "_scaled_dot_product_flash_attention"
BACKWARD = "_scaled_dot_product_flash_attention_backward"

_DTYPES = (torch.float16, torch.bfloat16)
_MAX_HEAD_DIM = 256  # the largest head dim of torch's flash back end


def refusal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    scale: float | None = None,
) -> str | None:
    """Why a call of the flash op runs torch's own kernel, None where torchweld's serves it.

    Asked of shapes, dtypes and numbers alone. What torch's op refuses is left to it, so that the
    error is the same as ever.
    """
    tensors = (query, key, value)
    if any(t.is_nested for t in tensors):
        return "nested tensors"
    if dropout_p != 0:
        return "dropout_p is above 0"
    if return_debug_mask:
        return "return_debug_mask is set"
    if query.dtype not in _DTYPES or not key.dtype == value.dtype == query.dtype:
        return "the dtype is not float16 or bfloat16"
    if any(t.dim() != 4 for t in tensors):
        return "a tensor is not 4-D"
    if not key.device == value.device == query.device:
        return "the devices differ"
    batch, nheads, seqlen_q, head_dim = query.shape
    nheads_kv, seqlen_k = key.shape[1], key.shape[2]
    if key.shape != value.shape or (key.shape[0], key.shape[3]) != (batch, head_dim):
        return "the shapes don't belong together"
    if 0 in (batch, nheads, seqlen_q, head_dim, nheads_kv, seqlen_k):
        return "a size is 0"
    if nheads % nheads_kv:
        return "the heads of key don't divide those of query"
    if head_dim % 8 or head_dim > _MAX_HEAD_DIM:
        return f"the head dim is not a multiple of 8 up to {_MAX_HEAD_DIM}"
    if any(t.stride(3) != 1 for t in tensors):
        return "the last dim is not contiguous"
    if is_causal and seqlen_q > seqlen_k:
        return "rows that see no key have another lse"
    if scale is not None and not math.isfinite(scale):
        return "scale is not finite"
    return None


def backward_refusal(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None = None,
) -> str | None:
    """`refusal` of the gradient. It depends on what was saved alone, not on which forward ran."""
    if cum_seq_q is not None or cum_seq_k is not None:
        return "packed sequences"
    reason = refusal(query, key, value, dropout_p, is_causal, False, scale)
    if reason is not None:
        return reason
    if any(t.shape != query.shape or t.dtype != query.dtype for t in (grad_out, out)):
        return "grad_out or out is not like query"
    if logsumexp.shape != query.shape[:3] or logsumexp.dtype != torch.float32:
        return "logsumexp is not float32 (batch, nheads, seqlen_q)"
    if any(t.device != query.device for t in (grad_out, out, logsumexp)):
        return "the devices differ"
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
def _runs_on(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    archs = recorded_archs(build_facts())
    return has_code(torch.cuda.get_device_capability(device), archs)


def _laid_out(result: Tensor, like: Tensor) -> Tensor:
    """The result with the strides of torch's kernels, on which compiled graphs and views rely."""
    wanted = torch.empty_like(like, device="meta").stride()
    return result if result.stride() == wanted else torch.empty_like(like).copy_(result)


def flash_first(order: list[int]) -> list[int]:
    """torch's order of back ends with flash in front."""
    flash = int(attention.SDPBackend.FLASH_ATTENTION)
    return [flash, *(backend for backend in order if backend != flash)]


def _replace(library: torch.library.Library, op: str, kernel: Callable[..., Any], key: str) -> None:
    with warnings.catch_warnings():
        # torch warns that a kernel is overridden, which is the purpose of this call.
        warnings.filterwarnings("ignore", r"[\s\S]*Overriding a previously registered kernel")
        library.impl(op, kernel, key, with_keyset=True, allow_override=True)


class Kernels:
    """The two kernels in torch's dispatcher, until `remove`; what torch's registry holds.

    Args:
        key: the dispatch key whose kernels are replaced. Tests replace those of "CPU".
    """

    def __init__(self, key: str = "CUDA") -> None:
        self.users = 0  # the number of handles that have not been removed
        self.before: str | None = None  # the implementation that was active before this one
        # the order of back ends before this change, and the order that was set
        self._order: tuple[list[int], list[int]] | None = None
        self._forward = torch.library.get_kernel(f"aten::{FORWARD}", key)
        self._backward = torch.library.get_kernel(f"aten::{BACKWARD}", key)
        library = torch.library.Library("aten", "IMPL", key)
        self._library: torch.library.Library | None = library
        try:
            _replace(library, FORWARD, self.forward, key)
            _replace(library, BACKWARD, self.backward, key)
        except BaseException:
            self.remove()
            raise
        if key == "CUDA":
            torch.cuda._lazy_call(self._put_flash_first)

    @property
    def active(self) -> bool:
        return self._library is not None

    def remove(self) -> None:
        """Puts torch's kernels and its order of back ends back; called again, does nothing."""
        library, self._library = self._library, None
        if library is not None:
            library._destroy()
        order, self._order = self._order, None
        # If someone else has set another order since then, that order stays.
        if order is not None and torch._C._get_sdp_priority_order() == order[1]:
            torch._C._set_sdp_priority_order(order[0])

    def _put_flash_first(self) -> None:
        """Called when CUDA is initialised, which nothing here brings about."""
        if not self.active:
            return
        nothing = torch.empty(0, 1, 1, 8, dtype=torch.float16, device="cuda")
        # NOTE: when torch first chooses a back end, it overwrites the order with the default order
        # of this GPU. So torch must choose once before the order is changed. The call raises
        # RuntimeError if every back end is disabled.
        with contextlib.suppress(RuntimeError):
            torch._fused_sdp_choice(nothing, nothing, nothing)
        order = torch._C._get_sdp_priority_order()
        self._order = (order, flash_first(order))
        torch._C._set_sdp_priority_order(self._order[1])

    def forward(
        self,
        keys: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        """aten::_scaled_dot_product_flash_attention."""
        numbers = (dropout_p, is_causal, return_debug_mask)
        if refusal(query, key, value, *numbers, scale) or not _runs_on(query.device):
            return self._forward.call_boxed(keys, query, key, value, *numbers, scale=scale)
        # Call the CUDA kernel directly. The dispatcher has already applied autograd and autocast
        # for aten's op.
        out, lse = ops.attention_forward.default.redispatch(
            keys, query, key, value, causal=is_causal, scale=scale
        )
        # Without dropout, the random state and the debug mask are uninitialised, as in torch's
        # kernel.
        seed, offset = (
            torch.empty(size, dtype=torch.uint64, device=query.device) for size in ((2,), ())
        )
        debug_mask = query.new_empty(0)
        seqlens = (query.size(2), key.size(2))
        return _laid_out(out, query), lse, None, None, *seqlens, seed, offset, debug_mask

    def backward(
        self,
        keys: Any,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        philox_seed: Tensor,
        philox_offset: Tensor,
        *,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """aten::_scaled_dot_product_flash_attention_backward."""
        saved = (grad_out, query, key, value, out, logsumexp)
        packed = (cum_seq_q, cum_seq_k)
        numbers = (dropout_p, is_causal)
        if backward_refusal(*saved, *packed, *numbers, scale) or not _runs_on(query.device):
            more = (max_q, max_k, *numbers, philox_seed, philox_offset)
            return self._backward.call_boxed(keys, *saved, *packed, *more, scale=scale)
        grads = ops.attention_backward.default.redispatch(
            keys, *saved, causal=is_causal, scale=scale
        )
        dquery, dkey, dvalue = (
            _laid_out(grad, like) for grad, like in zip(grads[:3], (query, key, value), strict=True)
        )
        return dquery, dkey, dvalue


_installed: Kernels | None = None  # there is one per process, like torch's dispatcher


def _install() -> Kernels:
    """Installs the kernels. torch calls this function to activate the implementation."""
    global _installed
    _installed = Kernels()
    return _installed


class SdpaHandle:
    """Removes the kernels by `remove()` or as a context manager; returned by `use_in_sdpa`."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels: Kernels | None = kernels
        kernels.users += 1

    def remove(self) -> None:
        """Takes the kernels back, unless another handle holds them; called again, does nothing."""
        kernels, self._kernels = self._kernels, None
        if kernels is None:
            return
        kernels.users -= 1
        # If the user has called torch's restore_flash_attention_impl or
        # activate_flash_attention_impl, torch has already removed the kernels.
        if kernels.users or not kernels.active:
            return
        if kernels.before is None:
            attention.restore_flash_attention_impl()
        else:
            attention.activate_flash_attention_impl(kernels.before)

    def __enter__(self) -> SdpaHandle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()


def _check() -> None:
    """Raises where the kernels can't be put there."""
    require()
    lacking = [
        name
        for module, name in (
            (attention, "register_flash_attention_impl"),
            (attention, "activate_flash_attention_impl"),
            (attention, "restore_flash_attention_impl"),
            (attention, "current_flash_attention_impl"),
            (torch.library, "get_kernel"),
        )
        if not hasattr(module, name)
    ]
    if lacking:
        raise RuntimeError(
            "torchweld.integrations.use_in_sdpa: torch must have the registry of flash attention "
            f"implementations that torch 2.11 has, but got torch {torch.__version__}, which lacks "
            f"{lacking[0]}; call torchweld.attention instead"
        )
    if not has_cuda_kernel("attention_forward"):
        why = build_facts().get("no_cuda_because")
        raise RuntimeError(
            "torchweld.integrations.use_in_sdpa: torchweld must be built with CUDA, but got one "
            f"without{f' ({why})' if why else ''}; install the CUDA toolkit and build it again"
        )
    if torch.version.cuda is None:
        raise RuntimeError(
            "torchweld.integrations.use_in_sdpa: torch must be built with CUDA, but got torch "
            f"{torch.__version__}; install a build of torch for CUDA"
        )


def use_in_sdpa() -> SdpaHandle:
    """`F.scaled_dot_product_attention` on CUDA runs torchweld's kernels, where they can serve it.

    Registers torchweld's attention as "torchweld" among torch's flash attention implementations and
    activates it: SDPA's flash back end runs it from then on, forward and backward, in compiled
    graphs too. Served are float16 and bfloat16, head dims up to 256, grouped heads
    (`enable_gqa=True`), `is_causal` and `torch.nn.attention.bias.causal_lower_right`. Calls with
    dropout and rows that see no key run torch's own flash kernel. Calls that flash can't take stay
    with torch's other back ends: float32, an `attn_mask`, `is_causal` with unequal lengths, head
    dims above 256 or that differ between key and value. So do nested tensors, and what
    `sdpa_kernel` gives to another back end.

    torch's order of back ends, in which cuDNN comes first on Hopper, has flash first for as long,
    for calls with dropout too; an order that is set afterwards stays. Graphs recorded before or
    after run backward with either kernel. A graph is compiled for the back end that comes first at
    that time. A call costs some microseconds more than `torchweld.attention`, because it goes
    through Python.

    Returns:
        A handle whose `remove()` takes the kernels back and activates the implementation that was
        active before, if any; also a context manager. Calls nest: the kernels stay until the last
        handle is removed. `torch.nn.attention.restore_flash_attention_impl()` takes them back at
        once.

    Raises:
        RuntimeError: torch has no such registry, or torchweld or torch was built without CUDA.

    Limits: for the whole process, every thread of it.
    """
    _check()
    if _installed is None or not _installed.active:
        before = attention.current_flash_attention_impl()
        attention.register_flash_attention_impl(NAME, register_fn=_install)
        attention.activate_flash_attention_impl(NAME)
        _installed.before = before
    return SdpaHandle(_installed)
