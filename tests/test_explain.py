"""explain: the kernel of every op, on meta tensors, without a GPU and without a launch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import torchweld
import torchweld._library as library
from choices_helpers import (  # noqa: F401
    _C,
    H200,
    dry_records,
    explain_module,
    meta,
    named,
    nothing_is_left_behind,
    ops,
)
from commands import python
from refusals import SPECS, cases
from samples import BF16, F32, F64, SAMPLES

if library.build_facts().get("cuda") is None:
    pytest.skip("a CPU-only build explains no CUDA kernel", allow_module_level=True)

# Torch's ops compute calls that Hopper's kernels don't take, and no sample has their 16-byte rows.
BY_TORCH = {f"linear_cross_entropy_exponentials_{end}" for end in ("forward", "backward")}
ALL = [op for op in SAMPLES if op not in BY_TORCH]
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to explain for")


def on_meta(value):
    """Laid out as the given tensor, without memory."""
    return value.to("meta") if isinstance(value, Tensor) else value


def meta_call(args, kwargs):
    return [on_meta(a) for a in args], {name: on_meta(value) for name, value in kwargs.items()}


def sample_calls(op, device="cpu"):
    """Every sample of an op with its id, in float32 and bfloat16."""
    for s in SAMPLES[op]:
        for dtype in (F32, BF16):
            yield (f"{s.id} {dtype}", *s.make(device, dtype))


# Every op


def test_exponentials_have_kernels():
    x, weight, y = (
        torch.empty(*shape, dtype=BF16, device="meta") for shape in ((9, 64), (100, 64), (9, 128))
    )
    target, factor = torch.empty(9, dtype=torch.int64, device="meta"), torch.empty(9, device="meta")
    name = "linear_cross_entropy_exponentials_"
    forward = torchweld.explain(name + "forward", x, weight, target)
    assert forward.kernel == "CUDA"
    args = [torch.empty((), device="meta"), x, weight, target, y, factor]
    backward = torchweld.explain(name + "backward", *args, output_mask=[True, True, False])
    assert "matmul engine (wgmma)" in backward.kernel


@pytest.mark.parametrize("op", ALL)
def test_every_sample_has_a_kernel(op):
    for name, args, kwargs in sample_calls(op):
        args, kwargs = meta_call(args, kwargs)
        explanation = torchweld.explain(op, *args, **kwargs)
        assert explanation.op == op and explanation.kernel and explanation.why, name
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        wanted = any(kwargs.get("output_mask", [True]))
        if explanation.kernel == "none":
            assert explanation.why == "nothing to compute", name
            assert not wanted or any(t.numel() == 0 for t in tensors), name
        if explanation.source:
            assert explanation.source == "heuristic" and explanation.tile, name
        assert ops._end_observing() == [], "an observation was not ended"


@pytest.mark.parametrize("op", ALL)
def test_a_dry_run_tells_what_is_in_the_tables(op):
    """The launch needs no more threads and memory than an H100 has."""
    for name, args, kwargs in sample_calls(op):
        args, kwargs = meta_call(args, kwargs)
        for record in dry_records(op, *args, **kwargs):
            for _, shared_bytes, threads, *_ in record["kernels"]:
                assert 1 <= threads <= 1024 and 0 <= shared_bytes <= H200["shared_limit"], name
            if not record["family"]:
                assert record["kernels"] and record["choice"] == "", name
                continue
            numbers = record["problem"]
            assert numbers[-len(H200) :] == list(H200.values()), "the GPU that is assumed"
            own = _C.choose(record["family"], numbers)
            assert record["choice"] == own["choice"] and record["kernel"] == own["kernel"], name
            assert record["columns"] == own["columns"] and own["refusal"] == "", name
            assert record["kernels"], "it launches what it chose"


@without_gpu
def test_a_dry_run_assumes_an_h100_or_an_a100():
    x = meta(512, 1024)
    (h100,) = dry_records("linear", x, x)
    (a100,) = dry_records("linear", x, x, device=-2)
    assert named("matmul", h100["problem"])["wgmma"] and "wgmma" in h100["kernel"]
    facts = named("matmul", a100["problem"])
    assert (facts["sms"], facts["shared_limit"], facts["wgmma"]) == (108, 166912, 0)
    assert "mma.sync" in a100["kernel"]


@pytest.mark.parametrize("offset", [0, 1, 4])
def test_a_dry_run_knows_how_a_view_is_aligned(offset):
    """The rows of y begin at a 16-byte boundary, those of x `offset` elements behind one."""
    (record,) = dry_records("softmax", meta(3, 1032, dtype=F32)[:, offset : offset + 1024])
    facts = named("softmax", record["problem"])
    assert facts["aligned"] == 1 and facts["in_phase"] == int(offset % 4 == 0)


def test_every_reason_is_a_sentence_and_nothing_is_rejected_twice():
    for s in (s for op in ALL for s in SAMPLES[op]):
        args, kwargs = meta_call(*s.make("cpu", BF16))
        explanation = torchweld.explain(s.op, *args, **kwargs)
        names = [name for name, _ in explanation.rejected]
        assert len(set(names)) == len(names) and all(reason for _, reason in explanation.rejected)
        assert explanation.tile.get("name") not in names


SHIM = """
#include <stdio.h>
#include <unistd.h>
#define REACHED(name) \\
  int name() { fprintf(stderr, "reached " #name "\\n"); _exit(99); }
REACHED(cudaLaunchKernel)
REACHED(cudaLaunchKernelExC)
REACHED(cudaMemsetAsync)
REACHED(cudaMemcpyAsync)
REACHED(cudaMalloc)
REACHED(cudaMallocAsync)
REACHED(cudaFuncSetAttribute)
"""

EXPLAIN_ALL = """
import ctypes, torch, torchweld
from samples import SAMPLES
count = 0
for of in (s for of_op in SAMPLES.values() for s in of_op):
    for dtype in (torch.float32, torch.bfloat16):
        args, kwargs = of.make("cpu", dtype)
        on_meta = lambda v: v.to("meta") if isinstance(v, torch.Tensor) else v
        torchweld.explain(of.op, *map(on_meta, args), **{k: on_meta(v) for k, v in kwargs.items()})
        count += 1
print(count, flush=True)
ctypes.CDLL(None).cudaMemsetAsync()
"""


@without_gpu
def test_nothing_is_launched(tmp_path):
    """Overrides of the CUDA runtime's functions end the process at the first call, the script's."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("a C compiler on Linux was not found")
    (tmp_path / "shim.c").write_text(SHIM)
    shim = tmp_path / "shim.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", shim, tmp_path / "shim.c"], check=True)
    folders = [Path(torchweld.__file__).parent.parent, Path(__file__).parent]
    path = os.pathsep.join(map(str, folders))
    done = python("-c", EXPLAIN_ALL, LD_PRELOAD=str(shim), PYTHONPATH=path)
    assert done.stdout.split() == [str(2 * sum(map(len, SAMPLES.values())))], done.stderr
    assert done.returncode == 99, "the shim is in the way"


# Observation


class Spy:
    """The library, remembering which of its private ops were called."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name):
        if name.startswith("_"):
            self.asked.append(name)
        return getattr(ops, name)


def test_observation_ends_after_a_refusal_too(monkeypatch):
    spy = Spy()
    monkeypatch.setattr(explain_module.library, "ops", spy)
    torchweld.explain("softmax", meta(2, 3))
    assert spy.asked == ["_begin_dry_run", "_end_observing"]
    with pytest.raises(RuntimeError):
        torchweld.explain("linear", meta(2, 3), meta(4, 5))
    assert spy.asked == ["_begin_dry_run", "_end_observing"] * 2


def test_a_call_after_it_computes():
    torchweld.explain("softmax", meta(2, 3))
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        x = torch.randn(2, 3, device=device)
        torch.testing.assert_close(torchweld.softmax(x), torch.softmax(x, -1))


# The text of explain


def test_on_the_cpu():
    on_cpu = torchweld.explain("linear", torch.ones(2, 3), torch.ones(4, 3))
    assert on_cpu.kernel == "CPU" and "float32 (2, 3) on cpu" in str(on_cpu)
    assert on_cpu.gpu == "" and "gpu" not in str(on_cpu).split()


def test_the_gpu_that_is_assumed_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    explanation = torchweld.explain("softmax", meta(4, 64))
    assert explanation.gpu == "NVIDIA H100 (assumed: there is no GPU here)"
    assert f"gpu       {explanation.gpu}" in str(explanation).splitlines()[-1]
    assert explanation.to_dict()["gpu"] == explanation.gpu


def test_text():
    lines = str(torchweld.explain("softmax", meta(4, 1000, dtype=F32))).splitlines()
    heads = ["kernel", "tile", "why", "source", "gpu"] + ["rejected"] * 5
    assert lines[0] == "torchweld::softmax(float32 (4, 1000) on meta)"
    assert [line.split()[0] for line in lines[1:]] == heads
    assert all(line.startswith("  ") and line[12] != " " for line in lines[1:])
    assert lines[1] == "  kernel    rows in registers (one read)"
    assert lines[2].startswith("  tile      name=tile 128x2, threads=128, loads=2, ")
    assert lines[3] == "  why       the first tile that holds a row of 1000 elements"
    assert lines[4] == "  source    heuristic"
    assert lines[6] == "  rejected  tile 32x1: holds 128 elements, the row has 1000"


def test_text_of_keywords_and_of_nothing_to_compute():
    scores = meta(2, 3, 4, 4)
    assert "causal_softmax(bfloat16 (2, 3, 4, 4) on meta, scale=0.5)" in str(
        torchweld.explain("causal_softmax", scores, scale=0.5)
    )
    empty = torchweld.explain("softmax", meta(0, 4))
    assert str(empty).splitlines()[1:3] == ["  kernel    none", "  why       nothing to compute"]
    assert empty.tile == {} and empty.source == "" and empty.rejected == []


@pytest.mark.parametrize(
    "op",
    [
        "linear",
        "layer_norm_linear",
        "layer_norm_linears",
        "rms_norm_linear",
        "rms_norm_linears",
        "folded_layer_norm_linear",
        "gated_linear",
        "gated_linear_pair",
        "gated_mlp",
    ],
)
def test_it_tells_that_async_tensor_parallelism_passes_by(op):
    from torch._inductor import config

    if op.endswith("_linears"):  # samples.py has no lists of weights
        args, kwargs = (torch.ones(3, 8), [torch.ones(5, 8)], [torch.ones(5)]), {}
    else:
        args, kwargs = SAMPLES[op][0].make("cpu")
    assert "parallel" not in str(torchweld.explain(op, *args, **kwargs))
    # monkeypatch would delete the entry at the end, and inductor would miss it.
    with config.patch(_micro_pipeline_tp=True):
        text = str(torchweld.explain(op, *args, **kwargs))
        assert "  parallel  torch.compile overlaps collectives with torch's own mm alone" in text
        assert torchweld.explain("softmax", meta(8, 16)).parallel == ""


def test_dtensors_are_explained_by_their_parts():
    dist = torch.distributed
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("this torch has no gloo")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        parts = torch.empty(8, 16), torch.empty(4, 16)
        x, weight = (
            DTensor.from_local(t, mesh, [p], run_check=False)
            for t, p in zip(parts, (Replicate(), Shard(0)), strict=True)
        )
        assert weight.shape == (16, 16)
        explained = torchweld.explain("linear", x, weight)
    finally:
        dist.destroy_process_group()
    assert explained.call == "float32 (8, 16) on cpu, float32 (4, 16) on cpu"
    assert (
        explained.parallel.startswith("DTensors: this process's parts")
        and "nn.Linear" in explained.parallel
    )


def test_float64_has_no_kernel_on_a_gpu():
    explanation = torchweld.explain("softmax", meta(2, 3, dtype=F64))
    assert (explanation.kernel, explanation.why) == ("none", "float64 runs on the CPU alone")


# Bad calls


@pytest.mark.parametrize("op", list(SPECS))
def test_bad_arguments_are_refused_in_the_ops_own_sentence(op):
    """The error equals that of the call on the CPU, except for the device."""
    cases_seen = 0
    for case in cases(op):
        given = case.good_call("cpu")
        case.change(given)
        tensors = [t for t in given.values() if isinstance(t, Tensor)]
        if any(t.is_meta or t.requires_grad for t in tensors) or not tensors:
            continue  # all of explain's are on one device, and none is recorded
        with pytest.raises(RuntimeError) as on_cpu:
            getattr(ops, op)(**given)
        with pytest.raises(RuntimeError) as explained:
            torchweld.explain(op, **meta_call((), given)[1])
        as_on_cpu = str(explained.value).replace(" on meta", " on cpu")
        assert as_on_cpu == str(on_cpu.value), case.name
        cases_seen += 1
    assert cases_seen >= 4


def test_bad_calls():
    for op in ("sofmax", "torchweld::softmax", torchweld.softmax):
        with pytest.raises(ValueError, match="^explain: op must be .*; use 'softmax'$"):
            torchweld.explain(op, meta(2))
    with pytest.raises(ValueError, match="op must be one of .*softmax.* but got '_end_observing'"):
        torchweld.explain("_end_observing", meta(2))
    with pytest.raises(ValueError, match="but got 'varlen_attention'; use 'attention'"):
        torchweld.explain("varlen_attention", meta(2))
    with pytest.raises(ValueError, match="must be given its tensors"):
        torchweld.explain("softmax")
    with pytest.raises(RuntimeError, match="softmax.* 1 argument"):
        torchweld.explain("softmax", meta(2, 3), dim=0)


# On a GPU


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="an observed call needs a GPU")


@needs_gpu
@pytest.mark.parametrize("op", ALL)
def test_a_dry_run_tells_what_runs(op):
    from torchweld.tuning.observe import observe

    device = torch.cuda.current_device()
    facts = ("family", "part", "problem", "choice", "source", "kernel", "columns")
    for name, args, kwargs in sample_calls(op, "cuda"):
        _, seen = observe(lambda args=args, kwargs=kwargs: getattr(ops, op)(*args, **kwargs))
        explained = [r for r in dry_records(op, *args, device=device, **kwargs) if r["family"]]
        found, ran = ([[r[f] for f in facts] for r in records] for records in (explained, seen))
        assert found == ran, name
        for dry, real in zip(explained, seen, strict=True):
            assert [k[2] for k in dry["kernels"]] == [k[2] for k in real["kernels"]], "threads"
        explanation = torchweld.explain(op, *args, **kwargs)
        assert explanation.gpu == torch.cuda.get_device_name(), name


@needs_gpu
def test_a_dry_run_on_a_gpu_launches_and_allocates_nothing():
    """A graph that is captured meanwhile stays empty."""
    calls = [(s.op, *s.make("cuda", BF16)) for op in ALL for s in SAMPLES[op]]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.warns(UserWarning, match="CUDA Graph is empty"), torch.cuda.graph(graph):
        # The capture itself has allocated the state of torch's random numbers.
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for op, args, kwargs in calls:
            torchweld.explain(op, *args, **kwargs)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@needs_gpu
def test_the_facts_of_the_gpu():
    from torchweld.tuning.observe import observe

    _, (record,) = observe(lambda: ops.softmax(torch.randn(3, 5, device="cuda")))
    facts = named("softmax", record["problem"])
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    assert facts["sms"] == properties.multi_processor_count
    assert facts["shared_limit"] == properties.shared_memory_per_block_optin
    assert facts["clusters"] == facts["tma"] <= (properties.major >= 9)
    assert facts["clusters_of_16"] <= facts["clusters"]
    assert facts["wgmma"] <= (facts["tma"] and properties.major == 9)
    (dry,) = dry_records("softmax", meta(3, 5, dtype=F32), device=torch.cuda.current_device())
    assert dry["problem"] == record["problem"]
