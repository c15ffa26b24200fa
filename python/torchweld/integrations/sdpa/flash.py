"""Replaces the kernels of torch's flash attention ops; a class replaces an op and its gradient.

The dispatcher calls :meth:`Flash.forward` and :meth:`Flash.backward` with the arguments that aten's
schema names. If ``refusal`` returns a reason, torch's own kernel runs with the same arguments, so a
call that torch's op refuses raises torch's error.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchweld._library import ops
from torchweld.compat._windows import Window
from torchweld.ops.varlen import packed_mask

from .gpus import MAX_HEAD_DIM, runs_on

Qkv = tuple[Tensor, Tensor, Tensor]  # query, key and value
Lengths = tuple[Tensor | None, Tensor | None]  # the cumulative lengths of query and of key

# Arguments that change no result without dropout, so any value is accepted.
_UNUSED = ("max_q", "max_k", "philox_seed", "philox_offset", "rng_state", "unused")


def _laid_out(result: Tensor, like: Tensor) -> Tensor:
    """Returns the result with ``like``'s strides, on which compiled graphs and views rely."""
    wanted = torch.empty_like(like, device="meta").stride()
    return result if result.stride() == wanted else torch.empty_like(like).copy_(result)


def _positions_first(t: Tensor) -> Tensor:
    """Returns t (batch, heads, seqlen, ...) in the memory order (batch, seqlen, heads, ...)."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def _unused_results(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns an uninitialised dropout seed and offset, as torch's kernels do, and no mask."""
    seed, offset = (
        torch.empty(size, dtype=torch.uint64, device=query.device) for size in ((2,), ())
    )
    return seed, offset, query.new_empty(0)


class Flash:
    """Replaces the kernels of a torch op and of its gradient for a dispatch key."""

    FORWARD: ClassVar[str]  # the names in aten
    BACKWARD: ClassVar[str]
    DIMS: ClassVar[int] = 4  # of query, key and value, the heads in dim 1
    DTYPES: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16)  # of torch's kernel
    LSE: ClassVar[str | None] = None  # the required shape of lse, for a refusal; None: unchecked

    def __init__(self, key: str) -> None:
        self.torchs_forward = torch.library.get_kernel(f"aten::{self.FORWARD}", key)
        self.torchs_backward = torch.library.get_kernel(f"aten::{self.BACKWARD}", key)
        self._forward_names, self._backward_names = (
            [argument.name for argument in getattr(torch.ops.aten, op).default._schema.arguments]
            for op in (self.FORWARD, self.BACKWARD)
        )

    def install(self, library: torch.library.Library, key: str) -> None:
        for op, kernel in ((self.FORWARD, self.forward), (self.BACKWARD, self.backward)):
            _replace(library, op, kernel, key)

    def forward(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs torchweld's kernel, or torch's own if :meth:`refusal` has a reason."""
        given = dict(zip(self._forward_names, args, strict=False), **kwargs)
        query, key, value = args[:3]
        if self.refusal(**given) or not runs_on(query.device):
            return self.torchs_forward.call_boxed(keys, *args, **kwargs)
        # Call the kernel of this key directly. The dispatcher has already applied autograd and
        # autocast for aten's op.
        out, lse = ops.attention_forward.default.redispatch(
            keys, *map(self.heads_first, args[:3]), **self.options(given)
        )
        return self.results(out, lse, query, key)

    def backward(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs the gradient's kernel. The saved tensors choose it, not the forward that ran."""
        given = dict(zip(self._backward_names, args, strict=False), **kwargs)
        _, query, key, value, _, lse = args[:6]
        if self.backward_refusal(**given) or not runs_on(query.device):
            return self.torchs_backward.call_boxed(keys, *args, **kwargs)
        grads = ops.attention_backward.default.redispatch(
            keys, *map(self.heads_first, args[:5]), self.saved_lse(lse), **self.options(given)
        )
        likes = (query, key, value)
        return tuple(self.gradient(grad, t) for grad, t in zip(grads[:3], likes, strict=True))

    @classmethod
    def refusal(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        dropout_p: float = 0.0,
        return_debug_mask: bool = False,
        is_causal: bool = False,
        scale: float | None = None,
        cum_seq_q: Tensor | None = None,
        cum_seq_k: Tensor | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        **more: Any,
    ) -> str | None:
        """Returns the reason why a call runs torch's own kernel, or None if torchweld's serves it.

        It depends on shapes, dtypes and numbers alone.
        """
        if dropout_p != 0:
            return "dropout_p is above 0"
        if return_debug_mask:
            return "return_debug_mask is set"
        for name, other in more.items():
            if other is not None and name not in _UNUSED:
                return f"{name} is given"
        if query.is_nested or key.is_nested or value.is_nested:
            return "nested tensors"
        if query.dtype not in cls.DTYPES or not key.dtype == value.dtype == query.dtype:
            names = [str(dtype).removeprefix("torch.") for dtype in cls.DTYPES]
            return f"the dtype is not {', '.join(names[:-1])} or {names[-1]}"
        if not query.dim() == key.dim() == value.dim() == cls.DIMS:
            return f"a tensor is not {cls.DIMS}-D"
        if not key.device == value.device == query.device:
            return "the devices differ"
        if key.shape != value.shape or key.shape[-1] != query.shape[-1]:
            return "the shapes don't belong together"
        if 0 in query.shape or 0 in key.shape:
            return "a size is 0"
        if query.shape[1] % key.shape[1]:
            return "the heads of key don't divide those of query"
        if scale is not None and not math.isfinite(scale):
            return "scale is not finite"
        return cls.own_refusal((query, key, value), is_causal, (cum_seq_q, cum_seq_k))

    @classmethod
    def backward_refusal(
        cls,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        **given: Any,
    ) -> str | None:
        """Returns the reason why a gradient runs torch's own kernel, or None."""
        reason = cls.refusal(query, key, value, **given)
        if reason is not None:
            return reason
        if cls.LSE is not None and (
            logsumexp.shape != cls.lse_shape(query) or logsumexp.dtype != torch.float32
        ):
            return f"logsumexp is not float32 {cls.LSE}"
        if any(t.shape != query.shape or t.dtype != query.dtype for t in (grad_out, out)):
            return "grad_out or out is not like query"
        if any(t.device != query.device for t in (grad_out, out, logsumexp)):
            return "the devices differ"
        return None

    @staticmethod
    def own_refusal(tensors: Qkv, is_causal: bool, lengths: Lengths) -> str | None:
        """Returns a reason that only this op has, or None."""
        raise NotImplementedError

    @staticmethod
    def options(given: dict[str, Any]) -> dict[str, Any]:
        """Returns the keyword arguments of torchweld's op for aten's arguments."""
        return {"causal": given.get("is_causal", False), "scale": given.get("scale")}

    @staticmethod
    def heads_first(t: Tensor) -> Tensor:
        """Returns a tensor as a view (batch, heads, seqlen, head_dim)."""
        return t

    @staticmethod
    def results(out: Tensor, lse: Tensor, query: Tensor, key: Tensor) -> tuple[Any, ...]:
        """Converts the results of torchweld's op to aten's."""
        raise NotImplementedError

    @staticmethod
    def lse_shape(query: Tensor) -> torch.Size:
        return query.shape[:3]

    @staticmethod
    def saved_lse(lse: Tensor) -> Tensor:
        """Converts the lse that aten's op returned to torchweld's."""
        return lse

    @staticmethod
    def gradient(grad: Tensor, like: Tensor) -> Tensor:
        """Converts a gradient of torchweld's op to aten's."""
        return _laid_out(grad, like)


def _tensor_core_refusal(tensors: Qkv) -> str | None:
    head_dim = tensors[0].shape[-1]
    if head_dim > MAX_HEAD_DIM:
        return f"the head dim is above {MAX_HEAD_DIM}"
    if head_dim % 8:
        return "the head dim is not a multiple of 8"
    if any(t.stride(-1) != 1 for t in tensors):
        return "the last dim is not contiguous"
    return None


class Dense(Flash):
    """Replaces SDPA's flash op on (batch, heads, seqlen, head_dim)."""

    FORWARD = "_scaled_dot_product_flash_attention"
    BACKWARD = "_scaled_dot_product_flash_attention_backward"
    LSE = "(batch, nheads, seqlen_q)"

    @staticmethod
    def own_refusal(tensors: Qkv, is_causal: bool, lengths: Lengths) -> str | None:
        query, key, _ = tensors
        if any(t is not None for t in lengths):
            return "packed sequences"
        if reason := _tensor_core_refusal(tensors):
            return reason
        if key.shape[0] != query.shape[0]:
            return "the shapes don't belong together"
        if is_causal and query.shape[2] > key.shape[2]:
            return "rows that see no key have another lse"
        return None

    @staticmethod
    def results(out: Tensor, lse: Tensor, query: Tensor, key: Tensor) -> tuple[Any, ...]:
        seqlens = (query.size(2), key.size(2))
        return _laid_out(out, query), lse, None, None, *seqlens, *_unused_results(query)


class Varlen(Flash):
    """Replaces torch's flash op of packed sequences, on (tokens, heads, head_dim).

    ``torch.nn.attention.varlen.varlen_attn`` and SDPA of jagged nested tensors call the op with
    cumulative lengths, which the host does not read here. If a query sees no key, torch's lse is
    inf and torchweld's is -inf, so forward and backward convert the lse. Calls without lengths,
    which SDPA's flash op makes too, run torch's own kernel.
    """

    FORWARD = "_flash_attention_forward"
    BACKWARD = "_flash_attention_backward"
    DIMS = 3
    LSE = "(nheads, tokens_q)"

    @staticmethod
    def own_refusal(tensors: Qkv, is_causal: bool, lengths: Lengths) -> str | None:
        if lengths[0] is None or lengths[1] is None:
            return "the sequences are not packed"
        if reason := _tensor_core_refusal(tensors):
            return reason
        device = tensors[0].device
        if any(t.dtype != torch.int32 or t.dim() != 1 or t.device != device for t in lengths):
            return "cumulative lengths are not int32 (sequences + 1,) beside query"
        if lengths[0].shape != lengths[1].shape or lengths[0].shape[0] < 2:
            return "cumulative lengths are not (sequences + 1,) of query and of key"
        return None

    @staticmethod
    def options(given: dict[str, Any]) -> dict[str, Any]:
        sizes = given.get("window_size_left"), given.get("window_size_right")
        tensors = (given[name] for name in ("query", "key", "cum_seq_q", "cum_seq_k"))
        mask = packed_mask(*tensors, *Window.of(sizes, given["is_causal"]))
        return {**mask, "scale": given.get("scale")}

    @staticmethod
    def heads_first(t: Tensor) -> Tensor:
        return t.transpose(0, 1).unsqueeze(0)

    @staticmethod
    def results(out: Tensor, lse: Tensor, query: Tensor, key: Tensor) -> tuple[Any, ...]:
        lse = lse.squeeze(0)
        lse = lse.masked_fill(lse == -math.inf, math.inf)
        return Varlen.gradient(out, query), lse, *_unused_results(query)

    @staticmethod
    def lse_shape(query: Tensor) -> torch.Size:
        return query.shape[1::-1]

    @staticmethod
    def saved_lse(lse: Tensor) -> Tensor:
        return lse.masked_fill(lse == math.inf, -math.inf).unsqueeze(0)

    @staticmethod
    def gradient(grad: Tensor, like: Tensor) -> Tensor:
        return _laid_out(grad.squeeze(0).transpose(0, 1), like)


class Cpu(Flash):
    """Replaces SDPA's flash op on the CPU.

    Its causal masks are aligned at the top left, so causal calls of unequal lengths stay torch's.
    """

    FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
    BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
    DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

    @staticmethod
    def own_refusal(tensors: Qkv, is_causal: bool, lengths: Lengths) -> str | None:
        query, key, _ = tensors
        if key.shape[0] != query.shape[0]:
            return "the shapes don't belong together"
        if is_causal and query.shape[2] != key.shape[2]:
            return "a causal mask is aligned at the top left"
        return None

    @staticmethod
    def results(out: Tensor, lse: Tensor, query: Tensor, key: Tensor) -> tuple[Any, ...]:
        return _laid_out(out, query), _positions_first(lse)

    @staticmethod
    def gradient(grad: Tensor, like: Tensor) -> Tensor:
        return _positions_first(grad)


def _replace(library: torch.library.Library, op: str, kernel: Callable[..., Any], key: str) -> None:
    with warnings.catch_warnings():
        # torch warns that a kernel is overridden, which is the purpose of this call.
        warnings.filterwarnings("ignore", r"[\s\S]*Overriding a previously registered kernel")
        library.impl(op, kernel, key, with_keyset=True, allow_override=True)
