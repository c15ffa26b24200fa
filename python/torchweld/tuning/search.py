"""torchweld.tune(): every configuration of a call, checked and timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import torchweld._library as library
from torchweld._refusals import unknown_op
from torchweld.explain import tensors_of
from torchweld.info import ops_of_library
from torchweld.tuning import cache
from torchweld.tuning.observe import KernelChoice, kernel_choices, observe, tables
from torchweld.tuning.progress import Progress
from torchweld.tuning.result import Row, TuneResult, empty_row
from torchweld.tuning.work import Answers, bytes_of, flops, sum_length

# A configuration that is this many times slower than the fastest one is timed only once.
_SLOW = 8.0


@contextmanager
def _fresh_memory_is_nan() -> Iterator[None]:
    """Fills fresh memory with NaN, so that elements a kernel does not write are seen."""
    was = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def _gpu_works() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


class _GpuStoppedError(RuntimeError):
    """A kernel broke the CUDA context; nothing more can run in this process."""


class Search:
    """Searches the configurations of a call; fills in rows as it runs, so it can be interrupted."""

    def __init__(
        self, result: TuneResult, call: Callable[[], Any], rounds: int, progress: Progress
    ) -> None:
        self.result = result
        self._call = call
        self._rounds = rounds
        self._progress = progress
        self._forced: list[KernelChoice] = []
        self._bytes = 0
        self._flops: float | None = None

    def force(self, kernel: KernelChoice, choice: str) -> None:
        """Forces a choice for the following calls; "" ends that."""
        library.ops._force_choice(kernel.family, kernel.numbers, choice)

    def run(
        self, kernels: list[KernelChoice], answers: Answers, moved: int, configs: list[dict] | None
    ) -> None:
        """Searches the kernels one by one, with the best choices of those before."""
        self._bytes = moved
        work = [w for w in (flops(p.family, p.problem) for p in kernels) if w is not None]
        self._flops = sum(work) if work else None
        rows = [self._rows(i, kernel, configs) for i, kernel in enumerate(kernels)]
        for of_kernel in rows:
            self.result.rows += of_kernel
            runnable = sum(not row["reason"] for row in of_kernel)
            self._progress.plan(runnable * (1 + self._rounds))
        try:
            for i, kernel in enumerate(kernels):
                self._forced.append(kernel)
                self._search(kernel, [row for row in rows[i] if not row["reason"]], answers)
                best = self.result.best_of_part(i)
                self.force(kernel, best["choice"] if best else "")
        finally:
            for kernel in self._forced:
                self.force(kernel, "")

    def _rows(self, index: int, kernel: KernelChoice, configs: list[dict] | None) -> list[Row]:
        """Makes a row for each configuration; an unsupported one has a reason."""
        rows = []
        for found in tables().candidates(kernel.family, kernel.numbers):
            own = found["choice"] == kernel.choice
            row = empty_row(
                part=index,
                problem=kernel.text(),
                family=kernel.family,
                choice=found["choice"],
                source=kernel.source if own else "",
                **found["columns"],
            )
            row["reason"] = found["refusal"]
            rows.append(row)
        if configs is None:
            # The default configuration runs first, because the others are compared with it.
            return sorted(rows, key=lambda row: not row["source"])
        wanted = []
        for config in configs:
            match = [row for row in rows if all(row.get(k) == v for k, v in config.items())]
            wanted += [row for row in match if row not in wanted]
            if not match:
                missing = {key: value for key, value in config.items() if key in rows[0]}
                row = {**dict.fromkeys(rows[0]), **missing, "part": index, "reason": "not built"}
                wanted.append(
                    {**row, "problem": kernel.text(), "family": kernel.family, "source": ""}
                )
        return wanted

    def _search(self, kernel: KernelChoice, rows: list[Row], answers: Answers) -> None:
        from torchweld.tuning.timer import CudaRounds

        right: dict[str, Row] = {}
        fastest = float("inf")
        for index, row in enumerate(rows):
            if not self._check(kernel, row, answers):
                self._progress.step(1 + self._rounds)
                continue
            once = CudaRounds(
                {"once": self._call}, lambda _, row=row: self.force(kernel, row["choice"])
            )
            once.run()
            self._time(row, once.timings()["once"])
            fastest = min(fastest, row["us"])
            if row["us"] > _SLOW * fastest:
                self._progress.step(1 + self._rounds)
                continue
            right[str(index)] = row
            self._progress.step()
        if not right:
            return
        timer = CudaRounds(
            dict.fromkeys(right, self._call), lambda name: self.force(kernel, right[name]["choice"])
        )
        try:
            for _ in range(self._rounds):
                timer.run()
                self._progress.step(len(right))
        finally:  # an interrupted search keeps the finished rounds
            for name, timing in timer.timings().items():
                self._time(right[name], timing)

    def _check(self, kernel: KernelChoice, row: Row, answers: Answers) -> bool:
        """Runs a configuration once, checks its answer and stores both in the row."""
        try:
            self.force(kernel, row["choice"])
            with _fresh_memory_is_nan():
                outputs, records = observe(self._call)
            row["error"], row["reason"] = answers.judge(outputs)
        except torch.OutOfMemoryError:
            row["reason"] = "out of GPU memory"
        except RuntimeError as error:
            row["reason"] = (str(error).splitlines() or [type(error).__name__])[0]
            if not _gpu_works():
                raise _GpuStoppedError(row["reason"]) from error
        if row["reason"]:
            return False
        launches = [k for r in records if r["problem"] == kernel.numbers for k in r["kernels"]]
        if launches:
            row["registers"] = max(k[0] for k in launches)
            row["shared_bytes"] = max(k[1] for k in launches)
        return True

    def _time(self, row: Row, timing: Any) -> None:
        row["us"], row["low_us"], row["high_us"] = timing.us, timing.low, timing.high
        row["gb_s"] = self._bytes / timing.us * 1e-3
        row["tflop_s"] = None if self._flops is None else self._flops / timing.us * 1e-6


def _gpu_name(t: Tensor) -> str:
    """Returns the name of the tensor's GPU, "" on the CPU."""
    return torch.cuda.get_device_name(t.device) if t.is_cuda else ""


def _checked(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Checks the op; returns the tensors."""
    library.require()
    known = ops_of_library()
    if op not in known:
        raise ValueError(f"tune: {unknown_op('op', op, known)}")
    tensors = tensors_of((args, kwargs))
    if not tensors:
        raise ValueError(f"tune: {op} must be given its tensors, but got none")
    if any(t.is_meta for t in tensors):
        raise ValueError(
            f"tune: the tensors of {op} must hold values, because every configuration runs, but "
            "one is on the meta device; use torchweld.explain for it"
        )
    return tensors


def _checked_configs(configs: Any, kernels: list[KernelChoice]) -> list[dict[str, Any]] | None:
    if configs is None:
        return None
    columns: dict[str, None] = {"choice": None}
    for kernel in kernels:
        for found in tables().candidates(kernel.family, kernel.numbers):
            columns.update(dict.fromkeys(found["columns"]))
    checked = [dict(config) for config in configs]
    unknown = [key for config in checked for key in config if key not in columns]
    if unknown:
        raise ValueError(
            f"tune: configs must be dicts of {', '.join(columns)}, but one has {unknown[0]!r}"
        )
    return checked


def tune(
    op: str,
    *args: Any,
    configs: Sequence[dict[str, int]] | None = None,
    remember: bool = False,
    rounds: int = 15,
    progress: bool | None = None,
    **kwargs: Any,
) -> TuneResult:
    """Times every configuration of `torchweld.<op>(*args, **kwargs)` on the GPU: a grid search.

    Each configuration runs once first, and its answer is compared with the op in float64 on the CPU
    (large calls: with the default configuration's answer). Wrong ones are not timed. The others run
    alternately, with L2 flushed before each call, and their medians are compared. A configuration
    that the GPU or the shapes do not allow stays in the table with its reason. If an op has several
    kernels, for example `linear_backward`, they are searched one after the other. Ctrl-C ends
    the search and keeps the results so far. A configuration more than 8 times slower than the
    fastest so far is timed once.

    Args:
        op: the name of an op, e.g. "gated_linear"; a backward op under its own name.
        *args: its arguments, on a GPU.
        configs: the configurations to time: a list of dicts with columns of the table, for example
            `[{"block_m": 64, "block_n": 64}]`. Every match is timed; a dict without a match in this
            build is listed as such. None: all configurations.
        remember: whether to keep the fastest one, in this process and in the user's cache
            directory, for this GPU, dtype and shape class (exact sizes; numbers of rows and of
            heads up to the next power of two). Ops that run the same kernel share it.
        rounds: how often each configuration is timed.
        progress: whether to draw a bar on stderr; None: if stderr is a terminal.
        **kwargs: the op's keyword arguments.

    Returns:
        A `TuneResult`; print it, or take `.best`, `.to_pandas()`, `.plot(path)`, `.save(path)`.
        On the CPU, and for an op with one configuration, there is nothing to tune; `.note` says so.

    Raises:
        ValueError: there is no such op; the call has no tensor, or one on the meta device; rounds
            is below 1; a config has a column that the op's kernels lack.
        RuntimeError: the library or, on a GPU, its introspection module is not there, or the op
            refuses the arguments.

    Limits: one search at a time in a thread; other work on the GPU falsifies the times.

    Example::

        device = "cuda" if torch.cuda.is_available() else "cpu"  # on the CPU it only says so
        a, b = torch.randn(8, 512, 512, device=device), torch.randn(8, 512, 512, device=device)
        result = torchweld.tune("bmm", a, b, rounds=3)
        print(result)
    """
    tensors = _checked(op, args, kwargs)
    floats = [t for t in tensors if t.is_floating_point()] or tensors
    if rounds < 1:
        raise ValueError(f"tune: rounds must be at least 1, but got {rounds}")
    options = [f"{k}={v!r}" for k, v in kwargs.items() if not isinstance(v, Tensor)]
    shapes = [f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for t in tensors]
    result = TuneResult(
        op,
        ", ".join(shapes + options),
        dtype=str(floats[0].dtype).removeprefix("torch."),
        version=cache.version(),
        gpu=_gpu_name(tensors[0]),
    )
    if not result.gpu:
        result.note = (
            f"torchweld.tune: there is nothing to tune for {op} on the CPU, whose kernels have one "
            "configuration; tune it on a CUDA GPU"
        )
        return result
    function = getattr(library.ops, op)
    with torch.no_grad(), torch.cuda.device_of(tensors[0]):
        kernels = _tune(result, function, args, kwargs, tensors, configs, rounds, progress)
        if remember and kernels:
            _remember(result, kernels)
    return result


def _tune(
    result: TuneResult,
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[Tensor],
    configs: Sequence[dict[str, int]] | None,
    rounds: int,
    progress: bool | None,
) -> list[KernelChoice]:
    """Fills the result; returns the kernels that were searched."""

    def call() -> Any:
        return function(*args, **kwargs)

    bar = Progress(f"tune {result.op}", progress)
    kernels: list[KernelChoice] = []
    try:
        outputs, records = observe(call)
        kernels = kernel_choices(records)
        if not kernels:
            result.note = (
                f"torchweld.tune: {result.op} has one configuration for these arguments, which "
                "their sizes give, so there is nothing to tune"
            )
            return kernels
        wanted = _checked_configs(configs, kernels)
        work = sum(flops(p.family, p.problem) or 0.0 for p in kernels)
        longest = max(sum_length(p.family, p.problem) for p in kernels)
        answers = Answers(function, args, kwargs, outputs, work, longest)
        result.against = answers.against
        moved = bytes_of([*tensors, *outputs])
        Search(result, call, rounds, bar).run(kernels, answers, moved, wanted)
    except KeyboardInterrupt:
        result.interrupted = True
        result.note = "interrupted: what had not run by then has no time"
    except _GpuStoppedError as error:
        result.interrupted = True
        result.note = f"a configuration stopped the GPU, start a new process: {error}"
    finally:
        bar.close()
        result.sort()
    for row in result.rows:
        if row["us"] is None and not row["reason"]:
            row["reason"] = "not timed: the search was interrupted"
    return kernels


def _remember(result: TuneResult, kernels: list[KernelChoice]) -> None:
    if result.interrupted:
        result.note += "; nothing was remembered"
        return
    entries = []
    for i, kernel in enumerate(kernels):
        best = result.best_of_part(i)
        if best is None:
            continue
        entries.append(
            cache.entry(
                result.op,
                result.gpu,
                result.dtype,
                kernel.family,
                kernel.numbers,
                best["choice"],
                best["us"],
            )
        )
    note = cache.remember(entries)
    result.note = "; ".join(filter(None, [result.note, note]))
