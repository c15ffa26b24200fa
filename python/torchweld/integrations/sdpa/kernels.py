"""Puts torchweld's attention under ``F.scaled_dot_product_attention`` and ``varlen_attn``.

torch keeps a registry of flash attention implementations (``torch.nn.attention``). The active one
replaces CUDA kernels of aten ops, here of four::

    F.scaled_dot_product_attention            torch chooses a back end, in its order of preference
     -> aten::_scaled_dot_product_flash_attention            out, lse        (:class:`.Dense`)
         -> torchweld::attention_forward, or torch's own flash kernel
    torch.nn.attention.varlen.varlen_attn, nested tensors
     -> aten::_flash_attention_forward                       out, lse        (:class:`.Varlen`)
         -> torchweld::attention_forward, or torch's own flash kernel
    their gradients: aten::..._backward
         -> torchweld::attention_backward, or torch's own

The saved tensors of a graph mean the same to both kernels, so a graph that was recorded with one
runs backward with the other. On Hopper torch prefers its cuDNN back end, so flash is first in
torch's order while torchweld's kernels are active. The CPU has no registry, and the kernels of
``aten::_scaled_dot_product_flash_attention_for_cpu`` are replaced (:class:`.Cpu`).
"""

from __future__ import annotations

import contextlib
from types import TracebackType

import torch
from torch.nn import attention

from torchweld._library import build_facts, require
from torchweld.info import has_cuda_kernel

from .flash import Cpu, Dense, Flash, Varlen

NAME = "torchweld"


def flash_first(order: list[int]) -> list[int]:
    """Returns torch's order of back ends with flash in front."""
    flash = int(attention.SDPBackend.FLASH_ATTENTION)
    return [flash, *(backend for backend in order if backend != flash)]


class Kernels:
    """Keeps kernels in torch's dispatcher until `remove`; torch's registry holds this object.

    Args:
        key: The dispatch key whose kernels are replaced.
        pairs: The ops to replace. Tests replace CUDA's ops for "CPU".
    """

    def __init__(self, key: str = "CUDA", pairs: tuple[type[Flash], ...] = (Dense, Varlen)) -> None:
        self.users = 0  # the number of handles that have not been removed
        self.before: str | None = None  # the implementation that was active before this one
        # the order of back ends before this change, and the order that was set
        self._order: tuple[list[int], list[int]] | None = None
        made = [pair(key) for pair in pairs]
        library = torch.library.Library("aten", "IMPL", key)
        self._library: torch.library.Library | None = library
        try:
            for pair in made:
                pair.install(library, key)
        except BaseException:
            self.remove()
            raise
        if key == "CUDA":
            torch.cuda._lazy_call(self._put_flash_first)

    @property
    def active(self) -> bool:
        return self._library is not None

    def remove(self) -> None:
        """Restores torch's kernels and order of back ends; does nothing if called again."""
        library, self._library = self._library, None
        if library is not None:
            library._destroy()
        order, self._order = self._order, None
        # If someone else has set another order since then, that order stays.
        if order is not None and torch._C._get_sdp_priority_order() == order[1]:
            torch._C._set_sdp_priority_order(order[0])

    def _put_flash_first(self) -> None:
        """Puts flash first in torch's order. Runs once CUDA is initialised elsewhere."""
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

    def release(self) -> None:
        """Removes the kernels; called when the last handle is removed."""
        self.remove()


class CudaKernels(Kernels):
    """Keeps kernels that torch's registry activates."""

    def release(self) -> None:
        if self.before is None:
            attention.restore_flash_attention_impl()
        else:
            attention.activate_flash_attention_impl(self.before)


# By "cuda" or "cpu". The kernels are installed for the process, as torch's dispatcher keeps them.
_installed: dict[str, Kernels] = {}


def _install() -> Kernels:
    """Installs the kernels. torch calls this function to activate the implementation."""
    _installed["cuda"] = CudaKernels()
    return _installed["cuda"]


class SdpaHandle:
    """Handle of `use_in_sdpa`; `remove()`, or the end of a `with` block, removes the kernels."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels: Kernels | None = kernels
        kernels.users += 1

    def remove(self) -> None:
        """Removes the kernels unless another handle holds them; does nothing if called again."""
        kernels, self._kernels = self._kernels, None
        if kernels is None:
            return
        kernels.users -= 1
        # If the user has called torch's restore_flash_attention_impl or
        # activate_flash_attention_impl, torch has already removed the kernels.
        if not kernels.users and kernels.active:
            kernels.release()

    def __enter__(self) -> SdpaHandle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()


def _check_torch(*needed: tuple[object, str]) -> None:
    """Raises RuntimeError if torch lacks one of the functions."""
    require()
    lacking = [name for module, name in needed if not hasattr(module, name)]
    if lacking:
        raise RuntimeError(
            "torchweld.integrations.use_in_sdpa: torch must have the registry of flash attention "
            f"implementations that torch 2.11 has, but got torch {torch.__version__}, which lacks "
            f"{lacking[0]}; call torchweld.attention instead"
        )


def _check_cuda() -> None:
    """Raises RuntimeError if the kernels for CUDA can't be installed."""
    _check_torch(
        (attention, "register_flash_attention_impl"),
        (attention, "activate_flash_attention_impl"),
        (attention, "restore_flash_attention_impl"),
        (attention, "current_flash_attention_impl"),
        (torch.library, "get_kernel"),
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


def use_in_sdpa(device: str = "cuda") -> SdpaHandle:
    """Makes `F.scaled_dot_product_attention` run torchweld's kernels if they can serve the call.

    On CUDA it registers torchweld's attention as "torchweld" among torch's flash attention
    implementations and activates it: SDPA's flash back end and
    `torch.nn.attention.varlen.varlen_attn` run it from then on, forward and backward, in compiled
    graphs too. The kernels serve float16 and bfloat16, head dims up to 256, grouped heads
    (`enable_gqa=True`), `is_causal`, `torch.nn.attention.bias.causal_lower_right`, every window of
    `varlen_attn`, and jagged nested tensors. Calls with dropout and dense calls in which a query
    sees no key run torch's own flash kernel. Calls that flash can't take stay with torch's other
    back ends: float32, an `attn_mask`, `is_causal` with unequal lengths, head dims above 256 or
    that differ between key and value. So do calls that `sdpa_kernel` gives to another back end.

    While the kernels are active, flash comes first in torch's order of back ends, also on Hopper,
    where cuDNN comes first otherwise, and also for calls with dropout. An order that is set
    afterwards stays. A compiled graph keeps the back end that came first when it was compiled. A
    call costs some microseconds more than `torchweld.attention`, because it goes through Python.

    With `device="cpu"` SDPA's flash back end on the CPU runs torchweld's kernels: all dtypes, any
    head dim, grouped heads and `is_causal` of equal lengths, forward and backward. Calls with
    `attn_mask` or dropout, and `is_causal` with unequal lengths, run torch's own.

    Graphs recorded before or after run backward with either kernel.

    Args:
        device: "cuda" or "cpu". Call it twice for both.

    Returns:
        A handle whose `remove()` removes the kernels and activates the implementation that was
        active before, if any; also a context manager. Calls nest: the kernels stay until the last
        handle is removed. `torch.nn.attention.restore_flash_attention_impl()` removes the kernels
        for CUDA at once.

    Raises:
        ValueError: device is neither "cuda" nor "cpu".
        RuntimeError: torch lacks such a registry (torch 2.11 has it), torchweld's operators can't
            be loaded, or for "cuda" torchweld or torch was built without CUDA.

    Limits: the kernels are replaced in every thread of the process.

    Example::

        q = torch.randn(2, 4, 16, 32)
        with torchweld.integrations.use_in_sdpa("cpu"):
            out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    """
    if device not in ("cuda", "cpu"):
        raise ValueError(
            'torchweld.integrations.use_in_sdpa: device must be "cuda" or "cpu", but got '
            f"{device!r}"
        )
    active = device in _installed and _installed[device].active
    if device == "cpu":
        _check_torch((torch.library, "get_kernel"))
        if not active:
            _installed[device] = Kernels("CPU", (Cpu,))
        return SdpaHandle(_installed[device])
    _check_cuda()
    if not active:
        before = attention.current_flash_attention_impl()
        attention.register_flash_attention_impl(NAME, register_fn=_install)
        attention.activate_flash_attention_impl(NAME)
        _installed[device].before = before
    return SdpaHandle(_installed[device])
