"""Cases that run in the processes of a mesh, which are started once for all cases of a module.

A module of cases has `cases(mesh)`: by name, functions of a DeviceMesh that raise where something
is wrong. `said_by` starts the processes and returns what each case said, "" for nothing; conftest's
`check_case` asserts that one said nothing.

The processes compute on the CPU and talk over gloo. With TORCHWELD_TEST_DISTRIBUTED=nccl each has a
GPU and they talk over NCCL, in float32, the dtype of the CUDA kernels; meshes of more
processes than there are GPUs are skipped.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

BACKEND = os.environ.get("TORCHWELD_TEST_DISTRIBUTED", "gloo")
if BACKEND not in ("gloo", "nccl"):
    raise ValueError(f"TORCHWELD_TEST_DISTRIBUTED must be gloo or nccl, but got {BACKEND!r}")
DEVICE = "cpu" if BACKEND == "gloo" else "cuda"
WIDE = torch.float64 if BACKEND == "gloo" else torch.float32
# Tolerances for results that differ in the order of additions only.
TOLERANCE = {torch.float64: {"rtol": 0, "atol": 1e-12}, torch.float32: {"rtol": 1e-5, "atol": 1e-5}}
TIGHT = TOLERANCE[WIDE]
MESHES = {"2": (2,), "2x2": (2, 2)}
SHAPES = {**MESHES, "4": (4,)}  # with the mesh that few cases use
SECONDS = 30  # that a collective may take
ALL_SECONDS = 480  # for all cases of a mesh on a busy machine


def _work(rank: int, module: str, mesh: str, names: list[str], folder: str) -> None:
    torch.set_num_threads(1)
    shape = SHAPES[mesh]
    size = prod(shape)
    if DEVICE == "cuda":
        # The example and transformers read these variables.
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # raises after SECONDS, as gloo does
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # the whole host shares multicast
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        torch.cuda.set_device(rank)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the host may have GPUs
    dist.init_process_group(
        BACKEND,
        store=dist.FileStore(f"{folder}/store", size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=SECONDS),
        device_id=torch.device(DEVICE, rank) if DEVICE == "cuda" else None,
    )
    device_mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("outer", "inner")[: len(shape)])
    said, known = {}, importlib.import_module(module).cases(mesh)
    # A collection would pass over the objects of torch and transformers: a tenth of the time.
    gc.collect()
    gc.freeze()
    # Without a GPU, torch.manual_seed keeps a traceback for later, which takes 3 ms.
    seed = torch.manual_seed if DEVICE == "cuda" else torch.default_generator.manual_seed
    for name in names:
        seed(0)
        try:
            known[name](device_mesh)
            said[name] = ""
        except Exception:
            said[name] = traceback.format_exc()
    Path(f"{folder}/{rank}.json").write_text(json.dumps(said))
    dist.barrier()  # the first process to exit would close the connections of the others
    dist.destroy_process_group()


def _run_cases(module: str, mesh: str, names: list[str], folder: Path) -> dict[str, str]:
    """The first process's traceback of each case, empty where the case passed in all processes."""
    size = prod(SHAPES[mesh])
    if DEVICE == "cuda":
        start = multiprocessing.get_context("spawn")  # a fork of the server may have no GPU
    else:
        # The fork server imports torch and transformers once for all processes.
        start = multiprocessing.get_context("forkserver")
        models = (f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama"))
        start.set_forkserver_preload([__name__, "placements", "fully_sharded", *models])
    processes = [
        start.Process(target=_work, args=(rank, module, mesh, names, str(folder)), daemon=True)
        for rank in range(size)
    ]
    end = time.monotonic() + ALL_SECONDS
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(0, end - time.monotonic()))
    for process in processes:
        process.kill()
    files = [folder / f"{rank}.json" for rank in range(size)]
    done = [json.loads(file.read_text()) for file in files if file.exists()]
    if len(done) < size:
        lost = f"{size - len(done)} of {size} processes failed, or took more than {ALL_SECONDS} s"
        return dict.fromkeys(names, lost)
    return {name: next((each[name] for each in done if each[name]), "") for name in names}


@functools.cache
def said_by(module: str, mesh: str, base: Path) -> dict[str, str]:
    """The messages of a mesh's processes by case; one of pytest's workers runs them for all."""
    size, gpus = prod(SHAPES[mesh]), torch.cuda.device_count()
    if DEVICE == "cuda" and gpus < size:
        pytest.skip(f"the mesh of {mesh} needs {size} GPUs, but there are {gpus}")
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, done = base / f"{module}_{mesh}", base / f"{module}_{mesh}.json"
    try:
        folder.mkdir()
    except FileExistsError:
        end = time.monotonic() + ALL_SECONDS + 10
        while not done.exists() and time.monotonic() < end:
            time.sleep(0.2)
    else:
        names = list(importlib.import_module(module).cases(mesh))
        (folder / "said").write_text(json.dumps(_run_cases(module, mesh, names, folder)))
        (folder / "said").rename(done)
    return json.loads(done.read_text())


class Names(TorchDispatchMode):
    """A list of the ops that run in the block."""

    def __enter__(self) -> list[str]:
        super().__enter__()
        self.names: list[str] = []
        return self.names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def shared_folder() -> Iterator[str]:
    """A folder of all processes, for as long as they are in the block."""
    with tempfile.TemporaryDirectory() as mine:
        folders = [mine]
        dist.broadcast_object_list(folders, 0)
        yield folders[0]
        dist.barrier()


@contextlib.contextmanager
def refused(error: type[Exception], sentence: str) -> Iterator[None]:
    """Like pytest.raises, for processes that have no pytest: a part of the sentence."""
    try:
        yield
    except error as caught:
        assert sentence in str(caught), caught
    else:
        raise AssertionError(f"no error: {sentence}")


def expected_skips(report: Any) -> bool:
    """Whether all skipped modules are float64 norms or layers that transformers shards."""
    return all(
        any(word in reason for word in ("float64", "replaced on", "DTensor"))
        for _, reason in report.skipped
    )
