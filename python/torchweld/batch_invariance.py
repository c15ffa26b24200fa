"""The batch-invariant mode: a row has the same bits whatever rows stand beside it."""

from __future__ import annotations

from contextlib import ContextDecorator

from torchweld._library import ops


def is_batch_invariant() -> bool:
    """Whether the calls of this thread are batch invariant.

    Example::

        with torchweld.batch_invariant():
            assert torchweld.is_batch_invariant()
    """
    return ops._is_batch_invariant()


class batch_invariant(ContextDecorator):
    """A context manager and decorator: a row has the same bits whatever rows stand beside it.

    In the mode, the order of every sum depends on the sizes of a row alone: not on the number of
    rows, their place, the padding, or the split of a sequence into a prefill and decoding steps.
    Calls outside of the mode keep their kernels and bits. docs/invariance.md lists what each op
    promises, and what the mode costs.

    The mode belongs to the thread that enters it and holds for the calls that run inside. The
    backward of a call made in the mode is in the mode too, on every thread. torch's own linear,
    mm, addmm, bmm and mean over the last dim run torchweld's kernels, on the CPU and on CUDA.
    A captured CUDA graph, a trace and an export keep the mode of their capture.

    The environment variable `TORCHWELD_BATCH_INVARIANT=1` turns the mode on for every thread.

    Args:
        enabled: True turns the mode on inside the context, False off.

    Example::

        layer = torch.nn.Linear(64, 32)
        rows = torch.randn(100, 64)
        with torchweld.batch_invariant():
            assert torch.equal(layer(rows)[:3], layer(rows[:3]))
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._before: list[bool] = []

    def _recreate_cm(self) -> batch_invariant:
        return batch_invariant(self.enabled)  # calls of a decorated function share no state

    def __enter__(self) -> batch_invariant:
        self._before.append(ops._set_batch_invariant(self.enabled))
        return self

    def __exit__(self, *error: object) -> None:
        ops._set_batch_invariant(self._before.pop())
