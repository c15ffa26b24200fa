"""Devices, seeds, the hypothesis profile, and the summary of ratios and skips."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

import pytest
import torch

import numerics

try:
    from hypothesis import settings
except ImportError:
    settings = None
else:
    # Derandomised: the same cases on every run, so a failure is never a matter of luck.
    settings.register_profile(
        "torchweld", derandomize=True, max_examples=60, deadline=None, database=None
    )
    settings.load_profile("torchweld")


def _take_one_gpu() -> None:
    """Gives each of xdist's processes one of the GPUs; meshes of NCCL see all.

    CUDA must not be initialised yet.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    gpus = torch.cuda.device_count()  # asks NVML
    one_each = os.environ.get("TORCHWELD_TEST_DISTRIBUTED") != "nccl"
    if worker and gpus > 1 and one_each:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[int(worker) % gpus]


_take_one_gpu()
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def _keep_freed_memory() -> None:
    """Large tensors use memory again that earlier ones have touched.

    By default glibc returns it to the kernel, which clears each page when it is touched anew: a
    third of the time of the references in float64.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        trim_threshold, mmap_max = -1, -4  # of malloc.h
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, 2**31 - 1)


def pytest_configure(config: pytest.Config) -> None:
    _keep_freed_memory()
    # Two workers that each start a thread per core only get in each other's way, and so do the
    # processes that tests start: with waiting threads a page of docs/ takes 12 s of processor time
    # and not 3 s.
    if "PYTEST_XDIST_WORKER" in os.environ:
        workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        threads = max(1, (os.cpu_count() or 1) // workers)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)
    # Reduced-precision sums and TF32 would make the yardstick worse than the op.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`device` is each device, and `dtype` each dtype of its ops if the test lists none."""
    names, marks = metafunc.fixturenames, metafunc.definition.iter_markers("parametrize")
    if "device" in names and "dtype" in names and not any("dtype" in m.args[0] for m in marks):
        from samples import dtypes

        metafunc.parametrize(("device", "dtype"), [(d, t) for d in DEVICES for t in dtypes(d)])
    elif "device" in names:
        metafunc.parametrize("device", DEVICES)


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> None:
    """Collections pass over the objects of one page alone.

    A full one would pass over millions of objects of pytest, transformers and Dynamo, which takes
    up to 1.3 s.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    """The compilations of one test do not count towards the recompilation limit of another.

    After a compilation, Dynamo would flush the processor's caches and time its guards for a log,
    which takes 20 ms.
    """
    if guards := sys.modules.get("torch._dynamo.guards"):
        guards.profile_guard_manager = lambda *_: 0.0
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture
def attention_device(device: str) -> str:
    """A device on which this build has the attention op."""
    from torchweld._library import ops

    q = torch.zeros(1, 1, 2, 4, device=device)
    try:
        ops.attention(q, q, q, causal=True)
    except NotImplementedError as error:
        pytest.skip(str(error))
    return device


@pytest.fixture
def check_case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, str], None]:
    """check_case(module, mesh, case) asserts that a case passed in all processes of its mesh."""
    from meshes import said_by

    def check(module: str, mesh: str, case: str) -> None:
        complaint = said_by(module, mesh, tmp_path_factory.getbasetemp())[case]
        assert not complaint, complaint

    return check


@pytest.fixture(autouse=True)
def _kernel(request: pytest.FixtureRequest) -> None:
    """Skips a test on a device where the kernels of its op are not in the build.

    The op is the page's OP, the test's parameter `op`, or the `op` of another parameter.
    """
    if "device" not in request.fixturenames:
        return
    params = request.node.callspec.params
    ops = (getattr(p, "op", None) for p in params.values())
    for op in (getattr(request.module, "OP", None), params.get("op"), *ops):
        if op is not None:
            from samples import need_kernel

            need_kernel(op, params["device"])


@pytest.fixture(autouse=True)
def _no_warning_given_yet() -> None:
    """Warnings that are given once per reason are given in every test."""
    if fallback := sys.modules.get("torchweld.integrations.attention.fallback"):
        fallback._warned.clear()


@pytest.fixture(autouse=True)
def _seed() -> None:
    # Without a GPU, torch.manual_seed keeps a traceback for later, which takes 3 ms.
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)


Rows = list[tuple[str, str, numerics.Ratios]]


def _largest(rows: Rows) -> Rows:
    """The largest ratio of each rule, by result and dtype. A label starts with the result."""
    highest: dict[tuple[str, str], numerics.Ratios] = defaultdict(dict)
    for label, dtype, ratios in rows:
        row = highest[label.split()[0].split("-")[0], dtype]
        for rule, ratio in ratios.items():
            row[rule] = max(row.get(rule, 0.0), ratio)
    return [(*key, row) for key, row in sorted(highest.items())]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    """Hand the observed ratios to the report, which travels between worker processes."""
    numerics.observed.clear()
    try:
        return (yield)
    finally:
        if numerics.observed and item.module.__name__ != "test_numerics":
            item.user_properties.append(("ratios", _largest(numerics.observed)))


def pytest_terminal_summary(terminalreporter) -> None:
    rows: Rows = []
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "call":
                given = getattr(report, "user_properties", ())
                rows += [row for name, value in given if name == "ratios" for row in value]
    if rows:
        terminalreporter.section("observed error / allowed error, the largest of each result")
        for label, dtype, row in _largest(rows):
            cells = "".join(f"  {rule} {ratio:5.3f}" for rule, ratio in row.items())
            terminalreporter.write_line(f"{label:44} {dtype:9}{cells}")
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", ()):
        longrepr = report.longrepr
        reasons[longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)] += 1
    if reasons:
        terminalreporter.section("skipped, by reason")
        for reason, count in reasons.most_common():
            terminalreporter.write_line(f"{count:5}  {reason.removeprefix('Skipped: ')}")
