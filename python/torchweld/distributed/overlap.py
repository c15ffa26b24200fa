"""Linear layers that overlap with communication: a process multiplies the tokens of one process
while it receives those of another, or sends the product for another.

Each process has a buffer in torch's symmetric memory with a slot for every process of its group.
Peers copy into their slots over NVLink by DMA, which occupies no SMs; NCCL's kernels would take SMs
from the matmul.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import _symmetric_memory as symmetric_memory
from torch.distributed.device_mesh import DeviceMesh

from torchweld._library import ops

T = TypeVar("T")

# The smallest matmul whose communication is overlapped, in multiply-adds per process. The overlap
# costs 100 us of host time, in which the GPU computes 2^35 multiply-adds. In a CUDA graph it costs
# no host time.
_MIN_PRODUCTS = 1 << 36
_MIN_PRODUCTS_OF_GRAPHS = 1 << 32

_MAX_SEQUENCES = 16  # the maximum number of sequences in one batched matmul


class _SymmetricBuffer:
    """Memory of a process with a slot for each process of its group to write to.

    Args:
        group: at least two processes.
        size: bytes; every process of the group makes a buffer of this size.

    Raises:
        torch.OutOfMemoryError: in this process alone; the others wait for it.
        RuntimeError: the processes can't access each other's memory; raised in all of them.
    """

    _SENT = 1  # the channel of "slot was sent" signals; barriers use channel 0

    def __init__(self, group: ProcessGroup, size: int) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self._memory = _memory(size, device)
        self._handle = symmetric_memory.rendezvous(self._memory, group.group_name)
        self._sending, self._copying = (torch.cuda.Stream(device, priority=-1) for _ in range(2))
        self.group, self.size = weakref.ref(group), size
        self.rank, self._running = self._handle.rank, set[torch.cuda.Stream]()

    def _slots_of(self, rank: int, shape: list[int], dtype: torch.dtype) -> Tensor:
        return self._handle.get_buffer(rank, (self._handle.world_size, *shape), dtype)

    def slots(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        """Returns this process's slots `(processes, *shape)`, once no process uses them."""
        self._handle.barrier(channel=0)
        return self._slots_of(self.rank, shape, dtype)

    def send(self, shard: Tensor, to: int) -> None:
        """Copies a contiguous shard to a process on a side stream, and signals its arrival."""
        slot = self._slots_of(to, list(shard.shape), shard.dtype)[self.rank]
        with self.on_side_stream(sending=True):
            slot.copy_(shard)
            self._handle.put_signal(to, channel=self._SENT)

    def wait(self, of: int) -> None:
        """Makes the current stream wait for the shard of a process."""
        self._handle.wait_signal(of, channel=self._SENT)

    def on_side_stream(self, sending: bool) -> AbstractContextManager[None]:
        """Enters a side stream that first waits for the work of the current stream."""
        stream = self._sending if sending else self._copying
        stream.wait_stream(torch.cuda.current_stream())
        self._running.add(stream)
        return torch.cuda.stream(stream)

    def join(self) -> None:
        """Makes the current stream wait for the side streams."""
        while self._running:
            torch.cuda.current_stream().wait_stream(self._running.pop())


def _memory(size: int, device: torch.device) -> Tensor:
    for again in (True, False):
        try:
            return symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            if not again:
                raise torch.OutOfMemoryError(str(error)) from error
            # symmetric memory can't use memory that torch's caching allocator holds
            torch.cuda.empty_cache()
    raise AssertionError


# For the name of each process group: its buffers, oldest first. New calls use the last buffer. The
# earlier ones are kept, because captured CUDA graphs may use them.
_buffers: dict[str, list[_SymmetricBuffer]] = {}
_no_p2p: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


def _symmetric_buffer(mesh: DeviceMesh, size: int) -> _SymmetricBuffer | None:
    """Returns a buffer of `size` bytes, made by all processes together.

    None if they can't access each other's memory, or if no large enough buffer exists while a CUDA
    graph is captured.
    """
    group = mesh.get_group()
    buffers = _buffers.setdefault(group.group_name, [])
    # the buffers belong to an earlier group with the same name
    gone = bool(buffers) and buffers[-1].group() is not group
    if buffers and not gone and buffers[-1].size >= size:
        return buffers[-1]
    if torch.cuda.is_current_stream_capturing() or group in _no_p2p:
        return None
    if gone:
        buffers.clear()
    try:
        buffers.append(_SymmetricBuffer(group, max(size, 2 * buffers[-1].size if buffers else 0)))
    # only this process is out of memory, which says nothing about peer access
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # all processes raise it if they are on several hosts or have no NVLink
        _no_p2p.add(group)
        return None
    return buffers[-1]


@contextmanager
def _used(buffer: _SymmetricBuffer) -> Iterator[None]:
    """Waits for the copies on side streams. After an error signals may be left, so the buffer is
    not used again.
    """
    try:
        yield
        buffer.join()
    except BaseException:
        buffer.size = 0
        raise


def _supports_p2p(x: Tensor) -> bool:
    """Whether x has a device and dtype that symmetric memory is used for."""
    return x.is_cuda and x.dtype in (torch.float32, torch.float16, torch.bfloat16)


def supports_overlap(
    mesh: DeviceMesh, dim: int, x: Tensor, weight: Tensor, *, gathers: bool
) -> bool:
    """Whether the matmul of x and weight `(N, K)` overlaps with sending tokens along `dim`; the
    same answer in all processes.

    Args:
        gathers: True if x has this process's tokens and is gathered; False if x has all tokens
            and the product is reduce-scattered.
    """
    size = mesh.size()
    if size == 1 or torch.compiler.is_compiling() or not _supports_p2p(x):
        return False
    rows, columns = x.shape[:-1].numel() // (1 if gathers else size), weight.shape[0]
    products = rows * columns * x.shape[-1]
    # Eager calls allocate the buffers that later CUDA graphs need, so this test uses the smaller
    # limit, that of graphs.
    if x.shape[:dim].numel() > _MAX_SEQUENCES or products < _MIN_PRODUCTS_OF_GRAPHS:
        return False
    shard_bytes = rows * (x.shape[-1] if gathers else columns) * x.element_size()
    if _symmetric_buffer(mesh, size * shard_bytes) is None:
        return False
    return products >= _MIN_PRODUCTS or torch.cuda.is_current_stream_capturing()


def _shards(t: Tensor, dim: int, count: int) -> list[Tensor]:
    """Splits a contiguous t into equal shards along `dim`, each `(sequences, rows, columns)`."""
    matrices = t.view(t.shape[:dim].numel(), t.shape[dim:-1].numel(), t.shape[-1])
    return list(matrices.chunk(count, 1))


def _peers(rank: int, count: int) -> Iterator[tuple[int, int]]:
    """Yields the ranks to send to and to receive from, one pair for each step."""
    return (((rank + i) % count, (rank - i) % count) for i in range(1, count))


def gathered_linear(
    mesh: DeviceMesh,
    dim: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    keeps_x: bool = True,
    keeps_preact: bool = False,
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Computes `linear` of the gathered x, if :func:`supports_overlap`; without a gradient.

    Returns:
        The gathered x, y, and the pre-activation; None for a tensor that is not kept.
    """
    size, shape = mesh.size(), list(x.shape)
    buffer = _symmetric_buffer(mesh, size * x.numel() * x.element_size())
    shape[dim] *= size
    whole = x.new_empty(shape) if keeps_x else None
    y = x.new_empty([*shape[:-1], weight.shape[0]])
    preact = torch.empty_like(y) if keeps_preact else None
    xs, ys, preacts = (
        [None] * size if t is None else _shards(t, dim, size) for t in (whole, y, preact)
    )
    (mine,) = _shards(x.contiguous(), dim, 1)

    def multiply(shard: Tensor, rank: int) -> None:
        ops._linear_part(shard, weight, bias, ys[rank], preacts[rank], activation=activation)

    # NOTE: a local copy that starts during a matmul waits until the matmul leaves SMs free, so x is
    # copied first.
    with _used(buffer):
        if keeps_x:
            with buffer.on_side_stream(sending=False):
                xs[buffer.rank].copy_(mine)
        slots = buffer.slots(list(mine.shape), x.dtype)
        for to, _ in _peers(buffer.rank, size):
            buffer.send(mine, to)
        multiply(mine, buffer.rank)
        for _, of in _peers(buffer.rank, size):
            buffer.wait(of)
            if keeps_x:
                xs[of].copy_(slots[of])
            multiply(slots[of], of)
    return whole, y, preact


def scattered_linear(
    mesh: DeviceMesh,
    dim: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    meanwhile: Callable[[], T] = lambda: None,
) -> tuple[Tensor, T]:
    """Sums all processes' products of x and gives each process its tokens of the sum, if
    :func:`supports_overlap`; without a gradient.

    Args:
        bias: added once to the sum; the same in all processes.
        meanwhile: a computation to run while the products are sent.

    Returns:
        The sum, and the result of `meanwhile`.
    """
    size, columns = mesh.size(), weight.shape[0]
    shards, shape = _shards(x.contiguous(), dim, size), [*x.shape[:-1], columns]
    shape[dim] //= size
    shard_shape = [*shards[0].shape[:2], columns]
    y = x.new_empty(shape)
    buffer = _symmetric_buffer(mesh, size * y.numel() * y.element_size())
    every = weight.t().expand(len(shards[0]), -1, -1)
    with _used(buffer):
        terms, sent = buffer.slots(shard_shape, x.dtype), []
        for to, _ in _peers(buffer.rank, size):
            sent.append(torch.bmm(shards[to], every))
            buffer.send(sent[-1], to)
        mine = shards[buffer.rank]
        if bias is None:
            torch.bmm(mine, every, out=terms[buffer.rank])
        else:
            ops._linear_part(mine, weight, bias, terms[buffer.rank])
        other = meanwhile()
        for _, of in _peers(buffer.rank, size):
            buffer.wait(of)
    # NOTE: torch.sum of two terms takes three times as long as torch.add.
    if size == 2:
        torch.add(*terms, out=y.view(shard_shape))
    else:
        torch.sum(terms, 0, out=y.view(shard_shape))
    return y, other
